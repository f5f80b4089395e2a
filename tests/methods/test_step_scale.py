"""How far known rotations lie above the source: loops over views, and streams whose loss is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.methods import WAITING, Watch, bound_factor, loop_level
from tests.helpers.methods import draw_rotations as draw
from ttvd.methods.ttvd.options import choose_source_loss
from ttvd.methods.ttvd.step_scale import MEMORY, SCALE, StepScale
from ttvd.nn.norms import following_stream, settled_stream
from ttvd.zoo.sites import Sites

BOUNDED = settings(deadline=None, derandomize=True, max_examples=40)
SEEDS = st.integers(0, 2**16)
WIDE = torch.zeros((), dtype=torch.float64)
USUAL = 0.3


def follow(stream: list[Tensor], usual: float = USUAL, like: Tensor = WIDE) -> StepScale:
    need = StepScale(usual, like)
    with following_stream(need):
        for rotations in stream:
            need.update(rotations)
    return need


def read(need: StepScale) -> tuple[float, int]:
    return float(need.level), int(need.images)


def known(loss: float, size: int, rotations: int = 4) -> Tensor:
    """Logarithms (v, b, r) whose loss of the known rotation is the same for all views and images."""
    logs = torch.full((rotations, size, rotations), math.log(-math.expm1(-loss) / (rotations - 1)))
    return logs.double().masked_fill(torch.eye(rotations).bool()[:, None], -loss)


def test_the_numbers_that_were_chosen() -> None:
    assert (SCALE, MEMORY) == (0.1, 256)


@BOUNDED
@given(
    seed=SEEDS,
    sizes=st.lists(st.sampled_from([1, 2, 7, 64, 200, 300]), min_size=1, max_size=5),
    rotations=st.integers(2, 4),
    scale=st.sampled_from([0.05, 2.0, 6.0]),
    off=st.floats(-0.15, 0.15),
)
def test_loops_say_the_same(seed: int, sizes: list[int], rotations: int, scale: float, off: float) -> None:
    """Of small and large batches; what is usual lies near the loss, so that the factor is no bound as a rule."""
    stream = [draw(seed + n, rotations, size, rotations, scale=scale) for n, size in enumerate(sizes)]
    usual = max(0.0, loop_level(stream, USUAL)[0] + off)
    need, (level, images) = follow(stream, usual), loop_level(stream, usual)
    assert read(need) == pytest.approx((level, images), rel=1e-10)
    assert float(need.factor()) == pytest.approx(bound_factor(level, usual), abs=1e-8)


@BOUNDED
@given(seed=SEEDS, sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_a_short_stream_has_the_mean_of_its_images_however_it_is_cut(seed: int, sizes: list[int]) -> None:
    """Nothing is forgotten before 256 images, and nothing is left of the start."""
    whole = draw(seed, 4, sum(sizes), 4)
    wanted = read(follow([whole]))
    assert wanted[0] == pytest.approx(-float(whole.diagonal(dim1=0, dim2=2).mean()))
    assert read(follow(list(whole.split(sizes, 1)))) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("size", [1, 64, 256, 1000])
def test_memory_ends_at_256_images(size: int) -> None:
    """However long the stream was: the last batch has size / (256 + size) of the level."""
    for before in (256, 300, 5000):
        need = follow([known(0.2, before), known(0.7, size)])
        assert read(need) == pytest.approx(((256 * 0.2 + size * 0.7) / (256 + size), before + size))
    need = follow([known(0.2, 255), known(0.7, size)])
    assert float(need.level) == pytest.approx((255 * 0.2 + size * 0.7) / (255 + size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("loss", "factor"),
    [(0.001, 0.0), (0.2, 0.0), (0.3, 0.0), (0.31, 0.1), (0.35, 0.5), (0.39, 0.9), (0.4, 1.0), (3.0, 1.0)],
)
def test_factors_lie_between_0_and_1(loss: float, factor: float, dtype: torch.dtype) -> None:
    like = torch.zeros((), dtype=dtype)
    found = follow([known(loss, 9).to(dtype)], like=like).factor()
    assert found.shape == ()
    assert 0.0 <= float(found) <= 1.0
    assert float(found) == pytest.approx(factor, abs=1e-5)


@pytest.mark.parametrize("usual", [0.0, 0.15, 2.0, 1e4])
def test_what_has_seen_nothing_takes_full_steps(usual: float) -> None:
    need = StepScale(usual, WIDE)
    assert read(need) == (usual + 0.1, 0)
    assert float(need.factor()) == pytest.approx(1.0)
    assert float(StepScale(usual, torch.zeros(())).factor()) == pytest.approx(1.0, abs=1e-2)


def test_a_stream_that_becomes_like_the_source_ends_the_steps_and_one_that_leaves_it_starts_them() -> None:
    need, factors = StepScale(USUAL, WIDE), []
    with following_stream(need):
        for loss in [1.5] * 4 + [USUAL - 0.05] * 30 + [1.5]:
            need.update(known(loss, 64))
            factors.append(float(need.factor()))
    assert factors[:5] == [1.0] * 5
    assert sorted(factors[5:34], reverse=True) == factors[5:34]
    assert factors[33] == 0.0
    assert factors[34] == 1.0


@BOUNDED
@given(seed=SEEDS, size=st.integers(1, 9), rotations=st.integers(2, 4))
def test_neither_the_order_of_images_nor_the_names_of_rotations_matter(
    seed: int, size: int, rotations: int
) -> None:
    logs, generator = draw(seed, rotations, size, rotations), torch.Generator().manual_seed(seed)
    images, names = (torch.randperm(n, generator=generator) for n in (size, rotations))
    wanted = pytest.approx(read(follow([logs])), rel=1e-10)
    assert read(follow([logs[:, images]])) == wanted
    assert read(follow([logs[names][:, :, names]])) == wanted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(1, 2, 1), (1, 2), ...], ids=["known", "view", "all"])
@pytest.mark.parametrize("seen", [0, 6])
def test_what_is_not_finite_changes_nothing(seen: int, where: Any, value: float) -> None:
    need, logs = follow([draw(0, 4, seen, 4)] if seen else []), draw(1, 4, 6, 4)
    before = (*read(need), float(need.factor()))
    logs[where] = value
    with following_stream(need):
        need.update(logs)
    assert (*read(need), float(need.factor())) == before
    with following_stream(need):
        need.update(draw(2, 4, 3, 4))
    assert int(need.images) == seen + 3


def test_a_wrong_rotation_may_be_impossible() -> None:
    """It has the probability 0 then, and the known one is as finite as before."""
    logs = known(0.35, 6)
    logs[1, 2, 3] = -math.inf
    assert read(follow([logs])) == pytest.approx((0.35, 6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_in_float32_or_better(dtype: torch.dtype) -> None:
    logs = draw(0, 4, 8, 4).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        need = follow([logs], like=logs)
        values = (need.level, need.factor())
    for value in values:
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert not value.requires_grad
    assert need.images.dtype == torch.int64
    assert set(need.state_dict()) == {"level", "images"}
    assert read(need) == pytest.approx(
        loop_level([logs.detach()], USUAL), rel=max(1e-6, torch.finfo(dtype).eps)
    )


def test_a_batch_counts_where_the_stream_is_followed_and_not_where_it_is_settled() -> None:
    need, logs = StepScale(USUAL, WIDE), draw(0, 4, 6, 4)
    need.update(logs)
    with settled_stream(need), following_stream(need):
        need.update(logs)
    with following_stream(need), settled_stream(need):
        need.update(logs)
    assert read(need) == (USUAL + 0.1, 0)
    with following_stream(nn.ModuleList([need])):
        need.update(logs)
    assert read(need) == pytest.approx(loop_level([logs], USUAL))
    assert need.follows


def test_nothing_waits_for_the_device() -> None:
    need, logs = StepScale(USUAL, torch.zeros(())), draw(0, 4, 8, 4).float()
    with Watch() as watch, following_stream(need):
        need.update(logs)
        need.factor()
    assert {"lerp", "clamp"} <= watch.names
    assert not watch.names & WAITING
    assert int(need.images) == 8


def test_the_graph_of_the_batch_is_not_kept() -> None:
    logs = draw(0, 4, 8, 4).requires_grad_()
    need = follow([logs])
    (logs.sum() * need.factor()).backward()
    assert logs.grad is not None
    assert torch.equal(logs.grad, need.factor().expand_as(logs))


@pytest.mark.parametrize("value", ["no", "false", 0, 1, 2.0])
def test_what_is_neither_yes_nor_no_is_refused(value: Any) -> None:
    """A word would pass for yes, and 0 for what it is not."""
    with pytest.raises(ValueError, match=r"adaptive_step must be True, False or None, got "):
        choose_source_loss(value, 0.1, "sgd")
    assert choose_source_loss(None, 0.1, "sgd") == choose_source_loss(True, 0.1, "sgd") == 0.1
    assert choose_source_loss(False, 0.1, "sgd") is choose_source_loss(None, 0.1, "adam") is None


@pytest.mark.parametrize("value", [True, "0.1", torch.tensor(0.1)], ids=str)
def test_sites_take_a_loss_that_they_can_save(value: Any) -> None:
    means = torch.eye(3, dtype=torch.float64)[:, None]
    with pytest.raises(ValueError, match=r"rotation_loss must be a number, finite and at least 0, got "):
        Sites(means, torch.ones(3, 1, dtype=torch.int64), "abc", rotation_loss=value)
