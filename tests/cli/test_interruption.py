"""A run that is stopped says how to go on, and resumes to the same model."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import ENVIRONMENT, PATIENCE, Outcome, World, assert_refused, assert_same_model, fimaq
from runs import stop_at_unit

from fimaq import accuracy

LONG = 150
"""Iterations per unit: enough that a signal after the first unit comes before the last."""


@pytest.fixture(scope="session")
def uninterrupted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert fimaq(*world.quantize(out, iters=LONG)).code == 0
    return out


@contextlib.contextmanager
def started(arguments: list[str | Path]) -> Iterator[subprocess.Popen[str]]:
    """The command as a process that can be interrupted, however this one was started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fimaq", *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stop_after_first_unit(process: subprocess.Popen[str], out: Path, how: signal.Signals) -> Outcome:
    deadline = time.monotonic() + PATIENCE
    while not (out / "checkpoint" / "unit-000.safetensors").exists():
        assert process.poll() is None, "the run ended before its first unit was stored"
        assert time.monotonic() < deadline, "the first unit was never stored"
        time.sleep(0.002)
    process.send_signal(how)
    shown, err = process.communicate(timeout=PATIENCE)
    return Outcome(process.returncode, shown, err)


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_run_resumes_to_the_same_model(
    world: World, uninterrupted: Path, tmp_path: Path, how: signal.Signals, code: int
) -> None:
    out = tmp_path / "run"
    with started(world.quantize(out, "--json", iters=LONG)) as process:
        outcome = stop_after_first_unit(process, out, how)
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert not (out / "model.safetensors").exists()
    assert_refused(fimaq("evaluate", out, "--data", world.data), "incomplete")

    resumed = fimaq(*world.quantize(out, "--resume", iters=LONG))
    assert resumed.code == 0, resumed.err
    assert "patch_embed: taken from the checkpoint" in resumed.err
    assert_same_model(out, uninterrupted)


def test_an_interrupted_run_says_how_to_go_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at_unit(1, monkeypatch)
    outcome = fimaq(*world.quantize(tmp_path / "run"))
    assert outcome.code == 130
    assert "--resume" in outcome.err.splitlines()[-1]


def test_what_keeps_nothing_does_not_speak_of_going_on(
    world: World, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "evaluate_models", interrupted)
    outcome = fimaq("evaluate", finished, "--data", world.data, "--device", "cpu")
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "fimaq: interrupted"
