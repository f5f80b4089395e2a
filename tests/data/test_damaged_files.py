"""Damaged image files and arrays: each is read to floats in [0, 1] or refused by the one error that names it."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.helpers.damage import count_cases, damage
from tests.helpers.data import random_pixels
from ttvd.data.loading import read_image
from ttvd.deploy.inputs import iterate_batches, open_inputs

CASES = count_cases(40)
"""Number of damaged versions of each file."""
PIXELS = random_pixels((16, 12), 0)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def make_pictures() -> dict[str, bytes]:
    colours = Image.fromarray(PIXELS)
    exif = Image.Exif()
    exif[0x0112] = 6
    several = {"save_all": True, "append_images": [colours.rotate(180)]}
    return {
        "PNG": encode(colours, "PNG", exif=exif),
        "PNG, 16 bits": encode(Image.fromarray(PIXELS[..., 0] * np.uint16(257)), "PNG"),
        "PNG, palette": encode(colours.quantize(16), "PNG", transparency=0),
        "PNG, animated": encode(colours, "PNG", **several),
        "JPEG": encode(colours, "JPEG", exif=exif),
        "JPEG, inks": encode(colours.convert("CMYK"), "JPEG", progressive=True),
        "TIFF": encode(colours, "TIFF"),
        "TIFF, compressed": encode(colours, "TIFF", compression="tiff_lzw"),
        "TIFF, floats": encode(Image.fromarray((PIXELS[..., 0] / 255).astype(np.float32)), "TIFF"),
        "GIF": encode(colours, "GIF", **several),
        "BMP": encode(colours, "BMP"),
        "WebP": encode(colours, "WEBP", exif=exif),
        "PPM": encode(colours, "PPM"),
    }


def make_arrays() -> dict[str, bytes]:
    def save(array: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    return {
        "bytes": save(PIXELS[None]),
        "floats": save((PIXELS[None] / 255).astype(np.float32)),
        "big-endian, Fortran": save(np.asfortranarray(PIXELS[None] / 255).astype(">f8")),
    }


def assert_picture(images: Tensor) -> None:
    assert images.dtype == torch.float32
    assert bool(((images >= 0) & (images <= 1)).all())


@pytest.mark.filterwarnings("ignore")  # Pillow warns of damage that it can live with
@pytest.mark.parametrize("kind", make_pictures())
def test_damaged_pictures(kind: str, tmp_path: Path) -> None:
    data, rng, path = make_pictures()[kind], random.Random(kind), tmp_path / "a.png"
    path.write_bytes(data)
    assert_picture(read_image(path, None, None))
    refused = 0
    for _ in range(CASES):
        path.write_bytes(damage(data, rng))
        try:
            image = read_image(path, 8, 8, apply_orientation=True, max_pixels=1 << 20)
        except ValueError as error:
            refused += str(error).startswith(f"{path} cannot be used as a picture: ") or pytest.fail(
                str(error)
            )
        else:
            assert image.shape == (3, 8, 8)
            assert_picture(image)
    assert refused > CASES // 8


@pytest.mark.parametrize("kind", make_arrays())
def test_damaged_arrays(kind: str, tmp_path: Path) -> None:
    data, rng, path = make_arrays()[kind], random.Random(kind), tmp_path / "a.npy"
    refused = 0
    for _ in range(2 * CASES):
        path.write_bytes(damage(data, rng))
        try:
            batches = list(iterate_batches(open_inputs(path, max_pixels=1 << 20), 1))
        except ValueError as error:
            refused += any(word in str(error) for word in (str(path), "expected floats")) or pytest.fail(
                str(error)
            )
        else:
            assert_picture(torch.cat([batch.images for batch in batches if batch.images is not None]))
    assert refused > CASES
