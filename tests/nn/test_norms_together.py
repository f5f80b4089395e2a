"""Averages of many norms that are taken in together become what those of each norm alone would."""

import copy

import pytest
import torch
from torch import Tensor, nn

from ttvd.nn.norms import Statistics, StreamNorm, apply_statistics, following_stream

TEXTS = ["track:8:40", "track:8:40:renorm", "momentum:0.2", "momentum:0.2:renorm"]


def make_net(text: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 1), nn.BatchNorm2d(2)]
    net = nn.Sequential(*layers).double().eval()
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    made = apply_statistics(net, Statistics.parse(text))
    assert isinstance(made, nn.Sequential)
    return made


def draw(seed: int, size: int = 6) -> Tensor:
    return torch.rand(size, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def follow_by_hand(net: nn.Sequential, x: Tensor) -> None:
    """Layer by layer, each average in its own formula."""
    for layer in net:
        if not isinstance(layer, StreamNorm):
            x = layer(x)
            continue
        policy, rows = layer.statistics, len(x)
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        if policy.momentum is None:
            worth = min(float(layer.rows_followed[0]) + (policy.count or 0.0), policy.memory or 0.0)
            share = rows / (worth + rows)
            layer.rows_followed += rows
        else:
            share = policy.momentum
        for name, new in (("running_mean", mean), ("running_var", var)):
            average = layer.get_buffer(name)
            average.copy_((1 - share) * average + share * new)
        spread = (layer.get_buffer("running_var") + layer.eps).sqrt()
        centred = (x - layer.get_buffer("running_mean")[:, None, None]) / spread[:, None, None]
        x = layer.weight[:, None, None] * centred + layer.bias[:, None, None]


def compare(net: nn.Module, wanted: nn.Module) -> None:
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, wanted.get_buffer(name), rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("learning", [True, False])
def test_all_norms_of_a_net_follow(text: str, learning: bool) -> None:
    net, twin = make_net(text), make_net(text)
    for seed, size in enumerate((6, 2, 9, 6, 30)):
        with following_stream(net), torch.set_grad_enabled(learning):
            net(draw(seed, size))
        with torch.no_grad():
            follow_by_hand(twin, draw(seed, size))
        compare(net, twin)


@pytest.mark.parametrize("text", TEXTS)
def test_batches_inside_one_block_follow_each_other(text: str) -> None:
    net, twin = make_net(text), make_net(text)
    with following_stream(net):
        for seed in range(3):
            net(draw(seed))
    for seed in range(3):
        with torch.no_grad():
            follow_by_hand(twin, draw(seed))
    compare(net, twin)


def test_a_layer_that_is_used_twice_knows_of_the_first_time() -> None:
    norm = make_net("track:8:40:renorm")[1]
    twin = copy.deepcopy(norm)
    x, y = (torch.randn(4, 5, 3, 3, dtype=torch.float64) + shift for shift in (0.0, 2.0))
    with following_stream(norm):
        norm(x)
        out = norm(y)
    with following_stream(twin):
        twin(x)
    with following_stream(twin):
        wanted = twin(y)
    assert torch.equal(out, wanted)
    compare(norm, twin)


def test_what_breaks_off_leaves_nothing_behind() -> None:
    net, twin = make_net("track:8:40"), make_net("track:8:40")
    try:
        with following_stream(net):
            net(draw(0))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        compare(net, twin)
    with following_stream(net):
        net(draw(1))
    with torch.no_grad():
        follow_by_hand(twin, draw(1))
    compare(net, twin)


def test_a_look_in_between_does_not_count_and_does_not_disturb() -> None:
    net, twin = make_net("track:8:40"), make_net("track:8:40")
    with following_stream(net):
        net(draw(0))
        with following_stream(net, False):
            net(draw(1))
    with torch.no_grad():
        follow_by_hand(twin, draw(0))
    compare(net, twin)


def test_norms_of_different_types_and_rows() -> None:
    norms = [make_net("track:8:40:renorm")[1] for _ in range(3)]
    twins = [copy.deepcopy(norm) for norm in norms]
    kinds = (torch.float64, torch.float32, torch.float32)
    parts, alone = (
        nn.ModuleList(n.to(kind) for n, kind in zip(group, kinds, strict=True)) for group in (norms, twins)
    )
    inputs = [torch.rand(rows, 5, 2, 2, dtype=kind) for rows, kind in zip((4, 4, 7), kinds, strict=True)]
    with following_stream(parts):
        for norm, x in zip(parts, inputs, strict=True):
            norm(x)
    for norm, x in zip(alone, inputs, strict=True):
        with following_stream(norm):
            norm(x)
    compare(parts, alone)
    assert [int(norm.get_buffer("rows_followed")[0]) for norm in norms] == [4, 4, 7]
