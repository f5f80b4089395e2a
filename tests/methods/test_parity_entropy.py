"""Conjugate labels, SAR, ETA, EATA and DeYO against plain loops: their papers' rules, one sample after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import assert_near, mean, probabilities
from ttvd.methods import deyo
from ttvd.methods.conjugate import ConjugatePL, conjugate_loss
from ttvd.methods.deyo import DeYO
from ttvd.methods.eata import EATA, ETA
from ttvd.methods.sar import SAR
from ttvd.nn.resnet import ResNet

LR = 0.01
Maker = Callable[..., Any]
MakeTrial = Callable[..., "Trial"]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])
OUTPUTS = pytest.mark.parametrize("outputs", [12, 5])


class Trial(NamedTuple):
    """A network, its twin, torch's SGD over the twin's norms, a stream, and what compares parameters at the end."""

    net: ResNet
    twin: Any
    optimizer: torch.optim.SGD
    stream: list[Tensor]
    compare: Callable[[nn.Module, nn.Module, nn.Module], None]

    def descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def learning(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.twin.named_parameters() if p.requires_grad}


@pytest.fixture
def make_trial(
    make_sharp: Maker, make_optimizer: Maker, make_stream: Maker, assert_parameters: Maker
) -> MakeTrial:
    def build(norm: str, outputs: int = 12, *, nesterov: bool = False) -> Trial:
        """A sharp head around the mean feature: sure and unsure predictions of several classes."""
        net, twin = make_sharp(outputs, norm, 2.5 if norm == "batch" else 6)
        optimizer = make_optimizer(twin, "sgd", LR)
        optimizer.param_groups[0]["nesterov"] = nesterov
        return Trial(net, twin, optimizer, make_stream(16, 9, 16, 1, 24, 16, 12), assert_parameters)

    return build


def entropies(logits: Tensor) -> list[Tensor]:
    return [-(probabilities(row) * torch.log(probabilities(row))).sum() for row in logits]


def naive_conjugate(h: Tensor, epsilon: float) -> Tensor:
    """The definition: a k x k system for the label, then the source loss against it."""
    p = probabilities(h)
    matrix = torch.eye(len(p), dtype=p.dtype) + epsilon * torch.diag(p) - epsilon * torch.outer(p, p)
    y: Tensor = torch.linalg.solve(matrix, p)
    return torch.logsumexp(h, 0) - (y * h).sum() + epsilon * (y * (1 - p)).sum()


@pytest.mark.parametrize("epsilon", [-0.5, 0.0, 6.0, 8.0])
def test_conjugate_loss_and_gradient_are_those_of_the_solved_system(
    epsilon: float, generator: torch.Generator
) -> None:
    h = (3 * torch.randn(7, 5, dtype=torch.float64, generator=generator)).requires_grad_()
    found, wanted = conjugate_loss(h, epsilon), torch.stack([naive_conjugate(row, epsilon) for row in h])
    assert_near(found, wanted)
    (gradient,), (reference,) = torch.autograd.grad(found.sum(), h), torch.autograd.grad(wanted.sum(), h)
    assert_near(gradient, reference)


@NORMS
@pytest.mark.parametrize("epsilon", [0.0, 6.0])
def test_conjugate(norm: str, epsilon: float, make_trial: MakeTrial) -> None:
    trial = make_trial(norm, nesterov=True)
    adapter = ConjugatePL(trial.net, epsilon=epsilon, lr=LR)
    tent = ttvd.create("tent", trial.net, lr=LR, optimizer="sgd", prediction="after")
    for x in trial.stream:
        found, other = adapter(x), tent(x)
        trial.descend(mean([naive_conjugate(row, epsilon) for row in trial.twin(x)]))
        assert_near(found.softmax(-1), trial.twin(x).softmax(-1))
    trial.compare(adapter, trial.twin, trial.net)
    assert torch.allclose(found, other, 1e-8, 1e-8) == (epsilon == 0), (
        "Tent is the conjugate of cross-entropy"
    )


class NaiveSAR:
    """Two passes over one twin, weights put back in between; the source kept aside for the restart."""

    def __init__(self, trial: Trial, limit: float, collapse: float) -> None:
        self.trial, self.limit, self.collapse = trial, limit, collapse
        self.parameters = list(trial.learning().values())
        self.source = [p.detach().clone() for p in self.parameters]
        self.average: float | None = None
        self.kept, self.restarts = list[tuple[int, int]](), 0

    def write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value.clone()

    def __call__(self, x: Tensor, rho: float) -> Tensor:
        logits: Tensor = self.trial.twin(x)
        first, second, here = entropies(logits), list[Tensor](), [p.detach() for p in self.parameters]
        sure = [i for i, h in enumerate(first) if h < self.limit]
        if sure:
            uphill = torch.autograd.grad(mean([first[i] for i in sure]), self.parameters)
            length = torch.sqrt(sum(((g**2).sum() for g in uphill), torch.zeros(())))
            self.write([p + rho * g / length for p, g in zip(here, uphill, strict=True)])
            there = entropies(self.trial.twin(x))
            second = [there[i] for i in sure if there[i] < self.limit]
        self.trial.optimizer.zero_grad()
        if second:
            mean(second).backward()
        self.write(here)
        self.trial.optimizer.step()
        self.kept.append((len(sure), len(second)))
        if second:
            self.watch(mean(second).item())
        return logits

    def watch(self, loss: float) -> None:
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        if self.average < self.collapse:
            self.write(self.source)
            self.trial.optimizer.state.clear()
            self.average, self.restarts = None, self.restarts + 1


SARS = [("batch", 12, 0.3), ("batch", 5, 0.348), ("group", 12, 0.2), ("group", 5, 0.27)]


@pytest.mark.parametrize("recovery", [False, True])
@pytest.mark.parametrize(("norm", "outputs", "collapse"), SARS)
def test_sar(norm: str, outputs: int, collapse: float, recovery: bool, make_trial: MakeTrial) -> None:
    trial, collapse = make_trial(norm, outputs), collapse * recovery
    adapter = SAR(trial.net, lr=LR, rho=0.3, collapse=collapse)
    naive = NaiveSAR(trial, 0.4 * math.log(outputs), collapse * math.log(outputs))
    for x in trial.stream + trial.stream[:3]:
        found, wanted = adapter(x), naive(x, rho=0.3)
        assert_near(found.softmax(-1), wanted.softmax(-1))
        assert float(adapter.kept) == pytest.approx(naive.kept[-1][1] / len(x))
    assert any(0 < second < first for first, second in naive.kept)
    assert (naive.restarts > 0) == recovery
    trial.compare(adapter, trial.twin, trial.net)


class NaiveETA:
    """Entropy and cosine one sample at a time; the moving mean is absent until something has been kept."""

    def __init__(self, trial: Trial, limit: float, fisher: dict[str, Tensor]) -> None:
        self.trial, self.limit, self.fisher = trial, limit, fisher
        self.source = {name: p.detach().clone() for name, p in trial.learning().items()}
        self.mean: Tensor | None = None

    def __call__(self, x: Tensor, similarity: float, penalty: float) -> tuple[Tensor, int]:
        logits, old, terms, seen = self.trial.twin(x), self.mean, list[Tensor](), list[Tensor]()
        for row, h in zip(logits, entropies(logits), strict=True):
            p = probabilities(row).detach()
            if h < self.limit and (old is None or abs(p @ old / p.norm() / old.norm()) < similarity):
                terms.append(torch.exp(self.limit - h.detach()) * h)
                seen.append(p)
        if seen:
            self.mean = mean(seen) if old is None else 0.9 * old + 0.1 * mean(seen)
            self.trial.descend(mean(terms) + penalty * self.distance())
        return logits, len(seen)

    def distance(self) -> Tensor:
        moves = {name: p - self.source[name] for name, p in self.trial.learning().items()}
        terms = [f[i] * moves[name][i] ** 2 for name, f in self.fisher.items() for i in range(len(f))]
        return mean(terms) * len(terms)


@NORMS
@OUTPUTS
@pytest.mark.parametrize("penalty", [0.0, 3.0])
def test_eta_and_eata(norm: str, outputs: int, penalty: float, make_trial: MakeTrial) -> None:
    trial = make_trial(norm, outputs)
    fisher = {n: torch.linspace(0, 1, len(p), dtype=p.dtype) for n, p in trial.learning().items()}
    options: dict[str, Any] = {"lr": LR, "similarity": 0.7}
    adapter = EATA(trial.net, fisher, penalty=penalty, **options) if penalty else ETA(trial.net, **options)
    naive, counts = NaiveETA(trial, 0.4 * math.log(outputs), fisher), []
    for x in trial.stream:
        found, (wanted, kept) = adapter(x), naive(x, 0.7, penalty)
        assert_near(found.softmax(-1), wanted.softmax(-1))
        assert_near(adapter.mean, torch.zeros(outputs) if naive.mean is None else naive.mean)
        counts.append((kept, sum(h.item() < naive.limit for h in entropies(wanted))))
    assert any(kept < sure for kept, sure in counts), "similarity never decides"
    assert any(0 < sure < len(x) for (_, sure), x in zip(counts, trial.stream, strict=True)), "nor entropy"
    trial.compare(adapter, trial.twin, trial.net)


def naive_shuffle(image: Tensor, order: list[int], n: int = 4) -> Tensor:
    """Patches, row by row, taken out and put back in another order."""
    side = image.shape[-1] // n
    patches = [image[:, side * (i // n) :, side * (i % n) :][:, :side, :side] for i in range(n * n)]
    rows = [torch.cat([patches[i] for i in order[n * r : n * r + n]], dim=2) for r in range(n)]
    return torch.cat(rows, dim=1)


@NORMS
@OUTPUTS
def test_deyo(norm: str, outputs: int, make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders are the adapter's own draws; what it makes of them is not looked at."""
    trial, scale, shares = make_trial(norm, outputs), math.log(outputs), []
    monkeypatch.setattr(deyo, "shuffle_patches", spy := mock.Mock(wraps=deyo.shuffle_patches))
    adapter = DeYO(trial.net, lr=LR, drop=0.1)
    for x in trial.stream:
        found, logits, terms = adapter(x), trial.twin(x), list[Tensor]()
        assert_near(found.softmax(-1), logits.softmax(-1))
        pairs = zip(x, spy.call_args.args[1].tolist(), strict=True)
        broken = torch.stack([naive_shuffle(image, order) for image, order in pairs])
        for row, h, other in zip(logits, entropies(logits), trial.twin(broken), strict=True):
            drop = probabilities(row).max().detach() - probabilities(other)[row.argmax()].detach()
            if h < 0.5 * scale and drop > 0.1:
                terms.append((torch.exp(0.4 * scale - h.detach()) + torch.exp(drop)) * h)
        shares.append(0 < len(terms) < sum(h.item() < 0.5 * scale for h in entropies(logits)) < len(x))
        if terms:
            trial.descend(mean(terms))
    assert any(shares), "each of the two selections must take something away"
    trial.compare(adapter, trial.twin, trial.net)
