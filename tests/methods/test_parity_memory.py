"""NOTE against a plain twin: instance-aware norm by loops, the reservoir by what it keeps, a sorted stream."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import assert_near, read_defaults
from ttvd.data.digits import split_digits
from ttvd.methods.note import NOTE
from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
StreamMaker = Callable[..., list[Tensor]]


def shrink(value: Tensor, width: Tensor) -> Tensor:
    if value.item() > width.item():
        return value - width
    return value + width if value.item() < -width.item() else value * 0


class HandInstanceNorm(nn.Module):
    """NOTE's layer on paper: batch moments, left only where an instance is further away than chance would take it."""

    softness, momentum = 4.0, 0.01

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.weight = nn.Parameter(norm.weight.detach().clone())
        self.bias = nn.Parameter(norm.bias.detach().clone())
        self.mean, self.var, self.eps = norm.running_mean.clone(), norm.running_var.clone(), norm.eps

    def moments(self, plane: Tensor) -> tuple[Tensor, Tensor]:
        mean = plane.sum() / plane.numel()
        return mean, ((plane - mean) ** 2).sum() / (plane.numel() - 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2] * x.shape[-1]
        rows: list[list[Tensor]] = [[] for _ in x]
        for c in range(x.shape[1]):
            mean, var = self.mean[c], self.var[c]
            if self.training:
                mean, var = self.moments(x[:, c])
                m = self.momentum
                self.mean[c] = (1 - m) * self.mean[c] + m * mean.detach()
                self.var[c] = (1 - m) * self.var[c] + m * var.detach()
            for i, plane in enumerate(x[:, c]):
                centre, spread = mean, var
                if size > 1:
                    own_mean, own_var = self.moments(plane)
                    wide = self.softness * torch.sqrt((var + self.eps) / size)
                    wider = self.softness * (var + self.eps) * math.sqrt(2 / (size - 1))
                    centre = mean + shrink(own_mean - mean, wide)
                    spread = torch.relu(var + shrink(own_var - var, wider))
                rows[i].append(
                    (plane - centre) / torch.sqrt(spread + self.eps) * self.weight[c] + self.bias[c]
                )
        return torch.stack([torch.stack(planes) for planes in rows])


def replace_norms(net: nn.Module) -> Any:
    """A copy with hand-written norms in evaluation mode, whose affine parameters alone want gradients."""
    twin = copy.deepcopy(net).requires_grad_(False)
    for name, layer in net.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            twin.set_submodule(name, HandInstanceNorm(layer))
    return twin.eval()


def affine(twin: nn.Module) -> dict[str, nn.Parameter]:
    layers = [(n, m) for n, m in twin.named_modules() if isinstance(m, HandInstanceNorm)]
    return {f"{n}.{leaf}": p for n, m in layers for leaf, p in m.named_parameters()}


def moments_of(twin: nn.Module) -> dict[str, Tensor]:
    layers = {name: m for name, m in twin.named_modules() if isinstance(m, HandInstanceNorm)}
    means = {f"{name}.running_mean": m.mean for name, m in layers.items()}
    return means | {f"{name}.running_var": m.var for name, m in layers.items()}


def note_loss(logits: Tensor) -> Tensor:
    """Entropy averaged over samples and classes, with a millionth inside the logarithm."""
    total = torch.zeros((), dtype=logits.dtype)
    for row in logits:
        p = torch.exp(row) / torch.exp(row).sum()
        total = total - (p * torch.log(p + 1e-6)).sum()
    return total / logits.numel()


def assert_state(adapter: nn.Module, prefix: str, twin: nn.Module, start: dict[str, Tensor]) -> None:
    """Affine parameters and averages are the twin's and moved; nothing else of the network is in the state."""
    state = {n.removeprefix(prefix): t for n, t in adapter.state_dict().items() if n.startswith(prefix)}
    wanted: dict[str, Tensor] = {**affine(twin), **moments_of(twin)}
    assert set(state) == set(wanted)
    for name, tensor in wanted.items():
        assert_near(state[name], tensor)
    for leaf in ("weight", "running_mean"):
        moved = max(float((t - start[n]).abs().max()) for n, t in state.items() if n.endswith(leaf))
        assert moved > 1e-4, f"no {leaf} moved by more than {moved:.1e}: this shows nothing"


def make_instance_aware(net: ResNet) -> ResNet:
    """The product's network with the weights of one with batch norm."""
    twin = ResNet(3, in_channels=1, widths=(4, 8), blocks=(1, 1), norm="instance-aware", bias=True).double()
    state = {name: t for name, t in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    twin.load_state_dict(state)
    return twin.eval()


@pytest.mark.parametrize("capacity", [100, 5])
def test_note(capacity: int, make_net: NetMaker, make_stream: StreamMaker) -> None:
    """A small memory chooses at random: what it holds after an update is what the update has seen."""
    net = make_net(3)
    net.fc.requires_grad_(False).weight.mul_(8)  # sure enough for the millionth in the logarithm to matter
    twin = replace_norms(net)
    optimizer = torch.optim.Adam(affine(twin).values(), lr=0.01)
    adapter = NOTE(make_instance_aware(net), lr=0.01, capacity=capacity, period=6)
    waiting: list[Tensor] = []
    for x in make_stream(*((6,) * 6 if capacity == 5 else (6, 1, 2, 3, 13, 6, 9))):
        found, wanted = adapter(x), []
        for image in x:
            wanted.append(twin.eval()(image[None])[0])
            waiting.append(image)
            if len(waiting) % 6 == 0:
                state = adapter.state_dict()
                kept = state["memory.images"][state["memory.labels"] >= 0]
                memory = torch.stack(waiting) if capacity == 100 else kept
                assert len(memory) == min(len(waiting), capacity)
                assert all(any(torch.equal(m, w) for w in waiting) for m in memory)
                optimizer.zero_grad()
                note_loss(twin.train()(memory)).backward()
                optimizer.step()
        assert_near(found, torch.stack(wanted))
        assert_near(adapter.predict(x), twin.eval()(x))
    assert_state(adapter, "model.", twin, net.state_dict())


def test_note_learns_after_every_64_samples(make_net: NetMaker, make_stream: StreamMaker) -> None:
    net = make_instance_aware(make_net(3))
    adapter = NOTE(net)
    for x, due in zip(make_stream(40, 23, 1, 63, 1), (False, False, True, False, True), strict=True):
        before = adapter.state_dict()["model.norm1.running_mean"].clone()
        adapter(x)
        assert torch.equal(adapter.state_dict()["model.norm1.running_mean"], before) != due
    assert int((adapter.state_dict()["memory.labels"] >= 0).sum()) == 64


def test_note_s_defaults_are_the_paper_s() -> None:
    usual = read_defaults(NOTE)
    assert {"lr": 1e-4, "capacity": 64, "period": 64, "alpha": 0.01}.items() <= usual.items()


def build_oracle() -> nn.Module:
    """Classifies by the brightest channel; its norm changes nothing at these means and variances."""
    head = nn.Linear(3, 3)
    head.load_state_dict({"weight": 9 * torch.eye(3), "bias": torch.zeros(3)})
    norm = InstanceAwareBatchNorm2d(3, eps=1e-12)
    return nn.Sequential(norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()


def number_images(labels: list[int]) -> Tensor:
    """Images of given classes; how many came before it is written into the first pixel row of each."""
    x = torch.zeros(len(labels), 3, 4, 4)
    for number, label in enumerate(labels):
        x[number, label], x[number, label - 1, 0, 0] = 0.9, number / 1000
    return x


def read_memory(labels: list[int], capacity: int, seed: int) -> list[int]:
    adapter = NOTE(build_oracle(), capacity=capacity, period=10_000, seed=seed)
    adapter(number_images(labels))
    state = adapter.state_dict()
    kept = state["memory.images"][state["memory.labels"] >= 0]
    return [round(1000 * float(x[:, 0, 0][x[:, 0, 0] < 0.5].max())) for x in kept]


def test_reservoir_is_balanced_and_fair() -> None:
    """Classes come one after the other, one of them rare; every sample of a class is as likely to stay as another."""
    labels = [0] * 30 + [2] * 2 + [1] * 20
    chances = torch.zeros(52)
    runs = 150
    for seed in range(runs):
        kept = read_memory(labels, 8, seed)
        sizes = [sum(labels[n] == c for n in kept) for c in range(3)]
        assert len(set(kept)) == 8
        assert sizes == [3, 3, 2]
        chances[kept] += 1 / runs
    for first, last, share in ((0, 15, 0.1), (15, 30, 0.1), (30, 32, 1.0), (32, 42, 0.15), (42, 52, 0.15)):
        assert float(chances[first:last].mean()) == pytest.approx(share, abs=0.03)


def test_reservoir_counts_the_newcomer() -> None:
    """With room for one of two samples either stays every second time: m / n = 1 / 2."""
    share = sum(read_memory([1, 1], 1, seed) == [1] for seed in range(150)) / 150
    assert share == pytest.approx(0.5, abs=0.15)


def train_digits(x: Tensor, y: Tensor, norm: str) -> ResNet:
    generator = torch.Generator().manual_seed(0)
    net = ResNet(10, in_channels=1, widths=(8, 16), blocks=(1, 1), norm=norm, generator=generator)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=240)
    for _ in range(4):
        for rows in torch.randperm(3000, generator=generator).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def test_note_holds_on_a_sorted_stream_where_tent_collapses() -> None:
    """Pale, noisy digits: in random order Tent is better than its source by far, sorted by class it is lost."""
    source, source_labels, x, y = split_digits()
    source, x = (nn.functional.avg_pool2d(images, 2) for images in (source, x))
    generator = torch.Generator().manual_seed(5)
    pale = (0.7 * x + 0.1 + 0.05 * torch.randn(x.shape, generator=generator)).clamp(0, 1)
    mixed = torch.randperm(2000, generator=generator)[:960]
    in_runs = mixed[y[mixed].argsort(stable=True)]
    usual, aware = (train_digits(source, source_labels, norm) for norm in ("batch", "instance-aware"))

    def error(adapter: ttvd.Adapter, order: Tensor) -> float:
        wrong = sum(int((adapter(pale[rows]).argmax(1) != y[rows]).sum()) for rows in order.split(32))
        return wrong / len(order)

    tent, lost = (error(ttvd.create("tent", usual), order) for order in (mixed, in_runs))
    before = error(ttvd.create("source", aware), in_runs)
    after = error(NOTE(aware, lr=1e-3, alpha=0.1), in_runs)
    assert tent < 0.2, f"Tent should help on a mixed stream: {tent:.3f}"
    assert lost > 0.6, f"Tent should collapse on a sorted one: {lost:.3f}"
    assert after < min(before - 0.1, 0.4), f"NOTE should help on a sorted one: {before:.3f} to {after:.3f}"
