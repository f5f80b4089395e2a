"""Policies: adapters around an adapter that decide when it starts again."""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ttvd.engine.acceleration import Precision
from ttvd.methods.adapter import Adapter, Capture, State, Validation
from ttvd.methods.shared.losses import entropy


class Policy(Adapter):
    """An adapter around another one; a policy overrides :meth:`before` or :meth:`after`.

    Args:
        adapter: What it decides about.
    """

    def __init__(self, adapter: Adapter) -> None:
        nn.Module.__init__(self)
        self.adapter = adapter
        self.prediction = adapter.prediction
        self._begin()

    def before(self) -> None:
        """Called before each batch."""

    def after(self, logits: Tensor) -> None:
        """Called after each batch with what the adapter said."""

    def forward(self, x: Tensor) -> Tensor:
        """Predict and adapt, and start again where the policy says so."""
        self._remember()
        with torch.inference_mode(False):
            self.before()
            logits: Tensor = self.adapter(x)
            self.after(logits)
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """Predict without adapting."""
        return self.adapter.predict(x)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over a state; the adapter inside goes first, for it may have to make room."""
        self._remember()
        inside = {
            key.removeprefix("adapter."): state_dict[key] for key in state_dict if key.startswith("adapter.")
        }
        self.adapter.load_state_dict(inside)
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def probe(self) -> Tensor:
        """A weight of the model inside."""
        return self.adapter.probe

    @property
    def validation(self) -> Validation:
        """That of the adapter inside."""
        return self.adapter.validation

    @validation.setter
    def validation(self, value: Validation) -> None:
        self.adapter.validation = value

    @property
    def capture(self) -> Capture:
        """That of the adapter inside."""
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
        # What an adapter shows to the outside is that of the one inside.
        if name in ("kept", "model"):
            return getattr(self.adapter, name)
        return super().__getattr__(name)

    def _remember(self) -> None:
        self.adapter._remember()
        super()._remember()

    def _changing(self) -> State:
        inside = {f"adapter.{name}": tensor for name, tensor in self.adapter._changing().items()}
        return inside | dict(self.named_buffers(recurse=False))


class Episodic(Policy):
    """Starts again before every batch: each batch is adapted to by itself.

    Example:
        >>> import ttvd
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
        adapter: What starts again.
        batches: After how many.
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


class ResetOnCollapse(Policy):
    """Starts again when predictions have collapsed to few classes.

    Watched is the entropy of the mean prediction, averaged along the stream: as long as classes come in any mixture it
    stays far above that of a model which says the same to everything. A stream that really holds one class for long
    looks the same from here, so the threshold should be below what the sorted parts of the stream give.

    Args:
        adapter: What starts again.
        num_classes: Of the adapter's output, k.
        threshold: Start again below this share of ln k.
        momentum: Weight of the present batch in the running mean prediction.

    Attributes:
        resets: How often it has started again.
    """

    mean: Tensor
    resets: Tensor

    def __init__(
        self, adapter: Adapter, num_classes: int, *, threshold: float = 0.1, momentum: float = 0.1
    ) -> None:
        super().__init__(adapter)
        if num_classes < 2:
            raise ValueError(f"a collapse needs at least 2 classes, got {num_classes}")
        if not (0.0 < threshold < 1.0 and 0.0 < momentum <= 1.0):
            raise ValueError(
                f"threshold must lie in (0, 1) and momentum in (0, 1], got {threshold} and {momentum}"
            )
        self.threshold, self.momentum = threshold, momentum
        device = adapter.probe.device
        self.register_buffer("mean", torch.full((num_classes,), 1.0 / num_classes, device=device))
        self.register_buffer("resets", torch.zeros((), dtype=torch.int64))

    def after(self, logits: Tensor) -> None:
        """Follow the mean prediction, and start again when it has collapsed."""
        present = logits.softmax(1).mean(0).to(self.mean.dtype)
        self.mean.lerp_(torch.where(present.isfinite().all(), present, self.mean), self.momentum)
        if entropy(self.mean.log()) < self.threshold * math.log(len(self.mean)):
            self.adapter.reset()
            self.mean.fill_(1.0 / len(self.mean))
            self.resets += 1
