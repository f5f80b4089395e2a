"""LAME, ROID and SHOT, which judge a batch as a whole, against plain loops over its samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers.methods import assert_near, mean, probabilities
from ttvd.methods import roid
from ttvd.methods.lame import LAME, measure_affinity
from ttvd.methods.roid import ROID
from ttvd.methods.shot import SHOT
from ttvd.nn.resnet import ResNet

Maker = Callable[..., Any]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])
AFFINITIES = pytest.mark.parametrize("affinity", ["knn", "rbf", "linear"])


class Lab(NamedTuple):
    """Builds a network that is sure of some and unsure of others, its twin and an optimizer; and a stream."""

    build: Callable[[str, str, float], tuple[ResNet, Any, torch.optim.Optimizer]]
    stream: list[Tensor]


@pytest.fixture
def lab(make_sharp: Maker, make_optimizer: Maker, make_stream: Maker) -> Lab:
    def build(norm: str, optimizer: str, lr: float) -> Any:
        net, twin = make_sharp(7, norm, 6 if norm == "batch" else 15)
        return net, twin, make_optimizer(twin, optimizer, lr)

    return Lab(build, make_stream(16, 9, 16, 1, 24, 16, 12))


def naive_affinity(z: Tensor, affinity: str, k: int) -> Tensor:
    units = [row / math.sqrt(float((row * row).sum())) for row in z]
    d = [[math.sqrt(float(((a - b) ** 2).sum())) for b in units] for a in units]
    w, everyone = torch.zeros(len(z), len(z), dtype=z.dtype), range(len(z))
    sigma = sum(sorted(row)[min(k, len(z)) - 1] for row in d) / len(z)
    for i in everyone:
        nearest = sorted((j for j in everyone if j != i), key=lambda j, i=i: d[i][j])[:k]  # type: ignore[misc]
        for j in everyone:
            if affinity == "knn":
                w[i, j] = float(j in nearest)
            elif affinity == "rbf":
                w[i, j] = math.exp(-(d[i][j] ** 2) / (2 * sigma**2))
            else:
                w[i, j] = float((units[i] * units[j]).sum())
    return w


def naive_lame(logits: Tensor, w: Tensor, steps: int) -> list[Tensor]:
    """Iterates Y_0 = p, Y_1, ..., each row from its definition."""
    start = torch.stack([probabilities(row) for row in logits])
    iterates = [start]
    for _ in range(steps):
        y = iterates[-1]
        rows = []
        for i in range(len(y)):
            pull = sum((w[i, j] * y[j] for j in range(len(y))), torch.zeros_like(y[i]))
            rows.append(probabilities(torch.log(start[i]) + pull))
        iterates.append(torch.stack(rows))
    return iterates


@AFFINITIES
@pytest.mark.parametrize("neighbours", [2, 3, 5])
def test_affinities(affinity: Any, neighbours: int, generator: torch.Generator) -> None:
    for size in (12, 6, 4):
        z = torch.randn(size, 5, dtype=torch.float64, generator=generator)
        z = z / z.norm(dim=1, keepdim=True)
        assert_near(measure_affinity(z, affinity, neighbours), naive_affinity(z, affinity, neighbours))


@NORMS
@AFFINITIES
@torch.no_grad()
def test_lame(norm: str, affinity: Any, make_net: Maker, make_twin: Maker, make_stream: Maker) -> None:
    """Few iterations are counted, many arrive; nothing is remembered, and the model stays."""
    net = make_net(7, norm)
    twin, moved = make_twin(net, prior=1.0), 0.0
    short = LAME(net, affinity=affinity, neighbours=3, steps=4, tolerance=0.0)
    long = LAME(net, affinity=affinity, neighbours=3, steps=3000, tolerance=0.0)
    usual = LAME(net, affinity=affinity, neighbours=3)
    before = {name: value.clone() for name, value in usual.state_dict().items()}
    for x in make_stream(10, 6, 8, 4, 10):
        z = twin.forward_features(x)
        logits, w = twin.fc(z), naive_affinity(z, affinity, 3)
        p, *_, fourth = naive_lame(logits, w, 4)
        assert_near(short(x).exp(), fourth)
        y = long(x).exp()
        assert_near(y, torch.stack([probabilities(row) for row in torch.log(p) + w @ y]))
        assert_near(usual(x).logsumexp(1), torch.zeros(len(x)).double())
        assert_near(usual.predict(x), usual(x))
        moved = max(moved, float((y - p).abs().max()))
    assert moved > 0.1
    assert all(torch.equal(value, before[name]) for name, value in usual.state_dict().items())


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
@torch.no_grad()
def test_lame_stops_where_the_energy_is_still(
    tolerance: float, make_net: Maker, make_twin: Maker, make_stream: Maker
) -> None:
    """The energy of the authors' code: neighbours count as they were before the iteration."""
    net, (x,) = make_net(7, "group"), make_stream(10)
    z = make_twin(net).forward_features(x)
    w = naive_affinity(z, "rbf", 5)
    iterates = naive_lame(net.fc(z), w, 40)
    energies, count = [math.inf], 0
    for old, new in itertools.pairwise(iterates):
        energies.append(float((new * (new.log() - iterates[0].log()) - new * (w @ old)).sum()))
        count += 1
        if count > 2 and abs(energies[-1] - energies[-2]) <= tolerance * abs(energies[-2]):
            break
    assert 5 < count < 40
    assert_near(LAME(net, tolerance=tolerance)(x).exp(), iterates[count])


class NaiveROID:
    """Weights, losses and ensembling sample by sample; the running prediction starts uniform."""

    def __init__(self, twin: Any, optimizer: torch.optim.Optimizer, classes: int) -> None:
        self.twin, self.optimizer = twin, optimizer
        self.average = torch.full((classes,), 1 / classes, dtype=torch.float64)
        self.learning = [p for p in twin.parameters() if p.requires_grad]
        self.source = [p.detach().clone() for p in self.learning]
        self.dropped: list[int] = []

    def weigh(self, rows: list[Tensor]) -> list[float]:
        diversity = [1 - float(p @ self.average / p.norm() / self.average.norm()) for p in rows]
        certainty = [float((p * torch.log(p)).sum()) for p in rows]
        for values in (diversity, certainty):
            low, span = min(values), max(values) - min(values)
            values[:] = [(value - low) / span if span else 0.0 for value in values]
        middle = sum(diversity) / len(diversity)
        pairs = zip(diversity, certainty, strict=True)
        return [math.exp(3 * u * c) if u >= middle else 0.0 for u, c in pairs]

    def __call__(self, x: Tensor, other: Tensor, batch_size: int) -> Tensor:
        rows, changed = ([probabilities(row) for row in self.twin(images)] for images in (x, other))
        weights = self.weigh([p.detach() for p in rows])
        self.dropped.append(weights.count(0.0))
        self.average = 0.9 * self.average + 0.1 * mean(rows).detach()
        loss = torch.zeros(())
        for weight, p, q in zip(weights, rows, changed, strict=True):
            clipped = torch.clamp(p, max=0.99)
            ratio = -(clipped * torch.log(clipped / (1 - clipped) + 1e-5)).sum()
            loss = loss + weight * (ratio - 0.5 * (p * torch.log(q)).sum() - 0.5 * (q * torch.log(p)).sum())
        self.optimizer.zero_grad()
        (loss / batch_size).backward()
        self.optimizer.step()
        for parameter, source in zip(self.learning, self.source, strict=True):
            parameter.data = 0.99 * parameter.data + 0.01 * source
        prior = mean(rows)
        smooth = max(1 / len(rows), 1 / len(prior)) / prior.max()
        corrected = [p * (prior + smooth) / (1 + smooth * len(prior)) for p in rows]
        return torch.stack([p / p.sum() for p in corrected]).detach()


@NORMS
@pytest.mark.parametrize(("name", "batch_size"), [("adam", None), ("sgd", 20)])
def test_roid(
    norm: str, name: str, batch_size: int | None, lab: Lab, assert_parameters: Maker, monkeypatch: Any
) -> None:
    """The augmentation is held fixed: it has tests of its own."""
    asked: list[dict[str, Any]] = []

    def darken(x: Tensor, generator: torch.Generator, **options: Any) -> Tensor:
        asked.append(options)
        return 0.8 * x.flip(-1)

    monkeypatch.setattr(roid, "augment", darken)
    net, twin, optimizer = lab.build(norm, name, 0.005)
    adapter, naive = ROID(net, lr=0.005, optimizer=name, batch_size=batch_size), NaiveROID(twin, optimizer, 7)
    surest = 0.0
    for x in lab.stream:
        found, wanted = adapter(x), naive(x, 0.8 * x.flip(-1), batch_size or len(x))
        assert_near(found.softmax(-1), wanted)
        surest = max(surest, float(wanted.max()))
    assert surest > 0.99, "the clip is never reached"
    assert any(0 < dropped < len(x) for dropped, x in zip(naive.dropped, lab.stream, strict=True))
    assert asked == [{"padding": "reflection", "degrade": False}] * len(lab.stream)
    assert_parameters(adapter, twin, net)


def shot_loss(rows: list[Tensor], confidence: float, counts: list[int]) -> Tensor:
    sure = [-torch.log(p.max()) for p in rows if p.max() > confidence]
    counts.append(len(sure))
    together = mean(rows)
    loss = mean([-(p * torch.log(p)).sum() for p in rows]) + (together * torch.log(together + 1e-5)).sum()
    return loss + 0.3 * mean(sure) if sure else loss


@NORMS
@pytest.mark.parametrize(("name", "confidence"), [("sgd", 0.9), ("adam", 0.9999999)])
def test_shot(norm: str, name: str, confidence: float, lab: Lab, parameters_of: Maker) -> None:
    """All but the head learns, for two steps a batch; without a sure prediction its term is absent."""
    net, twin, optimizer = lab.build(norm, name, 0.003)
    learning = {n: p.requires_grad_() for n, p in twin.named_parameters() if not n.startswith("fc.")}
    optimizer.param_groups[0]["params"] = list(learning.values())
    adapter = SHOT(net, lr=0.003, optimizer=name, confidence=confidence, steps=2)
    counts: list[int] = []
    for x in lab.stream:
        found = adapter(x)
        for _ in range(2):
            rows = [probabilities(row) for row in twin(x)]
            optimizer.zero_grad()
            shot_loss(rows, confidence, counts).backward()
            optimizer.step()
        assert_near(found.softmax(-1), torch.stack(rows))
    assert max(counts) > 1 if confidence == 0.9 else 0 in counts
    reached = parameters_of(adapter)
    assert reached.keys() == learning.keys()
    for name, parameter in learning.items():
        assert_near(reached[name], parameter)
        assert not torch.equal(reached[name], net.state_dict()[name])
