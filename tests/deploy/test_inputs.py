"""Arrays to predict: those that are right, those that are refused, and batches in order."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from ttvd.deploy.inputs import iterate_batches, open_inputs

IMAGES = np.random.default_rng(0).random((4, 3, 6, 5))


def write_npy(
    path: Path, shape: str, kind: str = "'|u1'", *, version: int = 1, data: bytes = bytes(100)
) -> None:
    """Write an .npy file whose header says anything."""
    header = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + header + data)


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.array([{"a": 1}], dtype=object), "pickled objects"),
        (np.zeros((4, 4), np.uint8), "must hold images"),
        (np.zeros((0, 3, 8, 8), np.uint8), "must hold images"),
        (np.zeros((4, 3, 0, 8), np.float32), "must hold images"),
        (np.zeros((4, 8, 8), np.int32), r"bytes or floats.*int32.*astype\('uint8'\)"),
        (np.zeros((4, 8, 8), np.uint16), r"bytes or floats.*uint16.*/ 65535"),
        (np.zeros((4, 8, 8), bool), r"bytes or floats.*bool.*astype\('float32'\)"),
        (np.zeros((4, 8, 8), np.complex64), "bytes or floats.*complex64"),
        (np.zeros((4, 8, 8), [("r", "u1"), ("g", "<f4")]), "bytes or floats"),
        (np.zeros((4, 8, 8), "S3"), "bytes or floats"),
    ],
)
def test_arrays_that_are_no_images(tmp_path: Path, array: np.ndarray, word: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=rf"a\.npy.*{word}"):
        open_inputs(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "shape",
    [
        *(
            "(-4, 5, 5)",
            "(4, -5, 5)",
            "(-4, -5, 5)",
            "(4, 5, 500)",
            "(4, True, 5)",
            "(4.0, 5, 5)",
            "[4, 5, 5]",
            "4",
        ),
        *(
            "(4, 5, 5",
            "('4', 5, 5)",
            "(10**9, 5, 5)",
            "(1000000000000, 1000000000000, 9)",
            "(((" * 900,
            "None",
            "()",
        ),
        "__import__('os').abort()",
    ],
)
def test_shapes_that_make_no_sense(shape: str, tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", shape)
    with pytest.raises(ValueError, match=r"a\.npy"):
        open_inputs(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff", b"hello", b"PK\x03\x04 no zip"]
)
def test_files_that_are_no_arrays(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.npy cannot be read"):
        open_inputs(tmp_path / "a.npy")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*a\.npy"):
        open_inputs(tmp_path / "a.npy")
    np.savez(tmp_path / "several.npz", IMAGES)
    (tmp_path / "several.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ValueError, match=r"archive of arrays"):
        open_inputs(tmp_path / "a.npy")


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", ">f8", "<f2", "longdouble", "u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_floats_and_bytes_of_every_kind(kind: str, order: str, tmp_path: Path) -> None:
    scale = 255 if kind == "u1" else 1
    array = np.array(IMAGES * scale, kind, order="F" if order == "F" else "C")
    np.save(tmp_path / "a.npy", array)
    (batch,) = iterate_batches(open_inputs(tmp_path / "a.npy"), 8)
    assert batch.images is not None
    assert batch.images.dtype == torch.float32
    assert np.array_equal(batch.images, array.astype(np.float32) / np.float32(scale))
    np.save(tmp_path / "b.npy", array.transpose(0, 2, 3, 1))
    (batch,) = iterate_batches(open_inputs(tmp_path / "b.npy"), 8)
    assert batch.images is not None
    assert np.array_equal(batch.images, array.astype(np.float32) / np.float32(scale))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_every_version(version: int, tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", "(4, 5, 5)", version=version, data=bytes(range(100)))
    (batch,) = iterate_batches(open_inputs(tmp_path / "a.npy"), 8)
    assert batch.images is not None
    assert (batch.images * 255).round().flatten().tolist() == list(range(100))


@pytest.mark.parametrize(
    ("value", "word"), [(255, "to 255"), (-0.1, "from -0.1"), (np.nan, "nan"), (np.inf, "inf")]
)
def test_floats_outside_of_0_and_1_are_unreadable(value: float, word: str, tmp_path: Path) -> None:
    array = IMAGES.copy()
    array[2, 0, 0, 0] = value
    np.save(tmp_path / "a.npy", array)
    (batch,) = iterate_batches(open_inputs(tmp_path / "a.npy"), 8, on_unreadable="skip")
    assert batch.positions == [0, 1, 3]
    assert batch.unreadable[0][0] == 2
    assert word in batch.unreadable[0][1]


def test_pixels_of_an_array_are_limited(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IMAGES)
    with pytest.raises(ValueError, match=r"an image of .*a\.npy has 5 x 6 pixels, more than the limit of 29"):
        open_inputs(tmp_path / "a.npy", max_pixels=29)


def test_an_archive_member_with_code_is_not_run(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
    (tmp_path / "a.npy").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        open_inputs(tmp_path / "a.npy")


def test_batches_keep_the_order_and_the_last_one_is_short(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(23, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2))
    batches = list(iterate_batches(open_inputs(tmp_path / "a.npy"), 5))
    assert [len(batch.positions) for batch in batches] == [5, 5, 5, 5, 3]
    values = torch.cat([batch.images for batch in batches if batch.images is not None])[:, 0, 0, 0] * 255
    assert values.round().tolist() == list(range(23))
