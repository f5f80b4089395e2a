"""COME, on Tent, EATA and SAR, against plain twins: entropies of opinions, one sample after the other.

The twins follow the authors' code, BlueWhaleLab/COME (tent_come.py, eata_come.py, sar_come.py). Where they leave
that, a comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, learning, mean, probabilities
from ttvd.methods import COME, ConservativeEATA, ConservativeSAR, Tent
from ttvd.methods.shared.losses import opinion_entropy

Maker = Callable[..., Any]
Check = Callable[[nn.Module, nn.Module, nn.Module], None]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])
FLOOR = 0.0
"""What is added to every mass before the logarithm: 1e-7 in the code of COME's authors, nothing here."""


def naive_opinion(row: Tensor, floor: float = FLOOR, classes: int | None = None) -> Tensor:
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
    return mean([naive_opinion(row) for row in logits])


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
        plain = plain_opinion_entropy(row)
        assert_near(naive_opinion(row), plain)
        assert_near(opinion_entropy(row), plain)
        assert 0 < abs(float(naive_opinion(row, 1e-7) - plain)) < 1e-7 * 20 * k
        assert abs(float(naive_opinion(row, classes=1000) - plain)) > 0.01
    nothing = math.log(2) + 0.5 * math.log(k)  # uncertainty one half, the rest shared out evenly
    assert float(naive_opinion(row * 0 + 1e-9)) == pytest.approx(nothing, rel=1e-6)
    assert float(opinion_entropy(row * 0)) == pytest.approx(nothing, rel=1e-12)


def test_the_gradient_cannot_change_the_length_of_the_logits(generator: torch.Generator) -> None:
    """It is orthogonal to them: that of the plain entropy without its part along them."""
    for _ in range(5):
        row = 2 * torch.randn(6, dtype=torch.float64, generator=generator)
        plain = gradient_of(plain_opinion_entropy, row)
        assert abs(float(plain @ row)) > 1e-3
        for loss in (naive_opinion, opinion_entropy):
            found = gradient_of(loss, row)
            assert abs(float(found @ row)) < 1e-12
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
    adapter, tent = COME(net, **options), Tent(net, **options)
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
            h, p = naive_opinion(row), probabilities(row).detach()
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
    adapter = ConservativeEATA(net, fisher, lr=0.01, similarity=0.7, penalty=3.0)
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
        first, here = [naive_opinion(row) for row in logits], [p.detach() for p in self.parameters]
        sure, second = [i for i, h in enumerate(first) if h < self.limit], list[Tensor]()
        if sure:
            uphill = torch.autograd.grad(mean([first[i] for i in sure]), self.parameters)
            length = math.sqrt(sum(float((g**2).sum()) for g in uphill))
            self.write([p + rho * g / length for p, g in zip(here, uphill, strict=True)])
            there = [naive_opinion(row) for row in self.twin(x)]
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
    adapter = ConservativeSAR(net, lr=0.01, rho=0.1, collapse=collapse)
    naive = NaiveSARCome(twin, optimizer, 0.4 * math.log(7), collapse * math.log(7))
    stream = make_stream(16, 9, 16, 1, 24, 16, 12)
    for x in stream + stream[:3]:
        assert_near(adapter(x).softmax(-1), naive(x, rho=0.1).softmax(-1))
    check_selections(naive.counts)
    assert (naive.restarts > 0) == recovery
    assert_parameters(adapter, twin, net)
