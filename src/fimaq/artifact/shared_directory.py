"""A run directory that the first rank holds and writes, and that all ranks read through it.

Ranks on other machines need not see the folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from fimaq.artifact.run_directory import CHECKPOINT, RunDirectory
from fimaq.ranks import Ranks, Stored


class SharedDirectory:
    """What a run needs of a `RunDirectory`, for every rank."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], resume: bool, same: Sequence[str], ranks: Ranks
    ) -> None:
        self.path = path
        self._ranks = ranks
        self._held: RunDirectory | None = None

        def create() -> Stored:
            self._held = RunDirectory.create(path, config, resume, same)
            return {}, self._held.complete

        self.complete: bool = ranks.from_rank(0, create)[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._held.close()

    @property
    def spill(self) -> Path | None:
        """Where this rank may put what does not fit into memory; None for a folder of the system's."""
        return self.path / CHECKPOINT if self._held is not None else None

    def event(self, kind: str, /, **fields: Any) -> None:
        if self._held is not None:
            self._held.event(kind, **fields)

    def save_stage(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        if self._held is not None:
            self._held.save_stage(name, tensors, metadata)

    def load_stage(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What `save_stage` kept under this name, or None, on every rank."""

        def read() -> Stored:
            assert self._held is not None
            return self._held.load_stage(name) or ({}, None)

        tensors, metadata = self._ranks.from_rank(0, read)
        return None if metadata is None else (tensors, metadata)

    def finish(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], metrics: Mapping[str, Any]
    ) -> None:
        if self._held is not None:
            self._held.finish(tensors, metadata, metrics)

    def read_model(self) -> Stored:
        def read() -> Stored:
            assert self._held is not None
            return self._held.read_model()

        return self._ranks.from_rank(0, read)

    def read_metrics(self) -> dict[str, Any]:
        def read() -> Stored:
            assert self._held is not None
            return {}, self._held.read_metrics()

        metrics: dict[str, Any] = self._ranks.from_rank(0, read)[1]
        return metrics
