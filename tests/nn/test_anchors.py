"""Anchored norms: the same function by other statistics, which those of a stream may replace."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.nn import (
    BOUNDED,
    KINDS,
    SEEDS,
    assert_close,
    assert_same_state,
    channel_moments,
    draw,
    draw_anchors,
    list_moments,
    make_net,
    norms_of,
    read_state,
    watch,
)
from ttvd.nn.anchors import NormMoments, anchor_norms, watch_norms
from ttvd.nn.norms import Statistics, apply_statistics


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
