"""Source, BN-Adapt, Tent and T3A against plain twins: hand-written batch norm, torch's optimizers, lists, loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import assert_near
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
TwinMaker = Callable[..., Any]
StreamMaker = Callable[..., list[Tensor]]
Compare = Callable[[nn.Module, nn.Module, nn.Module], None]


def mean_entropy(logits: Tensor) -> Tensor:
    """Tent's loss, sample by sample from the definition."""
    rows = []
    for row in logits:
        p = torch.exp(row) / torch.exp(row).sum()
        rows.append(-(p * torch.log(p)).sum())
    return torch.stack(rows).mean()


def test_source_is_the_model_in_evaluation_mode(
    make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker
) -> None:
    net = make_net()
    twin, whole = make_twin(net, prior=1.0), copy.deepcopy(net)
    adapter = ttvd.create("source", net.train())
    for x in make_stream(6, 1, 3, 8, 2):
        found = adapter(x)
        assert_near(found, twin(x))
        assert_near(found, whole(x))
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), whole.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("count", [0, 1, 16, 1000.5])
def test_bn_mixes_source_and_batch_by_pseudo_count(
    count: float, make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker
) -> None:
    net = make_net()
    adapter, twin = ttvd.create("bn", net, count=count), make_twin(net, count=float(count))
    for x in make_stream(8, 5, 1, 16, 3):
        found = adapter(x)
        assert_near(found, twin(x))
        assert_near(adapter.predict(x), found)
        assert (found - net(x)).abs().max() > 1e-4


def test_the_twin_is_batch_norm(make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker) -> None:
    """The oracle itself: its two ends are torch's evaluation and training modes."""
    net, (x,) = make_net(), make_stream(8)
    assert_near(make_twin(net, prior=1.0)(x), net.eval()(x))
    assert_near(make_twin(net, prior=0.0)(x), net.train()(x))


TENTS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adam, other beta, three steps": {"optimizer": "adam", "lr": 0.01, "momentum": 0.5, "steps": 3},
    "adam, after": {"optimizer": "adam", "lr": 0.01, "prediction": "after"},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "sgd, little momentum, two steps": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.3, "steps": 2},
    "sgd, no momentum": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.0},
    "sgd, three steps, after": {"optimizer": "sgd", "lr": 0.05, "steps": 3, "prediction": "after"},
}


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("parameters", TENTS.values(), ids=TENTS)
def test_tent(
    parameters: dict[str, Any],
    norm: str,
    make_net: NetMaker,
    make_twin: TwinMaker,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    make_stream: StreamMaker,
    assert_parameters: Compare,
) -> None:
    net = make_net(norm=norm)
    adapter, twin = ttvd.create("tent", net, **parameters), make_twin(net)
    optimizer = make_optimizer(
        twin, parameters["optimizer"], parameters["lr"], parameters.get("momentum", 0.9)
    )
    for x in make_stream(8, 5, 8, 1, 16, 8, 3):
        found = adapter(x)
        for _ in range(parameters.get("steps", 1)):
            before = twin(x)
            optimizer.zero_grad()
            mean_entropy(before).backward()
            optimizer.step()
        assert_near(found, twin(x) if parameters.get("prediction") == "after" else before)
        assert_near(adapter.predict(x), twin(x))
    assert_parameters(adapter, twin, net)


def test_tent_defaults_are_the_paper_s(
    make_net: NetMaker, make_stream: StreamMaker, parameters_of: Callable[[nn.Module], dict[str, Tensor]]
) -> None:
    net, stream = make_net(), make_stream(8, 8, 8)
    usual = ttvd.create("tent", net)
    spelt = ttvd.create("tent", net, lr=1e-3, optimizer="adam", momentum=0.9, steps=1, prediction="before")
    for x in stream:
        assert torch.equal(usual(x), spelt(x))
    first, second = parameters_of(usual), parameters_of(spelt)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("prior", [0.25, 1.0])
def test_tent_with_shared_statistics(
    prior: float,
    make_net: NetMaker,
    make_twin: TwinMaker,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    make_stream: StreamMaker,
    assert_parameters: Compare,
) -> None:
    net = make_net()
    adapter = ttvd.create("tent", net, lr=0.01, statistics=ttvd.Statistics(prior=prior))
    twin = make_twin(net, prior=prior)
    optimizer = make_optimizer(twin, "adam", 0.01)
    for x in make_stream(8, 5, 8, 1, 16):
        found, before = adapter(x), twin(x)
        assert_near(found, before)
        optimizer.zero_grad()
        mean_entropy(before).backward()
        optimizer.step()
    assert_parameters(adapter, twin, net)


class NaiveT3A:
    """Supports as lists of (entropy, unit vector), one list for each class."""

    def __init__(self, head: nn.Linear, keep: int) -> None:
        self.head, self.keep = head, keep
        self.supports: list[list[tuple[float, Tensor]]] = [[] for _ in range(head.out_features)]
        for row in head.weight.detach():
            self.add(row)

    def add(self, z: Tensor) -> None:
        p = self.head(z).softmax(-1)
        entropy = -sum(q * torch.tensor(q).log().item() for q in p.tolist())
        self.supports[int(p.argmax())].append((entropy, z / z.norm()))

    def __call__(self, features: Tensor) -> Tensor:
        for z in features:
            self.add(z)
        scores = torch.zeros(len(features), len(self.supports), dtype=features.dtype)
        for label, supports in enumerate(self.supports):
            supports.sort(key=lambda pair: pair[0])
            if self.keep >= 0:
                del supports[self.keep :]
            total = sum((vector for _, vector in supports), torch.zeros_like(features[0]))
            weight = total / total.norm() if supports else total
            for row, z in enumerate(features):
                scores[row, label] = z @ weight
        return scores


@pytest.mark.parametrize("supports", [1, 2, 5, 1000, -1])
@torch.no_grad()
def test_t3a(supports: int, make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker) -> None:
    """A small head is unsure of its own rows, so that samples drive them out; two classes start empty."""
    net = make_net()
    for parameter in net.fc.parameters():
        parameter.mul_(0.03)
    net.fc.weight[0] = 0.1 * net.fc.weight[1]
    net.fc.weight[2] *= 0.05
    adapter, twin = ttvd.create("t3a", net, supports=supports), make_twin(net, prior=1.0)
    naive = NaiveT3A(net.fc, supports)
    assert sum(not pairs for pairs in naive.supports) >= 2
    rows = [vector for pairs in naive.supports for _, vector in pairs]
    for x in make_stream(8, 5, 8, 1, 16, 8):
        assert_near(adapter(x), naive(twin.forward_features(x)))
    left = {id(vector) for pairs in naive.supports for _, vector in pairs}
    assert left - {id(row) for row in rows}, "no sample ever became a support"
    assert all(id(row) in left for row in rows) == (supports in (1000, -1)), "no row was ever in question"
