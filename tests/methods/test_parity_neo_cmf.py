"""NEO and CMF against plain twins: a running mean of features, and a hidden model by Kalman's rule.

The twins follow the authors' code: awesomealex1/NEO (neo_layers.py), and CMF as in mariodoebler/test-time-adaptation
(classification/methods/cmf.py). Where they leave that, a comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, learning, mean, probabilities, read_defaults
from ttvd.methods import CMF, NEO

Maker = Callable[..., Any]
Check = Callable[[nn.Module, nn.Module, nn.Module], None]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])


# NEO


class NaiveNEO:
    """Logits of the features minus their running mean, which begins at zero and knows the batch at hand already.

    The continual mean begins at zero too and nothing makes up for it: after the first batch it is a tenth of that
    batch's mean. (``tta_library/neo_cont.py`` of the authors has the same rule, but refers to an attribute that does
    not exist and cannot run; ``neo_layers.py`` can.)
    """

    def __init__(self, head: nn.Linear, share: float | None) -> None:
        self.weight, self.bias = head.weight.detach(), head.bias.detach().tolist()
        self.share, self.images = share, 0
        self.center = [0.0] * head.in_features

    def follow(self, features: Tensor) -> None:
        rows = features.tolist()
        self.images += len(rows)
        share = len(rows) / self.images if self.share is None else self.share
        for j, column in enumerate(zip(*rows, strict=True)):
            self.center[j] = (1 - share) * self.center[j] + share * sum(column) / len(rows)

    def output(self, features: Tensor) -> Tensor:
        logits = [
            [
                sum(w * (v - m) for w, v, m in zip(weights, z, self.center, strict=True)) + b
                for weights, b in zip(self.weight.tolist(), self.bias, strict=True)
            ]
            for z in features.tolist()
        ]
        return torch.tensor(logits, dtype=features.dtype)


def test_the_cumulative_mean_is_that_of_all_images(generator: torch.Generator) -> None:
    head, z = nn.Linear(4, 3).double(), torch.randn(23, 4, dtype=torch.float64, generator=generator)
    naive = NaiveNEO(head, None)
    for part in z.split([7, 1, 15]):
        naive.follow(part)
    assert_near(torch.tensor(naive.center, dtype=z.dtype), z.mean(0))
    assert_near(naive.output(z), head(z - z.mean(0)))


def test_the_continual_mean_begins_at_zero(generator: torch.Generator) -> None:
    head, z = nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=torch.float64, generator=generator)
    naive = NaiveNEO(head, 0.1)
    for steps in range(1, 60):
        naive.follow(z)
        assert_near(torch.tensor(naive.center, dtype=z.dtype), (1 - 0.9**steps) * z.mean(0))


NEOS: dict[str, tuple[dict[str, Any], float | None]] = {
    "default": ({}, 0.1),
    "continual": ({"continual": True, "momentum": 0.1}, 0.1),
    "fast": ({"momentum": 0.35}, 0.35),
    "cumulative": ({"continual": False}, None),
}


@NORMS
@pytest.mark.parametrize(("options", "share"), NEOS.values(), ids=NEOS)
@torch.no_grad()
def test_neo(
    options: dict[str, Any],
    share: float | None,
    norm: str,
    make_net: Maker,
    make_twin: Maker,
    make_stream: Maker,
) -> None:
    """The network stays as it is, norm statistics included; ``predict`` uses the mean that is there."""
    net = make_net(7, norm)
    twin, adapter = make_twin(net, prior=1.0), NEO(net, **options)
    naive = NaiveNEO(net.fc, share)
    before, moved = {name: value.clone() for name, value in net.state_dict().items()}, 0.0
    for x in make_stream(8, 5, 1, 16, 3, 8):
        z = twin.forward_features(x)
        assert_near(adapter.predict(x), naive.output(z))
        naive.follow(z)
        found = adapter(x)
        assert_near(found, naive.output(z))
        assert_near(adapter.predict(x), found)
        moved = max(moved, float((found - twin(x)).abs().max()))
    assert moved > 0.1, "the mean of the features hardly matters: this shows nothing"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    adapter.reset()
    (x,) = make_stream(8)
    assert_near(adapter.predict(x), twin(x))


def test_neo_s_defaults_are_the_authors() -> None:
    assert {"momentum": 0.1, "continual": True}.items() <= read_defaults(NEO).items()


# CMF


class Kalman:
    """The filter's variance and how much of the past it keeps; the noise of an observation is 1 - q.

    The share is held in [0.89, 1] and counts as 1 from 0.9999 on, in which case the hidden model does not follow at
    all while its variance grows: with few parameters, and so a small q, the first batches are such.
    """

    def __init__(self, q: float, alpha: float, count: int) -> None:
        self.q, self.alpha, self.variance = q * count / 38_400, alpha, 0.0

    def update(self) -> float:
        predicted = self.alpha**2 * self.variance + self.q
        noise = 1 - self.q
        share = max(noise / (predicted + noise), 0.89)
        share = 1.0 if share >= 0.9999 else share
        self.variance = share * predicted
        return share


class NaiveCMF:
    """ROID's loss, then three steps: the hidden model decays to the source, follows the model, and pulls it.

    As in ROID here, and unlike the authors' code, the correction of the prior multiplies probabilities (theirs
    logits), the augmented pass sees the whole batch (theirs what weighs something), and where all samples are alike
    they weigh one (theirs divides by zero).
    """

    def __init__(self, twin: Any, optimizer: torch.optim.Optimizer, classes: int, **options: float) -> None:
        self.twin, self.optimizer, self.options = twin, optimizer, options
        self.average = torch.full((classes,), 1 / classes, dtype=torch.float64)
        self.parameters = list(learning(twin).values())
        self.source = [p.detach().clone() for p in self.parameters]
        self.hidden = [p.detach().clone() for p in self.parameters]
        count = sum(p.numel() for p in self.parameters)
        self.filter = Kalman(options.get("q", 0.005), options.get("alpha", 0.99), count)
        self.shares = list[float]()

    def weigh(self, rows: list[Tensor]) -> list[float]:
        diversity = [1 - float(p @ self.average / p.norm() / self.average.norm()) for p in rows]
        certainty = [float((p * torch.log(p)).sum()) for p in rows]
        for values in (diversity, certainty):
            low, span = min(values), max(values) - min(values)
            values[:] = [(value - low) / span if span else 0.0 for value in values]
        middle, sharpness = sum(diversity) / len(diversity), 1 / self.options.get("temperature", 1 / 3)
        pairs = zip(diversity, certainty, strict=True)
        return [math.exp(sharpness * u * c) if u >= middle else 0.0 for u, c in pairs]

    def __call__(self, x: Tensor, other: Tensor) -> Tensor:
        rows, changed = ([probabilities(row) for row in self.twin(images)] for images in (x, other))
        weights, keep = self.weigh([p.detach() for p in rows]), self.options.get("beta", 0.9)
        self.average = keep * self.average + (1 - keep) * mean(rows).detach()
        loss = torch.zeros(())
        for weight, p, r in zip(weights, rows, changed, strict=True):
            clipped = torch.clamp(p, max=0.99)
            ratio = -(clipped * torch.log(clipped / (1 - clipped) + 1e-5)).sum()
            loss = loss + weight * (ratio - 0.5 * (p * torch.log(r)).sum() - 0.5 * (r * torch.log(p)).sum())
        self.optimizer.zero_grad()
        (loss / len(x)).backward()
        self.optimizer.step()
        self.filter_weights()
        prior = mean(rows)
        smooth = max(1 / len(rows), 1 / len(prior)) / prior.max()
        corrected = [p * (prior + smooth) / (1 + smooth * len(prior)) for p in rows]
        return torch.stack([p / p.sum() for p in corrected]).detach()

    def filter_weights(self) -> None:
        alpha, gamma = self.options.get("alpha", 0.99), self.options.get("gamma", 0.99)
        share = self.filter.update()
        self.shares.append(share)
        for i, parameter in enumerate(self.parameters):
            predicted = alpha * self.hidden[i] + (1 - alpha) * self.source[i]
            self.hidden[i] = share * predicted + (1 - share) * parameter.data
            parameter.data = gamma * parameter.data + (1 - gamma) * self.hidden[i]


def test_without_process_noise_nothing_is_followed() -> None:
    kalman = Kalman(0.0, 0.99, 2_000)
    assert {kalman.update() for _ in range(50)} == {1.0}
    assert kalman.variance == 0.0


def test_much_process_noise_is_followed_as_fast_as_allowed() -> None:
    kalman = Kalman(0.9, 0.99, 38_400)
    assert {kalman.update() for _ in range(50)} == {0.89}


def test_the_filter_settles_where_prediction_and_update_balance() -> None:
    """Kalman's algebraic Riccati equation, for a scalar; two thousand parameters are those of a ResNet-26."""
    kalman = Kalman(0.005, 0.99, 2_016)
    shares = [kalman.update() for _ in range(3_000)]
    q, a, v = kalman.q, kalman.alpha, kalman.variance
    assert v == pytest.approx((a * a * v + q) * (1 - q) / (a * a * v + 1), rel=1e-12)
    assert shares == sorted(shares, reverse=True), "ever more is followed, until it settles"
    assert 0.98 < shares[-1] < shares[0] < 0.9999


def test_a_small_model_is_not_followed_at_first() -> None:
    kalman = Kalman(0.005, 0.99, 56)
    shares = [kalman.update() for _ in range(200)]
    assert shares[:10] == [1.0] * 10
    assert shares[-1] < 0.9999, "the variance has grown meanwhile"


SIZES, MANY = (16, 9, 16, 1, 24, 16, 12), (3,) * 24
CMFS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "defaults": (SIZES, {}),
    "slow at first": (MANY, {"gamma": 0.5}),  # from the 15th batch or so on the share is below 0.9999
    "in between": (SIZES, {"q": 4.0, "gamma": 0.9}),
    "as fast as allowed": (SIZES, {"q": 60.0, "gamma": 0.8}),
    "all options": (SIZES, {"q": 10.0, "gamma": 0.7, "alpha": 0.6, "beta": 0.5, "temperature": 1.0}),
}


def darken(x: Tensor) -> Tensor:
    """Stands for the random augmentation."""
    return 0.8 * x.flip(-1)


@NORMS
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("sizes", "options"), CMFS.values(), ids=CMFS)
def test_cmf(
    sizes: tuple[int, ...],
    options: dict[str, Any],
    optimizer: str,
    norm: str,
    make_sharp: Maker,
    make_optimizer: Maker,
    make_stream: Maker,
    assert_parameters: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def watch(x: Tensor, _: torch.Generator, **kwargs: Any) -> Tensor:
        asked.append(kwargs)
        return darken(x)

    monkeypatch.setattr("ttvd.methods.roid.augment", watch)
    net, twin = make_sharp(7, norm, 6.0 if norm == "batch" else 15.0)
    naive = NaiveCMF(twin, make_optimizer(twin, optimizer, 0.005), 7, **options)
    adapter = CMF(net, lr=0.005, optimizer=optimizer, **options)
    for x in make_stream(*sizes):
        assert_near(adapter(x).softmax(-1), naive(x, darken(x)))
        assert float(adapter.variance) == pytest.approx(naive.filter.variance, rel=1e-8)
    assert asked == [{"padding": "reflection", "degrade": False}] * len(sizes)
    check_shares(naive.shares, options.get("q", 0.005))
    assert_parameters(adapter, twin, net)


def check_shares(shares: list[float], q: float) -> None:
    """Each case shows what it is for."""
    if q == 60.0:
        assert 0.89 in shares
    elif q > 1.0:
        assert all(0.89 < share < 0.9999 for share in shares[:2])
    else:
        assert shares[0] == 1.0
        assert len(shares) < 20 or shares[-1] < 0.9999


def test_cmf_s_defaults_are_the_paper_s() -> None:
    usual = read_defaults(CMF)
    wanted = {"temperature": 1 / 3, "alpha": 0.99, "gamma": 0.99, "q": 0.005, "beta": 0.9, "seed": 0}
    assert wanted.items() <= usual.items()
