"""Adapters that take gradient steps: the step is written once, here."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ttvd.engine.flat import all_finite
from ttvd.engine.optimizers import build_optimizer
from ttvd.methods.adapter import Adapter, Timing
from ttvd.methods.shared.losses import differentiate
from ttvd.nn.anchors import Anchors
from ttvd.nn.norms import Statistics, Which, following_stream, freeze_layers, settled_stream


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

    A loss or gradient that is not finite changes nothing.

    Args:
        model: As in :class:`Adapter`.
        lr: Learning rate.
        optimizer: ``"sgd"`` or ``"adam"``.
        momentum: Momentum of SGD, first beta of Adam.
        nesterov: Whether the momentum of SGD is Nesterov's.
        steps: Gradient steps for each batch.
        statistics: As in :class:`Adapter`; those of the batch by default.
        parameters: Which parameters adapt.
        skip: Layers that do not, by prefixes of their names (:func:`~ttvd.nn.norms.freeze_layers`).
        prediction: ``"before"`` returns the logits of the last forward pass before the last update, ``"after"``
            those of a fresh one after it.
        anchors: As in :class:`Adapter`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        nesterov: bool = True,
        steps: int = 1,
        statistics: Statistics | None = None,
        parameters: Which = "norm",
        skip: Sequence[str] = (),
        prediction: Timing = "before",
        anchors: Anchors | None = None,
    ) -> None:
        statistics = statistics or Statistics.batch()
        super().__init__(model, statistics=statistics, parameters=parameters, anchors=anchors)
        freeze_layers(self.model, skip)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if prediction not in ("before", "after"):
            raise ValueError(f"prediction must be 'before' or 'after', got {prediction!r}")
        if any(p.dtype.itemsize < 4 for p in self.adapting()):
            raise ValueError(
                "weights in half precision cannot follow small steps: keep the model in float32 and call the adapter "
                "inside torch.autocast"
            )
        self.steps = steps
        self.prediction = prediction
        self.optimizer = build_optimizer(optimizer, self.adapting(), lr, momentum, nesterov=nesterov)

    def adapting(self) -> list[nn.Parameter]:
        """The parameters that adapt."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def loss(self, x: Tensor) -> Step:
        """Predict a batch and say what to minimise."""
        raise NotImplementedError

    def take_step(self, x: Tensor) -> Step:
        """One gradient step on a batch."""
        parameters = self.adapting()
        with torch.enable_grad():
            step = self.loss(x)
            gradients = differentiate(step.loss, parameters)
        gate = step.kept * all_finite(step.loss)
        self.optimizer.step(parameters, gradients, gate, self.compiled)
        self.kept.copy_(step.kept.detach())
        return step

    def stream_parts(self) -> nn.Module:
        """What holds the averages that follow the stream."""
        return self.model

    def adapt(self, x: Tensor) -> Tensor:
        """Take the gradient steps; running statistics learn from the batch once."""
        with following_stream(self.stream_parts()):
            step = self.take_step(x)
        with settled_stream(self.stream_parts()):
            for _ in range(self.steps - 1):
                step = self.take_step(x)
            if self.prediction == "before":
                return step.out
            with torch.no_grad():
                return self.output(x)
