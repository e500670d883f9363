import warnings

import numpy as np
import pytest
from PIL import Image

from fimaq.data import UnreadableImage, load_image


@pytest.mark.parametrize(
    ("mode", "colour", "suffix", "expected"),
    [
        ("L", 100, "png", (100, 100, 100)),
        ("1", 1, "png", (255, 255, 255)),
        ("LA", (100, 10), "png", (100, 100, 100)),
        ("RGBA", (10, 20, 30, 128), "png", (10, 20, 30)),
        ("CMYK", (0, 255, 255, 0), "tif", (255, 0, 0)),
        ("CMYK", (0, 255, 255, 0), "jpg", (255, 0, 0)),
        ("I;16", 200 * 256 + 7, "png", (200, 200, 200)),
        ("I;16", 200 * 256 + 7, "tif", (200, 200, 200)),
        ("I", 200 * 256 + 7, "pgm", (200, 200, 200)),
    ],
)
def test_every_pixel_format_becomes_8_bit_rgb(tmp_path, mode, colour, suffix, expected):
    path = tmp_path / f"image.{suffix}"
    Image.new(mode, (8, 8), colour).save(path)
    image = load_image(path)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    assert np.abs(np.asarray(image).astype(int) - expected).max() <= (2 if suffix == "jpg" else 0)


def test_a_palette_with_transparency_keeps_its_colours(tmp_path):
    path = tmp_path / "palette.png"
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.save(path, transparency=bytes([0, 128]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_image(path).getpixel((0, 0)) == (10, 200, 30)


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
def test_a_broken_file_is_one_kind_of_error_that_names_it(broken_jpegs, kind):
    with pytest.raises(UnreadableImage, match=f"{kind}.jpg") as caught:
        load_image(broken_jpegs[kind])
    assert caught.value.path == broken_jpegs[kind]
    assert caught.value.reason


def test_a_missing_file_is_unreadable(tmp_path):
    with pytest.raises(UnreadableImage, match="No such file"):
        load_image(tmp_path / "gone.jpg")


def test_a_png_with_a_damaged_chunk_is_unreadable(tmp_path):
    path = tmp_path / "damaged.png"
    Image.new("RGB", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[45] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UnreadableImage):
        load_image(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [20, 60], ids=["pillow refuses", "pillow warns"])
def test_a_decompression_bomb_is_unreadable(tmp_path, monkeypatch, limit):
    path = tmp_path / "bomb.png"
    Image.new("L", (8, 8)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(UnreadableImage, match="limit of"):
        load_image(path)


def test_float_pixels_are_refused_rather_than_clipped(tmp_path):
    path = tmp_path / "float.tif"
    Image.new("F", (8, 8), 0.5).save(path)
    with pytest.raises(UnreadableImage, match="float pixels"):
        load_image(path)
