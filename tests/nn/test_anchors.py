"""Anchored norms: the same function by other statistics, which those of a stream may replace."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.nn.anchors import Anchors, NormMoments, anchor_norms, watch_norms
from ttvd.nn.norms import Statistics, apply_statistics

BOUNDED = settings(deadline=None, derandomize=True, max_examples=20)
SEEDS = st.integers(0, 10_000)
assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


class NormAct(nn.BatchNorm2d):
    """Norm and activation in one, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def build_deep() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(4, 5, 2), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 1), nn.BatchNorm2d(3, eps=0.1)),
        *(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
    )


def build_twice() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, nn.Tanh(), nn.BatchNorm1d(4), nn.Tanh(), norm)


def build_tied() -> nn.Module:
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.weight, second.bias = first.weight, first.bias
    return nn.Sequential(first, nn.Tanh(), second)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "deep": (build_deep, (4, 3, 3)),
    "sequences": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4)), (4, 5)),
    "one norm twice": (build_twice, (4,)),
    "tied parameters": (build_tied, (4,)),
    "norm and activation": (lambda: nn.Sequential(NormAct(4), nn.Conv2d(4, 3, 1), NormAct(3)), (4, 2, 2)),
    "norm alone": (lambda: nn.BatchNorm2d(4), (4, 3, 3)),
}


def norms_of(net: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in net.modules() if isinstance(layer, _BatchNorm)]


def kinds_of(net: nn.Module) -> tuple[tuple[str, int], ...]:
    """Name and size of the norms of a net that is in no wrapper."""
    return tuple((k, norm.num_features) for k, norm in net.named_modules() if isinstance(norm, _BatchNorm))


def make_net(kind: str, seed: int = 0) -> nn.Module:
    """In float64 and evaluation mode, with stored statistics and affine parameters far from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    net = KINDS[kind][0]().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(generator=generator)
        for norm in norms_of(net):
            norm.get_buffer("running_mean").normal_(generator=generator)
            norm.get_buffer("running_var").uniform_(0.2, 3.0, generator=generator)
    return net


def draw(kind: str, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return 1 + 2 * torch.randn(count, *KINDS[kind][1], generator=generator, dtype=torch.float64)


def draw_anchors(net: nn.Module, seed: int = 0) -> Anchors:
    generator = torch.Generator().manual_seed(seed + 2)
    kinds = kinds_of(net)
    means, roots = torch.randn(2, sum(dict(kinds).values()), generator=generator, dtype=torch.float64)
    return Anchors(means, 4 * roots.square(), kinds)


@torch.no_grad()
def watch(net: nn.Module, *batches: Tensor, views: int = 1) -> dict[int, Anchors]:
    with watch_norms(net, views) as moments:
        for batch in batches:
            net(batch)
    return moments.anchors()


def read_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def assert_same_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    found = net.state_dict()
    assert list(found) == list(state)
    assert [name for name, value in state.items() if not torch.equal(found[name], value)] == []


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over all values, in float64."""
    columns = x.detach().double().movedim(1, -1).reshape(-1, x.shape[1])
    mean = columns.sum(0) / len(columns)
    return mean, ((columns - mean) ** 2).sum(0) / len(columns)


def list_moments(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of all that enters the norms of a chain of layers, norm by norm."""
    entering: dict[nn.Module, list[Tensor]] = {}
    for layer in net if isinstance(net, nn.Sequential) else [net]:
        if isinstance(layer, _BatchNorm):
            entering.setdefault(layer, []).append(x)
        x = layer(x)
    means, variances = zip(*(channel_moments(torch.cat(parts)) for parts in entering.values()), strict=True)
    return torch.cat(means), torch.cat(variances)


def use_batch_statistics(net: nn.Module) -> nn.Module:
    """A copy whose norms, written out by hand, take mean and variance from what enters them."""
    net = copy.deepcopy(net)

    def normalise(norm: _BatchNorm, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        mean, var = channel_moments(inputs[0])
        columns = (inputs[0].movedim(1, -1) - mean) / (var + norm.eps) ** 0.5 * norm.weight + norm.bias
        return (columns.tanh() if isinstance(norm, NormAct) else columns).movedim(-1, 1)

    for norm in norms_of(net):
        norm.register_forward_hook(normalise)
    return net


@pytest.mark.parametrize("kind", KINDS)
@BOUNDED
@given(seed=SEEDS)
def test_a_net_computes_what_it_did(kind: str, seed: int) -> None:
    net, x = make_net(kind, seed), draw(kind, 6, seed)
    anchors, wanted = draw_anchors(net, seed), net(x)
    anchor_norms(net, anchors)
    assert_close(net(x), wanted)
    stored = zip(*((norm.running_mean, norm.running_var) for norm in norms_of(net)), strict=True)
    for found, moments in zip(stored, (anchors.means, anchors.variances), strict=True):
        assert torch.equal(torch.cat(found), moments)
    anchor_norms(net, replace(anchors, variances=torch.zeros_like(anchors.variances)))
    assert_close(net(x), wanted)


def test_norms_whose_change_cannot_be_made_up_for_are_left_alone() -> None:
    biasless, weightless = make_net("norm alone", 3), make_net("norm alone", 4)
    biasless.register_parameter("bias", None)
    weightless.register_parameter("weight", None)
    others = nn.Sequential(
        *(nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False)),
        *(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        *(biasless, weightless),
    ).double()
    net, before = nn.Sequential(others, nn.BatchNorm2d(4).double()).eval(), read_state(others)
    x = draw("deep", 8)
    wanted, anchors = net(x), watch(net, x)[1]
    assert anchors.norms == (("1", 4),)
    anchor_norms(net, anchors)
    assert_same_state(others, before)
    assert_close(net(x), wanted)
    assert watch(others, x) == watch(others, x, views=4) == {}


def test_parameters_that_two_norms_shared_are_two_afterwards() -> None:
    net = make_net("tied parameters")
    anchor_norms(net, draw_anchors(net))
    first, _, second = net.children()
    for name in ("weight", "bias"):
        one, other = first.get_parameter(name), second.get_parameter(name)
        assert one is not other
        assert not torch.equal(one, other)
    assert len(list(net.parameters())) == 4


def test_a_norm_may_be_called_with_a_keyword() -> None:
    class ByName(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(input=x)  # type: ignore[no-any-return]

    net, x = ByName(make_net("norm alone")), draw("norm alone", 12)
    wanted, found = net(x), watch(net, x, views=4)
    for views, seen in ((1, x[:3]), (4, x)):
        assert_close((found[views].means, found[views].variances), channel_moments(seen))
        anchor_norms(net, found[views])
        assert_close(net(x), wanted)
    assert_close(apply_statistics(net, Statistics.batch())(x), wanted)


def test_what_another_model_shares_and_the_anchors_stay_as_they_are() -> None:
    net, other = make_net("deep", 0), make_net("deep", 1)
    for mine, its in zip(net.modules(), other.modules(), strict=True):
        for name, tensor in (*mine.named_parameters(recurse=False), *mine.named_buffers(recurse=False)):
            setattr(its, name, tensor)
    before, anchors, x = read_state(net), draw_anchors(net), draw("deep", 6)
    anchor_norms(net, anchors)
    assert_close(net(x), other(x))
    with torch.no_grad():
        for name in ("1.weight", "1.bias", "4.running_mean", "4.running_var"):
            net.state_dict()[name].add_(1)
    assert_same_state(other, before)
    assert torch.equal(anchors.means, draw_anchors(net).means)
    assert torch.equal(anchors.variances, draw_anchors(net).variances)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_types_stay_and_what_learns_goes_on_learning(dtype: torch.dtype) -> None:
    net, frozen = make_net("deep").to(dtype), {"1.weight", "4.bias", "6.weight"}
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    kinds = [(name, value.dtype, value.shape) for name, value in net.state_dict().items()]
    anchor_norms(net, draw_anchors(net))
    assert [(name, value.dtype, value.shape) for name, value in net.state_dict().items()] == kinds
    net(draw("deep", 6).to(dtype)).square().sum().backward()
    assert {name for name, parameter in net.named_parameters() if not parameter.requires_grad} == frozen
    assert {name for name, parameter in net.named_parameters() if parameter.grad is None} == frozen


@pytest.mark.parametrize("kind", KINDS)
@BOUNDED
@given(
    seed=SEEDS, sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5), views=st.sampled_from([1, 2, 4])
)
def test_moments_are_those_of_all_data_however_they_are_cut(
    kind: str, seed: int, sizes: list[int], views: int
) -> None:
    """And those of the upright images apart, which come first in each batch."""
    net, x = make_net(kind, seed), seed % 1000 + draw(kind, views * sum(sizes), seed)
    x = x + torch.linspace(0, 9, len(x)).double().reshape(-1, *[1] * (x.ndim - 1))
    batches = x.split([views * size for size in sizes])
    upright = torch.cat([batch[:size] for batch, size in zip(batches, sizes, strict=True)])
    found = watch(net, *batches, views=views)
    assert set(found) == {1, views}
    for count, images in ((1, upright), (views, x)):
        assert_close((found[count].means, found[count].variances), list_moments(net, images))


def test_a_norm_that_nothing_entered_has_what_it_stores() -> None:
    net, x = make_net("deep"), draw("deep", 4)
    with watch_norms(net, views=2) as moments:
        net.get_submodule("1")(net.get_submodule("0")(x))
    idle = [net.get_submodule(name) for name in ("4", "7")]
    assert set(moments.anchors()) == {1, 2}
    for found in moments.anchors().values():
        assert torch.equal(found.means[5:], torch.cat([norm.get_buffer("running_mean") for norm in idle]))
        assert torch.equal(found.variances[5:], torch.cat([norm.get_buffer("running_var") for norm in idle]))


def test_nothing_is_left_behind_and_nothing_counts_afterwards() -> None:
    net, x, calls = make_net("deep"), draw("deep", 6), list[int]()
    users = norms_of(net)[0].register_forward_pre_hook(lambda *_: calls.append(1))
    state, kept = read_state(net), list[NormMoments]()
    for broken in (False, True):
        with suppress(KeyboardInterrupt), watch_norms(net) as moments:
            kept.append(moments)
            net(x)
            if broken:
                raise KeyboardInterrupt
        net(3 * x)
    wanted = watch(net, x)[1]
    for found in (moments.anchors()[1] for moments in kept):
        assert torch.equal(found.means, wanted.means)
        assert torch.equal(found.variances, wanted.variances)
    assert len(calls) == 5
    users.remove()
    assert all(not layer._forward_pre_hooks for layer in net.modules())
    assert_same_state(net, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_moments_of_short_numbers_are_as_good_as_those_of_long_ones(dtype: torch.dtype) -> None:
    """The sum of these values is more than float16 can hold."""
    x = (200 + 5 * torch.randn(40, 3, 8, 8)).to(dtype)
    anchors, (mean, var) = watch(nn.BatchNorm2d(3).to(dtype).eval(), *x.split(16))[1], channel_moments(x)
    torch.testing.assert_close(anchors.means, mean, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(anchors.variances, var, rtol=1e-4, atol=0.0)
