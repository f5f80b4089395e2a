"""The temperature of the known rotations: loops over views, and streams whose temperature is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from tests.helpers.methods import WAITING, Watch
from tests.helpers.methods import draw_rotations as draw
from tests.helpers.methods import loop_temperature as loop
from ttvd.methods.ttvd.online_temperature import OnlineTemperature
from ttvd.nn.norms import following_stream, settled_stream

BOUNDED = settings(deadline=None, derandomize=True, max_examples=40)
SEEDS = st.integers(0, 2**16)
WIDE = torch.zeros((), dtype=torch.float64)


def follow(stream: list[Tensor], like: Tensor = WIDE) -> OnlineTemperature:
    online_temperature = OnlineTemperature(like)
    with following_stream(online_temperature):
        for rotations in stream:
            online_temperature.update(rotations)
    return online_temperature


def read(online_temperature: OnlineTemperature) -> tuple[float, float]:
    return float(online_temperature.sharpness), float(online_temperature.information)


@BOUNDED
@given(
    seed=SEEDS,
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    rotations=st.integers(2, 4),
    alone=st.booleans(),
    scale=st.sampled_from([0.3, 2.0, 6.0]),
)
def test_loops_say_the_same(seed: int, sizes: list[int], rotations: int, alone: bool, scale: float) -> None:
    """The upright view alone too, as in a single diagram."""
    views = 1 if alone else rotations
    stream = [draw(seed + n, views, size, rotations, scale=scale) for n, size in enumerate(sizes)]
    online_temperature = follow(stream)
    assert read(online_temperature) == pytest.approx(loop(stream), rel=1e-10)
    assert float(online_temperature.factor()) == pytest.approx(loop(stream)[0] ** -0.7, rel=1e-10)


@pytest.mark.parametrize("size", [511, 512, 700])
def test_memory_ends_at_512_images(size: int) -> None:
    stream = [draw(0, 4, 300, 4), draw(1, 4, 300, 4), draw(2, 4, size, 4, scale=0.5)]
    assert read(follow(stream)) == pytest.approx(loop(stream), rel=1e-9)
    certain = OnlineTemperature(WIDE)
    certain.information.fill_(1e6)
    with following_stream(certain):
        certain.update(stream[2])
    left = loop(stream[2:])[1] + (1e6 - 64) * max(0, 512 - size) / 512
    assert float(certain.information) == pytest.approx(left, rel=1e-9)


def draw_rotations(sharpness: float, batches: int, size: int = 64, rotations: int = 4) -> Iterator[Tensor]:
    """Batches in which rotation r of l is the true one with the probability softmax(sharpness * l)_r."""
    generator = torch.Generator().manual_seed(int(100 * sharpness) + rotations)
    views = torch.arange(rotations)[:, None]
    for seed in range(batches):
        logs = draw(int(1e5 * sharpness) + seed, rotations, size, rotations, scale=3.0)
        chances = (sharpness * logs).softmax(-1).flatten(0, 1)
        true = torch.multinomial(chances, 1, generator=generator).view(rotations, size)
        # Numbered anew, so that view a has the a-th.
        turned = (torch.arange(rotations) + (true - views)[..., None]) % rotations
        yield logs.gather(-1, turned)


@pytest.mark.parametrize("rotations", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sharpness", [0.5, 0.8, 1.0, 1.3])
def test_the_temperature_of_a_stream_is_found(sharpness: float, dtype: torch.dtype, rotations: int) -> None:
    """After 3,000 images and from then on, by the last 512; on average without bias. 1 is never left by much."""
    online_temperature, found = OnlineTemperature(torch.zeros((), dtype=dtype)), []
    with following_stream(online_temperature):
        for logs in draw_rotations(sharpness, 450, rotations=rotations):
            online_temperature.update(logs.to(dtype))
            found.append(float(online_temperature.sharpness))
    late = found[50:]
    assert sum(late) / len(late) == pytest.approx(sharpness, abs=0.025)
    assert max(abs(value - sharpness) for value in (found if sharpness == 1 else late)) < 0.6 / rotations


@pytest.mark.parametrize("size", [1, 3, 64, 600])
def test_a_batch_that_comes_again_and_again_ends_at_the_least_cross_entropy(size: int) -> None:
    """Whatever its size: a state of one image is that of 512 copies of it."""
    logs = draw(7, 4, size, 4, scale=1.2)
    logs[:, :, :] = (logs + 0.8 * torch.eye(4)[:, None]).log_softmax(-1)

    def cost(s: float) -> float:
        return -float((s * logs).log_softmax(-1).diagonal(dim1=0, dim2=2).mean())

    best = minimize_scalar(cost, bounds=(0.25, 2.0), method="bounded", options={"xatol": 1e-9}).x
    assert 0.3 < best < 1.9
    assert abs(best - 1) > 0.03, "it was there from the start: this shows nothing"
    assert float(follow([logs] * (40 + 10000 // size)).sharpness) == pytest.approx(best, abs=1e-5)


def test_it_never_leaves_its_bounds() -> None:
    right = (5 * torch.eye(4)[:, None]).expand(4, 64, 4).log_softmax(-1)
    sure, wrong = follow([right] * 400), follow([right.roll(1, 2)] * 40)
    assert float(sure.sharpness) == pytest.approx(2.0, abs=0.02)
    assert float(wrong.sharpness) == 0.25
    assert float(wrong.factor()) == pytest.approx(4**0.7)
    for gap in (12.0, 1e4):
        for turn in (0, 1):
            logs = (gap * torch.eye(4)[:, None]).expand(4, 8, 4).log_softmax(-1).roll(turn, 2)
            assert 0.25 <= float(follow([logs] * 100).sharpness) <= 2.0


@BOUNDED
@given(seed=SEEDS, size=st.integers(1, 9), rotations=st.integers(2, 4))
def test_neither_the_order_of_images_nor_the_names_of_rotations_matter(
    seed: int, size: int, rotations: int
) -> None:
    logs, generator = draw(seed, rotations, size, rotations), torch.Generator().manual_seed(seed)
    images, names = (torch.randperm(n, generator=generator) for n in (size, rotations))
    first, wanted = (
        draw(seed + 1, rotations, 3, rotations),
        read(follow([draw(seed + 1, rotations, 3, rotations), logs])),
    )
    assert read(follow([first, logs[:, images]])) == pytest.approx(wanted, rel=1e-9)
    assert read(follow([first[names][:, :, names], logs[names][:, :, names]])) == pytest.approx(
        wanted, rel=1e-9
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(1, 2, 1), (1, 2, 3), (1, 2), ...], ids=["known", "other", "view", "all"])
def test_what_is_not_finite_changes_nothing(where: Any, value: float) -> None:
    online_temperature, logs = follow([draw(0, 4, 6, 4)]), draw(1, 4, 6, 4)
    before = read(online_temperature)
    logs[where] = value
    with following_stream(online_temperature):
        online_temperature.update(logs)
    assert read(online_temperature) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_in_float32_or_better(dtype: torch.dtype) -> None:
    logs = draw(0, 4, 8, 4).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        online_temperature = follow([logs], like=logs)
    for value in (online_temperature.sharpness, online_temperature.information, online_temperature.factor()):
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert not value.requires_grad
    assert read(online_temperature) == pytest.approx(loop([logs.detach()]), rel=1e-5)


def test_a_batch_counts_where_the_stream_is_followed_and_not_where_it_is_settled() -> None:
    online_temperature, logs = OnlineTemperature(WIDE), draw(0, 4, 6, 4)
    online_temperature.update(logs)
    with settled_stream(online_temperature), following_stream(online_temperature):
        online_temperature.update(logs)
    with following_stream(online_temperature), settled_stream(online_temperature):
        online_temperature.update(logs)
    assert read(online_temperature) == (1.0, 64.0)
    with following_stream(nn.ModuleList([online_temperature])):
        online_temperature.update(logs)
    assert read(online_temperature) == pytest.approx(loop([logs]))
    assert online_temperature.follows


def test_nothing_waits_for_the_device() -> None:
    online_temperature, logs = OnlineTemperature(torch.zeros(())), draw(0, 4, 8, 4).float()
    with Watch() as watch, following_stream(online_temperature):
        online_temperature.update(logs)
        online_temperature.factor()
    assert {"_softmax", "pow"} <= watch.names
    assert not watch.names & WAITING
    assert read(online_temperature) != (1.0, 64.0)


@pytest.mark.parametrize("gap", [8.0, 12.0])
def test_one_wrong_view_among_thousands_of_sure_ones_moves_little(gap: float) -> None:
    right = (gap * torch.eye(4)[:, None]).expand(4, 64, 4).log_softmax(-1)
    wrong = right.clone()
    wrong[0, 0] = right[1, 0]
    online_temperature = OnlineTemperature(torch.zeros(()))
    with following_stream(online_temperature):
        for _ in range(50):
            online_temperature.update(right)
        before = float(online_temperature.sharpness)
        online_temperature.update(wrong)
    assert abs(float(online_temperature.sharpness) - before) < 0.2


@pytest.mark.parametrize("size", [64, 512])
def test_a_head_without_an_idea_says_nothing(size: int) -> None:
    generator, online_temperature = torch.Generator().manual_seed(0), OnlineTemperature(torch.zeros(()))
    with following_stream(online_temperature):
        for _ in range(200):
            online_temperature.update((1e-3 * torch.randn(4, size, 4, generator=generator)).log_softmax(-1))
            assert online_temperature.information >= 0
    assert float(online_temperature.sharpness) == pytest.approx(1.0, abs=0.2)
