"""A window's attention by one kernel and written out, on the same operands and masks: how far apart they are.

Run by itself it prints that, as JSON. With TRITON_INTERPRET=1 kernels run on a CPU; Triton must be told before it
is imported, so tests start a process for it.
"""

import json
import math
from unittest import mock

import torch
from torch import Tensor

from fimaq.models.products import OpenedModule, _ProductMode, written_out_attention
from fimaq.quant import window_attention
from fimaq.quant.aligned import unbind
from fimaq.quant.layers import QuantMatMul
from fimaq.quant.quantizers import ActivationQuantizer

CASES = [
    {"released": released, "drops": drops, "bias": bias, "tokens": tokens, "width": width}
    for released in (False, True)
    for drops, bias, tokens, width in (
        (True, "each", 49, 16),
        (True, "one", 49, 32),
        (True, "one", 64, 24),
        (False, None, 7, 64),
    )
]
WINDOWS, HEADS = 4, 3


def distances(case: dict, device: str) -> list[float]:
    """Of outputs, and of gradients of operands and of the scales of queries, keys, weights and values."""
    torch.manual_seed(0)
    tokens, width = case["tokens"], case["width"]
    products = products_of(case["released"], tokens, device)
    operands = torch.randn(WINDOWS, tokens, 3, HEADS, width, device=device).permute(2, 0, 3, 1, 4).requires_grad_()
    windows = {"each": WINDOWS, "one": 1, None: 0}[case["bias"]]
    bias = torch.randn(windows, tokens, tokens, HEADS, device=device).permute(0, 3, 1, 2) if windows else None
    if windows > 1:  # as the windows at the edges of a Swin
        bias = bias - 100 * (torch.rand(WINDOWS, 1, tokens, tokens, device=device) > 0.7)
    if windows:  # what the kernel takes it for
        bias = bias.half().float()
    columns = [-(-size // 8) * 8 for size in (width, width, tokens, width)]
    masks = [torch.rand(WINDOWS * HEADS * tokens * c + 5, device=device) > 0.5 for c in columns]
    sent = torch.randn(WINDOWS, HEADS, tokens, width, device=device)
    sent = sent if windows else sent[:, :, :1, :1].expand_as(sent)  # such as the gradient of a mean
    runs = []
    for attend in (_written_out, _at_once):
        quantizers = quantizers_of(products)
        for quantizer, mask in zip(quantizers, masks, strict=True):
            quantizer.leaves, quantizer.dropping = [], (mask, None) if case["drops"] else None
        out = attend(products, operands, bias)
        leaves = [leaf for quantizer in quantizers for leaf in quantizer.leaves]
        runs.append([out.detach(), *torch.autograd.grad(out, [operands, *leaves], sent)])
    written, at_once = runs
    assert [t.shape for t in written] == [t.shape for t in at_once]
    return [float((a - b).norm() / a.norm()) for a, b in zip(written, at_once, strict=True)]


def _written_out(products: list[QuantMatMul], operands: Tensor, bias: Tensor | None) -> Tensor:
    owner = mock.Mock(spec=OpenedModule, products=products, nested=False)
    mode = _ProductMode(owner)
    multiply = (mode._multiply, mode._multiply)
    return written_out_attention(multiply, *unbind(operands), bias, softmax=mode._softmax)


def _at_once(products: list[QuantMatMul], operands: Tensor, bias: Tensor | None) -> Tensor:
    with mock.patch.object(window_attention, "_has_kernel", return_value=True):
        out = window_attention.attention_at_once(*products, operands, bias, 1 / math.sqrt(operands.size(-1)))
    assert out is not None
    return out


def quantizers_of(products: list[QuantMatMul]) -> list[ActivationQuantizer]:
    return [q for p in products for q in (p.left_quantizer, p.right_quantizer)]


def products_of(released: bool, tokens: int, device: str) -> list[QuantMatMul]:
    """Two products whose ranges clip some of what they are given: one for all, or one for each head and token."""
    products = [QuantMatMul(4).to(device), QuantMatMul(4).to(device)]
    products[1].rescales_rows = not released
    scales, zero_points = (0.11, 0.2, 0.05, 0.25), (7, 8, 1, 8)
    for place, quantizer in enumerate(quantizers_of(products)):
        scale, zero_point = torch.tensor(scales[place]), torch.tensor(float(zero_points[place]))
        if released:
            rows = (HEADS, 1, tokens) if place == 1 else (HEADS, tokens, 1)
            scale = scale * (0.5 + torch.rand(rows))
            zero_point = zero_point + torch.arange(HEADS).view(HEADS, 1, 1)
        quantizer.set_range(scale.to(device), zero_point.to(device))
    for product in products:
        product.quantized = True
    return products


if __name__ == "__main__":
    assert window_attention.kernel_works("cpu")
    print(json.dumps([distances(case, "cpu") for case in CASES]))
