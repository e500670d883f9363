"""What tests start from: one thread, fixed seeds, small timm models with nothing hidden in them, runs by command.

`tests/pipeline` has runs of its own under the same names, of the embedded demo model.
"""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from command_line import World, fimaq, make_world
from runs import stop_at_unit
from torch import nn

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many faults and hostile inputs were tried (`faults/tally.py`), and what came of them."""
    found: Counter[str] = Counter()
    for report in [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]:
        found.update(dict(report.user_properties).get("tally", {}))
    if found:
        terminalreporter.write_line(
            f"faults tried: {found['faults']}, {found['kills']} of them kills; hostile inputs: {found['inputs']}; "
            f"lost {found['lost']}; silently wrong {found['wrong']}"
        )


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def shared() -> Path:
    """The folder with real weights and images."""
    folder = Path(os.environ.get("FIMAQ_SHARED", "../shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: set FIMAQ_SHARED to the folder that holds real weights and images")
    return folder


@pytest.fixture
def noisy_model() -> Callable[..., nn.Module]:
    """noisy_model(timm_name, **arguments) -> the model in evaluation mode, every parameter seeded noise.

    timm starts LayerScale, biases and some norms at or near zero: a mistake behind one of these would not
    reach the output.
    """

    def build(name: str, **arguments: Any) -> nn.Module:
        model = timm.create_model(name, **arguments).eval()
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + 0.3 * noise if parameter.dim() == 1 else 0.1 * noise
        return model

    return build


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model's weights and images."""
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
