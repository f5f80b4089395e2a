"""Frost: sheets of ice over the image, either generated here or cut from the published pictures.

The published pictures are not part of this library. The generated sheets imitate their feathery crystals. The mean and
the deviation of each colour channel follow the five pictures that the released sets were made with.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.data.corruptions.constants import Row
from ttvd.data.corruptions.filters import gaussian_filter, to_gray
from ttvd.data.corruptions.random import RandomFields

FrostSheets = Literal["procedural", "pictures"]

_SIDE = 600
_POINTS = 32
_RECIPES = (
    # crystals, their length in pixels, barbs, share of clouds, mean colour, deviation of the colour
    (7000, 12, 3, 1.2, (0.305, 0.585, 0.650), (0.106, 0.065, 0.060)),
    (1400, 30, 9, 0.8, (0.787, 0.805, 0.841), (0.084, 0.087, 0.089)),
    (900, 45, 12, 0.8, (0.787, 0.805, 0.841), (0.084, 0.087, 0.089)),
    (8000, 9, 4, 0.7, (0.540, 0.599, 0.648), (0.112, 0.112, 0.117)),
    (900, 34, 12, 0.8, (0.441, 0.484, 0.528), (0.174, 0.170, 0.163)),
)
_PICTURES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")


def frost_source(frost: FrostSheets = "procedural") -> str:
    """Return a description of the sheets that `corrupt(..., frost=frost)` uses, for records.

    Example:
        >>> frost_source()
        'procedural sheets, version 1'
    """
    if frost == "procedural":
        return "procedural sheets, version 1"
    _find_pictures()
    from importlib.metadata import packages_distributions, version

    package = packages_distributions()["imagecorruptions"][0]
    return f"published pictures from {package} {version(package)}"


def apply_frost(x: Tensor, row: Row, random: RandomFields, sheets: FrostSheets = "procedural") -> Tensor:
    """Lay a random part of a random sheet over each image."""
    image_weight, frost_weight, scale = row
    height, width = x.shape[-2:]
    cut = _cut_sheets(sheets, scale, height, width, str(x.device))
    kind = random.integers(0, 0, len(cut), 1).view(-1)
    u, v = random.uniform(1, 2).unbind(1)
    out = x * image_weight
    for number, sheet in enumerate(cut):
        here = (kind == number).nonzero().view(-1)
        windows = sheet.unfold(1, height, 1).unfold(2, width, 1)
        top, left = ((r[here] * (n - 1)).long() for r, n in ((u, windows.shape[1]), (v, windows.shape[2])))
        ice = windows[:, top, left].transpose(0, 1)
        out[here] += frost_weight * (to_gray(ice) if x.shape[1] == 1 else ice)
    return out


@lru_cache(maxsize=4)
def _cut_sheets(kind: FrostSheets, scale: float, height: int, width: int, device: str) -> tuple[Tensor, ...]:
    """Sheets (3, h, w) at the given scale, enlarged further where they would not be larger than the image."""
    sheets = _grow_sheets() if kind == "procedural" else _load_pictures()
    fitted = []
    for sheet in sheets:
        smallest = max((height + 1) / sheet.shape[1], (width + 1) / sheet.shape[2])
        factor = scale if scale >= smallest else 1.1 * smallest
        size = [round(side * factor) for side in sheet.shape[1:]]
        fitted.append(F.interpolate(sheet.unsqueeze(0), size=size, mode="bilinear").squeeze(0).to(device))
    return tuple(fitted)


def _find_pictures() -> list[Path]:
    """Paths of the published pictures; the package is found, not imported, because its import is slow."""
    spec = find_spec("imagecorruptions")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "frost='pictures' needs the pictures of imagecorruptions-imaug: pip install 'ttvd[corruptions]', "
            "or use frost='procedural'"
        )
    return [Path(spec.origin).parent / "frost" / name for name in _PICTURES]


@lru_cache(maxsize=1)
def _load_pictures() -> tuple[Tensor, ...]:
    from PIL import Image

    pictures = []
    for path in _find_pictures():
        with Image.open(path) as picture:
            pictures.append(
                torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float().div_(255)
            )
    return tuple(pictures)


@lru_cache(maxsize=1)
def _grow_sheets() -> tuple[Tensor, ...]:
    return tuple(_grow_sheet(number) for number in range(len(_RECIPES)))


def _grow_sheet(number: int) -> Tensor:
    """One sheet (3, side, side): crystals over clouds, coloured."""
    crystals, length, barbs, share, mean, deviation = _RECIPES[number]
    random = RandomFields.create(seed=0, index=np.array([number]), corruption=0, severity=0)
    ice = _standardise(gaussian_filter(_grow_crystals(random, crystals, length, barbs), 0.55))
    clouds = [
        gaussian_filter(random.normal(10 + i, 1, _SIDE, _SIDE), 2.0**i, border="reflect")
        for i in (3, 4, 5, 6)
    ]
    haze = torch.stack([_standardise(cloud) for cloud in clouds]).sum(0)
    texture = _standardise(ice + share * _standardise(haze)).clamp_(-3, 3)
    return (torch.tensor(deviation).view(3, 1, 1) * texture[0] + torch.tensor(mean).view(3, 1, 1)).clamp_(
        0, 1
    )


def _grow_crystals(random: RandomFields, count: int, length: float, barbs: int) -> Tensor:
    """Ferns (1, 1, side, side): stems in random directions with barbs that shorten towards the tip.

    The barbs of one side are lit and those of the other in shade, which gives the relief of ice.
    """
    start = random.uniform(0, count, 2)[0].mul_(_SIDE).view(-1, 1, 1, 2)
    angle, size, light = (random.uniform(i, count)[0].view(-1, 1, 1) for i in (1, 2, 3))
    size = length * (0.4 - size.log()).clamp_(max=3)
    along = torch.linspace(0, 1, barbs).view(1, -1, 1)
    out = torch.linspace(0, 1, _POINTS).view(1, 1, -1)
    turn = angle * (2 * math.pi)
    glow = (0.2 + 0.8 * light) * (1 - 0.5 * out) * torch.ones_like(along)
    ice = torch.zeros(_SIDE * _SIDE)
    for side in (1, -1):
        lean = turn + side * math.radians(28)
        barb = 0.5 * size * (1 - along) * out
        step = torch.stack([turn.cos(), turn.sin()], dim=-1) * (size * along).unsqueeze(-1)
        step = step + torch.stack([lean.cos(), lean.sin()], dim=-1) * barb.unsqueeze(-1)
        column, line = (start + step).long().remainder_(_SIDE).unbind(-1)
        shade = torch.zeros_like(ice)
        shade.scatter_reduce_(0, (line * _SIDE + column).reshape(-1), glow.reshape(-1), "amax")
        ice.add_(shade, alpha=side)
    return ice.view(1, 1, _SIDE, _SIDE)


def _standardise(field: Tensor) -> Tensor:
    return (field - field.mean()) / field.std()
