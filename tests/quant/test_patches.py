"""A convolution that cuts its input into patches is one product while it learns, with the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fimaq.quant.layers import QuantConv2d, convert_layer

CUTTING: dict[str, dict[str, Any]] = {
    "square": {"kernel_size": 4, "stride": 4},
    "oblong": {"kernel_size": (2, 5), "stride": (2, 5)},
    "without bias": {"kernel_size": 4, "stride": 4, "bias": False},
    "valid padding": {"kernel_size": 3, "stride": 3, "padding": "valid"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "overlapping": {"kernel_size": 4, "stride": 2},
    "padded": {"kernel_size": 4, "stride": 4, "padding": 1},
    "dilated": {"kernel_size": 2, "stride": 2, "dilation": 2},
    "in groups": {"kernel_size": 4, "stride": 4, "groups": 3},
}


def layer(given: dict[str, Any]) -> QuantConv2d:
    conv = nn.Conv2d(3, 6, **given).double()
    convert_layer(conv, 4, 8)
    assert isinstance(conv, QuantConv2d)
    return conv


def value_and_gradients(conv: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    value = conv(x)
    weights = torch.linspace(-1, 1, value.numel(), dtype=x.dtype).view(value.shape)
    return [value, *torch.autograd.grad((value * weights).sum(), [x, *conv.parameters()])]


@pytest.mark.parametrize("size", [(20, 20), (23, 17)], ids=["whole", "with a rest that no window reaches"])
@pytest.mark.parametrize("given", CUTTING.values(), ids=CUTTING)
def test_a_product_of_patches_is_the_convolution(given: dict[str, Any], size: tuple[int, int]) -> None:
    conv, x = layer(given), torch.randn(2, 3, *size, dtype=torch.float64)
    plain = nn.Conv2d(3, 6, **given).double()
    plain.load_state_dict({name: tensor for name, tensor in conv.state_dict().items() if "quantizer" not in name})
    assert conv._learns_patches()
    for found, expected in zip(value_and_gradients(conv, x), value_and_gradients(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_other_convolutions_stay_what_they_are(given: dict[str, Any]) -> None:
    assert not layer(given)._learns_patches()


def test_without_gradients_it_stays_a_convolution() -> None:
    with torch.no_grad():
        assert not layer(CUTTING["square"])._learns_patches()
