"""How a source model is trained: one frozen value, and the learning rate as a function of the step."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OBJECTIVES = ("sla", "plain", "rotation")
_CHOICES = {
    "objective": OBJECTIVES,
    "optimizer": ("sgd", "adamw"),
    "schedule": ("steps", "cosine", "onecycle"),
    "precision": ("float32", "bf16"),
}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how training goes; the defaults are TTAB's for CIFAR with the paper's objective.

    Args:
        objective: ``sla`` learns class x rotation jointly from the four turns of every image, ``plain`` the
            class alone, ``rotation`` the class and, with a second head, the rotation (a ``RotationNet``).
        epochs: Passes over the data.
        batch_size: Images per step, over all processes; SLA shows each of them four times.
        lr: Highest learning rate.
        optimizer: ``sgd`` or ``adamw``.
        momentum: Of SGD.
        nesterov: Of SGD.
        weight_decay: On all parameters.
        schedule: ``steps`` (times 0.1 at each milestone), ``cosine`` (to zero), or ``onecycle`` (torch's
            defaults: up during 30 % of the steps from lr / 25, then down to lr / 250,000).
        milestones: Epochs at which ``steps`` acts.
        padding: Zero padding of the random crop in pixels; 0 for no crop.
        flip: Whether to mirror half of the images.
        precision: ``float32`` or ``bf16`` (autocast).
        channels_last: Whether to use the channels-last memory layout.
        seed: Of the order of the images, the augmentation and dropout. Initial weights are the model's.

    Example:
        >>> Recipe(epochs=30, milestones=(20,)).learning_rate(step=25, steps_per_epoch=1)
        0.01
    """

    objective: str = "sla"
    epochs: int = 150
    batch_size: int = 128
    lr: float = 0.1
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    schedule: str = "steps"
    milestones: tuple[int, ...] = (75, 125)
    padding: int = 4
    flip: bool = True
    precision: str = "float32"
    channels_last: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("epochs", "batch_size"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("momentum", "weight_decay", "padding", "seed"):
            _require(getattr(self, name) >= 0, name, "0 or more", getattr(self, name))
        _require(0 < self.lr < math.inf, "lr", "positive and finite", self.lr)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of a step, counted from 0 over the whole training."""
        total = self.epochs * steps_per_epoch
        if self.schedule == "steps":
            passed = sum(step >= epoch * steps_per_epoch for epoch in self.milestones)
            return self.lr / float(10**passed)
        if self.schedule == "cosine":
            return _anneal(self.lr, 0.0, step / total)
        top, end = 0.3 * total - 1, total - 1
        if step <= top and top > 0:
            return _anneal(self.lr / 25, self.lr, step / top)
        return _anneal(self.lr, self.lr / 250_000, (step - top) / (end - top))

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Names and values of the fields in which a stored recipe (as a dictionary) differs from this one."""
        mine = json.loads(json.dumps(asdict(self)))
        names: Iterable[str] = {**mine, **other}
        return [
            f"{name} (stored {other.get(name)!r}, now {mine.get(name)!r})"
            for name in names
            if mine.get(name) != other.get(name)
        ]


def _require(holds: bool, name: str, wanted: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _anneal(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
