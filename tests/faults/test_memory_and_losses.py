"""Memory that is not there, on the GPU, the host or the disk; and losses that are not numbers."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import World, assert_same_model, fimaq
from tally import Tally
from torch import nn

from fimaq.artifact.run_directory import RunDirectory
from fimaq.reconstruct import cache as cache_module
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache

ROWS = [torch.zeros(1, 4), torch.zeros(1, 2, 3)]
HOST_MESSAGE = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"


def refuse_memory(patch: pytest.MonkeyPatch, gpu: bool, host: bool) -> None:
    """Allocators that fail although the memory was reported as free. No GPU is needed."""
    real = torch.empty

    def empty(*shape: int, device: Any = None, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        on_gpu = device is not None and torch.device(device).type == "cuda"
        if on_gpu and gpu:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if not on_gpu and host:
            raise RuntimeError(HOST_MESSAGE)
        return real(*shape, **named)

    patch.setattr(cache_module, "free_bytes", lambda device: 2**40)
    patch.setattr(cache_module.torch, "empty", empty)


@pytest.mark.parametrize(
    ("gpu", "host", "place"),
    [(False, False, "GPU"), (True, False, "pinned host memory"), (True, True, "disk")],
)
def test_what_does_not_fit_goes_where_there_is_room(
    gpu: bool, host: bool, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    refuse_memory(monkeypatch, gpu, host)
    cache = ActivationCache(8, torch.device("cuda"), tmp_path)
    tally.fault()
    cache.allocate("outputs", ROWS)
    assert cache.places == {"outputs": place}
    assert [tensor.shape for tensor in cache.stored("outputs")] == [(8, 4), (8, 2, 3)]
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_another_error_while_allocating_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("an illegal instruction was encountered")

    monkeypatch.setattr(cache_module.torch, "empty", empty)
    with pytest.raises(RuntimeError, match="illegal"):
        ActivationCache(8, torch.device("cpu"), tmp_path).allocate("outputs", ROWS)


def test_a_run_whose_activations_fit_nowhere_but_on_disk_gives_the_same_bits(
    world: World, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(ActivationCache, "_in_memory", lambda *_, **__: None)
    tally.fault()
    outcome = fimaq(*world.quantize(tmp_path / "run"))
    assert outcome.code == 0, outcome.err
    assert "cached in disk" in outcome.err
    assert_same_model(tmp_path / "run", undisturbed)


def test_activations_that_fit_nowhere_are_an_error_and_leave_no_files(
    world: World, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    out = tmp_path / "run"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationCache, "_in_memory", lambda *_, **__: None)
        patch.setattr(os, "posix_fallocate", full)
        tally.fault()
        outcome = fimaq(*world.quantize(out))
    assert outcome.code == 1
    assert "activations do not fit on disk" in outcome.err.splitlines()[-1]
    assert not list(out.rglob("*cache*"))
    assert fimaq(*world.quantize(out, "--resume")).code == 0
    assert_same_model(out, undisturbed)


def test_a_file_that_a_killed_cache_left_is_removed_on_resuming(tmp_path: Path, tally: Tally) -> None:
    with RunDirectory.create(tmp_path, {"settings": {}}, resume=False):
        cache = ActivationCache(8, torch.device("cpu"), tmp_path / "checkpoint", budget=1)
        cache.allocate("outputs", ROWS)
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2
    tally.fault()
    with RunDirectory.create(tmp_path, {"settings": {}}, resume=True):
        assert list((tmp_path / "checkpoint").iterdir()) == []


class NotANumber(nn.Module):
    """A loss that turns NaN."""

    def forward(self, deltas: torch.Tensor, *_: object) -> torch.Tensor:
        return deltas.sum() * float("nan")


def test_a_loss_that_turns_nan_keeps_the_searched_ranges_and_the_run_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Unit 1, a block, learns nothing: with equal units before it, it equals that of a run without learning."""
    real = Reconstruction.objective
    monkeypatch.setattr(
        Reconstruction, "objective", lambda self, i: NotANumber() if i in (0, 1) else real(self, i)
    )
    tally.fault()
    outcome = fimaq(*world.quantize(tmp_path / "nan", "--json"))
    assert outcome.code == 0, outcome.err
    for unit in ("patch_embed", "blocks.0"):
        assert f"{unit}: the loss was not finite; its range-search result is kept" in outcome.err
    metrics = json.loads(outcome.out)
    assert [unit["finite"] for unit in metrics["units"]] == [False, False, True, True]
    assert metrics["units"][1]["flipped"] == 0

    assert fimaq(*world.quantize(tmp_path / "rtn", method="rtn")).code == 0
    learned, searched = (RunDirectory.open_existing(tmp_path / name).read_model()[0] for name in ("nan", "rtn"))
    names = [name for name in searched if name.startswith(("patch_embed.", "blocks.0."))]
    same = all(torch.equal(learned[name], searched[name]) for name in names)
    tally.expect_right(same and all(tensor.isfinite().all() for tensor in learned.values()), "NaN was learned")


def test_gpu_memory_that_runs_out_in_a_step_is_an_error_and_finished_units_are_kept(
    world: World, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    real, out = Reconstruction.reconstruct, tmp_path / "run"

    def out_of_memory(self: Reconstruction, index: int, report: Any) -> Any:
        if index == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, index, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reconstruction, "reconstruct", out_of_memory)
        tally.fault()
        outcome = fimaq(*world.quantize(out))
    assert outcome.code == 1
    assert "out of GPU memory" in outcome.err.splitlines()[-1]
    resumed = fimaq(*world.quantize(out, "--resume"))
    tally.expect_kept(resumed.err.count("taken from the checkpoint") == 2, "finished units were computed again")
    assert_same_model(out, undisturbed)
