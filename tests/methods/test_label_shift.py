"""How alike the images of a batch are: loops over pairs, and streams whose shares of classes are known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.methods import WAITING, Watch
from ttvd.methods.ttvd.label_shift import LabelShiftEstimator
from ttvd.nn.norms import following_stream, settled_stream

BOUNDED = settings(deadline=None, derandomize=True, max_examples=40)
SEEDS = st.integers(0, 2**16)
STREAMS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
WIDE = torch.zeros((), dtype=torch.float64)


def draw(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def follow(stream: list[Tensor], like: Tensor = WIDE) -> LabelShiftEstimator:
    label_shift = LabelShiftEstimator(stream[0].shape[1], like)
    with following_stream(label_shift):
        for scores in stream:
            label_shift.update(scores)
    return label_shift


def loop_excess(stream: list[Tensor]) -> tuple[float, int]:
    """Excess and images: by definition, two images of a batch at a time, and all of earlier ones."""
    excess, images = 0.0, 0
    earlier: list[list[float]] = []
    for scores in stream:
        rows, k = scores.tolist(), scores.shape[1]
        p = [[math.exp(s - max(row)) for s in row] for row in rows]
        p = [[value / sum(row) for value in row] for row in p]
        alike, pairs = 0.0, 0
        for i in range(len(p)):
            for j in range(i):
                alike += sum(p[i][c] * p[j][c] for c in range(k))
                pairs += 1
        if pairs and earlier:
            across = sum(sum(a[c] * b[c] for c in range(k)) for a in p for b in earlier)
            base = across / (len(p) * len(earlier))
            worth = 64 + images if images < 960 else 1024
            excess += ((alike / pairs - base) / max(1 - base, 0.05) - excess) * len(p) / (worth + len(p))
        images += len(p)
        earlier += p
    return excess, images


@BOUNDED
@given(seed=SEEDS, sizes=STREAMS, classes=st.integers(2, 6))
def test_loops_over_pairs_say_the_same(seed: int, sizes: list[int], classes: int) -> None:
    stream = [draw(seed + n, size, classes) for n, size in enumerate(sizes)]
    label_shift, (excess, images) = follow(stream), loop_excess(stream)
    assert float(label_shift.excess) == pytest.approx(excess, rel=1e-10, abs=1e-12)
    assert int(label_shift.images) == images
    assert float(label_shift.concentration()) == pytest.approx(1 / max(excess, 1e-4) - 1, rel=1e-9)


def test_memory_ends_at_1024_images() -> None:
    """Of a long stream that is sorted and a batch that is mixed, what is left is what 1,024 images leave."""
    stream = [40 * torch.eye(4)[n % 4].expand(100, 4) for n in range(12)] + [40 * torch.eye(4).repeat(8, 1)]
    label_shift, (excess, images) = follow(stream), loop_excess(stream)
    assert int(label_shift.images) == images == 1232
    assert float(label_shift.excess) == pytest.approx(excess, rel=1e-6)
    before = float(follow(stream[:-1]).excess)
    mixed = (4 * 8 * 7 / (32 * 31) - 1 / 4) / (3 / 4)
    assert float(label_shift.excess) == pytest.approx((1024 * before + 32 * mixed) / 1056, rel=1e-6)


@pytest.mark.parametrize("bias", [0.0, 2.0, 5.0])
def test_a_model_that_prefers_a_class_is_not_taken_for_a_sorted_stream(bias: float) -> None:
    """Of well-mixed batches all show the preference; were it taken for shares, answers would follow it further."""
    labels = torch.randint(10, (60, 64), generator=torch.Generator().manual_seed(0))
    scores = 3.0 * torch.nn.functional.one_hot(labels, 10).double() + torch.tensor([bias] + [0.0] * 9)
    assert float(follow(list(scores)).concentration()) > 200


def draw_stream(concentration: float, classes: int, batches: int, size: int = 64) -> list[Tensor]:
    """One-hot scores of images whose classes come in shares that are drawn anew for each batch."""
    generator = torch.Generator().manual_seed(int(10 * concentration) + classes)
    powers = torch.full((batches, classes), concentration / classes, dtype=torch.float64)
    shares = torch._sample_dirichlet(powers, generator)
    labels = torch.multinomial(shares, size, replacement=True, generator=generator)
    return list(60.0 * torch.nn.functional.one_hot(labels, classes).float())


@pytest.mark.parametrize("classes", [4, 20])
@pytest.mark.parametrize("concentration", [0.3, 3.0, 30.0])
def test_the_concentration_of_a_dirichlet_stream_is_found(concentration: float, classes: int) -> None:
    """Within a factor of 2 at any one time, by the images that are remembered; on average, without bias."""
    label_shift, excess = LabelShiftEstimator(classes, torch.zeros(())), []
    with following_stream(label_shift):
        for number, scores in enumerate(draw_stream(concentration, classes, 1500)):
            label_shift.update(scores)
            if number >= 200:
                excess.append(float(label_shift.excess))
    assert 1 / (sum(excess) / len(excess)) - 1 == pytest.approx(concentration, rel=0.1)
    assert concentration / 2 < float(label_shift.concentration()) < 2 * concentration


@pytest.mark.parametrize("classes", [4, 20])
def test_well_mixed_streams_give_a_large_number(classes: int) -> None:
    """Drawn evenly, or dealt: then pairs are alike less often than by chance, and the most is reached."""
    labels = torch.randint(classes, (60, 64), generator=torch.Generator().manual_seed(classes))
    drawn = follow(list(60.0 * torch.nn.functional.one_hot(labels, classes).float()))
    assert float(drawn.concentration()) > 200
    dealt = follow([60.0 * torch.eye(classes).repeat(3, 1)] * 9)
    assert float(dealt.excess) < 0
    assert float(dealt.concentration()) == pytest.approx(9999, rel=1e-3)
    assert float(LabelShiftEstimator(classes, WIDE).concentration()) == pytest.approx(9999, rel=1e-3)


def test_sorted_streams_give_a_small_number() -> None:
    label_shift = follow([60.0 * torch.eye(5)[n % 5].expand(64, 5) for n in range(400)])
    assert float(label_shift.concentration()) == pytest.approx(0.01, rel=1e-3)


def test_images_that_say_nothing_are_like_a_mixed_stream() -> None:
    assert float(follow([torch.zeros(16, 5)] * 3).excess) == pytest.approx(0.0, abs=1e-6)


@BOUNDED
@given(seed=SEEDS, size=st.integers(2, 12), classes=st.integers(2, 6))
def test_neither_order_nor_constants_matter(seed: int, size: int, classes: int) -> None:
    scores, generator = draw(seed, size, classes), torch.Generator().manual_seed(seed)
    images, names = torch.randperm(size, generator=generator), torch.randperm(classes, generator=generator)
    first = draw(seed + 2, 3, classes)
    wanted = float(follow([first, scores]).excess)
    for other in (scores[images], scores + draw(seed + 1, size, 1)):
        assert float(follow([first, other]).excess) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    renamed = follow([first[:, names], scores[:, names]])
    assert float(renamed.excess) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "scores",
    [
        torch.full((3, 4), math.nan),
        torch.full((3, 4), -math.inf),
        torch.cat([draw(1, 3, 4), torch.tensor([[0.0, math.inf, 0.0, 0.0]], dtype=torch.float64)]),
        torch.cat([draw(1, 3, 4), torch.tensor([[0.0, math.nan, 0.0, 0.0]], dtype=torch.float64)]),
    ],
    ids=["nan", "-inf", "one inf", "one nan"],
)
def test_batches_that_say_nothing_change_nothing(scores: Tensor) -> None:
    label_shift = follow([draw(0, 6, 4)])
    before = {name: value.clone() for name, value in label_shift.state_dict().items()}
    with following_stream(label_shift):
        label_shift.update(scores)
    assert all(torch.equal(value, before[name]) for name, value in label_shift.state_dict().items())


def test_one_image_enters_the_mean_alone() -> None:
    first, one = draw(0, 6, 4), draw(1, 1, 4)
    label_shift = follow([first, one])
    assert float(label_shift.excess) == 0.0
    assert int(label_shift.images) == 7
    torch.testing.assert_close(label_shift.mean, torch.cat([first, one]).softmax(1).mean(0))


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_extreme_scores_stay_finite(size: float) -> None:
    label_shift = follow([size * torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, -1.0], [-1.0, 0.0, 0.0]])])
    assert label_shift.excess.isfinite()
    assert int(label_shift.images) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_state_is_in_float32_or_better(dtype: torch.dtype) -> None:
    scores = draw(0, 8, 5).to(dtype).requires_grad_()
    label_shift, first = LabelShiftEstimator(5, scores), draw(1, 4, 5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16), following_stream(label_shift):
        label_shift.update(first)
        label_shift.update(scores)
    wide = torch.promote_types(dtype, torch.float32)
    assert label_shift.excess.dtype == label_shift.concentration().dtype == label_shift.mean.dtype == wide
    assert not label_shift.excess.requires_grad
    assert label_shift.images.dtype == torch.int64
    exact, _ = loop_excess([first, scores.detach()])
    assert float(label_shift.excess) == pytest.approx(exact, rel=1e-4)


def test_nothing_waits_for_the_device() -> None:
    label_shift, scores = LabelShiftEstimator(4, torch.zeros(())), draw(0, 8, 4).float()
    with Watch() as watch, following_stream(label_shift):
        label_shift.update(scores)
        label_shift.concentration()
    assert "_softmax" in watch.names
    assert not watch.names & WAITING
    assert int(label_shift.images) == 8


def test_a_batch_counts_where_the_stream_is_followed_and_not_where_it_is_settled() -> None:
    label_shift, scores = LabelShiftEstimator(4, WIDE), draw(0, 6, 4)
    label_shift.update(scores)
    with settled_stream(label_shift):
        label_shift.update(scores)
        with following_stream(label_shift):
            label_shift.update(scores)
    with following_stream(label_shift), settled_stream(label_shift):
        label_shift.update(scores)
    with following_stream(label_shift), following_stream(label_shift, follow=False):
        label_shift.update(scores)
    assert int(label_shift.images) == 0
    with following_stream(torch.nn.ModuleList([label_shift])):
        label_shift.update(scores)
    assert int(label_shift.images) == 6
    label_shift.update(scores)
    assert int(label_shift.images) == 6
    assert label_shift.follows
