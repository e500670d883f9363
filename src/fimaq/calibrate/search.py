"""Range search: the scale and zero point that disturb a layer's output least.

Candidates are tried all at once, as one more tensor dimension: first a coarse grid of geometric shrinkages of
the observed range times zero points, then a fine grid around each winner. An error function
maps candidate scales and zero points (C, *groups) to errors (C, *groups); groups are output channels for
weights and (), heads or tokens for activations.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ErrorOf = Callable[[Tensor, Tensor], Tensor]

COARSE_SHRINK = tuple(0.62**step for step in range(11))
FINE_SHRINK = tuple(0.79 * 1.06**step for step in range(9))
TOKEN_SHRINK = tuple(0.88**step for step in range(-5, 19))
COARSE_ZERO_POINTS = 7
CENTRED = -1
"""Stands for the zero point that keeps the observed range centred; right while nothing is clipped."""
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}
"""Largest intermediate of the search, in elements: bounds memory, and keeps a CPU inside its cache."""


def search_range(
    low: Tensor, high: Tensor, levels: int, error_of: ErrorOf, fixed: float | None = None
) -> tuple[Tensor, Tensor]:
    """Best (scale, zero_point), each of the groups' shape. `low` <= 0 <= `high`: observed extremes (*groups).

    With `fixed`, that is the zero point of all groups, and only the scale is searched.
    """
    spacing = levels / (COARSE_ZERO_POINTS - 1)
    zero_points: list[float] = [CENTRED, *(round(i * spacing) for i in range(COARSE_ZERO_POINTS))]
    near = {0, 1, round(spacing / 4), round(spacing / 2)}
    widest = (high - low) / levels
    if fixed is not None:
        zero_points, near = [fixed], {0}
        widest = torch.maximum(-low / max(fixed, 1), high / (levels - fixed))
    widest = widest.clamp_min(torch.finfo(low.dtype).tiny * 2**20)
    shrink, given = _grid(COARSE_SHRINK, zero_points, widest)
    scale = widest * shrink
    centred = torch.round(levels / 2 - (low + high) / 2 / scale)
    zero_point = torch.where(given == CENTRED, centred, given).clamp_(0, levels)
    scale, zero_point = _best(scale, zero_point, error_of)

    shrink, shift = _grid(FINE_SHRINK, sorted(near | {-step for step in near}), widest)
    return _best(scale * shrink, (zero_point + shift).clamp_(0, levels), error_of)


def search_scale(scale: Tensor, zero_point: Tensor, groups: torch.Size, error_of: ErrorOf) -> Tensor:
    """Best scale for each of the finer `groups`, around `scale`, with the zero point kept."""
    start = scale.expand(groups)
    shrink, _ = _grid(TOKEN_SHRINK, [0], start)
    return _best(start * shrink, zero_point.expand(groups).expand(len(shrink), *groups), error_of)[0]


def in_chunks(error_of: ErrorOf, elements: int) -> ErrorOf:
    """The same error function, computed for as many candidates at a time as fit into memory.

    `elements`: size of the largest intermediate for one candidate.
    """
    at_once: int | None = None

    def chunked(scale: Tensor, zero_point: Tensor) -> Tensor:
        nonlocal at_once
        at_once = at_once or max(1, CHUNK_ELEMENTS[scale.device.type] // max(1, elements))
        while True:
            parts = zip(scale.split(at_once), zero_point.split(at_once), strict=True)
            try:
                return torch.cat([error_of(s, z) for s, z in parts])
            except torch.cuda.OutOfMemoryError:
                if at_once == 1:
                    raise
            at_once //= 2
            torch.cuda.empty_cache()

    return chunked


def _grid(shrinks: tuple[float, ...], shifts: Sequence[float], like: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of the two lists, as two tensors (C, 1, ...) that broadcast against (C, *groups)."""
    pairs = torch.cartesian_prod(
        torch.tensor(shrinks, dtype=like.dtype), torch.tensor(shifts, dtype=like.dtype)
    ).to(like.device)
    return tuple(column.view(-1, *[1] * like.dim()) for column in pairs.unbind(1))  # type: ignore[return-value]


def _best(scale: Tensor, zero_point: Tensor, error_of: ErrorOf) -> tuple[Tensor, Tensor]:
    """For every group, the candidate (along dimension 0) with the smallest error."""
    winner = error_of(scale, zero_point).nan_to_num(nan=torch.inf).argmin(0, keepdim=True)
    return scale.gather(0, winner)[0], zero_point.gather(0, winner)[0]
