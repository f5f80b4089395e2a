"""TAST and TAST-BN against lists and loops: nearest supports, random projection heads, stored images."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, read_defaults
from ttvd.methods.tast import TAST
from ttvd.methods.tast_bn import TASTBN
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
TwinMaker = Callable[..., Any]
StreamMaker = Callable[..., list[Tensor]]
Compare = Callable[[nn.Module, nn.Module, nn.Module], None]


class Support(NamedTuple):
    """What is remembered of a sample: an image or its features, how unsure the classifier was, what it said."""

    what: Tensor
    entropy: float
    label: int


def judge(what: Tensor, logits: Tensor) -> Support:
    p = (torch.exp(logits) / torch.exp(logits).sum()).tolist()
    return Support(what.detach(), -sum(q * math.log(q) for q in p), p.index(max(p)))


def keep_surest(supports: list[Support], keep: int, classes: int) -> list[Support]:
    """The ``keep`` supports of lowest entropy of every class."""
    chosen = []
    for label in range(classes):
        own = sorted((s for s in supports if s.label == label), key=lambda s: s.entropy)
        chosen += own[:keep]
    return chosen


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Zero where one of the two is the zero vector."""
    size = a.norm() * b.norm()
    return (a @ b) / size if float(size.detach()) > 0 else (a @ b) * 0


def find_nearest(z: Tensor, vectors: list[Tensor], k: int) -> list[int]:
    nearness = [float(cosine(z, vector).detach()) for vector in vectors]
    return sorted(range(len(vectors)), key=lambda n: -nearness[n])[:k]


def prototype_logits(points: list[Tensor], vectors: list[Tensor], labels: list[int], classes: int) -> Tensor:
    """Ten times the cosine to the mean of the vectors of each class; a class without any has logit zero."""
    means = []
    for label in range(classes):
        own = [v for v, other in zip(vectors, labels, strict=True) if other == label]
        means.append(torch.stack(own).sum(0) / len(own) if own else torch.zeros_like(vectors[0]))
    return torch.stack([10 * torch.stack([cosine(z, mean) for mean in means]) for z in points])


def divergence(targets: Tensor, logits: Tensor) -> Tensor:
    """KL as ``torch.nn.functional.kl_div`` averages it by default: over samples *and* classes."""
    total = torch.zeros((), dtype=logits.dtype)
    for target, row in zip(targets, logits, strict=True):
        log_p = row - torch.log(torch.exp(row).sum())
        for t, q in zip(target, log_p, strict=True):
            total = total + (t * (torch.log(t) - q) if float(t) > 0 else 0.0)
    return total / logits.numel()


def teach(neighbours: list[list[int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Average over the neighbours of their hard labels (the targets) and of their softmax (the prediction)."""
    logits = logits.detach()
    targets = torch.zeros(len(neighbours), logits.shape[1], dtype=logits.dtype)
    outputs = torch.zeros_like(targets)
    for row, chosen in enumerate(neighbours):
        for n in chosen:
            targets[row, int(logits[n].argmax())] += 1 / len(chosen)
            outputs[row] += logits[n].softmax(-1) / len(chosen)
    return targets, outputs


class NaiveTAST:
    """Features in, probabilities out; the heads are a shared matrix with scalings of both sides and a bias each."""

    def __init__(self, head: nn.Linear, heads: dict[str, Tensor], options: dict[str, Any]) -> None:
        self.head, self.options, self.keep = head, options, options.get("supports", 100)
        self.k = min(options.get("k", 1), self.keep)
        self.heads = {name: value.clone().requires_grad_() for name, value in heads.items()}
        self.supports = [judge(row, head(row)) for row in head.weight.detach()]

    def project(self, member: int, z: Tensor) -> Tensor:
        h = self.heads
        return (h["weight"] @ (z * h["inner"][member])) * h["outer"][member] + h["bias"][member]

    def member_logits(self, member: int, points: list[Tensor]) -> Tensor:
        vectors = [self.project(member, s.what) for s in self.supports]
        labels = [s.label for s in self.supports]
        projected = [self.project(member, z) for z in points]
        return prototype_logits(projected, vectors, labels, self.head.out_features)

    def add(self, features: Tensor) -> None:
        self.supports += [judge(z, self.head(z)) for z in features]
        self.supports = keep_surest(self.supports, self.keep, self.head.out_features)

    def judge_batch(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Prediction and loss of the present heads."""
        points, stored = list(features.detach()), [s.what for s in self.supports]
        neighbours = [find_nearest(z, stored, self.k) for z in points]
        outputs, loss = [], torch.zeros((), dtype=features.dtype)
        for member in range(len(self.heads["bias"])):
            targets, output = teach(neighbours, self.member_logits(member, stored))
            outputs.append(output)
            loss = loss + divergence(targets, self.member_logits(member, points))
        return torch.stack(outputs).mean(0), loss


def follow(adapter: nn.Module, naive: Any, optimizer: torch.optim.Optimizer, x: Tensor, seen: Tensor) -> None:
    """One batch for both; ``seen`` is what the naive one makes of it, features or images."""
    found: Tensor = adapter(x)
    naive.add(seen)
    for _ in range(naive.options.get("steps", 1)):
        wanted, loss = naive.judge_batch(seen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if naive.options.get("prediction") == "after":
        wanted, _ = naive.judge_batch(seen)
    assert_near(found.softmax(-1), wanted)


TASTS: dict[str, dict[str, Any]] = {
    "defaults but for the rate": {},
    "one member, one support": {"members": 1, "supports": 1},
    "four neighbours, three steps": {"members": 3, "supports": 4, "k": 4, "steps": 3},
    "more neighbours than supports at first": {"supports": 30, "k": 20},
    "no more neighbours than supports of a class": {"supports": 2, "k": 8, "optimizer": "sgd", "lr": 0.1},
    "two steps, after, tau": {"k": 2, "steps": 2, "prediction": "after", "tau": 10.0, "seed": 7},
}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("options", TASTS.values(), ids=TASTS)
def test_tast(
    options: dict[str, Any], empty: bool, make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker
) -> None:
    options = {"lr": 0.02, "members": 2} | options
    net = make_net(3)
    if empty:  # the row of the last class is taken for another one, and its samples never come
        with torch.no_grad():
            net.fc.weight[2] = 0.5 * net.fc.weight[1]
            net.fc.bias[2] = -20.0
    adapter, twin = TAST(net, **options), make_twin(net, prior=1.0)
    start = {name[6:]: t.clone() for name, t in adapter.state_dict().items() if name.startswith("heads.")}
    naive = NaiveTAST(net.fc, start, options)
    kind: Any = torch.optim.Adam if options.get("optimizer", "adam") == "adam" else torch.optim.SGD
    settings = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    optimizer = kind(naive.heads.values(), lr=options["lr"], **settings)
    for x in make_stream(6, 5, 1, 8, 3, 6):
        z = twin.forward_features(x).detach()
        follow(adapter, naive, optimizer, x, z)
        assert_near(adapter.predict(x).softmax(-1), naive.judge_batch(z)[0])
    assert (min(sum(s.label == c for s in naive.supports) for c in range(3)) == 0) == empty
    for name, value in naive.heads.items():
        assert_near(adapter.state_dict()[f"heads.{name}"], value)
        assert (value - start[name]).abs().max() > 1e-2


def test_random_heads_have_kaiming_s_variance() -> None:
    """One matrix from d to d / 4 (fan-in d); scalings (e, n) whose fan-in is n, as torch counts it; no bias yet."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(400, 3))
    state = TAST(net, members=50).state_dict()
    heads = {name[6:]: t for name, t in state.items() if name.startswith("heads.")}
    shapes = {"weight": (100, 400), "inner": (50, 400), "outer": (50, 100), "bias": (50, 100)}
    assert {name: tuple(t.shape) for name, t in heads.items()} == shapes
    assert not heads.pop("bias").any()
    for head in heads.values():
        variance = 2 / head.shape[1]
        assert float(head.var()) == pytest.approx(variance, rel=0.1)
        assert abs(float(head.mean())) < 5 * math.sqrt(variance / head.numel())


class NaiveTASTBN:
    """Images are stored; the network itself adapts, and supports pass through it together with the batch."""

    def __init__(self, twin: Any, keep: int, options: dict[str, Any]) -> None:
        self.twin, self.keep, self.options, self.classes = twin, keep, options, twin.fc.out_features
        self.k = min(options.get("k", 1), keep)
        self.supports: list[Support] = []

    def add(self, x: Tensor) -> None:
        self.supports += [judge(*pair) for pair in zip(x, self.twin(x).detach(), strict=True)]
        self.supports = keep_surest(self.supports, self.keep, self.classes)

    def judge_batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        together = list(self.twin.forward_features(torch.stack([*x, *(s.what for s in self.supports)])))
        points, stored = together[: len(x)], together[len(x) :]
        neighbours = [find_nearest(z, stored, self.k) for z in points]
        labels = [s.label for s in self.supports]
        targets, outputs = teach(neighbours, prototype_logits(stored, stored, labels, self.classes))
        return outputs, divergence(targets, prototype_logits(points, stored, labels, self.classes))


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({}, 50),
        ({"supports": 2, "steps": 3}, 2),
        ({"capacity": 14, "k": 3, "optimizer": "sgd", "lr": 0.1}, 4),
        ({"supports": 5, "k": 2, "prediction": "after"}, 5),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_tast_bn(
    options: dict[str, Any],
    keep: int,
    norm: str,
    make_net: NetMaker,
    make_twin: TwinMaker,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    make_stream: StreamMaker,
    assert_parameters: Compare,
) -> None:
    options = {"lr": 0.01} | options
    net = make_net(3, norm=norm)
    adapter, twin = TASTBN(net, **options), make_twin(net)
    optimizer = make_optimizer(twin, options.get("optimizer", "adam"), options["lr"])
    naive = NaiveTASTBN(twin, keep, options)
    for x in make_stream(6, 5, 1, 8, 3, 6):
        follow(adapter, naive, optimizer, x, x)
    assert (len(naive.supports) < 29) == (keep < 29), "nothing was ever left out"
    assert_parameters(adapter, twin, net)


@pytest.mark.parametrize("method", [TAST, TASTBN])
def test_defaults_are_those_of_the_paper_and_of_ttvd_s_comparison(method: type[nn.Module]) -> None:
    usual = read_defaults(method)
    own = {"members": 5} if method is TAST else {"capacity": 150}
    assert ({"supports": 100, "k": 1, "tau": 10.0, "lr": 1e-3, "steps": 1} | own).items() <= usual.items()
