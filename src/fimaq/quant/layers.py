"""Quantized Linear, Conv2d and matrix product.

A layer is converted in place by changing its class, so that a model's own code, which may read `weight` or
`in_features` from its layers, goes on working. Each layer has two switches: `quantized` (off: the
full-precision layer) and `hard` (on: `weight` already holds what the stored integers stand for). What is hard and
not being learned is computed on the integers themselves, as a runtime does (`integer.py`).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.quant.aligned import filled_product
from fimaq.quant.fake import dequantize, quantize
from fimaq.quant.integer import exact_type
from fimaq.quant.quantizers import ActivationQuantizer, WeightQuantizer


class QuantizedLayer(nn.Module):
    """What QuantLinear and QuantConv2d share: one input quantizer, one weight quantizer, integer codes."""

    weight: Tensor
    bias: Any
    input_quantizer: ActivationQuantizer
    weight_quantizer: WeightQuantizer
    quantized: bool
    hard: bool
    divided: dict[int, int]
    shares: Tensor | None
    codes: Tensor
    output_offset: float | None

    def _attach_quantizers(self, weight_bits: int, input_bits: int) -> None:
        self.input_quantizer = ActivationQuantizer(input_bits).to(self.weight.device)
        self.weight_quantizer = WeightQuantizer(weight_bits).to(self.weight.device)
        self.quantized = False
        self.hard = False
        self.divided = {}
        self.output_offset = None
        # Buffers, to follow the layer to its device; the run's file stores them in its own way.
        self.register_buffer("shares", None, persistent=False)
        self.register_buffer("codes", None, persistent=False)

    def columns(self, x: Tensor) -> Tensor:
        """What is quantized of the input: all of it, as it is."""
        return x

    def effective_weight(self) -> Tensor:
        if not self.quantized or self.hard:
            return self.weight
        return self.weight_quantizer(self.weight)

    def effective_input(self, x: Tensor) -> Tensor:
        return self.input_quantizer(x) if self.quantized else x

    def runs_on_integers(self, x: Tensor) -> bool:
        return self.quantized and self.hard and not x.requires_grad

    def steps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Whole numbers for the input and the weight, in a type in which the sums of their products are exact."""
        quantizer = self.weight_quantizer
        terms = self.weight[0].numel()
        exact = torch.promote_types(exact_type(terms, self.input_quantizer.levels, quantizer.levels), x.dtype)
        return self.input_quantizer.steps(x).to(exact), self.codes.to(exact) - quantizer.zero_point.to(exact)

    def scale_of_sums(self) -> Tensor:
        """What one in a sum of products of steps stands for: (out,), or (..., out) with a scale per token."""
        return self.input_quantizer.scale * self.weight_quantizer.scale.flatten()

    @torch.no_grad()
    def harden(self) -> int:
        """Fix the integers: from here on `weight` is exactly what they stand for.

        Returns how many of them are not what rounding to nearest would give.
        """
        quantizer = self.weight_quantizer
        codes = quantizer.codes(self.weight)
        nearest = quantize(self.weight, quantizer.scale, quantizer.zero_point, quantizer.levels)
        self.set_codes(codes)
        return int((codes != nearest).sum())

    @torch.no_grad()
    def set_codes(self, codes: Tensor) -> None:
        """Take integer codes (weight-shaped, in [0, levels]) as the weight."""
        quantizer = self.weight_quantizer
        dequantized = dequantize(codes.to(quantizer.scale.dtype), quantizer.scale, quantizer.zero_point)
        self.weight = nn.Parameter(dequantized, requires_grad=False)
        quantizer.rounding = None
        self.codes = codes.to(torch.uint8)
        self.hard = True
        self.quantized = True


class QuantLinear(QuantizedLayer, nn.Linear):
    """nn.Linear with quantized input (..., in) and weight (out, in).

    An input channel may be divided into several columns with equal shares of it (calibrate/massive.py): `in`
    counts columns.
    """

    @torch.no_grad()
    def divide(self, columns: dict[int, int]) -> None:
        """Give input channels several columns each, instead of one: channel -> how many."""
        if not all(0 <= channel < self.in_features for channel in columns):
            raise ValueError(f"{max(columns)} is not one of {self.in_features} channels")
        if sum(columns.values()) - len(columns) > self.in_features:
            raise ValueError("more columns would be added than there are channels")
        added = [channel for channel, count in columns.items() for _ in range(count - 1)]
        channels = [*range(self.in_features), *added]
        shares = [1 / columns.get(channel, 1) for channel in channels]
        self.divided = columns
        self.shares = torch.tensor(shares, device=self.weight.device, dtype=self.weight.dtype)
        self.weight = nn.Parameter(self.weight[:, channels], requires_grad=False)
        self.in_features = len(channels)

    def columns(self, x: Tensor) -> Tensor:
        """Channels to columns: (..., channels) -> (..., in)."""
        if self.shares is None:
            return x
        added = [x[..., c : c + 1].expand(*x.shape[:-1], n - 1) for c, n in self.divided.items()]
        return torch.cat([x, *added], dim=-1) * self.shares

    def forward(self, x: Tensor, *given_bias: Tensor | None) -> Tensor:
        """`given_bias` replaces the layer's own: some models put their bias together themselves."""
        bias = given_bias[0] if given_bias else self.bias
        x = self.columns(x)
        if not self.runs_on_integers(x):
            return F.linear(self.effective_input(x), self.effective_weight(), bias)
        product = F.linear(*self.steps(x)).to(x.dtype).mul_(self.scale_of_sums())
        if self.output_offset is not None and not given_bias:
            shifted, back = self.rounding_bias()
            return product.add_(shifted).add_(back)
        return product if bias is None else product.add_(bias)

    def rounding_bias(self) -> tuple[Tensor, Tensor]:
        """Two biases (out,) to add, one after the other, that also round the output to a grid (exact.py)."""
        assert self.output_offset is not None
        back = torch.full_like(self.weight[:, 0], -self.output_offset)
        return (-back if self.bias is None else self.bias - back), back


class QuantConv2d(QuantizedLayer, nn.Conv2d):
    """nn.Conv2d with quantized input (B, in, H, W) and weight (out, in / groups, kh, kw)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.runs_on_integers(x):
            run = self._product_of_patches if self._learns_patches() else self._conv_forward
            return run(self.effective_input(x), self.effective_weight(), self.bias)
        product = self._conv_forward(*self.steps(x), None).to(x.dtype).mul_(self.scale_of_sums().view(-1, 1, 1))
        return product if self.bias is None else product.add_(self.bias.view(-1, 1, 1))

    def _learns_patches(self) -> bool:
        """Whether gradients are taken, and windows neither overlap nor leave gaps, as in a ViT's first layer."""
        whole = self.kernel_size == self.stride and self.padding in ("valid", (0, 0))
        return torch.is_grad_enabled() and whole and self.dilation == (1, 1) and self.groups == 1

    def _product_of_patches(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same convolution as one matrix product: libraries are slow at gradients of windows that large."""
        (height, width), (down, across) = x.shape[2:], self.kernel_size
        x = x[:, :, : height - height % down, : width - width % across]
        windows = x.unflatten(3, (-1, across)).unflatten(2, (-1, down))  # (B, in, rows, down, columns, across)
        patches = windows.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(patches, weight.flatten(1), bias).permute(0, 3, 1, 2)


class QuantMatMul(nn.Module):
    """A product of two activations, both quantized: left (..., n, k) @ right (..., k, m).

    `rescales_rows`, for the output of a softmax: each row is divided by its largest element before it is
    quantized, and the product multiplied by it afterwards. A sharp row and a flat one then use the same static
    range in full; without it, a range that holds the sharp one rounds the flat one to nothing. Since
    a / max(a) = exp(score - max(score)), nothing need be normalised first: while it is learned, and with
    `takes_exponentials`, the product is that of the exponentials, divided by their sums.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.left_quantizer = ActivationQuantizer(bits)
        self.right_quantizer = ActivationQuantizer(bits)
        self.rescales_rows = False
        self.takes_exponentials = False
        self.quantized = False

    def wants_exponentials(self, learns: bool) -> bool:
        return self.quantized and (self.rescales_rows if learns else self.takes_exponentials)

    def forward(self, left: Tensor, right: Tensor, sums: Tensor | None = None, spare: int = 0) -> Tensor:
        """With `sums` (..., n, 1), `left` holds the exponentials of a softmax, which sum to them.

        While it is learned, the right side may get `spare` columns of zeros, and gets rows of zeros where the left
        side has spare columns.
        """
        if sums is not None:
            return self.product(left, right) / sums
        if not self.quantized:
            return filled_product(left, right, spare)
        if not self.rescales_rows:
            return self.product(left, right, spare)
        largest = largest_of_rows(left)
        return self.product(left / largest, right, spare) * largest

    def product(self, left: Tensor, right: Tensor, spare: int = 0) -> Tensor:
        """Of the quantized operands. A scale per summed token cannot be taken out of the sum: then in float."""
        one, two = self.left_quantizer, self.right_quantizer
        scale_per_term = two.scale.dim() > 1 and two.scale.shape[-2] > 1
        learns = one.leaves is not None  # even if the operands cannot: they may be what the unit is given
        if learns or left.requires_grad or right.requires_grad or scale_per_term:
            return filled_product(one(left), two(right), spare)
        exact = torch.promote_types(exact_type(left.shape[-1], one.levels, two.levels), left.dtype)
        sums = torch.matmul(one.steps(left).to(exact), two.steps(right).to(exact))
        return sums.to(left.dtype).mul_(one.scale * two.scale)


def largest_of_rows(left: Tensor) -> Tensor:
    """(..., n, k) -> (..., n, 1), never zero, without gradient: rescaling by it changes nothing but rounding."""
    return left.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(left.dtype).tiny)


QUANTIZED = (QuantLinear, QuantConv2d, QuantMatMul)


def convert_layer(layer: nn.Module, weight_bits: int, input_bits: int) -> None:
    """Turn an nn.Linear or nn.Conv2d into its quantized form, in place, quantizers off."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        raise TypeError(f"a {type(layer).__name__} is neither Linear nor Conv2d")
    layer.__class__ = QuantLinear if isinstance(layer, nn.Linear) else QuantConv2d
    assert isinstance(layer, QuantizedLayer)
    layer._attach_quantizers(weight_bits, input_bits)


def restore_layer(layer: nn.Module) -> None:
    """Undo `convert_layer` on a layer that was not hardened."""
    layer.__class__ = nn.Linear if isinstance(layer, QuantLinear) else nn.Conv2d
    del layer.input_quantizer, layer.weight_quantizer, layer.quantized, layer.hard
    del layer.divided, layer.shares, layer.codes, layer.output_offset


def can_convert(layer: nn.Module) -> bool:
    """True for layers that compute exactly what nn.Linear or nn.Conv2d does (zero padding only)."""
    if "forward" in vars(layer) or "weight" not in layer._parameters:
        return False  # replaced on this very object, or computed from others
    if isinstance(layer, nn.Linear):
        return type(layer).forward is nn.Linear.forward
    if isinstance(layer, nn.Conv2d):
        return type(layer).forward is nn.Conv2d.forward and layer.padding_mode == "zeros"
    return False


def quantized_layers(module: nn.Module) -> Iterator[tuple[str, QuantizedLayer]]:
    """Every quantized Linear and Conv2d below `module`, with its name relative to it."""
    return ((name, m) for name, m in module.named_modules() if isinstance(m, QuantizedLayer))


def quantized_products(module: nn.Module) -> Iterator[tuple[str, QuantMatMul]]:
    """Every quantized matrix product below `module`, with its name relative to it."""
    return ((name, m) for name, m in module.named_modules() if isinstance(m, QuantMatMul))


def activation_quantizers(module: nn.Module) -> Iterator[tuple[str, ActivationQuantizer]]:
    return ((name, m) for name, m in module.named_modules() if isinstance(m, ActivationQuantizer))


def set_quantized(module: nn.Module, on: bool) -> None:
    """Switch every quantizer below `module` on or off."""
    for child in module.modules():
        if isinstance(child, (QuantizedLayer, QuantMatMul)):
            child.quantized = on
