"""TTVD in all its forms against plain loops over samples, classes and views that follow the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import OFF
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
Optimizers = Callable[..., torch.optim.Optimizer]
Compare = Callable[[nn.Module, nn.Module, nn.Module], None]


@dataclass(frozen=True)
class Recipe:
    """What is predicted and minimised; the fields have TTVD's names and meanings."""

    structure: str = "cipd"
    objective: str = "consensus"
    gamma: float = 1.0
    tau: float = 3.0
    shift: float | None = None
    agreement_filter: bool = True
    diversity_weight: float = 1.0


PINNED = {name: value for name, value in OFF.items() if name != "diversity_weight"}
"""Without what a recipe does not speak of; all of that has a suite of its own, `test_ttvd_default`."""


def influence(z: Tensor, sites: Tensor, weights: Tensor | None, gamma: float, shift: float | None) -> Tensor:
    """F (b, k) of views z (v, b, d): the a-th view against sites (k, v, d) of its own number only."""
    centred = sites.flatten(0, 1) - sites.flatten(0, 1).mean(0)
    floor = torch.finfo(torch.float64).eps * centred.square().sum(1).mean()
    lift = 0.0 if weights is None else float(weights.max()) if shift is None else shift
    rows = []
    for sample in range(z.shape[1]):
        row = []
        for label in range(len(sites)):
            total = torch.zeros((), dtype=torch.float64)
            for view in range(sites.shape[1]):
                q = (z[view, sample] - sites[label, view]).square().sum()
                q = q.sqrt() if weights is None else torch.maximum(q - weights[label, view] + lift, floor)
                total = total - math.copysign(1.0, gamma) * q**gamma
            row.append(total)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of one row of logits."""
    logs = logits - torch.logsumexp(logits, 0)
    return -(logs.exp() * logs).sum()


class Naive:
    """The outputs, the kept samples and the loss of one batch."""

    def __init__(self, twin: Any, means: Tensor, recipe: Recipe) -> None:
        self.twin, self.means, self.recipe = twin, means, recipe
        self.single = recipe.structure in ("vd", "pd")
        self.gamma = 1.0 if self.single else recipe.gamma
        k, width = len(means), twin.fc.out_features // len(means)
        weight, bias = twin.fc.weight.detach(), twin.fc.bias.detach()
        self.power_sites = (weight / 2).reshape(k, width, -1)
        self.power_weights = (bias + weight.square().sum(1) / 4).reshape(k, width)

    def __call__(self, x: Tensor) -> tuple[Tensor, list[int], Tensor]:
        turns = 1 if self.single else 4
        z = self.twin.forward_features(torch.cat([torch.rot90(x, a, (2, 3)) for a in range(turns)]))
        z = z.reshape(turns, len(x), -1)
        voronoi = influence(z, self.means[:, :turns], None, self.gamma, None)
        width = min(turns, self.power_sites.shape[1])
        power = influence(
            z, self.power_sites[:, :width], self.power_weights[:, :width], self.gamma, self.recipe.shift
        )
        output = (power if self.recipe.structure in ("pd", "cipd") else voronoi) / self.recipe.tau
        agreed = [i for i in range(len(x)) if int(voronoi[i].argmax()) == int(power[i].argmax())]
        kept = agreed if self.recipe.agreement_filter else list(range(len(x)))
        loss = torch.zeros((), dtype=torch.float64)
        for i in kept:
            loss = loss + self.cost(z[:, i], output[i]) / len(kept)
        logs = torch.stack([row - row.logsumexp(0) for row in output]).logsumexp(0) - math.log(len(x))
        loss = loss + self.recipe.diversity_weight * (len(x) - 1) / len(x) * (logs.exp() * logs).sum()
        return output, kept, loss

    def cost(self, views: Tensor, output: Tensor) -> Tensor:
        """The objective of one sample with features (v, d); a plain head judges the upright view alone."""
        if self.recipe.objective == "entropy":
            return entropy(output)
        joint = self.power_sites.shape[1]
        judged = views if joint > 1 else views[:1]
        if self.recipe.objective == "consensus":
            target = int(output.argmax())
            costs = [-F.log_softmax(self.twin.fc(z), 0)[target * joint + a] for a, z in enumerate(judged)]
            return torch.stack(costs).mean()
        by_power = [entropy(self.twin.fc(z)) for z in judged]
        by_sites = [entropy(-(z - self.means.flatten(0, 1)).square().sum(1).sqrt()) for z in views]
        return torch.stack(by_power).mean() + torch.stack(by_sites).mean()


@dataclass(frozen=True)
class Bench:
    """Runs an adapter and its naive twin over the same stream."""

    twin_of: Callable[..., Any]
    optimizer_of: Optimizers
    compare: Compare

    def run(
        self,
        adapter: ttvd.Adapter,
        net: ResNet,
        sites: ttvd.Sites,
        recipe: Recipe,
        stream: Sequence[Tensor],
        *,
        lr: float,
        optimizer: str = "sgd",
        steps: int = 1,
        prediction: str = "before",
        prior: float = 0.0,
    ) -> list[float]:
        """Compare every prediction and the final parameters; returns the share kept of each batch."""
        twin = self.twin_of(net, prior=prior)
        descent, naive = self.optimizer_of(twin, optimizer, lr), Naive(twin, sites.means, recipe)
        shares = []
        for x in stream:
            found = adapter(x)
            for _ in range(steps):
                output, kept, loss = naive(x)
                if kept:
                    descent.zero_grad()
                    loss.backward()
                    descent.step()
            shares.append(len(kept) / len(x))
            assert float(adapter.kept) == pytest.approx(shares[-1], abs=1e-6)
            wanted = naive(x)[0] if prediction == "after" else output
            torch.testing.assert_close(found.softmax(-1), wanted.softmax(-1).detach(), rtol=1e-8, atol=1e-8)
        self.compare(adapter, twin, net)
        return shares


@pytest.fixture
def bench(make_twin: Callable[..., Any], make_optimizer: Optimizers, assert_parameters: Compare) -> Bench:
    return Bench(make_twin, make_optimizer, assert_parameters)


Sitting = tuple[ResNet, ttvd.Sites, list[Tensor]]


@pytest.fixture(params=[12, 3], ids=["joint head", "plain head"])
def sitting(
    request: pytest.FixtureRequest,
    make_net: NetMaker,
    make_sites: Callable[..., ttvd.Sites],
    make_stream: Callable[..., list[Tensor]],
) -> Sitting:
    """A network with or without label augmentation, its sites, and a stream of five batches."""
    net = make_net(request.param)
    return net, make_sites(net), make_stream(8, 5, 1, 8, 6)


PRESETS: dict[str, tuple[Recipe, float]] = {
    "vd": (Recipe("vd", "entropy", tau=0.7, agreement_filter=False, diversity_weight=0), 0.03),
    "civd": (Recipe("civd", "entropy", -0.8, tau=0.06, agreement_filter=False, diversity_weight=0), 0.03),
    "pd": (Recipe("pd", "entropy", tau=1.3, agreement_filter=False, diversity_weight=0), 0.03),
    "cipd": (Recipe("cipd", "entropy", -0.8, tau=0.04, diversity_weight=0), 0.03),
    "ttvd-paper": (Recipe("cipd", "entropy", -0.8, tau=1.0, diversity_weight=0), 5.0),
    "ttvd-reference": (Recipe("cipd", "joint", 1.0, tau=3.0, diversity_weight=0), 0.03),
}
"""What each registered name stands for; the temperatures are those that the sites hold for it."""


@pytest.mark.parametrize("name", PRESETS)
def test_registered_name(name: str, sitting: Sitting, bench: Bench) -> None:
    """Nothing is given but the learning rate: the rest is what the paper or its code has."""
    (net, sites, stream), (recipe, lr) = sitting, PRESETS[name]
    adapter = ttvd.create(name, net, sites=sites, lr=lr)
    shares = bench.run(adapter, net, sites, recipe, stream, lr=lr)
    if recipe.agreement_filter:
        assert any(0 < share < 1 for share in shares), f"the filter was not put to the test: {shares}"


def test_every_registered_name_is_looked_at() -> None:
    family = {name: method for name, method in ttvd.list_methods().items() if method.adapter is ttvd.TTVD}
    assert family.keys() == {"ttvd", *PRESETS}
    assert {method.defaults.get("lr") for name, method in family.items() if name != "ttvd"} == {1e-3}
    assert family["ttvd"].defaults == {}


def test_consensus_with_the_filter_and_balance(sitting: Sitting, bench: Bench) -> None:
    net, sites, stream = sitting
    adapter = ttvd.create(
        "ttvd",
        net,
        sites=sites,
        structure="cipd",
        lr=5e-3,
        agreement_filter=True,
        diversity_weight=1.0,
        **PINNED,
    )
    shares = bench.run(adapter, net, sites, Recipe(), stream, lr=5e-3)
    assert any(0 < share < 1 for share in shares), f"the filter was not put to the test: {shares}"


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("objective", ["entropy", "joint", "consensus"])
@pytest.mark.parametrize("structure", ["vd", "civd", "pd", "cipd"])
def test_every_combination(
    structure: Any, objective: Any, filtered: bool, sitting: Sitting, bench: Bench
) -> None:
    net, sites, stream = sitting
    tau = 1.0 if structure in ("vd", "pd") else 0.1
    recipe = Recipe(structure, objective, -0.8, tau, None, filtered, diversity_weight=0.5)
    adapter = ttvd.TTVD(net, sites, lr=0.1, **PINNED, **vars(recipe))
    bench.run(adapter, net, sites, recipe, stream, lr=0.1)


@pytest.mark.parametrize("prediction", ["before", "after"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_and_optimizers(optimizer: str, prediction: Any, sitting: Sitting, bench: Bench) -> None:
    net, sites, stream = sitting
    options: dict[str, Any] = {"lr": 0.01, "optimizer": optimizer, "steps": 3, "prediction": prediction}
    recipe, pinned = Recipe(tau=2.0), {**PINNED, "statistics": ttvd.Statistics(prior=0.2)}
    adapter = ttvd.TTVD(net, sites, **pinned, **vars(recipe), **options)
    bench.run(adapter, net, sites, recipe, stream, prior=0.2, **options)


SHIFTS = [(2.0, 10.0, None), (0.5, 0.3, 7.5), (1.0, 0.5, 0.0), (-0.8, 0.1, 2.0), (-3.0, 1e-5, 30.0)]


@pytest.mark.parametrize(("gamma", "tau", "shift"), SHIFTS)
def test_gamma_and_shift(
    gamma: float, tau: float, shift: float | None, sitting: Sitting, bench: Bench
) -> None:
    """A shift below the largest weight sends some power distances to the floor."""
    net, sites, stream = sitting
    recipe = Recipe("cipd", "entropy", gamma, tau, shift, False, 0.3)
    adapter = ttvd.TTVD(net, sites, lr=0.1, **PINNED, **vars(recipe))
    bench.run(adapter, net, sites, recipe, stream, lr=0.1)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_batches_of_one_come_and_go(
    optimizer: str,
    make_net: NetMaker,
    make_sites: Callable[..., ttvd.Sites],
    make_stream: Callable[..., list[Tensor]],
    bench: Bench,
) -> None:
    """Each sample is kept or not: where it is not, momentum and step count must stand still too."""
    net = make_net()
    sites = make_sites(net, seed=0)
    options: dict[str, Any] = {"lr": 0.02, "optimizer": optimizer}
    adapter = ttvd.create(
        "ttvd", net, sites=sites, agreement_filter=True, diversity_weight=1.0, **PINNED, **options
    )
    shares = bench.run(adapter, net, sites, Recipe(), make_stream(*[1] * 12), **options)
    assert {0.0, 1.0} == set(shares)
    assert shares.index(1.0) < len(shares) - 1 - shares[::-1].index(1.0), "nothing came between two updates"
