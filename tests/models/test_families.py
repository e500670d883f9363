"""Every family of timm transformers is opened completely, changes nothing while off, and can be cut anywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn

from fimaq.models.find_products import float_products
from fimaq.models.prepare import Structure, prepare_model
from fimaq.models.products import watched
from fimaq.models.units import UnitChain
from fimaq.quant.layers import QuantizedLayer, quantized_layers, quantized_products, set_quantized


@dataclass
class Family:
    name: str
    model: nn.Module
    images: Tensor  # (3, 3, H, W)
    output: Tensor  # of the untouched model, (3, classes)
    layers_with_effect: set[str]  # Linear and Conv2d modules whose weight reaches the output

    def prepare(self, **options: bool) -> Structure:
        return prepare_model(self.model, self.images[:2], 4, 4, **options)

    @torch.no_grad()
    def run(self) -> Tensor:
        return self.model(self.images)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, noisy_model: Callable[..., nn.Module]) -> Family:
    name, arguments = FAMILIES[request.param]
    model = noisy_model(name, **arguments)
    images = torch.randn(3, 3, arguments["img_size"], arguments["img_size"])
    with torch.no_grad():
        output = model(images)
    assert output.std(0).mean() > 1e-2, "the output must depend on the image for any of this to mean something"
    return Family(request.param, model, images, output, _layers_with_effect(model, images, output))


@torch.no_grad()
def _layers_with_effect(model: nn.Module, images: Tensor, output: Tensor) -> set[str]:
    found = set()
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            kept = layer.weight.data
            layer.weight.data = kept + 0.1 * torch.randn(kept.shape)
            if not torch.allclose(model(images[:1]), output[:1], rtol=1e-6, atol=1e-7):
                found.add(name)
            layer.weight.data = kept
    return found


def test_a_prepared_model_gives_the_same_output(family):
    family.prepare()
    torch.testing.assert_close(family.run(), family.output, rtol=1e-4, atol=1e-5)


def test_written_out_attention_gives_the_same_output(family):
    family.prepare()
    with watched(family.model):
        torch.testing.assert_close(family.run(), family.output, rtol=1e-4, atol=1e-5)


def test_every_layer_that_reaches_the_output_is_quantized(family):
    structure = family.prepare()
    assert set(structure.layers) == family.layers_with_effect
    assert {name for name, _ in quantized_layers(family.model)} == family.layers_with_effect


def test_every_attention_has_pairs_of_products(family):
    structure = family.prepare()
    counts = {name: count for name, (count, _) in structure.products.items()}
    attentions = {name for name, module in family.model.named_modules() if hasattr(module, "num_heads")}
    attentions = {name for name in attentions if "attn" in name.split(".")[-1]}
    assert attentions
    assert counts.keys() == attentions
    assert all(count >= 2 and count % 2 == 0 for count in counts.values()), counts


def test_the_second_product_of_every_attention_is_rescaled(family):
    structure = family.prepare(rescale_rows=True)
    # CaiT's talking heads mix the softmaxes of all heads: what its blocks multiply are not probabilities any
    # more, and can be negative. Its class attention has no such mixing.
    mixing = {name for name in structure.products if family.name == "cait" and "token_only" not in name}
    expected = {f"{name}.products.1" for name in structure.products if name not in mixing}
    assert expected
    assert sorted(structure.rescaled) == sorted(expected)
    assert {name for name, product in quantized_products(family.model) if product.rescales_rows} == expected


def test_no_product_runs_in_float_with_quantizers_on(family):
    family.prepare()
    set_quantized(family.model, True)
    assert float_products(family.model, family.run) == []


def test_every_quantizer_of_attention_reaches_the_output(family):
    structure = family.prepare()
    ends = {next(iter(structure.products)), list(structure.products)[-1]}
    for name in ends:
        attention = family.model.get_submodule(name)
        products = dict(quantized_products(attention))
        _set_observed_ranges(family, products.values())
        set_quantized(attention, True)
        for layer in attention.modules():
            if isinstance(layer, QuantizedLayer):
                layer.quantized = False
        before = family.run()
        for path, product in products.items():
            for side in ("left_quantizer", "right_quantizer"):
                quantizer = getattr(product, side)
                kept = quantizer.scale
                quantizer.set_range(kept * 4, quantizer.zero_point)
                change = (family.run() - before).abs().max()
                assert change > 1e-5 * before.abs().max(), f"{name}.{path}.{side} is not in the path"
                quantizer.set_range(kept, quantizer.zero_point)
        set_quantized(attention, False)


def _set_observed_ranges(family: Family, products: Any) -> None:
    """From smallest to largest value each operand takes."""

    def observe(product: nn.Module, operands: tuple[Tensor, Tensor]) -> None:
        for quantizer, x in zip((product.left_quantizer, product.right_quantizer), operands, strict=True):
            low, high = x.min().clamp_max(0), x.max().clamp_min(0)
            scale = (high - low) / quantizer.levels
            quantizer.set_range(scale, torch.round(-low / scale))

    hooks = [product.register_forward_pre_hook(observe) for product in products]
    with watched(family.model):
        family.run()
    for hook in hooks:
        hook.remove()


def _record(family: Family, chain: UnitChain) -> dict[int, tuple[Any, Any]]:
    """Unit index -> (arguments, result) on the family's images, in the order of the calls."""
    calls: dict[int, tuple[Any, Any]] = {}
    hooks = [
        unit.module.register_forward_hook(
            lambda _, args, kwargs, result, index=index: calls.__setitem__(index, ((args, kwargs), result)),
            with_kwargs=True,
        )
        for index, unit in enumerate(chain.units)
    ]
    family.run()
    for hook in hooks:
        hook.remove()
    return calls


def test_units_hold_every_quantized_layer_once(family):
    structure = family.prepare()
    units = [unit.name for unit in UnitChain(family.model, structure, family.images).units]
    for name in (*structure.layers, *structure.products):
        holders = [unit for unit in units if name == unit or name.startswith(unit + ".")]
        assert len(holders) == 1, f"{name} is in {holders}"


def test_no_unit_holds_two_blocks(family):
    structure = family.prepare()
    for unit in UnitChain(family.model, structure, family.images).units:
        for name, part in unit.module.named_modules(prefix=unit.name):
            if isinstance(part, (nn.Sequential, nn.ModuleList)):
                blocks = [f"{name}.{child}." for child, _ in part.named_children()]
                with_attention = [b for b in blocks if any(p.startswith(b) for p in structure.products)]
                assert len(with_attention) <= 1, unit.name


def test_units_are_in_forward_order(family):
    chain = UnitChain(family.model, family.prepare(), family.images)
    assert list(_record(family, chain)) == list(range(len(chain)))


def test_the_model_can_be_continued_after_every_unit(family):
    chain = UnitChain(family.model, family.prepare(), family.images)
    calls = _record(family, chain)
    outputs = {i: unit.outputs.split(calls[i][1]) for i, unit in enumerate(chain.units)}
    for index, unit in enumerate(chain.units):
        carried = {i: outputs[i] for i in unit.carried}
        with torch.no_grad():
            continued = chain.suffix(index, outputs[index], carried)
        torch.testing.assert_close(continued, family.output, rtol=1e-4, atol=1e-5)


def test_inputs_of_the_next_unit_follow_from_outputs(family):
    chain = UnitChain(family.model, family.prepare(), family.images)
    calls = _record(family, chain)
    outputs = {i: unit.outputs.split(calls[i][1]) for i, unit in enumerate(chain.units)}
    for index, unit in enumerate(chain.units[:-1]):
        carried = {i: outputs[i] for i in unit.carried}
        found = chain.next_inputs(index, outputs[index], carried)
        expected = chain.units[index + 1].inputs.split(calls[index + 1][0])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_unit_runs_alone_on_some_of_the_images(family):
    chain = UnitChain(family.model, family.prepare(), family.images)
    calls = _record(family, chain)
    for index, unit in enumerate(chain.units):
        inputs = [t[1:2] for t in unit.inputs.split(calls[index][0])]
        expected = [t[1:2] for t in unit.outputs.split(calls[index][1])]
        torch.testing.assert_close(unit(inputs), expected, rtol=1e-4, atol=1e-5)
