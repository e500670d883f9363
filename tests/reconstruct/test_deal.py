"""A batch is dealt out to ranks: everyone has as many rows as its part, and as few as possible are sent."""

import pytest
import torch

from fimaq.ranks import Ranks
from fimaq.reconstruct.deal import workers


@pytest.mark.parametrize(("batch", "size"), [(32, 2), (32, 3), (5, 5), (7, 3), (32, 8)])
def test_every_rank_works_on_its_part_of_any_batch(batch: int, size: int) -> None:
    for seed in range(50):
        images = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[:batch].tolist()
        dealt = workers(images, size)
        assert [dealt.count(rank) for rank in range(size)] == [
            len(range(rank, batch, size)) for rank in range(size)
        ]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_only_what_is_too_much_for_its_rank_is_sent(size: int) -> None:
    images = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:32].tolist()
    sent = sum(rank != image % size for rank, image in zip(workers(images, size), images, strict=True))
    living = [sum(image % size == rank for image in images) for rank in range(size)]
    assert sent == sum(max(0, living[rank] - len(range(rank, 32, size))) for rank in range(size))


def test_of_the_first_images_each_rank_has_its_share() -> None:
    for count in range(1, 20):
        for size in range(1, 6):
            ranks = []
            for rank in range(size):
                one = Ranks()
                one.rank, one.size = rank, size
                ranks.append(one)
            assert sum(one.share(count) for one in ranks) == count
            assert max(one.share(count) for one in ranks) - min(one.share(count) for one in ranks) <= 1
