"""Export in the layout of ImageNet-C: corruption/severity/class/picture."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Literal

import numpy as np
import numpy.typing as npt

from ttvd.data.export.lock import remove_temporaries
from ttvd.data.export.manifest import MANIFEST, SUMS, Ledger
from ttvd.data.export.plan import Plan
from ttvd.data.export.source import Advance, batches_of
from ttvd.data.sets import ImageFolder, LabelledImages
from ttvd.files import open_atomic

Format = Literal["jpeg", "png"]

_QUALITY = 85
"""Of the released ImageNet-C pictures (make_imagenet_c.py of hendrycks/robustness)."""


def write_trees(
    source: LabelledImages,
    out: Path,
    plan: Plan,
    ledger: Ledger,
    advance: Advance,
    *,
    image_format: Format,
    workers: int,
) -> None:
    """Write every missing picture; each batch is decoded once for all corruptions and severities."""
    names = name_pictures(source, image_format)
    _remove_temporaries(out, plan, ledger, frozenset(names))
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for images, index in batches_of(source, workers):
            for corruption in plan.corruptions:
                for severity in plan.severities:
                    below = f"{corruption}/{severity}"
                    paths = [f"{below}/{names[place]}" for place in index.tolist()]
                    if not all(pool.map(ledger.holds, paths)):
                        pixels = plan.apply(images, corruption, severity, index)
                        digests = pool.map(_write_picture, [out / path for path in paths], pixels)
                        ledger.add(dict(zip(paths, digests, strict=True)))
                    advance(corruption, len(paths))
    ledger.close(plan.corruptions, list_files=False)


def _remove_temporaries(out: Path, plan: Plan, ledger: Ledger, names: frozenset[str]) -> None:
    severities = {str(severity) for severity in plan.severities}

    def is_made(path: str) -> bool:
        corruption, _, below = path.partition("/")
        severity, _, name = below.partition("/")
        return path in (MANIFEST, SUMS) or (
            corruption in ledger.corruptions and severity in severities and name in names
        )

    remove_temporaries(out, is_made)


def name_pictures(source: LabelledImages, image_format: Format) -> list[str]:
    """Return class/picture for each image: the names of a folder are kept, others are numbered."""
    suffix = ".JPEG" if image_format == "jpeg" else ".png"
    if isinstance(source, ImageFolder):
        names = [str(PurePath(source.path(place)).with_suffix(suffix)) for place in range(len(source))]
        if len(set(names)) != len(names):
            raise ValueError(
                f"{source.root} has pictures whose names differ in their suffix only; rename them"
            )
        return names
    classes = name_folders(source)
    digits = len(str(len(source) - 1))
    return [
        f"{classes[label]}/{place:0{digits}d}{suffix}" for place, label in enumerate(source.labels.tolist())
    ]


def name_folders(source: LabelledImages) -> list[str]:
    """Return a folder for each class such that their sorted order is the order of the labels."""
    count = int(source.labels.max()) + 1
    names = [name.replace("/", "-") for name in source.classes or ()] or [""] * count
    if names[0] and names == sorted(set(names)):
        return names
    digits = len(str(len(names) - 1))
    return [f"{number:0{digits}d}-{name}".rstrip("-") for number, name in enumerate(names)]


def _write_picture(path: Path, pixels: npt.NDArray[np.uint8]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if path.suffix == ".png":
        picture.save(buffer, "png")
    else:
        picture.save(buffer, "jpeg", quality=_QUALITY, optimize=True)
    with open_atomic(path, sync=False) as file:
        file.write(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()
