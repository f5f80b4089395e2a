"""Norms that follow the stream, in compiled graphs: the same gradients and averages, though graphs write nothing."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.engine import compiling_by
from ttvd.engine.fused_norm import find_moments
from ttvd.nn.norms import Statistics, apply_statistics, following_stream


@pytest.fixture(autouse=True)
def quick_compiler() -> Iterator[None]:
    with compiling_by("aot_eager"):
        yield


class Recurrent(nn.Module):
    """A stem, and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6, eps=1e-3)
        self.block, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x)).relu()
        for _ in range(2):
            x = (self.second(self.block(x)) + x).relu()
        return x


def make_net(policy: str) -> nn.Module:
    numbers = torch.Generator().manual_seed(0)
    net = Recurrent().double()
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5, generator=numbers)
    return apply_statistics(net, Statistics.parse(policy)).eval()


def follow(net: nn.Module, x: Tensor, compiled: bool) -> list[Tensor]:
    """Gradients of the parameters."""
    graph: Any = torch.compile(net, dynamic=False) if compiled else net
    with following_stream(net):
        out = graph(x)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return list(torch.autograd.grad((out.square() * weights).sum(), list(net.parameters())))


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("policy", ["momentum:0.1", "track:8:32", "track:8:32:renorm"])
def test_a_norm_that_is_used_twice_has_the_same_gradients_and_averages(policy: str) -> None:
    torch._dynamo.reset()
    plain, fast = make_net(policy), make_net(policy)
    for x in torch.rand(3, 5, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        for wanted, found in zip(follow(plain, x, False), follow(fast, x, True), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    for (name, wanted), found in zip(plain.named_buffers(), fast.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, msg=name)
    rows = dict(fast.named_buffers()).get("second.rows_followed")
    assert rows is None or rows.tolist() == [30] * 6


@given(
    far=st.floats(-30, 30),
    spread=st.floats(1e-3, 1e3),
    seed=st.integers(0, 99),
    shape=st.sampled_from([(64, 5), (4, 5, 9), (8, 5, 6, 6)]),
)
@settings(deadline=None, max_examples=60)
def test_moments_about_another_mean_are_those_of_the_batch(
    far: float, spread: float, seed: int, shape: tuple[int, ...]
) -> None:
    """Single precision, a mean that is up to 30 deviations away: three digits are left, more than bfloat16 has."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * spread + 0.3
    near = torch.full((5,), 0.3 + far * spread)
    with patch("torch.compiler.is_compiling", lambda: True):
        mean, var = find_moments(x.float(), near)
    var_wanted, mean_wanted = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
    torch.testing.assert_close(mean.double(), mean_wanted, rtol=1e-5, atol=1e-4 * spread)
    torch.testing.assert_close(var.double(), var_wanted, rtol=2e-3, atol=0.0)
    assert (var >= 0).all()


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_half_precision_goes_in_and_out_and_gradients_are_right() -> None:
    torch._dynamo.reset()
    norms: list[Any] = [make_net("track:8:32:renorm").float().first for _ in range(2)]
    net, twin = norms
    x = torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)
    found, wanted = torch.compile(net, backend="aot_eager", fullgraph=True)(x), twin(x.float())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)
    gradients = [
        torch.autograd.grad((out.float() * weights).sum(), [x, of.weight, of.bias])
        for out, of in ((found, net), (wanted, twin))
    ]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


def test_no_variance_is_below_zero() -> None:
    """Equal values, far from the averages: what sums leave of their squares may have any sign."""
    numbers = torch.rand(40, generator=torch.Generator().manual_seed(5)) * 100
    with patch("torch.compiler.is_compiling", lambda: True):
        _, var = find_moments(numbers.expand(300, 40), torch.zeros(40))
    assert (var >= 0).all()
    assert (var < 0.01).all()
