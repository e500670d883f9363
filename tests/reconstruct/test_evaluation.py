"""KL gradients through a suffix in half precision: as good as in full precision, and never lost."""

from collections.abc import Iterator

import pytest
import torch
from demo_walk import BLOCK, configured, walk
from torch import Tensor

from fimaq.fisher.collect import Sample
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.evaluation import Evaluation


@pytest.fixture(params=["w3a3", "w8a8"])
def at_block(request: pytest.FixtureRequest) -> Reconstruction:
    """The demo model with searched ranges in its first block."""
    reconstruction = walk(configured(bits=request.param))
    reconstruction.cache_full_precision(0)
    reconstruction.advance(0)
    reconstruction.cache_full_precision(BLOCK)
    reconstruction.search_ranges(reconstruction.chain.units[BLOCK])
    return reconstruction


def samples(reconstruction: Reconstruction) -> Iterator[Sample]:
    return reconstruction._samples(BLOCK, None)


def gradients(reconstruction: Reconstruction, evaluate: Evaluation) -> Tensor:
    return torch.cat([evaluate(sample)[0] for sample in samples(reconstruction)])


def test_half_precision_gives_the_gradients_of_full_precision(at_block: Reconstruction) -> None:
    """Small perturbations too: their gradients, below 1e-7, go back through float16 at a size it can hold."""
    full, half = (Evaluation(at_block.chain, BLOCK, 20.0, half=given) for given in (False, True))
    expected, found = gradients(at_block, full), gradients(at_block, half)
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert (found == 0).float().mean() < 0.01
    assert not half.overflowed()


def test_gradients_that_half_precision_cannot_hold_are_noticed_once(at_block: Reconstruction) -> None:
    suffix, half = at_block.chain.suffix, Evaluation(at_block.chain, BLOCK, 20.0, half=True)
    expected = gradients(at_block, Evaluation(at_block.chain, BLOCK, 20.0))

    def growing(index: int, outputs: list[Tensor], carried: dict[int, list[Tensor]]) -> Tensor:
        """The same suffix, by way of numbers that end float16: a product is what autocast computes there."""
        large = torch.eye(outputs[0].shape[-1]) * 1e6
        return suffix(index, [(outputs[0] @ large).float() / 1e6, *outputs[1:]], carried)

    at_block.chain.suffix = growing  # type: ignore[method-assign]
    gradients(at_block, half)
    assert half.overflowed()
    assert not half.overflowed()
    half.widen()
    torch.testing.assert_close(gradients(at_block, half), expected, rtol=1e-3, atol=1e-3 * expected.abs().max())
    assert not half.overflowed()


def test_a_refresh_that_overflows_is_done_again_in_full_precision(at_block: Reconstruction) -> None:
    objective, half = at_block.objective(BLOCK), Evaluation(at_block.chain, BLOCK, 20.0, half=True)
    asked: list[bool] = []

    def once() -> bool:
        asked.append(True)
        return len(asked) == 1

    half.overflowed = once  # type: ignore[method-assign]
    at_block.refresh(BLOCK, objective, half)
    assert asked == [True]
    assert not half.half
