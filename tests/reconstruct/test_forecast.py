"""Which activations a run will hold, against what the cache of a real run really allocates."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import fimaq
from fimaq.config import Config
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.pipeline import prepare_chain
from fimaq.reconstruct import memory
from fimaq.reconstruct.cache import DISK, GPU, HOST, PINNED, ActivationCache
from fimaq.reconstruct.forecast import Allocation, Forecast, forecast_lists
from fimaq.reconstruct.plan import images_for

COUNT = 16
PLENTY = {GPU: 2**40, PINNED: 2**40, HOST: 2**40}


def carrying() -> nn.Module:
    """A model with units whose outputs are needed after the next unit."""
    return timm.create_model(
        "cait_xxs24_224", img_size=32, embed_dim=24, num_heads=2, depth=2, num_classes=5
    ).eval()


def forecast(model: nn.Module, images: torch.Tensor, device: str = "cpu", **settings: Any) -> Forecast:
    config = Config.create(calib_size=COUNT, batch_size=4, **settings)
    _, chain = prepare_chain(model, images[:2], config)
    return forecast_lists(chain, images[:1], config, torch.device(device), PLENTY)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (demo_model, {"method": "rtn"}),
        (demo_model, {"method": "brecq"}),
        (demo_model, {"method": "rtn", "memory_budget": 300_000}),
        (carrying, {"method": "rtn"}),
    ],
)
def test_lists_are_those_that_a_run_allocates(
    make: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.randn(COUNT, 3, 32, 32) if make is carrying else demo_calibration(COUNT)
    made: list[Allocation] = []
    held: list[int] = []
    allocate = ActivationCache.allocate

    def recorded(self: ActivationCache, name: str, *given: Any) -> None:
        allocate(self, name, *given)
        made.append(Allocation(name, sum(t.nbytes for t in self.stored(name)), self.places[name]))
        held.append(sum(t.nbytes for n in self.places if self.places[n] == HOST for t in self.stored(n)))

    with monkeypatch.context() as patch:
        patch.setattr(ActivationCache, "allocate", recorded)
        patch.setattr(memory, "LOOKED_AT", 6)
        fimaq.quantize(
            make(), images, out=tmp_path / "run", iters=2, batch_size=4, search_size=4, device="cpu", **settings
        )
        told = forecast(make(), images, iters=2, search_size=4, **settings)
    assert told.allocations == made
    assert told.on_host == max(held)
    assert (DISK in told.peaks) == ("memory_budget" in settings)
    assert any("output" in one.name and one.name != "outputs" for one in made) == (make is carrying)


def test_beside_a_gpu_what_does_not_fit_is_pinned_and_then_on_disk() -> None:
    images = demo_calibration(2)
    free = forecast(demo_model(), images, "cuda")
    assert set(free.peaks) == {GPU}
    tight = forecast(demo_model(), images, "cuda", memory_budget=300_000)
    assert set(tight.peaks) == {GPU, PINNED}
    assert tight.on_gpu <= 100_000
    tighter = forecast(demo_model(), images, "cuda", memory_budget=300_000, host_budget=225_000)
    assert set(tighter.peaks) == {GPU, PINNED, DISK}
    assert tighter.on_host <= 150_000


def test_where_only_ranges_are_searched_few_images_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LOOKED_AT", 6)
    images = demo_calibration(2)
    learned, searched = (
        {one.name: one.size for one in forecast(demo_model(), images, method=method, search_size=4).allocations}
        for method in ("qdrop", "rtn")
    )
    assert searched.pop("teacher") == learned.pop("teacher")
    assert {name: size * COUNT // 6 for name, size in searched.items()} == learned


def test_units_behind_the_last_that_learns_hold_few_images() -> None:
    config = Config.create(calib_size=COUNT, batch_size=4, search_size=4)
    model, images = demo_model(), demo_calibration(2)
    _, chain = prepare_chain(model, images, config, only_searched=("head",))
    assert [unit.name for unit in chain.units][-1] == "head"
    held = [images_for(chain, index, config, COUNT, 3) for index in range(len(chain))]
    assert held == [COUNT] * (len(chain) - 1) + [4]
