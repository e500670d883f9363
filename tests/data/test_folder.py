import errno
import os
import shutil

import pytest
import torch
from PIL import Image

from fimaq.data import (
    UnreadableImage,
    ValidationSet,
    list_images,
    load_calibration,
    load_share,
    validation_batches,
)
from fimaq.errors import InputError
from fimaq.ranks import ALONE


def grey_values(images: torch.Tensor) -> list[int]:
    """(n, 3, H, W) of flat grey images -> their grey values."""
    return (images[:, 0, 0, 0] * 255).round().int().tolist()


def test_images_are_listed_recursively_in_the_order_of_their_relative_paths(tmp_path):
    names = ["b.JPG", "a/z.jpeg", "a/deep/y.Png", "a.webp", "notes.txt", "a/._z.jpeg", ".cache/x.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed = [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)]
    assert listed == ["a.webp", "a/deep/y.Png", "a/z.jpeg", "b.JPG"]


def test_linked_folders_are_followed_and_loops_end(tmp_path, make_images):
    make_images(tmp_path / "elsewhere", 2)
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder)
    assert [path.name for path in list_images(folder)] == ["00.png", "01.png"]


def test_folders_without_images_are_errors_that_name_the_path_and_the_suffixes(tmp_path):
    file = tmp_path / "file.jpg"
    file.touch()
    (tmp_path / "hollow").mkdir()
    for path in (tmp_path / "missing", file, tmp_path / "hollow"):
        with pytest.raises(InputError, match=rf"{path.name}.*\.jpg.*\.png"):
            list_images(path)


def test_the_same_seed_draws_the_same_images(tmp_path, make_images, transform):
    make_images(tmp_path, 20)
    first, again, other = (load_calibration(tmp_path, 8, transform, seed=seed) for seed in (3, 3, 4))
    assert first.paths == again.paths
    assert torch.equal(first.images, again.images)
    assert first.paths != other.paths
    assert first.images.shape == (8, 3, 16, 16)
    assert first.images.dtype == torch.float32


def test_calibration_images_are_in_the_order_of_their_paths(tmp_path, make_images, transform):
    make_images(tmp_path, 20)
    drawn = load_calibration(tmp_path, 20, transform, seed=0)
    assert grey_values(drawn.images) == [int(path.stem) for path in drawn.paths]
    assert len(set(drawn.paths)) == 20


def test_unreadable_images_are_replaced_and_reported(tmp_path, make_images, transform, broken_jpegs):
    make_images(tmp_path, 5)
    drawn = load_calibration(tmp_path, 5, transform, seed=0)
    assert sorted(grey_values(drawn.images)) == [0, 1, 2, 3, 4]
    assert {path for path, _ in drawn.skipped} <= set(broken_jpegs.values())


def test_too_few_readable_images_are_counted_and_named(tmp_path, make_images, transform, broken_jpegs):
    make_images(tmp_path, 5)
    with pytest.raises(
        InputError, match=r"6 calibration.*holds 8, of which 3 cannot be read.*empty\.jpg"
    ) as caught:
        load_calibration(tmp_path, 6, transform, seed=0)
    assert "at most 5" in str(caught.value)


@pytest.mark.parametrize("size", [6, 100])
def test_fewer_images_are_taken_where_that_is_accepted(tmp_path, make_images, transform, broken_jpegs, size):
    with pytest.raises(InputError, match=r"holds 3, of which 3 cannot be read"):
        load_calibration(tmp_path, size, transform, seed=0, fewer=True)
    make_images(tmp_path, 5)
    drawn = load_calibration(tmp_path, size, transform, seed=0, fewer=True)
    assert sorted(grey_values(drawn.images)) == [0, 1, 2, 3, 4]
    assert len(drawn.skipped) == 3


def test_too_few_files_are_noticed_before_decoding(tmp_path, make_images):
    make_images(tmp_path, 2)

    def never(image: Image.Image) -> torch.Tensor:
        raise AssertionError("decoded an image")

    with pytest.raises(InputError, match=r"3 calibration images were asked for, but .* holds 2"):
        load_calibration(tmp_path, 3, never, seed=0)


def test_the_fingerprint_follows_names_and_contents_but_not_the_place(tmp_path, make_images, transform):
    def fingerprint(folder):
        return load_calibration(folder, 4, transform, seed=0).fingerprint

    make_images(tmp_path / "one", 4)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    original = fingerprint(tmp_path / "one")
    assert len(original) == 64
    assert fingerprint(tmp_path / "copy") == original
    Image.new("RGB", (16, 16), (9, 9, 9)).save(tmp_path / "copy" / "00.png")
    assert fingerprint(tmp_path / "copy") != original
    (tmp_path / "one" / "00.png").rename(tmp_path / "one" / "000.png")
    assert fingerprint(tmp_path / "one") != original


def test_names_that_are_not_utf_8_are_part_of_the_fingerprint(tmp_path, make_images, transform):
    make_images(tmp_path, 4)
    before = load_calibration(tmp_path, 4, transform, seed=0).fingerprint
    (tmp_path / "00.png").rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png"))
    after = [load_calibration(tmp_path, 4, transform, 0), load_share(tmp_path, 4, transform, 0, ALONE)]
    assert after[0].fingerprint == after[1].fingerprint != before


def test_a_folder_that_may_not_be_read_is_an_error_that_names_it(tmp_path, make_images, monkeypatch):
    make_images(tmp_path, 2)
    make_images(tmp_path / "closed", 2)
    scandir = os.scandir

    def guarded(path):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(InputError, match=r"closed cannot be read: Permission denied"):
        list_images(tmp_path)


def test_progress_counts_up_to_the_size(tmp_path, make_images, transform):
    make_images(tmp_path, 4)
    seen: list[tuple[int, int]] = []
    load_calibration(tmp_path, 3, transform, seed=0, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_limit_takes_the_same_share_of_every_class(tmp_path, make_images, transform):
    samples = [(path, index // 4) for index, path in enumerate(make_images(tmp_path, 12))]
    limited = ValidationSet(samples, transform, limit=6)
    assert [path.stem for path, _ in limited.samples] == ["00", "02", "04", "06", "08", "10"]
    assert [limited[i][1] for i in range(len(limited))] == [0, 0, 1, 1, 2, 2]
    assert len(ValidationSet(samples, transform, limit=100)) == 12


def test_batches_hold_every_readable_image_once_in_order(tmp_path, make_images, transform):
    dataset = ValidationSet([(path, int(path.stem)) for path in make_images(tmp_path, 11)], transform)
    for workers in (1, 3):
        batches = list(validation_batches(dataset, batch_size=4, workers=workers))
        assert [len(batch.targets) for batch in batches] == [4, 4, 3]
        assert torch.cat([batch.targets for batch in batches]).tolist() == list(range(11))
        assert grey_values(torch.cat([batch.images for batch in batches])) == list(range(11))


def test_unreadable_validation_images_are_skipped_and_counted(tmp_path, make_images, transform, broken_jpegs):
    good, bad = make_images(tmp_path, 4), list(broken_jpegs.values())
    order = [bad[0], good[0], good[1], bad[1], good[2], good[3], bad[2]]
    dataset = ValidationSet([(path, index) for index, path in enumerate(order)], transform)
    batches = list(validation_batches(dataset, batch_size=2, workers=2))
    assert [batch.targets.tolist() for batch in batches] == [[1, 2], [4, 5]]
    assert sum(batch.unreadable for batch in batches) == 3
    with pytest.raises(UnreadableImage):
        dataset[0]


def test_a_validation_set_without_a_readable_image_is_an_error(transform, broken_jpegs):
    dataset = ValidationSet([(path, 0) for path in broken_jpegs.values()], transform)
    with pytest.raises(InputError, match="none of the 3 validation images"):
        list(validation_batches(dataset, batch_size=2, workers=1))
