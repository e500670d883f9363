"""The units that are reconstructed one after the other, and running a model from one of them onwards.

Units are found by structure, not by name: a block is the smallest module that holds attention and sits in a
list of such modules; what holds weights but no attention (patch embedding, patch merging, head) is a unit of
its own. What lies between units (position embeddings, class tokens, final norms) is run by the model's own
forward, with the units before the starting point skipped. So a suffix of any model can be run without
knowing its code; that the result is the model's own is checked when the chain is built.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from fimaq.errors import InputError
from fimaq.models.prepare import Structure
from fimaq.models.products import class_name
from fimaq.quant.layers import QUANTIZED, quantized_layers

Tensors = list[Tensor]


@dataclass
class Signature:
    """How a pytree of values splits into tensors with one row per image and everything else."""

    spec: TreeSpec
    static: list[Any]  # None where a batched tensor goes
    batched: list[int]
    rows: list[int]  # rows per image in the first dimension: 1, or the number of windows or groups

    @classmethod
    def of(cls, one: Any, two: Any) -> "Signature":
        """Compare the values for one image and for two: what doubles in its first dimension is batched.

        Raises ValueError with a value that changes otherwise.
        """
        leaves_one, _ = tree_flatten(one)
        leaves_two, spec = tree_flatten(two)
        batched, rows = [], []
        for position, (a, b) in enumerate(zip(leaves_one, leaves_two, strict=True)):
            if isinstance(a, Tensor) and a.dim() > 0 and b.shape[0] == 2 * a.shape[0]:
                batched.append(position)
                rows.append(a.shape[0])
            elif isinstance(a, Tensor) and a.shape != b.shape:
                raise ValueError(f"a tensor of shape {tuple(b.shape)}")
            elif isinstance(a, (int, torch.Size)) and a != b:
                raise ValueError(f"the number {b}" if isinstance(b, int) else f"the shape {tuple(b)}")
        static = [None if position in batched else leaf for position, leaf in enumerate(leaves_two)]
        return cls(spec, static, batched, rows)

    def split(self, values: Any) -> Tensors:
        """The batched tensors of `values`, each reshaped to one row per image."""
        leaves, _ = tree_flatten(values)
        picked = [leaves[position] for position in self.batched]
        return [t if r == 1 else t.unflatten(0, (-1, r)) for t, r in zip(picked, self.rows, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Any:
        """The inverse of `split`."""
        leaves = list(self.static)
        for position, rows, tensor in zip(self.batched, self.rows, tensors, strict=True):
            leaves[position] = tensor if rows == 1 else tensor.flatten(0, 1)
        return tree_unflatten(leaves, self.spec)


@dataclass
class Unit:
    """One module that is reconstructed as a whole."""

    name: str
    module: nn.Module
    inputs: Signature = field(init=False)
    outputs: Signature = field(init=False)
    output_shapes: list[torch.Size] = field(init=False)
    carried: tuple[int, ...] = ()  # earlier units whose outputs are still needed after this one
    passes_gradients: bool = True
    changes_inputs: bool = True  # its forward may work in place, so it is given copies
    reconstructed: bool = True  # False: its ranges are searched, and that is all

    def __call__(self, inputs: Sequence[Tensor]) -> Tensors:
        """Batched inputs to batched outputs: lists of tensors with one row per image."""
        args, kwargs = self.inputs.join(self._kept(inputs))
        return self.outputs.split(self.module(*args, **kwargs))

    def with_tensors(self, tensors: dict[str, Tensor], inputs: Sequence[Tensor]) -> Tensors:
        """The same with other parameters and buffers than the module's own, by name."""
        parameters = {name for name, _ in self.module.named_parameters()}
        kept = {n: nn.Parameter(t, requires_grad=False) if n in parameters else t for n, t in tensors.items()}
        args, kwargs = self.inputs.join(self._kept(inputs))
        return self.outputs.split(functional_call(self.module, kept, args, kwargs))

    def _kept(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [t.clone() for t in inputs] if self.changes_inputs else inputs


class _ReachedUnit(Exception):  # noqa: N818  (a jump out of a forward pass, not an error)
    def __init__(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.arguments = arguments


class UnitChain:
    """A model seen as an ordered chain of units. `example`: at least two images (n, C, H, W).

    Of the units named by `only_searched` just the ranges are searched.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, example: Tensor, only_searched: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.image_shape = example.shape[1:]
        self.units = [
            Unit(name, module, reconstructed=name not in only_searched and any(quantized_layers(module)))
            for name, module in _find_units(model, structure).items()
        ]
        if not self.units:
            raise InputError("the model has no Linear or Conv2d layer that could be quantized")
        _refuse_shared_parts(self.units)
        self._trace(example[:2])
        self._check(example[:2])

    def __len__(self) -> int:
        return len(self.units)

    @torch.no_grad()
    def first_inputs(self, images: Tensor) -> Tensors:
        """The inputs of the first unit for `images`."""
        return self._arguments_of(0, images, {})

    @torch.no_grad()
    def next_inputs(self, index: int, outputs: Sequence[Tensor], carried: dict[int, Tensors]) -> Tensors:
        """The inputs of unit index + 1, given the outputs of unit index (and of those it carries)."""
        return self._arguments_of(index + 1, self._blank_images(outputs), {**carried, index: list(outputs)})

    def suffix(self, index: int, outputs: Sequence[Tensor], carried: dict[int, Tensors]) -> Tensor:
        """The model's output when unit `index` gives `outputs`. Differentiable in `outputs`."""
        with self._replaced({**carried, index: list(outputs)}, upto=index):
            return self.model(self._blank_images(outputs))  # type: ignore[no-any-return]

    def _arguments_of(self, index: int, images: Tensor, given: dict[int, Tensors]) -> Tensors:
        with self._replaced(given, upto=index - 1, stop=index):
            try:
                self.model(images)
            except _ReachedUnit as reached:
                return self.units[index].inputs.split(reached.arguments)
        raise InputError(f"the model's forward never reached {self.units[index].name}")

    def _blank_images(self, outputs: Sequence[Tensor]) -> Tensor:
        """Images for the model's forward to pass along while every unit that would read them is skipped."""
        return outputs[0].new_zeros(len(outputs[0]), *self.image_shape)

    @contextmanager
    def _replaced(self, given: dict[int, Tensors], upto: int, stop: int | None = None) -> Iterator[None]:
        """Units up to `upto` return what is given for them (else blanks); unit `stop` ends the pass."""
        batch = next(iter(given.values()))[0].shape[0] if given else 0

        def returning(index: int) -> Any:
            unit = self.units[index]
            tensors = given.get(index)

            def give(*args: Any, **kwargs: Any) -> Any:  # what the model may then change in place
                if tensors is not None:
                    return unit.outputs.join([t.clone() for t in tensors])
                like = next(iter(given.values()))[0]
                return unit.outputs.join([like.new_full((batch, *s), torch.nan) for s in unit.output_shapes])

            return give

        def stopping(*args: Any, **kwargs: Any) -> Any:
            raise _ReachedUnit((args, kwargs))

        replacements = {index: returning(index) for index in range(upto + 1)}
        if stop is not None:
            replacements[stop] = stopping
        modules = {index: self.units[index].module for index in replacements}
        own = {
            index: module.__dict__["forward"] for index, module in modules.items() if "forward" in module.__dict__
        }
        try:
            for index, forward in replacements.items():
                modules[index].forward = forward
            yield
        finally:
            for index, module in modules.items():  # not all were replaced if Ctrl-C came in between
                module.__dict__.pop("forward", None)
                if index in own:  # a patch of the user's
                    module.__dict__["forward"] = own[index]

    @torch.no_grad()
    def _trace(self, images: Tensor) -> None:
        """Learn the order of the units and the signatures of their inputs and outputs."""
        one, two = (_record_calls(self.model, self.units, batch) for batch in (images[:1], images))
        for unit in self.units:
            if unit.name not in two:
                kind = class_name(unit.module)
                raise InputError(f"{unit.name} ({kind}) is never called as a module, only its parts are")
        self.units = [unit for unit in sorted(self.units, key=lambda u: list(two).index(u.name))]
        for unit in self.units:
            try:
                unit.inputs, unit.outputs = map(Signature.of, one[unit.name], two[unit.name])
            except ValueError as error:
                raise InputError(
                    f"{unit.name} ({class_name(unit.module)}) takes or gives {error} for two images, and "
                    "something else for one: what depends on how many there are must be a tensor, images first"
                ) from None
            if not unit.inputs.batched or not unit.outputs.batched:
                raise InputError(f"{unit.name} ({class_name(unit.module)}) has no output per image to reconstruct")
            given = unit.outputs.split(two[unit.name][1])
            if not all(t.is_floating_point() for t in given):
                raise InputError(f"{unit.name} ({class_name(unit.module)}) gives integers, which is not supported")
            unit.output_shapes = [t.shape[1:] for t in given]
            if unit.reconstructed:
                _look_at_forward(unit, unit.inputs.split(two[unit.name][0]))
        self._outputs = {i: unit.outputs.split(two[unit.name][1]) for i, unit in enumerate(self.units)}

    @torch.no_grad()
    def _check(self, images: Tensor) -> None:
        """Find which earlier outputs each suffix needs, and that it then gives the model's own output."""
        whole = self.model(images)
        if not isinstance(whole, Tensor) or whole.dim() < 2 or len(whole) != len(images):
            kind = f"tensor of shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else type(whole).__name__
            raise InputError(
                f"for {len(images)} images the model returns a {kind}, not one tensor of shape ({len(images)}, "
                "..., classes); wrap it in a module that does"
            )
        self.output_shape = whole.shape[1:]
        outputs = self.__dict__.pop("_outputs")
        for index, unit in enumerate(self.units):
            if not torch.allclose(self.suffix(index, outputs[index], {}), whole, rtol=1e-4, atol=1e-5):
                unit.carried = tuple(i for i in range(index) if self._needs(index, i, outputs, whole))
                carried = {i: outputs[i] for i in unit.carried}
                if not torch.allclose(self.suffix(index, outputs[index], carried), whole, rtol=1e-4, atol=1e-5):
                    raise InputError(f"the model cannot be continued after {unit.name}: its forward keeps state")

    def _needs(self, index: int, earlier: int, outputs: dict[int, Tensors], whole: Tensor) -> bool:
        """True when the suffix after `index` reads the output of unit `earlier`: NaN in its place spread, or show
        in what is chosen by comparing them."""
        carried = {i: outputs[i] for i in range(index) if i != earlier}
        return not torch.allclose(self.suffix(index, outputs[index], carried), whole, rtol=1e-4, atol=1e-5)


@torch.enable_grad()
def _look_at_forward(unit: Unit, inputs: Tensors) -> None:
    """Whether gradients pass through a unit, and whether it changes what it is given."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    given = [t * 1 if t.requires_grad else t for t in leaves]  # a leaf must not be changed in place
    versions, unit.changes_inputs = [t._version for t in given], False
    weights = [layer.weight.requires_grad_() for _, layer in quantized_layers(unit.module)]
    try:
        outputs = unit(given)
        unit.passes_gradients = passes_gradients(outputs, leaves, weights)
    finally:
        for weight in weights:
            weight.requires_grad_(False)
    unit.changes_inputs = versions != [t._version for t in given]


def passes_gradients(outputs: Tensors, inputs: Tensors, weights: Sequence[Tensor] = ()) -> bool:
    """Whether gradients of some output reach some input, and nothing that they need was changed in place."""
    reached = [t for t in outputs if t.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not reached or not wanted:
        return False
    ones = [torch.ones_like(t) for t in reached]
    try:
        found = torch.autograd.grad(reached, [*wanted, *weights], ones, allow_unused=True)
    except RuntimeError as error:
        if "inplace operation" in str(error):
            return False
        raise
    return any(gradient is not None for gradient in found[: len(wanted)])


def _record_calls(model: nn.Module, units: Iterable[Unit], images: Tensor) -> dict[str, tuple[Any, Any]]:
    """Unit name -> (arguments, result) of one forward pass, in call order."""
    calls: dict[str, tuple[Any, Any]] = {}

    def recorder(name: str) -> Any:
        def record(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if name in calls:
                raise InputError(f"{name} is used more than once in a forward pass, which is not supported")
            # A copy, for what is behind a unit may change its output in place.
            calls[name] = ((args, kwargs), tree_map_only(Tensor, Tensor.clone, result))

        return record

    hooks = [u.module.register_forward_hook(recorder(u.name), with_kwargs=True) for u in units]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _refuse_shared_parts(units: Iterable[Unit]) -> None:
    """What is learned in one unit must not change another."""
    owners: dict[nn.Module, str] = {}
    for unit in units:
        for name, part in unit.module.named_modules():
            if isinstance(part, QUANTIZED) and owners.setdefault(part, unit.name) != unit.name:
                raise InputError(
                    f"{_join(unit.name, name)} is also a part of {owners[part]}: layers that two blocks share are "
                    "not supported, give each block a copy of its own"
                )


def _find_units(model: nn.Module, structure: Structure) -> dict[str, nn.Module]:
    """Module name -> module, for the modules that together hold everything that is quantized."""
    attention = set(structure.products)
    heavy = attention | set(structure.layers)

    def holds(name: str, names: set[str]) -> bool:
        return any(n == name or n.startswith(name + ".") for n in names) if name else bool(names)

    def is_list_of_blocks(name: str, module: nn.Module) -> bool:
        listed = isinstance(module, (nn.Sequential, nn.ModuleList))
        return listed and any(holds(_join(name, child), attention) for child, _ in module.named_children())

    def descend(name: str, module: nn.Module) -> dict[str, nn.Module]:
        if not holds(name, heavy):
            return {}
        inside = ((_join(name, n), m) for n, m in module.named_modules())
        is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if is_called and not (holds(name, attention) and any(is_list_of_blocks(n, m) for n, m in inside)):
            return {name: module}
        found: dict[str, nn.Module] = {}
        for child, part in module.named_children():
            found.update(descend(_join(name, child), part))
        return found

    units = descend("", model)
    outside = [n for n in heavy if not any(n == u or n.startswith(u + ".") or not u for u in units)]
    if outside:
        raise InputError(f"{outside[0]} computes outside of the model's blocks, which is not supported")
    return units


def _join(parent: str, child: str) -> str:
    return ".".join(part for part in (parent, child) if part)
