"""Plain eager steps: the methods as their authors' code and its ports write them, for our step to be measured against.

They follow the public code in what costs time: a copy of the model in training mode whose norms have lost their running
averages (those of TTVD's default keep them), ``loss.backward()``, torch's own optimizers, boolean indexing of what is
kept, ``.item()`` where a decision is made on the host, loops over classes. They compute what our steps compute (tests
compare the predictions). All of them run in float32, channels first, one kernel at a time.
"""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.methods.eata import default_similarity
from ttvd.methods.sar import LAST_LAYERS
from ttvd.nn.split import split

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


def softmax_entropy(logits: Tensor) -> Tensor:
    """Of each row, with softmax and log-softmax computed apart."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


class Plain:
    """Base: a copy of the model, configured as Tent's code does it.

    Args:
        model: The classifier.
        made: Source data that the method needs: sites, features or Fisher information.

    Attributes:
        least: Images that a batch must have.
    """

    least: ClassVar[int] = 1
    batch_statistics: ClassVar[bool] = True
    trained: ClassVar[str | None] = "norm"

    def __init__(self, model: nn.Module, **made: Any) -> None:
        self.model = copy.deepcopy(model).train(self.batch_statistics)
        self.head = split(self.model).linear
        self.model.requires_grad_(self.trained == "features")
        self.head.requires_grad_(False)
        for layer in self.model.modules():
            if isinstance(layer, nn.Dropout):
                layer.eval()
            if isinstance(layer, _NORMS) and self.trained == "norm":
                layer.requires_grad_(True)
            if isinstance(layer, nn.BatchNorm2d) and self.batch_statistics:
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = None
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer() if self.parameters else None

    def make_optimizer(self) -> torch.optim.Optimizer:
        """SGD as in EATA and SAR."""
        return torch.optim.SGD(self.parameters, lr=2.5e-4, momentum=0.9)

    def __call__(self, x: Tensor) -> Tensor:
        """Predict a batch and adapt to it."""
        raise NotImplementedError

    def follow(self, loss: Tensor) -> None:
        """Backward, step, and away with the gradients."""
        assert self.optimizer is not None
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainBN(Plain):
    """Batch statistics, one forward pass."""

    trained = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits


class PlainSource(PlainBN):
    """The model as it is."""

    batch_statistics = False


class PlainTent(Plain):
    """Mean entropy, Adam."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters, lr=1e-3)

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        self.follow(softmax_entropy(logits).mean(0))
        return logits.detach()


class PlainSHOT(Plain):
    """Information maximisation and pseudo-labels; everything but the head learns."""

    trained = "features"

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, lr=1e-3, momentum=0.9, nesterov=True)

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        mean = logits.softmax(1).mean(0)
        loss = softmax_entropy(logits).mean() + (mean * (mean + 1e-5).log()).sum()
        best, labels = logits.softmax(1).max(1)
        sure = best > 0.9
        if sure.sum().item():
            loss = loss + 0.3 * F.cross_entropy(logits[sure], labels[sure])
        self.follow(loss)
        return logits.detach()


class PlainETA(Plain):
    """Two filters by boolean indexing, weights, moving mean of what was kept."""

    def __init__(self, model: nn.Module, **made: Any) -> None:
        super().__init__(model, **made)
        classes = self.head.out_features
        self.margin, self.similarity = 0.4 * math.log(classes), default_similarity(classes)
        self.mean: Tensor | None = None
        self.fisher: dict[str, Tensor] = made.get("fisher", {})
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        values = softmax_entropy(logits)
        sure = values < self.margin
        values, probs = values[sure], logits[sure].softmax(1)
        if self.mean is not None:
            new = F.cosine_similarity(self.mean[None], probs, dim=1).abs() < self.similarity
            values, probs = values[new], probs[new]
        if len(values):
            mean = probs.detach().mean(0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
            loss = ((self.margin - values.detach()).exp() * values).mean(0)
            for name, parameter in self.model.named_parameters():
                if name in self.fisher:
                    drift = parameter - self.start[name]
                    loss = loss + 2000.0 * (self.fisher[name] * drift**2).sum()
            self.follow(loss)
        return logits.detach()


class PlainSAR(Plain):
    """Two passes, weights moved and put back one by one, the loss followed on the host."""

    def __init__(self, model: nn.Module, **made: Any) -> None:
        super().__init__(model, **made)
        for name, parameter in self.model.named_parameters():
            if name.startswith(tuple(f"{layer}." for layer in LAST_LAYERS)):
                parameter.requires_grad_(False)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.make_optimizer()
        classes = self.head.out_features
        self.margin, self.floor = 0.4 * math.log(classes), 0.029 * math.log(classes)
        self.ema: float | None = None
        self.start = copy.deepcopy(self.model.state_dict())
        self.fresh = copy.deepcopy(self.optimizer.state_dict())

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        values = softmax_entropy(logits)
        sure = values < self.margin
        if not sure.any().item():
            return logits.detach()
        values[sure].mean(0).backward()
        moves = self._climb()
        values = softmax_entropy(self.model(x))[sure]
        values = values[values < self.margin]
        if len(values):
            loss = values.mean(0)
            loss.backward()
        for parameter, move in moves.items():
            parameter.data.sub_(move)
        if len(values):
            assert self.optimizer is not None
            self.optimizer.step()
            self._watch(loss.item())
        self.model.zero_grad()
        return logits.detach()

    def _climb(self) -> dict[nn.Parameter, Tensor]:
        found = {p: p.grad for p in self.parameters if p.grad is not None}
        length = torch.stack([gradient.norm() for gradient in found.values()]).norm() + 1e-12
        moves = {p: 0.05 * gradient / length for p, gradient in found.items()}
        for parameter, move in moves.items():
            parameter.data.add_(move)
        self.model.zero_grad()
        return moves

    def _watch(self, loss: float) -> None:
        self.ema = loss if self.ema is None else 0.9 * self.ema + 0.1 * loss
        if self.ema < self.floor:
            assert self.optimizer is not None
            self.model.load_state_dict(self.start)
            self.optimizer.load_state_dict(self.fresh)
            self.ema = None


class PlainT3A(Plain):
    """Features and logits in two passes, supports that are concatenated and sorted class by class."""

    batch_statistics = False
    trained = None

    @torch.no_grad()
    def __init__(self, model: nn.Module, **made: Any) -> None:
        super().__init__(model, **made)
        self.classes = self.head.out_features
        self.supports = self.head.weight.detach()
        logits = self.head(self.supports)
        self.labels = F.one_hot(logits.argmax(1), self.classes).float()
        self.entropies = softmax_entropy(logits)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        z, logits = split(self.model).features(x), self.model(x)
        self.supports = torch.cat([self.supports, z])
        self.labels = torch.cat([self.labels, F.one_hot(logits.argmax(1), self.classes).float()])
        self.entropies = torch.cat([self.entropies, softmax_entropy(logits)])
        chosen = []
        owners = self.labels.argmax(1)
        for label in range(self.classes):
            own = (owners == label).nonzero()[:, 0]
            chosen.append(own[self.entropies[own].argsort(stable=True)][:100])
        kept = torch.cat(chosen)
        self.supports, self.labels, self.entropies = (
            self.supports[kept],
            self.labels[kept],
            self.entropies[kept],
        )
        weights = F.normalize(self.supports, dim=1).T @ self.labels
        return z @ F.normalize(weights, dim=0)


def keep_everything(step: Plain, loss: Tensor) -> dict[str, object]:
    """A step as TTAB takes it: gradients cloned, optimizer and model deep-copied, loss read, the copy loaded again."""
    assert step.optimizer is not None
    loss.backward()
    named = step.model.named_parameters()
    gradients = {name: p.grad.clone().detach() for name, p in named if p.grad is not None}
    step.optimizer.step()
    step.optimizer.zero_grad()
    kept = {"optimizer": copy.deepcopy(step.optimizer).state_dict(), "loss": loss.item(), "grads": gradients}
    model = copy.deepcopy(step.model).state_dict()
    step.model.load_state_dict(model)
    return {**kept, "model": model}
