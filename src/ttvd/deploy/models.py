"""Models and states by name: from the zoo, from a checkpoint, or from the user's own code."""

import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ttvd.adapters import Adapter, Method
from ttvd.models.fingerprint import fingerprint
from ttvd.models.sites import Sites
from ttvd.models.split import split
from ttvd.models.tensorfile import read_tensors, write_tensors
from ttvd.models.views import AggregatedViews
from ttvd.models.zoo import Source, load

STATE = "ttvd.state"
STATE_VERSION = 1


def find_source(model: str, weights: Path | None, sites: Path | None) -> Source:
    """Load a model and its sites.

    Args:
        model: A name from the zoo, a checkpoint of this library (``.safetensors`` with its card beside it), or
            ``package.module:function``, a function without arguments that returns the model.
        weights: Safetensors weights for the last form.
        sites: File of the sites; those of the zoo entry unless given.
    """
    if ":" in model and not Path(model).exists():
        source = Source(_build(model, weights))
    elif weights is not None:
        raise ValueError("weights go with package.module:function; a checkpoint or a name has its own")
    elif model.endswith(".safetensors"):
        path = Path(model)
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint at {path}")
        source = load(path.stem, path.parent)
    else:
        source = load(model)
    if sites is None:
        return source
    found = Sites.load(sites)
    found.check(source.model)
    return Source(source.model, found, source.card)


def fit_to_method(source: Source, method: Method, views: int) -> nn.Module:
    """The model as a method must see it.

    A label-augmented head (k classes x v rotations) is what methods with sites expect; all others get a k-way
    classifier, of the upright view alone or of several views aggregated.

    Args:
        source: The model and its card.
        method: Which is going to use it.
        views: How many views to aggregate for a method that knows nothing of views.
    """
    head_views = _count_head_views(source)
    if "sites" in method.needs or head_views == 1:
        if views > 1:
            raise ValueError(f"{method.name} on this model takes no views; leave --views out")
        return source.model
    if views == 1:
        return split(source.model).upright(head_views)
    return AggregatedViews(source.model, views, head_views)


def _count_head_views(source: Source) -> int:
    """Rotations that the head tells apart: as the card says, else as the sites tell."""
    if source.card is not None:
        return source.card.head_views
    if source.sites is None:
        return 1
    return split(source.model).linear.out_features // source.sites.num_classes


def _build(spec: str, weights: Path | None) -> nn.Module:
    module, _, function = spec.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot find {function!r} in {module!r}: {error}") from error
    model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{spec} must return an nn.Module, got {type(model).__name__}")
    if weights is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            model.load_state_dict(load_file(weights))
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{weights} does not fit {spec}: {error}") from error
    return model.eval()


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
