"""The state of an unfinished training on disk: weights, optimizer slots and the epochs that are done.

No random state is stored: every epoch draws from generators that are seeded by the recipe's seed and the number
of the epoch, so that the number of epochs is all there is to know.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttvd.source.config import Recipe
from ttvd.zoo.tensorfile import read_tensors, write_tensors

KIND = "ttvd.training"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Epoch:
    """What one pass over the data gave: mean loss and accuracy in training, last learning rate, seconds."""

    number: int
    loss: float
    accuracy: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class Training:
    """What is being trained, with which data and how; saved and resumed as a whole."""

    model: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    data: str

    def save(self, path: str | os.PathLike[str], epochs: list[Epoch]) -> None:
        """Write the state after the given epochs, atomically."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{index}.{name}": value for name, value in slots.items() if value is not None
            }
        metadata = {
            "recipe": json.dumps(asdict(self.recipe)),
            "data": self.data,
            "epochs": json.dumps([asdict(epoch) for epoch in epochs]),
        }
        write_tensors(path, tensors, kind=KIND, version=FORMAT_VERSION, metadata=metadata)

    def resume(self, path: str | os.PathLike[str]) -> list[Epoch]:
        """Load the state at ``path`` where there is one; returns the epochs that are done.

        Raises:
            ValueError: The state was made with another recipe, other data or another model, or is damaged.
        """
        if not Path(path).is_file():
            return []
        tensors, metadata = read_tensors(path, kind=KIND, version=FORMAT_VERSION)
        try:
            recipe, data = json.loads(metadata["recipe"]), metadata["data"]
            epochs = [Epoch(**epoch) for epoch in json.loads(metadata["epochs"])]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a valid {KIND} file: {error}") from error
        self._check(path, recipe, data)
        self._load(path, tensors)
        return epochs

    def _check(self, path: str | os.PathLike[str], recipe: dict[str, Any], data: str) -> None:
        if different := self.recipe.differences(recipe):
            raise ValueError(
                f"{path} was made with another recipe: {'; '.join(different)}. "
                "Continue with the stored recipe, or give another checkpoint path"
            )
        if data != self.data:
            raise ValueError(f"{path} was made with other data: stored {data}, now {self.data}")

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
                    # Files know nothing of layouts, and kernels that fuse want the one of the parameter.
                    found[name] = torch.empty_like(parameter, dtype=slot.dtype).copy_(slot)
