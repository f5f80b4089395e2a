"""Adapters that take gradient steps: the step and its options are written once, here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ttvd.engine.compiling import fusible as fusible
from ttvd.engine.optimizers import build_optimizer as build_optimizer
from ttvd.methods.adapter import Adapter, Timing
from ttvd.methods.shared.guard import Guard
from ttvd.methods.shared.losses import differentiate
from ttvd.nn.anchors import Anchors
from ttvd.nn.norms import Statistics, Which, following_stream, freeze_layers, settled_stream

_HALF = (
    "weights in half precision cannot follow small steps: keep the model in float32 and call the adapter inside "
    "torch.autocast"
)


class StepOptions(TypedDict, total=False):
    """Options that gradient methods share; :class:`GradientAdapter` explains them."""

    lr: float
    optimizer: str
    momentum: float
    steps: int
    statistics: Statistics | None
    prediction: Timing
    guard: Guard | bool | None  # the base of all adapters takes it


class Step(NamedTuple):
    """What a gradient method makes of a batch.

    Attributes:
        out: Logits (b, k) of the forward pass that the loss was computed from.
        loss: The loss, a scalar.
        kept: Share of the batch that the loss uses, a scalar. At 0 the step leaves parameters and optimizer alone.
        gradients: Gradients of the parameters that adapt, for a method that does not follow those of the loss.
    """

    out: Tensor
    loss: Tensor
    kept: Tensor
    gradients: Sequence[Tensor | None] | None = None


def _check_gradients(gradients: Sequence[Tensor | None]) -> None:
    if gradients and all(gradient is None for gradient in gradients):
        raise ValueError(
            "no parameter that adapts has an effect on the loss: the forward pass of the model does not use its own "
            "layers. An attribute such as a lambda may refer to the original model, whose copy adapts; make it a method"
        )


class GradientAdapter(Adapter):
    """Base class of the methods that take gradient steps. A method writes :meth:`loss` and, if need be, :meth:`output`.

    If a loss or a gradient is not finite, the step changes nothing.

    Args:
        model: The classifier; it stays as it is.
        nesterov: Whether SGD uses Nesterov momentum.
        parameters: Which parameters adapt: ``"norm"``, ``"features"`` or ``"all"``.
        skip: Layers that do not adapt, by prefixes of their names (:func:`~ttvd.nn.norms.freeze_layers`).
        anchors: The anchors of the norms, for anchored statistics.
        lr: Learning rate.
        optimizer: ``"sgd"`` or ``"adam"``.
        momentum: Momentum of SGD, first beta of Adam.
        steps: Gradient steps for each batch.
        statistics: Where batch norms take their statistics from; the batch by default.
        prediction: ``"before"`` returns the logits of the last forward pass before the last update, ``"after"``
            those of a new forward pass after it.

    Attributes:
        defaults: The options of :class:`StepOptions` that users of the method may set, with their defaults.
    """

    guard_period: ClassVar[int] = 20
    defaults: ClassVar[StepOptions] = {
        "lr": 1e-3,
        "optimizer": "sgd",
        "momentum": 0.9,
        "steps": 1,
        "statistics": None,
        "prediction": "before",
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        nesterov: bool = True,
        parameters: Which = "norm",
        skip: Sequence[str] = (),
        anchors: Anchors | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        self.check_options(options)
        chosen: StepOptions = {**GradientAdapter.defaults, **self.defaults, **options}
        statistics, steps = chosen["statistics"] or Statistics.batch(), chosen["steps"]
        super().__init__(model, statistics=statistics, parameters=parameters, anchors=anchors)
        freeze_layers(self.model, skip)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if chosen["prediction"] not in ("before", "after"):
            raise ValueError(f"prediction must be 'before' or 'after', got {chosen['prediction']!r}")
        if any(p.dtype.itemsize < 4 for p in self.adapting()):
            raise ValueError(_HALF)
        self.steps = self.draws = steps
        self.prediction = chosen["prediction"]
        self.optimizer = build_optimizer(
            chosen["optimizer"], self.adapting(), chosen["lr"], chosen["momentum"], nesterov=nesterov
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.adapting() and fn(torch.zeros(1, device=self.device)).dtype.itemsize < 4:
            raise ValueError(_HALF)
        return super()._apply(fn, recurse)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that the method does not have."""
        if unknown := sorted(options.keys() - cls.defaults.keys()):
            raise TypeError(
                f"{cls.__name__} has no option {unknown[0]!r}; it takes {', '.join(cls.defaults)}"
            )

    def adapting(self) -> list[nn.Parameter]:
        """The parameters that adapt."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def loss(self, x: Tensor, *random: Any, **_: Any) -> Step:
        """Predict a batch and compute what to minimise.

        Args:
            x: The batch.
            *random: What :meth:`random_inputs` has drawn for this gradient step.
        """
        raise NotImplementedError

    def after_step(self, step: Step) -> None:
        """Called after each gradient step."""

    def stream_parts(self) -> nn.Module:
        """The module that holds the averages which follow the stream."""
        return self.model

    def adapt(self, x: Tensor, *random: Any, **_: Any) -> Tensor:
        """Take the gradient steps; running statistics learn from the batch once."""
        parameters, parts = self.adapting(), self.stream_parts()
        share = len(random) // self.steps
        for i in range(self.steps):
            with following_stream(parts) if i == 0 else settled_stream(parts):
                with torch.enable_grad():
                    step = self.loss(x, *random[i * share : (i + 1) * share])
                    gradients = step.gradients
                    if gradients is None:
                        gradients = differentiate(step.loss, parameters)
                        _check_gradients(gradients)
                self.require_finite(step.loss, self.optimizer.step(parameters, gradients, step.kept))
                self.kept.copy_(step.kept.detach())
                self.after_step(step)
        if self.prediction == "before":
            return step.out
        with torch.no_grad(), settled_stream(parts):
            return self.output(x)
