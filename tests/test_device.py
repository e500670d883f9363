"""Which precision a run computes with where nobody says: the fastest that was seen to cost no accuracy."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fimaq.config import Config
from fimaq.device import choose_device, numerics, onednn, onednn_is_exact, with_precision
from fimaq.errors import InputError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def chosen(device: torch.device, **settings: str) -> str | None:
    return with_precision(Config.create(**settings), device).precision


def test_a_cpu_computes_in_fp32() -> None:
    assert chosen(CPU) == "fp32"


@pytest.mark.parametrize(("task", "precision"), [("classification", "bf16"), ("detection", "tf32")])
def test_a_gpu_computes_in_what_was_measured_for_the_task(
    task: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert chosen(GPU, task=task) == precision


def test_a_gpu_without_bf16_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert chosen(GPU) == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_is_asked_for_is_taken(device: torch.device, precision: str) -> None:
    assert chosen(device, precision=precision) == precision


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """As far as numerics are concerned."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return GPU


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", False), ("tf32", True), ("bf16", True), (None, False)]
)
def test_tf32_is_allowed_where_the_precision_says_so_and_only_there(
    precision: str | None, allowed: bool, a_gpu: torch.device
) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with numerics(Config.create(precision=precision), a_gpu):
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert torch.backends.cuda.matmul.allow_tf32 is before


@pytest.fixture
def set_in_the_newer_way() -> Iterator[Any]:
    """TF32 allowed in a way after which PyTorch refuses to be asked in the older one."""
    library: Any = torch.backends.cuda.matmul
    before, library.fp32_precision = library.fp32_precision, "tf32"
    with pytest.raises(RuntimeError):
        _ = library.allow_tf32
    yield library
    library.fp32_precision = before


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "tf32"), ("fp32", "ieee")])
def test_tf32_may_have_been_set_in_the_newer_of_two_ways(
    precision: str, expected: str, set_in_the_newer_way: Any, a_gpu: torch.device
) -> None:
    with numerics(Config.create(precision=precision), a_gpu):
        assert set_in_the_newer_way.fp32_precision == expected
    assert set_in_the_newer_way.fp32_precision == "tf32"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_multiplies_in_single_precision(precision: str) -> None:
    left, right = torch.randn(300, 200), torch.randn(200, 100)
    exact = left.double() @ right.double()
    with numerics(Config.create(precision=precision), CPU):
        found = left @ right
    assert (found - exact).norm() / exact.norm() < 1e-6


def settings_of_products() -> list[object]:
    libraries: Any = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    return [library.fp32_precision for library in libraries]


@pytest.mark.parametrize("exact", [True, False])
def test_a_cpu_asks_onednn_where_that_is_exact_and_only_meanwhile(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fimaq.device.onednn_is_exact", lambda: exact)
    before, precision = settings_of_products(), torch.get_float32_matmul_precision()
    with numerics(Config.create(), CPU):
        assert settings_of_products()[0] == ("bf16" if exact else before[0])
        torch.get_float32_matmul_precision()  # as a model's forward may
    assert settings_of_products() == before
    assert torch.get_float32_matmul_precision() == precision


def test_onednn_is_asked_where_products_were_set_in_the_newer_of_two_ways(set_in_the_newer_way: Any) -> None:
    before = settings_of_products()
    with onednn():
        assert settings_of_products() == ["bf16", "tf32"]
    assert settings_of_products() == before


def test_a_gpu_does_without_onednn(a_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fimaq.device.onednn_is_exact", lambda: True)
    before = settings_of_products()
    with numerics(Config.create(precision="fp32"), a_gpu):
        assert settings_of_products()[0] == before[0]


def test_a_library_that_rounds_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.Tensor.__matmul__

    def rounding(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return product(x, y) if x.dtype == torch.float64 else product(x.bfloat16(), y.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    assert not onednn_is_exact.__wrapped__()


def test_whether_onednn_is_exact_does_not_depend_on_what_the_user_has_set() -> None:
    found = onednn_is_exact.__wrapped__()
    with torch.device("meta"), torch.autocast("cpu"):
        assert onednn_is_exact.__wrapped__() == found


def test_one_process_with_the_bits_of_several_keeps_to_the_usual_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fimaq.device.onednn_is_exact", lambda: True)
    before = settings_of_products()
    with numerics(Config.create(parts=2), CPU):
        assert settings_of_products() == before
    with numerics(Config.create(parts=1), CPU):
        assert settings_of_products()[0] == "bf16"


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match=r"'cuda:7' is not there; accepted are cuda:0 to cuda:1"):
        choose_device("cuda:7")
