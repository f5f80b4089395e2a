"""The state of an adapter on disk."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ttvd.adapters import Adapter
from ttvd.models.fingerprint import fingerprint
from ttvd.models.tensorfile import read_tensors, write_tensors

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
    """

    path: Path
    model: nn.Module
    method: str
    parameters: dict[str, Any]

    def save(self, adapter: Adapter, place: Place) -> None:
        """Write the state, atomically."""
        about = self._describe() | {"position": str(place.position), "rows": str(place.rows)}
        write_tensors(self.path, adapter.state_dict(), kind=STATE, version=STATE_VERSION, metadata=about)

    def load(self, adapter: Adapter) -> Place:
        """Continue from the state; one of another model, method or parameters is refused with the reason."""
        tensors, about = read_tensors(self.path, kind=STATE, version=STATE_VERSION)
        for key, value in self._describe().items():
            if about.get(key) != value:
                raise ValueError(f"{self.path} was saved with {key} {about.get(key)}, this run has {value}")
        adapter.load_state_dict(tensors)
        return Place(int(about.get("position", 0)), int(about.get("rows", 0)))

    def _describe(self) -> dict[str, str]:
        parameters = json.dumps(self.parameters, sort_keys=True, default=repr)
        return {"method": self.method, "parameters": parameters, "model": fingerprint(self.model)}
