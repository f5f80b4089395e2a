"""Corruptions against an independent implementation (imagecorruptions-imaug, ImageNet constants)."""

import math
import warnings
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from ttvd.data.corruptions import blur, corrupt, frost_source, weather
from ttvd.data.corruptions.digital import _sample
from ttvd.data.corruptions.random import RandomFields

pytest.importorskip("imagecorruptions", exc_type=ImportError)

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import imagecorruptions
    module: ModuleType = imagecorruptions
    return module


@pytest.fixture(scope="module")
def photo() -> Bytes:
    from sklearn.datasets import load_sample_image

    pixels: Bytes = load_sample_image("china.jpg")[100:324, 200:424].copy()
    return pixels


def run_reference(reference: ModuleType, image: Bytes, name: str, severity: int) -> npt.NDArray[np.int64]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result: Bytes = reference.corrupt(image, severity=severity, corruption_name=name)
    return result.astype(np.int64)


def to_tensor(image: Bytes) -> Tensor:
    return torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0).float().div(255)


def to_bytes(images: Tensor) -> npt.NDArray[np.int64]:
    return images.mul(255).round().long().permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("brightness", 0.04),
        ("contrast", 0.001),
        ("saturate", 0.2),
        ("defocus_blur", 0.05),
        ("gaussian_blur", 0.002),
        ("zoom_blur", 0.002),
        ("pixelate", 0.0),
        ("jpeg_compression", 0.0),
    ],
)
def test_deterministic_ones_agree_within_one_level(
    reference: ModuleType, photo: Bytes, name: str, share: float, severity: int
) -> None:
    """The share of values that differ is due to truncation of values that are whole up to rounding errors."""
    for image in (photo, photo[:64, 40:104].copy()):
        ours = to_bytes(corrupt(to_tensor(image), name, severity, constants="imagenet"))[0]
        difference = np.abs(ours - run_reference(reference, image, name, severity))
        assert difference.max() <= 1
        assert (difference > 0).mean() <= share


@pytest.mark.parametrize("severity", [1, 5])
def test_motion_blur_agrees_for_the_same_angle(
    reference: ModuleType, photo: Bytes, monkeypatch: pytest.MonkeyPatch, severity: int
) -> None:
    index = np.array([11])
    ours = to_bytes(
        corrupt(to_tensor(photo), "motion_blur", severity, constants="imagenet", seed=2, index=[11])
    )[0]
    angle = float(RandomFields.create(2, index, 5, severity).uniform(0, 1)) * 90 - 45
    monkeypatch.setattr(np.random, "uniform", lambda *args: angle)
    difference = np.abs(ours - run_reference(reference, photo, "motion_blur", severity))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"])
@pytest.mark.parametrize("severity", [1, 5])
def test_noise_has_the_same_histogram(reference: ModuleType, name: str, severity: int) -> None:
    flat = np.full((96, 96, 3), 120, dtype=np.uint8)
    ours = to_bytes(corrupt(to_tensor(flat).expand(8, -1, -1, -1), name, severity, constants="imagenet"))
    theirs = np.stack([run_reference(reference, flat, name, severity) for _ in range(8)])
    spread = theirs.std() / math.sqrt(theirs.size)
    assert abs(ours.mean() - theirs.mean()) < 7 * spread
    assert abs(ours.std() / theirs.std() - 1) < 0.02
    first, second = (
        np.bincount(x.reshape(-1), minlength=256).reshape(-1, 8).sum(1) / x.size for x in (ours, theirs)
    )
    assert np.abs(first - second).sum() / 2 < 0.015


def radial_power(images: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Mean power in four rings of the spectrum of the brightness, without the mean."""
    gray = images.mean(axis=-1)
    power = np.abs(np.fft.fft2(gray - gray.mean(axis=(1, 2), keepdims=True))) ** 2
    frequency = np.fft.fftfreq(gray.shape[1])
    radius = np.hypot(frequency[:, None], frequency)
    bounds = (0, 0.03, 0.1, 0.25, 0.75)
    rings = [(radius > low) & (radius <= high) for low, high in pairwise(bounds)]
    return np.array([power[:, ring].mean() for ring in rings])


@pytest.mark.parametrize(
    ("name", "severity", "tolerance"),
    [
        *(("glass_blur", 3, 0.06), ("glass_blur", 5, 0.06), ("snow", 2, 0.25), ("snow", 5, 0.25)),
        *(("fog", 2, 0.35), ("fog", 5, 0.35), ("spatter", 2, 0.35), ("spatter", 3, 0.3), ("spatter", 5, 0.2)),
    ],
)
def test_random_textures_have_the_same_mean_and_spectrum(
    reference: ModuleType, photo: Bytes, name: str, severity: int, tolerance: float
) -> None:
    image = photo[:128, :128].copy()
    count = {"glass_blur": 4, "fog": 96}.get(name, 24)
    np.random.seed(0)  # noqa: NPY002
    ours = to_bytes(corrupt(to_tensor(image).expand(count, -1, -1, -1), name, severity, constants="imagenet"))
    theirs = np.stack([run_reference(reference, image, name, severity) for _ in range(count)])
    first, second = ours.mean(axis=(1, 2, 3)), theirs.mean(axis=(1, 2, 3))
    error = math.hypot(first.std(), second.std()) / math.sqrt(count)
    assert abs(first.mean() - second.mean()) < 4 * error + 0.3
    assert np.abs(np.log(radial_power(ours) / radial_power(theirs))).max() < math.log1p(tolerance)


@pytest.mark.parametrize(("source", "tolerance"), [("pictures", 12), ("procedural", 20)])
def test_frost_is_as_bright_and_as_rough(reference: ModuleType, source: Any, tolerance: float) -> None:
    black = np.zeros((224, 224, 3), dtype=np.uint8)
    np.random.seed(0)  # noqa: NPY002
    images = to_tensor(black).expand(48, -1, -1, -1)
    ours = to_bytes(corrupt(images, "frost", 5, constants="imagenet", frost=source))
    theirs = np.stack([run_reference(reference, black, "frost", 5) for _ in range(48)])
    assert np.abs(ours.mean(axis=(0, 1, 2)) - theirs.mean(axis=(0, 1, 2))).max() < tolerance
    assert 0.6 < ours.std(axis=(1, 2)).mean() / theirs.std(axis=(1, 2)).mean() < 1.5
    assert source in frost_source(source)


@pytest.mark.parametrize("repeat_edge", [True, False])
def test_sampling_beyond_the_border_agrees_with_scipy(repeat_edge: bool) -> None:
    from scipy.ndimage import map_coordinates

    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 1, 12, 17, generator=generator)
    position = torch.rand(1, 9, 9, 2, generator=generator) * 30 - 8
    ours = _sample(image, position, repeat_edge=repeat_edge)[0, 0].numpy()
    mode = "reflect" if repeat_edge else "mirror"
    x, y = position[0].unbind(-1)
    theirs = map_coordinates(image[0, 0].numpy(), [y.numpy(), x.numpy()], order=1, mode=mode)
    assert np.abs(ours - theirs).max() < 1e-5


def test_elastic_transform_moves_pixels_as_far_as_the_constants_say() -> None:
    """The reference has constants of its own here, so a ramp measures the displacements themselves."""
    side = 224
    ramp = torch.linspace(0, 1, side).expand(16, 1, side, side).contiguous()
    inner = (slice(None), slice(None), slice(60, -60), slice(60, -60))
    shift = (corrupt(ramp, "elastic_transform", 5, constants="imagenet", quantize=False) - ramp)[inner] * (
        side - 1
    )
    smooth = shift - torch.nn.functional.avg_pool2d(shift, 25, stride=1, padding=12)
    sigma, amplitude = 2.44, 0.12 * 244
    expected = amplitude * math.sqrt(1 / 3) / (2 * math.sqrt(math.pi) * sigma)
    measured = float(smooth[..., 12:-12, 12:-12].std())
    assert abs(measured / expected - 1) < 0.1


def test_fog_uses_the_same_fractal_for_the_same_noise(
    reference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, decay = 32, 1.75
    draws = RandomFields.create(0, np.array([4]), 9, 5)
    noise = draws.uniform(0, size, size)[0].mul(2).sub(1).double().numpy()
    step = [size, 0]

    def replay(low: float, high: float, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
        full, half = step[0], step[0] // 2
        corner = [(half, half), (0, half), (half, 0)][step[1]]
        step[:] = [full, step[1] + 1] if step[1] < 2 else [half, 0]
        return high * noise[corner[0] :: full, corner[1] :: full]

    monkeypatch.setattr(np.random, "uniform", replay)
    theirs = reference.corruptions.plasma_fractal(size, decay)
    assert np.abs(weather._grow_plasma(draws, size, decay)[0].numpy() - theirs).max() < 1e-5


@pytest.mark.parametrize(("radius", "alias"), [(3, 0.1), (6, 0.5), (10, 0.5), (0.4, 0.5), (1.5, 0.1)])
def test_disk_agrees_with_the_reference(reference: ModuleType, radius: float, alias: float) -> None:
    theirs = reference.corruptions.disk(radius, alias)
    ours = blur._disk(radius, alias).numpy()
    margin = (len(theirs) - len(ours)) // 2
    assert np.abs(np.pad(ours, margin) - theirs).max() < 1e-7
