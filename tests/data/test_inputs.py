"""The images of a stream that `ttvd adapt` reads: folders, lists and arrays."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.data import write_images
from ttvd.data.loading import describe_skipped, read_image
from ttvd.deploy.inputs import iterate_batches, open_inputs


def test_folders_are_read_in_the_order_of_their_paths_and_other_files_are_counted(tmp_path: Path) -> None:
    write_images(tmp_path / "in", "b/2.png", "b.png", "a/1.jpg", "b/1.png")
    write_images(tmp_path / "elsewhere", "3.png")
    for name in ("x.gif", "a/y.gif", "a/notes.txt"):
        (tmp_path / "in" / name).touch()
    (tmp_path / "in" / "c").symlink_to(tmp_path / "elsewhere")
    inputs = open_inputs(tmp_path / "in")
    assert inputs.names == ["a/1.jpg", "b/1.png", "b/2.png", "b.png", "c/3.png"]
    assert describe_skipped(inputs.skipped) == "left out: 2 .gif (x.gif, a/y.gif), 1 .txt (a/notes.txt)"


def test_lists_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_images(tmp_path, "one.png", "two.png")
    (tmp_path / "list.txt").write_text("\ufefftwo.png\n\none.png\n", encoding="utf-8")
    inputs = open_inputs(tmp_path / "list.txt", crop=32)
    assert inputs.names == ["two.png", "one.png"]
    (batch,) = iterate_batches(inputs, 4)
    expected = [read_image(tmp_path / name, None, 32) for name in inputs.names]
    assert batch.images is not None
    assert torch.equal(batch.images, torch.stack(expected))


def test_gray_images_have_one_channel(tmp_path: Path) -> None:
    write_images(tmp_path, "one.png")
    (batch,) = iterate_batches(open_inputs(tmp_path, gray=True), 1)
    assert batch.images is not None
    expected = (
        read_image(tmp_path / "one.png", None, None).permute(1, 2, 0) * torch.tensor([0.299, 0.587, 0.114])
    ).sum(2)
    torch.testing.assert_close(batch.images[0, 0], expected)


def test_an_expected_shape_is_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 8, 8, 3), np.uint8))
    inputs = open_inputs(tmp_path / "a.npy")
    assert [batch.positions for batch in iterate_batches(inputs, 2, start=1, shape=(3, 8, 8))] == [[1, 2]]
    with pytest.raises(ValueError, match=r"0: .*expected \(3, 9, 9\)"):
        list(iterate_batches(inputs, 2, shape=(3, 9, 9)))


def test_what_holds_no_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no image"):
        open_inputs(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"folder.*\.npy.*\.txt"):
        open_inputs(tmp_path / "video.mp4")
