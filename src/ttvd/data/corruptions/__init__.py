"""The 15 corruptions of CIFAR-10-C and ImageNet-C and their 4 extra ones, batched and seeded for each image.

Example:
    >>> import torch
    >>> from ttvd.data.corruptions import corrupt
    >>> images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> noisy = corrupt(images, "gaussian_noise", severity=5, seed=1)
    >>> bool((corrupt(images[2:3], "gaussian_noise", severity=5, seed=1, index=[2]) == noisy[2:3]).all())
    True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor

from ttvd.data.corruptions import blur, digital, noise, spatter, weather
from ttvd.data.corruptions.checks import check_choice, check_images, check_index, check_range, check_severity
from ttvd.data.corruptions.constants import FIELDS, SOURCES, TABLES, Row
from ttvd.data.corruptions.filters import round_down
from ttvd.data.corruptions.frost import Source, frost_source, lay_frost
from ttvd.data.corruptions.random import Draws
from ttvd.data.corruptions.threads import run_parts

Corruption = Callable[[Tensor, Row, Draws], Tensor]

_FUNCTIONS: Final[Mapping[str, Corruption]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": lay_frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": spatter.spatter,
    "saturate": digital.saturate,
}
"""Every corruption, in the order of the columns of the published tables; the order numbers the random streams."""

CORRUPTIONS: Final = tuple(_FUNCTIONS)[:15]
EXTRA: Final = tuple(_FUNCTIONS)[15:]


def corrupt(
    images: Tensor,
    name: str,
    severity: int = 5,
    *,
    constants: Literal["cifar", "imagenet"] = "cifar",
    seed: int = 0,
    index: Sequence[int] | Tensor | None = None,
    frost: Source = "procedural",
    quantize: bool = True,
) -> Tensor:
    """Corrupt images.

    Args:
        images: Float images (b, c, h, w) in [0, 1] with 1 or 3 channels; not changed.
        name: One of `CORRUPTIONS` or `EXTRA`.
        severity: 1 (mild) to 5.
        constants: The published table: "cifar" for small images, "imagenet" for 224 x 224.
        seed: Seed of the random fields.
        index: Number of each image in its data set, 0..b-1 when None. What happens to an image depends on its pixels,
            its index, the seed, the corruption and the severity only.
        frost: Sheets of the frost: "procedural", or "pictures" (published ones, from the extra `corruptions`).
        quantize: Round down to 256 levels, as the released files are; False keeps the float values.

    Returns:
        float32 images in [0, 1] of the same shape, on the same device.
    """
    check_images(images)
    check_choice(frost, ("procedural", "pictures"), "kind of frost")
    row = _find_row(name, severity, constants)
    function = partial(lay_frost, source=frost) if name == "frost" else _FUNCTIONS[name]
    number = list(_FUNCTIONS).index(name)
    draws = Draws.create(seed, check_index(index, len(images)), number, severity, images.device)
    out = torch.empty(images.shape, dtype=torch.float32, device=images.device)

    def work(part: slice) -> None:
        with torch.autocast(images.device.type, enabled=False):
            clean = images[part].detach().float().contiguous()
            check_range(clean)
            result = function(clean, row, draws[part]).clamp(0, 1)
            out[part] = round_down(result) if quantize else result

    run_parts(work, len(images), images.shape[1:].numel(), images.device)
    return out


def describe(
    name: str, severity: int = 5, constants: Literal["cifar", "imagenet"] = "cifar"
) -> dict[str, str | int | float]:
    """Name the constants behind a corruption, for records and manifests.

    Example:
        >>> describe("shot_noise", 5)["photons"]
        50
    """
    row = _find_row(name, severity, constants)
    record: dict[str, str | int | float] = {"corruption": name, "severity": severity, "constants": constants}
    return {**record, "source": SOURCES[constants], **dict(zip(FIELDS[name], row, strict=True))}


def _find_row(name: str, severity: int, constants: str) -> Row:
    check_choice(name, (*CORRUPTIONS, *EXTRA), "corruption")
    check_choice(constants, tuple(TABLES), "table of constants")
    check_severity(severity)
    return TABLES[constants][name][severity - 1]


__all__ = ["CORRUPTIONS", "EXTRA", "corrupt", "describe", "frost_source"]
