"""One kernel computes what two quantized products with a softmax between compute, and its gradients."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from window_cases import CASES, HEADS, WINDOWS, distances, products_of, quantizers_of

from fimaq.quant import window_attention
from fimaq.quant.layers import QuantMatMul
from fimaq.quant.quantizers import ActivationQuantizer
from fimaq.quant.window_attention import attention_at_once, compiling_for_gpu, kernel_works

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
AS_FAR_AS_ROUNDING = 1e-5
"""Of single precision. One value in 10,000 that is rounded to another step is 1e-3."""


@needs_triton
def test_interpreted_it_gives_the_values_and_gradients_of_what_is_written_out():
    script = Path(__file__).with_name("window_cases.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    of_cases = json.loads(found.stdout)
    assert len(of_cases) == len(CASES)
    for case, of_case in zip(CASES, of_cases, strict=True):
        assert len(of_case) == 6
        assert max(of_case) < AS_FAR_AS_ROUNDING, case


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA GPU")
@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_it_does_too(case):
    assert max(distances(case, "cuda")) < 1e-2  # a few values are rounded the other way


def attended(products: list[QuantMatMul]) -> torch.Tensor | None:
    return attention_at_once(*products, torch.randn(3, WINDOWS, HEADS, 5, 8, requires_grad=True), None, 1.0)


def learning() -> tuple[list[QuantMatMul], list[ActivationQuantizer]]:
    """Products as they are while a step runs, and their quantizers."""
    products = products_of(False, 5, "cpu")
    quantizers = quantizers_of(products)
    for quantizer in quantizers:
        quantizer.leaves, quantizer.dropping = [], (torch.zeros(10_000, dtype=torch.bool), None)
    return products, quantizers


@pytest.mark.parametrize(
    "change",
    [
        lambda quantizers: setattr(quantizers[2], "leaves", None),
        lambda quantizers: setattr(quantizers[3], "dropping", None),
        lambda quantizers: setattr(quantizers[0], "dropping", (torch.zeros(9), torch.arange(WINDOWS))),
        lambda quantizers: setattr(quantizers[2], "scale", torch.ones(HEADS, 1, 5)),
        lambda quantizers: setattr(quantizers[1], "scale", torch.ones(HEADS, 8, 1)),
        lambda quantizers: setattr(quantizers[0], "scale", torch.ones(WINDOWS, HEADS, 5, 1)),
    ],
    ids=["scale that does not learn", "one drops nothing", "part of a batch", "columns", "keys", "windows"],
)
def test_what_the_kernel_cannot_do_is_left_to_others(change, monkeypatch):
    monkeypatch.setattr(window_attention, "_has_kernel", lambda operands, bias: True)
    monkeypatch.setattr(window_attention, "_WindowAttention", pytest.fail)
    products, quantizers = learning()
    change(quantizers)
    assert attended(products) is None
    products, _ = learning()
    products[1].quantized = False
    assert attended(products) is None


def test_nothing_but_what_is_compiled_for_a_gpu_takes_the_kernel():
    products, quantizers = learning()
    assert attended(products) is None
    with compiling_for_gpu(True):
        assert attended(products) is None  # these are on a CPU
    assert all(quantizer.leaves == [] for quantizer in quantizers)


@needs_triton
def test_a_kernel_that_cannot_run_says_so_and_is_not_used():
    with pytest.warns(UserWarning, match="runs without its kernel, and slower"):
        assert not kernel_works("cpu")
