"""Rounds that are short, and a network that is small."""

import pytest
import torch
from benchmarks.setups import Network
from torch import nn

from benchmarks import clock
from ttvd.nn.resnet import ResNet


def make_net(outputs: int) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return ResNet(outputs, widths=(8, 8), blocks=(1, 1), generator=generator)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a round: tests read no times."""
    monkeypatch.setattr(clock, "ROUND", 0.0)


@pytest.fixture(scope="session")
def tiny() -> Network:
    return Network(8, 3, make_net, frozenset({"rotation head"}))
