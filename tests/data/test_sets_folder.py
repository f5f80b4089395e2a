"""Folders of pictures against torchvision, damaged pictures, left out files and class maps."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.data import random_pixels, write_class_folders
from ttvd.data.loading import describe_skipped, load_batches
from ttvd.data.sets import ClassMap, ImageFolder, load_set, read_image, read_synsets

SIZES = [(300, 260), (260, 300), (500, 333), (231, 640), (256, 256)]


def test_order_and_labels_are_torchvisions(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    write_class_folders(tmp_path)
    ours = ImageFolder(tmp_path, None, None)
    theirs = datasets.ImageFolder(tmp_path).samples
    assert [str(tmp_path / ours.path(place)) for place in range(len(ours))] == [path for path, _ in theirs]
    assert ours.classes == ("n01", "n02", "n03")
    assert ours.labels.tolist() == [0, 1, 1, 2, 2]
    (tmp_path / ".cache").mkdir()  # hidden folders are no classes
    assert ImageFolder(tmp_path).classes == ours.classes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("resize", "crop"), [(256, 224), (64, 64), (None, 224), (48, None)])
def test_preparation_is_torchvisions(
    size: tuple[int, int], resize: int | None, crop: int | None, tmp_path: Path
) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    picture = Image.fromarray(random_pixels(size, 0))
    picture.save(tmp_path / "a.png")
    expected = picture if resize is None else functional.resize(picture, resize)
    expected = expected if crop is None else functional.center_crop(expected, crop)
    pixels = torch.from_numpy(np.array(expected)).permute(2, 0, 1).float() / 255
    assert torch.equal(read_image(tmp_path / "a.png", resize, crop), pixels)


def test_grey_and_transparent_pictures_become_rgb(tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P", "1"):
        Image.new(mode, (32, 32)).save(tmp_path / f"{mode}.png")
        assert read_image(tmp_path / f"{mode}.png", None, None).shape == (3, 32, 32)


def test_parts_of_a_folder_keep_their_order(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    pictures = ImageFolder(tmp_path, 32, 32)
    part = pictures.subset([4, 0, 3])
    assert part.labels.tolist() == [2, 0, 2]
    assert part.path(1) == pictures.path(0)
    assert torch.equal(part.floats(), pictures.floats([4, 0, 3]))
    assert part.fingerprint() != pictures.fingerprint()


def test_nothing_is_kept_while_loading(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    pictures = ImageFolder(tmp_path, 32, 32)
    before = set(vars(pictures))
    for _ in load_batches(pictures.pixels, range(5), 2, workers=0):
        pass
    assert set(vars(pictures)) == before
    assert sum(getattr(value, "nbytes", 0) for value in vars(pictures).values()) < 1000


def test_files_with_other_suffixes_are_named(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    for name in ("n01/a.gif", "n01/b.GIF", "n02/sub/c.gif", "n03/README"):
        (tmp_path / name).touch()
    skipped = ImageFolder(tmp_path).skipped
    assert skipped == {
        ".gif": ["n01/a.gif", "n01/b.GIF", "n02/sub/c.gif"],
        ".txt": ["n01/notes.txt"],
        "without a suffix": ["n03/README"],
    }
    assert describe_skipped(skipped, 2).startswith("left out: 3 .gif (n01/a.gif, n01/b.GIF, ...), 1 ")
    assert describe_skipped({}) == ""


def test_folders_that_cannot_be_read_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_class_folders(tmp_path)

    def refuse(path: str) -> None:
        raise PermissionError(13, "not allowed", path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PermissionError, match="n01"):
        ImageFolder(tmp_path, classes=("n01",))


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        ImageFolder(tmp_path / "nowhere")
    Image.new("RGB", (8, 8)).save(tmp_path / "flat.png")
    with pytest.raises(ValueError, match="sorted into class folders"):
        ImageFolder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no pictures"):
        ImageFolder(tmp_path)


def test_small_pictures_and_other_files_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (20, 30)).save(tmp_path / "small.png")
    with pytest.raises(ValueError, match="20 x 30 pixels, too few for a crop of 24"):
        read_image(tmp_path / "small.png", None, 24)
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.png cannot be used"):
        read_image(tmp_path / "text.png")
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "missing.png")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match="not a regular file"):
        read_image(tmp_path / "pipe.png")


def test_official_trees_are_found(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "val", (300, 280))
    write_class_folders(tmp_path / "ImageNet-C" / "fog" / "3", (224, 224))
    write_class_folders(tmp_path / "imagenet-r", (300, 280))
    for name, options in (
        ("imagenet", {}),
        ("imagenet-c", {"corruption": "fog", "severity": 3}),
        ("imagenet-r", {}),
    ):
        found = load_set(name, tmp_path, **options)  # type: ignore[arg-type]
        assert isinstance(found, ImageFolder)
        assert found.name == name
        assert found.floats([0]).shape == (1, 3, 224, 224)
    with pytest.raises(FileNotFoundError, match="fog"):
        load_set("imagenet-c", tmp_path, corruption="fog", severity=4)


def test_released_corrupted_pictures_are_not_resized(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "fog" / "5", (224, 224))
    found = load_set("imagenet-c", tmp_path, corruption="fog")
    expected = np.array(Image.open(tmp_path / "fog" / "5" / "n01" / "x.png")).transpose(2, 0, 1)
    assert (found.floats([0])[0] * 255).round().byte().numpy().tolist() == expected.tolist()


def test_class_maps_pick_the_columns_of_the_set(tmp_path: Path) -> None:
    everything = tuple(f"n{number:08d}" for number in range(0, 3000, 3))
    chosen = everything[::5]
    classes = ClassMap.match(chosen, everything)
    logits = torch.arange(1000.0).repeat(2, 1)
    assert classes.restrict(logits).tolist() == [list(range(0, 1000, 5))] * 2
    assert classes.to_outputs(torch.tensor([0, 1, 199])).tolist() == [0, 5, 995]
    (tmp_path / "synsets.txt").write_text("".join(f"{name} some, words\n" for name in everything))
    assert read_synsets(tmp_path / "synsets.txt") == everything
    for name in ("n2", "n1"):
        (tmp_path / "val" / name).mkdir(parents=True)
    assert read_synsets(tmp_path / "val") == ("n1", "n2")


def test_class_maps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 classes are unknown to the model, the first is 'n9'"):
        ClassMap.match(("n1", "n9"), ("n1", "n2"))
    with pytest.raises(ValueError, match="distinct"):
        ClassMap.match(("n1",), ("n1", "n1"))
    with pytest.raises(ValueError, match="must have 2 columns, got 3"):
        ClassMap.match(("n1",), ("n1", "n2")).restrict(torch.zeros(1, 3))


def test_links_are_followed_but_loops_do_not_multiply_a_set(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "set")
    write_class_folders(tmp_path / "elsewhere")
    before = len(ImageFolder(tmp_path / "set"))
    (tmp_path / "set" / "n01" / "loop").symlink_to(tmp_path / "set" / "n01")
    (tmp_path / "set" / "n01" / "up").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "n02" / "again").symlink_to(tmp_path / "set" / "n02" / "sub")
    assert len(ImageFolder(tmp_path / "set")) == before
    (tmp_path / "set" / "n01" / "more").symlink_to(tmp_path / "elsewhere" / "n03")
    (tmp_path / "set" / "n04").symlink_to(tmp_path / "elsewhere" / "n03")
    images = ImageFolder(tmp_path / "set")
    paths = [images.path(place) for place in range(len(images))]
    assert paths[:3] == ["n01/x.png", "n01/more/a.JPEG", "n01/more/b.png"]
    assert "n02/sub/deep.png" in paths  # the folder, not the link to it
    assert paths[-2:] == ["n04/a.JPEG", "n04/b.png"]
    assert len(paths) == before + 4


def test_sizes_of_pictures_are_compared(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    whole = ImageFolder(tmp_path).prepared(None, None)
    whole.check_size()
    assert whole.floats([0]).shape == (1, 3, 36, 40)
    Image.fromarray(random_pixels((80, 72), 9)).save(tmp_path / "n03" / "c.png")
    larger = ImageFolder(tmp_path, None, None)
    with pytest.raises(ValueError, match=r"n01/x\.png: 40 x 36, n03/c\.png: 80 x 72\); give a crop"):
        larger.check_size()
    for resize, crop in ((18, None), (None, 30)):
        prepared = larger.prepared(resize, crop)
        prepared.check_size()
        assert len(prepared.floats().shape) == 4
    (tmp_path / "n03" / "c.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"c\.png cannot be used as a picture"):
        larger.check_size()
