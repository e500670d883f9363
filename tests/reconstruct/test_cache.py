"""The activation cache gives back what was stored, wherever it had to be put."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fimaq.device import resident_bytes
from fimaq.reconstruct import cache as cache_module
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.memory import room_on_host

COUNT = 10


@pytest.fixture(params=["host memory", "disk"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "disk":
        monkeypatch.setattr(cache_module, "free_bytes", lambda device: 0)
    return request.param


@pytest.fixture
def cache(place: str, tmp_path: Path) -> Iterator[ActivationCache]:
    stored = ActivationCache(COUNT, torch.device("cpu"), tmp_path / "spill")
    yield stored
    stored.close()


def filled(cache: ActivationCache, name: str = "inputs") -> list[Tensor]:
    """Two tensors per image, written in three uneven batches."""
    torch.manual_seed(0)
    tensors = [torch.randn(COUNT, 3, 2), torch.randn(COUNT, 5)]
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        cache.write(name, start, [t[start:stop] for t in tensors])
    return tensors


def spilled(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_place_is_reported(cache: ActivationCache, place: str) -> None:
    filled(cache)
    assert cache.places == {"inputs": place}


def test_files_are_made_only_where_memory_does_not_do(cache: ActivationCache, place: str, tmp_path: Path) -> None:
    filled(cache)
    assert len(spilled(tmp_path)) == (2 if place == "disk" else 0)


def test_rows_come_back_as_written(cache: ActivationCache) -> None:
    tensors = filled(cache)
    assert all(torch.equal(r, t[3:9]) for r, t in zip(cache.rows("inputs", 3, 9), tensors, strict=True))


def test_what_is_read_is_a_copy(cache: ActivationCache) -> None:
    tensors = filled(cache)
    cache.rows("inputs", 0, 2)[0].zero_()
    assert torch.equal(cache.rows("inputs", 0, COUNT)[0], tensors[0])


def test_what_was_written_is_a_copy(cache: ActivationCache) -> None:
    given = torch.ones(COUNT, 4)
    cache.write("inputs", 0, [given])
    given.zero_()
    assert cache.rows("inputs", 0, COUNT)[0].eq(1).all()


def test_writing_again_replaces_those_rows_only(cache: ActivationCache) -> None:
    tensors = filled(cache)
    cache.write("inputs", 2, [torch.zeros(1, 3, 2), torch.zeros(1, 5)])
    first = cache.rows("inputs", 0, COUNT)[0]
    assert first[2].eq(0).all()
    assert torch.equal(first[[0, 1, *range(3, COUNT)]], tensors[0][[0, 1, *range(3, COUNT)]])


def test_the_type_of_what_is_written_is_kept(cache: ActivationCache) -> None:
    cache.write("codes", 0, [torch.arange(COUNT, dtype=torch.int16)[:, None]])
    (codes,) = cache.rows("codes", 0, COUNT)
    assert codes.dtype == torch.int16
    assert codes[:, 0].tolist() == list(range(COUNT))


def test_each_tensor_of_a_list_keeps_its_own_type(cache: ActivationCache) -> None:
    activations, mask = torch.randn(COUNT, 3), torch.rand(COUNT, 5) < 0.5
    cache.write("inputs", 0, [activations, mask])
    rows = cache.rows("inputs", 0, COUNT)
    assert [row.dtype for row in rows] == [torch.float32, torch.bool]
    assert all(torch.equal(row, given) for row, given in zip(rows, (activations, mask), strict=True))


def test_renaming_replaces_what_had_the_name(cache: ActivationCache, place: str, tmp_path: Path) -> None:
    cache.write("inputs", 0, [torch.zeros(COUNT, 7)])
    tensors = filled(cache, "next")
    cache.rename("next", "inputs")
    assert all(torch.equal(r, t) for r, t in zip(cache.rows("inputs", 0, COUNT), tensors, strict=True))
    assert cache.places == {"inputs": place}
    assert len(spilled(tmp_path)) == (2 if place == "disk" else 0)


def test_dropping_one_name_leaves_the_others(cache: ActivationCache, place: str, tmp_path: Path) -> None:
    tensors = filled(cache)
    filled(cache, "outputs")
    cache.drop("outputs")
    assert list(cache.places) == ["inputs"]
    assert torch.equal(cache.rows("inputs", 0, COUNT)[1], tensors[1])
    assert len(spilled(tmp_path)) == (2 if place == "disk" else 0)


def test_dropping_an_unknown_name_is_no_error(cache: ActivationCache) -> None:
    cache.drop("never written")
    assert cache.places == {}


def test_closing_removes_every_file(cache: ActivationCache, tmp_path: Path) -> None:
    filled(cache)
    filled(cache, "outputs")
    cache.close()
    assert spilled(tmp_path) == []
    assert cache.places == {}


def test_only_what_does_not_fit_goes_to_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_module, "free_bytes", lambda device: 4000)
    cache = ActivationCache(COUNT, torch.device("cpu"), tmp_path)
    cache.write("small", 0, [torch.zeros(COUNT, 10)])
    cache.write("large", 0, [torch.zeros(COUNT, 100)])
    assert cache.places == {"small": "host memory", "large": "disk"}
    cache.close()


def test_a_budget_bounds_what_is_held_in_memory(tmp_path: Path) -> None:
    each = COUNT * 10 * 4
    cache = ActivationCache(COUNT, torch.device("cpu"), tmp_path, budget=7 * each)
    for name in ("one", "two", "three"):
        cache.write(name, 0, [torch.zeros(COUNT, 10)])
    cache.drop("one")
    cache.write("four", 0, [torch.zeros(COUNT, 10)])
    assert cache.places == {"two": "host memory", "three": "disk", "four": "host memory"}
    cache.close()


def test_beside_a_gpu_the_host_holds_no_more_than_it_may() -> None:
    bounded = ActivationCache(COUNT, torch.device("cuda"), host_room=1024)
    assert bounded._fits("pinned host memory", 1024)
    assert not bounded._fits("pinned host memory", 1025)


def test_a_budget_for_the_host_is_for_the_whole_process() -> None:
    assert room_on_host(None, 10**9) is None
    assert room_on_host(3000, 500) == 1500  # a third stays free for what a range search looks at
    assert room_on_host(3000, 2500) == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell what a process takes")
def test_what_the_process_takes_is_seen() -> None:
    before = resident_bytes()
    held = torch.ones(2**26)
    assert resident_bytes() - before == pytest.approx(held.nbytes, rel=0.1)


def test_pinned_memory_counts_as_pytorch_takes_it() -> None:
    bounded = ActivationCache(COUNT, torch.device("cuda"), host_room=1500)
    assert bounded._fits("pinned host memory", 513)  # takes 1024
    assert not bounded._fits("pinned host memory", 1025)  # would take 2048


def test_room_for_the_first_images_alone(cache: ActivationCache) -> None:
    cache.write("few", 0, [torch.ones(3, 5)], count=3)
    assert [tensor.shape for tensor in cache.stored("few")] == [(3, 5)]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read a process's memory from")
def test_what_lies_on_disk_does_not_count_as_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_module, "free_bytes", lambda device: 0)
    cache, mebibyte = ActivationCache(64, torch.device("cpu"), tmp_path), 2**18
    before = file_pages()
    for start in range(64):
        cache.write("large", start, [torch.full((1, mebibyte), float(start))])
    assert all(cache.rows("large", start, start + 1)[0].eq(start).all() for start in range(64))
    assert file_pages() - before < 8 * 2**20
    cache.close()


def file_pages() -> int:
    """Bytes of mapped files that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))
