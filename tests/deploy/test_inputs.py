"""Images to predict: arrays that are refused, and batches in order."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ttvd.deploy.inputs import iterate_batches, open_inputs


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.array([{"a": 1}], dtype=object), "pickled objects"),
        (np.zeros((4, 4), np.uint8), "must hold images"),
        (np.zeros((4, 8, 8), np.int32), "bytes or floats"),
    ],
)
def test_arrays_that_are_no_images(tmp_path: Path, array: np.ndarray, word: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=word):
        open_inputs(tmp_path / "a.npy")


def test_batches_keep_the_order_and_the_last_one_is_short(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(23, dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2))
    batches = list(iterate_batches(open_inputs(tmp_path / "a.npy"), 5))
    assert [len(batch.positions) for batch in batches] == [5, 5, 5, 5, 3]
    values = torch.cat([batch.images for batch in batches if batch.images is not None])[:, 0, 0, 0] * 255
    assert values.round().tolist() == list(range(23))
