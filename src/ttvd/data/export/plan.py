"""What is to be made of a clean set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttvd.data.corruptions import CORRUPTIONS, EXTRA, corrupt, describe, frost_source
from ttvd.data.corruptions.checks import check_choice, check_severity


def read_names(text: str) -> tuple[str, ...]:
    """Read names of corruptions with commas between them; "common" and "all" stand for the 15 and the 19.

    Example:
        >>> read_names("fog, snow")
        ('fog', 'snow')
    """
    groups = {"common": CORRUPTIONS, "all": (*CORRUPTIONS, *EXTRA)}
    names = groups.get(text.strip()) or tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(
            f"corruptions must be names with one comma between them, such as fog,snow, got {text!r}: "
            "a name is empty"
        )
    return names


def read_severities(text: str) -> tuple[int, ...]:
    """Read severities with commas between them.

    Example:
        >>> read_severities("1,5")
        (1, 5)
    """
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(
            f"severities must be numbers from 1 to 5 with commas between them, got {text!r}"
        ) from None


@dataclass(frozen=True)
class Plan:
    """Which corruptions, how strong, and what their chance depends on.

    Attributes:
        corruptions: Names, in the order in which they are made.
        severities: From 1 to 5, ascending.
        seed: Seed of the random fields.
        constants: The published table.
        frost: Sheets of the frost, see `corrupt`.
        device: Where the corruptions are computed.

    Example:
        >>> Plan(("fog",), (5,)).describe()["corruptions"]["fog"][0]["severity"]
        5
    """

    corruptions: Sequence[str] = CORRUPTIONS
    severities: Sequence[int] = (1, 2, 3, 4, 5)
    seed: int = 0
    constants: Literal["cifar", "imagenet"] = "cifar"
    frost: Literal["procedural", "pictures"] = "procedural"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in self.corruptions:
            check_choice(name, (*CORRUPTIONS, *EXTRA), "corruption")
        for severity in self.severities:
            check_severity(severity)
        for what, values in (("corruptions", self.corruptions), ("severities", self.severities)):
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{what} must be distinct, at least one, got {list(values)}")
        if list(self.severities) != sorted(self.severities):
            raise ValueError(f"severities must ascend, got {list(self.severities)}")
        check_choice(self.constants, ("cifar", "imagenet"), "table of constants")
        check_choice(self.frost, ("procedural", "pictures"), "kind of frost")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"the device {self.device!r} cannot be used here: {error}") from error

    def describe(self) -> dict[str, Any]:
        """Return everything that the result depends on, for the manifest."""
        return {
            "seed": self.seed,
            "severities": list(self.severities),
            "constants": self.constants,
            "frost": frost_source(self.frost),
            "corruptions": {
                name: [describe(name, severity, self.constants) for severity in self.severities]
                for name in self.corruptions
            },
        }

    def apply(self, images: Tensor, name: str, severity: int, index: Tensor) -> npt.NDArray[np.uint8]:
        """Corrupt float images of the given numbers; return bytes (b, h, w, c)."""
        changed = corrupt(
            images.to(self.device),
            name,
            severity,
            constants=self.constants,
            seed=self.seed,
            index=index,
            frost=self.frost,
        )
        levels = changed.mul_(255).round_().to(torch.uint8)
        return levels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
