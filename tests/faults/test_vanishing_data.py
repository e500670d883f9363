"""Images that vanish or change while a run reads them, and loaders whose workers die."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import World, fimaq
from tally import Tally
from torch.utils.data import DataLoader, Dataset, get_worker_info

import fimaq as package
from fimaq.data import classes, folder
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.data.inputs import gather_images
from fimaq.errors import FimaqError


def vanish_after_listing(patch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Images are removed between the moment the folder is listed and the moment they are read."""
    for module in (folder, classes):
        real = module.find_images

        def listed(path: Path, real: Any = real) -> list[Path]:
            found = real(path)
            for image in found:
                if image.name in names:
                    image.unlink(missing_ok=True)
            return found

        patch.setattr(module, "find_images", listed)


def test_vanished_calibration_images_are_replaced_and_said(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    data = shutil.copytree(world.data, tmp_path / "data")
    vanish_after_listing(monkeypatch, ["00.jpg", "05.jpg"])
    tally.fault()
    outcome = fimaq(*world.quantize(tmp_path / "run", data=data))
    assert outcome.code == 0, outcome.err
    assert "unreadable images skipped" in outcome.err
    assert "No such file" in outcome.err


def test_too_many_vanished_images_are_an_error_and_nothing_is_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    data = shutil.copytree(world.data, tmp_path / "data")
    vanish_after_listing(monkeypatch, ["00.jpg", "05.jpg", "07.jpg"])
    tally.fault()
    outcome = fimaq(*world.quantize(tmp_path / "run", data=data))
    tally.expect_right(outcome.code == 2, "went on with too few images")
    assert "3 cannot be read" in outcome.err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_vanished_validation_images_are_counted(
    world: World, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    data, run = shutil.copytree(world.data, tmp_path / "data"), shutil.copytree(undisturbed, tmp_path / "run")
    vanish_after_listing(monkeypatch, ["1.jpg"])
    tally.fault()
    outcome = fimaq("evaluate", run, "--data", data, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "percent of 8 images, 4 unreadable left out" in outcome.out


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_other_images_on_resuming_are_refused(
    change: str, world: World, unfinished: Path, tmp_path: Path, tally: Tally
) -> None:
    data, run = shutil.copytree(world.data, tmp_path / "data"), shutil.copytree(unfinished, tmp_path / "run")
    for image in (data / "train").iterdir():
        if change == "replaced":
            shutil.copy(data / "val" / "0" / "0.jpg", image)
    if change == "removed":
        (data / "train" / "00.jpg").unlink()
        (data / "train" / "04.jpg").unlink()
    tally.fault()
    outcome = fimaq(*world.quantize(run, "--resume", data=data))
    tally.expect_right(outcome.code == 2, f"images were {change}, and the run went on")
    assert "data.fingerprint" in outcome.err.splitlines()[-1]


class KillsItsWorker(Dataset[torch.Tensor]):
    """One image after the other, until the worker that reads the sixth is killed."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            assert get_worker_info() is not None
            os.kill(os.getpid(), signal.SIGKILL)
        return demo_calibration(16)[index]


def test_a_killed_worker_of_a_loader_is_an_error_and_nothing_is_written(tmp_path: Path, tally: Tally) -> None:
    loader = DataLoader(KillsItsWorker(), batch_size=4, num_workers=1, multiprocessing_context="forkserver")
    tally.fault(kill=True)
    with pytest.raises((RuntimeError, FimaqError), match="worker"):  # PyTorch's own, or ours while a batch is read
        package.quantize(demo_model(), loader, out=tmp_path / "run", calib_size=16, batch_size=4, iters=2)
    tally.expect_right(not (tmp_path / "run").exists(), "a run was begun without its images")


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, RuntimeError])
def test_a_worker_that_dies_while_it_hands_a_batch_over_is_named(error: type[Exception], tally: Tally) -> None:
    class Loader:
        def __init__(self, workers: int) -> None:
            self.num_workers = workers

        def __iter__(self) -> Any:
            yield demo_calibration(4)
            raise error

    tally.fault()
    with pytest.raises(FimaqError, match="worker of the loader"):
        gather_images(Loader(1), 8)
    with pytest.raises(error):
        gather_images(Loader(0), 8)
    assert len(gather_images(Loader(1), 4)) == 4
