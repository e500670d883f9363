"""The formats a run can be exported to: how a file is written, and the runtime that executes it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from torch import Tensor, nn

from fimaq.errors import FimaqError, InputError
from fimaq.export.sessions import OnnxRuntimeSession, OpenVinoSession, Session


@dataclass(frozen=True)
class Format:
    """One format. `extra` and `packages`: what has to be installed for it."""

    name: str
    file: str
    beside: str  # how the name of a second file ends, with the weights
    record: str
    runtime: str
    session: Callable[..., Session]  # of path, threads and the shape of images
    any_size: bool  # whether image sizes can be left open
    symmetric: bool  # whether the runtime multiplies integers only where zero is in the middle of their range
    bit_exact: bool  # whether the runtime computes step by step what the graph says
    extra: str
    packages: tuple[str, ...]

    @property
    def version(self) -> str:
        try:
            version = metadata.version(self.runtime)
        except metadata.PackageNotFoundError:  # installed under another name, such as onnxruntime-gpu
            version = import_module(self.runtime).__version__
        return f"{self.runtime} {version}"

    def record_of(self, file: Path) -> Path:
        """The record beside an exported file. A file with a name of its own has a record with one."""
        return file.with_name(self.record if file.name == self.file else f"{file.stem}.{self.record}")

    def size(self, path: Path) -> int:
        """Bytes of a file, together with the weights that the format may have in a file beside it."""
        return path.stat().st_size + (path.with_suffix(self.beside).stat().st_size if self.beside else 0)

    def write(
        self,
        model: nn.Module,
        example: Tensor,
        path: Path,
        lowered: bool,
        step: tuple[int, int] | None = None,
        processor: str = "any",
    ) -> None:
        """Write a model, which `lower` was applied to or not, as `path` and files beside it.

        `step`: images may have any height and width that are multiples of these. `processor`: what it was lowered
        for.
        """
        writer: Callable[..., None] = import_module(f"fimaq.export.{self.name}_file").write
        writer(model, example, path, lowered, step, processor)

    def require(self) -> None:
        """An error that says what to install, where it is missing."""
        for package in self.packages:
            try:
                import_module(package)
            except ImportError as error:
                raise FimaqError(
                    f"this needs more packages ({error}): pip install 'fimaq[{self.extra}]'"
                ) from None


_ONNX = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    "onnx": Format(
        name="onnx",
        file="model.onnx",
        beside="",
        record="export.json",
        runtime="onnxruntime",
        session=OnnxRuntimeSession,
        any_size=True,
        symmetric=False,
        bit_exact=True,
        extra="export",
        packages=_ONNX,
    ),
    "openvino": Format(
        name="openvino",
        file="model.xml",
        beside=".bin",
        record="export-openvino.json",
        runtime="openvino",
        session=OpenVinoSession,
        any_size=False,
        symmetric=True,
        bit_exact=False,
        extra="openvino",
        packages=(*_ONNX, "openvino"),
    ),
}


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise InputError(f"format {name!r} is not known; accepted are {', '.join(FORMATS)}")
    return FORMATS[name]
