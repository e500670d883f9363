"""What a unit is given and looks at: which inputs, of how many images, quantized or not."""

from typing import Any

import pytest
import torch
from demo_walk import BLOCK, COUNT, configured, first_block, walk
from torch import Tensor, nn

from fimaq.data.demo import demo_calibration
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain
from fimaq.reconstruct.algorithm import Reconstruction, _refresh_iterations
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.objectives import FisherLoss, OutputDivergence


def behind_a_quantized_unit(**settings: Any) -> Reconstruction:
    """At the first block, in full precision itself, whose inputs have the errors of the patch embedding."""
    reconstruction = walk(configured(**settings))
    reconstruction.reconstruct(0, lambda *_: None)
    reconstruction.advance(0)
    reconstruction.cache_full_precision(BLOCK)
    return reconstruction


def given_to(chain: UnitChain, index: int) -> Tensor:
    """What a unit reads when the model as it is runs on the calibration images."""
    seen: list[Tensor] = []
    hook = chain.units[index].module.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    with torch.no_grad():
        chain.model(demo_calibration(COUNT))
    hook.remove()
    return seen[0]


def test_cached_inputs_are_those_of_the_quantized_and_of_the_full_precision_model() -> None:
    reconstruction, _ = first_block(configured(iters=2))
    reconstruction.advance(BLOCK)
    expected = {"raw": walk(configured()).chain, "quantized": reconstruction.chain}
    for prefix, chain in expected.items():
        found, inputs = reconstruction.cache.rows(f"{prefix} inputs", 0, COUNT)[0], given_to(chain, BLOCK + 1)
        # Last bits differ with the number of images at a time, and may move a value over the edge of two codes.
        assert (found - inputs).norm() < 0.01 * inputs.norm(), prefix


def test_a_refresh_sees_the_errors_of_its_unit_alone_and_a_loss_all_errors_so_far() -> None:
    reconstruction = behind_a_quantized_unit()
    evaluate = reconstruction.evaluation(BLOCK)
    own = torch.cat([evaluate(sample)[1] for sample in reconstruction._samples(BLOCK, None)])
    so_far, targets = reconstruction._first_deltas(BLOCK)
    assert own.norm() < 1e-4 * targets.norm()
    assert so_far.norm() > 0.05 * targets.norm()


def test_ranges_are_searched_on_full_precision_inputs_of_as_many_images_as_asked() -> None:
    reconstruction = behind_a_quantized_unit(search_size=24)
    unit, seen = reconstruction.chain.units[BLOCK], list[Tensor]()
    hook = unit.module.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    reconstruction.search_ranges(unit)
    hook.remove()
    assert torch.equal(torch.cat(seen), reconstruction.cache.rows("raw inputs", 0, 24)[0])


@pytest.mark.parametrize(("method", "expected"), [("fima-q", 16), ("brecq", None)])
def test_a_refresh_looks_at_as_many_images_as_asked(
    method: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BRECQ needs the gradients of all of them."""
    reconstruction, limits = behind_a_quantized_unit(method=method, fisher_size=16), list[int | None]()
    samples = reconstruction._samples
    monkeypatch.setattr(reconstruction, "_samples", lambda i, limit: limits.append(limit) or samples(i, limit))
    reconstruction.refresh(BLOCK, reconstruction.objective(BLOCK), reconstruction.evaluation(BLOCK))
    assert limits == [expected]


def test_a_rank_is_added_at_equal_distances() -> None:
    config = configured(method="fima-q", iters=100, rank=4)
    assert _refresh_iterations(FisherLoss(config, 3, torch.device("cpu")), config) == {0, 25, 50, 75}


def test_the_loss_of_brecq_is_one_on_what_it_starts_with() -> None:
    reconstruction = behind_a_quantized_unit(method="brecq")
    reconstruction.search_ranges(reconstruction.chain.units[BLOCK])
    objective = reconstruction.objective(BLOCK)
    reconstruction.refresh(BLOCK, objective, reconstruction.evaluation(BLOCK))
    deltas, targets = reconstruction._first_deltas(BLOCK)
    weights = reconstruction.cache.rows("gradients", 0, len(deltas))[0]
    assert objective(deltas, targets, weights).item() == pytest.approx(1, rel=1e-4)


def test_gradients_and_the_loss_of_the_head_have_the_temperature_asked_for() -> None:
    layer, inputs = nn.Linear(12, 6), torch.randn(COUNT, 12)
    chain = UnitChain(layer, prepare_model(layer, inputs[:2], 3, 3), inputs[:2])
    config = configured(method="fima-q", temperature=7.0)
    reconstruction = Reconstruction(chain, inputs, config, ActivationCache(COUNT, torch.device("cpu")))
    reconstruction.cache_full_precision(0)
    reconstruction.search_ranges(chain.units[0])
    head = reconstruction.objective(0)
    assert isinstance(head, OutputDivergence)
    assert head.temperature == 7
    assert reconstruction.evaluation(0).temperature == 7
