"""What makes a recorded step invalid."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.engine import make_batches
from ttvd.engine.graph_guard import GraphGuard
from ttvd.testing import make_world


class Layer(nn.Linear):
    """With attributes of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.factor = float("2.0")
        self.seen: list[int] = []


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Layer(), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        return out


def rename(net: Net) -> None:
    del net.layer.factor
    net.layer.divisor = 2.0  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Net], object]] = {
    "an attribute with another name": rename,
    "a value that is equal and not the same": lambda net: setattr(net.layer, "factor", float("2.0")),
    "a list that grows": lambda net: net.layer.seen.append(1),
    "a first buffer": lambda net: net.layer.register_buffer("late", torch.ones(1)),
    "a first child": lambda net: net.layer.add_module("late", nn.Identity()),
    "the mode of one layer": lambda net: net.norm.eval(),
    "other tables": lambda net: setattr(net.layer, "_parameters", dict(net.layer._parameters)),
    "a hook of one layer": lambda net: net.norm.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_guard_sees(what: str) -> None:
    net = Net()
    guard = GraphGuard(net, "cpu")
    assert guard.is_valid()
    CHANGES[what](net)
    assert not guard.is_valid()


def test_the_guard_lets_values_change() -> None:
    net = Net()
    guard = GraphGuard(net, "cpu")
    net(torch.rand(4, 2)).sum().backward()  # moves the running averages
    with torch.no_grad():
        net.layer.weight.add_(1.0)
    assert guard.is_valid()


STEP_CHANGES: dict[str, Callable[[Any], object]] = {
    "learning rate": lambda tent: setattr(tent.optimizer, "lr", 0.5),
    "attribute": lambda tent: setattr(tent, "note", "new"),
    "validation": lambda tent: setattr(tent, "validation", "never"),
    "method": lambda tent: setattr(tent, "loss", lambda x: None),
    "requires_grad": lambda tent: tent.adapting()[0].requires_grad_(False),
    "storage": lambda tent: setattr(tent.adapting()[0], "data", tent.adapting()[0].data.clone()),
    "parameter": lambda tent: setattr(tent.model.norm1, "weight", nn.Parameter(torch.ones(8))),
    "layer": lambda tent: setattr(tent.model, "norm1", nn.Identity()),
    "hook": lambda tent: tent.model.register_forward_hook(lambda *_: None),
    "double": lambda tent: tent.double(),
}


@pytest.mark.parametrize("what", [None, *STEP_CHANGES])
def test_the_guard_sees_what_a_step_depends_on(what: str | None) -> None:
    adapter, (x, *_) = make_world("tent")[1](), make_batches()
    adapter(x)
    before = GraphGuard(adapter, "cpu")
    adapter(x)
    adapter.reset()
    adapter.load_state_dict(adapter.state_dict())
    if what is not None:
        STEP_CHANGES[what](adapter)
    assert before.is_valid() == (what is None)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_guard_sees_autocast(autocast: bool) -> None:
    adapter = make_world("tent")[1]()
    before = GraphGuard(adapter, "cpu")
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        assert before.is_valid() != autocast


def test_a_guard_may_be_an_attribute_of_the_module_that_it_watches() -> None:
    net = Net()
    net.guard = GraphGuard(net, "cpu", ignore=("guard",))  # type: ignore[assignment]
    guard: Any = net.guard
    assert not guard.is_valid()  # the attribute is new
    net.guard = guard = GraphGuard(net, "cpu", ignore=("guard",))  # type: ignore[assignment]
    assert guard.is_valid()
    known = weakref.ref(net)
    del net
    assert known() is None
    assert not guard.is_valid()
