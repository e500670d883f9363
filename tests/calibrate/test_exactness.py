"""Where a model can be made exact is found by running it, and what is changed for it is little."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fimaq
from fimaq.calibrate.exactness import find_exact
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.models.prepare import make_exact
from fimaq.models.products import OpenedModule
from fimaq.quant.exact import exact_layer_norm, step_of
from fimaq.quant.layers import QuantLinear, activation_quantizers

BITS = ["w3a3", "w8a8"]


@pytest.fixture(scope="module", params=BITS)
def quantized(request: pytest.FixtureRequest) -> nn.Module:
    torch.set_num_threads(1)
    settings = {"bits": request.param, "method": "rtn", "device": "cpu", "batch_size": 16}
    return fimaq.quantize(demo_model(), demo_calibration(32), **settings).model


@torch.no_grad()
def test_norms_layers_before_a_gelu_and_softmax_products_are_found(quantized: nn.Module) -> None:
    found = find_exact(quantized, lambda: quantized(demo_calibration(8)))
    norms = {n for n, m in quantized.named_modules() if isinstance(m, nn.LayerNorm)}
    before_gelu = {n for n, m in quantized.named_modules() if isinstance(m, QuantLinear) and n.endswith("fc1")}
    softmax = {f"{n}.products.1" for n, m in quantized.named_modules() if isinstance(m, OpenedModule)}
    assert found.keys() == norms | before_gelu | softmax


@torch.no_grad()
def test_on_the_grid_before_a_gelu_its_last_bits_decide_no_code(quantized: nn.Module) -> None:
    found = find_exact(quantized, lambda: quantized(demo_calibration(8)))
    for name, offset in found.items():
        if not name.endswith("fc1"):
            continue
        quantizer = quantized.get_submodule(name.replace("fc1", "fc2")).input_quantizer
        points = torch.arange(-6, 20, step_of(offset), dtype=torch.float64)
        exact = F.gelu(points)
        for error in (-1e-6, 1e-6):
            steps = [quantizer.steps(outputs.float()) for outputs in (exact, exact + error)]
            assert torch.equal(*steps)


@torch.no_grad()
def test_scales_change_by_thousandths_at_most(quantized: nn.Module) -> None:
    before = {name: quantizer.scale.clone() for name, quantizer in activation_quantizers(quantized)}
    find_exact(quantized, lambda: quantized(demo_calibration(8)))
    for name, quantizer in activation_quantizers(quantized):
        torch.testing.assert_close(quantizer.scale, before[name], rtol=0.006, atol=0)


@torch.no_grad()
def test_a_norm_that_a_grid_would_change_is_left_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    x = torch.randn(32, 16)
    x[5] = 1000 + torch.randn(16) / 1000  # nothing of its variance is left on the others' grid
    assert find_exact(model, lambda: model(x)) == {}


@torch.no_grad()
def test_scales_of_next_to_nothing_are_left_alone() -> None:
    """A grid fine enough for them would have more points than fit in memory."""
    model = fimaq.quantize(demo_model(), demo_calibration(32), bits="w8a8", method="rtn", batch_size=16).model
    block = model.blocks[0]
    quantizers = [block.mlp.fc2.input_quantizer]
    quantizers += [getattr(block.attn.products[0], f"{side}_quantizer") for side in ("left", "right")]
    for quantizer in quantizers:
        quantizer.set_range(torch.tensor(1e-9), quantizer.zero_point)
    found = find_exact(model, lambda: model(demo_calibration(8)))
    assert "blocks.0.mlp.fc1" not in found
    assert "blocks.1.mlp.fc1" in found
    assert all(quantizer.scale == torch.tensor(1e-9) for quantizer in quantizers)


@torch.no_grad()
def test_made_exact_a_model_stays_what_it_was() -> None:
    model = fimaq.quantize(demo_model(), demo_calibration(32), bits="w8a8", method="rtn", batch_size=16).model
    images = demo_calibration(32)
    before = model(images)
    make_exact(model, find_exact(model, lambda: model(images[:8])))
    assert (model(images) - before).norm() < 0.05 * before.norm()


@torch.no_grad()
def test_on_the_grid_that_is_found_a_norm_does_not_depend_on_the_order_of_its_channels() -> None:
    norm, x, order = nn.LayerNorm(192), 3 * torch.randn(64, 192), torch.randperm(192)
    exact_layer_norm(norm, find_exact(nn.Sequential(norm), lambda: norm(x))["0"])
    assert torch.equal(norm(x[:, order]), norm(x)[:, order])


@torch.no_grad()
def test_of_a_norm_that_runs_twice_the_coarser_grid_is_taken() -> None:
    norm, x = nn.LayerNorm(192), torch.randn(64, 192)
    model = nn.Sequential(norm)
    small, large = (find_exact(model, lambda size=size: model(size * x))["0"] for size in (1, 8))
    assert large > small
    assert find_exact(model, lambda: (model(8 * x), model(x)))["0"] == large
