"""Traces of a step: they compute nothing, compute the same when run, and are shared by units of one shape."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from demo_walk import demo_step, linear_step, run
from torch import Tensor

from fimaq.quant import window_attention
from fimaq.reconstruct import compiled
from fimaq.reconstruct.compiled import Recorded, Replay, _description, compile_function, trace
from fimaq.reconstruct.step import ReconstructionStep

Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(compiled, "_compiled", {})


def begun(step: ReconstructionStep) -> ReconstructionStep:
    """After two iterations: by then it holds all its tensors, and Adam's are not zero any more."""
    run(step, 2)
    return step


def cloned(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def described(step: ReconstructionStep) -> str:
    return _description(trace(step._step, step.tensors), step.tensors)


UPDATED = {"roundings", "scales", "iteration", "loss"} | {
    f"{group}.{moment}" for group in ("roundings", "scales") for moment in ("first", "second")
}


@pytest.mark.parametrize("combines", [True, False])
def test_kernels_are_combined_on_a_gpu_where_the_compiler_can(
    combines: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    tried = []

    def compile_with(options: dict[str, Any], *_: Any) -> str:
        tried.append(options)
        if "combo_kernels" in options and not combines:
            raise RuntimeError("cannot")
        return "compiled"

    monkeypatch.setattr(compiled, "_compile_with", compile_with)
    on_gpu = SimpleNamespace(is_cuda=True)
    assert compiled._compile(torch.fx.symbolic_trace(torch.nn.Identity()), {"a": on_gpu}) == "compiled"
    assert ["combo_kernels" in options for options in tried] == ([True] if combines else [True, False])
    assert [str(w.message) for w in recwarn] == (
        [] if combines else ["kernels are not combined: RuntimeError: cannot"]
    )


def test_tracing_a_step_computes_nothing() -> None:
    step = begun(demo_step())
    before = cloned(step.tensors)
    trace(step._step, step.tensors)
    assert all(torch.equal(step.tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("drop_probability", [0.0, 0.5])
def test_a_traced_step_updates_what_the_step_itself_updates(drop_probability: float) -> None:
    step = begun(demo_step(drop_probability=drop_probability, warmup=0.0, rounding_weight=0.1))
    traced = trace(step._step, step.tensors)
    before, plain, by_trace = (cloned(step.tensors) for _ in range(3))
    for _ in range(2):
        step._step(plain)
        traced(*by_trace.values())
    torch.testing.assert_close(by_trace, plain, rtol=1e-6, atol=1e-8)
    assert {name for name, tensor in before.items() if not torch.equal(tensor, by_trace[name])} == UPDATED


def test_blocks_of_one_shape_have_one_description() -> None:
    first, second = (begun(demo_step(index)) for index in (1, 2))
    assert described(first) == described(second)


def test_other_bits_seeds_and_learning_rates_have_the_same_description() -> None:
    settings: list[dict[str, Any]] = [{}, {"bits": "w4a6", "seed": 3, "scale_lr": 1e-2, "iters": 50}]
    assert len({described(begun(demo_step(**changed))) for changed in settings}) == 1


def test_a_patch_embedding_and_a_block_have_different_descriptions() -> None:
    embedding, block = (begun(demo_step(index)) for index in (0, 1))
    assert described(embedding) != described(block)


def test_another_batch_size_has_another_description() -> None:
    assert described(begun(linear_step(batch_size=16))) != described(begun(linear_step(batch_size=32)))


def adding(value: Tensor) -> Callable[[Tensors], None]:
    def add(t: Tensors) -> None:
        t["x"].add_(value)

    return add


def test_a_graph_that_holds_a_tensor_of_its_own_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compile", lambda traced, tensors: traced)
    tensors = {"x": torch.zeros(3)}
    for value in (1.0, 2.0):
        fused = compile_function(adding(torch.full((3,), value)), tensors)
        assert fused is not None
        fused(*tensors.values())
    assert torch.equal(tensors["x"], torch.full((3,), 3.0))


def test_a_tensor_that_is_handed_in_does_not_keep_a_graph_from_being_shared() -> None:
    def add(t: Tensors) -> None:
        t["x"].add_(t["y"])

    one, two = ({"x": torch.zeros(3), "y": torch.full((3,), value)} for value in (1.0, 2.0))
    assert _description(trace(add, one), one) == _description(trace(add, two), two)


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2]])
def test_tensors_of_another_kind_have_another_description(other: Tensor) -> None:
    def double(t: Tensors) -> None:
        t["x"].mul_(2)

    one, two = {"x": torch.zeros(3)}, {"x": other}
    assert _description(trace(double, one), one) != _description(trace(double, two), two)


@pytest.mark.parametrize("works", [True, False])
def test_a_kernel_that_does_not_work_is_traced_as_what_it_replaces(
    works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_on_gpu", lambda tensors: True)
    monkeypatch.setattr(window_attention, "kernel_works", lambda: works)
    ranges = [torch.ones(4, 2, 5), torch.zeros(4, 2, 5), torch.ones(4)]

    def function(t: Tensors) -> None:
        if window_attention._compiling_for_gpu.get():
            t["found"].copy_(window_attention.window_attention(t["x"], None, ranges, [], 1.0, False))
        else:
            t["found"].zero_()

    traced = trace(function, {"x": torch.randn(3, 4, 2, 5, 8), "found": torch.zeros(4, 2, 5, 8)})
    assert window_attention.is_in(traced.graph) == works
    assert not window_attention._compiling_for_gpu.get()


def test_units_of_one_shape_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(compiled, "_compile", lambda traced, tensors: calls.append(traced) or traced)
    steps = [begun(demo_step(index)) for index in (0, 1, 2)]
    fused = [compile_function(step._step, step.tensors) for step in steps]
    assert len(calls) == 2
    assert fused[1] is fused[2]
    plain = cloned(steps[2].tensors)
    steps[2]._step(plain)
    assert fused[2] is not None
    fused[2](*steps[2].tensors.values())
    torch.testing.assert_close(steps[2].tensors, plain, rtol=1e-6, atol=1e-8)


def test_what_cannot_be_compiled_is_left_as_it_is_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: Any) -> Any:
        raise RuntimeError("no such compiler\nand much more about it")

    monkeypatch.setattr(compiled, "_compile", stumble)
    step = begun(linear_step())
    with pytest.warns(UserWarning, match="uncompiled.*no such compiler$"):
        assert compile_function(step._step, step.tensors) is None


def test_a_replay_without_a_compiler_is_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: Any) -> Any:
        raise RuntimeError("no such compiler")

    monkeypatch.setattr(compiled, "_compile", stumble)
    tensors = {"x": torch.zeros(3)}
    with pytest.warns(UserWarning, match="uncompiled"):
        replay = Replay((adding(torch.ones(3)), tensors), compiled=True)
    for _ in range(6):
        replay()
    assert tensors["x"].tolist() == [6, 6, 6]


def test_recorded_functions_pass_through_on_a_cpu() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a * b

    recorded = Recorded(function)
    results = []
    for rows in (4, 4, 3, 4, 4, 4):
        a, b = torch.randn(rows, 2), torch.randn(rows, 2)
        results.append((recorded(a, b), (a + b, a * b)))
    assert all(torch.equal(x, y) for found, expected in results for x, y in zip(found, expected, strict=True))


@pytest.mark.slow
def test_a_compiled_step_learns_what_the_step_itself_learns() -> None:
    eager, fused = (begun(linear_step(warmup=0.0)) for _ in range(2))
    replay = fused._replay = fused._prepared(compiled=True)
    assert isinstance(replay, Replay)
    assert all(compiled is not None for _, _, compiled in replay.parts)
    for _ in range(3):
        eager()
        fused()
        torch.testing.assert_close(fused.tensors, eager.tensors, rtol=1e-4, atol=1e-6)
    assert fused.tensors["iteration"] == 5


def test_a_recording_ends_with_its_last_reference() -> None:
    recorded = Recorded(lambda a: (a + 1,))
    recorded(torch.zeros(2))
    replay = weakref.ref(recorded.replay)
    gc.disable()
    try:
        del recorded
        assert replay() is None
    finally:
        gc.enable()


def test_a_step_lets_go_of_its_recording_when_it_is_finished() -> None:
    step = demo_step()
    run(step, 1)
    replay = weakref.ref(step._replay)
    gc.disable()
    try:
        step.finish()
        assert replay() is None
    finally:
        gc.enable()
