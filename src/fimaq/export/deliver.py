"""A run becomes an ONNX file that was verified before it got its name."""

import copy
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn

from fimaq.artifact.files import TEMPORARY_SUFFIX, file_digest, write_bytes, write_json
from fimaq.artifact.run_directory import RunDirectory
from fimaq.errors import FimaqError, InputError
from fimaq.export.lower import count_products, lower
from fimaq.export.onnx_file import INPUT, OPSET, OUTPUT, onnx_model
from fimaq.export.verify import shortcomings, verify
from fimaq.pipeline import load
from fimaq.progress import Silent
from fimaq.version import __version__


def export_run(
    run: str | Path,
    images: Mapping[str, Tensor],
    out: str | Path | None = None,
    model: nn.Module | None = None,
    progress: Silent | None = None,
) -> dict[str, Any]:
    """Write RUN/model.onnx (or `out`) and export.json beside it; return what export.json holds.

    `images`: sets of preprocessed images (n, C, H, W) by name, on which file and run are compared; the first one
    also gives the size of the file's input. `model` is the architecture, where the run has no timm name for it.
    Nothing is written unless the file agrees with the run and every quantized product executes in integer.
    """
    progress = progress or Silent()
    path = Path(run)
    directory = RunDirectory.open_existing(path)
    target = Path(out) if out is not None else path / "model.onnx"
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: give --out a file in a folder that exists")
    if not any(len(given) for given in images.values()):
        raise InputError("an export is verified on images, and none were given: use --verify DIR")
    stayed_float = directory.read_metrics().get("stayed_float", [])
    own = load(path, model)
    progress.note("translating to ONNX")
    first = next(given for given in images.values() if len(given))
    example = first[[0, -1]]
    lowered = lower(copy.deepcopy(own), example)
    products = count_products(lowered)
    content = ir.to_proto(onnx_model(lowered, example)).SerializeToString()
    aside = target.with_name(f".{target.name}{TEMPORARY_SUFFIX}")
    write_bytes(aside, content)
    try:
        progress.note("verifying in onnxruntime")
        found = verify(aside, own, images)
        faults = shortcomings(found, products, floats_expected=bool(stayed_float))
        if faults:
            raise FimaqError(f"the exported file is not good, and was not kept: {'; '.join(faults)}")
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    record = {
        "file": target.name,
        "sha256": file_digest(target),
        "bytes": len(content),
        "format": "onnx",
        "opset": OPSET,
        "input": {"name": INPUT, "shape": ["batch", *example.shape[1:]], "type": "float32"},
        "output": {"name": OUTPUT},
        "preprocessing": directory.config["preprocessing"],
        "quantized_products": products,
        "stayed_float": stayed_float,
        "verification": found,
        "versions": {
            "fimaq": __version__,
            "torch": torch.__version__,
            "onnxruntime": onnxruntime.__version__,
            "machine": platform.machine(),
        },
    }
    write_json(target.with_name("export.json"), record)
    return record
