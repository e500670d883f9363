"""Units that are said to be alike have the same trace; what Python could tell apart is not alike."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import timm
import torch
from demo_walk import demo_step, run
from families import FAMILIES
from timm.layers import DropPath
from torch import Tensor, nn

from fimaq.config import Config
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain
from fimaq.reconstruct import compiled
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.alike import kind_of, tensor_kinds
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.compiled import Replay, _description, compile_function, trace
from fimaq.reconstruct.step import ReconstructionStep

IMAGES = 4
FAST = [("vit", "deploy"), ("vit", "released"), ("swin", "deploy")]


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(compiled, "_alike", {})


def begun_steps(family: str, preset: str) -> list[ReconstructionStep]:
    """A step of every unit of a small model, after its first iteration."""
    name, args = FAMILIES[family]
    torch.manual_seed(0)
    model = timm.create_model(name, **args).eval()
    images = torch.randn(IMAGES, 3, args["img_size"], args["img_size"])
    config = Config.create(
        preset=preset, calib_size=IMAGES, batch_size=2, iters=10, rank=2, device="cpu", search_size=IMAGES
    )
    structure = prepare_model(model, images[:2], 4, 4, True, rescale_rows=preset == "deploy")
    chain = UnitChain(model, structure, images[:2])
    walk = Reconstruction(chain, images, config, ActivationCache(IMAGES, torch.device("cpu")))
    steps = []
    for index, unit in enumerate(chain.units):
        walk.cache_full_precision(index)
        walk.search_ranges(unit)
        objective = walk.objective(index)
        step = ReconstructionStep(unit, objective, config, walk.cache)
        walk.refresh(index, objective, walk.evaluation(index))
        step()
        step.tensors |= {name: t.clone() for name, t in step.tensors.items()}  # the cache moves on
        steps.append(step)
        walk.advance(index)
    return steps


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in product(FAMILIES, ("deploy", "released"))
    ],
)
def test_units_that_are_alike_have_one_trace(family: str, preset: str) -> None:
    kinds: dict[Any, set[str]] = {}
    steps = begun_steps(family, preset)
    for step in steps:
        kind = step._kind()
        if kind is not None:
            described = _description(trace(step._step, step.tensors), step.tensors)
            kinds.setdefault((kind, tensor_kinds(step.tensors)), set()).add(described)
    assert all(len(descriptions) == 1 for descriptions in kinds.values())
    if family == "vit":
        assert len(kinds) == len(steps) - 1  # two blocks


def test_what_is_alike_is_traced_once_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def counting(function: Callable[..., None], tensors: dict[str, Tensor]) -> Any:
        traced.append(function.__qualname__)
        return trace(function, tensors)

    monkeypatch.setattr(compiled, "trace", counting)
    monkeypatch.setattr(compiled, "_compile", lambda graph, tensors: graph)
    first, second = (demo_step(index) for index in (1, 2))
    plain = demo_step(2)
    for step in (first, second, plain):
        run(step, 1)
    for step in (first, second):
        step._replay = step._prepared(compiled=True)
        assert isinstance(step._replay, Replay)
        run(step, 2)
    assert len(traced) == 3  # two for masks, one for the step
    run(plain, 2)
    torch.testing.assert_close(second.tensors, plain.tensors, rtol=1e-6, atol=1e-8)


def test_functions_of_no_known_kind_are_traced_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compile", lambda graph, tensors: graph)

    def adding(value: float) -> Callable[[dict[str, Tensor]], None]:
        def add(t: dict[str, Tensor]) -> None:
            t["x"].add_(value)

        return add

    tensors = {"x": torch.zeros(3)}
    for value in (1.0, 2.0):
        fused = compile_function(adding(value), tensors)
        assert fused is not None
        fused(*tensors.values())
    assert tensors["x"].tolist() == [3, 3, 3]


class Scaled(nn.Module):
    """A module with state of every sort."""

    def __init__(self, factor: Any = 2.0, shared: bool = False) -> None:
        super().__init__()
        self.layer, self.factor, self.act = nn.Linear(3, 3), factor, torch.relu
        self.register_buffer("table", torch.zeros(2))
        other = self.table if shared else torch.zeros(2)
        self.register_buffer("other", other)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: module)
    return module


class Dropping(nn.Module):
    """Something is left out, in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.values, self.paths = nn.Dropout(rate), DropPath(rate)


def test_rates_of_what_is_left_out_count_in_training_only() -> None:
    assert kind_of(Dropping(0.1).eval()) == kind_of(Dropping(0.2).eval()) is not None
    assert kind_of(Dropping(0.1).train()) != kind_of(Dropping(0.2).train())


def test_modules_of_the_same_state_are_alike_whatever_their_tensors_hold() -> None:
    one, two = Scaled(), Scaled()
    assert not torch.equal(one.layer.weight, two.layer.weight)
    assert kind_of(one) is not None
    assert kind_of(one) == kind_of(two)


@pytest.mark.parametrize(
    "other",
    [
        Scaled(3.0), Scaled(2), Scaled(-0.0), Scaled("2.0"), Scaled([2.0]), Scaled((2.0,)), Scaled({"a": 2.0}),
        Scaled(shared=True), Scaled().double(), Scaled().train(False), Scaled().requires_grad_(False),
    ],
)  # fmt: skip
def test_what_python_could_tell_apart_is_not_alike(other: nn.Module) -> None:
    assert kind_of(other) is not None
    assert kind_of(other) not in (kind_of(Scaled()), kind_of(Scaled(0.0)))


@pytest.mark.parametrize(
    "other", [Scaled(torch.ones(2)), Scaled(object()), Scaled([torch.ones(2)]), hooked(Scaled())]
)
def test_what_cannot_be_compared_has_no_kind(other: nn.Module) -> None:
    assert kind_of(other) is None
