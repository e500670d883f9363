"""A disk full, too small or read-only, at every write of a run: a clean error, and nothing finished is lost."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Outcome, World, assert_same_model, fimaq
from full_disk import FullDisk, small_disk
from tally import Tally

CAPABILITIES_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2


@pytest.fixture(scope="session")
def operations(world: World, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many times an undisturbed run asks something of the disk."""
    out = tmp_path_factory.mktemp("counted") / "run"
    with FullDisk(None).mounted() as disk:
        assert fimaq(*world.quantize(out)).code == 0
    return disk.operations


def judge_failure(outcome: Outcome, tally: Tally, what: str) -> None:
    tally.expect_right(outcome.code != 0, f"{what}: reported as done")
    assert outcome.code in (1, 2), outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert outcome.err.splitlines()[-1].startswith("fimaq:")


def fill_and_resume(world: World, room: int, undisturbed: Path, out: Path, tally: Tally) -> None:
    what = f"disk full after {room} operations"
    with FullDisk(room).mounted():
        outcome = fimaq(*world.quantize(out))
    tally.fault()
    judge_failure(outcome, tally, what)
    if (out / "model.safetensors").exists():
        assert_same_model(out, undisturbed)
    stored = len(list((out / "checkpoint").glob("unit-*.safetensors")))
    resumed = fimaq(*world.quantize(out, "--resume"))
    tally.expect_kept(resumed.code == 0, f"{what}: {resumed.err}")
    tally.expect_kept(resumed.err.count("taken from the checkpoint") == stored, f"{what}: units are lost")
    assert_same_model(out, undisturbed)


@pytest.mark.parametrize("share", [0.03, 0.5, 0.9])
def test_a_full_disk_is_an_error_and_what_was_finished_is_kept(
    share: float, world: World, operations: int, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    fill_and_resume(world, int(share * operations), undisturbed, tmp_path / "run", tally)


@pytest.mark.slow
def test_a_disk_full_at_any_write_is_an_error_and_what_was_finished_is_kept(
    world: World, operations: int, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    # The very last one forces a name to disk that is there already; failing at that is no error.
    for room in range(operations - 1):
        out = tmp_path / f"run-{room}"
        fill_and_resume(world, room, undisturbed, out, tally)
        shutil.rmtree(out)


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [4, 8, 16, 24, 32, 48, 64, 96])
def test_a_small_disk_is_an_error_and_a_larger_one_goes_on(
    kilobytes: int, world: World, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    with small_disk(small, kilobytes):
        outcome = fimaq(*world.quantize(small / "run"))
        tally.fault()
        if outcome.code != 0:
            judge_failure(outcome, tally, f"{kilobytes} kB")
        if (small / "run").exists():
            shutil.copytree(small / "run", large)
    resumed = fimaq(*world.quantize(large, "--resume"))
    tally.expect_kept(resumed.code == 0, f"{kilobytes} kB: {resumed.err}")
    assert_same_model(large, undisturbed)


@pytest.fixture
def without_privilege() -> Iterator[None]:
    """Root without the right to write where permissions forbid it; other users have no such right to lose."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0)
    before, after = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    after[:] = before[:]
    after[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert libc.capset(header, after) == 0
    yield
    assert libc.capset(header, before) == 0


def test_a_read_only_folder_is_refused(
    world: World, unfinished: Path, undisturbed: Path, tmp_path: Path, tally: Tally, without_privilege: None
) -> None:
    out = shutil.copytree(unfinished, tmp_path / "run")
    finished = shutil.copytree(undisturbed, tmp_path / "finished")
    folders = [tmp_path, finished, out, out / "checkpoint"]
    lines = {
        tmp_path / "new": world.quantize(tmp_path / "new"),
        out: world.quantize(out, "--resume"),
    }
    for folder in folders:
        folder.chmod(0o555)
    for path in (out / ".lock", finished / "config.json"):
        path.chmod(0o444)
    try:
        for path, line in lines.items():
            tally.fault()
            outcome = fimaq(*line)
            judge_failure(outcome, tally, f"read-only {path}")
            assert str(path) in outcome.err.splitlines()[-1]
        tally.fault()
        evaluated = fimaq("evaluate", finished, "--data", world.data)
        assert evaluated.code == 0, evaluated.err
        assert "quantized" in evaluated.out
        assert f"the accuracy is not stored: {finished}" in evaluated.err
    finally:
        for path in [*folders, out / ".lock", finished / "config.json"]:
            path.chmod(0o755)
    resumed = fimaq(*world.quantize(out, "--resume"))
    tally.expect_kept(resumed.code == 0, resumed.err)
    assert_same_model(out, undisturbed)
