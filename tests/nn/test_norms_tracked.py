"""Tracked statistics: averages along the stream whose weight is the evidence behind them."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ttvd
from tests.helpers.engine import MIXED, make_input, make_norm, write_out
from ttvd.methods import Adapter
from ttvd.nn.norms import Statistics, StreamNorm, apply_statistics, following_stream, running_buffers


def track(norm: StreamNorm, *batches: Tensor) -> None:
    with following_stream(norm), torch.no_grad():
        for x in batches:
            norm(x)


def test_tracked_statistics_by_hand() -> None:
    norm = make_norm("track:12:24")
    source = norm.running_mean.clone()  # type: ignore[union-attr]
    batches = [make_input(n, 3, 2, 2, seed=n) for n in (4, 8, 6, 6)]
    mean, worth = source, 12.0
    for x in batches:
        weight = len(x) / (len(x) + worth)
        expected = write_out(x, norm, weight)
        torch.testing.assert_close(norm(x), expected)
        with following_stream(norm):
            torch.testing.assert_close(norm(x), expected)
        mean = (1 - weight) * mean + weight * x.mean((0, 2, 3))
        worth = min(worth + len(x), 24.0)
        torch.testing.assert_close(norm.running_mean, mean)
    assert norm.rows_followed.tolist() == [24, 24, 24]
    norm(batches[0])
    norm.eval()(batches[0])
    assert norm.rows_followed.tolist() == [24, 24, 24]  # not outside of the stream
    torch.testing.assert_close(norm.running_mean, mean)


@settings(max_examples=30, deadline=None)
@given(
    count=st.floats(0.0, 500.0),
    size=st.integers(1, 9),
    batches=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_without_forgetting_it_is_the_average_of_source_and_stream(
    count: float, size: int, batches: int, seed: int
) -> None:
    norm = make_norm(f"track:{count!r}:inf")
    source_mean, source_var = norm.running_mean.clone(), norm.running_var.clone()  # type: ignore[union-attr]
    stream = make_input(batches, size, 3, 2, 2, seed=seed)
    track(norm, *stream)
    weights = torch.tensor([count, *[size] * batches], dtype=torch.float64)
    means = torch.stack([source_mean, *stream.mean((1, 3, 4))])
    variances = torch.stack([source_var, *stream.var((1, 3, 4), correction=0)])
    torch.testing.assert_close(norm.running_mean, weights @ means / weights.sum())
    torch.testing.assert_close(norm.running_var, weights @ variances / weights.sum())
    assert norm.rows_followed.tolist() == [size * batches] * 3


@settings(max_examples=30, deadline=None)
@given(cuts=st.sets(st.integers(1, 15)), memory=st.floats(8.0, 100.0), seed=st.integers(0, 1000))
def test_a_batch_in_pieces_counts_as_the_whole(cuts: set[int], memory: float, seed: int) -> None:
    x = make_input(16, 3, 2, 2, seed=seed)
    whole, parts = make_norm(f"track:8:{memory!r}"), make_norm(f"track:8:{memory!r}")
    track(whole, x)
    bounds = [0, *sorted(cuts), 16]
    track(parts, *(x[a:b] for a, b in pairwise(bounds)))
    assert whole.rows_followed.equal(parts.rows_followed)
    if memory >= 24.0:  # nothing was forgotten: the mean does not know how the images came
        torch.testing.assert_close(whole.running_mean, parts.running_mean)


def test_memory_as_large_as_the_count_is_a_constant_weight() -> None:
    tracked, momentum = make_norm("track:24:24:renorm"), make_norm("momentum:0.25:renorm")
    stream = [make_input(8, 3, 2, 2, seed=seed) for seed in range(4)]
    track(tracked, *stream)
    track(momentum, *stream)
    torch.testing.assert_close(tracked.running_mean, momentum.running_mean)
    torch.testing.assert_close(tracked.running_var, momentum.running_var)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_variance_that_is_not_finite_is_neither_followed_nor_counted(compile: bool) -> None:
    """Squares overflow in one channel; the averages of the others must not follow either."""
    layers = (nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    net, x = nn.Sequential(*layers), make_input(4, 3, 2, 2).float()
    tent = ttvd.create("tent", net, statistics=Statistics.parse("track:12:100")).accelerate(compile=compile)
    tent.validation = "never"
    for _ in range(3):
        tent(x)
    before = tent.snapshot()
    assert before["model.0.rows_followed"].tolist() == [12, 12, 12]
    x[:, 1] *= 1e30
    tent(x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tent.snapshot().items())
    assert tent.kept == 0


def test_a_single_value_a_channel_is_normalised_by_the_average_and_not_followed() -> None:
    for text in ("track:12:100", "track:0:100:renorm"):
        norm, x = make_norm(text), make_input(1, 3, 1, 1)
        track(norm, make_input(4, 3, 2, 2))
        expected = write_out(x, norm, 0.0) if "renorm" not in text else None
        before = copy.deepcopy(norm.state_dict())
        with following_stream(norm):
            out = norm(x)
        assert out.isfinite().all()
        assert expected is None or torch.allclose(out, expected)
        assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())


def test_momentum_of_one_follows_too() -> None:
    norm, x = make_norm("momentum:1"), make_input(4, 3, 2, 2)
    track(norm, x)
    torch.testing.assert_close(norm.running_mean, x.mean((0, 2, 3)))


def test_norms_without_source_statistics_use_the_batch() -> None:
    layer = nn.BatchNorm2d(3, track_running_stats=False)
    norm = apply_statistics(layer, Statistics.parse("track:12:100:renorm"))
    x = make_input(4, 3, 2, 2).float()
    with following_stream(norm):
        torch.testing.assert_close(norm(x), layer.train()(x))
    assert not running_buffers(norm)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 3)).eval()


def make_adapter(text: str) -> Adapter:
    return ttvd.create("tent", make_net(), lr=0.01, statistics=Statistics.parse(text))


def make_stream() -> list[Tensor]:
    stream = list(torch.rand(5, 6, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
    return [*stream[:-1], stream[-1][:1]]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def copy_by_state(adapter: Adapter) -> Adapter:
    new = make_adapter("track:24:40:renorm")
    new.load_state_dict(adapter.state_dict())
    return new


@pytest.mark.parametrize("twin", [copy.deepcopy, copy_by_state])
def test_the_state_of_tracking_is_that_of_the_adapter(twin: Callable[[Adapter], Adapter]) -> None:
    adapter, stream = make_adapter("track:24:40:renorm"), make_stream()
    start = adapter.snapshot()
    assert {"model.1.rows_followed", "model.4.rows_followed", "model.1.running_mean"} <= start.keys()
    for x in stream[:2]:
        adapter(x)
    middle = adapter.snapshot()
    assert middle["model.1.rows_followed"].tolist() == [12] * 4
    other = twin(adapter)
    outs = [adapter(x) for x in stream[2:]]
    assert same(other.snapshot(), middle)
    assert all(torch.equal(other(x), out) for x, out in zip(stream[2:], outs, strict=True))
    adapter.predict(stream[0])
    assert same(other.snapshot(), adapter.snapshot())
    adapter.restore(middle)
    assert all(torch.equal(adapter(x), out) for x, out in zip(stream[2:], outs, strict=True))
    adapter.reset()
    assert same(adapter.snapshot(), start)


def test_counts_stay_whole_numbers_in_every_type() -> None:
    adapter, stream = make_adapter("track:24:40:renorm"), make_stream()
    adapter(stream[0])
    adapter.double()
    for x in stream[1:]:
        assert adapter(x.double()).dtype == torch.float64
    counts = adapter.get_buffer("model.4.rows_followed")
    assert counts.dtype == torch.int64
    assert counts.tolist() == [25] * 4
    adapter.reset()
    assert adapter.get_buffer("model.4.rows_followed").tolist() == [0] * 4


def test_the_model_of_the_user_is_left_alone() -> None:
    net = make_net()
    before = copy.deepcopy(net.state_dict())
    adapter = Adapter(net, statistics=Statistics.parse("track:24:40"))
    for x in make_stream():
        adapter(x)
    assert same(net.state_dict(), before)
    assert adapter.get_buffer("model.1.rows_followed").tolist() == [25] * 4


@pytest.mark.parametrize("text", ["track:24:40", "track:24:40:renorm", "prior:0.2:renorm", "source:renorm"])
def test_every_promise_of_an_adapter(text: str) -> None:
    net = make_net()
    statistics = Statistics.parse(text)
    ttvd.check_adapter(lambda: ttvd.create("tent", net, statistics=statistics), net, make_stream()[:4])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("text", MIXED)
def test_recorded_steps_on_a_gpu_are_those_of_the_cpu(text: str) -> None:
    adapter, twin = make_adapter(text).cuda(), make_adapter(text)
    for x in make_stream()[:4]:
        torch.testing.assert_close(adapter(x.cuda()).cpu(), twin(x), rtol=1e-3, atol=1e-3)
    for name, tensor in twin.snapshot().items():
        torch.testing.assert_close(adapter.snapshot()[name].cpu(), tensor, rtol=1e-3, atol=1e-3)
