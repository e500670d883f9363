"""A run becomes a file for an integer runtime, which was verified before it got its name."""

import contextlib
import copy
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.artifact.files import FileLock, file_digest, read_json, write_json
from fimaq.artifact.run_directory import RunDirectory
from fimaq.checks import check_name
from fimaq.errors import FimaqError, InputError
from fimaq.export.formats import Format, find_format
from fimaq.export.lower import count_products, has_unsigned_right_sides, lower, size_step
from fimaq.export.processor import LARGEST_SUMS, cuts_off_sums
from fimaq.export.sessions import INPUT, OUTPUT, Session
from fimaq.export.verify import shortcomings, verify
from fimaq.loading import load
from fimaq.progress import Silent
from fimaq.version import __version__

ANOTHER_SIZE = 16
"""Images on which a file that takes any size is compared with the run at another size."""


def refuse_detectors(directory: RunDirectory) -> None:
    if directory.task == "detection":
        raise InputError(f"{directory.path} holds a detector; so far only classification models are exported")


def find_target(directory: RunDirectory, kind: Format, processor: str, out: str | Path | None) -> Path:
    """Where the file goes; what cannot be made is refused, before anything slow is done for it."""
    _check_processor(processor, kind)
    refuse_detectors(directory)
    _refuse_bit_exact(directory, kind)
    target = Path(out) if out is not None else directory.path / kind.file
    check_name(target)
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: give --out a file in a folder that exists")
    if target.suffix != Path(kind.file).suffix:
        raise InputError(f"{target} is no name for format {kind.name}: it ends in {Path(kind.file).suffix}")
    return target


def _check_processor(processor: str, kind: Format) -> None:
    if processor not in LARGEST_SUMS:
        raise InputError(f"processor {processor!r} is not known; accepted are {', '.join(LARGEST_SUMS)}")
    if processor == "vnni" and kind.symmetric:
        raise InputError("processor 'vnni' is for format onnx: with openvino there is no choice but 'any'")
    if processor == "vnni" and cuts_off_sums():
        raise InputError(
            "processor 'vnni': this processor has no VNNI, so that such a file cannot be verified here: export "
            "with --processor any, or on a processor with VNNI"
        )


def export_run(
    run: str | Path,
    images: Mapping[str, Tensor],
    out: str | Path | None = None,
    model: nn.Module | None = None,
    progress: Silent | None = None,
    format: str = "onnx",
    processor: str = "any",
) -> dict[str, Any]:
    """Write RUN/model.onnx or RUN/model.xml (or `out`) and its record beside it; return what the record holds.

    `images`: sets of preprocessed images (n, C, H, W) by name, on which file and run are compared; the first one
    also gives the size of the file's input. `model` is the architecture, where the run has no timm name for it.
    `processor`: where an ONNX file will be right, "any" or only "vnni", which is faster with 8 bits on both sides.
    Nothing is written unless the file agrees with the run and every quantized product executes in integer.
    """
    progress = progress or Silent()
    kind = find_format(format)
    path = Path(run)
    directory = RunDirectory.open_existing(path)
    target = find_target(directory, kind, processor, out)
    if not any(len(given) for given in images.values()):
        raise InputError("an export is verified on images, and none were given: use --verify DIR")
    stayed_float = directory.read_metrics().get("stayed_float", [])
    own = load(path, model)
    progress.note(f"translating for {kind.runtime}")
    first = next(given for given in images.values() if len(given))
    example = first[[0, -1]]
    lowered = lower(copy.deepcopy(own), example, kind.symmetric, processor)
    step, traced = size_step(own, example) if kind.any_size else None, example
    if step is not None:
        # Traced at another size than its own, at which a model may take a short cut that holds for no other.
        images = {**images, "another size": _larger(first[:ANOTHER_SIZE], step)}
        traced = images["another size"][[0, -1]]
    products = count_products(lowered)
    with _folder_beside(target) as folder:
        aside = folder / target.name
        kind.write(lowered, traced, aside, lowered=True, step=step, processor=processor)
        progress.note(f"verifying in {kind.runtime}")
        found = verify(_opened(aside, kind), own, images)
        faults = shortcomings(found, products, floats_expected=bool(stayed_float))
        if faults:
            raise FimaqError(f"the exported file is not good, and was not kept: {'; '.join(faults)}{_hint(kind)}")
        record = {
            "file": target.name,
            "sha256": {file.name: file_digest(file) for file in sorted(folder.iterdir())},
            "bytes": kind.size(aside),
            "format": kind.name,
            # OpenVINO's files are the same for all processors, but not right on all of them.
            "processor": None if kind.symmetric else processor,
            "input": _input(example, step),
            "output": {"name": OUTPUT},
            "preprocessing": directory.config["preprocessing"],
            "quantized_products": products,
            "stayed_float": stayed_float,
            "verification": found,
            "versions": _versions(kind),
        }
        _move(folder, target)
        write_json(kind.record_of(target), record)
    if not kind.symmetric and has_unsigned_right_sides(lowered):
        progress.note("8 bits on both sides: where there is VNNI, --processor vnni makes a faster file")
    return record


def _refuse_bit_exact(directory: RunDirectory, kind: Format) -> None:
    if directory.config.get("settings", {}).get("bit_exact") and not kind.bit_exact:
        raise InputError(
            f"{directory.path} was made with --bit-exact, which {kind.runtime} cannot keep: it joins steps that "
            "are to be rounded one by one. Export it with --format onnx, or quantize without --bit-exact"
        )


def _larger(images: Tensor, step: tuple[int, int]) -> Tensor:
    """The images (n, C, H, W), one step larger in both directions."""
    size = [size + multiple for size, multiple in zip(images.shape[2:], step, strict=True)]
    return F.interpolate(images, size, mode="bilinear")


def _versions(kind: Format) -> dict[str, str]:
    return {
        "fimaq": __version__,
        "torch": torch.__version__,
        "runtime": kind.version,
        "machine": platform.machine(),
    }


def exported_record(run: Path, kind: Format) -> dict[str, Any]:
    """What was said of the exported file in `run`, if that is still the file which was verified."""
    record = read_json(run / kind.record)
    if not isinstance(record, dict) or not isinstance(record.get("sha256"), dict) or "input" not in record:
        raise InputError(f"{run / kind.record} is damaged: it does not say what was exported")
    again = f"make it again with: fimaq export {run} --format {kind.name}"
    if kind.file not in record["sha256"]:
        raise InputError(f"{run / kind.record} is not about {kind.file} but about {record.get('file')}; {again}")
    for name, digest in record["sha256"].items():
        if not (run / name).is_file() or file_digest(run / name) != digest:
            raise InputError(f"{run / name} is not the file that was exported and verified; {again}")
    return record


def _input(example: Tensor, step: tuple[int, int] | None) -> dict[str, Any]:
    """What the file takes: images like `example`, or of any multiple of `step`."""
    channels, *size = example.shape[1:]
    return {
        "name": INPUT,
        "shape": ["batch", channels, *(size if step is None else ("height", "width"))],
        "size": size,
        "multiples": step,
        "type": "float32",
    }


def _opened(path: Path, kind: Format) -> Session:
    try:
        return kind.session(path)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise FimaqError(f"{kind.version} cannot load the exported file, which was not kept: {reason}") from None


def _hint(kind: Format) -> str:
    if not kind.symmetric or not cuts_off_sums():
        return ""
    return (
        f". This processor has no VNNI, and {kind.runtime} cuts off sums of 8-bit products there: export with "
        "--format onnx, or quantize to 6 bits or fewer"
    )


@contextlib.contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """An empty folder to write `target` in, which is gone afterwards; so is one that a killed export of it left.

    A second export to this name is refused meanwhile; those to other names go on side by side.
    """
    lock = FileLock(target.with_name(f".{target.name}.lock"), f"{target}")
    lock.sign()
    folder = target.with_name(f".{target.name}.export")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release(remove=True)


def _move(folder: Path, target: Path) -> None:
    """Give the files in `folder` their place beside `target`, which comes last."""
    for file in sorted(folder.iterdir(), key=lambda file: file.name == target.name):
        with file.open("rb") as written:
            os.fsync(written.fileno())
        file.replace(target.parent / file.name)
