"""Decode one image file: which formats and kinds of pixels are read, and how large a picture may be.

Pillow decodes. This module decides what it is asked to decode, because Pillow also opens formats that start other
programs, and returns some kinds of pixels on a wrong scale without a word. A picture comes out right, or is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read, by Pillow's names. The content of a file decides, not its suffix."""
MAX_PIXELS = 1 << 26
"""Default limit on the pixels of an image: 67 million, such as 8,192 x 8,192."""
_MAX_PIXEL_BYTES = 16
"""Most bytes that a file needs for a pixel: four channels of floats."""
_MAX_HEADER_BYTES = 1 << 24
_OPTION = "(max_pixels, or --max-pixels)"
_ORIENTATION, _UPRIGHT = 0x0112, 1
_TRANSPOSITIONS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What brings an image upright, for each orientation of EXIF that is not upright."""
# Tags of TIFF
_BITS, _PHOTOMETRIC, _PLANES, _SAMPLE_FORMAT, _TILE_WIDTH, _TILE_LENGTH = 258, 262, 284, 339, 322, 323


def require_pillow(purpose: str) -> None:
    """Raise an error that says what to install, unless Pillow is installed."""
    if find_spec("PIL") is None:
        raise ModuleNotFoundError(f"{purpose} needs Pillow: pip install 'ttvd[images]'")


@contextmanager
def open_picture(path: str | Path, max_pixels: int = MAX_PIXELS) -> Iterator[Any]:
    """Open an image file and check its header; Pillow decodes it when its pixels are asked for.

    Every exception inside the context becomes a ValueError that names the file and the reason. A damaged file can
    make Pillow raise exceptions of any type.

    Args:
        path: The file. One that is not regular, such as a pipe, is never opened.
        max_pixels: Limit on the width times the height. The size of the file is limited too, to 16 bytes for each
            pixel that is allowed, because some formats are read as a whole.

    Raises:
        OSError: The file does not exist or cannot be opened.
        ValueError: The file cannot be used as a picture.
    """
    require_pillow("reading images")
    if problem := _find_problem(os.stat(path), max_pixels):
        raise ValueError(f"{path} cannot be used as a picture: {problem}")
    with open(path, "rb") as file:
        try:
            with _open(file) as image:
                width, height = image.size
                check_pixels(width, height, max_pixels)
                if image.format == "TIFF" and _TILE_WIDTH in image.tag_v2:
                    check_pixels(image.tag_v2[_TILE_WIDTH], image.tag_v2[_TILE_LENGTH], max_pixels, "a tile")
                yield image
        except Exception as error:
            raise ValueError(f"{path} cannot be used as a picture: {_explain(error)}") from error


def _find_problem(status: os.stat_result, max_pixels: int) -> str:
    """Say what is wrong with a file that is not opened yet."""
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        return "it is not a regular file"
    if status.st_size == 0:
        return "it is empty"
    if status.st_size > max_pixels * _MAX_PIXEL_BYTES + _MAX_HEADER_BYTES:
        return f"it has {status.st_size:,} bytes, more than {max_pixels:,} pixels can need {_OPTION}"
    return ""


def check_pixels(width: int, height: int, max_pixels: int, what: str = "it") -> None:
    """Raise a ValueError unless an image has pixels, and no more than the limit."""
    if width < 1 or height < 1:
        raise ValueError(f"{what} has {width} x {height} pixels")
    if width * height > max_pixels:
        raise ValueError(
            f"{what} has {width:,} x {height:,} pixels, more than the limit of {max_pixels:,} {_OPTION}"
        )


def decode(image: Any, *, apply_orientation: bool) -> Any:
    """Decode an open picture into a Pillow image: "RGB" for 8 bits a channel, "F" in [0, 1] for gray with more bits.

    Args:
        image: Picture from :func:`open_picture`. The first frame of several is taken.
        apply_orientation: Turn the image upright as its EXIF data say. Data that cannot be parsed count as upright.
            The orientation of a TIFF is part of the format and always applied.
    """
    from PIL import Image

    scale = _find_scale(image)
    image.load()
    name = _TRANSPOSITIONS.get(_read_orientation(image)) if apply_orientation else None
    decoded = _convert(image, scale)
    return decoded if name is None else decoded.transpose(Image.Transpose[name])


def is_turned(image: Any) -> bool:
    """Whether the EXIF orientation of an open picture exchanges its width and its height."""
    return _read_orientation(image) in (5, 6, 7, 8)


def _open(file: BinaryIO) -> Any:
    """Open a file by the first bytes that it holds.

    `Image.open` would compare the size with a limit of its own, for which it prints a warning, and would hide the
    reason why a file of a known format cannot be read.
    """
    from PIL import Image

    if any(name not in Image.OPEN for name in FORMATS):
        Image.init()
    start = file.read(16)
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is None or accept(start) is not True:
            continue
        file.seek(0)
        try:
            return factory(file, "")
        except Exception as error:
            raise ValueError(f"Pillow cannot read this {name}: {_explain(error)}") from error
    raise ValueError(f"its content has none of the formats {', '.join(FORMATS)}")


def _convert(image: Any, scale: int) -> Any:
    from PIL import Image

    if scale == 255:
        image.info.pop("transparency", None)  # it is dropped, and Pillow would warn of some kinds
        return image if image.mode == "RGB" else image.convert("RGB")
    values = np.asarray(image).astype(np.float32)
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= scale:  # a NaN fails every comparison
        raise ValueError(f"its values go from {low:g} to {high:g}, expected floats in [0, 1]")
    if scale == 1:
        return image
    values /= np.float32(scale)
    return Image.fromarray(values)


def _find_scale(image: Any) -> int:
    """Return the value of white, or refuse pixels whose scale is unknown or that Pillow reads wrongly."""
    bits = _check_tiff(image) if image.format == "TIFF" else 16
    if image.mode == "F":
        return 1
    # Pillow gives gray PNG of 16 bits as "I" before version 11, and PGM, whose values it scales, as "I" always.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return int((1 << bits) - 1)
    if image.mode == "I":
        raise ValueError(
            "its pixels are integers of 32 bits, whose white is unknown; save it with 8 or 16 bits, or as floats in "
            "[0, 1]"
        )
    return 255


def _check_tiff(image: Any) -> int:
    """Refuse kinds of pixels that Pillow reads on a wrong scale; return the number of bits of a value."""
    tags = image.tag_v2
    bits = tags.get(_BITS, (1,))
    if 2 in tags.get(_SAMPLE_FORMAT, (1,)):
        raise ValueError("its pixels are signed integers, whose scale is unknown; save it as unsigned ones")
    if max(bits) > 8 and tags.get(_PHOTOMETRIC) == 0:
        raise ValueError("white is stored as 0, which is not supported with more than 8 bits")
    if max(bits) > 8 and len(bits) > 1 and tags.get(_PLANES, 1) == 2:
        raise ValueError(
            "its channels have more than 8 bits and lie in separate planes; save them interleaved"
        )
    return int(max(bits))


def _read_orientation(image: Any) -> int:
    if image.format == "TIFF":  # Pillow turns it while it decodes
        return _UPRIGHT
    try:
        found = image.getexif().get(_ORIENTATION)
    except Exception:  # damaged EXIF data, which Pillow answers by exceptions of any type
        return _UPRIGHT
    return found if isinstance(found, int) else _UPRIGHT


def _explain(error: Exception) -> str:
    reason = str(error)
    if reason and isinstance(error, OSError | SyntaxError | ValueError):
        return reason
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
