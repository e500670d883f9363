"""Values that lie right between two codes get the same code in OpenVINO as in the run."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fimaq.quant.exact  # noqa: F401  (its operator has a translation, too)
from fimaq.calibrate.reciprocals import divisible
from fimaq.export.formats import FORMATS
from fimaq.export.lower import lower
from fimaq.quant.layers import QuantLinear, convert_layer, set_quantized

CHANNELS = 16


class Shifted(nn.Module):
    """A layer behind a constant that a runtime would like to join with what follows."""

    def __init__(self, bits: int, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-0.7, 0.9, CHANNELS))
        self.layer = nn.Linear(CHANNELS, CHANNELS, bias=False).requires_grad_(False)
        self.layer.weight.copy_(torch.eye(CHANNELS))
        convert_layer(self.layer, 4, bits)
        assert isinstance(self.layer, QuantLinear)
        self.layer.weight_quantizer.set_range(torch.ones(CHANNELS, 1), torch.zeros(CHANNELS, 1))
        self.layer.harden()
        self.layer.input_quantizer.set_range(scale, torch.tensor(2.0 ** (bits - 1)))
        set_quantized(self, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)


def between_codes(model: Shifted, bits: int) -> Tensor:
    """Inputs (n, CHANNELS) that lie in the middle between two codes, and up to ten floats beside it."""
    quantizer = model.layer.input_quantizer
    halves = torch.arange(2.0**bits - 1) - quantizer.zero_point + 0.5
    middles = halves.double()[:, None] * quantizer.scale.double() - model.shift.double()
    return torch.cat([(middles.float().view(torch.int32) + away).view(torch.float32) for away in range(-10, 11)])


@pytest.mark.parametrize("bits", [3, 4, 6])
@pytest.mark.parametrize("searched", [0.013, 0.1, 0.37, 1.9])
@torch.no_grad()
def test_codes_are_those_of_the_run(bits: int, searched: float, tmp_path: Path) -> None:
    kind = FORMATS["openvino"]
    model = Shifted(bits, divisible(torch.tensor(searched)))
    x = between_codes(model, bits)
    own = model(x)
    assert len(own.unique()) == 2**bits
    path = tmp_path / kind.file
    kind.write(lower(copy.deepcopy(model), x[:2], symmetric=True), x[:2], path, lowered=True)
    assert torch.equal(kind.session(path)(x), own)
