"""Shared by the tests of methods: small networks, streams, hand-written twins of norms, and loops over formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ttvd
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet

WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2", "index"}
"""Operations that wait for the device."""
OFF: dict[str, Any] = {
    "diversity_weight": 0.0,
    "rotation_weight": 0.0,
    "slr_weight": 0.0,
    "prior": None,
    "output_temperature": 1.0,
    "reference_batch_size": 1,
    "momentum": 0.9,
    "statistics": ttvd.Statistics.batch(),
}
"""The consensus, and nothing besides."""
TOLERANCE = 1e-8
TEMPERATURES = {"vd": 0.7, "pd": 1.3, "civd@-0.8": 0.06, "cipd@-0.8": 0.04, "civd@1": 1.7, "cipd@1": 3.0}
"""All different, so that a method which reads the wrong one is found out."""


class HandNorm(nn.Module):
    """Batch norm as on paper: p * source + (1 - p) * batch moments, the batch variance biased.

    Args:
        norm: The layer that it stands for; its affine parameters and source moments are copied.
        share: p for a batch of the given size.
    """

    def __init__(self, norm: nn.Module, share: Callable[[int], float]) -> None:
        super().__init__()
        assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())
        self.source_mean, self.source_var = norm.running_mean.clone(), norm.running_var.clone()
        self.eps, self.share = norm.eps, share

    def forward(self, x: Tensor) -> Tensor:
        columns = x.movedim(1, -1).reshape(-1, x.shape[1])
        batch_mean = columns.sum(0) / len(columns)
        batch_var = ((columns - batch_mean) ** 2).sum(0) / len(columns)
        p = self.share(len(x))
        mean = p * self.source_mean + (1 - p) * batch_mean
        var = p * self.source_var + (1 - p) * batch_var
        columns = (columns - mean) / (var + self.eps) ** 0.5 * self.weight + self.bias
        return columns.reshape(x.movedim(1, -1).shape).movedim(-1, 1)


def build_net(outputs: int = 12, norm: str = "batch", seed: int = 3) -> ResNet:
    """A float64 network whose affine parameters, source moments and head are far from their initial values."""
    generator = torch.Generator().manual_seed(seed)
    widths = (4, 8) if norm == "batch" else (8, 16)
    net = ResNet(
        outputs, in_channels=1, widths=widths, blocks=(1, 1), norm=norm, bias=True, generator=generator
    )
    net.double()
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
                layer.weight.copy_(1 + 0.3 * draw(layer.weight.shape, generator))
                layer.bias.copy_(0.3 * draw(layer.bias.shape, generator))
        net.fc.weight.copy_(1.5 * draw(net.fc.weight.shape, generator))
        net.train()
        for x in build_stream(16, 16, 16, seed=seed + 100):
            net(x)
        net.eval()
        net.fc.bias.copy_(0.3 * draw(net.fc.bias.shape, generator) - net.fc.weight @ mean_features(net))
    return net


@torch.no_grad()
def mean_features(net: ResNet) -> Tensor:
    """Where the features of this suite's images lie; heads and sites around it tell images apart."""
    (x,) = build_stream(64, seed=50)
    return net.forward_features(x.to(net.fc.weight.dtype)).mean(0)


def draw(shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers that float32 can hold, in float64."""
    return torch.randn(shape, generator=generator).double()


def build_twin(model: nn.Module, *, prior: float = 0.0, count: float | None = None) -> nn.Module:
    """A copy whose batch norms are `HandNorm`; ``prior`` is p itself, ``count`` the N of p = N / (N + b)."""
    twin = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            share = (lambda _: prior) if count is None else (lambda b: count / (count + b))
            twin.set_submodule(name, HandNorm(layer, share))
    return twin


def norm_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Affine parameters of normalisation layers by name."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, HandNorm | nn.GroupNorm)]
    return {f"{n}.{leaf}": p for n, m in layers for leaf, p in m.named_parameters()}


def build_optimizer(twin: nn.Module, name: str, lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    """Torch's own optimizer over the norm parameters of a twin; the others are frozen."""
    twin.requires_grad_(False)
    chosen = [p.requires_grad_() for p in norm_parameters(twin).values()]
    if name == "adam":
        return torch.optim.Adam(chosen, lr=lr, betas=(momentum, 0.999))
    return torch.optim.SGD(chosen, lr=lr, momentum=momentum, nesterov=momentum > 0)


def build_sites(model: nn.Module, classes: int = 3, seed: int = 3, means: Tensor | None = None) -> ttvd.Sites:
    """Sites with float32 means; unless given, they lie around the features of the network that `build_net` made."""
    if means is None:
        assert isinstance(model, ResNet)
        spread = draw((classes, 4, model.num_features), torch.Generator().manual_seed(seed))
        means = mean_features(model) + 0.3 * spread
    means = means.float().double()
    counts = torch.ones(means.shape[:2], dtype=torch.int64)
    return ttvd.Sites(means, counts, fingerprint(model), temperatures=TEMPERATURES)


def build_stream(*sizes: int, seed: int = 2) -> list[Tensor]:
    """Batches of blotches in [0, 1], all different in contrast, which grow darker from batch to batch."""
    generator = torch.Generator().manual_seed(seed)
    stream = []
    for step, size in enumerate(sizes):
        blotches = torch.rand(size, 1, 3, 3, dtype=torch.float64, generator=generator)
        contrast = torch.rand(size, 1, 1, 1, dtype=torch.float64, generator=generator)
        grain = torch.rand(size, 1, 12, 12, dtype=torch.float64, generator=generator)
        images = blotches.repeat_interleave(4, -1).repeat_interleave(4, -2) * contrast
        stream.append((0.8 * images + 0.2 * grain) ** (1 + 0.2 * step))
    return stream


def read_parameters(adapter: nn.Module) -> dict[str, Tensor]:
    """What adapts in the user's model, by its name there; methods that need features wrap the model once more."""
    state: Mapping[str, Any] = adapter.state_dict()
    names = [name for name in state if name.startswith("model.")]
    return {name.removeprefix("model.").removeprefix("model."): state[name] for name in names}


def check_parameters(adapter: nn.Module, twin: nn.Module, model: nn.Module) -> None:
    """Adapted parameters are the twin's; they moved, and nothing else did."""
    found, start, wanted = read_parameters(adapter), model.state_dict(), norm_parameters(twin)
    assert set(found) == set(wanted), "other tensors adapt than the affine parameters of the norms"
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    moved = max(float((found[name] - start[name]).abs().max()) for name in found)
    assert moved > 1e-3, f"nothing moved by more than {moved:.1e}: this shows nothing"


def read_defaults(method: type[nn.Module]) -> dict[str, Any]:
    """The parameters of a registered class with their defaults."""
    return next(entry.parameters() for entry in ttvd.list_methods().values() if entry.adapter is method)


class Watch(TorchDispatchMode):
    """Remembers which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and write down its name."""
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def draw_rotations(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    """Logarithms of probabilities (v, b, r)."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1)


def loop_temperature(stream: list[Tensor]) -> tuple[float, float]:
    """Sharpness and information, one view of one image at a time."""
    s, information = 1.0, 64.0
    for rotations in stream:
        slope = spread = 0.0
        views, images = rotations.shape[:2]
        for a in range(views):
            for row in rotations[a].tolist():
                powers = [math.exp(s * log) for log in row]
                mean = sum(p * log for p, log in zip(powers, row, strict=True)) / sum(powers)
                slope += (mean - row[a]) / views
                apart = [p * (log - mean) ** 2 for p, log in zip(powers, row, strict=True)]
                spread += sum(apart) / sum(powers) / views
        information = 64.0 + (information - 64.0) * max(0, 512 - images) / 512 + spread
        s = min(2.0, max(0.25, s - slope / information))
    return s, information


def loop_level(stream: list[Tensor], source_loss: float) -> tuple[float, int]:
    """Level and number of images, one view of one image at a time."""
    level, images = source_loss + 0.1, 0
    for rotations in stream:
        views, size = rotations.shape[:2]
        total = 0.0
        for a in range(views):
            for row in rotations[a].tolist():
                total -= row[a]
        old = min(images, 256)
        level = (old * level + size * total / (views * size)) / (old + size)
        images += size
    return level, images


def bound_factor(level: float, source_loss: float) -> float:
    return min(1.0, max(0.0, 10 * (level - source_loss)))
