"""RoTTA against a plain twin: averages by hand, its memory as Python lists, a teacher that follows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import read_defaults
from ttvd.methods.rotta import RoTTA
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
StreamMaker = Callable[..., list[Tensor]]
CLASSES = 5


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-8, atol=1e-8)


class HandRobustNorm(nn.Module):
    """RoTTA's layer on paper: in training the averages follow the batch first and normalise it then."""

    alpha = 0.05

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
            mean = (1 - self.alpha) * mean + self.alpha * batch_mean
            var = (1 - self.alpha) * var + self.alpha * batch_var
            self.mean, self.var = mean.detach(), var.detach()
        columns = (columns - mean) / (var + self.eps) ** 0.5 * self.weight + self.bias
        return columns.reshape(x.movedim(1, -1).shape).movedim(-1, 1)


def replace_norms(net: nn.Module) -> Any:
    """A copy with hand-written norms in evaluation mode, whose affine parameters alone want gradients."""
    twin = copy.deepcopy(net).requires_grad_(False)
    for name, layer in net.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            twin.set_submodule(name, HandRobustNorm(layer))
    return twin.eval()


def affine(twin: nn.Module) -> dict[str, nn.Parameter]:
    layers = [(n, m) for n, m in twin.named_modules() if isinstance(m, HandRobustNorm)]
    return {f"{n}.{leaf}": p for n, m in layers for leaf, p in m.named_parameters()}


def moments_of(twin: nn.Module) -> dict[str, Tensor]:
    layers = {name: m for name, m in twin.named_modules() if isinstance(m, HandRobustNorm)}
    means = {f"{name}.running_mean": m.mean for name, m in layers.items()}
    return means | {f"{name}.running_var": m.var for name, m in layers.items()}


class Item:
    def __init__(self, x: Tensor, label: int, entropy: float) -> None:
        self.x, self.label, self.entropy, self.age = x, label, entropy, 0


class NaiveCSTU:
    """RoTTA's memory: one list for each class; every arrival makes everything in it older, the newcomer too."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.capacity: int = options["capacity"]
        self.lists = [list[Item]() for _ in range(CLASSES)]
        self.timeliness: float = options.get("timeliness", 1.0)
        self.uncertainty: float = options.get("uncertainty", 1.0)
        self.evicted = 0

    def score(self, item: Item) -> float:
        old = 1 / (1 + math.exp(-item.age / self.capacity))
        return self.timeliness * old + self.uncertainty * item.entropy / math.log(CLASSES)

    def add(self, new: Item) -> None:
        sizes = [len(items) for items in self.lists]
        if sizes[new.label] < self.capacity / len(sizes):
            rivals = [c for c, size in enumerate(sizes) if size == max(sizes)]
            room = sum(sizes) < self.capacity
        else:
            rivals, room = [new.label], False
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


class NaiveRoTTA:
    def __init__(self, net: nn.Module, options: dict[str, Any]) -> None:
        self.student, self.teacher = (replace_norms(net) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.optimizer = torch.optim.Adam(affine(self.student).values(), lr=0.01)
        self.memory, self.period, self.nu = NaiveCSTU(options), options["period"], options.get("nu", 0.001)
        self.seen = 0
        for layer in (*self.student.modules(), *self.teacher.modules()):
            if isinstance(layer, HandRobustNorm):
                layer.alpha = options.get("alpha", 0.05)

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.teacher.eval()(x)
        for image, row in zip(x, logits.softmax(-1), strict=True):
            entropy = -sum(q * math.log(q) for q in row.tolist())
            self.memory.add(Item(image, int(row.argmax()), entropy))
            self.seen += 1
            if self.seen % self.period == 0:
                self.update()
        return logits

    def update(self) -> None:
        items = self.memory.items()
        images = torch.stack([item.x for item in items])
        wanted = self.teacher.train()(images).softmax(-1)
        found = self.student.train()(darken(images)).log_softmax(-1)
        loss = torch.zeros((), dtype=images.dtype)
        for item, target, log_p in zip(items, wanted, found, strict=True):
            a = item.age / self.memory.capacity
            loss = loss - (target * log_p).sum() * math.exp(-a) / (1 + math.exp(-a))
        self.optimizer.zero_grad()
        (loss / len(items)).backward()
        self.optimizer.step()
        for name, p in affine(self.student).items():
            old = self.teacher.get_parameter(name)
            old.data = (1 - self.nu) * old.data + self.nu * p.data


def assert_state(adapter: nn.Module, prefix: str, twin: nn.Module, start: dict[str, Tensor]) -> None:
    """Affine parameters and averages are the twin's and moved; nothing else of the network is in the state."""
    state = {n.removeprefix(prefix): t for n, t in adapter.state_dict().items() if n.startswith(prefix)}
    wanted: dict[str, Tensor] = {**affine(twin), **moments_of(twin)}
    assert set(state) == set(wanted)
    for name, tensor in wanted.items():
        assert_near(state[name], tensor)
    for leaf in ("weight", "running_mean"):
        moved = max(float((t - start[n]).abs().max()) for n, t in state.items() if n.endswith(leaf))
        assert moved > 1e-4, f"no {leaf} moved by more than {moved:.1e}: this shows nothing"


def darken(x: Tensor, *_: Any) -> Tensor:
    """Stands for the random augmentation."""
    return 0.9 * x.flip(-1) ** 1.5


ROTTAS: dict[str, dict[str, Any]] = {
    "room for all": {"capacity": 250, "period": 5},
    "evictions": {"capacity": 9, "period": 5},
    "old ones go": {"capacity": 7, "period": 6, "timeliness": 3.0, "uncertainty": 0.5},
    "fast teacher": {"capacity": 6, "period": 3, "nu": 0.4, "alpha": 0.3},
}


@pytest.mark.parametrize("options", ROTTAS.values(), ids=ROTTAS)
def test_rotta(
    options: dict[str, Any], make_net: NetMaker, make_stream: StreamMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttvd.methods.rotta.augment", darken)
    net = make_net(CLASSES)
    adapter, naive = RoTTA(net, lr=0.01, **options), NaiveRoTTA(net, options)
    for x in make_stream(6, 1, 5, 8, 2, 13, 6, 8):
        assert_near(adapter(x), naive(x))
        assert_near(adapter.predict(x), naive.teacher.eval()(x))
        state = adapter.state_dict()
        slots = state["memory.labels"] >= 0
        found = {
            (image.sum().item(), int(label), float(age))
            for image, label, age in zip(
                *(state[f"memory.{key}"][slots] for key in ("images", "labels", "ages")), strict=True
            )
        }
        assert found == {(i.x.sum().item(), i.label, float(i.age)) for i in naive.memory.items()}
    assert (naive.memory.evicted > 5) == (options["capacity"] < 250)
    assert_state(adapter, "model.", naive.student, net.state_dict())
    assert_state(adapter, "teacher.", naive.teacher, net.state_dict())


def test_rotta_s_defaults_are_the_paper_s() -> None:
    usual = read_defaults(RoTTA)
    wanted = {"lr": 1e-3, "capacity": 64, "period": 64, "alpha": 0.05, "nu": 0.001}
    assert (wanted | {"timeliness": 1.0, "uncertainty": 1.0}).items() <= usual.items()
