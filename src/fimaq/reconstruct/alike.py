"""Which units are alike: code that runs them cannot tell one from the other, but by what their tensors hold.

The blocks of a model nearly all run the same operators. To find that out by tracing a step takes most of a second
for each; what Python holds of two units is compared in a few milliseconds. Whatever is not known here how to
compare makes a unit unlike any other, and it is traced.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from fimaq.ranks import Ranks

_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
_STATE = ("_parameters", "_buffers")
"""Attributes of a module whose tensors are given to a trace by name. The values of others may be part of it."""

_RATES = {nn.Dropout: "p", DropPath: "drop_prob"}
"""What these modules read only in training. It differs from block to block of a Swin."""

Seen = dict[int, tuple[int, Any]]
"""Objects met so far by their `id`: which it was, and the object, so that its `id` is not given to another."""


class _UnknownError(Exception):
    """Something that cannot be compared."""


def kind_of(*values: Any) -> Hashable:
    """Equal for values that are alike; None where that cannot be told."""
    try:
        return _kind(values, {})
    except _UnknownError:
        return None


def tensor_kinds(tensors: dict[str, Tensor]) -> Hashable:
    return tuple((name, *_tensor(t)) for name, t in tensors.items())


def _tensor(tensor: Tensor) -> tuple[Hashable, ...]:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad


def _kind(value: Any, seen: Seen) -> Hashable:
    """One object met twice is not like two that are alike."""
    own = type(value)
    if own in _PLAIN:
        return own, value
    if own is float:
        return own, repr(value)
    if isinstance(value, PurePath | Enum):
        return own, str(value)
    if isinstance(value, type) or own is BuiltinFunctionType:
        return value  # type: ignore[no-any-return]
    if own is FunctionType and value.__closure__ is None:
        return value  # type: ignore[no-any-return]
    if own is slice:
        return own, value.start, value.stop, value.step
    if id(value) in seen:
        return "met before", seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if own is MethodType:
        return own, value.__func__, _kind(value.__self__, seen)
    if own in (dict, OrderedDict):
        return own, tuple((_kind(k, seen), _kind(v, seen)) for k, v in value.items())
    if own in (list, tuple):
        return own, tuple(_kind(v, seen) for v in value)
    if own in (set, frozenset):
        return own, frozenset(_kind(v, seen) for v in value)
    if isinstance(value, nn.Module):
        unread = None if value.training else _RATES.get(own)
        return own, tuple((name, _attribute(name, v, seen)) for name, v in vars(value).items() if name != unread)
    if dataclasses.is_dataclass(value):
        return own, tuple((f.name, _kind(getattr(value, f.name, None), seen)) for f in dataclasses.fields(value))
    if own is Ranks:  # holds nothing
        return (own,)
    raise _UnknownError


def _attribute(name: str, value: Any, seen: Seen) -> Hashable:
    """Of a module."""
    if name not in _STATE:
        return _kind(value, seen)
    return tuple((key, None if t is None else _registered(t, seen)) for key, t in value.items())


def _registered(tensor: Tensor, seen: Seen) -> Hashable:
    if id(tensor) in seen:
        return "met before", seen[id(tensor)][0]
    seen[id(tensor)] = len(seen), tensor
    return _tensor(tensor)
