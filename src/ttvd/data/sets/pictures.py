"""Single pictures: decoding, and the preparation behind published accuracies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]


class Preparation(NamedTuple):
    """How a picture becomes the square that a model was evaluated on.

    Attributes:
        resize: Length of the shorter side before cropping; None for no resizing.
        crop: Side of the square cut from the centre; None for no cropping.
        interpolation: Of the resizing.

    Example:
        >>> Preparation.from_timm({"input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic"})
        Preparation(resize=248, crop=224, interpolation='bicubic')
    """

    resize: int | None = 256
    crop: int | None = 224
    interpolation: Interpolation = "bilinear"

    @classmethod
    def from_timm(cls, config: Mapping[str, Any]) -> Preparation:
        """The preparation that timm states for a model.

        Args:
            config: What `timm.data.resolve_model_data_config(model)` returns. Its mean and std belong into the model,
                as a `ttvd.nn.normalize.Normalize` before it.
        """
        _, height, width = config["input_size"]
        mode = config.get("crop_mode", "center")
        interpolation = config.get("interpolation", "bilinear")
        if height != width or mode != "center" or interpolation not in get_args(Interpolation):
            raise ValueError(
                "only a centred square with bilinear or bicubic resizing can be prepared, this model wants "
                f"{height} x {width}, crop mode {mode!r}, {interpolation}"
            )
        return cls(math.floor(height / config.get("crop_pct", 0.875)), height, interpolation)


def require_pillow(purpose: str) -> None:
    """Raise, with what to install, unless Pillow is there."""
    if find_spec("PIL") is None:
        raise ModuleNotFoundError(f"{purpose} needs Pillow: pip install 'ttvd[images]'")


def read_image(
    path: str | Path,
    resize: int | None = 256,
    crop: int | None = 224,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Decode a picture into a float32 (3, h, w) tensor in [0, 1].

    The shorter side is resized, then the centre is cut out: the preparation behind published accuracies.

    Raises:
        OSError: There is no such file.
        ValueError: The file is truncated or no picture, or the picture is smaller than the crop.
    """
    return read_pixels(path, resize, crop, interpolation).float().div_(255)


def read_pixels(
    path: str | Path,
    resize: int | None = 256,
    crop: int | None = 224,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Decode a picture into bytes (3, h, w), as :func:`read_image` does into floats."""
    require_pillow("reading pictures")
    from PIL import Image

    with open(path, "rb") as file:
        try:
            with Image.open(file) as picture:
                pixels = _prepare(picture.convert("RGB"), Preparation(resize, crop, interpolation))
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


def _prepare(picture: Any, how: Preparation) -> Any:
    from PIL import Image

    crop = how.crop
    width, height = _fit(picture.size, how.resize)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), Image.Resampling[how.interpolation.upper()])
    if crop is not None and (width, height) != (crop, crop):
        if min(width, height) < crop:
            raise ValueError(f"it has {width} x {height} pixels, too few for a crop of {crop}; resize first")
        left, top = round((width - crop) / 2), round((height - crop) / 2)
        picture = picture.crop((left, top, left + crop, top + crop))
    return np.array(picture)
