"""Curves for TensorBoard, written while a run goes on."""

import importlib.util
from pathlib import Path
from typing import Any

from fimaq.errors import InputError

FOLDER = "tensorboard"
SECONDS_UNTIL_WRITTEN = 10


def require_tensorboard() -> None:
    """Refuse, with what to install, where the package is absent."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("tensorboard was asked for but is not installed: pip install 'fimaq[tensorboard]'")


class Scalars:
    """Event files in RUN/tensorboard. A resumed run adds a file; TensorBoard shows all of them as one."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / FOLDER), flush_secs=SECONDS_UNTIL_WRITTEN)

    def loss(self, unit: str, iteration: int, loss: float) -> None:
        self._writer.add_scalar(f"loss/{unit}", loss, iteration)

    def unit(self, index: int, record: dict[str, Any], memory_bytes: int) -> None:
        """A finished unit, by its place in the chain: seconds, share of flipped weights, last loss, memory."""
        values = {
            "seconds": record["seconds"],
            "flipped_percent": 100 * record["flipped"] / max(1, record["weights"]),
            "memory_gib": memory_bytes / 2**30,
        }
        if record["losses"]:
            values["last_loss"] = record["losses"][-1][1]
        for name, value in values.items():
            self._writer.add_scalar(f"units/{name}", value, index)
        self._writer.flush()

    def final(self, fidelity: dict[str, float]) -> None:
        for name, value in fidelity.items():
            self._writer.add_scalar(f"final/{name}", value, 0)

    def close(self) -> None:
        self._writer.close()
