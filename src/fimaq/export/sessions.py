"""Running an exported file in the runtime it was made for, and seeing what that runtime really executes."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

INPUT, OUTPUT = "images", "logits"


class Session(Protocol):
    """A file loaded by a runtime, on the CPU.

    `integer_kinds` and `float_kinds`: the runtime's operators that multiply matrices, by what they multiply.
    """

    integer_kinds: tuple[str, ...]
    float_kinds: tuple[str, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Images (n, C, H, W) -> logits."""

    def executed(self) -> Counter[str]:
        """The operators of the graph as it is executed, optimised by the runtime: kind -> how many."""


class OnnxRuntimeSession:
    """onnxruntime's CPU provider."""

    integer_kinds: tuple[str, ...] = (
        "MatMulIntegerToFloat",
        "MatMulInteger",
        "QLinearMatMul",
        "QGemm",
        "ConvInteger",
        "QLinearConv",
    )
    float_kinds: tuple[str, ...] = (
        "MatMul",
        "FusedMatMul",
        "Gemm",
        "FusedGemm",
        "Conv",
        "FusedConv",
        "MatMulNBits",
        "Attention",
    )

    def __init__(self, path: Path, threads: int = 0, shape: Sequence[int] | None = None) -> None:
        self.path, self.threads = path, threads
        self.session = self._open()

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.session.run([OUTPUT], {INPUT: images.numpy()})[0])

    def executed(self) -> Counter[str]:
        import onnx

        with tempfile.TemporaryDirectory() as folder:
            optimised = Path(folder) / "optimised.onnx"
            self._open(optimised)
            return Counter(node.op_type for node in onnx.load(str(optimised)).graph.node)

    def _open(self, optimised: Path | None = None) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        # Threads that spin while they wait take the processor from whoever works: 2 cores need twice as long.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
        return onnxruntime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])


def _kinds(*precisions: str) -> tuple[str, ...]:
    """OpenVINO's products of matrices, each with the precision it is executed in."""
    products = ("FullyConnected", "MatMul", "Convolution")
    return tuple(f"{product} {precision}" for product in products for precision in precisions)


@cache
def openvino_core() -> Any:
    """The one of this process. Each more would put its own stack for signals in place of the one before, and take
    the memory with it when it goes: the next signal, such as Ctrl-C, then ends in a segmentation fault."""
    import openvino

    return openvino.Core()


class OpenVinoSession:
    """OpenVINO's CPU plugin. What is not integer is computed in float32, as in the run itself.

    With a `shape` of images the model is compiled for that shape alone, which OpenVINO does better.
    """

    integer_kinds: tuple[str, ...] = _kinds("i8", "u8")
    float_kinds: tuple[str, ...] = _kinds("f32", "f16", "bf16")

    def __init__(self, path: Path, threads: int = 0, shape: Sequence[int] | None = None) -> None:
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        if threads:
            settings["INFERENCE_NUM_THREADS"] = threads
        core = openvino_core()
        model = core.read_model(str(path))
        if shape is not None:
            model.reshape(list(shape))
        self.compiled = core.compile_model(model, "CPU", settings)
        self.request = self.compiled.create_infer_request()

    def __call__(self, images: Tensor) -> Tensor:
        return torch.from_numpy(self.request.infer([images.numpy()])[0].copy())

    def executed(self) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for operator in self.compiled.get_runtime_model().get_ops():
            about = operator.get_rt_info()
            kinds[f"{about['layerType'].astype(str)} {about['runtimePrecision'].astype(str)}"] += 1
        return kinds
