"""Adapters that take gradient steps: the step is written once, here."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ttvd.adapters.base import Adapter, Timing
from ttvd.adapters.optim import build_optimizer
from ttvd.models.norms import Statistics, Which


class Step(NamedTuple):
    """What a gradient method makes of a batch.

    Attributes:
        out: Logits (b, k) of the forward pass that the loss was made of.
        loss: One scalar.
        kept: Share of the batch that the loss uses, a scalar; at 0 the step leaves parameters and slots alone.
    """

    out: Tensor
    loss: Tensor
    kept: Tensor


class GradientAdapter(Adapter):
    """Base of the methods that take gradient steps; a method writes :meth:`loss` and, if need be, :meth:`output`.

    A loss that is not finite changes nothing.

    Args:
        model: As in :class:`Adapter`.
        lr: Learning rate.
        optimizer: ``"sgd"`` (Nesterov momentum) or ``"adam"``.
        momentum: Momentum of SGD, first beta of Adam.
        steps: Gradient steps for each batch.
        statistics: As in :class:`Adapter`; those of the batch by default.
        parameters: Which parameters adapt.
        prediction: ``"before"`` returns the logits of the last forward pass before the last update, ``"after"``
            those of a fresh one after it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        steps: int = 1,
        statistics: Statistics | None = None,
        parameters: Which = "norm",
        prediction: Timing = "before",
    ) -> None:
        super().__init__(model, statistics=statistics or Statistics.batch(), parameters=parameters)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if prediction not in ("before", "after"):
            raise ValueError(f"prediction must be 'before' or 'after', got {prediction!r}")
        self.steps = steps
        self.prediction = prediction
        self.optimizer = build_optimizer(optimizer, self.adapting(), lr, momentum)

    def adapting(self) -> list[nn.Parameter]:
        """The parameters that adapt."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def loss(self, x: Tensor) -> Step:
        """Predict a batch and say what to minimise."""
        raise NotImplementedError

    def adapt(self, x: Tensor) -> Tensor:
        """Take the gradient steps."""
        parameters = self.adapting()
        for _ in range(self.steps):
            with torch.enable_grad():
                step = self.loss(x)
                gradients = torch.autograd.grad(step.loss, parameters, allow_unused=True)
            fine = torch.stack([g.isfinite().all() for g in gradients if g is not None]).all()
            self.optimizer.step(parameters, gradients, step.kept * (fine & step.loss.isfinite()))
        self.kept.copy_(step.kept.detach())
        if self.prediction == "before":
            return step.out
        with torch.no_grad():
            return self.output(x)
