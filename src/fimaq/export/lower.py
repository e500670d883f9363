"""From a loaded run to a model whose quantized layers are made of the operators that runtimes execute in integer.

Linear: quantize, multiply with weights (in, out) dequantized per column, add the bias. A convolution whose
windows do not overlap (a patch embedding) is such a product of patches. Attention products: both sides are
quantized. The left side of a product is unsigned bytes, the right one signed, the pair that processors multiply
fastest; unsigned too where both have 8 bits and the file is for any processor: some would get the fastest pair
wrong (`processor.py`).

`symmetric` is for runtimes that multiply without zero points only: the codes are then the whole numbers of steps
themselves, in signed bytes, wherever these fit. With 7 bits or fewer they always do.
"""

from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.errors import InputError
from fimaq.export.operators import convolve, multiply, quantize
from fimaq.export.processor import largest_signed
from fimaq.quant.layers import QuantConv2d, QuantizedLayer, QuantLinear, QuantMatMul
from fimaq.quant.quantizers import ActivationQuantizer


class IntegerActivation(nn.Module):
    """One quantized activation: x (...) -> its 8-bit codes."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, quantizer: ActivationQuantizer, signed: bool, symmetric: bool) -> None:
        super().__init__()
        zero = int(quantizer.zero_point)
        shift = (quantizer.levels + 1) // 2 if signed else 0
        if symmetric:
            signed = zero <= 128 and quantizer.levels - zero <= 127
            shift = zero if signed else 0
        self.low, self.high = -shift, quantizer.levels - shift
        self.register_buffer("scale", quantizer.scale.detach().clone().reshape(()))
        self.register_buffer("zero_point", torch.tensor(zero - shift, dtype=torch.int8 if signed else torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return quantize(x, self.scale, self.zero_point, self.low, self.high)

    def times(self, codes: Tensor, right: "IntegerActivation | IntegerWeight", right_codes: Tensor) -> Tensor:
        """The product of what codes of this activation (..., n, k) and those of `right` (..., k, m) stand for."""
        return multiply(codes, self.scale, self.zero_point, right_codes, right.scale, right.zero_point)


class IntegerWeight(nn.Module):
    """A weight matrix (in, out) as integers with one scale and zero point per column."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, layer: QuantizedLayer, symmetric: bool, processor: str) -> None:
        super().__init__()
        quantizer = layer.weight_quantizer
        self.bits = 4 if quantizer.bits <= 4 and not symmetric else 8
        zero = quantizer.zero_point.flatten().to(torch.int16)
        middle = 2 ** (quantizer.bits - 1)
        signed = middle <= largest_signed(layer.input_quantizer.levels, processor)
        shift = zero if symmetric else torch.full_like(zero, middle if signed else 0)
        codes = layer.codes.to(torch.int16).flatten(1).T.contiguous() - shift
        kind = torch.int8 if signed else torch.uint8
        if codes.min() < torch.iinfo(kind).min or codes.max() > torch.iinfo(kind).max:
            raise InputError(
                "8-bit weights whose zero points are not in the middle are not multiplied in integer by OpenVINO: "
                "quantize again with this version of fimaq"
            )
        self.register_buffer("codes", codes.to(kind))
        self.register_buffer("scale", quantizer.scale.detach().flatten().clone())
        self.register_buffer("zero_point", (zero - shift).to(kind))


class _WithWeight(QuantizedLayer):
    """What a Linear and a convolution of patches share: an activation on the left, a weight on the right."""

    def prepare(self, symmetric: bool, processor: str) -> None:
        self.input = IntegerActivation(self.input_quantizer, False, symmetric)
        self.integers = IntegerWeight(self, symmetric, processor)

    def product(self, codes: Tensor) -> Tensor:
        """Codes of the input (..., n, in) times the weight: (..., n, out)."""
        return self.input.times(codes, self.integers, self.integers.codes)


class IntegerLinear(_WithWeight, QuantLinear):
    """Input (..., in) -> (..., out)."""

    shifted: Tensor
    back: Tensor

    def prepare(self, symmetric: bool, processor: str) -> None:
        super().prepare(symmetric, processor)
        if self.output_offset is not None:
            for name, bias in zip(("shifted", "back"), self.rounding_bias(), strict=True):
                self.register_buffer(name, bias.clone())

    def forward(self, x: Tensor, *given_bias: Tensor | None) -> Tensor:
        bias = given_bias[0] if given_bias else self.bias
        # Matrices become a batch of one: runtimes join a plain product and its bias into one float operator.
        codes = self.input(self.columns(x))
        product = self.product(codes.unsqueeze(0)).squeeze(0) if x.dim() == 2 else self.product(codes)
        if self.output_offset is not None and not given_bias:
            return product + self.shifted + self.back
        return product if bias is None else product + bias


class IntegerPatches(_WithWeight, QuantConv2d):
    """A convolution whose windows lie side by side: (B, C, H, W) -> (B, out, H / height, W / width)."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.kernel_size
        codes = self.input(x).unflatten(3, (-1, width)).unflatten(2, (-1, height))
        rows, columns = codes.shape[2], codes.shape[4]
        patches = codes.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        product = self.product(patches)
        product = product if self.bias is None else product + self.bias
        return product.transpose(1, 2).unflatten(2, (rows, columns))


class IntegerConv2d(QuantConv2d):
    """Any other convolution, on integers: weights minus their zero point are a sum of parts, all small enough."""

    def prepare(self, symmetric: bool, processor: str) -> None:
        self.input = IntegerActivation(self.input_quantizer, False, symmetric)
        quantizer = self.weight_quantizer
        whole = self.codes.to(torch.int16) - quantizer.zero_point.to(torch.int16)
        parts = _small_parts(whole, largest_signed(self.input_quantizer.levels, processor))
        self.parts = nn.ParameterList(nn.Parameter(part.to(torch.int8), requires_grad=False) for part in parts)
        self.register_buffer("sum_scale", (self.input.scale * quantizer.scale).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        codes, zero_point = self.input(x), self.input.zero_point
        padding = list(self._reversed_padding_repeated_twice)
        shape = (list(self.stride), padding, list(self.dilation), self.groups)
        total, *others = (convolve(codes, zero_point, part, *shape) for part in self.parts)
        for other in others:
            total = total + other
        product = total * self.sum_scale
        return product if self.bias is None else product + self.bias.view(-1, 1, 1)


class IntegerMatMul(QuantMatMul):
    """The product of two activations (..., n, k) and (..., k, m)."""

    def prepare(self, symmetric: bool, processor: str) -> None:
        self.left = IntegerActivation(self.left_quantizer, False, symmetric)
        signed = (self.right_quantizer.levels + 1) // 2 <= largest_signed(self.left_quantizer.levels, processor)
        self.right = IntegerActivation(self.right_quantizer, signed, symmetric)

    def product(self, left: Tensor, right: Tensor, spare: int = 0) -> Tensor:
        return self.left.times(self.left(left), self.right, self.right(right))


class ConstantLayer(QuantLinear):
    """A layer whose input is not the image's: a table of position biases, say. Its output is stored instead."""

    output: Tensor

    def forward(self, x: Tensor, *given_bias: Tensor | None) -> Tensor:
        return self.output


IntegerForm = type[IntegerLinear] | type[IntegerPatches] | type[IntegerConv2d] | type[IntegerMatMul]


def lower(model: nn.Module, example: Tensor, symmetric: bool = False, processor: str = "any") -> nn.Module:
    """The same model, in place, with every quantized layer turned into its integer form.

    `example`: at least two images (n, C, H, W), to see what depends on the image. `processor`: one of
    `LARGEST_SUMS`. A symmetric runtime has no unsigned right sides to fall back on: it gets signed ones always.
    """
    processor = "vnni" if symmetric else processor
    constants = _constant_outputs(model, example)
    for name, module in list(model.named_modules()):
        form = _integer_form(module)
        if module in constants:
            module.__class__ = ConstantLayer
            module.register_buffer("output", constants[module])
        elif form is not None:
            _refuse_many_scales(name, module)
            module.__class__ = form
            module.prepare(symmetric, processor)
    return model


@torch.no_grad()
def size_step(model: nn.Module, example: Tensor) -> tuple[int, int] | None:
    """Of what height and width images must be multiples, where the model takes other sizes than the example's."""
    patches = next((m.kernel_size for m in model.modules() if isinstance(m, QuantConv2d)), None)
    if patches is None or any(size % step for size, step in zip(example.shape[2:], patches, strict=True)):
        return None
    height, width = patches
    try:
        model(F.pad(example, (0, 2 * width, 0, height)))
    except (RuntimeError, AssertionError, ValueError, IndexError):
        return None
    return height, width


def count_products(lowered: nn.Module) -> int:
    """How many products of integers one forward pass makes."""
    kinds = (IntegerLinear, IntegerPatches, IntegerMatMul)
    whole = sum(isinstance(module, kinds) for module in lowered.modules())
    return whole + sum(len(m.parts) for m in lowered.modules() if isinstance(m, IntegerConv2d))


def has_unsigned_right_sides(lowered: nn.Module) -> bool:
    """Whether some product is not of the fastest pair, unsigned times signed."""
    weights = [m.integers for m in lowered.modules() if isinstance(m, _WithWeight)]
    activations = [m.right for m in lowered.modules() if isinstance(m, IntegerMatMul)]
    return any(right.zero_point.dtype == torch.uint8 for right in (*weights, *activations))


@torch.no_grad()
def _constant_outputs(model: nn.Module, example: Tensor) -> dict[nn.Module, Tensor]:
    """Linear layers that give the same for one image, another, and two of them; and what they give."""
    seen: dict[nn.Module, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda m, _, output: seen.setdefault(m, []).append(output))
        for module in model.modules()
        if isinstance(module, QuantLinear)
    ]
    try:
        for images in (example[:1], torch.zeros_like(example[:1]), example[:2]):
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {m: found[0] for m, found in seen.items() if all(torch.equal(found[0], other) for other in found)}


def _small_parts(whole: Tensor, largest: int) -> list[Tensor]:
    """As few whole numbers as are small enough for a signed byte, and no larger than `largest`, with this sum."""
    for parts in count(1):
        found = [whole * (i + 1) // parts - whole * i // parts for i in range(parts)]
        if all(part.min() >= -largest and part.max() <= min(largest, 127) for part in found):
            return found
    raise AssertionError("unreachable")


def _integer_form(module: nn.Module) -> IntegerForm | None:
    if isinstance(module, QuantMatMul):
        return IntegerMatMul
    if isinstance(module, QuantLinear):
        return IntegerLinear
    if isinstance(module, QuantConv2d):
        side_by_side = module.kernel_size == module.stride and not any(module._reversed_padding_repeated_twice)
        plain = module.groups == 1 and set(module.dilation) == {1}
        return IntegerPatches if side_by_side and plain else IntegerConv2d
    return None


def _refuse_many_scales(name: str, module: nn.Module) -> None:
    scales = max(m.scale.numel() for m in module.children() if isinstance(m, ActivationQuantizer))
    if scales > 1:
        raise InputError(
            f"{name} has {scales} scales for one activation, as preset released has them; integer runtimes take "
            "one. Quantize with --preset deploy to export"
        )
