"""The state of an adapter on disk."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ttvd.methods import Adapter
from ttvd.nn.fingerprint import fingerprint
from ttvd.zoo.tensorfile import read_tensors, write_tensors

STATE = "ttvd.state"
STATE_VERSION = 1


@dataclass(frozen=True)
class Place:
    """How far a run had come when its state was saved: images seen, rows written."""

    position: int = 0
    rows: int = 0


@dataclass(frozen=True)
class StateFile:
    """The state of an adapter on disk, and what it belongs to.

    Attributes:
        path: Of the file.
        model: The model as the method sees it.
        method: Name of the method.
        parameters: Those that the user gave.
        stream: What decides the batches: the images, how they are prepared, how many come together.
    """

    path: Path
    model: nn.Module
    method: str
    parameters: dict[str, Any]
    stream: dict[str, str] = field(default_factory=dict)

    def save(self, adapter: Adapter, place: Place) -> None:
        """Write the state, atomically."""
        about = self._describe() | self.stream | {"position": str(place.position), "rows": str(place.rows)}
        write_tensors(self.path, adapter.state_dict(), kind=STATE, version=STATE_VERSION, metadata=about)

    def load(self, adapter: Adapter, *, resume: bool) -> Place:
        """Continue from the state; one of another model, method or parameters is refused with the reason.

        Args:
            adapter: Gets the state.
            resume: Whether to go on with the same stream, where that run was; another one is refused. Else a new
                stream begins.
        """
        tensors, about = read_tensors(self.path, kind=STATE, version=STATE_VERSION)
        for key, value in (self._describe() | (self.stream if resume else {})).items():
            if about.get(key) != value:
                raise ValueError(
                    f"{self.path} was saved with {key} {about.get(key)}, this run has {value}; give what that run had"
                    + (", or begin a new one with --state instead of --resume" if key in self.stream else "")
                )
        adapter.load_state_dict(tensors)
        return Place(int(about.get("position", 0)), int(about.get("rows", 0))) if resume else Place()

    def _describe(self) -> dict[str, str]:
        parameters = json.dumps(self.parameters, sort_keys=True, default=repr)
        return {"method": self.method, "parameters": parameters, "model": fingerprint(self.model)}
