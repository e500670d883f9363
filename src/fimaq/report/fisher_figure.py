"""The paper's first figure for any unit: the Fisher matrix of one token beside what stands in for it.

The complete matrix F is computed from its definition (fisher/exact.py). The approximations are those of a run:
the unit is quantized with searched ranges, its perturbations and KL gradients are taken over the calibration
images, and the very loss of reconstruction (FisherLoss) is filled with their averages; of the matrices it holds
over the whole output, the block of the token is cut out.

A run gets the k different perturbations of rank k from k moments of the reconstruction. Here nothing is
reconstructed: for rank k the calibration images are dealt into k disjoint subsets, and each gives one averaged
perturbation and gradient. So all ranks see the same images, and rank 1 is what a run starts with.
"""

import contextlib
import copy
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from fimaq.artifact.files import write_bytes, write_json, write_tensors
from fimaq.config import Config
from fimaq.device import choose_device, numerics, resident_bytes
from fimaq.errors import FimaqError, InputError
from fimaq.fisher.collect import Sample, collect_averages
from fimaq.fisher.exact import complete_fisher, relative_error, scale_to, token_columns
from fimaq.models.build import check_finite
from fimaq.models.units import UnitChain
from fimaq.pipeline import even_out_channels, prepare_chain
from fimaq.progress import Silent
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.memory import bounded, room_on_host
from fimaq.reconstruct.objectives import FisherLoss
from fimaq.report.heatmap import curves, heat_maps

APPROXIMATIONS = ("diagonal", "low rank", "DPLR")
FILES = ("fisher.safetensors", "fisher.png", "rank.png", "fisher.json")

Collected = dict[int, tuple[Tensor, ...]]
"""Number of an image -> its KL gradient and perturbation, (1, a) each."""


@dataclass
class FisherFigure:
    """One token's matrices, all (C, C) in float64 on the scale of the complete one, and their errors.

    `curves`: approximation -> relative error at rank 1, 2, ..., rank. `magnitude_curves`: the same to the
    magnitudes |F_ij|, the most that is to be had under absolute averages, where the loss reads magnitudes of
    perturbations and no signs. `best`: errors to F that no diagonal and no symmetric matrix of a rank can
    undercut. `details`: settings, sizes and seconds.
    """

    complete: Tensor
    approximations: dict[str, Tensor]
    curves: dict[str, list[float]]
    magnitude_curves: dict[str, list[float]]
    best: dict[str, Any]
    details: dict[str, Any]

    @property
    def errors(self) -> dict[str, float]:
        """Approximation -> relative error at the full rank."""
        return {name: values[-1] for name, values in self.curves.items()}

    def as_dict(self) -> dict[str, Any]:
        ranks = list(range(1, len(self.curves["DPLR"]) + 1))
        return {
            **self.details,
            "errors": self.errors,
            "errors_to_magnitudes": {name: values[-1] for name, values in self.magnitude_curves.items()},
            "errors_by_rank": {"rank": ranks, **self.curves},
            "errors_to_magnitudes_by_rank": {"rank": ranks, **self.magnitude_curves},
            "error_of_identity": relative_error(self.complete, torch.eye(len(self.complete), dtype=torch.float64)),
            "best_possible": self.best,
        }


def fisher_figure(
    model: nn.Module,
    images: Tensor,
    unit: str,
    config: Config,
    token: int = 0,
    channels: int | None = None,
    exact_size: int = 16,
    progress: Silent | None = None,
) -> FisherFigure:
    """The matrices of a `token` of the output of `unit`, and how far the approximations are from the complete one.

    `images` (n, C, H, W): the calibration set; the complete matrix is averaged over the first `exact_size`. Of the
    token's channels the first `channels` are looked at, all by default. Bits, rank, alpha, averages, temperature
    and device are the config's. The model is left untouched.
    """
    progress = progress or Silent()
    began = time.monotonic()
    rank = config.rank or 15
    if rank > len(images):
        raise InputError(f"rank {rank} needs as many calibration images at least, one a subset; got {len(images)}")
    # With a rank in its config, a method that grows one collects exactly so many perturbations.
    config = config.model_copy(update={"method": "fima-q", "rank": rank, "iters": max(config.iters, rank)})
    device = choose_device(config.device)
    check_finite(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(numerics(config, device))
        stack.enter_context(bounded(device, config.memory_budget))
        chain = _prepared(copy.deepcopy(model).to(device).eval(), images, config, device)
        index, width, tokens = _find(chain, unit, token, channels)
        columns = token_columns(chain.units[index].output_shapes[0], token, width)
        on_host = room_on_host(config.host_budget, resident_bytes())
        cache = ActivationCache(len(images), device, None, config.memory_budget, on_host)
        stack.callback(cache.close)
        progress.note(f"{unit}: {tokens} tokens, token {token}, {width} channels")
        reconstruction = _walked_to(Reconstruction(chain, images, config, cache), index)
        samples = list(_one_by_one(chain, index, cache))

        few = samples[:exact_size]
        progress.start(f"complete Fisher matrix, {len(few)} images", len(few))
        suffix = partial(chain.suffix, index)
        complete = complete_fisher(suffix, few, token, config.temperature, width, progress.update).cpu()

        collected = _collect(reconstruction, index, samples, progress)
        by_rank = [_approximations(samples, collected, k, config, columns) for k in range(1, rank + 1)]
    return _compared(
        complete,
        by_rank,
        {
            "unit": unit,
            "token": token,
            "tokens": tokens,
            "channels": width,
            "rank": rank,
            "exact_images": len(few),
            "calibration_images": len(images),
            **config.model_dump(mode="json", include={"model", "bits", "preset", "averages", "alpha", "seed"}),
            "temperature": config.temperature,
            "device": str(device),
            "seconds": round(time.monotonic() - began, 2),
        },
    )


def _collect(reconstruction: Reconstruction, index: int, samples: list[Sample], progress: Silent) -> Collected:
    progress.start(f"perturbations and KL gradients, {len(samples)} images", len(samples))
    evaluate = reconstruction.evaluation(index)
    collected: Collected = {}
    for sample in samples:
        collected[sample.start] = tuple(part.clone() for part in evaluate(sample))
        progress.update(sample.start + 1)
    return collected


def _compared(complete: Tensor, by_rank: list[dict[str, Tensor]], details: dict[str, Any]) -> FisherFigure:
    """The approximations of the highest rank at the scale of the complete matrix, and the errors of all ranks."""
    found, to_magnitudes = (
        {name: [relative_error(target, m[name]) for m in by_rank] for name in APPROXIMATIONS}
        for target in (complete, complete.abs())
    )
    scaled = {name: scale_to(complete, matrix) * matrix for name, matrix in by_rank[-1].items()}
    return FisherFigure(complete, scaled, found, to_magnitudes, _best_possible(complete, len(by_rank)), details)


def write_figure(figure: FisherFigure, out: Path, log: bool = True) -> None:
    """Write FILES into the folder `out`, each whole or not at all; `log`: the heat maps' colour scale."""
    check_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FimaqError(f"folder {out} could not be made: {error.strerror}") from None
    details, rank = figure.details, figure.details["rank"]
    matrices = {"complete": figure.complete, **figure.approximations}
    names = {
        "complete": "Complete",
        "diagonal": "Diagonal",
        "low rank": f"Low rank, k = {rank}",
        "DPLR": f"DPLR, k = {rank}, alpha = {details['alpha']:g}",
    }
    below = {"complete": f"{details['exact_images']} images"} | {
        name: f"relative error {error:.3f}" for name, error in figure.errors.items()
    }
    if details["averages"] == "absolute":
        below |= {name: f"{below[name]}, to magnitudes {v[-1]:.3f}" for name, v in figure.magnitude_curves.items()}
    where = f"{details['model'] or 'model'}, {details['unit']}, token {details['token']}, {details['bits']}"
    where += f", {details['averages']} averages"
    panels = {f"{names[name]}\n{below[name]}": m.numpy() for name, m in matrices.items()}
    write_tensors(out / FILES[0], {name.replace(" ", "_"): m for name, m in matrices.items()}, {})
    write_bytes(out / FILES[1], _png(heat_maps(panels, f"Fisher information: {where}", log)))
    write_bytes(out / FILES[2], _png(curves(_lines(figure), where, "rank k", "relative error")))
    write_json(out / FILES[3], figure.as_dict())


def _lines(figure: FisherFigure) -> dict[str, list[float]]:
    """What the rank curve shows: name in the legend -> values."""
    best = {"best possible of this rank": figure.best["low rank"]}
    if figure.details["averages"] == "signed":
        return {**figure.curves, **best}
    to_magnitudes = {f"{name}, to magnitudes": figure.magnitude_curves[name] for name in ("low rank", "DPLR")}
    return {**figure.curves, **best, **to_magnitudes}


def check_folder(out: Path) -> None:
    """Raise InputError where `out` is there and is not a folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; --out names a folder to write {', '.join(FILES)} into")


def _prepared(model: nn.Module, images: Tensor, config: Config, device: torch.device) -> UnitChain:
    """The model as a run has it before its first unit, quantizers off."""
    structure, chain = prepare_chain(model, images[[0, -1]].to(device), config)
    even_out_channels(model, structure, images, config, device)
    return chain


def _find(chain: UnitChain, name: str, token: int, channels: int | None) -> tuple[int, int, int]:
    """The number of the unit, how many channels are looked at, and how many tokens its output has."""
    names = [unit.name for unit in chain.units]
    if name not in names[:-1]:
        reason = "is the model's output itself" if name in names else "is not a unit of this model"
        raise InputError(f"{name!r} {reason}; give one of {', '.join(names[:-1])}")
    shape = chain.units[names.index(name)].output_shapes[0]
    tokens = shape[:-1].numel()
    if not 0 <= token < tokens:
        raise InputError(f"token {token} is out of range: the output of {name} has tokens 0 to {tokens - 1}")
    if channels is not None and not 1 <= channels <= shape[-1]:
        raise InputError(f"channels {channels} is out of range: a token of {name} has 1 to {shape[-1]}")
    return names.index(name), channels or shape[-1], tokens


def _walked_to(reconstruction: Reconstruction, index: int) -> Reconstruction:
    """At unit `index`, with its ranges searched and quantized; all others are in full precision."""
    for earlier in range(index):
        reconstruction.cache_full_precision(earlier)
        reconstruction.advance(earlier)
    reconstruction.cache_full_precision(index)
    reconstruction.search_ranges(reconstruction.chain.units[index])
    return reconstruction


def _one_by_one(chain: UnitChain, index: int, cache: ActivationCache) -> Iterator[Sample]:
    """A sample for each calibration image, so that they can be dealt into any subsets."""
    for start in range(cache.count):
        inputs, outputs, (teacher,) = (
            cache.rows(name, start, start + 1) for name in ("raw inputs", "outputs", "teacher")
        )
        carried = {i: cache.rows(f"raw output {i}", start, start + 1) for i in chain.units[index].carried}
        yield Sample(start, inputs, outputs, teacher, carried)


def _approximations(
    samples: list[Sample], collected: Collected, rank: int, config: Config, columns: slice
) -> dict[str, Tensor]:
    """The matrices of `rank` that reconstruction would use, cut down to `columns`: (C, C) each.

    Their symmetric parts, since a quadratic form sees no more of them. Under absolute averages they are meant for
    the magnitudes of perturbations, and carry no signs of their own.
    """
    first = collected[0][0]
    loss = FisherLoss(config, first.shape[1], first.device)
    deltas = torch.cat([delta for _, delta in list(collected.values())[: config.batch_size]])
    for part in range(rank):
        subset = samples[part::rank]
        averages = collect_averages(subset, lambda sample: collected[sample.start], config.averages)
        loss.collect(*averages, deltas)
    left, right = (side[:, columns].double() for side in loss.sides)
    low_rank = left.T @ right
    terms = {"low rank": (low_rank + low_rank.T) / 2, "diagonal": loss.diagonal[columns].double().diag()}
    weights = dict(zip(loss.terms, loss.normalisers.double(), strict=True))
    damped = {**terms, "identity": torch.eye(len(low_rank), dtype=torch.float64, device=low_rank.device)}
    dplr = sum(share / weights[name] * damped[name] for name, share in loss.terms.items())
    return {name: m.cpu() for name, m in {**terms, "DPLR": dplr}.items() if isinstance(m, Tensor)}


def _best_possible(complete: Tensor, rank: int) -> dict[str, Any]:
    """Errors of F's own diagonal and of its leading eigenvectors (Eckart and Young), for comparison."""
    squares = torch.linalg.eigvalsh(complete).square().flip(0)
    total = squares.sum().clamp_min(1e-300)
    left_over = (total - squares.cumsum(0)).clamp_min(0) / total
    low_rank = [float(left_over[min(k, len(squares)) - 1].sqrt()) for k in range(1, rank + 1)]
    return {"diagonal": relative_error(complete, complete.diagonal().diag()), "low rank": low_rank}


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
