"""One kernel computes what two quantized products with a softmax between compute, and its gradients."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from window_cases import CASES, distances

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
