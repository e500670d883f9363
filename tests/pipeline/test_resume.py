"""Killed, interrupted, damaged and foreign runs: resumed to the same bits, or refused and left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_runs import SETTINGS, UNITS, equal, logits, quantize
from runs import snapshot
from safetensors.torch import load_file

import fimaq
from fimaq.artifact.files import read_tensors, write_tensors
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.errors import InputError
from fimaq.progress import Silent

PATIENCE = 60.0
WORKER = """
import json, sys, time
import torch
import fimaq
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.progress import Silent

class Slow(Silent):
    def report(self, facts):
        if facts.unit and facts.iteration == 0:
            time.sleep(0.1)  # so that a kill between two units cannot come too late

torch.set_num_threads(1)
out, settings = sys.argv[1], json.loads(sys.argv[2])
fimaq.quantize(demo_model(), demo_calibration(64), out=out, progress=Slow(), **settings)
"""


@contextmanager
def worker(out: Path, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that quantizes into `out`; killed, not asked, at the end."""
    command = [sys.executable, "-c", WORKER, str(out), json.dumps({**SETTINGS, **settings})]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, "the run ended before the moment to kill it came"
        assert time.monotonic() < deadline, "the run never came to the moment to kill it"
        time.sleep(0.002)


def unit_events(out: Path) -> int:
    path = out / "events.jsonl"
    return path.read_text().count('"kind": "unit"') if path.exists() else 0


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "before the first unit": lambda out: (out / "config.json").exists(),
    "after one unit": lambda out: (out / "checkpoint" / "unit-000.safetensors").exists(),
    "after three units": lambda out: unit_events(out) >= 3,
    "while a unit is written": lambda out: any((out / "checkpoint").glob(".unit-004*")),
    "before the last unit": lambda out: (out / "checkpoint" / f"unit-{UNITS - 2:03d}.safetensors").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_bits(finished: fimaq.Run, tmp_path: Path, moment: str) -> None:
    out = tmp_path / "run"
    with worker(out) as process:
        # A file being written is there for an instant only: being too late for it, by a unit, is as good a kill.
        late = out / "checkpoint" / "unit-005.safetensors"
        reached = MOMENTS[moment]
        wait_until(lambda: reached(out) or (moment == "while a unit is written" and late.exists()), process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()
    resumed = quantize(out=out, resume=True)
    assert finished.path is not None
    assert equal(load_file(out / "model.safetensors"), load_file(finished.path / "model.safetensors"))
    assert torch.equal(logits(resumed.model), logits(finished.model))


def test_resuming_takes_finished_units_from_the_checkpoint(unfinished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(unfinished, tmp_path / "run")
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    quantize(out=out, resume=True, progress=Notes())
    assert sum("taken from the checkpoint" in note for note in notes) == 3


def test_a_directory_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with worker(out, iters=100_000) as process:
        wait_until(lambda: (out / "config.json").exists(), process)
        with pytest.raises(InputError, match=f"in use by process {process.pid}"):
            quantize(out=out, iters=100_000, resume=True)
        assert process.poll() is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"bits": "w4a4"}, "bits"), ({"seed": 1}, "seed"), ({"iters": 7}, "iters"), ({"images": True}, "data")],
)
def test_another_configuration_is_refused_and_leaves_every_byte(
    unfinished: Path, changed: dict[str, Any], named: str
) -> None:
    before = snapshot(unfinished)
    settings = {"images": demo_calibration(65)[1:]} if "images" in changed else changed
    with pytest.raises(InputError, match=named):
        quantize(out=unfinished, resume=True, **settings)
    assert snapshot(unfinished) == before


def test_other_weights_are_refused_and_leave_every_byte(unfinished: Path) -> None:
    before = snapshot(unfinished)
    model = demo_model()
    with torch.no_grad():
        model.head.bias[0] += 1e-3
    with pytest.raises(InputError, match="weights"):
        quantize(model, out=unfinished, resume=True)
    assert snapshot(unfinished) == before


def test_an_unfinished_run_is_not_restarted_unasked(unfinished: Path) -> None:
    before = snapshot(unfinished)
    with pytest.raises(InputError, match="resume"):
        quantize(out=unfinished)
    assert snapshot(unfinished) == before


def damage_one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def exchange_with_another_unit(path: Path) -> None:
    path.write_bytes((path.parent / "unit-000.safetensors").read_bytes())


def leave_a_tensor_out(path: Path) -> None:
    state, metadata = read_tensors(path)
    del state["norm1.weight"]
    write_tensors(path, state, metadata)


@pytest.mark.parametrize(
    "damage", [damage_one_bit, cut_short, exchange_with_another_unit, leave_a_tensor_out], ids=lambda f: f.__name__
)
def test_a_damaged_checkpoint_is_refused(unfinished: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    out = shutil.copytree(unfinished, tmp_path / "run")
    damage(out / "checkpoint" / "unit-002.safetensors")
    with pytest.raises(InputError):
        quantize(out=out, resume=True)
    assert not (out / "model.safetensors").exists()


def test_the_checkpoint_of_an_exchanged_block_is_refused(unfinished: Path, tmp_path: Path) -> None:
    """Blocks have the same shapes: only what the file says of itself can tell one from the other."""
    out = shutil.copytree(unfinished, tmp_path / "run")
    (out / "checkpoint" / "unit-002.safetensors").write_bytes(
        (unfinished / "checkpoint" / "unit-001.safetensors").read_bytes()
    )
    with pytest.raises(InputError):
        quantize(out=out, resume=True)
