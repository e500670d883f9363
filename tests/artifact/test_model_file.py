"""model.safetensors: what is stored gives back the same integers and the same outputs, or is refused."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fimaq
from fimaq.artifact.model_file import load_quantized_state, quantized_state
from fimaq.data.demo import demo_calibration, demo_model, demo_test
from fimaq.errors import InputError
from fimaq.models.prepare import apply_structure, prepare_model
from fimaq.quant.layers import quantized_layers, quantized_products
from fimaq.quant.packing import unpack_bits


@dataclass
class Stored:
    model: nn.Module
    state: dict[str, Tensor]


@pytest.fixture(scope="module", params=["deploy", "released"])
def stored(request: pytest.FixtureRequest) -> Stored:
    torch.set_num_threads(1)
    settings = {"bits": "w3a4", "method": "rtn", "search_size": 16, "device": "cpu"}
    model = fimaq.quantize(demo_model(), demo_calibration(16), preset=request.param, **settings).model
    return Stored(model, quantized_state(model))


@pytest.fixture(scope="module")
def prepared(stored: Stored) -> nn.Module:
    """The demo model with other weights, its layers converted, nothing quantized yet."""
    model = demo_model()
    rescaled = any(product.rescales_rows for _, product in quantized_products(stored.model))
    structure = prepare_model(copy.deepcopy(model), demo_calibration(2), 3, 4, rescale_rows=rescaled)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    apply_structure(model, structure)
    return model


@pytest.fixture
def fresh(prepared: nn.Module) -> nn.Module:
    return copy.deepcopy(prepared)


def test_a_round_trip_gives_bit_identical_outputs(stored: Stored, fresh: nn.Module) -> None:
    load_quantized_state(fresh, stored.state)
    images = demo_test()[0][:100]
    with torch.no_grad():
        assert torch.equal(fresh.eval()(images), stored.model(images))


def test_a_round_trip_gives_the_same_codes(stored: Stored, fresh: nn.Module) -> None:
    load_quantized_state(fresh, stored.state)
    pairs = list(zip(quantized_layers(fresh), quantized_layers(stored.model), strict=True))
    assert len(pairs) == 26
    assert all(torch.equal(loaded.codes, original.codes) for (_, loaded), (_, original) in pairs)


def test_what_was_loaded_is_stored_again_as_the_same_tensors(stored: Stored, fresh: nn.Module) -> None:
    load_quantized_state(fresh, stored.state)
    again = quantized_state(fresh)
    assert again.keys() == stored.state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.state.items())


def test_packed_weights_hold_exactly_the_codes(stored: Stored) -> None:
    for name, layer in quantized_layers(stored.model):
        packed = stored.state[f"{name}.weight.packed"]
        assert packed.numel() == -(-layer.weight.numel() * 3 // 8)
        assert torch.equal(unpack_bits(packed, 3, layer.weight.shape), layer.codes)


def test_weights_of_quantized_layers_are_stored_as_integers_only(stored: Stored) -> None:
    names = {f"{name}.weight" for name, _ in quantized_layers(stored.model)}
    assert not names & stored.state.keys()


@pytest.mark.parametrize(
    "name",
    [
        "blocks.2.mlp.fc1.weight.packed",
        "blocks.2.mlp.fc1.weight_quantizer.scale",
        "blocks.2.mlp.fc1.input_quantizer.zero_point",
        "blocks.2.mlp.fc1.bias",
        "blocks.2.norm1.weight",
        "pos_embed",
    ],
)
def test_a_missing_tensor_is_refused_by_name(stored: Stored, fresh: nn.Module, name: str) -> None:
    state = {key: tensor for key, tensor in stored.state.items() if key != name}
    assert len(state) == len(stored.state) - 1
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        load_quantized_state(fresh, state)


@pytest.mark.parametrize("name", ["blocks.9.mlp.fc1.weight.packed", "blocks.0.mlp.fc1.weight", "anything"])
def test_a_tensor_too_many_is_refused_by_name(stored: Stored, fresh: nn.Module, name: str) -> None:
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        load_quantized_state(fresh, {**stored.state, name: torch.zeros(3)})


@pytest.mark.parametrize(
    "name", ["blocks.0.mlp.fc1.weight.packed", "blocks.0.mlp.fc1.bias", "blocks.0.norm1.weight", "pos_embed"]
)
def test_a_tensor_of_another_shape_is_refused(stored: Stored, fresh: nn.Module, name: str) -> None:
    with pytest.raises(InputError):
        load_quantized_state(fresh, {**stored.state, name: stored.state[name].flatten()[:-1]})


def test_a_scale_of_another_shape_is_refused(stored: Stored, fresh: nn.Module) -> None:
    name = "blocks.0.mlp.fc1.weight_quantizer.scale"
    with pytest.raises(InputError):
        load_quantized_state(fresh, {**stored.state, name: torch.ones(7, 1)})


def test_the_state_of_a_model_that_was_never_quantized_is_refused(fresh: nn.Module) -> None:
    with pytest.raises(InputError):
        load_quantized_state(fresh, demo_model().state_dict())


def test_weights_of_other_bits_are_refused(stored: Stored) -> None:
    model = demo_model()
    prepare_model(model, demo_calibration(2), 4, 4)
    with pytest.raises(InputError):
        load_quantized_state(model, stored.state)
