"""What decides a run's cost, counted on one or two images of any content: operations and bytes, unit by unit."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fimaq.calibrate.ranges import recorded_inputs
from fimaq.fisher.divergence import kl_gradient
from fimaq.models.units import Unit, UnitChain
from fimaq.quant.layers import quantized_layers
from fimaq.reconstruct.plan import unit_operations

SCALE_BYTES = 8
"""Of one output channel of a stored weight: its scale and zero point."""


@dataclass(frozen=True)
class UnitSize:
    """One unit, for one image. `recorded`: bytes of all inputs of its layers and products; `tokens`: rows."""

    name: str
    operations: int
    operators: tuple[str, ...]
    """Of its forward pass, in order."""
    recorded: int
    tokens: int
    reconstructed: bool

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Units of one kind share a compilation."""
        return self.operators, self.operations, self.recorded, self.tokens


@dataclass(frozen=True)
class Sizes:
    """A model. `suffix_saved`: bytes that the longest suffix keeps for its backward pass, for one image."""

    units: list[UnitSize]
    suffix_saved: int
    model_bytes: int
    image_bytes: int
    packed_bytes: int
    """Of the quantized model."""

    def saved_behind(self, index: int) -> float:
        """Bytes that the suffix after unit `index` keeps for one image: by its share of the operations."""
        behind = [unit.operations for unit in self.units]
        return self.suffix_saved * sum(behind[index + 1 :]) / max(1, sum(behind[1:]))


def count_sizes(chain: UnitChain, images: Tensor, weight_bits: int) -> Sizes:
    """`images`: two (2, C, H, W), where the model is. The model is not changed."""
    operations = unit_operations(chain, images[:1])
    sizes, outputs = [], list[list[Tensor]]()
    inputs = chain.first_inputs(images)
    for index, unit in enumerate(chain.units):
        operators, recorded, result = _recorded(unit, inputs)
        outputs.append(result)
        first = result[0][0]
        tokens = max(1, first.numel() // first.shape[-1]) if first.dim() > 0 else 1
        own = (operations[index], operators, recorded // len(images), tokens, unit.reconstructed)
        sizes.append(UnitSize(unit.name, *own))
        if index + 1 < len(chain):
            inputs = chain.next_inputs(index, result, {i: outputs[i] for i in unit.carried})
    model = chain.model
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    weights = [layer.weight for _, layer in quantized_layers(model)]
    left = whole - sum(w.nbytes for w in weights)
    packed = left + sum(w.numel() * weight_bits // 8 + SCALE_BYTES * w.shape[0] for w in weights)
    two, one = (_saved_by_suffix(chain, images[:n]) for n in (2, 1))
    return Sizes(sizes, two - one, whole, images[0].nbytes, packed)


class _Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _recorded(unit: Unit, inputs: Sequence[Tensor]) -> tuple[tuple[str, ...], int, list[Tensor]]:
    """The unit's operators, the bytes that its range search looks at, and its outputs."""
    results: list[list[Tensor]] = []
    with _Operators() as operators:
        seen = recorded_inputs(unit.module, lambda: results.append(unit(inputs)))
    looked_at = sum(tensor.nbytes for tensors in seen.values() for tensor in tensors)
    return tuple(operators.names), looked_at, results[0]


def _saved_by_suffix(chain: UnitChain, images: Tensor) -> int:
    """Bytes, parameters apart, that stay alive between the forward and the backward pass behind the first unit."""
    own = {t.untyped_storage().data_ptr() for t in (*chain.model.parameters(), *chain.model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given to another
        return tensor

    with torch.no_grad():
        outputs, teacher = chain.units[0](chain.first_inputs(images)), chain.model(images)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kl_gradient(lambda z: chain.suffix(0, z, {}), outputs, teacher)
    return sum(storage.nbytes() for storage in kept.values())
