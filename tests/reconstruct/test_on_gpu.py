"""A GPU, compiled or not, learns what a CPU learns: same seed, same batches, same masks, same losses."""

from functools import cache
from typing import Any

import pytest
import timm
import torch
from demo_walk import configured, walk
from torch import Tensor

import fimaq
from fimaq.device import numerics
from fimaq.quant.masks import random_words, unpacked
from fimaq.reconstruct.compiled import WARM_UP, Recorded
from fimaq.reconstruct.prefetch import Prefetch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA GPU"),
]


@pytest.fixture(autouse=True)
def search_looks_at_as_much_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fimaq.calibrate.ranges.ROWS", {"cpu": 1024, "cuda": 1024})


SEEDS = {"fima-q": 2, "brecq": 0}
"""With which nothing lies on the edge between two roundings: inputs that differ by 1e-7 change losses by less than
1e-5, with other seeds by up to 9e-2."""


def losses(method: str, **settings: Any) -> list[float]:
    """The first six losses of patch embedding and first block; from the fourth on a CUDA graph is replayed."""
    usual = {"method": method, "iters": 20, "precision": "fp32", "seed": SEEDS[method]}
    config = configured(**usual | settings)
    with numerics(config, torch.device(config.device)):
        reconstruction = walk(config)
        found = []
        for index in (0, 1):
            found += reconstruction.reconstruct(index, lambda iteration, loss: None).losses[:6]
            reconstruction.advance(index)
    return [loss for _, loss in found]


@cache
def losses_on_cpu(method: str) -> list[float]:
    return losses(method, device="cpu")


@pytest.mark.parametrize("compile", [False, True], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("method", ["fima-q", "brecq"])
def test_losses_on_a_gpu_are_those_on_a_cpu(method: str, compile: bool) -> None:
    found = losses(method, device="cuda", compile=compile)
    assert len(found) == 12
    assert found == pytest.approx(losses_on_cpu(method), rel=1e-3)


@pytest.mark.parametrize("place", ["pinned host memory", "disk"])
@pytest.mark.parametrize("compile", [False, True], ids=["uncompiled", "compiled"])
def test_activations_elsewhere_give_the_same_losses(
    place: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"cuda": 0, "cpu": 2**34 if place == "pinned host memory" else 0}
    monkeypatch.setattr("fimaq.reconstruct.cache.free_bytes", lambda device: free[device.type])
    found = losses("fima-q", device="cuda", compile=compile)
    assert found == pytest.approx(losses_on_cpu("fima-q"), rel=1e-3)


def test_a_budget_is_kept_and_changes_no_losses() -> None:
    """Of a real size: what cuBLAS takes for itself, 32 MiB for each stream on a Hopper GPU, counts too."""
    budget = 1280 * 2**20
    given = {"iters": 4, "rank": 1, "precision": "fp32", "compile": False, "device": "cuda"}
    runs = []
    for memory_budget in (budget, None):
        torch.manual_seed(0)
        model, images = timm.create_model("vit_tiny_patch16_224", depth=3), torch.randn(1024, 3, 224, 224)
        runs.append(fimaq.quantize(model, images, memory_budget=memory_budget, **given))
    bounded, free = (run.metrics for run in runs)
    assert bounded["peak_memory_bytes"] <= budget < free["peak_memory_bytes"]
    assert "pinned host memory" in bounded["cache"].values()
    first = [[unit["losses"][0][1] for unit in metrics["units"][:2]] for metrics in (bounded, free)]
    assert first[0][0] == pytest.approx(first[1][0], rel=1e-3)
    # The second unit starts from ranges searched in other portions: of two that are equal, the other may win.
    assert first[0][1] == pytest.approx(first[1][1], rel=0.05)


def test_rows_are_fetched_while_the_batch_before_is_in_use() -> None:
    stored = {"a": torch.randn(20, 3, 2).pin_memory(), "b": torch.arange(20)}  # pinned, and not
    prefetch = Prefetch(stored, 4, torch.device("cuda"))
    batches = torch.randint(0, 20, (50, 4)).tolist()
    prefetch.fetch(batches[0])
    for now, coming in zip(batches, [*batches[1:], batches[0]], strict=True):
        prefetch.take()
        prefetch.fetch(coming)
        assert all(torch.equal(prefetch.batch[name].cpu(), tensor[now]) for name, tensor in stored.items())
    prefetch.close()


def test_masks_on_a_gpu_are_those_on_a_cpu() -> None:
    masks = []
    for device in ("cpu", "cuda"):
        key = torch.tensor(-5, dtype=torch.int32, device=device)
        masks.append(unpacked(random_words(117, 0.3, key)).cpu())
    assert torch.equal(*masks)


def test_a_recorded_function_follows_its_arguments() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a @ b, a + 1

    recorded = Recorded(function)
    for rows in (4,) * (WARM_UP + 3) + (3, 4):  # before the recording, after it, and another shape in between
        a, b = torch.randn(rows, 5, device="cuda"), torch.randn(5, 2, device="cuda")
        torch.testing.assert_close(recorded(a, b), (a @ b, a + 1))
    assert recorded.replay is not None
    assert recorded.replay.graph is not None
