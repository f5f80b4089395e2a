"""Fixtures of the tests of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import (
    build_net,
    build_optimizer,
    build_sharp,
    build_sites,
    build_stream,
    build_twin,
    check_parameters,
    read_parameters,
)
from ttvd.nn.resnet import ResNet


@pytest.fixture(scope="session")
def make_net() -> Callable[..., ResNet]:
    return build_net


@pytest.fixture(scope="session")
def make_twin() -> Callable[..., Any]:
    return build_twin


@pytest.fixture(scope="session")
def make_sharp() -> Callable[..., tuple[ResNet, Any]]:
    return build_sharp


@pytest.fixture(scope="session")
def make_optimizer() -> Callable[..., torch.optim.Optimizer]:
    return build_optimizer


@pytest.fixture(scope="session")
def make_sites() -> Callable[..., ttvd.Sites]:
    return build_sites


@pytest.fixture(scope="session")
def make_stream() -> Callable[..., list[Tensor]]:
    return build_stream


@pytest.fixture(scope="session")
def assert_parameters() -> Callable[[nn.Module, nn.Module, nn.Module], None]:
    return check_parameters


@pytest.fixture(scope="session")
def parameters_of() -> Callable[[nn.Module], dict[str, Tensor]]:
    return read_parameters
