"""Augmentations against torchvision and the Python Imaging Library, which know nothing of this code."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Generator, Tensor

import ttvd.methods.shared.augmentations as augment_module
import ttvd.methods.shared.augmix as augmix_module
from ttvd.methods.shared.augmentations import augment, blur, shift_hue
from ttvd.methods.shared.augmix import augmix, autocontrast, equalize, posterize

T = pytest.importorskip("torchvision.transforms.v2.functional")
BILINEAR = Image.Resampling.BILINEAR
Padding = Literal["border", "reflection"]
ADJUSTMENTS = (
    (T.adjust_brightness, 0.6, 1.4),
    (T.adjust_contrast, 0.7, 1.3),
    (T.adjust_gamma, 0.7, 1.3),
    (T.adjust_saturation, 0.5, 1.5),
    (T.adjust_hue, -0.06, 0.06),
)


def assert_near(ours: Tensor, theirs: Tensor, atol: float) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def make_images(count: int = 6, channels: int = 3, height: int = 16, width: int = 24) -> Tensor:
    """Smooth images with some noise, grey regions, black and white; no two alike."""
    coarse = torch.rand(count, channels, 4, 4) * 1.4 - 0.2
    x = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    x += 0.1 * torch.rand_like(x)
    x[:, :, :3, :3] = 0.5
    return x.clamp(0.0, 1.0)


def to_bytes(x: Tensor) -> list[Image.Image]:
    array = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image) for image in array]


def from_bytes(images: list[Image.Image], like: Tensor) -> Tensor:
    stack = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(stack).view(len(like), *like.shape[2:], like.shape[1]).permute(0, 3, 1, 2) / 255.0


def reference_augment(x: Tensor, g: Generator, padding: Padding, degrade: bool) -> Tensor:
    """The pipeline of CoTTA's code in torchvision's operations, image by image, from the same numbers."""
    count, _, height, width = x.shape

    def draw(low: float, high: float) -> list[float]:
        return (torch.rand(count, generator=g) * (high - low) + low).tolist()

    for step in torch.randperm(5, generator=g).tolist():
        if step < 3 or x.shape[1] == 3:
            adjust, low, high = ADJUSTMENTS[step]
            x = torch.stack([adjust(image, f) for image, f in zip(x, draw(low, high), strict=True)])
    angles, downs, rights = draw(-15, 15), draw(-height / 8, height / 8), draw(-width / 8, width / 8)
    scales, coins = draw(0.9, 1.1), draw(0, 1)
    sigmas = draw(0.001, 0.5) if degrade else []
    mode, moved = {"border": "edge", "reflection": "reflect"}[padding], []
    for i, image in enumerate(x):
        image = T.pad(image, [width // 2, height // 2], padding_mode=mode)
        image = T.affine(image, angles[i], [rights[i], downs[i]], scales[i], [0.0], BILINEAR)
        image = T.gaussian_blur(image, [5, 5], [sigmas[i]] * 2) if degrade else image
        image = T.center_crop(image, [height, width])
        moved.append(T.horizontal_flip(image) if coins[i] < 0.5 else image)
    noise = 0.005 * torch.randn(x.shape, generator=g) if degrade else 0.0
    return (torch.stack(moved) + noise).clamp(0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("padding", "degrade"), [("border", True), ("border", False), ("reflection", False)])
def test_augment_is_cottas_pipeline(channels: int, padding: Padding, degrade: bool) -> None:
    x = make_images(8, channels)
    for g in map(Generator().manual_seed, range(5)):
        theirs = reference_augment(x, g.clone_state(), padding, degrade)
        assert_near(augment(x, g, padding=padding, degrade=degrade), theirs, 2e-4)


@given(shift=st.floats(-0.5, 0.5), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_hue_is_torchvisions(shift: float, seed: int) -> None:
    x = torch.rand(2, 3, 6, 6, generator=Generator().manual_seed(seed))
    x = torch.cat([x, (x * 2).round() / 2])  # few values: ties between channels, greys, black and white
    assert_near(shift_hue(x, torch.full((4, 1, 1, 1), shift)), T.adjust_hue(x, shift), 1e-5)


@pytest.mark.parametrize("sigma", [0.001, 0.2, 0.5, 3.0])
def test_blur_is_torchvisions_inside(sigma: float) -> None:
    x = make_images(2)
    ours = blur(x, torch.tensor([sigma, 1.0]).view(2, 1, 1, 1))
    for i, own in enumerate((sigma, 1.0)):
        assert_near(ours[i], T.gaussian_blur(x[i], [5, 5], [own, own])[:, 2:-2, 2:-2], 1e-6)


def test_motion_is_within_its_ranges_and_fills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that hold their own coordinates tell where each pixel came from."""
    monkeypatch.setattr(augment_module, "jitter", lambda x, generator: x)
    height, width = 32, 64
    rows, columns = torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2
    here = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).double()
    x = (here / width + 0.5).expand(400, -1, -1, -1)
    there = (augment(x, Generator().manual_seed(0), degrade=False) - 0.5) * width
    centre = (..., slice(12, 20), slice(24, 40))  # nothing there came from beyond the border
    points = torch.cat([here[centre], torch.ones(1, 8, 16, dtype=torch.float64)]).flatten(1)
    affine = there[centre].flatten(2) @ torch.linalg.pinv(points)
    matrix, shift = affine[..., :2], affine[..., 2:]
    assert (matrix @ points[:2] + shift - there[centre].flatten(2)).abs().max() < 1e-4
    mirrored, scale = torch.det(matrix) < 0, torch.det(matrix).abs().rsqrt()
    turn = torch.where(mirrored[:, None, None], matrix * torch.tensor([1.0, -1.0]), matrix)
    angle = torch.rad2deg(torch.atan2(turn[:, 1, 0], turn[:, 0, 0]))
    move = torch.linalg.solve(turn, shift)[..., 0]
    down, right = move[:, 0] / height, move[:, 1] / width
    for value, middle, reach in ((angle, 0, 15), (scale, 1, 0.1), (down, 0, 1 / 8), (right, 0, 1 / 8)):
        assert -1.001 < (value - middle).min() / reach < -0.95
        assert 0.95 < (value - middle).max() / reach < 1.001
    assert 0.4 < mirrored.double().mean() < 0.6


def test_noise_has_its_size_and_is_left_out_on_request() -> None:
    flat = torch.full((64, 1, 16, 16), 0.5)
    noisy = augment(flat, Generator().manual_seed(0))
    assert noisy.std((-2, -1)).mean().item() == pytest.approx(0.005, rel=0.02)
    assert augment(flat, Generator().manual_seed(0), degrade=False).std((-2, -1)).max() < 1e-6


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("make", [augment, lambda x, g: augmix(x, 2, g)], ids=["augment", "augmix"])
def test_draws_are_each_images_own_and_the_generators(make: Callable[..., Tensor], channels: int) -> None:
    x = make_images(1, channels).expand(12, -1, -1, -1)
    before, state, g = x.clone(), torch.get_rng_state(), Generator().manual_seed(3)
    first, second = make(x, g), make(x, g)
    assert torch.equal(first, make(x, Generator().manual_seed(3)))
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    everything = torch.cat([first, second]).flatten(1)
    assert ((everything >= 0) & (everything <= 1)).all()  # no comparison holds for NaN
    assert torch.nn.functional.pdist(everything).min() > 1e-3  # repetitions would be equal


@pytest.mark.parametrize("channels", [1, 3])
def test_histogram_operations_are_pils(channels: int) -> None:
    x = make_images(6, channels, 32, 32)
    x[1], x[2] = 0.4 + 0.2 * x[1], 128 / 255  # low contrast; one value only
    x[3] = torch.arange(256).view(1, 8, 32).repeat(1, 4, 1) / 255
    x = from_bytes(images := to_bytes(x), x)
    assert_near(posterize(x), from_bytes([ImageOps.posterize(i, 4) for i in images], x), 1e-6)
    assert_near(equalize(x), from_bytes([ImageOps.equalize(i) for i in images], x), 1e-6)
    assert_near(autocontrast(x), from_bytes([ImageOps.autocontrast(i) for i in images], x), 1.01 / 255)
    assert_near(autocontrast(x), T.autocontrast(x), 1e-6)  # no rounding to bytes


def test_rounding_of_a_crop_costs_no_posterize_step() -> None:
    x = torch.randint(16, (8, 1, 32, 32)) * 16 / 255
    base = augmix_module._crop(x, Generator().manual_seed(0))
    theirs = from_bytes([ImageOps.posterize(image, 4) for image in to_bytes(base)], base)
    assert_near(posterize(base), theirs, 1e-6)


# Shears and translations: the pixel at (x, y) from the centre comes from (x + b y + c, y + d x + f), at level 1.
SHIFTS = {5: (0.3, 0, 0, 0), 6: (0, 0, 0.3, 0), 7: (0, 24 / 3, 0, 0), 8: (0, 0, 0, 16 / 3)}


@pytest.mark.parametrize("level", [-0.1, -0.04, 0.07, 0.1])
@pytest.mark.parametrize("choice", [4, 5, 6, 7, 8])
def test_geometric_operations_are_pils(choice: int, level: float) -> None:
    x = make_images(1, 1)
    number, size = torch.tensor([choice]), torch.tensor([level])
    ours = augmix_module._operate(x, number, size.abs(), size.sign())[0, 0]
    image = Image.fromarray(x[0, 0].numpy()).rotate(-30 * level * (choice == 4), BILINEAR)
    if choice > 4:
        b, c, d, f = (level * part for part in SHIFTS[choice])
        matrix = (1, b, c - b * 16 / 2, d, 1, f - d * 24 / 2)
        image = image.transform(image.size, Image.Transform.AFFINE, matrix, BILINEAR)
    assert_near(ours[2:-2, 2:-2], torch.from_numpy(np.array(image))[2:-2, 2:-2], 1e-4)
    assert (ours - x[0, 0]).abs().max() > 1e-3


def test_solarize_is_torchvisions() -> None:
    x, level = make_images(), torch.linspace(0.01, 0.1, 6)
    ours = augmix_module._operate(x, torch.full((6,), 3), level, -torch.ones(6))
    assert_near(ours, torch.stack([T.solarize(x[i], 1 - level[i]) for i in range(6)]), 1e-6)
    assert (ours != x).any((1, 2, 3)).all()


def test_chains_have_one_to_three_mild_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(x: Tensor, choice: Tensor, level: Tensor, sign: Tensor) -> Tensor:
        steps.append((choice, level, sign))
        return x

    monkeypatch.setattr(augmix_module, "_operate", record)
    augmix(torch.rand(100, 1, 8, 8), 10, Generator().manual_seed(0))
    choices, levels, signs = (torch.stack(part) for part in zip(*steps, strict=True))
    assert choices.shape == (3, 3000)
    depth = (choices >= 0).sum(0)
    assert ((choices >= 0) == (torch.arange(3)[:, None] < depth)).all()
    assert_near(depth.bincount() / 3000, torch.tensor([0, 1 / 3, 1 / 3, 1 / 3]), 0.03)
    assert_near(choices[choices >= 0].bincount() / depth.sum(), torch.full((9,), 1 / 9), 0.02)
    assert 0.01 <= levels.min() < 0.011
    assert 0.099 < levels.max() <= 0.1 + 1e-7
    assert signs.mean().abs() < 0.05


def test_views_mix_three_chains_by_weights_that_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Black images whose i-th chain lights up the i-th channel show the weights."""
    one_hot = torch.eye(3).repeat_interleave(4000, 0).view(12000, 3, 1, 1)
    monkeypatch.setattr(augmix_module, "_run_chains", lambda x, generator: one_hot)
    share = augmix(torch.zeros(40, 3, 1, 1), 100, Generator().manual_seed(0)).flatten(1)
    quarters, strength = torch.linspace(0, 1, 5), share.sum(1, keepdim=True)
    weights = share / strength
    assert_near(strength.quantile(quarters), quarters, 0.03)
    assert_near(weights.mean(0), torch.full((3,), 1 / 3), 0.02)
    assert_near(weights.var(0), torch.full((3,), 1 / 18), 0.005)  # Dirichlet(1, 1, 1)


def test_idle_chains_leave_whole_pixel_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that did not sum to one would change the brightness."""
    monkeypatch.setattr(augmix_module, "_run_chains", lambda x, generator: x)
    x = make_images(2)
    views = augmix(x, 700, Generator().manual_seed(0)).unflatten(0, (2, 700))
    for image, mine in zip(x, views, strict=True):
        padded = T.pad(torch.stack([image, T.horizontal_flip(image)]), [3, 2])
        crops = padded.unfold(2, 16, 1).unfold(3, 24, 1).permute(0, 2, 3, 1, 4, 5).reshape(70, -1)
        distance, nearest = (mine.flatten(1)[:, None] - crops).abs().amax(-1).min(1)
        assert distance.max() < 1e-4
        assert len(nearest.unique()) == 70  # every crop and its mirror image occur


@pytest.mark.parametrize("channels", [1, 3])
def test_views_resemble_their_own_image(channels: int) -> None:
    x = make_images(5, channels)
    strong = augment(x.repeat_interleave(32, 0), Generator().manual_seed(0))
    for views in (augmix(x, 32, Generator().manual_seed(0)), strong):
        assert views.shape == (160, channels, 16, 24)
        either = torch.cat([x, x.flip(-1), views]).flatten(1)
        likeness = torch.corrcoef(either)[10:, :10].unflatten(1, (2, 5)).amax(1)
        own = likeness.argmax(1).view(5, 32) == torch.arange(5)[:, None]
        assert own.double().mean() > 0.6  # by chance 0.2
