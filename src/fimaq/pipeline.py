"""The main verb: a trained model and images in, a quantized model and its run directory out."""

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fimaq.accuracy import fidelity
from fimaq.artifact.model_file import load_quantized_state, own_state, quantized_state
from fimaq.artifact.shared_directory import SharedDirectory
from fimaq.calibrate.exactness import find_exact
from fimaq.calibrate.fold import fold_layer_norms
from fimaq.calibrate.massive import divide_massive_channels
from fimaq.checks import check_learnable, check_name, check_ranks, check_settings, check_tensorboard
from fimaq.config import Config
from fimaq.data.detection_image import DetectionPreprocessing
from fimaq.data.inputs import gather_images, tensor_fingerprint
from fimaq.data.preprocess import Preprocessing, stated_preprocessing
from fimaq.description import SAME, architecture_of, describe
from fimaq.device import choose_device, numerics, peak_memory, resident_bytes, with_precision
from fimaq.errors import InputError
from fimaq.journal import Journal
from fimaq.models.build import check_finite
from fimaq.models.prepare import Structure, apply_findings, make_exact, prepare_model
from fimaq.models.units import Unit, UnitChain
from fimaq.progress import Silent
from fimaq.ranks import ALONE, Ranks, Stored
from fimaq.reconstruct.algorithm import Reconstruction, Report, UnitResult
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.memory import bounded, room_on_host, sweep_of
from fimaq.reconstruct.plan import SEARCH, UnitPlan, plan, unit_operations

LOOKED_AT = 8
"""Images that run through the finished model to see where it can be made exact."""


@dataclass
class Run:
    """A finished quantization: the model, what was measured, and where it is stored (if anywhere)."""

    model: nn.Module
    config: Config
    metrics: dict[str, Any]
    path: Path | None


class Rest(Protocol):
    """What is quantized outside of the chain of units."""

    def prepare(self, structure: Structure) -> None:
        """Convert its layers, quantizers off, and say so in `structure`."""

    def look(self) -> list[UnitPlan]:
        """Remember what is needed of the model in full precision. Returns what each of `units` will take."""

    @property
    def units(self) -> list[Unit]:
        """What is learned of it, once the chain is quantized."""

    def search(self) -> None:
        """Give all of it ranges, and integers to what is not learned."""

    def learn(self, number: int, room: Callable[[int], ActivationCache], report: Report) -> UnitResult:
        """Learn one of `units`. `room`: makes a cache for so many rows."""


def quantize(
    model: nn.Module,
    images: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    inplace: bool = False,
    progress: Silent | None = None,
    ranks: Ranks = ALONE,
    preprocessing: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Quantize `model` with the help of unlabelled `images` (tensor (n, C, H, W), Dataset or DataLoader).

    `settings` are the fields of `Config`: bits="w4a4", method="fima-q", iters=20000, and so on; those that only
    the command reads are refused. With `out`, the result and everything needed to repeat it are stored there,
    finished units survive a crash, and `resume=True` continues from them. The model given is left untouched unless
    `inplace`.

    `preprocessing` says how the images were made, for whoever evaluates or deploys the run: {"crop_pct": 1.0}, or
    all that timm's `resolve_model_data_config` gives; what it leaves out is the model's own data config's.
    `ranks`: those of `fimaq.together.joined_ranks`, each of which is given the same model, images and settings.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    if not isinstance(model, nn.Module):
        raise InputError(f"{model!r} is not a model: give an nn.Module, such as timm.create_model(...) makes")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("a TorchScript model has no Python modules to quantize; give the model it was made from")
    check_settings(settings)
    asked = {name: settings[name] for name in ("calib_size",) if name in settings}
    wanted = Config.create(**asked).calib_size
    gathered = gather_images(images, wanted)
    if "calib_size" in settings and len(gathered) < wanted:
        raise InputError(f"calib_size is {wanted} but only {len(gathered)} images were given")
    settings["calib_size"] = len(gathered)
    config = Config.create(**settings)
    if config.model is None and out is not None:
        name = architecture_of(model, config.model_args, gathered[:1])
        config = config.model_copy(update={"model": name})
    return run_quantization(
        model if inplace else _copied(model),
        gathered[ranks.rank :: ranks.size],
        config,
        preprocessing=stated_preprocessing(model, gathered, preprocessing),
        fingerprint="" if out is None else tensor_fingerprint([("images", gathered)]),
        out=None if out is None else Path(out),
        resume=resume,
        progress=progress or Silent(),
        ranks=ranks,
    )


def run_quantization(
    model: nn.Module,
    images: Tensor,
    config: Config,
    preprocessing: Preprocessing | DetectionPreprocessing | None,
    fingerprint: str,
    out: Path | None,
    resume: bool,
    progress: Silent,
    only_searched: Sequence[str] = (),
    rest: Rest | None = None,
    ranks: Ranks = ALONE,
) -> Run:
    """Quantize `model` in place and store the run. `images`: the calibration set (n, C, H, W), this rank's part.

    Units in `only_searched` are not reconstructed. `rest`: parts that the forward pass does not reach.
    """
    device = ranks.place(choose_device(config.device))
    config = with_precision(config, device)
    check_name(out)
    check_tensorboard(config, out)
    count = sum(ranks.collect(len(images)))
    check_ranks(ranks, config, count)
    check_finite(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(numerics(config, device, ranks))
        stack.enter_context(bounded(device, config.memory_budget))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        journal = stack.enter_context(Journal(progress, device))
        description = describe(model, config, preprocessing, fingerprint, count) if out else {}
        # Before anything is written: a model that cannot be quantized must leave no folder behind.
        model = model.to(device).eval()
        example = ranks.ends(images).to(device)
        structure, chain = prepare_chain(model, example, config, only_searched)
        check_learnable(chain, example, config)
        if rest is not None:
            rest.prepare(structure)
        directory = None
        if out is not None:
            directory = stack.enter_context(SharedDirectory(out, description, resume, SAME, ranks))
            if directory.complete:
                journal.note(f"{out} already holds this run, finished; nothing to do")
                tensors, metadata = directory.read_model()
                apply_findings(model, Structure.from_dict(json.loads(metadata["structure"])))
                load_quantized_state(model, tensors)
                return Run(model, config, directory.read_metrics(), out)
            journal.keep_in(directory, config.tensorboard and ranks.rank == 0)
        spill = None if directory is None else directory.spill
        began = time.monotonic()

        def room(rows: int) -> ActivationCache:
            on_host = room_on_host(config.host_budget, resident_bytes())
            return ActivationCache(rows, device, spill, config.memory_budget, on_host, ranks)

        later = [] if rest is None else rest.look()
        metrics = _quantize_units(chain, structure, images, config, room(count), directory, journal, later)
        if rest is not None:
            journal.stage(SEARCH)
            rest.search()
            for number, unit in enumerate(rest.units):
                make = partial(rest.learn, number, room)
                metrics["units"].append(_finish(len(chain) + number, unit, make, directory, journal, ranks))
        metrics["seconds"] = round(time.monotonic() - began, 2)
        metrics["peak_memory_bytes"] = max(ranks.collect(peak_memory(device)))
        metrics["peak_host_bytes"] = max(ranks.collect(peak_memory(torch.device("cpu"))))
        if directory is not None:
            state = quantized_state(model)
            metrics["size"] = _sizes(state, model)
            directory.finish(state, {"structure": json.dumps(structure.as_dict())}, metrics)
        journal.finish(metrics["fidelity"])
    return Run(model, config, metrics, out)


def _quantize_units(
    chain: UnitChain,
    structure: Structure,
    images: Tensor,
    config: Config,
    cache: ActivationCache,
    directory: SharedDirectory | None,
    journal: Journal,
    later: Sequence[UnitPlan],
) -> dict[str, Any]:
    """Reconstruct, or reload from the checkpoint, the units of a prepared model one by one.

    `later`: what is to be learned after them.
    """
    model, device, ranks = chain.model, cache.device, cache.ranks
    folded = even_out_channels(model, structure, images, config, device, ranks)
    journal.note(
        f"{len(chain)} units, {len(structure.layers)} layers, "
        f"{sum(n for n, _ in structure.products.values())} attention products, {len(folded)} LayerNorms folded"
    )
    for name, columns in structure.divided.items():
        journal.note(f"{name}: massive channels get columns of their own: {columns}")
    for text in structure.stayed_float:
        journal.note(f"stays in float: {text}")
    learned = [unit.reconstructed for unit in chain.units]
    journal.expect([*plan(unit_operations(chain, images[:1].to(device)), learned, config), *later])
    try:
        reconstruction = Reconstruction(chain, images, config, cache, journal.stage)
        places = dict(cache.places)
        journal.note(
            f"activations of {cache.count} images are cached in {', '.join(sorted(set(places.values())))}"
        )
        units = [_finish_unit(reconstruction, index, directory, journal) for index in range(len(chain))]
        journal.finish_units()
        if config.bit_exact:
            found = find_exact(model, lambda: model(images[:LOOKED_AT].to(device)))
            structure.exact.update(ranks.from_rank(0, lambda: ({}, found))[1])
            _take_from_first(model, ranks)
            make_exact(model, structure.exact)
        metrics: dict[str, Any] = {
            "fidelity": fidelity(model, reconstruction.images_and_teacher(images), ranks),
            "units": units,
            "cache": places,
        }
    finally:
        cache.close()
    metrics |= {
        "folded_layer_norms": folded,
        "stayed_float": structure.stayed_float,
        "device": str(device),
        "ranks": ranks.size,
    }
    return metrics


def prepare_chain(
    model: nn.Module, example: Tensor, config: Config, only_searched: Sequence[str] = ()
) -> tuple[Structure, UnitChain]:
    """Make every heavy operator of `model` one that can be quantized, and find its units; quantizers are off."""
    structure = prepare_model(
        model,
        example,
        config.weight_bits,
        config.activation_bits,
        config.allow_float,
        rescale_rows=config.preset == "deploy",
    )
    return structure, UnitChain(model, structure, example, only_searched)


def even_out_channels(
    model: nn.Module,
    structure: Structure,
    images: Tensor,
    config: Config,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> dict[str, str]:
    """Fold LayerNorms and divide massive channels, as `structure` then says. Returns what became of each norm."""

    def for_ranges() -> Iterator[Tensor]:
        few = images[: ranks.share(config.search_size)]
        return (batch.to(device) for batch in few.split(sweep_of(images)))

    folded = fold_layer_norms(model, ranks.ends(images).to(device), for_ranges, ranks)
    structure.divided.update(divide_massive_channels(model, for_ranges, ranks))
    return folded


def _finish_unit(
    reconstruction: Reconstruction, index: int, directory: SharedDirectory | None, journal: Journal
) -> dict[str, Any]:
    """Reconstruct one unit of the chain, or reload it if an earlier run got that far; then move on to the next."""
    unit, make = reconstruction.chain.units[index], partial(reconstruction.reconstruct, index)
    keep = partial(reconstruction.cache_full_precision, index)
    record = _finish(index, unit, make, directory, journal, reconstruction.ranks, keep)
    reconstruction.advance(index)
    return record


def _finish(
    index: int,
    unit: Unit,
    make: Callable[[Report], UnitResult],
    directory: SharedDirectory | None,
    journal: Journal,
    ranks: Ranks,
    before_loading: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The integers of a unit, by `make` or from the checkpoint of an earlier run. Returns its record."""
    began, stage = time.monotonic(), f"unit-{index:03d}"
    stored = directory.load_stage(stage) if directory is not None else None
    if stored is not None:
        if stored[1].get("unit") != unit.name:
            raise InputError(f"checkpoint {stage} holds {stored[1].get('unit')!r} instead of {unit.name!r}")
        before_loading()
        load_quantized_state(unit.module, stored[0])
        journal.note(f"{unit.name}: taken from the checkpoint")
        return stored[1]
    journal.start_unit(index, unit.name)
    result = make(journal.report)
    record = _unit_record(unit.name, result, time.monotonic() - began)
    _take_from_first(unit.module, ranks)
    if not result.finite:
        journal.note(f"{unit.name}: the loss was not finite; its range-search result is kept")
    if directory is not None:
        directory.save_stage(stage, quantized_state(unit.module), record)
    journal.finish_unit(record)
    return record


def _take_from_first(module: nn.Module, ranks: Ranks) -> None:
    """All ranks go on with the same bits, even where machines of different kinds would drift apart."""
    if ranks.size > 1:

        def state() -> Stored:
            return quantized_state(module), None

        load_quantized_state(module, ranks.from_rank(0, state)[0])


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(f"the model cannot be copied; with inplace=True it need not be: {error}") from None


def _unit_record(name: str, result: UnitResult, seconds: float) -> dict[str, Any]:
    return {
        "unit": name,
        "seconds": round(seconds, 3),
        "losses": result.losses,
        "finite": result.finite,
        "weights": result.weights,
        "flipped": result.flipped,
        "scale_changes": result.scale_changes,
    }


def _sizes(state: dict[str, Tensor], model: nn.Module) -> dict[str, int]:
    own = {k: v for k, v in own_state(model).items() if "_quantizer." not in k}
    return {
        "quantized_bytes": sum(t.numel() * t.element_size() for t in state.values()),
        "full_precision_bytes": sum(4 * t.numel() for t in own.values()),
    }
