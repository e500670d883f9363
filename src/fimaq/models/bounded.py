"""Building what a file describes, without letting the file decide how much memory that takes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fimaq.errors import InputError

FROM_SIZES = ("empty", "zeros", "ones", "full", "rand", "randn", "empty_strided", "new_empty", "new_zeros")
FROM_NUMBERS = ("arange", "linspace", "eye")
LEAST = 64
"""What a tensor counts for at least, so that millions of tiny ones come to an end as well."""
SPARE = 2**22
"""Values that may be made beside those that a file can hold: tables of positions, masks, random drafts."""
PER_BYTE = 16
"""Values that may be made for a byte of the file. It holds up to 4 weights, which may be drafted twice."""


class ValueLimit(TorchDispatchMode):
    """While it is entered, no more values are made than a file of `size` bytes has use for: InputError instead."""

    def __init__(self, size: int, what: str) -> None:
        super().__init__()
        self.left, self.what = SPARE + PER_BYTE * size, what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in FROM_SIZES:
            sizes = args[1] if name.startswith("new_") else args[0]
            self._make(math.prod(sizes))
        elif name in FROM_NUMBERS:
            self._make(int(max((abs(value) for value in args if isinstance(value, int | float)), default=0)))
        return func(*args, **(kwargs or {}))

    def _make(self, count: int) -> None:
        self.left -= max(LEAST, count)
        if self.left < 0:
            raise InputError(f"{self.what} describes a model that is far larger than its file")
