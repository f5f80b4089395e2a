"""PeTTA against a plain twin: RoTTA's memory and norms by hand, and a teacher that slows down where classes drift.

The twin follows the authors' code, hthieu166/petta (src/adapter/petta.py, src/utils/petta_memory.py,
src/utils/bn_layers.py, src/utils/loss_func.py). Where it leaves that, a comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, read_defaults
from tests.helpers.rotta import Item, NaiveCSTU, affine, check_state, darken, moments, replace_norms
from ttvd.methods import PeTTA

Maker = Callable[..., Any]
NORMS = pytest.mark.parametrize("norm", ["batch", "group"])
CLASSES = 5


def entropy(row: Tensor) -> float:
    p = row.softmax(-1)
    return -float((p * torch.log(p)).sum())


def cross_entropy(target: Tensor, row: Tensor) -> Tensor:
    return -(target.softmax(-1) * row.log_softmax(-1)).sum()


def cosine(p: Tensor, source: Tensor) -> Tensor:
    return (p @ source) / torch.sqrt(p @ p) / torch.sqrt(source @ source)


class NaivePeTTA:
    """A teacher predicts and marks a batch; a student learns from the memory; a source network follows it as well.

    Of the authors' configurations these are the default one, whose self-training loss has four cross-entropies, and
    ImageNet's, which has one; cosines to the source weights, both rates adaptive. Their code takes a step after every
    batch and has no use for its update frequency; here one comes after every so many images.
    """

    def __init__(self, net: nn.Module, means: Tensor, options: dict[str, Any]) -> None:
        norms = (replace_norms(net, options.get("alpha", 0.05)) for _ in range(3))
        self.student, self.teacher, self.source = norms
        leaves = [p.requires_grad_() for p in affine(self.student).values()]
        self.optimizer = torch.optim.Adam(leaves, lr=0.01)
        weights = {key: options[key] for key in ("timeliness", "uncertainty") if key in options}
        self.memory = NaiveCSTU(options["memory_size"], len(means), **weights)
        self.means, self.running, self.options = means, means.clone(), options
        self.recent, self.seen, self.drifts = dict[int, list[Tensor]](), 0, list[float]()

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of the teacher under its averages; images enter the memory one after the other."""
        features = self.teacher.eval().forward_features(x)
        logits: Tensor = self.teacher.fc(features)
        for image, z, row in zip(x, features, logits, strict=True):
            label = int(row.argmax())
            # The authors add a millionth to p; it decides who stays only where two scores are as near.
            self.memory.add(Item(image, label, entropy(row)))
            self.recent.setdefault(label, []).append(z)
            self.seen += 1
            if self.seen % self.options["update_every"] == 0:
                self.update()
        return logits

    def update(self) -> None:
        self.drifts.append(
            self.drift()
        )  # before the features enter the running means, so that the first is zero
        self.follow(self.options.get("nu", 0.05))
        self.learn(self.drifts[-1])
        self.recent.clear()

    def scale(self) -> list[float]:
        """Variance of the class means of the source in each dimension, without bias, for all classes.

        The authors take the variances of the features of each class, which sites do not hold.
        """
        scale = []
        for column in self.means.T.tolist():
            middle = sum(column) / len(column)
            scale.append(sum((value - middle) ** 2 for value in column) / (len(column) - 1))
        return scale

    def drift(self) -> float:
        """One number for all classes: the paper averages one for each, and sums over dimensions instead of averaging.

        Only classes that were predicted since the last update count.
        """
        scale = [value + 1e-6 for value in self.scale()]
        terms = [
            (now - then) ** 2 / s
            for label in self.recent
            for now, then, s in zip(
                self.running[label].tolist(), self.means[label].tolist(), scale, strict=True
            )
        ]
        return 1 - math.exp(-sum(terms) / len(terms))

    def follow(self, share: float) -> None:
        """Running class means, of the features that predicted the images."""
        for label, own in self.recent.items():
            self.running[label] = (1 - share) * self.running[label] + share * sum(own) / len(own)

    def learn(self, drift: float) -> None:
        images = torch.stack([item.x for item in self.memory.items()])
        taught = self.teacher.train()(images)
        plain = self.student.train()(images)
        # The averages of the source follow the memory as well, its weights never change.
        original = self.source.train()(images)
        strong = self.student(darken(images))  # the averages of the student follow twice
        loss = torch.zeros((), dtype=images.dtype)
        for t, p, o, s in zip(taught, plain, original, strong, strict=True):
            own = cross_entropy(t, s)
            if self.options.get("symmetric", True):
                own = (own + cross_entropy(s, t) + cross_entropy(t, p) + cross_entropy(p, t)) / 4
            loss = loss + own + self.options.get("al_weight", 1.0) * cross_entropy(o, s)
        loss = loss / len(images)
        weights, source = affine(self.student), affine(self.source)
        for name, p in weights.items():
            loss = loss - drift * self.options.get("lambda_0", 10.0) * cosine(p, source[name]) / len(weights)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        share = (1 - drift) * self.options["alpha_0"]
        for name, old in affine(self.teacher).items():
            old.data = (1 - share) * old.data + share * weights[name].data


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the random augmentation fixed: it has tests of its own."""
    monkeypatch.setattr("ttvd.methods.petta.augment", darken)


def test_the_drift_is_that_of_the_classes_seen(
    make_net: Maker, make_sites: Maker, generator: torch.Generator
) -> None:
    net = make_net(CLASSES)
    naive = NaivePeTTA(net, make_sites(net, CLASSES).means[:, 0], {"memory_size": 9})
    naive.recent = {label: list(torch.randn(3, 8, generator=generator).double()) for label in (0, 3)}
    assert naive.drift() == 0.0
    naive.follow(0.05)
    drift, recent = naive.drift(), naive.recent
    assert 0 < drift < 1
    naive.recent = {1: []}
    assert naive.drift() == 0.0, "a class that was never predicted has not moved"
    naive.recent = recent
    for _ in range(500):
        naive.follow(0.05)
    settled = naive.drift()
    naive.follow(1.0)
    assert drift < settled == pytest.approx(naive.drift(), rel=1e-6)


def test_the_drift_is_relative_to_the_distances_of_the_classes(make_net: Maker, make_sites: Maker) -> None:
    """Features that are stretched have the same drift; two means that are 1 apart have a variance of a half."""
    net = make_net(CLASSES)
    means = torch.tensor([[0.0, 0.0], [1.0, 4.0]], dtype=torch.float64)
    naive = NaivePeTTA(net, means, {"memory_size": 9})
    assert naive.scale() == [0.5, 8.0]
    naive.running, naive.recent = means + torch.tensor([0.5, 2.0]), {1: []}
    assert naive.drift() == pytest.approx(1 - math.exp(-0.5), rel=1e-5)


def test_the_pull_to_the_source_turns_weights_and_not_their_length(make_net: Maker) -> None:
    """The gradient of a cosine is orthogonal to the weights, and zero at the source."""
    source = affine(replace_norms(make_net(CLASSES)))
    for own in source.values():
        p = own.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cosine(p, own), p)
        assert float(gradient.abs().max()) < 1e-12
        p = (own + 0.1 * torch.linspace(-1, 1, len(p), dtype=p.dtype)).requires_grad_()
        (gradient,) = torch.autograd.grad(cosine(p, own), p)
        assert abs(float((gradient @ p).detach())) < 1e-12 < float(gradient.abs().max())


EVEN, UNEVEN = (8,) * 6, (8, 1, 3, 13, 2, 8, 9, 10)
PETTAS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "room for all": ((6,) * 9, {"memory_size": 1000, "update_every": 6, "alpha_0": 0.5}),
    "evictions": (UNEVEN, {"memory_size": 9, "update_every": 8, "alpha_0": 0.3, "al_weight": 0.3}),
    "strong pull": (
        EVEN,
        {"memory_size": 12, "update_every": 8, "alpha_0": 0.5, "lambda_0": 1000.0, "al_weight": 0.0},
    ),
    "all rates": (
        UNEVEN,
        {"memory_size": 7, "update_every": 5, "alpha_0": 0.4, "nu": 0.4, "alpha": 0.2}
        | {"timeliness": 3.0, "uncertainty": 0.5},
    ),
    "the loss for ImageNet": (
        EVEN,
        {"memory_size": 9, "update_every": 8, "alpha_0": 0.5, "symmetric": False},
    ),
}


@NORMS
@pytest.mark.parametrize(("sizes", "options"), PETTAS.values(), ids=PETTAS)
def test_petta(
    sizes: tuple[int, ...],
    options: dict[str, Any],
    norm: str,
    make_net: Maker,
    make_sites: Maker,
    make_stream: Maker,
) -> None:
    net = make_net(CLASSES, norm)
    sites = make_sites(net, CLASSES)
    adapter, naive = PeTTA(net, sites, lr=0.01, **options), NaivePeTTA(net, sites.means[:, 0], options)
    for x in make_stream(*sizes):
        assert_near(adapter(x), naive(x))
        assert_near(adapter.predict(x), naive.teacher.eval()(x))
        assert_near(adapter.means, naive.running)
        drift = torch.tensor((naive.drifts or [0.0])[-1], dtype=torch.float64)
        torch.testing.assert_close(adapter.drift, drift, rtol=1e-8, atol=1e-15)
    assert naive.drifts[0] == 0.0, "the first images are compared with the source itself"
    assert naive.drifts[-1] > 0.01, "nothing drifts: this shows nothing"
    assert (naive.memory.evicted > 5) == (options["memory_size"] < 1000)
    for part, twin in (("model", naive.student), ("teacher", naive.teacher)):
        state = check_state(adapter, part, twin)
        moved = max(float((tensor - net.state_dict()[name]).abs().max()) for name, tensor in state.items())
        assert moved > 1e-3, f"nothing moved by more than {moved:.1e}: this shows nothing"
    for name, average in moments(naive.source).items():
        assert_near(adapter.state_dict()[f"source.model.{name}"], average)


def test_petta_s_defaults_are_the_authors() -> None:
    usual = read_defaults(PeTTA)
    wanted = {"memory_size": 64, "update_every": 64, "alpha_0": 1e-3, "lambda_0": 10.0, "al_weight": 1.0}
    wanted |= {
        "lr": 1e-3,
        "nu": 0.05,
        "alpha": 0.05,
        "symmetric": True,
        "timeliness": 1.0,
        "uncertainty": 1.0,
    }
    assert wanted.items() <= usual.items()
