"""Single pictures: decoding, and the preparation behind published accuracies."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def require_pillow(purpose: str) -> None:
    """Raise, with what to install, unless Pillow is there."""
    if find_spec("PIL") is None:
        raise ModuleNotFoundError(f"{purpose} needs Pillow: pip install 'ttvd[images]'")


def read_image(path: str | Path, resize: int | None = 256, crop: int | None = 224) -> Tensor:
    """Decode a picture into a float32 (3, h, w) tensor in [0, 1].

    The shorter side is resized bilinearly, then the centre is cut out: the preparation behind published accuracies.

    Raises:
        OSError: There is no such file.
        ValueError: The file is truncated or no picture, or the picture is smaller than the crop.
    """
    return read_pixels(path, resize, crop).float().div_(255)


def read_pixels(path: str | Path, resize: int | None = 256, crop: int | None = 224) -> Tensor:
    """Decode a picture into bytes (3, h, w), as :func:`read_image` does into floats."""
    require_pillow("reading pictures")
    from PIL import Image

    with open(path, "rb") as file:
        try:
            with Image.open(file) as picture:
                pixels = _prepare(picture.convert("RGB"), resize, crop)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be used as a picture: {error}") from error
    # By numpy: threads that decode would each start torch's threads for an image of this size.
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def read_size(path: str | Path, resize: int | None = None) -> tuple[int, int]:
    """Return width and height of a picture after resizing; only its header is read."""
    require_pillow("reading pictures")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return _fit(picture.size, resize)
    except (UnidentifiedImageError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be used as a picture: {error}") from error


def _fit(size: tuple[int, int], resize: int | None) -> tuple[int, int]:
    width, height = size
    short = min(size)
    return size if resize in (None, short) else (resize * width // short, resize * height // short)


def _prepare(picture: Any, resize: int | None, crop: int | None) -> Any:
    from PIL import Image

    width, height = _fit(picture.size, resize)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    if crop is not None and (width, height) != (crop, crop):
        if min(width, height) < crop:
            raise ValueError(f"it has {width} x {height} pixels, too few for a crop of {crop}; resize first")
        left, top = round((width - crop) / 2), round((height - crop) / 2)
        picture = picture.crop((left, top, left + crop, top + crop))
    return np.array(picture)
