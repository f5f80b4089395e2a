"""Folders of pictures against torchvision, damaged pictures, loaders and class maps."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from ttvd.data.sets import (
    ClassMap,
    ImageFolder,
    from_arrays,
    image_loader,
    load_set,
    read_image,
    read_synsets,
)

SIZES = [(300, 260), (260, 300), (500, 333), (231, 640), (256, 256)]


def paint(size: tuple[int, int], seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)


def make_tree(root: Path, size: tuple[int, int] = (40, 36)) -> None:
    for number, path in enumerate(["n03/b.png", "n03/a.JPEG", "n01/x.png", "n02/sub/deep.png", "n02/z.jpg"]):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(paint(size, number)).save(root / path)
    (root / "n01" / "notes.txt").write_text("no picture")


def test_order_and_labels_are_torchvisions(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    make_tree(tmp_path)
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
    picture = Image.fromarray(paint(size, 0))
    picture.save(tmp_path / "a.png")
    expected = picture if resize is None else functional.resize(picture, resize)
    expected = expected if crop is None else functional.center_crop(expected, crop)
    pixels = torch.from_numpy(np.array(expected)).permute(2, 0, 1).float() / 255
    assert torch.equal(read_image(tmp_path / "a.png", resize, crop), pixels)


def test_grey_and_transparent_pictures_become_rgb(tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P", "1"):
        Image.new(mode, (32, 32)).save(tmp_path / f"{mode}.png")
        assert read_image(tmp_path / f"{mode}.png", None, None).shape == (3, 32, 32)


def damage(root: Path) -> None:
    path = root / "n02" / "z.jpg"
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_unreadable_pictures_stop_or_are_named(workers: int, tmp_path: Path) -> None:
    make_tree(tmp_path)
    damage(tmp_path)
    pictures = ImageFolder(tmp_path, 32, 32)
    with pytest.raises(ValueError, match=r"z\.jpg cannot be used as a picture") as error:
        list(image_loader(pictures, 2, workers))
    assert "Traceback" not in str(error.value)
    batches = list(image_loader(pictures, 2, workers, skip_unreadable=True))
    assert torch.cat([batch.index for batch in batches]).tolist() == [0, 2, 3, 4]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 1, 2, 2]
    assert [len(batch.unreadable) for batch in batches] == [1, 0, 0]
    assert torch.equal(torch.cat([batch.images for batch in batches]), pictures.floats([0, 2, 3, 4]))


def test_a_batch_without_any_readable_picture_is_empty(tmp_path: Path) -> None:
    make_tree(tmp_path)
    damage(tmp_path)
    batches = list(image_loader(ImageFolder(tmp_path, 32, 32), 1, 0, skip_unreadable=True))
    assert [len(batch.labels) for batch in batches] == [1, 0, 1, 1, 1]


def test_the_loader_follows_an_order(tmp_path: Path) -> None:
    make_tree(tmp_path)
    pictures = ImageFolder(tmp_path, 32, 32)
    batches = list(image_loader(pictures, 2, 0, order=np.array([4, 0, 3])))
    assert torch.cat([batch.index for batch in batches]).tolist() == [4, 0, 3]
    part = pictures.subset([4, 0, 3])
    assert part.labels.tolist() == [2, 0, 2]
    assert part.path(1) == pictures.path(0)
    assert torch.equal(part.floats(), pictures.floats([4, 0, 3]))
    assert part.fingerprint() != pictures.fingerprint()


def test_the_loader_refuses_images_outside_the_unit_interval() -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
        list(image_loader([(torch.full((1, 8, 8), 2.0), 0)], 1, 0))
    with pytest.raises(ValueError, match="float images"):
        list(image_loader([(torch.zeros(1, 8, 8, dtype=torch.uint8), 0)], 1, 0))
    images = from_arrays(torch.rand(5, 1, 8, 8), [0, 1, 2, 3, 4])
    assert torch.equal(torch.cat([batch.images for batch in image_loader(images, 2, 0)]), images.floats())


def test_nothing_is_kept_while_loading(tmp_path: Path) -> None:
    make_tree(tmp_path)
    pictures = ImageFolder(tmp_path, 32, 32)
    before = set(vars(pictures))
    for _ in image_loader(pictures, 2, 0):
        pass
    assert set(vars(pictures)) == before
    assert sum(getattr(value, "nbytes", 0) for value in vars(pictures).values()) < 1000


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


def test_official_trees_are_found(tmp_path: Path) -> None:
    make_tree(tmp_path / "val", (300, 280))
    make_tree(tmp_path / "ImageNet-C" / "fog" / "3", (224, 224))
    make_tree(tmp_path / "imagenet-r", (300, 280))
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
    make_tree(tmp_path / "fog" / "5", (224, 224))
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
    make_tree(tmp_path / "set")
    make_tree(tmp_path / "elsewhere")
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
    make_tree(tmp_path)
    whole = ImageFolder(tmp_path).prepared(None, None)
    whole.check_size()
    assert whole.floats([0]).shape == (1, 3, 36, 40)
    Image.fromarray(paint((80, 72), 9)).save(tmp_path / "n03" / "c.png")
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
