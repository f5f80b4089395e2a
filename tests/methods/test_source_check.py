"""When the source answers in place of the adapter, against a loop over images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ttvd
from ttvd.methods.ttvd.source_check import WINDOW, SourceCheck
from ttvd.nn.norms import following_stream, settled_stream
from ttvd.nn.resnet import ResNet

SITES = torch.tensor([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 10.0, 0.0]], dtype=torch.float64)
ZERO = torch.zeros((), dtype=torch.float64)


def entropy_of(row: list[float]) -> float:
    total = sum(math.exp(value) for value in row)
    probs = [math.exp(value) / total for value in row]
    return -sum(p * math.log(p) for p in probs)


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_averages_are_what_the_loop_says() -> None:
    check = SourceCheck(SITES, ZERO)
    adapted_mean = source_mean = reach = images = 0.0
    offset = [0.0, 0.0, 0.0]
    for batch, size in enumerate((5, 40, 1, 64, 100, 3)):
        adapted, source = draw(size, 3, seed=batch), draw(size, 3, seed=batch + 50, scale=4.0)
        z = draw(size, 3, seed=batch + 90, scale=2.0)
        found = check.look(adapted, source, z)
        with following_stream(check):
            check.update(found)
        kept = min(images, max(0, WINDOW - size))
        images, share = kept + size, size / (kept + size)
        said = [row.index(max(row)) for row in source.tolist()]
        near = [min(math.dist(SITES[k], SITES[j]) for j in range(3) if j != k) for k in said]
        away = [sum(z[i, d].item() - SITES[k, d].item() for i, k in enumerate(said)) / size for d in range(3)]
        adapted_mean += share * (sum(entropy_of(row) for row in adapted.tolist()) / size - adapted_mean)
        source_mean += share * (sum(entropy_of(row) for row in source.tolist()) / size - source_mean)
        reach += share * (sum(near) / size - reach)
        offset = [old + share * (new - old) for old, new in zip(offset, away, strict=True)]
        assert check.entropies.tolist() == pytest.approx([adapted_mean, source_mean])
        assert check.offset.tolist() == pytest.approx(offset)
        assert (check.reach.item(), check.images.item()) == pytest.approx((reach, images))
        lost = min(1.0, max(0.0, (adapted_mean / source_mean - 1.4) / 0.2))
        trusted = min(1.0, max(0.0, (0.5 - math.hypot(*offset) / reach) / 0.1))
        assert check.hold(found).item() == pytest.approx(lost * trusted)


def test_a_source_that_is_sure_of_nothing_and_one_that_is_sure_of_all() -> None:
    check, z = SourceCheck(SITES, ZERO), SITES[[0]].expand(8, 3)
    flat, sharp = torch.zeros(8, 3, dtype=torch.float64), 500.0 * torch.eye(3, dtype=torch.float64)[[0] * 8]
    assert check.hold(check.look(flat, sharp, z)).item() == 1.0
    assert check.hold(check.look(flat, flat, z)).item() == 0.0
    assert check.hold(check.look(sharp, sharp, z)).item() == 0.0  # two entropies of 0 are equal


def test_features_of_a_class_spread_around_its_site() -> None:
    """Single features are far from the site, and their mean is near."""
    check = SourceCheck(SITES, ZERO)
    spread = torch.cat([SITES[[0]] + 30.0 * sign * torch.eye(3, dtype=torch.float64) for sign in (-1, 1)])
    unsure = torch.zeros(6, 3, dtype=torch.float64)
    sure = 9.0 * torch.eye(3, dtype=torch.float64)[[0] * 6]
    assert check.hold(check.look(unsure, sure, spread)).item() == 1.0
    assert check.hold(check.look(unsure, sure, spread + 2.1)).item() == 0.0


def test_it_learns_from_the_stream_alone_and_from_finite_values() -> None:
    check = SourceCheck(SITES, ZERO)
    found = check.look(draw(8, 3, seed=0), draw(8, 3, seed=1), draw(8, 3, seed=2))
    check.update(found)
    with following_stream(check), settled_stream(check):
        check.update(found)
    assert check.images.item() == 0.0
    with following_stream(check):
        check.update(found._replace(offset=torch.full_like(found.offset, torch.nan)))
        assert check.images.item() == 0.0
        check.update(found)
    assert check.images.item() == 8.0
    with settled_stream(check):  # the batch is among the averages
        again = check.look(draw(8, 3, seed=3), draw(8, 3, seed=4), draw(8, 3, seed=5))
    assert all(torch.equal(one, other) for one, other in zip(again, check.averages(), strict=True))


def test_the_ways_of_many_sites() -> None:
    sites = draw(1500, 4, seed=7)
    ways = SourceCheck(sites, ZERO).ways
    assert ways.shape == (1500,)
    for row in (0, 1023, 1024, 1499):
        others = torch.cat([sites[:row], sites[row + 1 :]])
        assert ways[row].item() == pytest.approx((others - sites[row]).norm(dim=1).min().item())


@pytest.fixture
def plain(make_net: Callable[..., ResNet], make_sites: Any) -> tuple[ResNet, ttvd.Sites]:
    net = make_net(3)
    x = torch.rand(96, 1, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = net(x).argmax(1)
    labels[:3] = torch.arange(3)
    sites = ttvd.estimate_sites(net, (x, labels), num_classes=3)
    sites = ttvd.calibrate(net, sites, (x, labels), structures=())
    return net, replace(sites, temperatures={"pd": 1.0}, mirror_gain=None)


@pytest.mark.parametrize("size", [64, 8])
def test_the_adapter_answers_as_the_source_where_it_has_lost_what_the_source_sees(
    size: int, plain: tuple[ResNet, ttvd.Sites]
) -> None:
    net, sites = plain
    x = 0.3 * torch.rand(size, 1, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    adapter = ttvd.TTVD(net, sites, prior=None, output_temperature=1.0, guard=False)
    assert adapter.source_check is not None
    answers = {}
    for held in (1.0, 0.0):
        adapter.reset()
        adapter.source_check.hold = lambda _, held=held: torch.tensor(held, dtype=torch.float64)  # type: ignore[method-assign, misc]
        before = {name: tensor.clone() for name, tensor in adapter.snapshot().items()}
        expected = adapter.predict(x)
        answers[held] = adapter(x)
        torch.testing.assert_close(answers[held], expected)
        after = adapter.snapshot()
        moved = [
            name
            for name in after
            if name.startswith("model.")
            and name.endswith(("weight", "bias"))
            and not torch.equal(after[name], before[name])
        ]
        assert bool(moved) == (held == 0.0)  # nothing is learnt from answers that are not the adapter's own
    torch.testing.assert_close(answers[1.0], net(x).detach())
    assert (answers[0.0] - answers[1.0]).abs().max() > 1e-3


def test_parameters_are_pulled_back_to_the_source(plain: tuple[ResNet, ttvd.Sites]) -> None:
    net, sites = plain
    adapter = ttvd.TTVD(net, sites, guard=False)
    adapter.keep_initial()
    start = [parameter.detach().clone() for parameter in adapter.adapting()]
    with torch.no_grad():
        for parameter in adapter.adapting():
            parameter.add_(1.0)
    for size, share in ((128, 0.02), (64, 0.02), (16, 0.005)):
        before = [parameter.detach().clone() for parameter in adapter.adapting()]
        out = torch.zeros(size, 3)
        adapter.after_step(ttvd.Step(out, torch.zeros(()), torch.ones(())))
        for first, old, new in zip(start, before, adapter.adapting(), strict=True):
            torch.testing.assert_close(new.detach(), old + share * (first - old))


def test_only_plain_heads_with_batch_norm_and_sites_that_know_the_images_are_checked(
    plain: tuple[ResNet, ttvd.Sites], make_net: Callable[..., ResNet], make_sites: Any
) -> None:
    net, sites = plain
    assert ttvd.TTVD(net, sites).source_check is not None
    assert ttvd.TTVD(net, sites, detect_changes=False).source_check is None
    assert ttvd.TTVD(net, replace(sites, inputs=None)).source_check is None
    joint = make_net(12)
    assert ttvd.TTVD(joint, make_sites(joint), tau=1.0).source_check is None


def test_the_source_shares_the_weights_of_the_model(plain: tuple[ResNet, ttvd.Sites]) -> None:
    net, sites = plain
    adapter = ttvd.TTVD(net, sites)
    assert adapter.source is not None
    own = {parameter.data_ptr() for parameter in net.parameters()}
    assert {parameter.data_ptr() for parameter in adapter.source.parameters()} == own
    assert not any(name.startswith("source.") for name in adapter.state_dict())
