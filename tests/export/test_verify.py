"""When a file is good enough: the line that is drawn, and the disturbed run that it is drawn by."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fimaq.export import verify
from fimaq.export.verify import last_bits_disturbed, shortcomings


def found(same: int, count: int, itself: float, integer: int = 10, floats: int = 0) -> dict[str, Any]:
    compared = {"images": count, "same_top1": same, "same_top1_of_the_run_with_itself": itself}
    return {
        "integer_products": integer,
        "float_products": {"MatMul": floats} if floats else {},
        "agreement": {"test": compared},
    }


@pytest.mark.parametrize(
    ("itself", "fewest"),
    # wanted n - 3 sqrt(1.2 wanted (1 - wanted) n), wanted at most 0.99
    [(1000, 980), (990, 980), (900, 869), (500, 449)],
)
def test_three_standard_errors_below_what_is_wanted_are_enough(itself: int, fewest: int) -> None:
    assert shortcomings(found(fewest, 1000, itself), 10, floats_expected=False) == []
    (fault,) = shortcomings(found(fewest - 1, 1000, itself), 10, floats_expected=False)
    assert f"on {fewest - 1} of 1000 images (test), {min(0.99, itself / 1000):.1%} are expected" in fault


def test_products_that_are_not_integer_are_counted() -> None:
    assert shortcomings(found(9, 9, 9, integer=11), 10, floats_expected=False) == []
    assert shortcomings(found(9, 9, 9, integer=9), 10, floats_expected=False) == [
        "9 of 10 quantized products run in integer"
    ]
    assert shortcomings(found(9, 9, 9, floats=2), 10, floats_expected=True) == []
    assert shortcomings(found(9, 9, 9, floats=2), 10, floats_expected=False) == [
        "products in float: {'MatMul': 2}"
    ]


def disturbed(module: nn.Module, x: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What it gives, and what it gives disturbed; afterwards it is as before."""
    own = module(x)
    with last_bits_disturbed(module, seed):
        other = module(x)
    assert torch.equal(module(x), own)
    return own, other


def test_every_other_output_of_a_layer_norm_is_a_neighbouring_float() -> None:
    own, other = disturbed(nn.LayerNorm(64), torch.randn(500, 64, generator=torch.Generator().manual_seed(0)))
    up, down = (torch.nextafter(own, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    shares = [(other == value).float().mean().item() for value in (own, up, down)]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
    assert sum(shares) == pytest.approx(1)


def test_every_third_output_of_gelu_is_off_by_a_last_bit_of_the_sum_in_it() -> None:
    x = torch.linspace(-4, -3, 30_000)  # where that bit is many of the output's own
    own, other = disturbed(nn.GELU(), x)
    moved = (other - own)[other != own]
    assert len(moved) / len(x) == pytest.approx(1 / 3, abs=0.02)
    assert (moved > 0).float().mean().item() == pytest.approx(0.5, abs=0.02)
    expected = x.abs()[other != own] * torch.finfo(torch.float32).eps / 2
    assert torch.allclose(moved.abs(), expected, rtol=0.01, atol=0)


def test_a_seed_disturbs_in_its_own_way() -> None:
    x = torch.randn(8, 64)
    (_, one), (_, again), (_, two) = (disturbed(nn.LayerNorm(64), x, seed) for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, two)


class LastBits(nn.Module):
    """Two logits that change places with the last bit of a LayerNorm's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        odd = (self.norm(x).view(torch.int32)[:, :1] & 1).float()
        return torch.cat([odd, 1 - odd], 1)


@torch.no_grad()
def test_a_file_in_doubt_is_compared_with_a_run_disturbed_in_several_ways() -> None:
    model, images = LastBits(), torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    itself = []
    for seed in range(verify.DISTURBANCES):
        with last_bits_disturbed(model, seed):
            other = torch.cat([model(batch) for batch in images.split(verify.BATCH)])
        itself.append(int((other.argmax(1) == LastBits()(images).argmax(1)).sum()))
    assert len(set(itself)) > 1

    def compared(file: Any) -> tuple[float, ...]:
        found = verify._compare(file, model, images)
        return tuple(found[n] for n in ("same_top1", "same_top1_of_the_run_with_itself", "times_disturbed"))

    assert compared(model) == (300, itself[0], 1)
    assert compared(lambda batch: -model(batch)) == (0, sum(itself) / len(itself), 5)
