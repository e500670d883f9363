"""`torchrun -m fimaq quantize`: a job with a dead process ends and says which; any number of them resumes it."""

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import World, assert_same_model, fimaq, truncate
from runs import snapshot, stop_at_unit
from torchrun import PATIENCE, processes, started, torchrun

LONG = 60
"""Iterations per unit: enough that a signal after the first unit comes before the last."""


@pytest.fixture(scope="module")
def damaged(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """One of the images cannot be read, so that those after it move up."""
    data = shutil.copytree(world.data, tmp_path_factory.mktemp("damaged") / "data")
    truncate(data / "train" / "03.jpg")
    return replace(world, data=data)


def wait_for_first_unit(job: subprocess.Popen[str], out: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (out / "checkpoint" / "unit-000.safetensors").exists():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, "the first unit was never stored"
        time.sleep(0.005)


def test_a_killed_rank_ends_the_job_and_one_process_resumes_it(damaged: World, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(2, "-m", "fimaq", *damaged.quantize(out, iters=LONG)) as job:
        wait_for_first_unit(job, out)
        os.kill(processes(job)[1], signal.SIGKILL)
        shown, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "rank      : 1 (local_rank: 1)" in shown.partition("Root Cause")[2]
    assert not (out / "model.safetensors").exists()

    resumed = fimaq(*damaged.quantize(out, "--resume", iters=LONG))
    assert resumed.code == 0, resumed.err
    assert "patch_embed: taken from the checkpoint" in resumed.err
    assert (out / "model.safetensors").exists()


def test_two_processes_resume_what_one_began_and_end_with_its_bits(damaged: World, tmp_path: Path) -> None:
    """The run directory shows that both read the same images: it refuses to resume with others."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at_unit(2, patch)
        assert fimaq(*damaged.quantize(tmp_path / "run", parts=2)).code == 130
    job = torchrun(2, "-m", "fimaq", *damaged.quantize(tmp_path / "run", "--resume", "--json"))
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("blocks.0: taken from the checkpoint") == 1
    told = json.loads(job.stdout)
    assert told["ranks"] == 2
    assert told["accuracy"]["images"] == 12
    assert fimaq(*damaged.quantize(tmp_path / "alone", parts=2)).code == 0
    assert_same_model(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
def test_what_all_ranks_refuse_is_said_once_and_leaves_nothing(
    world: World, finished: Path, tmp_path: Path
) -> None:
    before = snapshot(finished)
    job = torchrun(2, "-m", "fimaq", *world.quantize(finished))
    assert job.returncode != 0
    assert job.stdout == ""
    assert [line for line in job.stderr.splitlines() if line.startswith("fimaq: ")] == [
        f"fimaq: {finished} already holds a finished run; choose another --out or remove it"
    ]
    assert snapshot(finished) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [{"batch_size": 2}, {"parts": 2}, {"task": "detection", "image_size": "64,64"}]
)
def test_what_cannot_be_shared_out_is_refused(world: World, tmp_path: Path, arguments: dict[str, str]) -> None:
    job = torchrun(3, "-m", "fimaq", *world.quantize(tmp_path / "run", **arguments))
    assert job.returncode != 0
    assert len([line for line in job.stderr.splitlines() if line.startswith("fimaq: ")]) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_by_the_others(world: World, tmp_path: Path) -> None:
    """As one does whose machine is gone: it neither answers nor closes its connections."""
    out = tmp_path / "run"
    with started(3, "-m", "fimaq", *world.quantize(out, iters=50 * LONG)) as job:
        deadline = time.monotonic() + PATIENCE
        while not (out / "config.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(processes(job)[2], signal.SIGSTOP)
        shown, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert shown.count("fimaq: rank 2 on ") == 1
    assert "no longer answers; finished units are kept: run the command again with --resume" in shown
