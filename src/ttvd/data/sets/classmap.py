"""A model's many classes and a set's fewer: the 200 classes of ImageNet-R among the 1,000 of ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassMap:
    """Which output of a model stands for each class of a set.

    Attributes:
        columns: For each class of the set, the model's output.
        outputs: Number of outputs of the model.

    Example:
        >>> classes = ClassMap.match(("n02", "n03"), ("n01", "n02", "n03"))
        >>> classes.columns
        (1, 2)
        >>> classes.restrict(torch.tensor([[5.0, 1.0, 2.0]]))
        tensor([[1., 2.]])
    """

    columns: tuple[int, ...]
    outputs: int

    @classmethod
    def match(cls, classes: Sequence[str], all_classes: Sequence[str]) -> ClassMap:
        """Find each class of a set, by its identifier, among all classes of a model in the order of its outputs.

        Args:
            classes: Of the set, such as the WordNet identifiers that name the folders of ImageNet-R.
            all_classes: Of the model: the sorted folders of ImageNet, or `read_synsets` of a file.
        """
        place = {name: column for column, name in enumerate(all_classes)}
        if len(place) != len(all_classes):
            raise ValueError("the model's classes must be distinct")
        missing = [name for name in classes if name not in place]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(classes)} classes are unknown to the model, the first is {missing[0]!r}; "
                "both sides must use the same identifiers, such as n01443537"
            )
        return cls(tuple(place[name] for name in classes), len(all_classes))

    def restrict(self, logits: Tensor) -> Tensor:
        """Keep the outputs (b, k) of the set's classes, in the order of its labels."""
        if logits.shape[-1] != self.outputs:
            raise ValueError(f"logits must have {self.outputs} columns, got {logits.shape[-1]}")
        return logits[..., torch.tensor(self.columns, device=logits.device)]

    def to_outputs(self, labels: Tensor) -> Tensor:
        """Turn labels of the set into the model's output numbers."""
        return torch.tensor(self.columns, device=labels.device)[labels]


def read_synsets(path: str | Path) -> tuple[str, ...]:
    """Read class identifiers in the order of a model's outputs from a text file or from a folder of class folders.

    Args:
        path: A file with one class on a line, of which the first word counts, as in `synset_words.txt`; or the
            folder of ImageNet's pictures, whose sorted class folders give the usual order.
    """
    path = Path(path)
    if path.is_dir():
        return tuple(
            sorted(entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != ".")
        )
    words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(word[0] for word in words if word)
