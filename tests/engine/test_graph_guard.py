"""What makes a recorded step worthless, beyond what an adapter's own tests change."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ttvd.engine.graph_guard import GraphGuard


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
def test_traits_see(what: str) -> None:
    net = Net()
    guard = GraphGuard(net, "cpu")
    assert guard.is_valid()
    CHANGES[what](net)
    assert not guard.is_valid()


def test_traits_let_values_change() -> None:
    net = Net()
    guard = GraphGuard(net, "cpu")
    net(torch.rand(4, 2)).sum().backward()  # moves the running averages
    with torch.no_grad():
        net.layer.weight.add_(1.0)
    assert guard.is_valid()
