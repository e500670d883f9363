"""The `fimaq` command in a process of its own, which a fault ends or hinders at a chosen place.

Processes are forked by a server that has imported everything and computed nothing, so that one costs milliseconds.
"""

import functools
import importlib
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["timm", "fimaq.cli.quantize", "fimaq.pipeline", "fimaq.accuracy", "fimaq.data"])

PLACES: dict[str, tuple[str, str]] = {
    "an image is read": ("fimaq.data.folder", "_decode"),
    "LayerNorms are folded": ("fimaq.pipeline", "fold_layer_norms"),
    "outputs are cached": ("fimaq.reconstruct.cache:ActivationCache", "write"),
    "ranges are searched": ("fimaq.reconstruct.algorithm", "set_ranges"),
    "Fisher information is refreshed": ("fimaq.reconstruct.algorithm:Reconstruction", "refresh"),
    "a step of reconstruction": ("fimaq.reconstruct.step:ReconstructionStep", "_step"),
    "a file is forced to disk": ("os", "fsync"),
    "a file gets its name": ("os", "replace"),
    "a unit is stored": ("fimaq.artifact.run_directory:RunDirectory", "save_stage"),
    "an event is written": ("fimaq.artifact.run_directory:RunDirectory", "event"),
    "the run is finished": ("fimaq.artifact.run_directory:RunDirectory", "finish"),
    "the checkpoint is removed": ("fimaq.artifact.run_directory", "_remove_leftovers"),
    "the model is evaluated": ("fimaq.accuracy", "evaluate_models"),
}


@dataclass(frozen=True)
class KillAt:
    """kill -9 at the `number`-th time (from 1) that the run comes to a place, before or after its work."""

    place: str
    number: int
    after: bool


def places_visited(arguments: Sequence[str | Path], log: Path) -> dict[str, int]:
    """How often an undisturbed command comes to each place."""
    visits = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=_count, args=([*map(str, arguments)], log, visits))
    process.start()
    counted: dict[str, int] = visits.get()
    process.join()
    assert process.exitcode == 0, log.read_text()
    return counted


def start(arguments: Sequence[str | Path], log: Path, kill: KillAt | None = None) -> BaseProcess:
    """The command, begun. What it shows goes to `log`."""
    process = CONTEXT.Process(target=_run, args=([*map(str, arguments)], log, kill))
    process.start()
    return process


def _run(arguments: list[str], log: Path, kill: KillAt | None) -> None:
    _begin(arguments, log)
    if kill is not None:
        _watch(kill.place, functools.partial(_kill_at, kill, Counter()))
    _command()


def _count(arguments: list[str], log: Path, visits: Any) -> None:
    _begin(arguments, log)
    counter: Counter[str] = Counter()
    for place in PLACES:

        def count(real: Callable[..., Any], *given: Any, place: str = place, **named: Any) -> Any:
            counter[place] += 1
            return real(*given, **named)

        _watch(place, count)
    try:
        _command()
    finally:
        visits.put(dict(counter))


def _begin(arguments: list[str], log: Path) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["fimaq", *arguments]


def _command() -> None:
    from fimaq import cli

    cli.main()


def _watch(place: str, instead: Callable[..., Any]) -> None:
    """Call `instead(real function, *arguments)` wherever the run comes to a place."""
    owner, attribute = PLACES[place]
    module, _, kind = owner.partition(":")
    target = importlib.import_module(module)
    target = getattr(target, kind) if kind else target
    real = getattr(target, attribute)
    setattr(target, attribute, lambda *given, **named: instead(real, *given, **named))


def _kill_at(kill: KillAt, visits: Counter[str], real: Callable[..., Any], *given: Any, **named: Any) -> Any:
    visits[kill.place] += 1
    due = visits[kill.place] == kill.number
    if due and not kill.after:
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*given, **named)
    if due:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
