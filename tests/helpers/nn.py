"""Networks with batch norms, and their anchors worked out by hand."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.nn.anchors import Anchors, watch_norms

BOUNDED = settings(deadline=None, derandomize=True, max_examples=20)


SEEDS = st.integers(0, 10_000)


assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


class NormAct(nn.BatchNorm2d):
    """Norm and activation in one, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def build_deep() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(4, 5, 2), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 1), nn.BatchNorm2d(3, eps=0.1)),
        *(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
    )


def build_twice() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, nn.Tanh(), nn.BatchNorm1d(4), nn.Tanh(), norm)


def build_tied() -> nn.Module:
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    second.weight, second.bias = first.weight, first.bias
    return nn.Sequential(first, nn.Tanh(), second)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "deep": (build_deep, (4, 3, 3)),
    "sequences": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4)), (4, 5)),
    "one norm twice": (build_twice, (4,)),
    "tied parameters": (build_tied, (4,)),
    "norm and activation": (lambda: nn.Sequential(NormAct(4), nn.Conv2d(4, 3, 1), NormAct(3)), (4, 2, 2)),
    "norm alone": (lambda: nn.BatchNorm2d(4), (4, 3, 3)),
}


def norms_of(net: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in net.modules() if isinstance(layer, _BatchNorm)]


def kinds_of(net: nn.Module) -> tuple[tuple[str, int], ...]:
    """Name and size of the norms of a net that is in no wrapper."""
    return tuple((k, norm.num_features) for k, norm in net.named_modules() if isinstance(norm, _BatchNorm))


def make_net(kind: str, seed: int = 0) -> nn.Module:
    """In float64 and evaluation mode, with stored statistics and affine parameters far from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    net = KINDS[kind][0]().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(generator=generator)
        for norm in norms_of(net):
            norm.get_buffer("running_mean").normal_(generator=generator)
            norm.get_buffer("running_var").uniform_(0.2, 3.0, generator=generator)
    return net


def draw(kind: str, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return 1 + 2 * torch.randn(count, *KINDS[kind][1], generator=generator, dtype=torch.float64)


def draw_anchors(net: nn.Module, seed: int = 0) -> Anchors:
    generator = torch.Generator().manual_seed(seed + 2)
    kinds = kinds_of(net)
    means, roots = torch.randn(2, sum(dict(kinds).values()), generator=generator, dtype=torch.float64)
    return Anchors(means, 4 * roots.square(), kinds)


@torch.no_grad()
def watch(net: nn.Module, *batches: Tensor, views: int = 1) -> dict[int, Anchors]:
    with watch_norms(net, views) as moments:
        for batch in batches:
            net(batch)
    return moments.anchors()


def read_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def assert_same_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    found = net.state_dict()
    assert list(found) == list(state)
    assert [name for name, value in state.items() if not torch.equal(found[name], value)] == []


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over all values, in float64."""
    columns = x.detach().double().movedim(1, -1).reshape(-1, x.shape[1])
    mean = columns.sum(0) / len(columns)
    return mean, ((columns - mean) ** 2).sum(0) / len(columns)


def list_moments(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of all that enters the norms of a chain of layers, norm by norm."""
    entering: dict[nn.Module, list[Tensor]] = {}
    for layer in net if isinstance(net, nn.Sequential) else [net]:
        if isinstance(layer, _BatchNorm):
            entering.setdefault(layer, []).append(x)
        x = layer(x)
    means, variances = zip(*(channel_moments(torch.cat(parts)) for parts in entering.values()), strict=True)
    return torch.cat(means), torch.cat(variances)


def use_batch_statistics(net: nn.Module) -> nn.Module:
    """A copy whose norms, written out by hand, take mean and variance from what enters them."""
    net = copy.deepcopy(net)

    def normalise(norm: _BatchNorm, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        mean, var = channel_moments(inputs[0])
        columns = (inputs[0].movedim(1, -1) - mean) / (var + norm.eps) ** 0.5 * norm.weight + norm.bias
        return (columns.tanh() if isinstance(norm, NormAct) else columns).movedim(-1, 1)

    for norm in norms_of(net):
        norm.register_forward_hook(normalise)
    return net
