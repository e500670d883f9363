"""How a step learns: the rounding penalty, the rates of roundings and scales, Adam."""

import math

import pytest
import torch
from demo_walk import demo_step, linear_step, run, same
from torch import Tensor

from fimaq.quant.quantizers import rounding_indecision
from fimaq.reconstruct import step as step_module
from fimaq.reconstruct.step import _adam


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_rounding_penalty_does_nothing_before_the_warm_up_ends() -> None:
    heavy, none = (run(demo_step(rounding_weight=w, warmup=0.5), 5) for w in (100.0, 0.0))
    assert same(heavy, none)


def test_the_rounding_penalty_acts_once_the_warm_up_has_ended() -> None:
    heavy, none = (run(demo_step(rounding_weight=w, warmup=0.5), 6) for w in (100.0, 0.0))
    assert not same(heavy, none)


def test_the_rounding_penalty_drives_every_weight_to_a_decision() -> None:
    roundings, _ = run(demo_step(rounding_weight=1.0, rounding_lr=0.1, warmup=0.0, iters=60), 60)
    soft = (torch.sigmoid(roundings) * 1.2 - 0.1).clamp(0, 1)
    assert ((soft < 0.05) | (soft > 0.95)).float().mean() > 0.95


def test_the_learning_rate_of_the_scales_falls_to_zero_as_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[str, list[Tensor]] = {"roundings": [], "scales": []}

    def recorded(t: dict[str, Tensor], group: str, gradient: Tensor, rate: Tensor) -> None:
        rates[group].append(rate / t["searched"] if group == "scales" else rate.clone())
        _adam(t, group, gradient, rate)

    monkeypatch.setattr(step_module, "_adam", recorded)
    run(linear_step(scale_lr=1e-3, rounding_lr=1e-2), 10)
    expected = [1e-3 * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(1, 11)]
    assert [rate.item() for rate in rates["scales"]] == pytest.approx(expected, abs=1e-9)
    assert [rate.item() for rate in rates["roundings"]] == pytest.approx([1e-2] * 10)


def test_scales_move_while_their_learning_rate_is_above_zero_and_not_after() -> None:
    step = demo_step(scale_lr=1e-3)
    (_, before), (_, middle), (_, after), (_, beyond) = (run(step, times) for times in (0, 9, 1, 3))
    assert (before != middle).all()
    assert torch.equal(middle, after)
    assert torch.equal(middle, beyond)


def test_scales_stay_positive_whatever_the_learning_rate() -> None:
    _, scales = run(demo_step(scale_lr=10.0, drop_probability=0.0), 5)
    assert (scales > 0).all()


def test_scales_learn_relative_to_what_range_search_found() -> None:
    """The same unit with inputs 64 times as large has scales 64 times as large, and moves them by as much."""
    steps = [linear_step(size, scale_lr=1e-2, rounding_weight=1.0, warmup=0.0) for size in (1.0, 64.0)]
    (small_roundings, small), (large_roundings, large) = (run(step, 8) for step in steps)
    searched = [step.tensors["searched"] for step in steps]
    assert torch.equal(searched[1], 64 * searched[0])
    assert (small / searched[0] - 1).abs().min() > 1e-3
    torch.testing.assert_close(large / searched[1], small / searched[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(large_roundings, small_roundings, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 1e-3)])
def test_adam_is_that_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    """Movement compared, not position. The bias correction 1 - 0.999^n is taken in float32: hence 1e-4."""
    start = torch.randn(50, dtype=dtype)
    tensors = {"x": start.clone(), "x.first": torch.zeros_like(start), "x.second": torch.zeros_like(start)}
    tensors["iteration"] = torch.zeros((), dtype=torch.int32)
    reference = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([reference], lr=0.03)
    sizes = torch.logspace(-4, 4, 50, dtype=dtype)
    for _ in range(20):
        reference.grad = sizes * torch.randn(50, dtype=dtype)
        tensors["iteration"] += 1
        _adam(tensors, "x", reference.grad, torch.tensor(0.03))
        optimizer.step()
        found, expected = tensors["x"] - start, reference.detach() - start
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 0.03)


def test_the_rounding_penalty_sharpens_into_decisions_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exponent falls from 20, which few weights feel, to 2: only then are all driven to 0 or 1."""
    exponents: list[float] = []

    def recorded(rounding: Tensor, exponent: Tensor) -> Tensor:
        exponents.append(exponent.item())
        return rounding_indecision(rounding, exponent)

    monkeypatch.setattr(step_module, "rounding_indecision", recorded)
    run(linear_step(warmup=0.2), 10)
    assert exponents == pytest.approx([20 - 18 * max(0.0, i / 10 - 0.2) / 0.8 for i in range(10)], abs=1e-4)


def test_scales_stay_above_a_hundredth_of_what_range_search_found() -> None:
    step = demo_step(scale_lr=10.0, drop_probability=0.0)
    _, scales = run(step, 5)
    floor = step.tensors["searched"] / 100
    assert (scales >= floor).all()
    assert (scales == floor).any()
