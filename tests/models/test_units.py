"""A chain of units leaves its model as it found it, also where it is interrupted."""

from typing import Any

import pytest
import torch
from torch import nn

from fimaq.config import Config
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.pipeline import prepare_chain


def interrupted(module: nn.Module, name: str, value: Any) -> None:
    """Ctrl-C comes while a unit's forward is being replaced."""
    assert name == "forward"
    raise KeyboardInterrupt


def test_ctrl_c_between_two_units_is_nothing_but_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    images = demo_calibration(2)
    _, chain = prepare_chain(demo_model(), images, Config())
    whole = chain.model(images)
    outputs = chain.units[0](chain.first_inputs(images))
    monkeypatch.setattr(type(chain.units[1].module), "__setattr__", interrupted)
    blocks = {i: [torch.zeros(2, *s) for s in chain.units[i].output_shapes] for i in range(2)}
    with pytest.raises(KeyboardInterrupt):
        chain.next_inputs(1, blocks[1], {0: outputs})
    monkeypatch.undo()
    assert torch.equal(chain.model(images), whole)
