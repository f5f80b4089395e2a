"""The part of an adapter that the engine owns: checks of batches, precision, and how its steps run."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from ttvd.engine.acceleration import autocasting
from ttvd.engine.state import State, StatefulModule
from ttvd.engine.step_runner import StepRunner
from ttvd.engine.validation import check_inputs, check_logits, checks_values

Validation = Literal["auto", "always", "never"]
Capture = Literal["auto", "never"]


class StepGuard(Protocol):
    """What watches the steps of a module; :class:`~ttvd.methods.shared.guard.GuardMonitor` is the one in use."""

    sample: int

    def begin(self) -> None:
        """Begin a step."""

    def is_stepping(self) -> bool:
        """Whether a step has begun that is not settled yet."""

    def count_batch(self) -> bool:
        """Count a batch on the host; returns whether to look at it."""

    def is_open(self) -> Tensor:
        """Whether the present step counts, a scalar."""

    def look(self, x: Tensor, answers: Tensor, reference: Tensor) -> Tensor:
        """Compare the answers of the module and of its initial state; returns what must be finite."""

    def settle(self, fine: Tensor, read: Callable[[], tuple[State, State]]) -> None:
        """End a step. ``read`` returns what may change and its initial values, without what the guard owns."""


class SteppedModule(StatefulModule):
    """A module whose steps a :class:`~ttvd.engine.step_runner.StepRunner` runs; see :class:`ttvd.Adapter`."""

    reports = ("kept",)
    dynamic: ClassVar[str | None] = None
    draws: int = 1
    compiled: bool = False
    validation: Validation
    capture: Capture
    model: nn.Module
    kept: Tensor
    finite: Tensor
    guard: StepGuard | None
    _precision: torch.dtype | None = None

    def start(self, device: torch.device) -> None:
        """Set up everything that steps need, on a device."""
        self.register_buffer("kept", torch.ones((), device=device), persistent=False)
        self.register_buffer("finite", torch.ones((), dtype=torch.bool, device=device), persistent=False)
        self.validation = self.capture = "auto"
        self._seen_batch = False
        self._fits: tuple[int, ...] = ()
        self.runner = StepRunner()
        self.guard = None

    def call_model(self, x: Tensor) -> Tensor:
        """Logits of the model."""
        raise NotImplementedError

    def branch(self, x: Tensor) -> Hashable:
        """Which branch the step takes."""
        raise NotImplementedError

    def random_inputs(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The random numbers of a step."""
        raise NotImplementedError

    def adapt(self, x: Tensor, *inputs: Any, **_: Any) -> Tensor:
        """The step."""
        raise NotImplementedError

    def initial_output(self, x: Tensor) -> Tensor:
        """Logits of the initial state; changes nothing."""
        raise NotImplementedError

    def observe_source(self, logits: Tensor) -> None:
        """Called with the logits of the initial state for the images that the guard looks at, inside of a step."""

    def renew(self) -> None:
        """Become like a new adapter, for another stream: :meth:`reset`, and the first batch is checked again.

        Recorded and compiled steps stay.
        """
        self.reset()
        self.kept.fill_(1.0)
        for part in self.modules():
            if isinstance(part, SteppedModule):
                part._seen_batch = False
                part.runner.retry()

    def release(self) -> None:
        """Free the memory of recorded steps; they are recorded again when they are needed."""
        for part in self.modules():
            if isinstance(part, SteppedModule):
                part.runner.forget()

    def autocasting(self) -> AbstractContextManager[object]:
        """Compute in the precision that was asked for, else in the caller's."""
        return autocasting(self.kept.device.type, self._precision)

    @property
    def probe(self) -> Tensor:
        """A weight of the model, which shows its device and data type."""
        weights = (p for p in self.model.parameters() if p.is_floating_point())
        if (weight := next(weights, None)) is None:
            raise ValueError(f"{type(self.model).__name__} has no floating-point parameter")
        if weight.dtype != self._precision:
            return weight
        return next((p for p in weights if p.dtype != self._precision), weight)

    def validate(self, x: Tensor) -> tuple[Tensor, bool]:
        """Refuse a batch that cannot be meant.

        Returns:
            The batch, fit for autograd, and whether its values were checked.
        """
        weight = self.probe
        values = checks_values(self.validation, weight.device.type == "cpu" or not self._seen_batch)
        check_inputs(x, device=weight.device, dtype=weight.dtype, values=values)
        x = x.clone() if x.is_inference() else x
        if not self.is_known(x):  # what the model cannot take is refused before anything changes
            with torch.no_grad():
                check_logits(self._try_model(x[:2]), len(x[:2]))
            self._fits = (x.ndim, x.shape[1])
        self._seen_batch = True
        return x, values

    def is_known(self, x: Tensor) -> bool:
        """Whether the model has taken a batch with as many dimensions and channels before."""
        return isinstance(x, Tensor) and x.ndim > 1 and self._fits == (x.ndim, x.shape[1])

    def _try_model(self, x: Tensor) -> Tensor:
        try:
            return self.call_model(x)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"the model cannot take inputs of shape {tuple(x.shape[1:])}: {reason}"
            ) from error

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.kept.device

    def require_finite(self, *values: Tensor) -> None:
        """Let the present step change nothing unless these values are finite. They are looked at when it ends.

        Of logits, pass the largest: one of -inf is a class that cannot be.
        """
        self.runner.required += [value.detach() for value in values]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.runner = StepRunner()
        return self


def is_compiled(adapter: nn.Module) -> bool:
    """Whether the steps of an adapter, or of one inside of it, are compiled: asked for, and not given up."""
    parts = (part for part in adapter.modules() if isinstance(part, SteppedModule))
    return any(part.compiled and not part.runner.uncompiled for part in parts)
