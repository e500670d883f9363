"""What tests of runs share: stopping one between two units, and seeing whether its folder was touched."""

from pathlib import Path
from typing import Any

import pytest

from fimaq.reconstruct.algorithm import Reconstruction


def stop_at_unit(number: int, patch: pytest.MonkeyPatch) -> None:
    """Interrupt the run, as Ctrl-C does, when unit `number` (from 0) would begin."""
    reconstruct = Reconstruction.reconstruct

    def interrupted(self: Reconstruction, index: int, report: Any) -> Any:
        if index == number:
            raise KeyboardInterrupt
        return reconstruct(self, index, report)

    patch.setattr(Reconstruction, "reconstruct", interrupted)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
