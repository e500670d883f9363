"""Setting every range of a unit: what the layers see is recorded once, then each range is searched.

Activations are searched with the real weight, weights with the quantized input, so each search is exact for
its own choice: the error of the layer's output.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.calibrate.search import in_chunks, search_range, search_scale
from fimaq.config import Preset
from fimaq.models.find_products import are_probabilities
from fimaq.models.products import watched
from fimaq.quant.fake import fake_quantize
from fimaq.quant.layers import QuantConv2d, QuantizedLayer, QuantLinear, QuantMatMul, largest_of_rows
from fimaq.quant.quantizers import ActivationQuantizer, Quantizer
from fimaq.ranks import ALONE, Ranks, Stored

ROWS = {"cpu": 1024, "cuda": 8192}
"""Token vectors an activation search looks at; extremes are taken over all of them."""
FEWEST_IMAGES = 4
OF_EACH_SIZE = 8
MOST_PATCH_VALUES = 2**28
RANGE = ("scale", "zero_point")
SizeOf = Callable[[Tensor], Tensor]
"""Outputs (..., n, m) -> by what their errors are divided, (..., n, 1)."""


@torch.no_grad()
def set_ranges(
    unit: nn.Module,
    run: Callable[[], Any],
    preset: Preset,
    relative: bool = True,
    keep_on_host: bool = False,
    ranks: Ranks = ALONE,
    sweeps: Sequence[range] = (),
) -> None:
    """Search all ranges below `unit`. `run()` runs it in full precision on the calibration inputs.

    What the layers saw waits for its turn on the device, or with `keep_on_host` in host memory. With several
    `ranks`, `run()` runs on this rank's images of each of the `sweeps`, if it has any; each rank then searches
    some of the layers, on what all ranks saw of them in the order in which one would, and tells the others.

    With `relative`, errors count relative to the size of each token's output. The next LayerNorm brings every
    token to the same length; and one token with a massive activation (ViTs have them) would otherwise claim the
    whole range and leave one level to all others. A reconstruction that minimises plain errors should start from
    ranges that do so too.
    """
    size_of = _softened_norm if relative else _ones
    per_token = preset == "released"
    seen = recorded_calls(unit, run, keep_on_host)
    modules = list(seen)
    for module, recorded in _dealt(seen, ranks, sweeps, keep_on_host):
        device = next(module.buffers()).device
        inputs = [tensor.to(device) for tensor in recorded]
        if isinstance(module, QuantMatMul):
            _set_product(module, inputs[0], inputs[1], per_token, size_of)
        else:
            assert isinstance(module, QuantizedLayer)
            x = module.columns(inputs[0])
            _set_input(module, x, per_token, size_of)
            _set_weight(module, x, size_of, per_token)
    if ranks.size > 1:
        _tell_each_other(modules, ranks)


def _dealt(
    seen: dict[nn.Module, list[list[Tensor]]], ranks: Ranks, sweeps: Sequence[range], keep_on_host: bool
) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """The layers that this rank searches, in turn with the others, with their inputs from all ranks."""
    own = []
    for number, module in enumerate(list(seen)):
        calls, searcher = seen.pop(module), number % ranks.size
        if ranks.size > 1:
            device = next(module.buffers()).device
            calls = _calls_of_all(calls, ranks, sweeps, searcher, device)
            calls = [[part.cpu() for part in parts] for parts in calls] if keep_on_host else calls
        if searcher == ranks.rank:
            own.append((module, calls))
    while own:
        module, calls = own.pop(0)
        yield module, _joined_calls(calls)


def _calls_of_all(
    calls: list[list[Tensor]], ranks: Ranks, sweeps: Sequence[range], searcher: int, device: torch.device
) -> list[list[Tensor]]:
    """The calls that one process would have made on all images. A rank may have had none of a short sweep."""
    took_part = [ranks.share(sweep.stop) > ranks.share(sweep.start) for sweep in sweeps]
    calls_of_one, turns = len(calls) // sum(took_part), iter(calls)
    nothing = [part[:0] for part in calls[0]]
    return [
        [ranks.gather(part.to(device), sweep, searcher) for part in (next(turns) if took else nothing)]
        for sweep, took in zip(sweeps, took_part, strict=True)
        for _ in range(calls_of_one)
    ]


def _tell_each_other(modules: list[nn.Module], ranks: Ranks) -> None:
    """Every rank gets the ranges that others have found."""
    for number, module in enumerate(modules):
        quantizers = {name: m for name, m in module.named_modules() if isinstance(m, Quantizer)}

        def found(quantizers: dict[str, Quantizer] = quantizers) -> Stored:
            return {f"{n}.{key}": getattr(q, key) for n, q in quantizers.items() for key in RANGE}, None

        tensors, _ = ranks.from_rank(number % ranks.size, found)
        for name, quantizer in quantizers.items():
            quantizer.set_range(*(tensors[f"{name}.{key}"].to(quantizer.scale.device) for key in RANGE))


def recorded_inputs(
    unit: nn.Module, run: Callable[[], Any], keep_on_host: bool = False
) -> dict[nn.Module, list[Tensor]]:
    """Module -> its input tensors, those of all calls during `run()` one after the other."""
    calls = recorded_calls(unit, run, keep_on_host)
    return {module: _joined_calls(calls.pop(module)) for module in list(calls)}


def recorded_calls(
    unit: nn.Module, run: Callable[[], Any], keep_on_host: bool = False, copied: bool = False
) -> dict[nn.Module, list[list[Tensor]]]:
    """Module -> its input tensors in each call during `run()`.

    Copies of them where the unit changes one in place later.
    """
    seen: dict[nn.Module, list[list[Tensor]]] = {}
    versions: list[tuple[Tensor, int]] = []
    running: set[nn.Module] = set()

    def record(module: nn.Module, args: Sequence[Any]) -> None:
        if module in running:  # an opened attention sees that a layer of its own multiplies, and calls the layer
            return
        running.add(module)
        count = 2 if isinstance(module, QuantMatMul) else 1
        kept = [a.detach().clone() if copied else a.detach() for a in args[:count]]
        kept = [a.cpu() for a in kept] if keep_on_host else kept
        versions.extend((a, a._version) for a in kept)
        seen.setdefault(module, []).append(kept)

    def leave(module: nn.Module, *_: Any) -> None:
        running.discard(module)

    heavy = [m for m in unit.modules() if isinstance(m, (QuantizedLayer, QuantMatMul))]
    hooks = [m.register_forward_pre_hook(record) for m in heavy]
    hooks += [m.register_forward_hook(leave, always_call=True) for m in heavy]
    try:
        with watched(unit):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if any(tensor._version != version for tensor, version in versions):
        return recorded_calls(unit, run, keep_on_host, copied=True)
    return seen


def _joined_calls(calls: list[list[Tensor]]) -> list[Tensor]:
    return [_joined(parts) for parts in zip(*calls, strict=True)]


def _joined(calls: Sequence[Tensor]) -> Tensor:
    """What all calls saw, one after the other.

    A convolution that serves a pyramid of feature maps sees several sizes. Of each a few images are kept, and
    smaller maps are padded with zeros, which are quantized without error.
    """
    sizes = {call.shape[1:] for call in calls}
    if len(sizes) == 1:
        return torch.cat(list(calls))
    height, width = (max(size[d] for size in sizes) for d in (-2, -1))
    maps = [_spread(torch.cat([c for c in calls if c.shape[1:] == s]), OF_EACH_SIZE) for s in sorted(sizes)]
    return torch.cat([F.pad(m, (0, width - m.shape[-1], 0, height - m.shape[-2])) for m in maps])


def _set_input(layer: QuantizedLayer, x: Tensor, per_token: bool, size_of: SizeOf) -> None:
    """Range of a layer's input: (B, ..., in) for Linear, (B, in, H, W) for Conv2d."""
    quantizer = layer.input_quantizer
    if isinstance(layer, QuantConv2d):
        sample = _spread(x, max(FEWEST_IMAGES, _rows(x) // x[0, 0].numel()))

        def convolve(delta: Tensor) -> Tensor:
            return layer._conv_forward(delta.flatten(0, 1), layer.weight, None).unflatten(0, delta.shape[:2])

        _set_activation(quantizer, x, sample, convolve, ())
        return
    weight = _same_norms(layer.weight)
    rows = _spread(x.flatten(0, -2), _rows(x))
    size = size_of(F.linear(rows, weight))
    _set_activation(quantizer, x, rows, lambda d: F.linear(d, weight) / size, ())
    positions = x.shape[1:-1]
    if per_token and positions:
        images = _spread(x, max(16, _rows(x) // positions.numel()))

        def error_of(scale: Tensor, zero_point: Tensor) -> Tensor:
            delta = _rounding_error(images, scale, zero_point, quantizer.levels)
            return F.linear(delta, weight).square().sum(-1, keepdim=True).sum(1)

        groups = torch.Size((*positions, 1))
        _set_token_scales(quantizer, groups, error_of, images.numel())


def _set_weight(layer: QuantizedLayer, x: Tensor, size_of: SizeOf, per_token: bool) -> None:
    """Per-channel range of a weight: the output error is delta G delta^T with G the inputs' Gram matrix."""
    quantizer, input_quantizer = layer.weight_quantizer, layer.input_quantizer
    x = fake_quantize(x, input_quantizer.scale, input_quantizer.zero_point, input_quantizer.levels)
    gram = _gram(layer, x, size_of)
    groups, size, _ = gram.shape
    weight = layer.weight.reshape(groups, -1, size)

    def error_of(scale: Tensor, zero_point: Tensor) -> Tensor:
        delta = fake_quantize(weight, scale[..., None], zero_point[..., None], quantizer.levels) - weight
        return ((delta @ gram) * delta).sum(-1)

    low, high = weight.amin(-1).clamp_max(0), weight.amax(-1).clamp_min(0)
    fixed = None if per_token else _fixed_zero_point(quantizer.levels)
    scale, zero_point = search_range(low, high, quantizer.levels, in_chunks(error_of, weight.numel()), fixed)
    shape = (-1, *[1] * (layer.weight.dim() - 1))
    quantizer.set_range(scale.reshape(shape), zero_point.reshape(shape))


def _gram(layer: QuantizedLayer, x: Tensor, size_of: SizeOf) -> Tensor:
    """Sum of x x^T over all positions: (groups, in, in), in being the weights of one output channel."""
    if isinstance(layer, QuantLinear):
        rows = x.flatten(0, -2)
        rows = (rows / size_of(F.linear(rows, layer.weight)))[None]
    else:
        assert isinstance(layer, QuantConv2d)
        padding = layer.padding if not isinstance(layer.padding, str) else _explicit_padding(layer)
        of_one = F.unfold(x[:1], layer.kernel_size, layer.dilation, padding, layer.stride)
        images = _spread(x, min(64, max(1, MOST_PATCH_VALUES // of_one.numel())))
        patches = F.unfold(images, layer.kernel_size, layer.dilation, padding, layer.stride)
        rows = patches.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    return rows.transpose(1, 2) @ rows / rows.shape[1]


def _explicit_padding(layer: nn.Conv2d) -> tuple[int, int]:
    if layer.padding == "valid":
        return (0, 0)
    (kh, kw), (dh, dw) = layer.kernel_size, layer.dilation
    return (dh * (kh - 1) // 2, dw * (kw - 1) // 2)


def _set_product(product: QuantMatMul, left: Tensor, right: Tensor, per_token: bool, size_of: SizeOf) -> None:
    """Ranges of both operands: left (..., n, k), right (..., k, m), first dimension over images or windows."""
    few_left, few_right = (_spread(t, _images_for(left)) for t in (left, right))
    heads = (left.shape[1], 1, 1) if per_token and left.dim() == 4 else ()
    # What attention gives a token is normalised later, like a Linear's output; scores before a softmax are not.
    output = few_left @ few_right
    size = size_of(output) if are_probabilities(few_left) else _ones(output)
    if product.rescales_rows:
        size = size / largest_of_rows(few_left)
        left, few_left = left / largest_of_rows(left), few_left / largest_of_rows(few_left)
    levels = product.left_quantizer.levels
    fixed = [None if per_token else _fixed_zero_point(levels, bool(t.min() >= 0)) for t in (left, right)]
    _set_activation(product.left_quantizer, left, few_left, lambda d: d @ few_right / size, heads, fixed[0])
    _set_activation(product.right_quantizer, right, few_right, lambda d: few_left @ d / size, heads, fixed[1])
    if not heads:
        return

    def left_error(scale: Tensor, zero_point: Tensor) -> Tensor:
        delta = _rounding_error(few_left, scale, zero_point, product.left_quantizer.levels)
        return (delta @ few_right).square().sum(-1, keepdim=True).sum(1)

    def right_error(scale: Tensor, zero_point: Tensor) -> Tensor:
        delta = _rounding_error(few_right, scale, zero_point, product.right_quantizer.levels)
        if tokens_last:
            return (few_left @ delta).square().sum(-2, keepdim=True).sum(1)
        # Tokens are summed over by the product; what one of them adds is its error times its weight.
        return (delta.square().sum(-1, keepdim=True) * weight_of_token).sum(1)

    tokens_last = left.shape[-2] == right.shape[-1] and left.shape[-1] != left.shape[-2]
    weight_of_token = few_left.square().sum(-2).unsqueeze(-1)
    largest = max(few_left.numel(), few_right.numel(), output.numel())
    rows = torch.Size((left.shape[1], left.shape[2], 1))
    columns = torch.Size((left.shape[1], *((1, right.shape[3]) if tokens_last else (right.shape[2], 1))))
    _set_token_scales(product.left_quantizer, rows, left_error, largest)
    _set_token_scales(product.right_quantizer, columns, right_error, largest)


def _images_for(left: Tensor) -> int:
    """How many images or windows a product search looks at: small windows need more of them."""
    return max(FEWEST_IMAGES, _rows(left) // left.shape[-2])


def _rows(x: Tensor) -> int:
    return ROWS["cuda" if x.is_cuda else "cpu"]


def _softened_norm(output: Tensor) -> Tensor:
    """Norms of the rows of `output`, kept away from zero: (..., n, m) -> (..., n, 1)."""
    size = output.norm(dim=-1, keepdim=True)
    return size + 0.3 * size.median() + torch.finfo(size.dtype).tiny


def _ones(output: Tensor) -> Tensor:
    """Every row counts as it is."""
    return torch.ones_like(output[..., :1])


def _same_norms(weight: Tensor) -> Tensor:
    """A matrix that maps every input to an output of the same norm as weight (out, in) does, with out <= in."""
    return torch.linalg.qr(weight, mode="r").R if weight.shape[0] > weight.shape[1] else weight


def _set_activation(
    quantizer: ActivationQuantizer,
    x: Tensor,
    sample: Tensor,
    apply: Callable[[Tensor], Tensor],
    heads: tuple[int, ...],
    fixed_zero_point: float | None = None,
) -> None:
    """Search one range per tensor (`heads` empty) or per head.

    `apply` maps rounding errors of the sample, (candidates, *sample), to the layer's output errors.
    """
    over = [d for d in range(x.dim()) if not heads or d != 1]

    def error_of(scale: Tensor, zero_point: Tensor) -> Tensor:
        output = apply(_rounding_error(sample, scale, zero_point, quantizer.levels))
        summed = [d for d in range(1, output.dim()) if not heads or d != 2]
        return output.square().sum(summed).view(len(scale), *heads)

    low, high = x.amin(over).clamp_max(0).view(heads), x.amax(over).clamp_min(0).view(heads)
    size = max(sample.numel(), apply(sample[None]).numel())
    found = search_range(low, high, quantizer.levels, in_chunks(error_of, size), fixed_zero_point)
    quantizer.set_range(*found)


def _fixed_zero_point(levels: int, never_negative: bool = False) -> float | None:
    """For weights and operands of products: one that lets a runtime multiply without zero points, which is faster.

    With 8 bits it must be in the middle, or zero where nothing is negative. With fewer, the whole numbers of steps
    fit into a signed byte wherever zero is, and it can be searched.
    """
    if levels < 255:
        return None
    return 0.0 if never_negative else 128.0


def _set_token_scales(
    quantizer: ActivationQuantizer,
    groups: torch.Size,
    error_of: Callable[[Tensor, Tensor], Tensor],
    size: int,
) -> None:
    zero_point = quantizer.zero_point
    scale = search_scale(quantizer.scale, zero_point, groups, in_chunks(error_of, size))
    quantizer.set_range(scale, zero_point)


def _rounding_error(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """quantized - real for every candidate: x (n, ...), scale (C, *groups) -> (C, n, ...)."""
    missing = x.dim() - scale.dim() + 1
    shape = (len(scale), *[1] * missing, *scale.shape[1:])
    return fake_quantize(x, scale.view(shape), zero_point.view(shape), levels) - x


def _spread(x: Tensor, count: int) -> Tensor:
    """At most `count` rows of x, drawn with a fixed seed: a regular stride may miss whole tokens or windows."""
    if len(x) <= count:
        return x
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count].sort().values
    return x[chosen.to(x.device)]
