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
from ttvd.testing import make_world

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
CLASSES = 3
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


@torch.no_grad()
def build_sharp(outputs: int, norm: str, scale: float) -> tuple[ResNet, Any]:
    """A network whose head is ``scale`` times as steep, sure of some images and unsure of others; and its twin."""
    net = build_net(outputs, norm)
    net.fc.weight *= scale
    (images,) = build_stream(64, seed=50)
    twin: Any = build_twin(net)
    net.fc.bias.copy_(-net.fc.weight @ twin.forward_features(images).mean(0))
    return net, build_twin(net)


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


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Equal in double precision, but for the order of sums."""
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-8, atol=1e-8)


def probabilities(row: Tensor) -> Tensor:
    """Softmax of a row of logits, written out."""
    return torch.exp(row) / torch.exp(row).sum()


def mean(values: list[Tensor]) -> Tensor:
    """Mean of some tensors, written out."""
    return sum(values[1:], values[0]) / len(values)


def learning(twin: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in twin.named_parameters() if p.requires_grad}


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


def draw_images(b: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(b, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def make_default(rotations: bool = True, **options: Any) -> ttvd.TTVD:
    adapter = make_world("ttvd", rotations=rotations, **options)[1]()
    assert isinstance(adapter, ttvd.TTVD)
    return adapter


def make_ttvd(name: str = "ttvd", rotations: bool = True, **parameters: Any) -> ttvd.TTVD:
    adapter = make_world(name, rotations=rotations, **{**OFF, **parameters})[1]()
    assert isinstance(adapter, ttvd.TTVD)
    return adapter


class TrackedNorm(nn.Module):
    """Batch norm whose averages start at the source, worth 16 images, and never are worth more than 512.

    The value is that of the averages, the batch included; the gradient is that of batch norm on the batch.
    """

    def __init__(self, norm: Any, views: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(p.detach().clone()) for p in (norm.weight, norm.bias))
        self.mean, self.var, self.eps = norm.running_mean.clone(), norm.running_var.clone(), norm.eps
        self.views, self.rows, self.mode = views, 0, "look"

    def forward(self, x: Tensor) -> Tensor:
        columns = x.movedim(1, -1).reshape(-1, x.shape[1])
        batch_mean = columns.sum(0) / len(columns)
        batch_var = ((columns - batch_mean) ** 2).sum(0) / len(columns)
        mean, var = self.mean, self.var
        if self.mode != "settled":
            worth = min(16 * self.views + self.rows, 512 * self.views)
            share = len(x) / (len(x) + worth)
            mean = (1 - share) * mean + share * batch_mean.detach()
            var = (1 - share) * var + share * batch_var.detach()
        if self.mode == "follow":
            self.mean, self.var, self.rows = mean, var, self.rows + len(x)
        scale = ((batch_var.detach() + self.eps) / (var + self.eps)) ** 0.5
        shift = (batch_mean.detach() - mean) / (var + self.eps) ** 0.5
        columns = (columns - batch_mean) / (batch_var + self.eps) ** 0.5 * scale + shift
        affine: Tensor = columns * self.weight + self.bias
        return affine.reshape(x.movedim(1, -1).shape).movedim(-1, 1)


class Naive:
    """The default in full; ``reference_batch_size`` and the optimizer are what an optimizer's name stands for."""

    def __init__(self, net: ResNet, means: Tensor, tau: float, optimizer: str, lr: float) -> None:
        self.twin: Any = copy.deepcopy(net).requires_grad_(False)
        self.norms = {name: TrackedNorm(m) for name, m in net.named_modules() if "BatchNorm" in str(type(m))}
        for name, norm in self.norms.items():
            self.twin.set_submodule(name, norm)
        self.means, self.tau, self.rotations = means, tau, net.fc.out_features // CLASSES
        self.excess, self.images, self.earlier = 0.0, 0, [0.0] * CLASSES
        self.sharpness, self.information = 1.0, 64.0
        leaves = [p for norm in self.norms.values() for p in norm.parameters()]
        self.full = {"sgd": 64, "adam": 1}[optimizer]
        adam = optimizer == "adam"
        self.descent: Any = (
            torch.optim.Adam(leaves, lr, (0.9, 0.999)) if adam else torch.optim.SGD(leaves, lr)
        )
        self.corrected = self.dropped = 0

    def adapt(self, x: Tensor, steps: int, after: bool) -> tuple[Tensor, float]:
        """Answer (b, k) as probabilities, and the share of the batch that took part."""
        answer, share = x, 0.0
        for step in range(steps):
            answer, share, scores, cells = self.take_step(x, "settled" if step else "follow")
            if not step:
                self.count_pairs(scores)
                self.weigh_rotations(cells)
        return (self.answer(self.look(x, "settled")[2]), share) if after else (answer, share)

    def look(self, x: Tensor, mode: str) -> tuple[list[list[Tensor]], list[int], list[list[float]]]:
        """Joint probabilities by image and view, which images are kept, and softened scores."""
        for norm in self.norms.values():
            norm.mode = mode
        z = self.twin.forward_features(torch.cat([torch.rot90(x, a, (2, 3)) for a in range(4)]))
        b, judged = len(x), 4 if self.rotations > 1 else 1
        kept, scores, cells = [], [], []
        for i in range(b):
            logits = [self.twin.fc(z[a * b + i]) for a in range(judged)]
            power = [
                sum(logits[a].tolist()[k * self.rotations + a] for a in range(judged)) for k in range(CLASSES)
            ]
            apart = [
                sum(math.dist(z[a * b + i].tolist(), self.means[k, a].tolist()) for a in range(4))
                for k in range(CLASSES)
            ]
            if self.rotations > 1 or power.index(max(power)) == apart.index(min(apart)):
                kept.append(i)
            scores.append([value / self.tau * self.sharpness**0.7 for value in power])
            cells.append(
                [row.exp() / row.exp().sum() for row in (row - row.max().detach() for row in logits)]
            )
        return cells, kept, scores

    def take_step(self, x: Tensor, mode: str) -> tuple[Tensor, float, list[list[float]], list[list[Tensor]]]:
        cells, kept, scores = self.look(x, mode)
        answer, loss = self.answer(scores), torch.zeros((), dtype=torch.float64)
        # Without rotations, batches that hold few classes each are not asked for all of them.
        balance = 1.0 if self.rotations > 1 else max(0.0, 1.0 - max(0.0, self.excess) / 0.1)
        for i in kept:
            said = int(answer[i].argmax())
            self.corrected += said != scores[i].index(max(scores[i]))
            for a, p in enumerate(cells[i]):
                cost = -p[said * self.rotations + a].log()
                ratio = -(p * (p / (1 - p)).log()).sum()
                loss = loss + (cost + 0.3 * balance * ratio) / len(cells[i]) / len(kept)
        if self.rotations > 1:
            for views in cells:
                for a, p in enumerate(views):
                    loss = loss - p[a :: self.rotations].sum().log() / len(views) / len(x)
        # The same scores at the temperature of the source: how confident answers are is not learnt from.
        spoken = [torch.stack([self.sum_views(views, k) for k in range(CLASSES)]) for views in cells]
        mean = sum((row.exp() / row.exp().sum() for row in spoken), torch.zeros(())) / len(x)
        loss = loss + balance * (mean * mean.log()).sum() * (len(x) - 1) / len(x)
        self.dropped += len(x) - len(kept)
        if kept:
            self.descent.zero_grad()
            (loss * min(len(x), self.full) / self.full).backward()
            self.descent.step()
        return answer, len(kept) / len(x), scores, cells

    def sum_views(self, views: list[Tensor], k: int) -> Tensor:
        """Score of a class, with its gradient: up to what an image's classes share, the sum of its logits."""
        return torch.stack([p[k * self.rotations + a].log() for a, p in enumerate(views)]).sum() / self.tau

    def answer(self, scores: list[list[float]]) -> Tensor:
        """Posteriors under the shares that three rounds find, with A pseudo-images."""
        p = [softmax(row) for row in scores]
        imagined = 1 / min(max(self.excess, 1e-4), 1 / 1.01) - 1
        shares = [1 / CLASSES] * CLASSES
        for _ in range(3):
            posteriors = [reweigh(row, shares) for row in p]
            shares = [
                (imagined / CLASSES + sum(row[k] for row in posteriors)) / (imagined + len(p))
                for k in range(CLASSES)
            ]
        return torch.tensor([reweigh(row, shares) for row in p], dtype=torch.float64)

    def count_pairs(self, scores: list[list[float]]) -> None:
        p, b = [softmax(row) for row in scores], len(scores)
        total = [sum(row[k] for row in p) for k in range(CLASSES)]
        if b > 1 and self.images:
            pairs = [sum(map(float.__mul__, p[i], p[j])) for i in range(b) for j in range(b) if i != j]
            base = sum(map(float.__mul__, total, self.earlier)) / (b * self.images)
            found = (sum(pairs) / len(pairs) - base) / max(1 - base, 0.05)
            worth = min(64 + self.images, 1024)
            self.excess = (worth * self.excess + b * found) / (worth + b)
        self.earlier = [old + new for old, new in zip(self.earlier, total, strict=True)]
        self.images += b

    def weigh_rotations(self, cells: list[list[Tensor]]) -> None:
        """One step of Fisher scoring towards the temperature at which the rotations are most likely."""
        if self.rotations == 1:
            return
        slopes, spreads, b = [], [], len(cells)
        for views in cells:
            for a, p in enumerate(views):
                logs = [math.log(sum(p.tolist()[r :: self.rotations])) for r in range(self.rotations)]
                weights = softmax([self.sharpness * log for log in logs])
                mean = sum(map(float.__mul__, weights, logs))
                slopes.append(mean - logs[a])
                spreads.append(sum(w * (log - mean) ** 2 for w, log in zip(weights, logs, strict=True)))
        self.information = 64.0 + (self.information - 64.0) * (512 - min(b, 512)) / 512
        self.information += b * sum(spreads) / len(spreads)
        moved = self.sharpness - b * sum(slopes) / len(slopes) / self.information
        self.sharpness = min(max(moved, 0.25), 2.0)


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def reweigh(row: list[float], shares: list[float]) -> list[float]:
    joint = [p * share for p, share in zip(row, shares, strict=True)]
    return [value / sum(joint) for value in joint]


def assert_same_state(adapter: ttvd.TTVD, naive: Naive) -> None:
    """All that changes is there, and is what the loops made of it."""
    found = dict(adapter.state_dict())
    wanted: dict[str, Any] = {"label_shift.excess": naive.excess, "label_shift.images": naive.images}
    if naive.images:
        wanted["label_shift.mean"] = [value / naive.images for value in naive.earlier]
    else:
        wanted["label_shift.mean"] = 1 / CLASSES
    if naive.rotations > 1:
        wanted |= {
            "online_temperature.sharpness": naive.sharpness,
            "online_temperature.information": naive.information,
        }
    for name, norm in naive.norms.items():
        leaves: dict[str, Any] = {"weight": norm.weight.detach(), "bias": norm.bias.detach()}
        leaves |= {"running_mean": norm.mean, "running_var": norm.var, "rows_followed": norm.rows}
        wanted |= {f"model.model.{name}.{leaf}": value for leaf, value in leaves.items()}
    assert {name for name in found if not name.startswith(("optimizer.", "guard."))} == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name],
            torch.as_tensor(value, dtype=found[name].dtype).expand_as(found[name]),
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=name,
        )
