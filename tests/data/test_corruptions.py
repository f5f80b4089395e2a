"""Corruptions: invariants, seeds, exact laws and errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttvd.data.corruptions import (
    CORRUPTIONS,
    EVERY,
    EXTRA,
    GROUPS,
    corrupt,
    describe,
    frost_source,
    select_corruptions,
)
from ttvd.data.corruptions.blur import _trace_copies
from ttvd.data.corruptions.constants import FIELDS, TABLES
from ttvd.data.corruptions.random import RandomFields

FROZEN = [[1931099524, 2045345932, 227354601], [-1697866210, -1123971195, -683054260]]
DETERMINISTIC = {
    *("defocus_blur", "zoom_blur", "brightness", "contrast"),
    *("pixelate", "jpeg_compression", "gaussian_blur", "saturate"),
}


def make_images(*shape: int, seed: int = 0) -> Tensor:
    """Smooth random 8-bit images with some texture."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(*shape[:2], 6, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=shape[2:], mode="bicubic")
    return (smooth + 0.1 * torch.randn(shape, generator=generator)).clamp(0, 1).mul(255).floor().div(255)


def draw(index: list[int], seed: int = 0, corruption: int = 0, severity: int = 1) -> RandomFields:
    return RandomFields.create(seed, np.array(index), corruption, severity)


def test_names_follow_the_columns_of_the_paper() -> None:
    assert len(CORRUPTIONS) == 15
    assert CORRUPTIONS[:4] == ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur")
    assert CORRUPTIONS[7:12] == ("snow", "frost", "fog", "brightness", "contrast")
    assert EXTRA == ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    for table in TABLES.values():
        assert set(table) == set(FIELDS) == set(EVERY)
        assert all(len(row) == len(FIELDS[name]) for name, rows in table.items() for row in rows)


def test_groups_mean_the_same_everywhere() -> None:
    assert {name: len(group) for name, group in GROUPS.items()} == {"all": 15, "extra": 4, "every": 19}
    assert select_corruptions("all") == CORRUPTIONS
    assert select_corruptions(["extra", "fog", "every"]) == (
        *EXTRA,
        "fog",
        *(c for c in CORRUPTIONS if c != "fog"),
    )
    assert select_corruptions(("none", "snow"), others=("none",)) == ("none", "snow")
    for names, message in (
        ("fogg", "did you mean 'fog'"),
        ("fog,,snow", "empty"),
        ([], "empty"),
        ("none", "unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            select_corruptions(names)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("shape", "constants"),
    [((2, 3, 32, 32), "cifar"), ((2, 1, 28, 28), "cifar"), ((1, 3, 64, 72), "imagenet")],
)
def test_result_is_a_changed_8_bit_image(name: str, shape: tuple[int, ...], constants: str) -> None:
    images = make_images(*shape)
    before = images.clone()
    result = corrupt(images, name, 4, constants=constants, seed=1)  # type: ignore[arg-type]
    levels = result * 255
    assert torch.equal(images, before)
    assert result.shape == images.shape
    assert result.dtype == torch.float32
    assert (levels - levels.round()).abs().max() < 1e-4
    assert 0 <= float(result.min()) <= float(result.max()) <= 1
    assert torch.equal(result, images) == (name == "saturate" and shape[1] == 1)


@pytest.mark.parametrize("name", EVERY)
def test_image_does_not_depend_on_batch_order_or_threads(name: str) -> None:
    images = make_images(37, 3, 32, 32)
    whole = corrupt(images, name, 5, seed=7)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(3))
    assert torch.equal(corrupt(images[order], name, 5, seed=7, index=order), whole[order])
    single = [corrupt(images[i : i + 1], name, 5, seed=7, index=[i]) for i in (0, 20, 36)]
    assert torch.equal(torch.cat(single), whole[[0, 20, 36]])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(corrupt(images, name, 5, seed=7), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", EVERY)
def test_large_images_do_not_depend_on_the_batch(name: str) -> None:
    images = make_images(4, 3, 128, 128)
    whole = corrupt(images, name, 5, constants="imagenet")
    assert torch.equal(corrupt(images[3:], name, 5, constants="imagenet", index=[3]), whole[3:])


@pytest.mark.parametrize("name", EVERY)
def test_seed_and_index_matter_exactly_where_there_is_chance(name: str) -> None:
    images = make_images(1, 3, 32, 32).expand(2, -1, -1, -1)
    first = corrupt(images, name, 5, seed=0)
    assert torch.equal(first[0], first[1]) == (name in DETERMINISTIC)
    assert torch.equal(first, corrupt(images, name, 5, seed=1)) == (name in DETERMINISTIC)


def test_nothing_outside_is_touched() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    numpy_state = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    corrupt(make_images(2, 3, 32, 32), "snow")
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpy_state  # type: ignore[index]  # noqa: NPY002
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "name", ["gaussian_noise", "shot_noise", "impulse_noise", "contrast", "jpeg_compression"]
)
@pytest.mark.parametrize("constants", ["cifar", "imagenet"])
def test_damage_grows_with_severity(name: str, constants: str) -> None:
    images = make_images(8, 3, 48, 48)
    damage = [
        float((corrupt(images, name, severity, constants=constants) - images).square().mean())  # type: ignore[arg-type]
        for severity in range(1, 6)
    ]
    assert damage == sorted(damage)


@pytest.mark.parametrize(
    "name", ["defocus_blur", "motion_blur", "glass_blur", "snow", "fog", "brightness", "contrast"]
)
def test_gray_image_is_treated_like_its_colour_copy(name: str) -> None:
    gray = make_images(2, 1, 32, 32)
    colour = corrupt(gray.expand(-1, 3, -1, -1), name, 3, quantize=False)
    assert torch.allclose(corrupt(gray, name, 3, quantize=False).expand(-1, 3, -1, -1), colour, atol=2e-6)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(EVERY),
    severity=st.integers(1, 5),
    height=st.integers(8, 50),
    width=st.integers(8, 50),
    value=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_flat_images_of_any_size_stay_finite(
    name: str, severity: int, height: int, width: int, value: float
) -> None:
    for constants in TABLES:
        flat = torch.full((1, 3, height, width), value)
        result = corrupt(flat, name, severity, constants=constants, quantize=False)  # type: ignore[arg-type]
        assert result.isfinite().all()
        assert 0 <= float(result.min()) <= float(result.max()) <= 1


def test_random_bits_never_change() -> None:
    """Frozen numbers: published results stay reproducible across versions and devices."""
    assert draw([0, 5], seed=1, corruption=2, severity=3).bits(4, 3).tolist() == FROZEN


def test_uniform_fields_pass_chi_square_and_correlation() -> None:
    fields = draw([0, 1, 2, 1 << 40]).uniform(0, 200, 200).double().view(4, -1)
    other = draw([0, 1, 2, 3], seed=1).uniform(1, 200, 200).double().view(4, -1)
    for field in fields:
        counts = torch.histc(field, 100, 0, 1)
        chi = float(((counts - 400).square() / 400).sum())
        assert abs(chi - 99) < 4.5 * math.sqrt(2 * 99)
        for lag in (1, 2, 16, 200):
            assert abs(float(torch.corrcoef(torch.stack([field[lag:], field[:-lag]]))[0, 1])) < 5 / 200
    matrix = torch.corrcoef(torch.cat([fields, other])) - torch.eye(8, dtype=torch.float64)
    assert float(matrix.abs().max()) < 5 / 200


def test_normal_fields_have_normal_moments() -> None:
    field = draw(list(range(8))).normal(0, 250, 250).double()
    n = field.numel()
    assert abs(float(field.mean())) < 5 / math.sqrt(n)
    assert abs(float(field.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((field**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    assert abs(float((field.abs() > 3).double().mean()) / 0.0026998 - 1) < 0.12


@pytest.mark.parametrize(
    ("value", "severity", "constants"), [(100 / 255, 5, "cifar"), (0.3337, 1, "imagenet")]
)
def test_shot_noise_follows_the_poisson_law(value: float, severity: int, constants: str) -> None:
    photons = TABLES[constants]["shot_noise"][severity - 1][0]
    images = torch.full((16, 1, 64, 64), value)
    noisy = corrupt(images, "shot_noise", severity, constants=constants, quantize=False)  # type: ignore[arg-type]
    counts = noisy.mul(photons).round().long().view(-1)
    mean = value * photons
    low, high = int(mean - 2.5 * mean**0.5), int(mean + 2.5 * mean**0.5)
    law = torch.arange(low, high + 1, dtype=torch.float64)
    expected = torch.exp(law * math.log(mean) - mean - torch.lgamma(law + 1)) * len(counts)
    seen = torch.bincount(counts, minlength=high + 1)[low : high + 1]
    chi = float(((seen - expected).square() / expected).sum())
    assert abs(chi - len(law)) < 5 * math.sqrt(2 * len(law))


@pytest.mark.parametrize("delta", [1, 2, 4])
def test_glass_blur_copies_like_a_sweep_over_pixels(delta: int) -> None:
    height, width = 20, 26
    draws = draw([0, 1, 2])
    shifts = torch.stack([draws.integers(2 + axis, -delta, delta, height * width) for axis in (0, 1)], dim=2)
    source = _trace_copies(draws, 1, height, width, delta)
    for image in range(3):
        pixels = np.arange(height * width).reshape(height, width)
        for y in range(height - delta, delta, -1):
            for x in range(width - delta, delta, -1):
                dx, dy = shifts[image, y * width + x].tolist()
                pixels[y, x] = pixels[y + dy, x + dx]
        assert np.array_equal(source[image].numpy(), pixels.reshape(-1))


def test_brightness_keeps_hue_and_lifts_black() -> None:
    images = torch.tensor([0.2, 0.4, 0.1]).view(1, 3, 1, 1).expand(1, 3, 8, 8).clone()
    images[..., 0] = 0
    result = corrupt(images, "brightness", 4, quantize=False)
    assert torch.allclose(result[0, :, 0, 1], torch.tensor([0.3, 0.6, 0.15]))
    assert torch.allclose(result[0, :, 0, 0], torch.full((3,), 0.2))


def test_describe_and_frost_source_name_what_was_used() -> None:
    record = describe("glass_blur", 5, "cifar")
    assert (record["sigma"], record["max_delta"], record["iterations"]) == (0.4, 1, 2)
    assert "make_cifar_c.py" in str(record["source"])
    assert describe("gaussian_noise", 3, "imagenet")["scale"] == 0.18
    assert "procedural" in frost_source()


def test_pictures_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttvd.data.corruptions.frost.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"ttvd\[corruptions\]"):
        frost_source("pictures")


def test_empty_batch_and_half_precision() -> None:
    assert corrupt(torch.empty(0, 3, 32, 32), "fog").shape == (0, 3, 32, 32)
    half = make_images(1, 3, 32, 32).to(torch.bfloat16)
    assert torch.equal(corrupt(half, "gaussian_noise"), corrupt(half.float(), "gaussian_noise"))


@pytest.mark.parametrize(
    ("images", "kwargs", "error", "message"),
    [
        (torch.rand(1, 3, 32, 32), {"name": "gausian_noise"}, ValueError, "did you mean 'gaussian_noise'"),
        (torch.rand(1, 3, 32, 32), {"name": "jpeg"}, ValueError, "jpeg_compression"),
        (torch.rand(1, 3, 32, 32), {"name": "fog", "severity": 0}, ValueError, "1 to 5, got 0"),
        (torch.rand(1, 3, 32, 32), {"name": "fog", "severity": 6}, ValueError, "1 to 5, got 6"),
        (torch.rand(1, 3, 32, 32), {"name": "fog", "severity": True}, ValueError, "1 to 5"),
        (torch.rand(1, 3, 32, 32), {"name": "fog", "constants": "mnist"}, ValueError, "table of constants"),
        (torch.rand(1, 3, 32, 32), {"name": "frost", "frost": "photo"}, ValueError, "kind of frost"),
        (torch.rand(2, 3, 32, 32), {"name": "fog", "index": [1]}, ValueError, "each of the 2 images"),
        (torch.rand(2, 3, 32, 32), {"name": "fog", "index": [0, -1]}, ValueError, "0 or more"),
        (torch.rand(2, 3, 32, 32), {"name": "fog", "index": [0.5, 1.0]}, ValueError, "integers"),
        (torch.rand(1, 3, 32, 32) * 255, {"name": "fog"}, ValueError, "lie in"),
        (torch.full((1, 3, 32, 32), math.nan), {"name": "contrast"}, ValueError, "finite"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), {"name": "fog"}, TypeError, "divide bytes by 255"),
        (torch.rand(3, 32, 32), {"name": "fog"}, ValueError, "shape"),
        (torch.rand(1, 2, 32, 32), {"name": "fog"}, ValueError, "shape"),
        (torch.rand(1, 3, 32, 4), {"name": "fog"}, ValueError, "8 or more"),
    ],
)
def test_bad_input_is_refused(
    images: Tensor, kwargs: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        corrupt(images, **kwargs)  # type: ignore[arg-type]


def test_modes_of_the_thread_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ttvd.data.corruptions._PART_CPU", 3 * 32 * 32
    )  # one image a part, in several threads
    threads, images = torch.get_num_threads(), torch.rand(4, 3, 32, 32)
    torch.set_num_threads(2)
    try:
        usual = corrupt(images, "fog", seed=1)
        with torch.inference_mode():
            assert torch.equal(corrupt(images.clone(), "fog", seed=1), usual)
        assert not usual.is_inference()
    finally:
        torch.set_num_threads(threads)
