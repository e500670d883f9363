"""What every test of the command starts from: the tiny world, a finished run and an unfinished one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CLASSES, COLOURS, World, fimaq, tiny_model, write_image
from runs import stop_at_unit
from safetensors.torch import save_file


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    save_file(tiny_model().state_dict(), folder / "tiny.safetensors")
    generator = np.random.default_rng(0)
    for number in range(10):
        write_image(folder / "data" / "train" / f"{number:02d}.jpg", COLOURS[number % 4], generator)
    for label in range(CLASSES):
        for number in range(3):
            write_image(folder / "data" / "val" / str(label) / f"{number}.jpg", COLOURS[label], generator)
    return World(folder / "tiny.safetensors", folder / "data")


@pytest.fixture(scope="session")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, for tests that leave it as it is; those that evaluate it copy it."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "finished"
    outcome = fimaq(*world.quantize(out))
    assert outcome.code == 0, outcome.err
    return out


@pytest.fixture(scope="session")
def unfinished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, interrupted before its third unit."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "unfinished"
    with pytest.MonkeyPatch.context() as patch:
        stop_at_unit(2, patch)
        assert fimaq(*world.quantize(out)).code == 130
    return out
