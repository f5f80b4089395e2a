"""POEM and PeTTA against plain twins: bets on ranks of entropies, and a teacher that slows down where classes drift.

The twins follow the authors' code: yarinbar/poem (protector.py, poem.py; stored as 6110-CTO/poem, its cdf.py as
utils/cdf.py of Louexes/MartingaleShiftDetectorStudy) and hthieu166/petta (src/adapter/petta.py,
src/utils/petta_memory.py, src/utils/bn_layers.py, src/utils/loss_func.py). Where a twin leaves it, a comment says so.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.nn.resnet import ResNet

Maker = Callable[..., Any]
Check = Callable[[nn.Module, nn.Module, nn.Module], None]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])
CLASSES = 5


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-8, atol=1e-8)


def entropy(row: Tensor) -> Tensor:
    p = torch.exp(row) / torch.exp(row).sum()
    return -(p * torch.log(p)).sum()


# POEM

FIRST_BET_COUNTS = True
"""Whether the bet learns from the very first sample. False for the authors' code, which asks whether there were any
samples before it has noted the one at hand."""
STEP, BOUND = 1 / (8 * math.sqrt(3)), 1.8
"""Step size and bound of the bet in the authors' scripts; the class on its own has a step of 2 / sqrt(3)."""
WAIT = 100
"""Samples that are only bet on. The batch in which the hundredth comes is learnt from."""


def interpolate(value: float, xs: list[float], ys: list[float]) -> float:
    """On the line between two neighbours; beyond the ends, the value at the end."""
    if value <= xs[0]:
        return ys[0]
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False):
        if value <= x1:
            return y0 + (value - x0) / (x1 - x0) * (y1 - y0)
    return ys[-1]


class Table:
    """Ranks among source entropies, and entropies of ranks, interpolated between quantiles.

    The authors take every source entropy for a quantile, the least with rank 1 / n. Here they are quantiles at even
    steps from rank 0 to 1, all different.
    """

    def __init__(self, quantiles: list[float]) -> None:
        self.quantiles = quantiles
        self.levels = [i / (len(quantiles) - 1) for i in range(len(quantiles))]

    def rank(self, value: float) -> float:
        return interpolate(value, self.quantiles, self.levels)

    def entropy(self, rank: float) -> float:
        return interpolate(rank, self.levels, self.quantiles)


class Gambler:
    """Wealth is multiplied by 1 + e (u - 1/2); the bet e climbs the logarithm of the wealth by scale-free steps."""

    def __init__(self) -> None:
        self.bet, self.wealth, self.slopes = 0.0, 1.0, list[float]()
        self.seen, self.largest = 0, 0.0

    def protect(self, u: float) -> float:
        """Rank under the distribution that the bets so far believe in; the bet learns from the rank afterwards."""
        rank = 0.5 * self.bet * u**2 + (1 - 0.5 * self.bet) * u
        self.wealth = min(self.wealth * (1 + self.bet * (u - 0.5)), 1e200)
        self.seen += 1
        if self.seen > 1 or FIRST_BET_COUNTS:
            slope = (u - 0.5) / (1 + self.bet * (u - 0.5))
            # The bound is not a clip: beyond it, by one step at most, slopes that lead further away count as zero.
            if (u - 0.5) * self.bet > 0 and abs(self.bet) > BOUND:
                slope = 0.0
            self.slopes.append(slope)
            if slope != 0.0:
                self.bet += STEP * slope / math.sqrt(sum(g * g for g in self.slopes))
        self.largest = max(self.largest, abs(self.bet))
        return rank


class NaivePOEM:
    """Entropies of confident samples are pulled to those of their protected ranks.

    The margin is 0.4 ln 1000 in the authors' code, here a share of ln k as in the other methods. Without any confident
    sample theirs still follows the momentum; here nothing changes, as elsewhere in this package.
    """

    def __init__(
        self, twin: Any, optimizer: torch.optim.Optimizer, table: Table, limit: float, tau: float
    ) -> None:
        self.twin, self.optimizer, self.table = twin, optimizer, table
        self.limit, self.tau, self.images = limit, tau, 0
        self.gambler, self.kept = Gambler(), list[tuple[int, int]]()

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.twin(x)
        found = [entropy(row / self.tau) for row in logits]
        wanted = [self.table.entropy(self.gambler.protect(self.table.rank(float(h.detach())))) for h in found]
        self.images += len(x)
        if self.images >= WAIT:
            terms = []
            for h, target in zip(found, wanted, strict=True):
                if h < self.limit:
                    weight = math.exp(self.limit - float(h.detach()))
                    terms.append((weight * h - weight * target) ** 2)
            self.kept.append((len(terms), len(x)))
            if terms:
                self.optimizer.zero_grad()
                (0.5 * sum(terms[1:], terms[0]) / len(terms)).backward()
                self.optimizer.step()
        return logits


def gamble(ranks: list[float]) -> Gambler:
    gambler = Gambler()
    for u in ranks:
        gambler.protect(u)
    return gambler


def test_ranks_and_entropies_are_inverse() -> None:
    table = Table([0.0, 0.1, 0.4, 0.5, 1.3])
    for value in (0.0, 0.05, 0.1, 0.33, 0.5, 0.9, 1.3):
        assert table.entropy(table.rank(value)) == pytest.approx(value, abs=1e-15)
    assert (table.rank(-1.0), table.rank(9.0), table.rank(0.25)) == (0.0, 1.0, 0.375)


def test_no_wealth_is_made_of_uniform_ranks() -> None:
    """It is a martingale: its mean stays 1, and it rarely ever is large."""
    draw = random.Random(0)
    runs = [gamble([draw.random() for _ in range(500)]).wealth for _ in range(200)]
    assert sum(runs) / len(runs) == pytest.approx(1.0, abs=0.15)
    assert sum(wealth > 10 for wealth in runs) < 20
    assert max(gamble([draw.random() for _ in range(500)]).largest for _ in range(20)) < 1.0


def test_wealth_grows_where_ranks_are_high_or_low() -> None:
    draw = random.Random(1)
    high = gamble([draw.uniform(0.4, 1.0) for _ in range(500)])
    low = gamble([draw.uniform(0.0, 0.6) for _ in range(500)])
    assert high.wealth > 1e6
    assert low.wealth > 1e6
    assert high.bet > 0.5
    assert low.bet < -0.5
    # Entropies that are too high are pulled down, and those that are too low up; the ends stay.
    assert high.protect(0.8) < 0.8
    assert low.protect(0.2) > 0.2
    assert high.protect(0.0) == 0.0
    assert high.protect(1.0) == pytest.approx(1.0)


def test_a_bet_passes_its_bound_by_one_step_at_most() -> None:
    gambler = gamble([1.0] * 3_000)
    assert BOUND < gambler.bet <= BOUND + STEP
    before = gambler.bet
    gambler.protect(0.9)
    assert gambler.bet == before
    gambler.protect(0.1)
    assert gambler.bet < before


def test_protected_ranks_have_the_density_of_the_bet() -> None:
    """Their slope is the factor of the wealth: ranks with that density become uniform."""
    gambler = Gambler()
    for gambler.bet in (-1.5, 0.0, 0.7):
        for u in (0.1, 0.5, 0.8):
            bet = gambler.bet
            above = gambler.protect(u + 1e-6)
            gambler.bet = bet
            below = gambler.protect(u - 1e-6)
            gambler.bet = bet
            assert (above - below) / 2e-6 == pytest.approx(1 + bet * (u - 0.5), rel=1e-6)


@pytest.fixture
def make_poem(
    make_net: Maker, make_twin: Maker, make_optimizer: Maker, make_stream: Maker, make_sites: Maker
) -> Maker:
    """Builds the network, sites whose entropies are a share of its own on brighter images, and its twin."""

    def build(norm: str, share: float, quantiles: int, tau: float, momentum: float) -> Any:
        net = make_net(CLASSES, norm)
        with torch.no_grad():
            net.fc.weight *= 2.5 if norm == "batch" else 4
            (images,) = make_stream(64, seed=50)
            net.fc.bias.copy_(-net.fc.weight @ make_twin(net).forward_features(images).mean(0))
            (images,) = make_stream(200, seed=51)
            found = torch.stack([entropy(row / tau) for row in make_twin(net)(images)])
        levels = torch.linspace(0, 1, quantiles, dtype=torch.float64)
        table = (share * found).quantile(levels).float().double()
        assert bool((table.diff() > 0).all())
        sites = replace(make_sites(net, CLASSES), entropies={"pd": table}, temperatures={"pd": tau})
        optimizer = make_optimizer(twin := make_twin(net), "sgd", 0.02, momentum)
        optimizer.param_groups[0]["nesterov"] = False
        limit = 0.4 * math.log(CLASSES)
        return net, sites, NaivePOEM(twin, optimizer, Table(table.tolist()), limit, tau)

    return build


@NORMS
@pytest.mark.parametrize("share", [0.3, 1.6], ids=["entropies too high", "entropies too low"])
@pytest.mark.parametrize("momentum", [None, 0.0])
def test_poem(
    momentum: float | None,
    share: float,
    norm: str,
    make_poem: Maker,
    make_stream: Maker,
    assert_parameters: Check,
) -> None:
    """SGD with plain momentum, as in the authors' code, unless it is said to have none."""
    net, sites, naive = make_poem(norm, share, 65, 1.0, 0.9 if momentum is None else momentum)
    options = {} if momentum is None else {"momentum": momentum}
    adapter = ttvd.create("poem", net, sites=sites, lr=0.02, **options)
    start = {name: p.detach().clone() for name, p in naive.twin.named_parameters()}
    for x in make_stream(16, 9, 16, 1, 24, 16, 12) * 3:
        assert_near(adapter(x), naive(x))
        if naive.images < WAIT:
            assert all(torch.equal(p, start[name]) for name, p in naive.twin.named_parameters())
            assert_near(adapter.predict(x), naive.twin(x))
    assert any(0 < kept < size for kept, size in naive.kept), "all are confident, or none: this shows nothing"
    bounded = norm == "batch" and share < 1.0
    assert naive.gambler.largest > (BOUND if bounded else 0.4), "there is no bet to speak of"
    assert_parameters(adapter, naive.twin, net)


@NORMS
@pytest.mark.parametrize(("quantiles", "tau"), [(9, 1.3), (2_001, 0.8)])
def test_poem_at_the_temperature_of_the_source(
    quantiles: int,
    tau: float,
    norm: str,
    make_poem: Maker,
    make_stream: Maker,
    assert_parameters: Check,
) -> None:
    """Entropies of the source and of the stream are both at it, and so is the output: the authors' model holds it."""
    net, sites, naive = make_poem(norm, 0.3, quantiles, tau, 0.0)
    adapter = ttvd.create("poem", net, sites=sites, lr=0.02, momentum=0.0)
    for x in make_stream(16, 9, 16, 1, 24, 16, 12) * 2:
        assert_near(adapter(x), naive(x) / tau)
    assert_parameters(adapter, naive.twin, net)


# PeTTA


class HandRobustNorm(nn.Module):
    """In training the averages follow the batch first and normalise it then."""

    share = 0.05

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())
        self.mean, self.var, self.eps = norm.running_mean.clone(), norm.running_var.clone(), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        columns = x.movedim(1, -1).reshape(-1, x.shape[1])
        mean, var = self.mean, self.var
        if self.training:
            batch_mean = columns.sum(0) / len(columns)
            batch_var = ((columns - batch_mean) ** 2).sum(0) / len(columns)
            mean = (1 - self.share) * mean + self.share * batch_mean
            var = (1 - self.share) * var + self.share * batch_var
            self.mean, self.var = mean.detach(), var.detach()
        columns = (columns - mean) / (var + self.eps) ** 0.5 * self.weight + self.bias
        return columns.reshape(x.movedim(1, -1).shape).movedim(-1, 1)


def replace_norms(net: nn.Module) -> Any:
    """A copy with hand-written norms, in which nothing wants gradients."""
    twin = copy.deepcopy(net)
    for name, layer in net.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            twin.set_submodule(name, HandRobustNorm(layer))
    return twin.requires_grad_(False).eval()


def affine(twin: nn.Module) -> dict[str, nn.Parameter]:
    layers = [(n, m) for n, m in twin.named_modules() if isinstance(m, HandRobustNorm | nn.GroupNorm)]
    return {f"{n}.{leaf}": p for n, m in layers for leaf, p in m.named_parameters()}


def moments_of(twin: nn.Module) -> dict[str, Tensor]:
    layers = {name: m for name, m in twin.named_modules() if isinstance(m, HandRobustNorm)}
    means = {f"{name}.running_mean": m.mean for name, m in layers.items()}
    return means | {f"{name}.running_var": m.var for name, m in layers.items()}


class Item:
    def __init__(self, x: Tensor, label: int, doubt: float) -> None:
        self.x, self.label, self.doubt, self.age = x, label, doubt, 0


class Memory:
    """RoTTA's: a list for each class; every arrival makes everything in it older, the newcomer too."""

    def __init__(self, capacity: int, classes: int) -> None:
        self.capacity, self.lists, self.evicted = capacity, [list[Item]() for _ in range(classes)], 0

    def score(self, item: Item) -> float:
        return 1 / (1 + math.exp(-item.age / self.capacity)) + item.doubt / math.log(len(self.lists))

    def add(self, new: Item) -> None:
        sizes = [len(items) for items in self.lists]
        below = sizes[new.label] < self.capacity / len(self.lists)
        rivals = [c for c, size in enumerate(sizes) if size == max(sizes)] if below else [new.label]
        room = below and sum(sizes) < self.capacity
        if not room:
            worst = max((i for c in rivals for i in self.lists[c]), key=self.score)
            room = self.score(worst) > self.score(new)
            if room:
                self.lists[worst.label].remove(worst)
                self.evicted += 1
        if room:
            self.lists[new.label].append(new)
        for item in self.items():
            item.age += 1

    def items(self) -> list[Item]:
        return [item for items in self.lists for item in items]


def cross_entropy(target: Tensor, row: Tensor) -> Tensor:
    return -(target.softmax(-1) * row.log_softmax(-1)).sum()


class NaivePeTTA:
    """A teacher predicts and marks a batch; a student learns from the memory; a source network follows it as well.

    Of the authors' configurations this is the default one: the self-training loss with four cross-entropies
    (ImageNet's has the last but one alone), cosines to the source weights, both rates adaptive. Their code takes a step
    after every batch and has no use for its update frequency, so that batches here have as many images as lie
    between two steps.
    """

    def __init__(self, net: nn.Module, means: Tensor, options: dict[str, Any]) -> None:
        self.student, self.teacher, self.source = (replace_norms(net) for _ in range(3))
        leaves = [p.requires_grad_() for p in affine(self.student).values()]
        self.optimizer = torch.optim.Adam(leaves, lr=options["lr"])
        self.memory = Memory(options.get("memory_size", 64), len(means))
        self.means, self.running, self.options = means, means.clone(), options
        self.features, self.labels = means, list[int]()

    def predict(self, x: Tensor) -> Tensor:
        """Logits of the teacher under its averages; images enter the memory one after the other."""
        self.features = self.teacher.eval().forward_features(x)
        logits: Tensor = self.teacher.fc(self.features)
        self.labels = [int(row.argmax()) for row in logits]
        for image, label, row in zip(x, self.labels, logits, strict=True):
            # The authors add a millionth to p; it decides who stays only where two scores are as near.
            self.memory.add(Item(image, label, float(entropy(row))))
        return logits

    def deviations(self) -> Tensor:
        """Squared distances of the running means from those of the source, for the classes of the batch alone."""
        found = torch.zeros_like(self.means)
        for label in set(self.labels):
            found[label] = (self.running[label] - self.means[label]) ** 2 / len(set(self.labels))
        return found

    def drift(self, variances: Tensor) -> float:
        """One number for all classes: the paper averages one for each, and sums over dimensions instead of averaging.

        It is measured before the batch enters the running means, so that the first is always zero.
        """
        scaled = self.deviations() / (variances + 1e-6)
        return 1 - math.exp(-float(scaled.sum()) / scaled.shape[1])

    def learn(self, drift: float) -> None:
        images = torch.stack([item.x for item in self.memory.items()])
        taught = self.teacher.train()(images)
        plain = self.student.train()(images)
        original = self.source.train()(
            images
        )  # its averages follow the memory as well, its weights never change
        strong = self.student(darken(images))  # the averages of the student follow twice
        loss = torch.zeros((), dtype=images.dtype)
        for t, p, o, s in zip(taught, plain, original, strong, strict=True):
            both = cross_entropy(t, p) + cross_entropy(p, t) + cross_entropy(t, s) + cross_entropy(s, t)
            loss = loss + 0.25 * both + self.options.get("al_weight", 1.0) * cross_entropy(o, s)
        loss = loss / len(images)
        weights, source = affine(self.student), affine(self.source)
        for name, p in weights.items():
            cosine = (p @ source[name]) / p.norm() / source[name].norm()
            loss = loss - drift * self.options.get("lambda_0", 10.0) * cosine / len(weights)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        share = (1 - drift) * self.options.get("alpha_0", 1e-3)
        for name, old in affine(self.teacher).items():
            old.data = (1 - share) * old.data + share * weights[name].data
        self.follow()

    def follow(self, share: float = 0.05) -> None:
        """Running class means, of the features that predicted the batch."""
        for label in set(self.labels):
            own = [z for z, other in zip(self.features, self.labels, strict=True) if other == label]
            mean = sum(own[1:], own[0]) / len(own)
            self.running[label] = (1 - share) * self.running[label] + share * mean


def darken(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stands for the random augmentation."""
    return 0.9 * x.flip(-1) ** 1.5


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the random augmentation fixed in every method that uses it: it has tests of its own."""
    ttvd.list_methods()
    for name, module in list(sys.modules.items()):
        if name.startswith("ttvd.methods.") and "augment" in vars(module):
            monkeypatch.setattr(module, "augment", darken)


def test_the_drift_is_that_of_the_classes_seen(
    make_net: Maker, make_sites: Maker, make_stream: Maker
) -> None:
    net = make_net(CLASSES)
    means, variances = (
        make_sites(net, CLASSES).means[:, 0],
        torch.full((CLASSES, 8), 0.25, dtype=torch.float64),
    )
    naive = NaivePeTTA(net, means, {"lr": 0.01})
    (x,) = make_stream(8)
    naive.predict(x)
    assert naive.drift(variances) == 0.0
    naive.follow()
    drift, labels = naive.drift(variances), naive.labels
    assert 0 < drift < naive.drift(0.1 * variances) < 1
    naive.labels = [next(c for c in range(CLASSES) if c not in labels)]
    assert naive.drift(variances) == 0.0, "a class that was never predicted has not moved"
    naive.labels = labels
    for _ in range(500):
        naive.follow()
    settled = naive.drift(variances)
    naive.follow(1.0)
    assert settled == pytest.approx(naive.drift(variances), rel=1e-6)


def test_the_pull_to_the_source_turns_weights_and_not_their_length(
    make_net: Maker, make_stream: Maker
) -> None:
    """Where nothing else is learnt from, the gradient is orthogonal to the weights, and zero at the source."""
    net = make_net(CLASSES)
    weights, source = affine(replace_norms(net)), affine(replace_norms(net))
    for name, p in weights.items():
        p.requires_grad_()
        cosine = -(p @ source[name]) / p.norm() / source[name].norm()
        (gradient,) = torch.autograd.grad(cosine, p)
        assert float(gradient.abs().max()) < 1e-12
        p.data = p.data + 0.1 * torch.linspace(-1, 1, len(p), dtype=p.dtype)
        cosine = -(p @ source[name]) / p.norm() / source[name].norm()
        (gradient,) = torch.autograd.grad(cosine, p)
        assert abs(float((gradient @ p).detach())) < 1e-12 < float(gradient.abs().max())


def state_of(adapter: nn.Module, part: str) -> dict[str, Tensor]:
    return {n.removeprefix(part): t for n, t in adapter.state_dict().items() if n.startswith(part)}


def weights_of(adapter: nn.Module, part: str, twin: nn.Module) -> Tensor:
    """Affine parameters as one vector; a method that needs features wraps the model once more."""
    state = {name.removeprefix("model."): t for name, t in state_of(adapter, part).items()}
    return torch.cat([state[name].flatten() for name in affine(twin)]).clone()


class Watched:
    """The method, and the drift that its teacher's last step shows.

    The teacher takes (1 - drift) alpha_0 of the student, so that the drift is known without knowing how it is scaled.
    """

    def __init__(self, adapter: nn.Module, naive: NaivePeTTA) -> None:
        self.adapter, self.naive, self.drift = adapter, naive, 0.0

    def __call__(self, x: Tensor) -> Tensor:
        before = weights_of(self.adapter, "teacher.", self.naive.teacher)
        found: Tensor = self.adapter(x)
        after = weights_of(self.adapter, "teacher.", self.naive.teacher)
        way = weights_of(self.adapter, "model.", self.naive.student) - before
        share = float((after - before) @ way / (way @ way))
        self.drift = 1 - share / self.naive.options["alpha_0"]
        return found


def assert_state(adapter: nn.Module, part: str, twin: nn.Module) -> None:
    """Affine parameters and averages are the twin's; nothing else of the network is in the state."""
    state = {name.removeprefix("model."): t for name, t in state_of(adapter, part).items()}
    wanted: dict[str, Tensor] = {**affine(twin), **moments_of(twin)}
    assert set(state) == set(wanted)
    for name, tensor in wanted.items():
        assert_near(state[name], tensor)


PETTAS: dict[str, dict[str, Any]] = {
    "room for all": {"memory_size": 1000, "update_every": 6, "alpha_0": 0.5},
    "evictions": {"memory_size": 9, "update_every": 8, "alpha_0": 0.3, "al_weight": 0.3},
    "strong pull": {
        "memory_size": 12,
        "update_every": 8,
        "alpha_0": 0.5,
        "lambda_0": 1000.0,
        "al_weight": 0.0,
    },
}


def build_petta(net: ResNet, sites: ttvd.Sites, options: dict[str, Any]) -> tuple[nn.Module, NaivePeTTA]:
    adapter = ttvd.create("petta", net, sites=sites, **options)
    return adapter, NaivePeTTA(net, sites.means[:, 0], options)


@NORMS
@pytest.mark.parametrize("options", PETTAS.values(), ids=PETTAS)
def test_petta(
    options: dict[str, Any], norm: str, make_net: Maker, make_sites: Maker, make_stream: Maker
) -> None:
    """However the drift is scaled: it is read off the teacher, and decides the same pull and the same rate."""
    net = make_net(CLASSES, norm)
    adapter, naive = build_petta(net, make_sites(net, CLASSES), {**options, "lr": 0.01})
    watched, drifts = Watched(adapter, naive), []
    for x in make_stream(*[options["update_every"]] * 12):
        assert_near(watched(x), naive.predict(x))
        drifts.append(watched.drift)
        naive.learn(watched.drift)
        assert_near(adapter.predict(x), naive.teacher.eval()(x))  # type: ignore[operator]
    assert drifts[0] == pytest.approx(0.0, abs=1e-9), "the first batch is compared with the source itself"
    assert all(-1e-9 < drift < 1 for drift in drifts)
    assert max(drifts) > 1e-4, "nothing drifts: this shows nothing"
    assert (naive.memory.evicted > 5) == (options["memory_size"] < 1000)
    assert_state(adapter, "model.", naive.student)
    assert_state(adapter, "teacher.", naive.teacher)


def test_petta_s_drift_grows_with_squared_distances(
    make_net: Maker, make_sites: Maker, make_stream: Maker
) -> None:
    """Minus the logarithm of 1 - drift is a weighted sum of squared distances, over the classes of the batch.

    The weights are the method's own, one for each class and dimension, half as many as there are batches: they must
    exist. They do not for distances that are not squared, nor for the paper's mean of one drift for each class.
    """
    net = make_net(3)
    options = {"memory_size": 12, "update_every": 6, "alpha_0": 0.5, "lr": 1e-5}
    adapter, naive = build_petta(net, make_sites(net, 3), options)
    watched, rows, wanted = Watched(adapter, naive), [], []
    for seed in range(48):
        (x,) = make_stream(6, seed=seed)
        assert_near(watched(x), naive.predict(x))
        rows.append(naive.deviations().detach().flatten())
        wanted.append(-math.log(1 - watched.drift))
        naive.learn(watched.drift)
    matrix, exponents = torch.stack(rows), torch.tensor(wanted, dtype=torch.float64)
    matrix = matrix / matrix.amax(0)
    weights = torch.linalg.lstsq(matrix, exponents[:, None], driver="gelsd").solution
    assert float(torch.linalg.svdvals(matrix)[-1]) > 1e-3, "any weights would do"
    assert float(((matrix @ weights)[:, 0] - exponents).abs().max()) < 1e-7 * max(wanted)


@pytest.mark.parametrize("options", PETTAS.values(), ids=PETTAS)
def test_petta_with_variances_of_the_source(
    options: dict[str, Any],
    make_net: Maker,
    make_sites: Maker,
    make_stream: Maker,
    generator: torch.Generator,
) -> None:
    """The authors divide squared distances by the variances of the class's source features in each dimension."""
    if "variances" not in {field.name for field in fields(ttvd.Sites)}:
        pytest.skip(
            "sites hold no variances of the features, so that the scale of the drift is the method's own"
        )
    net = make_net(CLASSES)
    sites = make_sites(net, CLASSES)
    variances = 0.05 + torch.rand(sites.means.shape, generator=generator).double()
    changes: dict[str, Any] = {"variances": variances}
    sites = replace(sites, **changes)
    adapter, naive = build_petta(net, sites, {**options, "lr": 0.01})
    for x in make_stream(*[options["update_every"]] * 12):
        assert_near(adapter(x), naive.predict(x))
        naive.learn(naive.drift(variances[:, 0]))
    assert_state(adapter, "model.", naive.student)
    assert_state(adapter, "teacher.", naive.teacher)


def test_petta_s_defaults_are_the_authors() -> None:
    usual = ttvd.list_methods()["petta"].parameters()
    wanted = {"memory_size": 64, "update_every": 64, "alpha_0": 1e-3, "lambda_0": 10.0, "al_weight": 1.0}
    assert (wanted | {"lr": 1e-3}).items() <= usual.items()
