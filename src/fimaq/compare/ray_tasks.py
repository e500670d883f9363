"""The cells of a suite as Ray tasks: side by side on the cores and GPUs of this machine, or of a cluster.

Only names and settings travel; a cell reads its images and writes its run directory itself, so a cluster needs a
file system that all its machines share under the same paths, and fimaq installed on each.
"""

import contextlib
import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fimaq.compare.runner import RunCell, Waiting, Work, run_cell
from fimaq.compare.summary import CellResult
from fimaq.config import Config
from fimaq.errors import InputError
from fimaq.progress import Silent

ATTEMPTS = 2
"""A cell that fails is tried once more: a machine may have gone, or its memory may have been short."""
STORE_BYTES = 100 * 2**20
"""Ray's object store, which by default takes a third of the memory; what passes through it is a few kilobytes."""
SECONDS_TO_CANCEL = 20.0
SECONDS_TO_ANSWER = 10.0
PATHS = ("calib", "val", "weights", "class_map")


@dataclass(frozen=True)
class RayUse:
    """How cells are spread. `address`: of a running cluster; None: a Ray of its own on this machine."""

    address: str | None = None
    per_gpu: int = 1
    """Cells that share a GPU."""
    cpus: int = 1
    """Cores of one cell, and the threads it computes with."""


def require_ray(address: str | None = None) -> None:
    """Refuse a missing package, with what to install, and an address HOST:PORT that nobody listens at."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("ray was asked for but is not installed: pip install 'fimaq[ray]'")
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:  # Ray itself would wait for minutes, and then end the process
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(f"--ray-address {address}: no Ray cluster answers there: {error}") from None


def on_ray(run: RunCell, use: RayUse) -> Work:
    """Run cells as Ray tasks, each tried at most ATTEMPTS times. `run`: a function of an installed module."""

    def work(waiting: Sequence[Waiting], progress: Silent) -> Iterator[CellResult]:
        if not waiting:
            return
        with _connected(use) as ray:
            cores, gpus = (ray.cluster_resources().get(kind, 0) for kind in ("CPU", "GPU"))
            placed = [(_placed(one, gpus > 0), _resources(one.cell.config, gpus > 0, use)) for one in waiting]
            if use.cpus > cores:
                raise InputError(f"--cpus-per-cell {use.cpus} is more than the {cores:.0f} cores that Ray has")
            progress.note(
                f"Ray: {cores:.0f} cores, {gpus:.0f} GPUs; a running cell writes events.jsonl in its run directory"
            )
            yield from _results(ray, run, placed, progress)

    return work


def _results(
    ray: Any, run: RunCell, placed: Sequence[tuple[Waiting, dict[str, float]]], progress: Silent
) -> Iterator[CellResult]:
    # Ray's own retries are off: they would not cover a cell that fails by itself, and would not be counted.
    task = ray.remote(max_retries=0)(run_cell)
    running: dict[Any, tuple[Waiting, dict[str, float], int]] = {}

    def submit(one: Waiting, resources: dict[str, float], attempt: int) -> None:
        running[task.options(**resources).remote(one, run, Silent())] = (one, resources, attempt)

    for one, resources in placed:
        submit(one, resources, 1)
    try:
        while running:
            (reference,), _ = ray.wait(list(running), num_returns=1)
            one, resources, attempt = running.pop(reference)
            result = _fetched(ray, reference, one)
            if result.error is not None and attempt < ATTEMPTS:
                progress.note(f"{one.title} failed and is tried again: {result.error}")
                submit(one, resources, attempt + 1)
                continue
            if result.error is None:
                progress.note(f"{one.title}: {one.cell.name} is done")
            yield result
    finally:
        _cancel(ray, list(running))


def _fetched(ray: Any, reference: Any, one: Waiting) -> CellResult:
    """The task's result; a worker that died, or was ended for want of memory, is a cell that failed."""
    try:
        result: CellResult = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines[-1] if isinstance(error, ray.exceptions.RayTaskError) else lines[0]) if lines else ""
        return CellResult(one.cell.name, one.cell.labels, error=f"{type(error).__name__}: {reason}")
    return result


def _cancel(ray: Any, references: list[Any]) -> None:
    """End what still runs. Finished units of its cells are on disk, as after any other kill."""
    for reference in references:
        ray.cancel(reference, force=True)
    if references:
        ray.wait(references, num_returns=len(references), timeout=SECONDS_TO_CANCEL)


def _placed(one: Waiting, has_gpu: bool) -> Waiting:
    """The cell as another process can run it: paths in full, and the kind of device decided."""
    config, path = one.cell.config, Path(one.path).resolve()
    changed: dict[str, Any] = {name: getattr(config, name) for name in PATHS}
    changed = {name: value.resolve() for name, value in changed.items() if value is not None}
    changed["device"] = "cuda" if _wants_gpu(config, has_gpu) else "cpu"
    return replace(one, path=path, cell=replace(one.cell, config=config.model_copy(update=changed)))


def _resources(config: Config, has_gpu: bool, use: RayUse) -> dict[str, float]:
    return {"num_cpus": use.cpus, "num_gpus": 1 / use.per_gpu if _wants_gpu(config, has_gpu) else 0}


def _wants_gpu(config: Config, has_gpu: bool) -> bool:
    if config.device.startswith("cuda") and not has_gpu:
        raise InputError(f"device {config.device!r} was asked for, but Ray has no GPU; use --device cpu")
    return config.device != "cpu" and has_gpu


@contextlib.contextmanager
def _connected(use: RayUse) -> Iterator[Any]:
    """The module `ray`, connected. A Ray of its own listens on this machine only, and is gone afterwards."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    with tempfile.TemporaryDirectory(prefix="fimaq-ray-", ignore_cleanup_errors=True) as folder:
        if use.address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
                **quiet,
            )
        else:
            try:
                ray.init(address=use.address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise InputError(f"--ray-address {use.address}: no Ray cluster answers there: {reason}") from None
        try:
            yield ray
        finally:
            ray.shutdown()
