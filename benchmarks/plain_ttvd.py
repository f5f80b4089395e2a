"""TTVD as one would write it at first, and as the authors' public code runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.plain import Plain, keep_everything, softmax_entropy
from torch import Tensor, nn

from ttvd.models.split import split

VIEWS = 4


class PlainTTVD(Plain):
    """Batched rotations, distances by ``torch.cdist``, a boolean mask; the same loss as our default.

    Args:
        model: The classifier, k * 4 outputs.
        made: Its sites.
    """

    lr = 5e-3

    def __init__(self, model: nn.Module, **made: Any) -> None:
        super().__init__(model, **made)
        sites = made["sites"]
        self.means = sites.means.flatten(0, 1).to(self.head.weight)
        self.tau: float = sites.temperatures["cipd@1"]
        self.splitter = split(self.model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, lr=self.lr, momentum=0.9, nesterov=True)

    def __call__(self, x: Tensor) -> Tensor:
        z, logits = self.splitter.features_and_logits(self.rotate(x))
        power, voronoi = self.power_distances(z), torch.cdist(z, self.means)
        scores, other = influence(power, len(x)), influence(voronoi, len(x))
        kept = scores.argmax(1) == other.argmax(1)
        out = scores / self.tau
        loss = self.loss(z, logits, out, kept)
        if loss is not None:
            self.follow(loss)
        return out.detach()

    def rotate(self, x: Tensor) -> Tensor:
        """All views in one batch."""
        return torch.cat([torch.rot90(x, turn, (2, 3)) for turn in range(VIEWS)])

    def power_distances(self, z: Tensor) -> Tensor:
        """d^2 - v^2 to the sites of the head."""
        sites = self.head.weight / 2
        weights = sites.square().sum(1)
        weights = weights if self.head.bias is None else weights + self.head.bias
        apart: Tensor = torch.cdist(z, sites) ** 2
        return apart - weights

    def loss(self, z: Tensor, logits: Tensor, out: Tensor, kept: Tensor) -> Tensor | None:
        """Cross-entropy of the kept views against the class that they agree on, and balance of the batch."""
        mean = out.softmax(1).mean(0)
        balance = (mean * mean.log()).sum() * ((len(out) - 1) / len(out))
        if not kept.any().item():
            return None
        labels = torch.cat([out.detach().argmax(1)[kept] * VIEWS + view for view in range(VIEWS)])
        rows: Tensor = F.cross_entropy(logits[kept.repeat(VIEWS)], labels)
        return rows + balance


class PlainReference(PlainTTVD):
    """The loss of the authors' code, with a mask that is one."""

    lr = 1e-3

    def loss(self, z: Tensor, logits: Tensor, out: Tensor, kept: Tensor) -> Tensor | None:
        if not kept.any().item():
            return None
        rows = kept.repeat(VIEWS)
        apart = torch.cdist(z[rows], self.means)
        return softmax_entropy(logits[rows]).mean(0) + softmax_entropy(-apart).mean(0)


class PublicTTVD(PlainTTVD):
    """The step of the authors' repository: images turned one by one, an index where a mask was meant, copies of all.

    Each image is turned by a loop that reads its angle from the device. The filter picks rows 0 to 4 of the distances
    (fewer than two images have no row 4: the public code fails there). After each step the toolkit that it lives in
    copies the gradients, deep-copies optimizer and model, reads the loss and loads the copy of the model again.
    """

    least = 2
    lr = 1e-3

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
