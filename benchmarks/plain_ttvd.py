"""TTVD as one would write it at first, and as the authors' public code runs it."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from benchmarks.plain import Plain, keep_everything, softmax_entropy
from torch import Tensor, nn

from ttvd.nn.split import split

VIEWS = 4


class Turning(Plain):
    """What all of them share: four views of an image, sites and temperature, one step of SGD.

    Args:
        model: The classifier, k * 4 outputs.
        made: Its sites.
    """

    lr: ClassVar[float]
    momentum: ClassVar[float] = 0.0

    def __init__(self, model: nn.Module, **made: Any) -> None:
        super().__init__(model, **made)
        sites = made["sites"]
        self.means = sites.means.flatten(0, 1).to(self.head.weight)
        self.tau: float = sites.temperatures["cipd@1"]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0.0
        )

    def rotate(self, x: Tensor) -> Tensor:
        """All views in one batch."""
        return torch.cat([torch.rot90(x, turn, (2, 3)) for turn in range(VIEWS)])


class PlainTTVD(Turning):
    """The step of our default: norms that follow the stream, four terms of a loss, an answer with two corrections.

    What is followed along the stream is kept in numbers on the host, read by ``.item()``.
    """

    batch_statistics = False
    lr = 0.05

    def __init__(self, model: nn.Module, **made: Any) -> None:
        super().__init__(model, **made)
        for name, layer in list(self.model.named_modules()):
            if isinstance(layer, nn.BatchNorm2d):
                self.model.set_submodule(name, TrackedNorm(layer))
        self.excess, self.images, self.earlier = 0.0, 0, torch.zeros((), device=self.head.weight.device)
        self.sharpness, self.information = 1.0, 64.0
        self.usual: float = made["sites"].rotation_loss
        self.level = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(self.rotate(x))
        cells = logits.reshape(VIEWS, len(x), -1, VIEWS)
        scores = torch.stack([cells[view, :, :, view] for view in range(VIEWS)]).sum(0)
        out = scores / self.tau
        soft = out.detach() * math.pow(self.sharpness, 0.7)
        answer = soft + self.shift(soft)
        rotations = logits.log_softmax(1).reshape(len(logits), -1, VIEWS).logsumexp(1)
        turns = torch.arange(VIEWS, device=x.device).repeat_interleave(len(x))
        consensus = F.cross_entropy(logits, answer.argmax(1).repeat(VIEWS) * VIEWS + turns)
        known = F.nll_loss(rotations, turns)
        loss = consensus + 0.3 * likelihood_ratio(logits).mean() + known + imbalance(out)
        self.follow(loss * min(1.0, len(x) / 64) * self.watch_need(known.item(), len(x)))
        self.watch_classes(soft)
        self.watch_rotations(rotations.detach(), turns)
        return answer

    def shift(self, soft: Tensor) -> Tensor:
        """By how much the shares of the classes in the batch, in three rounds, move the scores."""
        size, classes = soft.shape
        imagined = 1 / min(max(self.excess, 1e-4), 1 / 1.01) - 1
        shares = torch.full_like(soft[0], 1 / classes)
        for _ in range(3):
            counts = (soft + (classes * shares).log()).softmax(1).sum(0)
            shares = (imagined / classes + counts) / (imagined + size)
        return (classes * shares).log()

    def watch_need(self, known: float, size: int) -> float:
        """The share of a step: how far the loss of rotations is above that of source data, in tenths of a nat."""
        self.level += (known - self.level) * size / (min(self.images, 256) + size)
        return min(max((self.level - self.usual) / 0.1, 0.0), 1.0)

    def watch_classes(self, soft: Tensor) -> None:
        """How much more often two images are of one class in a batch than across batches."""
        size, probs = len(soft), soft.softmax(1)
        if size > 1 and self.images:
            pairs = probs @ probs.T
            rate = (pairs.sum() - pairs.trace()).item() / (size * (size - 1))
            base = (probs.mean(0) @ self.earlier).item() / self.images
            found = (rate - base) / max(1 - base, 0.05)
            self.excess += (found - self.excess) * size / (min(self.images + 64, 1024) + size)
        self.earlier = self.earlier + probs.sum(0)
        self.images += size

    def watch_rotations(self, rotations: Tensor, turns: Tensor) -> None:
        """By which factor the logarithms of the rotations' probabilities would say how often they are right."""
        size = len(rotations) // VIEWS
        probs = (self.sharpness * rotations).softmax(1)
        mean = (probs * rotations).sum(1)
        slope = (mean - rotations.gather(1, turns[:, None])[:, 0]).mean().item()
        spread = (probs * (rotations - mean[:, None]) ** 2).sum(1).mean().item()
        self.information = 64 + (self.information - 64) * max(0.0, 1 - size / 512) + size * spread
        self.sharpness = min(max(self.sharpness - size * slope / self.information, 0.25), 2.0)


class TrackedNorm(nn.Module):
    """Batch renormalisation by averages that start at the source, worth 16 images, and remember up to 512.

    Args:
        layer: Whose weights are shared, and with whose statistics it starts.
    """

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        assert layer.running_mean is not None
        assert layer.running_var is not None
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()
        self.rows = 16 * VIEWS

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
        share = len(x) / (self.rows + len(x))
        self.mean = (1 - share) * self.mean + share * mean
        self.var = (1 - share) * self.var + share * var
        self.rows = min(self.rows + len(x), 512 * VIEWS)
        std = (self.var + self.eps).sqrt()
        r, d = (var + self.eps).sqrt() / std, (mean - self.mean) / std
        x_hat = F.batch_norm(x, None, None, training=True, eps=self.eps)
        renormalised = x_hat * r[:, None, None] + d[:, None, None]
        return renormalised * self.weight[:, None, None] + self.bias[:, None, None]


def likelihood_ratio(logits: Tensor) -> Tensor:
    """-sum p log(p / (1 - p)) of each row; where p is the largest, 1 - p is summed up, as it may be rounded to 0."""
    logs = logits.log_softmax(1)
    probs = logs.exp()
    top = F.one_hot(logs.argmax(1), logs.shape[1]).bool()
    others = torch.empty_like(logs)
    others[top] = logs[~top].view(len(logs), -1).logsumexp(1)
    others[~top] = torch.log1p(-probs[~top])
    return -(probs * (logs - others)).sum(1)


def imbalance(out: Tensor) -> Tensor:
    """Minus the entropy of the mean prediction, less for few images."""
    mean = out.log_softmax(1).logsumexp(0) - math.log(len(out))
    return (mean.exp() * mean).sum() * ((len(out) - 1) / len(out))


class PlainReference(Turning):
    """The loss of the authors' code, with a mask that is one; distances by ``torch.cdist``, statistics of the batch."""

    lr = 1e-3
    momentum = 0.9

    def __init__(self, model: nn.Module, **made: Any) -> None:
        super().__init__(model, **made)
        self.splitter = split(self.model)

    def __call__(self, x: Tensor) -> Tensor:
        z, logits = self.splitter.features_and_logits(self.rotate(x))
        power, voronoi = self.power_distances(z), torch.cdist(z, self.means)
        scores, other = influence(power, len(x)), influence(voronoi, len(x))
        kept = scores.argmax(1) == other.argmax(1)
        if kept.any().item():
            rows = kept.repeat(VIEWS)
            self.follow(softmax_entropy(logits[rows]).mean(0) + softmax_entropy(-voronoi[rows]).mean(0))
        return (scores / self.tau).detach()

    def power_distances(self, z: Tensor) -> Tensor:
        """d^2 - v^2 to the sites of the head."""
        sites = self.head.weight / 2
        weights = sites.square().sum(1)
        weights = weights if self.head.bias is None else weights + self.head.bias
        apart: Tensor = torch.cdist(z, sites) ** 2
        return apart - weights


class PublicTTVD(PlainReference):
    """The step of the authors' repository: images turned one by one, an index where a mask was meant, copies of all.

    Each image is turned by a loop that reads its angle from the device. The filter picks rows 0 to 4 of the distances
    (fewer than two images have no row 4: the public code fails there). After each step the toolkit that it lives in
    copies the gradients, deep-copies optimizer and model, reads the loss and loads the copy of the model again.
    """

    least = 2

    def rotate(self, x: Tensor) -> Tensor:
        turns = torch.cat([torch.full((len(x),), turn, device=x.device) for turn in range(VIEWS)])
        images = [
            torch.rot90(image, int(turn), (1, 2))
            for image, turn in zip(x.repeat(VIEWS, 1, 1, 1), turns, strict=True)
        ]
        return torch.stack(images)

    def follow(self, loss: Tensor) -> None:
        keep_everything(self, loss)

    def __call__(self, x: Tensor) -> Tensor:
        z = self.splitter.features(self.rotate(x))
        power, voronoi = self.power_distances(z), torch.cdist(z, self.means)
        scores, other = influence(power, len(x)), influence(voronoi, len(x))
        same = scores.max(1)[1] == other.max(1)[1]
        rows = torch.cat([same * (view + 1) for view in range(VIEWS)])
        loss = softmax_entropy(-power[rows]).mean(0) + softmax_entropy(-voronoi[rows]).mean(0)
        self.follow(loss)
        return scores.detach()


def influence(apart: Tensor, batch: int) -> Tensor:
    """Minus the distances of each view to the sites of its own rotation, summed: (b, k)."""
    parts = [apart[view * batch : (view + 1) * batch, view::VIEWS] for view in range(VIEWS)]
    return -torch.stack(parts).sum(0)
