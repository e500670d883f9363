"""What every test of the command starts from: the tiny world, a finished run and an unfinished one."""

from pathlib import Path

import pytest
import torch
from command_line import World, fimaq, make_world
from runs import stop_at_unit


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


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
