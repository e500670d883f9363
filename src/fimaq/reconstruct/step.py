"""One step of block reconstruction: batch, QDrop, forward, loss, backward, two optimisers, their schedules.

A step is a function of named tensors alone, which it also updates: the unit's own, the cached activations, the
objective's, what is learned, the iteration counter. So the same lines run as they are on a CPU, and on a GPU are
traced, compiled once for all units of one shape, and replayed as one CUDA graph (`compiled.py`).

Of several ranks, each works on its part of the batch (`deal.py`). Their gradients and losses, weighted by the size
of the part, are added up in one message between the backward pass and the optimisers: all ranks learn the same.
One process asked for as many `parts` works on them one after the other, and gets the bits of that many ranks.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate, chain, islice, pairwise
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fimaq.config import Config
from fimaq.fisher.collect import flat
from fimaq.models.units import Unit
from fimaq.quant.layers import activation_quantizers, quantized_layers
from fimaq.quant.masks import GOLDEN, WORD, chosen, mask_of, mask_size, mixed, random_words, unpacked, words_for
from fimaq.quant.quantizers import rounding_indecision
from fimaq.reconstruct.alike import kind_of
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.compiled import Replay
from fimaq.reconstruct.deal import Dealt, dealt, part_of
from fimaq.reconstruct.prefetch import Prefetch
from fimaq.together import Together

SHARPEST, BLUNTEST = 20.0, 2.0
"""The exponent of the rounding penalty falls from the first to the second after the warm-up."""
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's usual constants."""
ORDERED = 16384
"""Batches drawn in advance; longer runs start over. A fixed number, so that one compilation serves any length."""
BATCH = ("raw inputs", "quantized inputs", "outputs", "gradients")
"""What a step reads from the cache; the last only for BRECQ."""

Tensors = dict[str, Tensor]


class ReconstructionStep:
    """Learns the rounding of a unit's weights and the scales of its activations, on batches from the cache."""

    def __init__(self, unit: Unit, objective: nn.Module, config: Config, cache: ActivationCache) -> None:
        self.unit, self.objective, self.config, self.cache = unit, objective, config, cache
        self.layers = {f"{name}.".lstrip("."): layer for name, layer in quantized_layers(unit.module)}
        self.quantizers = {f"{name}.": quantizer for name, quantizer in activation_quantizers(unit.module)}
        for layer in self.layers.values():
            layer.weight_quantizer.start_learning(layer.weight)
        own = dict(chain(unit.module.named_parameters(), unit.module.named_buffers()))
        # Learned tensors are joined end to end, so that each optimiser is a few operations and not a few hundred.
        self.learned = {
            "roundings": [f"{name}weight_quantizer.rounding" for name in self.layers],
            "scales": [f"{name}scale" for name in self.quantizers],
        }
        self.shapes = {name: own[name].shape for names in self.learned.values() for name in names}
        joined = {g: torch.cat([own[n].flatten() for n in names]) for g, names in self.learned.items()}
        fixed = {f"unit.{n}": t.detach() for n, t in own.items() if n not in self.shapes}
        zeros = {f"{g}.{m}": torch.zeros_like(t) for g, t in joined.items() for m in ("first", "second")}
        device = cache.device
        self.order = _order(cache.count, config.batch_size)
        self.parts = _slices(config.batch_size, (config.parts or 1) if cache.ranks.size == 1 else 1)
        positions = {}
        if len(self.parts) > 1:
            self.order, places = _by_part(self.order, len(self.parts))
            positions["positions"] = places.to(device)
        self.tensors: Tensors = {
            **fixed,
            **joined,
            **zeros,
            "searched": joined["scales"].clone(),
            "iteration": torch.zeros((), dtype=torch.int32, device=device),
            "iterations": torch.tensor(float(config.iters), device=device),
            "rounding rate": torch.tensor(config.resolved_rounding_lr, device=device),
            "scale rate": torch.tensor(config.resolved_scale_lr, device=device),
            "seed": torch.randint(-(2**31), 2**31, (), dtype=torch.int32).to(device),
            "order": self.order.to(device),
            "loss": torch.zeros((), device=device),
            **positions,
        }
        words = [words_for(size) for size in self._mask_sizes()]
        self.mask_bits = [WORD * count for count in words]
        self.tensors["words"] = torch.zeros(sum(words), dtype=torch.int32, device=device)
        self.bits = torch.zeros(sum(self.mask_bits), dtype=torch.bool, device=device)
        # By themselves: the compiler keeps a row in registers only if all it reads starts where a tensor does.
        self.tensors |= {f"mask {i}": bits for i, bits in enumerate(self.bits.split(self.mask_bits))}
        # The unit itself goes on seeing what is learned.
        self._hand_over(self._learned_parts(self.tensors))
        self._replay: Callable[[], None] | None = None
        self._prefetch: Prefetch | Dealt | None = None
        self.steps = 0

    def _mask_sizes(self) -> list[int]:
        """How many elements of a whole batch are masked: of each input, and of what each quantizer reads."""
        seen: dict[nn.Module, int] = {}

        def note(quantizer: nn.Module, given: tuple[Any, ...]) -> None:
            seen[quantizer] = max(mask_size(given[0]), seen.get(quantizer, 0))

        def of(images: int) -> list[int]:
            seen.clear()
            inputs = [row.expand(images, *row.shape[1:]) for row in self.cache.rows("quantized inputs", 0, 1)]
            with torch.enable_grad(), self._learning([None] * len(self.quantizers)):
                self.unit.with_tensors(_part(self.tensors, "unit.") | self._learned_parts(self.tensors), inputs)
            return [*(mask_size(i) for i in inputs), *(seen.get(q, 0) for q in self.quantizers.values())]

        hooks = [quantizer.register_forward_pre_hook(note) for quantizer in self.quantizers.values()]
        try:
            # What does not depend on the image, such as a table of position biases, does not grow with the batch.
            more = self.config.batch_size - 1
            return [one + (two - one) * more for one, two in zip(of(1), of(2), strict=True)]
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def loss(self) -> float:
        """The loss of the latest step, without the rounding penalty. Reading it waits for the GPU."""
        return float(self.tensors["loss"])

    def __call__(self) -> None:
        if self._replay is None:
            self.tensors |= {f"objective.{n}": t for n, t in self.objective.named_buffers()}
            self.tensors |= self._cached()
            self._fetch_next()
            self._replay = self._prepared(self.config.compiles(self.cache.device.type))
        if self._prefetch is not None:
            self._prefetch.take()
        self._replay()
        self.steps += 1
        self._fetch_next()

    def _cached(self) -> Tensors:
        """The cached tensors where they are, or, for those that are not on the device, a batch of their rows."""
        stored = {f"{n} {i}": s for n in BATCH for i, s in enumerate(self.cache.stored(n))}
        away = {n: s for n, s in stored.items() if s.device.type != self.cache.device.type}
        if isinstance(self.cache.ranks, Together):
            self._prefetch = Dealt(stored, self.config.batch_size, self.cache.device, self.cache.ranks)
            stored = {**self._prefetch.batch, "positions": self._prefetch.positions}
        elif away:
            self._prefetch = Prefetch(away, self.config.batch_size, self.cache.device)
            stored |= self._prefetch.batch
        return stored

    def _fetch_next(self) -> None:
        if self._prefetch is not None:
            self._prefetch.fetch(self.order[self.steps % ORDERED].tolist())
            self.cache.leave_pages()

    def _prepared(self, compiled: bool) -> Callable[[], None]:
        """One iteration of this rank, to be called again and again."""
        ranks = self.cache.ranks
        masks = [
            (self._draw, {name: self.tensors[name] for name in ("words", "seed", "iteration")}),
            (_unpack, {"words": self.tensors["words"], "bytes": self.bits.view(torch.int32)}),
        ]
        if not isinstance(ranks, Together):
            kind = self._kind() if compiled else None
            return Replay(*masks, (self._step, self.tensors), compiled=compiled, kind=kind)
        share = ranks.share(self.config.batch_size) / self.config.batch_size
        length = sum(self.tensors[group].numel() for group in self.learned) + 1
        bucket = self.tensors["bucket"] = torch.zeros(length, device=self.cache.device)

        def own_part(t: Tensors) -> None:
            t["bucket"].copy_(self._gradients(t) * share)

        def together(t: Tensors) -> None:
            self._learn(t, t["bucket"])

        before = Replay(*masks, (own_part, self.tensors), compiled=compiled)
        after = Replay((together, self.tensors), compiled=compiled)

        def run() -> None:
            before()
            ranks.sum_(bucket)
            after()

        return run

    def _kind(self) -> Hashable:
        """Equal for steps that run the same operators: of all that they read but `tensors`."""
        unit, fetched = self.unit, list(self._prefetch.batch) if self._prefetch else []
        read = (unit.module, unit.inputs, unit.outputs, self.objective, self.learned, self.shapes, self.parts)
        return kind_of(*read, self.config.model_dump(), self.cache.device, fetched)

    def _draw(self, t: Tensors) -> None:
        """The bits of all masks of this iteration, packed."""
        key = mixed(t["seed"] + t["iteration"] * GOLDEN)
        t["words"].copy_(random_words(t["words"].numel(), self.config.drop_probability, key))

    def _step(self, t: Tensors) -> None:
        """Everything else that happens in one iteration; `t` holds all it reads and writes."""
        if len(self.parts) == 1:
            self._learn(t, self._gradients(t))
            return
        shares = [(part.stop - part.start) / self.config.batch_size for part in self.parts]
        found = [self._gradients(t, part) * share for part, share in zip(self.parts, shares, strict=True)]
        self._learn(t, sum(found[1:], found[0]))

    def _gradients(self, t: Tensors, part: slice = slice(None)) -> Tensor:
        """Gradients of the joined roundings and scales, and the loss without the rounding penalty, end to end."""
        raw, quantized, targets, weights = self._batch(t, part)
        positions = self._positions(t, part)
        bits = iter(_part(t, "mask ").values())  # the inputs take theirs, the rest is for the quantizers
        inputs = [chosen(mask_of(r, b, positions), r, q) for r, q, b in zip(raw, quantized, bits, strict=False)]
        learned = self._learned_parts(t)
        state = _part(t, "unit.") | learned
        target = flat(targets)
        with torch.enable_grad():
            with self._learning(bits, positions), self._lower_precision():
                outputs = self.unit.with_tensors(state, inputs)
                leaves = [quantizer.leaves or [] for quantizer in self.quantizers.values()]
            deltas = flat(outputs) - target
            arguments = (deltas, target, *weights)
            loss = functional_call(self.objective, _part(t, "objective."), arguments)
            total = loss + self._rounding_penalty(t, learned)
            roundings = [learned[name] for name in self.learned["roundings"]]
            found = torch.autograd.grad(total, [*roundings, *chain(*leaves)], materialize_grads=True)
        shapes = [self.shapes[n] for n, own in zip(self.learned["scales"], leaves, strict=True) for _ in own]
        scales = iter(_sums(shapes, found[len(roundings) :]))
        gradients = [*found[: len(roundings)], *(reduce(add, islice(scales, len(own))) for own in leaves)]
        return torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach().view(1)])

    def _learn(self, t: Tensors, gradients_and_loss: Tensor) -> None:
        """One step of both optimisers."""
        sizes = [t[group].numel() for group in self.learned] + [1]
        roundings, scales, loss = gradients_and_loss.split(sizes)
        t["iteration"] += 1
        share = (t["iteration"] / t["iterations"]).clamp(max=1)
        falling = 0.5 * (1 + torch.cos(math.pi * share))
        _adam(t, "roundings", roundings, t["rounding rate"])
        # Scales of one unit differ by orders of magnitude, and Adam's steps do not: they are taken relative to
        # what range search found.
        _adam(t, "scales", scales * t["searched"], falling * t["scale rate"] * t["searched"])
        t["scales"].copy_(torch.maximum(t["scales"], t["searched"] / 100))
        t["loss"].copy_(loss.view(()))

    def _batch(self, t: Tensors, part: slice) -> list[list[Tensor]]:
        """This iteration's rows of what is cached."""
        rows = _of_iteration(t["order"], t)[part]
        fetched = self._prefetch.batch if self._prefetch else {}
        batch = {
            key: s[part] if key in fetched else s.index_select(0, rows) for key, s in t.items() if _is_cached(key)
        }
        return [[s for key, s in batch.items() if key.startswith(f"{name} ")] for name in BATCH]

    def _positions(self, t: Tensors, part: slice) -> Tensor | None:
        """Where in the whole batch the rows of a part stand; None where they are all of it, in order."""
        return _of_iteration(t["positions"], t)[part] if len(self.parts) > 1 else t.get("positions")

    def _learned_parts(self, t: Tensors) -> Tensors:
        """Views of the joined tensors, shaped like what they stand for, as leaves for autograd."""
        parts: Tensors = {}
        for group, names in self.learned.items():
            sizes = [self.shapes[n].numel() for n in names]
            for name, part in zip(names, t[group].split(sizes), strict=True):
                parts[name] = part.view(self.shapes[name]).detach().requires_grad_()
        return parts

    def _lower_precision(self) -> torch.autocast:
        """Matrix products in bfloat16 on a GPU if asked for; what is learned stays in float32."""
        device = self.cache.device.type
        enabled = self.config.precision == "bf16" and device == "cuda"
        return torch.autocast(device, torch.bfloat16, enabled=enabled, cache_enabled=False)

    @contextmanager
    def _learning(self, bits: Iterable[Tensor | None], positions: Tensor | None = None) -> Iterator[None]:
        """QDrop inside the unit where there are `bits`, and scales that learn by rows, as long as a step."""
        drops = self.config.drop_probability > 0
        for quantizer, own in zip(self.quantizers.values(), bits, strict=True):
            quantizer.dropping = (own, positions) if drops and own is not None else None
            quantizer.leaves = []
        try:
            yield
        finally:
            for quantizer in self.quantizers.values():
                quantizer.dropping = quantizer.leaves = None

    def _rounding_penalty(self, t: Tensors, learned: Tensors) -> Tensor:
        """AdaRound's regulariser, 0 until the warm-up ends: sum of 1 - |2 h(V) - 1|^b."""
        share = t["iteration"] / t["iterations"]
        progress = ((share - self.config.warmup) / (1 - self.config.warmup)).clamp(0, 1)
        exponent = SHARPEST + (BLUNTEST - SHARPEST) * progress
        weight = self.config.rounding_weight * (share >= self.config.warmup)
        undecided = [rounding_indecision(learned[name], exponent) for name in self.learned["roundings"]]
        return weight * torch.stack(undecided).sum()

    def finish(self) -> bool:
        """Leave what was learned in the quantizers. False when it ran away: range search is kept instead."""
        finite = all(bool(self.tensors[group].isfinite().all()) for group in self.learned)
        if not finite:
            self.tensors["scales"].copy_(self.tensors["searched"])
            for layer in self.layers.values():
                layer.weight_quantizer.rounding = None
        for quantizer in self.quantizers.values():
            quantizer.scale = quantizer.scale.clone()
        if self._prefetch is not None:
            self._prefetch.close()
        self._replay = None
        return finite

    def _hand_over(self, learned: Tensors) -> None:
        for name, quantizer in self.quantizers.items():
            quantizer.scale = learned[f"{name}scale"].detach()
        for name, layer in self.layers.items():
            layer.weight_quantizer.rounding = learned[f"{name}weight_quantizer.rounding"].detach()


def _unpack(t: Tensors) -> None:
    t["bytes"].copy_(unpacked(t["words"]))


def _sums(shapes: list[torch.Size], by_rows: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of scales, from those of their rows.

    Those are put end to end first: so a GPU adds all of them up at once, and not each when it is there.
    """
    together = torch.cat([rows.flatten() for rows in by_rows])
    parts = together.split([rows.numel() for rows in by_rows])
    return [p.view(rows.shape).sum_to_size(shape) for p, rows, shape in zip(parts, by_rows, shapes, strict=True)]


def _adam(t: Tensors, group: str, gradient: Tensor, rate: Tensor) -> None:
    """Adam's update of one joined tensor; `t["iteration"]` counts from 1 here."""
    first, second = t[f"{group}.first"], t[f"{group}.second"]
    first.lerp_(gradient, 1 - BETA1)
    second.lerp_(gradient.square(), 1 - BETA2)
    count = t["iteration"].float()
    spread = (second / (1 - BETA2**count)).sqrt() + EPSILON
    t[group].sub_(rate * (first / (1 - BETA1**count)) / spread)


def _is_cached(key: str) -> bool:
    return key.startswith(tuple(f"{name} " for name in BATCH))


def _part(t: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in t.items() if name.startswith(prefix)}


def _of_iteration(drawn: Tensor, t: Tensors) -> Tensor:
    return drawn.index_select(0, t["iteration"].view(1) % ORDERED)[0]


def _slices(count: int, parts: int) -> list[slice]:
    """`count` rows in consecutive parts, as large as the shares of that many ranks."""
    ends = [0, *accumulate(len(range(part, count, parts)) for part in range(parts))]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _by_part(order: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Batches sorted by the part that works on each image, and where in the batch as drawn each now stood."""
    tables = [dealt(images, parts) for images in order.tolist()]
    positions = torch.tensor([[p for part in range(parts) for p in part_of(part, table)] for table in tables])
    return order.gather(1, positions), positions.int()


def _order(count: int, batch: int) -> Tensor:
    """Which images each iteration sees, (ORDERED, batch): all of them in a new order, again and again."""
    batches = count // batch
    epochs = -(-ORDERED // batches)
    order = torch.stack([torch.randperm(count)[: batches * batch] for _ in range(epochs)])
    return order.view(-1, batch)[:ORDERED].contiguous()
