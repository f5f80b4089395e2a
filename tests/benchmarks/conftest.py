"""A network that is small enough to be measured in no time."""

import pytest
import torch
from benchmarks.worlds import Network
from torch import nn

from ttvd.nn.resnet import ResNet


def make_net(outputs: int) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    return ResNet(outputs, widths=(8, 8), blocks=(1, 1), generator=generator)


@pytest.fixture(scope="session")
def tiny() -> Network:
    return Network(8, 3, make_net, frozenset({"rotation head"}))
