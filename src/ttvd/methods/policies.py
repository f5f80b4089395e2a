"""Policies: adapters around another adapter that decide when it starts again."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from ttvd.engine.acceleration import Precision, keeping_modes
from ttvd.engine.module import Capture, StepGuard, Validation
from ttvd.engine.state import State, StatefulModule
from ttvd.engine.step_runner import StepRunner, can_wait, undo_unless_finite
from ttvd.engine.transaction import Place, Transaction
from ttvd.methods.adapter import Adapter
from ttvd.methods.shared.guard import Guard


class Policy(Adapter):
    """An adapter around another one; a policy overrides :meth:`before` or :meth:`after`.

    Args:
        adapter: The adapter that is reset.
    """

    def __init__(self, adapter: Adapter) -> None:
        StatefulModule.__init__(self)
        self.adapter = adapter
        self.lock = adapter.lock  # both change together
        self.prediction = adapter.prediction
        self.runner = StepRunner()

    def before(self) -> None:
        """Called before each batch."""

    def after(self, logits: Tensor) -> None:
        """Called after each batch with the logits of the adapter."""

    @keeping_modes
    def forward(self, x: Tensor) -> Tensor:
        """Predict and adapt, and reset the adapter where the policy asks for it."""

        def step(transaction: Transaction) -> Tensor:
            logits = self.advance(x, transaction)
            undo_unless_finite(self, transaction, wait=can_wait(self))
            return logits

        with torch.inference_mode(False):
            self.keep_initial()
            return self.lock.step(self, lambda *_: None, step)

    def advance(self, x: Tensor, transaction: Transaction) -> Tensor:
        """Run a step as a part of a transaction."""
        self.before()
        logits = self.adapter.advance(x, transaction)
        self.after(logits)
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """Predict without adapting."""
        return self.adapter.predict(x)

    def fit_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let the adapter inside make room."""
        start = "adapter."
        inside = {key.removeprefix(start): state[key] for key in state if key.startswith(start)}
        outside = {key: state[key] for key in state if not key.startswith(start)}
        return outside | {start + key: value for key, value in self.adapter.fit_state(inside).items()}

    @property
    def device(self) -> torch.device:
        """The device of the adapter inside."""
        return self.adapter.device

    @property
    def probe(self) -> Tensor:
        """A weight of the model inside."""
        return self.adapter.probe

    @property
    def guard(self) -> StepGuard | None:  # type: ignore[override]
        """The guard of the adapter inside."""
        return self.adapter.guard

    def put_guard(self, guard: Guard | bool | None) -> None:
        """Give the adapter inside a guard; by default it keeps the one that it has."""
        if guard is not None:
            self.adapter.put_guard(guard)

    @property
    def validation(self) -> Validation:
        """The setting of the adapter inside."""
        return self.adapter.validation

    @validation.setter
    def validation(self, value: Validation) -> None:
        self.adapter.validation = value

    @property
    def capture(self) -> Capture:
        """The setting of the adapter inside."""
        return self.adapter.capture

    @capture.setter
    def capture(self, value: Capture) -> None:
        self.adapter.capture = value

    def accelerate(
        self, *, precision: Precision = "float32", channels_last: bool = False, compile: bool = False
    ) -> Self:
        """Make the adapter inside faster."""
        self.adapter.accelerate(precision=precision, channels_last=channels_last, compile=compile)
        return self

    def __getattr__(self, name: str) -> Any:
        # Attributes that users read are those of the adapter inside.
        if name in ("kept", "finite", "model"):
            return getattr(self.adapter, name)
        return super().__getattr__(name)

    def keep_initial(self) -> None:
        """Copy the initial state, also that of the adapter inside."""
        self.adapter.keep_initial()
        super().keep_initial()

    def unguarded(self) -> tuple[State, State]:
        """The state of the adapter inside, without that of its guard, and its initial values; not copies."""
        return self.adapter.unguarded()

    def find_places(self) -> list[Place]:
        """Those of the adapter inside, and those of the policy."""
        inside = [place._replace(name=f"adapter.{place.name}") for place in self.adapter.find_places()]
        return inside + [place for place in super().find_places() if "." not in place.name]


class Episodic(Policy):
    """Starts again before every batch: the adapter sees each batch as if it were the first.

    Example:
        >>> import ttvd
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> adapter, x = Episodic(ttvd.create("tent", net, prediction="after")), torch.rand(8, 1, 2, 2)
        >>> torch.equal(adapter(x), adapter(x))
        True
    """

    def before(self) -> None:
        """Forget the last batch."""
        self.adapter.reset()


class ResetEvery(Policy):
    """Starts again after a number of batches (Press et al., NeurIPS 2023: hard to beat on long streams).

    Args:
        adapter: The adapter that is reset.
        batches: Batches between two resets.
    """

    count: Tensor

    def __init__(self, adapter: Adapter, batches: int) -> None:
        super().__init__(adapter)
        if batches < 1:
            raise ValueError(f"batches must be at least 1, got {batches}")
        self.batches = batches
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def before(self) -> None:
        """Count, and start again when the time has come."""
        if int(self.count) == self.batches:
            self.adapter.reset()
            self.count.zero_()
        self.count += 1
