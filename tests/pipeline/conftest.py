"""What every test of a run starts from: one thread, a finished run and an unfinished one."""

from pathlib import Path

import pytest
import torch
from demo_runs import quantize
from runs import stop_at_unit

import fimaq


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> fimaq.Run:
    """A run that nothing interrupted, for the tests that only read it."""
    torch.set_num_threads(1)
    return quantize(out=tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture(scope="session")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after three units, for the tests that copy it or must leave it alone."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("runs") / "unfinished"
    with pytest.MonkeyPatch.context() as patch:
        stop_at_unit(3, patch)
        with pytest.raises(KeyboardInterrupt):
            quantize(out=path)
    return path
