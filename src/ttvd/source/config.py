"""Training configuration of a source model, and the state of an unfinished training on disk."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttvd.zoo.tensorfile import read_tensors, write_tensors

KIND = "ttvd.training"
FORMAT_VERSION = 2
_REMEDY = "delete it and start the training again"

_CHOICES = {
    "objective": ("sla", "plain", "rotation"),
    "optimizer": ("sgd", "adamw"),
    "schedule": ("steps", "cosine", "onecycle"),
    "precision": ("float32", "bf16"),
}


@dataclass(frozen=True)
class TrainingConfig:
    """All settings of a training. The defaults are TTAB's settings for CIFAR with the paper's objective.

    Args:
        objective: ``sla`` learns the joint label of class and rotation from four rotations of every image, ``plain``
            the class alone, ``rotation`` the class and, with a second head, the rotation (a ``RotationNet``).
        epochs: Number of passes over the data.
        batch_size: Images per step, over all processes; SLA forwards each of them four times.
        lr: Highest learning rate.
        optimizer: ``sgd`` or ``adamw``.
        momentum: Momentum of SGD.
        nesterov: Whether SGD uses Nesterov momentum.
        weight_decay: Weight decay of all parameters.
        schedule: ``steps`` (times 0.1 at each milestone), ``cosine`` (to zero), or ``onecycle`` (torch's
            defaults: up during 30 % of the steps from lr / 25, then down to lr / 250,000).
        milestones: Epochs at which ``steps`` reduces the learning rate.
        padding: Zero padding of the random crop in pixels; 0 for no crop.
        flip: Whether to mirror half of the images.
        precision: ``float32`` or ``bf16`` (autocast).
        channels_last: Whether to use the channels-last memory layout.
        seed: Seed of the order of the images, the augmentation and dropout. It does not affect the initial weights.

    Example:
        >>> TrainingConfig(epochs=30, milestones=(20,)).learning_rate(step=25, steps_per_epoch=1)
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
        """Return the learning rate of a step, counted from 0 over the whole training."""
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
        """Describe the fields in which a stored configuration (a dictionary) differs from this one."""
        mine = json.loads(json.dumps(asdict(self)))
        return [
            f"{name} (stored {other.get(name)!r}, now {mine.get(name)!r})"
            for name in {**mine, **other}
            if mine.get(name) != other.get(name)
        ]


def _require(holds: bool, name: str, wanted: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _anneal(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Epoch:
    """Result of one pass over the data.

    Attributes:
        number: Number of the epoch, counted from 0.
        loss: Mean training loss.
        accuracy: Mean training accuracy.
        lr: Learning rate of the last step.
        seconds: Duration.
    """

    number: int
    loss: float
    accuracy: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class TrainingState:
    """A model with its optimizer, configuration and data, saved and resumed as a whole.

    No random state is stored: every epoch draws from generators that are seeded with the seed of the configuration
    and the number of the epoch. The number of finished epochs is enough to continue.

    Attributes:
        model: The model in training.
        optimizer: Its optimizer.
        config: The settings of the training.
        data: Description of the data, by which a state of other data is recognised.
    """

    model: nn.Module
    optimizer: Optimizer
    config: TrainingConfig
    data: str

    def save(self, path: str | os.PathLike[str], epochs: list[Epoch]) -> None:
        """Write the state after the given epochs atomically."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{index}.{name}": value for name, value in slots.items() if value is not None
            }
        metadata = {
            "config": json.dumps(asdict(self.config)),
            "data": self.data,
            "epochs": json.dumps([asdict(epoch) for epoch in epochs]),
        }
        write_tensors(path, tensors, kind=KIND, version=FORMAT_VERSION, metadata=metadata)

    def resume(self, path: str | os.PathLike[str]) -> list[Epoch]:
        """Load the state at ``path``, if the file exists, and return the finished epochs.

        Raises:
            ValueError: The state was made with another configuration, other data or another model, or is damaged.
        """
        if not Path(path).is_file():
            return []
        tensors, metadata = read_tensors(path, kind=KIND, version=FORMAT_VERSION, remedy=_REMEDY)
        try:
            config, data = json.loads(metadata["config"]), metadata["data"]
            epochs = [Epoch(**epoch) for epoch in json.loads(metadata["epochs"])]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a valid {KIND} file: {error}") from error
        if different := self.config.differences(config):
            raise ValueError(
                f"{path} was made with another configuration: {'; '.join(different)}. "
                "Continue with the stored configuration, or give another checkpoint path"
            )
        if data != self.data:
            raise ValueError(f"{path} was made with other data: stored {data}, now {self.data}")
        self._load(path, tensors)
        return epochs

    def _load(self, path: str | os.PathLike[str], tensors: dict[str, Tensor]) -> None:
        slots: dict[int, dict[str, Tensor]] = {}
        weights: dict[str, Tensor] = {}
        for name, value in tensors.items():
            owner, _, rest = name.partition(".")
            if owner == "model":
                weights[rest] = value
            else:
                index, _, slot = rest.partition(".")
                slots.setdefault(int(index), {})[slot] = value
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{path} was made with another model: {error}") from error
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": slots, "param_groups": groups})
        for parameter, found in self.optimizer.state.items():
            for name, slot in found.items():
                if isinstance(slot, Tensor) and slot.shape == parameter.shape:
                    # Files store no memory layout, and fused kernels require the layout of the parameter.
                    found[name] = torch.empty_like(parameter, dtype=slot.dtype).copy_(slot)
