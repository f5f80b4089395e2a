"""AdaNPC against a list of vectors and labels: softmax-weighted neighbours, who enters, who makes room."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.methods import assert_near, read_defaults
from ttvd.methods.adanpc import AdaNPC
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet
from ttvd.zoo.source_features import SourceFeatures

NetMaker = Callable[..., ResNet]
TwinMaker = Callable[..., Any]
StreamMaker = Callable[..., list[Tensor]]


class NaiveAdaNPC:
    """Source samples and the last few test samples that it was sure of, as unit vectors with labels."""

    def __init__(self, source: SourceFeatures, k: int, tau: float, capacity: int) -> None:
        pairs = zip(source.features.double(), source.labels.tolist(), strict=True)
        self.source, self.k, self.tau = list(pairs), k, tau
        self.added: deque[tuple[Tensor, int]] = deque(maxlen=capacity)

    def judge(self, z: Tensor) -> list[float]:
        memory = [*self.source, *self.added]
        near = sorted(((float(z @ m), y) for m, y in memory), reverse=True)[: self.k]
        total = sum(math.exp(s / self.tau) for s, _ in near)
        p = [sum(math.exp(s / self.tau) / total for s, y in near if y == c) for c in range(3)]
        return [min(q + 1e-5, 1.0) for q in p]


ADANPCS: dict[str, dict[str, Any]] = {
    "everyone enters": {"k": 10, "beta": 0.1},
    "nobody enters": {"k": 10, "beta": 1.1},
    "the sure enter": {"k": 5, "beta": 0.7, "tau": 0.02},
    "the sure enter, as in the authors' code": {"k": 5, "beta": 0.48, "tau": 0.02, "double_softmax": True},
    "a small memory": {"k": 10, "beta": 0.1, "capacity": 7},
    "a memory smaller than a batch": {"k": 3, "beta": 0.7, "tau": 0.02, "capacity": 2},
    "more neighbours than there are": {"k": 100, "beta": 0.5},
}


@pytest.mark.parametrize("options", ADANPCS.values(), ids=ADANPCS)
@torch.no_grad()
def test_adanpc(
    options: dict[str, Any], make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker
) -> None:
    net, (x,) = make_net(3), make_stream(40, seed=9)
    twin = make_twin(net, prior=1.0)
    z = twin.forward_features(x)
    features, labels = (z / z.norm(dim=1, keepdim=True)).float(), net(x).argmax(1)
    labels[::5] = (labels[::5] + 1) % 3  # noise, so that not every neighbourhood is of one mind
    source = SourceFeatures(features, labels, fingerprint(net))
    adapter = AdaNPC(net, source, **options)
    naive = NaiveAdaNPC(source, options["k"], options.get("tau", 0.1), options.get("capacity", 10_000))
    entered = 0
    for batch in make_stream(6, 5, 1, 8, 3, 6):
        points = [z / z.norm() for z in twin.forward_features(batch)]
        rows = [naive.judge(z) for z in points]
        wanted = torch.tensor(rows, dtype=torch.float64)
        assert_near(adapter(batch).softmax(-1), wanted / wanted.sum(1, keepdim=True))
        for z, row, doubled in zip(points, rows, wanted.softmax(1).amax(1).tolist(), strict=True):
            if (doubled if options.get("double_softmax") else max(row)) >= options["beta"]:
                naive.added.append((z, row.index(max(row))))
                entered += 1
        after = torch.tensor([naive.judge(z) for z in points], dtype=torch.float64)
        assert_near(adapter.predict(batch).exp(), after)
    assert entered == 29 * (options["beta"] < 0.2) or 1 < entered < 28


def test_defaults_are_those_of_the_authors_code() -> None:
    usual = read_defaults(AdaNPC)
    assert {"k": 100, "tau": 0.1, "beta": 0.1}.items() <= usual.items()
