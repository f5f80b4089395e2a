"""Image files of every kind of pixels: right, or refused with the reason."""

import contextlib
import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from tests.helpers.data import random_pixels
from ttvd.data.loading import load_batches, prefetch, read_image, read_pixels
from ttvd.data.sets import ImageFolder

tifffile = pytest.importorskip("tifffile")

GRAY = np.random.default_rng(0).integers(0, 65536, (6, 9), np.uint16)
COLOURS = np.random.default_rng(1).integers(0, 65536, (6, 9, 3), np.uint16)
Array = npt.NDArray[Any]


def read(path: Path, **options: Any) -> Array:
    """All pixels of a file as floats (h, w, 3)."""
    return read_image(path, None, None, **options).permute(1, 2, 0).numpy()


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_png(path: Path, colours: Array) -> None:
    """Write a PNG with 16 bits a channel, which Pillow cannot write."""
    height, width, _ = colours.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(make_chunk(*chunk) for chunk in chunks))


def make_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def set_tags(path: Path, **tags: int) -> None:
    """Change tags of a TIFF, or what follows their numbers in its directory."""
    data = bytearray(path.read_bytes())
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        (number,) = struct.unpack_from("<H", data, entry)
        if (name := f"tag{number}") in tags:
            struct.pack_into("<HII", data, entry + 2, 4, 1, tags.pop(name))
    assert not tags
    path.write_bytes(data)


GRAY_WRITERS: dict[str, Callable[[Path], Any]] = {
    "png": lambda path: Image.fromarray(GRAY).save(path, "PNG"),
    "tiff": lambda path: tifffile.imwrite(path, GRAY, photometric="minisblack"),
    "tiff, big-endian": lambda path: tifffile.imwrite(path, GRAY.astype(">u2"), byteorder=">"),
    "tiff, compressed": lambda path: tifffile.imwrite(path, GRAY, compression="zlib"),
    "tiff, tiles": lambda path: tifffile.imwrite(path, GRAY, tile=(16, 16)),
    "pgm": lambda path: path.write_bytes(b"P5 9 6 65535\n" + GRAY.astype(">u2").tobytes()),
}


@pytest.mark.parametrize("kind", GRAY_WRITERS)
def test_gray_with_16_bits_keeps_them(kind: str, tmp_path: Path) -> None:
    GRAY_WRITERS[kind](tmp_path / "a.png")
    expected = GRAY.astype(np.float32) / np.float32(65535)
    assert np.array_equal(read(tmp_path / "a.png"), np.repeat(expected[..., None], 3, axis=2))


def test_gray_with_12_bits_is_scaled_by_12_bits(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.array([[0x80, 0x0F, 0xFF]], np.uint8))  # 0x800 and 0xFFF
    set_tags(tmp_path / "a.tif", tag256=2, tag258=12)
    assert read(tmp_path / "a.tif")[0, :, 0].tolist() == pytest.approx([2048 / 4095, 1])


@pytest.mark.parametrize("order", ["<", ">"])
def test_floats_are_taken_as_they_are(order: str, tmp_path: Path) -> None:
    values = (GRAY / 65535).astype(f"{order}f4")
    tifffile.imwrite(tmp_path / "a.tif", values, byteorder=order)
    assert np.array_equal(read(tmp_path / "a.tif")[..., 1], values)


@pytest.mark.parametrize("write", ["png", "tiff"])
def test_colours_with_16_bits_keep_the_upper_8(write: str, tmp_path: Path) -> None:
    if write == "png":
        write_png(tmp_path / "a.png", COLOURS)
    else:
        tifffile.imwrite(tmp_path / "a.png", COLOURS, photometric="rgb")
    assert np.array_equal(read_pixels(tmp_path / "a.png", None, None).permute(1, 2, 0), COLOURS >> 8)
    assert np.abs(read(tmp_path / "a.png") - COLOURS / 65535).max() < 1 / 255


@pytest.mark.parametrize(
    ("values", "options", "word"),
    [
        (GRAY.astype(np.uint32), {}, "32 bits"),
        (GRAY.astype(np.int32), {}, "signed"),
        (GRAY.astype(np.int16), {}, "signed"),
        (GRAY.astype(np.int8), {}, "signed"),
        (GRAY, {"photometric": "miniswhite"}, "white is stored as 0"),
        ((GRAY / 65535).astype(np.float32), {"photometric": "miniswhite"}, "white is stored as 0"),
        (COLOURS.transpose(2, 0, 1), {"photometric": "rgb", "planarconfig": "separate"}, "separate planes"),
        ((COLOURS / 65535).astype(np.float32), {"photometric": "rgb"}, "pixel mode"),
        (GRAY.astype(np.float32), {}, r"from \d+ to \d+, expected floats in \[0, 1\]"),
        ((GRAY / -65535).astype(np.float32), {}, "from -"),
        (np.full((4, 4), np.nan, np.float32), {}, "from nan"),
        (np.full((4, 4), np.inf, np.float32), {}, "to inf"),
        ((GRAY / 65535).astype(np.float64), {}, "pixel mode"),
    ],
)
def test_pixels_on_an_unknown_scale_are_refused(
    values: Array, options: dict[str, Any], word: str, tmp_path: Path
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", values, **options)
    with pytest.raises(ValueError, match=rf"a\.tif cannot be used as a picture: .*{word}"):
        read(tmp_path / "a.tif")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_keeps_16_bits(interpolation: Any, tmp_path: Path) -> None:
    ramp = np.add.outer(np.arange(48) * 3, np.arange(64)).astype(np.uint16) + 30000  # within 3 of 256 levels
    Image.fromarray(ramp).save(tmp_path / "a.png")
    found = read_image(tmp_path / "a.png", 24, 20, interpolation)
    floats = torch.from_numpy((ramp / 65535).astype(np.float32))[None, None]
    expected = torch.nn.functional.interpolate(floats, (24, 32), mode=interpolation, antialias=True)
    torch.testing.assert_close(found, expected[0, :, 2:22, 6:26].repeat(3, 1, 1), rtol=0, atol=1e-6)
    assert len(found.unique()) > 50


def test_resizing_stays_between_0_and_1(tmp_path: Path) -> None:
    edge = np.repeat(np.array([0, 65535], np.uint16), 8)[None].repeat(16, 0)
    Image.fromarray(edge).save(tmp_path / "a.png")
    found = read_image(tmp_path / "a.png", 40, None, "bicubic")
    assert (float(found.min()), float(found.max())) == (0, 1)


def test_bytes_and_floats_meet_in_one_batch(tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    Image.fromarray(random_pixels((9, 6), 0)).save(tmp_path / "n0" / "a.png")
    Image.fromarray(GRAY).save(tmp_path / "n0" / "b.png")
    folder = ImageFolder(tmp_path, None, None)
    expected = torch.stack([read_image(tmp_path / "n0" / name, None, None) for name in ("a.png", "b.png")])
    (batch,) = load_batches(folder.pixels, range(2), 2)
    assert batch.images is not None
    assert torch.equal(batch.images, expected)
    assert torch.equal(folder.floats(), expected)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        assert torch.equal(next(prefetch([(folder, torch.arange(2))], device)).cpu(), expected)


RGB = random_pixels((5, 4), 3)
ALPHA = random_pixels((5, 4), 4)[..., 0]
LUMA = RGB[..., 0]
COLOUR_TABLE = np.array([[255, 0, 0], [0, 255, 0], [10, 20, 30], [40, 50, 60]], np.uint8)


def make_indexed() -> Image.Image:
    image = Image.frombytes("P", (5, 4), (LUMA % 4).tobytes())
    image.putpalette(COLOUR_TABLE.tobytes())
    return image


def stack(*channels: Array) -> Array:
    return np.stack(channels, axis=2)


BITS = Image.fromarray(LUMA).point(lambda value: 255 * (value > 127)).convert("1")
TRANSPARENT = Image.fromarray(stack(*RGB.transpose(2, 0, 1), ALPHA))
MODES: dict[str, tuple[bytes, Array]] = {
    "1": (encode(BITS, "PNG"), stack(*3 * [255 * (LUMA > 127)])),
    "1, fax": (encode(BITS, "TIFF", compression="group4"), stack(*3 * [255 * (LUMA > 127)])),
    "L": (encode(Image.fromarray(LUMA), "PNG"), stack(LUMA, LUMA, LUMA)),
    "LA": (encode(Image.fromarray(stack(LUMA, ALPHA)), "PNG"), stack(LUMA, LUMA, LUMA)),
    "RGBA": (encode(TRANSPARENT, "PNG"), RGB),
    "RGBA, WebP": (encode(TRANSPARENT, "WEBP", lossless=True, exact=True), RGB),
    "P": (encode(make_indexed(), "PNG"), COLOUR_TABLE[LUMA % 4]),
    "P, BMP": (encode(make_indexed(), "BMP"), COLOUR_TABLE[LUMA % 4]),
    "P, a transparent colour": (encode(make_indexed(), "PNG", transparency=1), COLOUR_TABLE[LUMA % 4]),
    "P, opacities": (encode(make_indexed(), "PNG", transparency=b"\0\x80\xff\3"), COLOUR_TABLE[LUMA % 4]),
    "GIF": (encode(make_indexed(), "GIF"), COLOUR_TABLE[LUMA % 4]),
    "PPM": (encode(Image.fromarray(RGB), "PPM"), RGB),
    "PGM of 10 bits": (b"P5 1 2 1023\n\x00\x00\x03\xff", np.array([[[0] * 3], [[255] * 3]])),
}


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_other_modes_become_rgb(mode: str, tmp_path: Path) -> None:
    data, expected = MODES[mode]
    (tmp_path / "a.png").write_bytes(data)
    assert np.array_equal(read(tmp_path / "a.png"), expected.astype(np.float32) / np.float32(255))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_inks_become_colours_without_a_profile(kind: str, tmp_path: Path) -> None:
    inks = ((0, 255, 255, 0), (255, 0, 0, 0), (0, 0, 0, 255), (51, 102, 0, 51))
    for number, ink in enumerate(inks):
        Image.new("CMYK", (16, 16), ink).save(tmp_path / f"{number}.jpg", kind)
        c, m, y, k = (value / 255 for value in ink)
        expected = [(1 - c) * (1 - k), (1 - m) * (1 - k), (1 - y) * (1 - k)]
        assert read(tmp_path / f"{number}.jpg")[8, 8].tolist() == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("YCbCr", (76, 85, 255), [1, 0, 0]),
        ("LAB", (136, 128, 128), [0.5, 0.5, 0.5]),  # L* = 53.3, a* = b* = 0
    ],
)
def test_other_colour_spaces_are_right_or_refused(
    mode: str, colour: tuple[int, ...], expected: list[float], tmp_path: Path
) -> None:
    Image.new(mode, (16, 16), colour).save(tmp_path / "a.tif")
    with contextlib.suppress(ValueError):  # older versions of Pillow cannot read them
        assert read(tmp_path / "a.tif")[0, 0].tolist() == pytest.approx(expected, abs=0.02)


TURNS: dict[int, Callable[[Array], Array]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: lambda stored: np.rot90(stored),
    9: lambda stored: stored,
}


@pytest.mark.parametrize("orientation", TURNS)
def test_pictures_are_turned_upright(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(RGB).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(GRAY).save(tmp_path / "gray.png", exif=exif)
    turn = TURNS[orientation]
    turned = read(tmp_path / "a.png", apply_orientation=True)
    assert np.array_equal(turned, turn(RGB).astype(np.float32) / np.float32(255))
    assert np.array_equal(
        read(tmp_path / "gray.png", apply_orientation=True)[..., 0],
        turn(GRAY).astype(np.float32) / np.float32(65535),
    )
    assert np.array_equal(read(tmp_path / "a.png"), RGB.astype(np.float32) / np.float32(255))
    for kind in ("JPEG", "WEBP"):
        Image.fromarray(RGB).save(tmp_path / "b.jpg", kind, exif=exif, quality=100)
        assert read(tmp_path / "b.jpg", apply_orientation=True).shape == turned.shape
        assert read(tmp_path / "b.jpg").shape == RGB.shape
    if orientation <= 8:  # the orientation of a TIFF is part of the format
        tifffile.imwrite(tmp_path / "c.tif", RGB, extratags=[(0x0112, "H", 1, orientation, True)])
        for apply in (True, False):
            assert np.array_equal(read(tmp_path / "c.tif", apply_orientation=apply), turned)


@pytest.mark.filterwarnings("ignore")
def test_exif_data_that_cannot_be_parsed_count_as_upright(tmp_path: Path) -> None:
    for number, damaged in enumerate(
        (b"Exif\0\0II*\0", b"Exif\0\0" + bytes(40), b"Exif\0\0MM\0*\xff\xff\xff\xff")
    ):
        Image.fromarray(RGB).save(tmp_path / f"{number}.png", exif=damaged)
        assert read(tmp_path / f"{number}.png", apply_orientation=True).shape == RGB.shape


def test_a_folder_is_turned_upright_on_demand(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "n0").mkdir()
    Image.fromarray(RGB).save(tmp_path / "n0" / "a.png", exif=exif)
    Image.fromarray(np.ascontiguousarray(TURNS[6](RGB))).save(tmp_path / "n0" / "b.png")
    plain, upright = (
        ImageFolder(tmp_path, None, None),
        ImageFolder(tmp_path, None, None, apply_orientation=True),
    )
    upright.check_size()
    assert torch.equal(upright.pixels(0), upright.pixels(1))
    with pytest.raises(ValueError, match="different sizes"):
        plain.check_size()
    assert plain.fingerprint() != upright.fingerprint()
    assert upright.prepared(32, 32).apply_orientation


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_the_first_of_several_frames_is_taken(kind: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(tmp_path / "a.png", kind, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(read(tmp_path / "a.png"), np.broadcast_to([1.0, 0, 0], (4, 4, 3)))


# Limits and damage


def test_pixels_are_limited_before_anything_is_decoded(tmp_path: Path) -> None:
    header = struct.pack(">IIBBBBB", 100_000, 90_000, 8, 6, 0, 0, 0)
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + make_chunk(b"IHDR", header) + make_chunk(b"IDAT", b""))
    with (
        warnings.catch_warnings(record=True) as caught,
        pytest.raises(ValueError, match=r"100,000 x 90,000.*--max-pixels"),
    ):
        read(path)
    assert not caught
    Image.new("L", (11, 10)).save(path)
    with pytest.raises(ValueError, match=r"11 x 10 pixels, more than the limit of 109"):
        read(path, max_pixels=109)
    assert read(path, max_pixels=110).shape == (10, 11, 3)
    with pytest.raises(ValueError, match=r"a\.png.*11 x 10"):
        ImageFolder(tmp_path.parent, None, None, classes=[tmp_path.name], max_pixels=109).check_size()


def test_a_strip_is_not_resized_without_limit(tmp_path: Path) -> None:
    Image.new("L", (60_000, 1)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"resized, it has 13,440,000 x 224 pixels"):
        read_pixels(tmp_path / "a.png", 224, 224)


def test_tiles_and_files_are_limited(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", GRAY, tile=(16, 16), compression="zlib")
    set_tags(tmp_path / "a.tif", tag322=60_000, tag323=60_000)
    with pytest.raises(ValueError, match=r"a tile has 60,000 x 60,000"):
        read(tmp_path / "a.tif")
    Image.new("L", (8, 8)).save(tmp_path / "b.png")
    os.truncate(tmp_path / "b.png", 1 << 31)  # takes no room on the disk
    with pytest.raises(ValueError, match=r"2,147,483,648 bytes, more than"):
        read(tmp_path / "b.png")


def test_a_text_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    plain = encode(Image.new("L", (8, 8)), "PNG")
    bomb = make_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(20 << 20)))
    (tmp_path / "a.png").write_bytes(plain[:33] + bomb + plain[33:])
    with pytest.raises(ValueError, match=r"(?i)too large"):
        read(tmp_path / "a.png")


@pytest.mark.parametrize(
    "error",
    [
        *(
            OSError("bad"),
            SyntaxError("bad"),
            ValueError("bad"),
            struct.error("bad"),
            MemoryError(),
            KeyError("bad"),
        ),
        *(zlib.error("bad"), IndexError("bad"), RuntimeError("bad"), TypeError("bad"), OverflowError("bad")),
        *(
            Image.DecompressionBombError("bad"),
            AttributeError("bad"),
            ZeroDivisionError(),
            EOFError(),
            RecursionError(),
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_pillow_raises_is_one_error(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(
        ValueError, match=rf"a\.png cannot be used as a picture: .*(bad|{type(error).__name__})"
    ):
        read(tmp_path / "a.png")
    (batch,) = load_batches(lambda _: read_pixels(tmp_path / "a.png"), [0], 1, on_unreadable="skip")
    assert "cannot be used as a picture" in batch.unreadable[0][1]


def test_formats_that_start_other_programs_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with pytest.raises(ValueError, match="none of the formats BMP"):
        read(tmp_path / "a.png")


def test_empty_files_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(ValueError, match=r"a\.png cannot be used as a picture: it is empty"):
        read(tmp_path / "a.png")
