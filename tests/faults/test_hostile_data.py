"""Images and annotations from strangers: skipped with a reason, refused in one line, or read; never a surprise."""

import contextlib
import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import VALUES, bounds, changed, inputs, spoiled
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tally import Tally

from fimaq.data import Preprocessing, build_transform
from fimaq.data.coco import CocoSet
from fimaq.data.folder import CalibrationSet, load_calibration
from fimaq.data.image import load_image
from fimaq.errors import InputError

PREPROCESSING = Preprocessing((3, 32, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PIXELS = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)


def encoded(mode: str, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image = Image.fromarray(PIXELS)
    if mode == "I;16":
        image = Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257)
    elif mode != "RGB":
        image = image.convert(mode)
    image.save(stream, kind, **options)
    return stream.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded("RGB", "JPEG", exif=exif)


def animated(kind: str) -> bytes:
    frames = [Image.fromarray(np.roll(PIXELS, shift)) for shift in (7, 14)]
    return encoded("RGB", kind, save_all=True, append_images=frames)


GOOD: dict[str, bytes] = {
    "jpeg": encoded("RGB", "JPEG"),
    "jpeg progressive": encoded("RGB", "JPEG", progressive=True),
    "jpeg cmyk": encoded("CMYK", "JPEG"),
    "jpeg grey": encoded("L", "JPEG"),
    "jpeg rotated": rotated(),
    "png": encoded("RGB", "PNG"),
    "png palette": encoded("P", "PNG"),
    "png alpha": encoded("RGBA", "PNG"),
    "png 1 bit": encoded("1", "PNG"),
    "png 16 bit": encoded("I;16", "PNG"),
    "apng": animated("PNG"),
    "gif": animated("GIF"),
    "webp": encoded("RGB", "WEBP"),
    "webp animated": animated("WEBP"),
    "bmp": encoded("RGB", "BMP"),
    "tiff": encoded("RGB", "TIFF"),
    "tiff lzw": encoded("RGB", "TIFF", compression="tiff_lzw"),
    "tiff cmyk": encoded("CMYK", "TIFF"),
    "ppm": encoded("RGB", "PPM"),
    "pgm": encoded("L", "PPM"),
}


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def claimed_png(width: int, height: int, pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, content) for kind, content in chunks)


BOMBS: dict[str, bytes] = {
    "claims 60000 x 60000 pixels": claimed_png(60_000, 60_000, b"\0" * 100),
    "claims 2^31 - 1 pixels a side": claimed_png(2**31 - 1, 2**31 - 1, b""),
    "is one line of 80 million pixels": claimed_png(80_000_000, 1, b"\0" * 10_000_001),
    "is a column of a million pixels": claimed_png(1, 1_000_000, b"\0\0" * 1_000_000),
    "has no pixels": claimed_png(0, 0, b""),
    "bmp that claims 60000 x 60000": GOOD["bmp"][:18] + struct.pack("<ii", 60_000, 60_000) + GOOD["bmp"][26:],
    "ppm that claims 10^9 x 10^9": b"P6 1000000000 1000000000 255\n" + bytes(30),
    "is a program for a printer": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(x) (w) file\n",
    "is empty": b"",
    "is text": b"hello, world",
    "endless comment": GOOD["jpeg"][:2] + b"\xff\xfe\xff\xff" + b"x" * 10,
}


def calibrate(folder: Path, size: int = 1) -> CalibrationSet:
    return load_calibration(folder, size, build_transform(PREPROCESSING), seed=0)


def try_image(content: bytes, folder: Path) -> bool:
    """Whether the file can be used; if so, all that is made of it is a finite input of the right shape."""
    path = folder / "image.jpg"
    path.write_bytes(content)
    with bounds():
        try:
            found = calibrate(folder)
        except InputError:
            return False
    assert found.images.shape == (1, 3, 32, 32)
    assert found.images.isfinite().all()
    assert load_image(path).mode == "RGB"
    return True


@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_of_image_is_read(kind: str, tmp_path: Path, tally: Tally) -> None:
    tally.input()
    assert try_image(GOOD[kind], tmp_path)
    stored = load_image(tmp_path / "image.jpg")
    assert stored.size == (30, 20)
    if kind in ("png", "bmp", "tiff", "tiff lzw", "ppm", "apng"):
        tally.expect_right(np.array_equal(np.asarray(stored), PIXELS), f"pixels of {kind}")


@pytest.mark.parametrize("what", BOMBS)
def test_a_file_made_to_harm_is_skipped(what: str, tmp_path: Path, tally: Tally) -> None:
    tally.input()
    assert not try_image(BOMBS[what], tmp_path)


@inputs(80)
@given(data=st.data())
def test_any_bytes_are_read_or_skipped(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, tally: Tally
) -> None:
    kind = data.draw(st.sampled_from(sorted(GOOD)))
    tally.input()
    try_image(data.draw(spoiled(GOOD[kind])), tmp_path_factory.mktemp("image"))


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "dangling link", "link to itself", "sparse"])
def test_what_is_no_file_is_skipped(what: str, tmp_path: Path, tally: Tally) -> None:
    path = tmp_path / "image.jpg"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
        (path / "more.jpg").write_bytes(b"")
    elif what == "sparse":
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.symlink_to(path if what == "link to itself" else tmp_path / "absent")
    tally.input()
    with bounds(), pytest.raises(InputError):
        calibrate(tmp_path)


@pytest.fixture(scope="session")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coco")
    (folder / "images").mkdir()
    for number in (7, 8):
        (folder / "images" / f"{number}.png").write_bytes(GOOD["png"])
    return folder


COUNTS = [0, 20, 580]
GOOD_COCO: dict[str, Any] = {
    "images": [{"id": n, "file_name": f"{n}.png", "width": 30, "height": 20} for n in (7, 8)],
    "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0,
         "segmentation": [[1, 2, 4, 2, 4, 6, 1, 6]]},
        {"id": 2, "image_id": 7, "category_id": 5, "bbox": [0, 0, 1, 20], "area": 20, "iscrowd": 1,
         "segmentation": {"size": [20, 30], "counts": COUNTS}},
    ],
}  # fmt: skip


@inputs(80)
@given(data=st.data())
def test_any_annotations_are_read_or_refused(data: st.DataObject, coco: Path, tally: Tally) -> None:
    """What is accepted can be drawn: masks are of their image's size."""
    text = json.dumps(data.draw(changed(GOOD_COCO) | VALUES))
    file = coco / "instances.json"
    file.write_bytes(data.draw(st.just(text.encode()) | spoiled(text.encode())))
    tally.input()
    with bounds(), contextlib.suppress(InputError):
        found = CocoSet.open(file, coco / "images")
        for annotations in found.annotations.values():
            for annotation in annotations:
                image = found.images[annotation.image_id]
                assert found.mask(annotation).shape == (image.height, image.width)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"images":' * 5000,
        '{"images": [{"id": ' + "9" * 5000 + "}]}",
        "\ufeff{}",
        '{"a": NaN}',
        "\0",
    ],
    ids=lambda text: text[:12],
)
def test_annotations_made_to_harm_are_refused(text: str, coco: Path, tally: Tally) -> None:
    (coco / "instances.json").write_text(text)
    tally.input()
    with bounds(), pytest.raises(InputError, match=r"instances\.json"):
        CocoSet.open(coco / "instances.json", coco / "images")


@pytest.mark.parametrize("name", ["../../../dev/zero", "/dev/zero", "pipe.png", "a\0b", "x" * 5000])
def test_an_annotated_image_that_is_no_file_is_refused(name: str, coco: Path, tally: Tally) -> None:
    if not (coco / "images" / "pipe.png").exists():
        os.mkfifo(coco / "images" / "pipe.png")
    spoilt = json.loads(json.dumps(GOOD_COCO))
    spoilt["images"][0]["file_name"] = name
    (coco / "instances.json").write_text(json.dumps(spoilt))
    tally.input()
    with bounds(), pytest.raises(InputError, match="image 7"):
        CocoSet.open(coco / "instances.json", coco / "images")
