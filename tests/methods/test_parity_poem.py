"""POEM against a plain twin: bets on the ranks of entropies, one sample after the other.

The twin follows the authors' code: yarinbar/poem (protector.py and poem.py, stored as 6110-CTO/poem, with the loss of
its script for ImageNet; its cdf.py as utils/cdf.py of Louexes/MartingaleShiftDetectorStudy). Where it leaves that, a
comment says so.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, read_defaults
from ttvd.methods import POEM
from ttvd.methods.poem import EntropyMatcher

Maker = Callable[..., Any]
Check = Callable[[nn.Module, nn.Module, nn.Module], None]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])
CLASSES = 5
FIRST_BET_COUNTS = True
"""Whether the bet learns from the very first sample. False for the authors' code, which asks whether there were any
samples before it has noted the one at hand."""
STEP, BOUND = 1 / (8 * math.sqrt(3)), 1.8
"""Step size and bound of the bet in the authors' scripts; the class on its own has a step of 2 / sqrt(3)."""
WAIT = 100
"""Samples that are only bet on. The batch in which the hundredth comes is learnt from."""


def entropy(row: Tensor) -> Tensor:
    p = torch.exp(row) / torch.exp(row).sum()
    return -(p * torch.log(p)).sum()


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

    def __init__(self, bound: float = BOUND) -> None:
        self.bound, self.bet, self.wealth, self.slopes = bound, 0.0, 1.0, list[float]()
        self.seen, self.largest = 0, 0.0

    def protect(self, u: float) -> float:
        """Rank under the distribution that the bets so far believe in; the bet learns from the rank afterwards."""
        rank = 0.5 * self.bet * u**2 + (1 - 0.5 * self.bet) * u
        self.wealth = min(self.wealth * (1 + self.bet * (u - 0.5)), 1e200)
        self.seen += 1
        if self.seen > 1 or FIRST_BET_COUNTS:
            slope = (u - 0.5) / (1 + self.bet * (u - 0.5))
            # The bound is not a clip: beyond it, by one step at most, slopes that lead further away count as zero.
            if (u - 0.5) * self.bet > 0 and abs(self.bet) > self.bound:
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


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


TABLE = [0.0, 0.1, 0.4, 0.5, 1.3]


def test_ranks_and_entropies_are_inverse() -> None:
    table, matcher = Table(TABLE), EntropyMatcher(double(TABLE))
    values = [0.0, 0.05, 0.1, 0.25, 0.33, 0.4, 0.5, 0.9, 1.3]
    ranks = [table.rank(value) for value in values]
    assert [table.entropy(rank) for rank in ranks] == pytest.approx(values, abs=1e-15)
    assert (table.rank(-1.0), table.rank(9.0), table.rank(0.25)) == (0.0, 1.0, 0.375)
    assert_near(matcher.rank(double([-1.0, *values, 9.0])), double([0.0, *ranks, 1.0]))
    assert_near(matcher.invert(double(ranks)), double(values))


@pytest.mark.parametrize(
    ("low", "high", "bound"), [(0.0, 1.3, BOUND), (0.5, 1.3, BOUND), (0.5, 1.3, 0.3), (0.0, 0.4, 0.3)]
)
def test_bets(low: float, high: float, bound: float) -> None:
    table, gambler, draw = Table(TABLE), Gambler(bound), random.Random(1)
    matcher = EntropyMatcher(double(TABLE), limit=bound)
    for size in (1, 25, 7, 60):
        draws = [draw.uniform(low, high) for _ in range(size)]
        wanted = [table.entropy(gambler.protect(table.rank(value))) for value in draws]
        assert_near(matcher.match(double(draws)), double(wanted))
        assert float(matcher.bet) == pytest.approx(gambler.bet, rel=1e-8)
        assert float(matcher.log_wealth) == pytest.approx(math.log(gambler.wealth), rel=1e-8, abs=1e-12)
    assert (gambler.largest > bound) == (bound < 1.0)


def test_no_wealth_is_made_of_uniform_ranks() -> None:
    """It is a martingale: its mean stays what it is, whatever came before, and it rarely ever is large."""
    draw = random.Random(0)
    for past in ([], [0.9], [draw.uniform(0.4, 1.0) for _ in range(60)], [0.1] * 300):
        gambler = gamble(past)
        after = [copy.deepcopy(gambler) for _ in range(200)]
        for i, one in enumerate(after):
            one.protect((i + 0.5) / len(after))
        assert sum(one.wealth for one in after) / len(after) == pytest.approx(gambler.wealth, rel=1e-9)
    runs = [gamble([draw.random() for _ in range(200)]) for _ in range(200)]
    assert sum(run.wealth > 10 for run in runs) < 20
    assert max(run.largest for run in runs) < 1.0


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
def make_poem(make_sharp: Maker, make_optimizer: Maker, make_stream: Maker, make_sites: Maker) -> Maker:
    """Builds the network, sites whose entropies are a share of its own on brighter images, and its twin."""

    def build(norm: str, share: float, quantiles: int, tau: float, momentum: float) -> Any:
        net, twin = make_sharp(CLASSES, norm, 2.5 if norm == "batch" else 4)
        (images,) = make_stream(200, seed=51)
        found = torch.stack([entropy(row / tau).detach() for row in twin(images)])
        levels = torch.linspace(0, 1, quantiles, dtype=torch.float64)
        table = (share * found).quantile(levels).float().double()
        assert bool((table.diff() > 0).all())
        sites = replace(make_sites(net, CLASSES), entropies={"pd": table}, temperatures={"pd": tau})
        optimizer = make_optimizer(twin, "sgd", 0.02, momentum)
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
    options: dict[str, Any] = {} if momentum is None else {"momentum": momentum}
    adapter = POEM(net, sites, lr=0.02, **options)
    start = {name: p.detach().clone() for name, p in naive.twin.named_parameters()}
    for x in make_stream(16, 9, 16, 1, 24, 16, 18) * 3:  # the seventh batch holds the hundredth sample
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
    adapter = POEM(net, sites, lr=0.02, momentum=0.0)
    for x in make_stream(16, 9, 16, 1, 24, 16, 12) * 2:
        assert_near(adapter(x), naive(x) / tau)
    assert_parameters(adapter, naive.twin, net)


def test_poem_s_defaults_are_the_authors() -> None:
    usual = read_defaults(POEM)
    wanted = {"gamma": STEP, "limit": BOUND, "delay": WAIT, "margin": 0.4, "lr": 2.5e-4, "momentum": 0.9}
    assert wanted.items() <= usual.items()
