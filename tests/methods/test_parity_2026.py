"""NEO, COME and CMF against plain twins: running means, entropies of opinions, a hidden model by Kalman's rule.

The twins follow the authors' code: awesomealex1/NEO (neo_layers.py), BlueWhaleLab/COME (tent_come.py, eata_come.py,
sar_come.py), and CMF as in mariodoebler/test-time-adaptation (classification/methods/cmf.py). Where a twin leaves it,
a comment says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.nn.resnet import ResNet

Maker = Callable[..., Any]
Check = Callable[[nn.Module, nn.Module, nn.Module], None]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])
FLOOR = 0.0
"""What is added to every mass before the logarithm: 1e-7 in the code of COME's authors, nothing here."""


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-8, atol=1e-8)


def probabilities(row: Tensor) -> Tensor:
    return torch.exp(row) / torch.exp(row).sum()


def mean(values: list[Tensor]) -> Tensor:
    return sum(values[1:], values[0]) / len(values)


def stand_in(monkeypatch: pytest.MonkeyPatch, augmentation: Callable[..., Tensor]) -> None:
    """Hold the random augmentation fixed in every method that uses it: it has tests of its own."""
    ttvd.list_methods()
    for name, module in list(sys.modules.items()):
        if name.startswith("ttvd.methods.") and "augment" in vars(module):
            monkeypatch.setattr(module, "augment", augmentation)


@pytest.fixture
def make_sharp(make_net: Maker, make_twin: Maker, make_stream: Maker) -> Maker:
    """Builds a network that is sure of some images and unsure of others, and its twin."""

    def build(outputs: int, norm: str, scale: float) -> tuple[ResNet, Any]:
        net = make_net(outputs, norm)
        with torch.no_grad():
            net.fc.weight *= scale
            (images,) = make_stream(64, seed=50)
            net.fc.bias.copy_(-net.fc.weight @ make_twin(net).forward_features(images).mean(0))
        return net, make_twin(net)

    return build


def learning(twin: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in twin.named_parameters() if p.requires_grad}


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
    twin, adapter = make_twin(net, prior=1.0), ttvd.create("neo", net, **options)
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
    usual = ttvd.list_methods()["neo"].parameters()
    assert {"momentum": 0.1, "continual": True}.items() <= usual.items()


# COME


def opinion_entropy(row: Tensor, floor: float = FLOOR, classes: int | None = None) -> Tensor:
    """Entropy of belief in each class and of uncertainty, for logits whose length cannot be changed.

    The authors write K = 1000 for every data set; here it is the number of classes, as in the paper. With a floor the
    masses no longer add up to one; the authors leave them so.
    """
    k = len(row) if classes is None else classes
    length = torch.sqrt((row * row).sum())
    row = row / length * length.detach()
    total = torch.exp(row).sum() + k
    masses = [torch.exp(value) / total + floor for value in row] + [k / total + floor]
    return -torch.stack([mass * torch.log(mass) for mass in masses]).sum()


def mean_opinion(logits: Tensor) -> Tensor:
    return mean([opinion_entropy(row) for row in logits])


def gradient_of(loss: Callable[[Tensor], Tensor], row: Tensor) -> Tensor:
    row = row.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(row), row)
    return found


def plain_opinion_entropy(row: Tensor) -> Tensor:
    """What it is without the rescaling and the floor: an opinion is a softmax with one more logit, ln K."""
    p = probabilities(torch.cat([row, torch.tensor([math.log(len(row))], dtype=row.dtype)]))
    return -(p * torch.log(p)).sum()


def test_an_opinion_is_a_softmax_with_a_constant_logit(generator: torch.Generator) -> None:
    for k in (2, 7, 30):
        row = 3 * torch.randn(k, dtype=torch.float64, generator=generator)
        assert_near(opinion_entropy(row), plain_opinion_entropy(row))
        assert 0 < abs(float(opinion_entropy(row, 1e-7) - plain_opinion_entropy(row))) < 1e-7 * 20 * k
        assert abs(float(opinion_entropy(row, classes=1000) - plain_opinion_entropy(row))) > 0.01
    nothing = opinion_entropy(row * 0 + 1e-9)  # uncertainty one half, the rest shared out evenly
    assert float(nothing) == pytest.approx(math.log(2) + 0.5 * math.log(k), rel=1e-6)


def test_the_gradient_cannot_change_the_length_of_the_logits(generator: torch.Generator) -> None:
    """It is orthogonal to them: that of the plain entropy without its part along them."""
    for _ in range(5):
        row = 2 * torch.randn(6, dtype=torch.float64, generator=generator)
        found, plain = gradient_of(opinion_entropy, row), gradient_of(plain_opinion_entropy, row)
        assert abs(float(found @ row)) < 1e-12
        assert abs(float(plain @ row)) > 1e-3
        assert_near(found, plain - (plain @ row) / (row @ row) * row)


COMES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adam, other beta, two steps": {"optimizer": "adam", "lr": 0.01, "momentum": 0.5, "steps": 2},
    # Plain SGD momentum in the authors' code, Nesterov's in Tent here: without momentum they are the same.
    "sgd, no momentum": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.0},
    "adam, after": {"optimizer": "adam", "lr": 0.01, "prediction": "after"},
}


@NORMS
@pytest.mark.parametrize("options", COMES.values(), ids=COMES)
def test_come(
    options: dict[str, Any],
    norm: str,
    make_sharp: Maker,
    make_optimizer: Maker,
    make_stream: Maker,
    assert_parameters: Check,
) -> None:
    net, twin = make_sharp(7, norm, 2.0 if norm == "batch" else 5.0)
    adapter, tent = ttvd.create("come", net, **options), ttvd.create("tent", net, **options)
    optimizer = make_optimizer(twin, options["optimizer"], options["lr"], options.get("momentum", 0.9))
    for x in make_stream(8, 5, 8, 1, 16, 8, 3):
        found, other = adapter(x), tent(x)
        for _ in range(options.get("steps", 1)):
            before = twin(x)
            optimizer.zero_grad()
            mean_opinion(before).backward()
            optimizer.step()
        assert_near(found, twin(x) if options.get("prediction") == "after" else before)
        assert_near(adapter.predict(x), twin(x))
    assert_parameters(adapter, twin, net)
    assert (found - other).abs().max() > 1e-3, "Tent does the same: this shows nothing"


class NaiveEATACome:
    """EATA with the entropy of the opinion: it decides who is confident, weighs, and is minimised.

    Redundancy is still measured on softmax predictions, and their running mean starts with what is kept first.
    """

    def __init__(self, twin: Any, optimizer: torch.optim.Optimizer, limit: float, similarity: float) -> None:
        self.twin, self.optimizer, self.limit, self.similarity = twin, optimizer, limit, similarity
        self.source = {name: p.detach().clone() for name, p in learning(twin).items()}
        self.mean: Tensor | None = None
        self.counts = list[tuple[int, int, int]]()

    def __call__(self, x: Tensor, fisher: dict[str, Tensor], penalty: float) -> Tensor:
        logits, old, terms, seen, sure = self.twin(x), self.mean, list[Tensor](), list[Tensor](), 0
        for row in logits:
            h, p = opinion_entropy(row), probabilities(row).detach()
            sure += bool(h < self.limit)
            new = old is None or abs(p @ old / p.norm() / old.norm()) < self.similarity
            if h < self.limit and new:
                terms.append(torch.exp(self.limit - h.detach()) * h)
                seen.append(p)
        self.counts.append((len(seen), sure, len(x)))
        if seen:
            self.mean = mean(seen) if old is None else 0.9 * old + 0.1 * mean(seen)
            moved = {name: p - self.source[name] for name, p in learning(self.twin).items()}
            drift = sum(
                (f[i] * moved[n][i] ** 2 for n, f in fisher.items() for i in range(len(f))), terms[0] * 0
            )
            self.optimizer.zero_grad()
            (mean(terms) + penalty * drift).backward()
            self.optimizer.step()
        return logits  # type: ignore[no-any-return]


def plain_momentum(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["nesterov"] = False
    return optimizer


@NORMS
def test_eata_come(
    norm: str, make_sharp: Maker, make_optimizer: Maker, make_stream: Maker, assert_parameters: Check
) -> None:
    net, twin = make_sharp(7, norm, 7.0 if norm == "batch" else 18.0)
    optimizer = plain_momentum(make_optimizer(twin, "sgd", 0.01))
    fisher = {n: torch.linspace(0, 1, len(p), dtype=p.dtype) for n, p in learning(twin).items()}
    adapter = ttvd.create("eata-come", net, fisher=fisher, lr=0.01, similarity=0.7, penalty=3.0)
    naive = NaiveEATACome(twin, optimizer, 0.4 * math.log(7), 0.7)
    for x in make_stream(16, 9, 16, 1, 24, 16, 12):
        assert_near(adapter(x), naive(x, fisher, 3.0))
    check_selections(naive.counts)
    assert_parameters(adapter, twin, net)


def check_selections(counts: list[tuple[int, int, int]]) -> None:
    """Of each batch: how many the second selection kept, the first kept, and there were."""
    assert any(0 < second < first for second, first, _ in counts), "the second selection never decides"
    assert any(0 < first < size for _, first, size in counts), "the first selection never decides"


class NaiveSARCome:
    """SAR with the entropy of the opinion in both passes; a restart where the running loss is too low.

    As in SAR here, the running loss begins anew after a restart, and a batch of which nothing is kept changes nothing.
    """

    def __init__(self, twin: Any, optimizer: torch.optim.Optimizer, limit: float, collapse: float) -> None:
        self.twin, self.optimizer, self.limit, self.collapse = twin, optimizer, limit, collapse
        self.parameters = list(learning(twin).values())
        self.source = [p.detach().clone() for p in self.parameters]
        self.average: float | None = None
        self.restarts, self.counts = 0, list[tuple[int, int, int]]()

    def write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value.clone()

    def __call__(self, x: Tensor, rho: float) -> Tensor:
        logits = self.twin(x)
        first, here = [opinion_entropy(row) for row in logits], [p.detach() for p in self.parameters]
        sure, second = [i for i, h in enumerate(first) if h < self.limit], list[Tensor]()
        if sure:
            uphill = torch.autograd.grad(mean([first[i] for i in sure]), self.parameters)
            length = math.sqrt(sum(float((g**2).sum()) for g in uphill))
            self.write([p + rho * g / length for p, g in zip(here, uphill, strict=True)])
            there = [opinion_entropy(row) for row in self.twin(x)]
            second = [there[i] for i in sure if there[i] < self.limit]
        self.counts.append((len(second), len(sure), len(x)))
        self.optimizer.zero_grad()
        if second:
            mean(second).backward()
        self.write(here)
        if second:
            self.optimizer.step()
            self.watch(float(mean(second).detach()))
        return logits  # type: ignore[no-any-return]

    def watch(self, loss: float) -> None:
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        if self.average < self.collapse:
            self.write(self.source)
            self.optimizer.state.clear()
            self.average, self.restarts = None, self.restarts + 1


@pytest.mark.parametrize("recovery", [False, True])
@pytest.mark.parametrize(("norm", "scale", "collapse"), [("batch", 6.0, 0.178), ("group", 5.0, 0.14)])
def test_sar_come(
    norm: str,
    scale: float,
    collapse: float,
    recovery: bool,
    make_sharp: Maker,
    make_optimizer: Maker,
    make_stream: Maker,
    assert_parameters: Check,
) -> None:
    net, twin = make_sharp(7, norm, scale)
    optimizer, collapse = plain_momentum(make_optimizer(twin, "sgd", 0.01)), collapse * recovery
    adapter = ttvd.create("sar-come", net, lr=0.01, rho=0.1, collapse=collapse)
    naive = NaiveSARCome(twin, optimizer, 0.4 * math.log(7), collapse * math.log(7))
    stream = make_stream(16, 9, 16, 1, 24, 16, 12)
    for x in stream + stream[:3]:
        assert_near(adapter(x).softmax(-1), naive(x, rho=0.1).softmax(-1))
    check_selections(naive.counts)
    assert (naive.restarts > 0) == recovery
    assert_parameters(adapter, twin, net)


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


CMFS: dict[str, tuple[dict[str, Any], int]] = {
    "defaults": ({}, 1),
    "slow at first": ({"gamma": 0.5}, 5),  # from the 15th batch or so on the share is below 0.9999
    "in between": ({"q": 4.0, "gamma": 0.9}, 1),
    "as fast as allowed": ({"q": 60.0, "gamma": 0.8}, 1),
    "all options": ({"q": 10.0, "gamma": 0.7, "alpha": 0.6, "beta": 0.5, "temperature": 1.0}, 1),
}
DARK = 0.8


def darken(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stands for the random augmentation."""
    return DARK * x.flip(-1)


@NORMS
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("options", "rounds"), CMFS.values(), ids=CMFS)
def test_cmf(
    options: dict[str, Any],
    rounds: int,
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

    stand_in(monkeypatch, watch)
    net, twin = make_sharp(7, norm, 6.0 if norm == "batch" else 15.0)
    naive = NaiveCMF(twin, make_optimizer(twin, optimizer, 0.005), 7, **options)
    adapter = ttvd.create("cmf", net, lr=0.005, optimizer=optimizer, **options)
    stream = make_stream(16, 9, 16, 1, 24, 16, 12) * rounds
    for x in stream:
        assert_near(adapter(x).softmax(-1), naive(x, darken(x)))
    assert asked == [{"padding": "reflection", "degrade": False}] * len(stream)
    check_shares(naive.shares, options.get("q", 0.005), rounds)
    assert_parameters(adapter, twin, net)


def check_shares(shares: list[float], q: float, rounds: int) -> None:
    """Each case shows what it is for."""
    if q == 60.0:
        assert 0.89 in shares
    elif q > 1.0:
        assert all(0.89 < share < 0.9999 for share in shares[:2])
    else:
        assert shares[0] == 1.0
        assert rounds == 1 or shares[-1] < 0.9999


@pytest.mark.parametrize("gamma", [0.99, 0.7])
def test_cmf_without_noise_is_roid(
    gamma: float, make_sharp: Maker, make_stream: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden model then stays the source, so that ensembling with it is ensembling with the source."""
    stand_in(monkeypatch, darken)
    net, _ = make_sharp(7, "batch", 6.0)
    options: dict[str, Any] = {"lr": 0.005, "optimizer": "adam"}
    adapter = ttvd.create("cmf", net, q=1e-12, gamma=gamma, **options)
    roid = ttvd.create("roid", net, alpha=gamma, **options)
    for x in make_stream(16, 9, 16, 24, 12):
        assert_near(adapter(x), roid(x))


def test_cmf_s_defaults_are_the_paper_s() -> None:
    usual = ttvd.list_methods()["cmf"].parameters()
    wanted = {"temperature": 1 / 3, "alpha": 0.99, "gamma": 0.99, "q": 0.005, "beta": 0.9, "seed": 0}
    assert wanted.items() <= usual.items()
