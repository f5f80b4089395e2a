"""The 15 corruptions of CIFAR-10-C and ImageNet-C and the 4 extra ones, batched and seeded for each image.

Example:
    >>> import torch
    >>> from ttvd.data.corruptions import corrupt
    >>> images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> noisy = corrupt(images, "gaussian_noise", severity=5, seed=1)
    >>> bool((corrupt(images[2:3], "gaussian_noise", severity=5, seed=1, index=[2]) == noisy[2:3]).all())
    True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttvd.data.checks import check_choice, check_severity
from ttvd.data.corruptions import blur, digital, noise, weather
from ttvd.data.corruptions.constants import FIELDS, SOURCES, TABLES, Row
from ttvd.data.corruptions.filters import round_down
from ttvd.data.corruptions.frost import FrostSheets, apply_frost, frost_source
from ttvd.data.corruptions.random import RandomFields

Corruption = Callable[[Tensor, Row, RandomFields], Tensor]

_FUNCTIONS: Final[Mapping[str, Corruption]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": apply_frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}
"""Every corruption, in the order of the columns of the published tables. The order numbers the random streams."""

CORRUPTIONS: Final = tuple(_FUNCTIONS)[:15]
EXTRA: Final = tuple(_FUNCTIONS)[15:]
EVERY: Final = tuple(_FUNCTIONS)
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {"all": CORRUPTIONS, "extra": EXTRA, "every": EVERY}
"""Names for several corruptions: "all" is the 15 of the published tables, "extra" the other 4, "every" all 19."""

_PART_CPU = 1 << 19
_PART_DEVICE = 1 << 25
"""Values that are worked on at a time: about the cache of a core, or a bound of the memory of a device."""


def select_corruptions(names: str | Iterable[str], *, others: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the corruptions that a user named, each once.

    Args:
        names: Names of corruptions and of `GROUPS`, as a sequence or as a text with commas.
        others: Further names that are accepted, such as one for clean images.

    Raises:
        ValueError: A name is unknown; the error suggests the nearest one.

    Example:
        >>> select_corruptions("fog, extra")
        ('fog', 'speckle_noise', 'gaussian_blur', 'spatter', 'saturate')
        >>> len(select_corruptions("all")), len(select_corruptions("every"))
        (15, 19)
    """
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if not given or not all(given):
        raise ValueError(
            f"expected names of corruptions, such as 'fog,snow' or 'all', got {names!r}: a name is empty"
        )
    for name in given:
        check_choice(name, (*EVERY, *others, *GROUPS), "corruption")
    return tuple(dict.fromkeys(name for word in given for name in GROUPS.get(word, (word,))))


def corrupt(
    images: Tensor,
    name: str,
    severity: int = 5,
    *,
    constants: Literal["cifar", "imagenet"] = "cifar",
    seed: int = 0,
    index: Sequence[int] | Tensor | None = None,
    frost: FrostSheets = "procedural",
    quantize: bool = True,
) -> Tensor:
    """Corrupt images.

    The result for an image depends on its pixels, its index, the seed, the corruption and the severity, and on nothing
    else.

    Args:
        images: Float images (b, c, h, w) in [0, 1] with 1 or 3 channels; they are not changed.
        name: One of the 19 names in `EVERY`.
        severity: Severity from 1 (mild) to 5.
        constants: Published table of constants: "cifar" for small images, "imagenet" for 224 x 224.
        seed: Seed of the random fields.
        index: Number of each image in its data set; 0 .. b - 1 by default.
        frost: Sheets of the frost: "procedural", or "pictures" (the published ones, from the extra `corruptions`).
        quantize: Round down to 256 levels, as in the released files; False keeps the float values.

    Returns:
        float32 images in [0, 1] of the same shape, on the same device.
    """
    _check_images(images)
    check_choice(frost, ("procedural", "pictures"), "kind of frost")
    row = _find_row(name, severity, constants)
    function = partial(apply_frost, sheets=frost) if name == "frost" else _FUNCTIONS[name]
    number = EVERY.index(name)
    random = RandomFields.create(seed, _check_index(index, len(images)), number, severity, images.device)
    with torch.inference_mode(False):  # threads write into it, and the mode belongs to the thread
        out = torch.empty(images.shape, dtype=torch.float32, device=images.device)

    def work(part: slice) -> None:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            clean = images[part].detach().float().contiguous()
            _check_range(clean)
            result = function(clean, row, random[part]).clamp(0, 1)
            out[part] = round_down(result) if quantize else result

    _run_parts(work, len(images), images.shape[1:].numel(), images.device)
    return out


def describe(
    name: str, severity: int = 5, constants: Literal["cifar", "imagenet"] = "cifar"
) -> dict[str, str | int | float]:
    """Return the constants of a corruption by name, for records and manifests.

    Example:
        >>> describe("shot_noise", 5)["photons"]
        50
    """
    row = _find_row(name, severity, constants)
    record: dict[str, str | int | float] = {"corruption": name, "severity": severity, "constants": constants}
    return {**record, "source": SOURCES[constants], **dict(zip(FIELDS[name], row, strict=True))}


def _find_row(name: str, severity: int, constants: str) -> Row:
    check_choice(name, EVERY, "corruption")
    check_choice(constants, tuple(TABLES), "table of constants")
    check_severity(severity)
    return TABLES[constants][name][severity - 1]


def _check_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images must be a floating point tensor in [0, 1], got {kind}; divide bytes by 255")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        shape = tuple(images.shape)
        raise ValueError(f"images must have shape (b, 1 or 3, h, w) with h and w of 8 or more, got {shape}")


def _check_range(images: Tensor) -> None:
    low, high = (float(bound) for bound in torch.aminmax(images))
    if not (low >= 0 and high <= 1):  # a NaN fails every comparison
        raise ValueError(f"images must be finite and lie in [0, 1], got values from {low:g} to {high:g}")


def _check_index(index: Sequence[int] | Tensor | None, length: int) -> npt.NDArray[np.int64]:
    if index is None:
        return np.arange(length, dtype=np.int64)
    numbers = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    if numbers.shape != (length,):
        raise ValueError(
            f"index must hold one number for each of the {length} images, got shape {numbers.shape}"
        )
    if length and (not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < 0):
        raise ValueError(f"index must hold integers of 0 or more, got {numbers[:3].tolist()}...")
    return numbers.astype(np.int64)


def _run_parts(work: Callable[[slice], None], length: int, values: int, device: torch.device) -> None:
    """Call `work` for consecutive parts of a batch of `length` images with `values` values each.

    On the CPU a part fits into the cache of a core. Parts are spread over as many threads as torch uses, each on one
    core: no operation waits for a barrier, and the order of additions, so every bit of the result, does not depend on
    the number of threads. On a device the parts bound the memory and run in turn.
    """
    size = max(1, (_PART_CPU if device.type == "cpu" else _PART_DEVICE) // values)
    parts = [slice(start, start + size) for start in range(0, length, size)]
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        for part in parts:
            work(part)
        return
    workers = max(1, min(threads, len(parts)))
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, parts))
    finally:
        # The setting belongs to the thread, but it also becomes the default of threads that start later.
        torch.set_num_threads(threads)


__all__ = [
    "CORRUPTIONS",
    "EVERY",
    "EXTRA",
    "GROUPS",
    "corrupt",
    "describe",
    "frost_source",
    "select_corruptions",
]
