"""What the default does on heads that know the classes alone: mirrored views, shares of classes, temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import ttvd
from ttvd.methods.ttvd.agreement_temperature import FACTORS, AgreementTemperature
from ttvd.methods.ttvd.class_shares import ClassShares
from ttvd.nn.norms import following_stream
from ttvd.nn.resnet import ResNet


def test_shares_are_those_of_the_last_images() -> None:
    shares, window = ClassShares(3, torch.zeros(())), [1 / 3] * 3
    seen, own, generator = 0.0, 1 / 3, torch.Generator().manual_seed(0)
    for size in (8, 40, 3, 1, 70, 20):
        scores = torch.randn(size, 3, generator=generator)
        with following_stream(shares):
            shares.update(scores)
        probs = scores.softmax(1)
        kept = min(seen, max(0, 64 - size))
        window = [
            (w * kept + m * size) / (kept + size) for w, m in zip(window, probs.mean(0).tolist(), strict=True)
        ]
        own = (own * kept + float(probs.square().sum(1).mean()) * size) / (kept + size)
        seen = kept + size
        assert shares.shares.tolist() == pytest.approx(window, rel=1e-5)
        rate = (seen * sum(w * w for w in window) - own) / (seen - 1)
        c = min(1.0, max(0.0, (rate - 1 / 3) / (2 / 3)))
        assert shares.concentration().item() == pytest.approx(c, abs=1e-6)
        assert shares.step_factor().item() == pytest.approx(min(1, max(0, (0.3 - c) / 0.2)), abs=1e-5)
        assert shares.weight().item() == pytest.approx(1 / (1 + 63 * c), rel=1e-4)


def test_concentration_is_the_rate_of_pairs_that_share_a_class() -> None:
    """Against all pairs of different images, one by one; few images of many classes are not few classes."""
    scores = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    probs = scores.softmax(1).tolist()
    pairs = [
        sum(a * b for a, b in zip(one, other, strict=True))
        for i, one in enumerate(probs)
        for j, other in enumerate(probs)
        if i != j
    ]
    shares = ClassShares(4, torch.zeros(()))
    with following_stream(shares):
        shares.update(scores)
    wanted = max(0.0, (sum(pairs) / len(pairs) - 0.25) / 0.75)
    assert shares.concentration().item() == pytest.approx(wanted, abs=1e-5)
    different = ClassShares(100, torch.zeros(()))
    with following_stream(different):
        different.update(30.0 * torch.eye(100)[:20])
    assert different.concentration().item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("classes", "scale"), [(1, 1.0), (4, 1.0), (20, 0.05**0.5 * 3 / 0.9), (100, 0.1 * 3 / 0.9)]
)
def test_a_mixture_of_classes_explains_less_than_a_single_class(classes: int, scale: float) -> None:
    shares = ClassShares(100, torch.zeros(()))
    assert shares.class_scale(0.9).item() == 1.0  # nothing is known yet
    with following_stream(shares):
        shares.update(30.0 * torch.eye(100)[torch.arange(200) % classes])
    assert shares.class_scale(0.9).item() == pytest.approx(scale, rel=1e-4)


def test_shares_do_not_follow_outside_of_the_stream() -> None:
    shares = ClassShares(2, torch.zeros(()))
    shares.update(torch.tensor([[9.0, 0.0]]))
    with following_stream(shares):
        shares.update(torch.tensor([[math.nan, 0.0]]))
    assert shares.shares.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_confidence_becomes_what_agreement_suggests(exponent: float) -> None:
    """Two views agree on three quarters of the images: the mean confidence ends at 0.75 to the power r."""
    generator = torch.Generator().manual_seed(0)
    temperature = AgreementTemperature(exponent, torch.zeros(()))
    scores = 4.0 * torch.randn(64, 5, generator=generator)
    views = torch.stack([scores, scores])
    views[1, :16] = -views[1, :16]
    for _ in range(60):
        with following_stream(temperature):
            temperature.update(views, scores)
    confidence = (scores / temperature.factor()).softmax(1).amax(1).mean().item()
    assert confidence == pytest.approx(0.75**exponent, abs=0.02)


def test_the_temperature_starts_at_one_and_stays_in_bounds() -> None:
    temperature = AgreementTemperature(1.0, torch.zeros(()))
    assert temperature.factor().item() == pytest.approx(1.0)
    certain, apart = (
        torch.tensor([[9.0, 0.0]]).repeat(64, 1),
        torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]]).repeat(1, 64, 1),
    )
    for _ in range(100):
        with following_stream(temperature):
            temperature.update(apart, certain)
    assert temperature.factor().item() == pytest.approx(max(FACTORS))
    with following_stream(temperature):
        temperature.update(apart * math.nan, certain * math.nan)
    assert temperature.factor().isfinite()


def test_without_batch_norm_agreement_never_makes_answers_surer() -> None:
    unsure, together = 0.2 * torch.eye(4)[[0]].repeat(64, 1), torch.eye(4)[[0]].repeat(2, 64, 1)
    factors = []
    for least in (min(FACTORS), 1.0):
        temperature = AgreementTemperature(1.0, torch.zeros(()), least=least)
        for _ in range(20):
            with following_stream(temperature):
                temperature.update(together, unsure)
        factors.append(temperature.factor().item())
    assert factors[0] < 0.8
    assert factors[1] == 1.0


@pytest.fixture
def plain(make_net: Callable[..., ResNet], make_sites: Any) -> tuple[ResNet, ttvd.Sites]:
    net = make_net(3)
    return net, replace(make_sites(net), mirror_gain=0.01)


def test_mirrored_images_are_a_second_view_where_they_do_no_harm(plain: tuple[ResNet, ttvd.Sites]) -> None:
    net, sites = plain
    x = torch.rand(5, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    adapter = ttvd.TTVD(net, sites, tau=2.0, prior=None, statistics=ttvd.Statistics.source())
    wanted = (net(x) + net(x.flip(-1))) / 2 / 2.0
    torch.testing.assert_close(adapter.predict(x), wanted.detach())
    assert adapter.mirror
    assert adapter.structure == "pd"
    for gain in (None, -0.1):
        assert not ttvd.TTVD(net, replace(sites, mirror_gain=gain), tau=2.0).mirror
    with pytest.raises(ValueError, match="mirror=True needs structure='pd'"):
        ttvd.TTVD(net, sites, structure="cipd", mirror=True)


def test_the_learning_rate_depends_on_the_model(
    plain: tuple[ResNet, ttvd.Sites], make_net: Any, make_sites: Any
) -> None:
    def rate(net: ResNet, sites: ttvd.Sites, **options: Any) -> float:
        return float(ttvd.TTVD(net, sites, tau=1.0, **options).optimizer.lr)

    joint = make_net(12)
    assert rate(*plain) == 0.05
    assert rate(joint, make_sites(joint)) == 0.05
    assert rate(*plain, lr=0.3) == 0.3
    with pytest.raises(ValueError, match="lr must be a number"):
        rate(*plain, lr=True)


def test_nothing_is_learnt_from_a_run_of_one_class(plain: tuple[ResNet, ttvd.Sites]) -> None:
    """Images whose predictions all fall into one class move no weight; statistics follow slowly."""
    net = plain[0]
    with torch.no_grad():
        net.fc.bias[1] = 40.0
    x = torch.rand(64, 1, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known = ttvd.estimate_sites(net, (x, torch.arange(64) % 3), num_classes=3)
    known = ttvd.calibrate(net, known, (0.2 * x, torch.arange(64) % 3), structures=())
    adapter = ttvd.TTVD(net, known, tau=1.0, guard=False)
    before = {name: tensor.clone() for name, tensor in adapter.snapshot().items() if name.endswith("weight")}
    adapter(x)
    assert adapter.class_shares is not None
    assert adapter.class_shares.step_factor().item() == 0.0
    after = adapter.snapshot()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    counts = {int(t.max()) for name, t in after.items() if name.endswith("rows_followed")}
    adapter(x)
    more = {int(t.max()) for name, t in adapter.snapshot().items() if name.endswith("rows_followed")}
    assert max(more) - max(counts) < max(counts) / 10
