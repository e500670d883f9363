"""The complete Fisher information matrix of one token of a unit's output, from its definition.

What the approximations of section 3.3 stand in for: F = mean over images of J^T (diag(p) - p p^T) J, with J the
Jacobian of the logits with respect to the token's channels and p the model's class probabilities. It costs one
pass through the suffix for every channel or every class, whichever are fewer, so it is for looking, not for
reconstruction.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fimaq.fisher.collect import Sample

PASSES_AT_ONCE = 32
"""Directions that go through the suffix together."""

Suffix = Callable[[list[Tensor], dict[int, list[Tensor]]], Tensor]


def token_columns(shape: torch.Size, token: int, channels: int | None = None) -> slice:
    """Where a token's first `channels` channels stand in a unit's flattened output (a,).

    `shape`: of the unit's first output for one image, (..., C). Everything before the last dimension counts
    tokens, row by row, so that a feature map (H, W, C) has H * W of them.
    """
    width = shape[-1]
    return slice(token * width, token * width + (width if channels is None else channels))


def complete_fisher(
    suffix: Suffix,
    samples: Iterable[Sample],
    token: int,
    temperature: float = 1.0,
    channels: int | None = None,
    done: Callable[[int], None] | None = None,
) -> Tensor:
    """F of a token's first `channels` channels (all by default), averaged over the images: (C, C), float64.

    `suffix` and `samples` are those of `gradient_and_perturbation`; logits are divided by `temperature`, as they
    are in the KL divergence. `done` is told how many images are finished.
    """
    total: Tensor | None = None
    count = 0
    for sample in samples:
        for row in range(len(sample.teacher)):
            outputs = [t[row : row + 1] for t in sample.outputs]
            carried = {i: [t[row : row + 1] for t in tensors] for i, tensors in sample.carried.items()}
            columns = token_columns(outputs[0].shape[1:], token, channels)
            jacobian = _jacobian(suffix, outputs, carried, columns, sample.teacher.shape[-1]) / temperature
            p = torch.softmax(sample.teacher[row].double() / temperature, dim=-1)
            one = _weighted_square(jacobian.double(), p)
            total = one if total is None else total + one
            count += 1
            if done is not None:
                done(count)
    if total is None:
        raise ValueError("the Fisher information matrix of no images was asked for")
    return (total + total.T) / (2 * count)


def scale_to(complete: Tensor, matrix: Tensor) -> float:
    """The factor s >= 0 with the smallest ||complete - s * matrix||, in the Frobenius norm.

    That is <complete, matrix> / <matrix, matrix>. A loss is minimised the same whatever its scale, so this one
    factor is taken out. Where the two do not even agree in direction, or `matrix` is zero, it is 0.
    """
    square = matrix.square().sum()
    return float(((complete * matrix).sum() / square).clamp_min(0)) if square > 0 else 0.0


def relative_error(complete: Tensor, matrix: Tensor) -> float:
    """||complete - s * matrix|| / ||complete|| with the best s: 0 for a multiple, 1 for nothing in common."""
    size = complete.norm()
    return float((complete - scale_to(complete, matrix) * matrix).norm() / size) if size > 0 else 0.0


def _jacobian(
    suffix: Suffix, outputs: list[Tensor], carried: dict[int, list[Tensor]], columns: slice, classes: int
) -> Tensor:
    """Of the logits of one image, with respect to these columns of the unit's first output: (classes, columns)."""
    first, *others = outputs
    flat = first.flatten()
    before, after = flat[: columns.start], flat[columns.stop :]

    def logits(values: Tensor) -> Tensor:
        # Put together anew: writing into a tensor in place is not differentiable in forward mode.
        replaced = torch.cat([before, values, after]).view(first.shape)
        return suffix([replaced, *others], carried)[0]

    # The fused attention kernels have neither a forward derivative nor one for many directions at once.
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # PyTorch's own forward derivatives are written in what it now deprecates.
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script", category=FutureWarning)
        if len(flat[columns]) > classes:
            return torch.func.jacrev(logits, chunk_size=PASSES_AT_ONCE)(flat[columns]).detach()
        directions = torch.eye(len(flat[columns]), dtype=flat.dtype, device=flat.device)
        along = partial(_derivative_along, logits, flat[columns])
        return torch.vmap(along, chunk_size=PASSES_AT_ONCE)(directions).T


def _derivative_along(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    return torch.func.jvp(function, (point,), (direction,))[1]  # type: ignore[no-any-return]


def _weighted_square(jacobian: Tensor, p: Tensor) -> Tensor:
    """J^T (diag(p) - p p^T) J without forming the middle: (classes, C), (classes,) -> (C, C).

    As the covariance of J's rows under p, so that rounding leaves it positive semi-definite.
    """
    centred = (jacobian - p @ jacobian) * p.sqrt()[:, None]
    return centred.T @ centred
