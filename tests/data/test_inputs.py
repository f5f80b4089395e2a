"""The images of a stream that `ttvd adapt` reads: folders, lists and arrays."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

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


def test_lines_of_a_list_are_names_as_they_are(tmp_path: Path) -> None:
    names = [" space.png ", "li\x0bne\u2028.png", "caf\udce9.png", "again.png", "again.png"]
    for name in set(names):
        write_images(tmp_path, "plain.png")
        (tmp_path / "plain.png").rename(tmp_path / name)
    (tmp_path / "list.txt").write_bytes(b"\r\n".join(map(os.fsencode, [*names, "", "  "])))
    inputs = open_inputs(tmp_path / "list.txt")
    assert inputs.names == names
    (batch,) = iterate_batches(inputs, 8)
    assert batch.positions == [0, 1, 2, 3, 4]
    assert inputs.identity != open_inputs(tmp_path).identity


def test_lists_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    with pytest.raises(FileNotFoundError, match=r"no file .*list\.txt"):
        open_inputs(path)
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        path.write_text("one.png\n", encoding=encoding)
        with pytest.raises(ValueError, match=r"list\.txt is not a text file in UTF-8"):
            open_inputs(path)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="no image files"):
        open_inputs(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        open_inputs(path)


def test_every_line_of_a_list_is_an_image_or_named(tmp_path: Path) -> None:
    write_images(tmp_path, "one.png", "folder/two.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "empty.png").touch()
    names = ["one.png", "missing.png", "folder", "pipe.png", "empty.png", "one.png/two.png", "list.txt"]
    (tmp_path / "list.txt").write_text("\n".join(names))
    inputs = open_inputs(tmp_path / "list.txt")
    (batch,) = iterate_batches(inputs, 8, on_unreadable="skip")
    assert batch.positions == [0]
    assert [inputs.names[position] for position, _ in batch.unreadable] == names[1:]
    words = [
        "No such file",
        "not a regular file",
        "not a regular file",
        "empty",
        "Not a directory",
        "formats",
    ]
    assert [word in reason for word, (_, reason) in zip(words, batch.unreadable, strict=True)] == [True] * 6
    with pytest.raises(ValueError, match=r"missing\.png: .*No such file"):
        list(iterate_batches(inputs, 8))


def test_everything_in_a_folder_is_an_image_or_named(tmp_path: Path) -> None:
    home = tmp_path / "in"
    write_images(home, "a/one.png", ".hidden/.two.png", "caf\udce9.jpg")
    os.mkfifo(home / "pipe.png")
    (home / "empty.png").touch()
    (home / "broken.png").symlink_to(tmp_path / "nowhere")
    for name in ("a/notes.txt", "a/\x1b[2J.GIF", "README", ".DS_Store", "c\udce9.gif"):
        (home / name).touch()
    os.mkfifo(home / "pipe")
    for name, target in {"up": tmp_path, "loop": home, "b": home / "a"}.items():
        (home / name).symlink_to(target)
    inputs = open_inputs(home)
    assert inputs.names == [
        *(".hidden/.two.png", "a/one.png", "broken.png", "caf\udce9.jpg", "empty.png", "pipe.png"),
    ]
    assert {reason: sorted(names) for reason, names in inputs.skipped.items()} == {
        ".gif": ["a/\x1b[2J.GIF", "c\udce9.gif"],
        ".txt": ["a/notes.txt"],
        "listed elsewhere": ["b", "loop", "up"],
        "without a suffix": [".DS_Store", "README", "pipe"],
    }
    text = describe_skipped(inputs.skipped)
    assert text.isprintable()
    assert "2 .gif (c\\udce9.gif, a/\\x1b[2J.GIF), 1 .txt" in text
    (batch,) = iterate_batches(inputs, 8, on_unreadable="skip")
    assert batch.positions == [0, 1, 3]
    assert [inputs.names[position] for position, _ in batch.unreadable] == [
        "broken.png",
        "empty.png",
        "pipe.png",
    ]


def test_folders_without_permission_stop_or_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, "a/one.png", "b/two.png")
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: .*b"):
        open_inputs(tmp_path)
    inputs = open_inputs(tmp_path, on_unreadable="skip")
    assert inputs.names == ["a/one.png"]
    assert describe_skipped(inputs.skipped) == "left out: 1 unreadable (b: Permission denied)"
    with pytest.raises(PermissionError):
        open_inputs(tmp_path / "b", on_unreadable="skip")


def test_a_stream_is_upright_unless_told_otherwise(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(tmp_path / "a.jpg", exif=exif)
    assert open_inputs(tmp_path).read(0).shape == (3, 20, 10)
    assert open_inputs(tmp_path, apply_orientation=False).read(0).shape == (3, 10, 20)


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
    (tmp_path / "empty" / "a.gif").touch()
    with pytest.raises(ValueError, match=r"no image.*1 \.gif \(a\.gif\)"):
        open_inputs(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"folder.*\.npy.*\.txt"):
        open_inputs(tmp_path / "video.mp4")
