"""A data folder as ImageNet's users have it, of a few tiny pictures, and a model with random weights for it."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

CLASSES = ("n00000011", "n00000022", "n00000033", "n00000044")
SHOWN = (CLASSES[3], CLASSES[1])
"""The classes of the part that stands for ImageNet-R."""


def put(folder: Path, count: int, start: int = 0) -> None:
    """Write pictures of 224 x 224 into the folder of a class."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(start, start + count):
        seed = sum(folder.as_posix().encode()) + number
        blocks = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((224, 224), Image.Resampling.NEAREST).save(folder / f"{number}.png")


def plant(root: Path) -> Path:
    """Folders train and val, ImageNet-C with fog and snow, imagenet-r, and a checkpoint called net."""
    for name in CLASSES:
        put(root / "train" / name, 2)
        put(root / "val" / name, 1)
        for corruption in ("fog", "snow"):
            put(root / "ImageNet-C" / corruption / "5" / name, 2)
    for name in SHOWN:
        put(root / "imagenet-r" / name, 3)
    torch.manual_seed(0)
    small = {"num_classes": len(CLASSES), "in_channels": 3, "widths": [4, 6], "blocks": [1, 1]}
    card = Card("resnet", small)
    (root / "models").mkdir()
    save_checkpoint(root / "models" / "net.safetensors", build_model(card), card)
    return root
