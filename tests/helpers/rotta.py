"""RoTTA by hand, for the methods that build on it: robust norms with averages of their own, and its memory as lists."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn


class HandRobustNorm(nn.Module):
    """RoTTA's layer on paper: in training the averages follow the batch first and normalise it then.

    Args:
        norm: The layer that it stands for; its affine parameters and averages are copied.
        alpha: Share of a batch in the averages.
    """

    def __init__(self, norm: nn.BatchNorm2d, alpha: float) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())
        self.mean, self.var, self.eps = norm.running_mean.clone(), norm.running_var.clone(), norm.eps
        self.alpha = alpha

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


def replace_norms(net: nn.Module, alpha: float = 0.05) -> Any:
    """A copy with hand-written norms in evaluation mode, in which nothing wants gradients."""
    twin = copy.deepcopy(net)
    for name, layer in net.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            twin.set_submodule(name, HandRobustNorm(layer, alpha))
    return twin.requires_grad_(False).eval()


def affine(twin: nn.Module) -> dict[str, nn.Parameter]:
    """Weights and biases of the norms by name."""
    layers = [(n, m) for n, m in twin.named_modules() if isinstance(m, HandRobustNorm | nn.GroupNorm)]
    return {f"{n}.{leaf}": p for n, m in layers for leaf, p in m.named_parameters()}


def moments(twin: nn.Module) -> dict[str, Tensor]:
    """Averages of the norms, by the names that torch's batch norm gives them."""
    layers = {name: m for name, m in twin.named_modules() if isinstance(m, HandRobustNorm)}
    means = {f"{name}.running_mean": m.mean for name, m in layers.items()}
    return means | {f"{name}.running_var": m.var for name, m in layers.items()}


def check_state(adapter: nn.Module, part: str, twin: nn.Module) -> dict[str, Tensor]:
    """Affine parameters and averages are the twin's, and nothing else of the network is in the state.

    Returns:
        What was found, by its name in the user's model; methods that need features wrap that once more.
    """
    prefix = f"{part}."
    state = {n.removeprefix(prefix): t for n, t in adapter.state_dict().items() if n.startswith(prefix)}
    found = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    wanted: dict[str, Tensor] = {**affine(twin), **moments(twin)}
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-8, atol=1e-8)
    return found


class Item:
    """An image in the memory, the class that it was taken for, and its entropy."""

    def __init__(self, x: Tensor, label: int, entropy: float) -> None:
        self.x, self.label, self.entropy, self.age = x, label, entropy, 0


class NaiveCSTU:
    """RoTTA's memory: one list for each class; every arrival makes everything in it older, the newcomer too."""

    def __init__(
        self, capacity: int, classes: int, timeliness: float = 1.0, uncertainty: float = 1.0
    ) -> None:
        self.capacity, self.timeliness, self.uncertainty = capacity, timeliness, uncertainty
        self.lists = [list[Item]() for _ in range(classes)]
        self.evicted = 0

    def score(self, item: Item) -> float:
        """How much is to be said for its eviction."""
        old = 1 / (1 + math.exp(-item.age / self.capacity))
        return self.timeliness * old + self.uncertainty * item.entropy / math.log(len(self.lists))

    def add(self, new: Item) -> None:
        """Offer one image."""
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
        """What it holds, class by class."""
        return [item for items in self.lists for item in items]


def darken(x: Tensor, *_: Any) -> Tensor:
    """Stands for the random augmentation."""
    return 0.9 * x.flip(-1) ** 1.5
