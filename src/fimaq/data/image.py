"""Reading one image file into 8-bit RGB, whatever it was stored as."""

from contextlib import nullcontext
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, UnidentifiedImageError

from fimaq.errors import FimaqError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "TIFF", "PPM", "GIF")
"""What a file may be, whatever its name. Pillow knows others, some of which it hands to other programs (EPS)."""
MOST_BYTES = 2**30
"""A larger file is not read: it would have to fit into memory."""


class UnreadableImage(FimaqError):  # noqa: N818 (a condition that callers count and skip, seldom an error)
    """A file that cannot be used as an image; `path` is the file and `reason` says why, without the path."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def load_image(path: Path, stream: IO[bytes] | None = None) -> Image.Image:
    """The image at `path` as PIL RGB, 8 bits per channel; from `stream` where its bytes are already at hand.

    Alpha is dropped, 16-bit grey keeps its upper 8 bits, of several frames the first is taken, and EXIF
    rotation is ignored, as ImageNet evaluations do. Anything undecodable raises UnreadableImage.
    """
    try:
        source = open_file(path) if stream is None else nullcontext(stream)
        with source as opened, Image.open(opened, formats=FORMATS) as image:
            _refuse_bomb(image)
            return _to_rgb(image)
    except MemoryError:
        raise
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(path, "not an image in a known format") from None
    # Pillow's decoders raise OSError, SyntaxError, ValueError, EOFError, struct.error and more for broken
    # files; there is no common class, and one bad file must not end a run.
    except Exception as error:
        raise UnreadableImage(path, str(error) or type(error).__name__) from None


def open_file(path: Path) -> IO[bytes]:
    """An image's bytes. What is no file, such as a pipe, which may never end, is not opened."""
    if path.exists() and not path.is_file():
        raise UnreadableImage(path, "not a file")
    if path.exists() and path.stat().st_size > MOST_BYTES:
        raise UnreadableImage(path, f"more than {MOST_BYTES} bytes")
    return path.open("rb")


def _refuse_bomb(image: Image.Image) -> None:
    """Pillow refuses above twice MAX_IMAGE_PIXELS and only warns above once; here both are refused.

    Turning its warning into an error needs `warnings.catch_warnings`, which is not safe in decoding threads.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise ValueError(f"{image.width}x{image.height} pixels are more than Pillow's safe limit of {limit}")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("float pixels have no fixed range; store the image with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        # convert("RGB") would clip every value above 255 to white; Pillow opens 16-bit files in these modes.
        pixels = np.clip(np.asarray(image).astype(np.int32), 0, 65535)
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")
