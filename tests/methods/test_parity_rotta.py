"""RoTTA against a plain twin: averages by hand, its memory as Python lists, a teacher that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, read_defaults
from tests.helpers.rotta import Item, NaiveCSTU, affine, check_state, darken, replace_norms
from ttvd.methods.rotta import RoTTA
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
StreamMaker = Callable[..., list[Tensor]]
CLASSES = 5


class NaiveRoTTA:
    def __init__(self, net: nn.Module, options: dict[str, Any]) -> None:
        self.student, self.teacher = (replace_norms(net, options.get("alpha", 0.05)) for _ in range(2))
        leaves = [p.requires_grad_() for p in affine(self.student).values()]
        self.optimizer = torch.optim.Adam(leaves, lr=0.01)
        weights = {key: options[key] for key in ("timeliness", "uncertainty") if key in options}
        self.memory = NaiveCSTU(options["capacity"], CLASSES, **weights)
        self.period, self.nu, self.seen = options["period"], options.get("nu", 0.001), 0

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


def assert_state(adapter: nn.Module, part: str, twin: nn.Module, start: dict[str, Tensor]) -> None:
    """Affine parameters and averages are the twin's and moved."""
    state = check_state(adapter, part, twin)
    for leaf in ("weight", "running_mean"):
        moved = max(float((t - start[n]).abs().max()) for n, t in state.items() if n.endswith(leaf))
        assert moved > 1e-4, f"no {leaf} moved by more than {moved:.1e}: this shows nothing"


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
    assert_state(adapter, "model", naive.student, net.state_dict())
    assert_state(adapter, "teacher", naive.teacher, net.state_dict())


def test_rotta_s_defaults_are_the_paper_s() -> None:
    usual = read_defaults(RoTTA)
    wanted = {"lr": 1e-3, "capacity": 64, "period": 64, "alpha": 0.05, "nu": 0.001}
    assert (wanted | {"timeliness": 1.0, "uncertainty": 1.0}).items() <= usual.items()
