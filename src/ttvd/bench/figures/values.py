"""What figures are drawn from: arrays and facts, without a model, and how they travel as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ttvd.geometry import Diagram

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Labels: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Tree: TypeAlias = Mapping[str, "Array | Tree"]
Description: TypeAlias = dict[str, Any]
"""Facts as JSON can hold them."""

_JOINT = "/"  # in the names of a payload


def pack(tree: Tree) -> bytes:
    """Named arrays, which may lie in mappings of mappings, as safetensors bytes; the same arrays give the same bytes.

    Example:
        >>> unpack(pack({"a": {"b": np.arange(3)}}))
        {'a': {'b': array([0, 1, 2])}}
    """
    from safetensors.numpy import save

    return save(_flatten(tree))


def unpack(payload: bytes) -> dict[str, Any]:
    """What :func:`pack` was given.

    Raises:
        ValueError: The bytes are something else.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        flat = load(payload)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"not the arrays of a figure: {error}") from error
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *path, last = name.split(_JOINT)
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = array
    return tree


def _flatten(tree: Tree, prefix: str = "") -> dict[str, Array]:
    flat: dict[str, Array] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}{_JOINT}")
        else:
            flat[prefix + name] = np.ascontiguousarray(value)
    return flat


def diagram_to_arrays(diagram: Diagram) -> dict[str, Array]:
    """The parts that a diagram has."""
    parts = {"sites": diagram.sites, "weights": diagram.weights, "groups": diagram.groups}
    return {name: part.detach().cpu().numpy() for name, part in parts.items() if part is not None}


def diagram_from_arrays(arrays: Mapping[str, Array]) -> Diagram:
    """The diagram that :func:`diagram_to_arrays` was given, on the CPU."""
    return Diagram(**{name: torch.from_numpy(array) for name, array in arrays.items()})


@dataclass(frozen=True, eq=False)
class Trace:
    """What a method saw and said along a stream.

    Attributes:
        features: (v, n, d) features of the views at the moment of prediction.
        predicted: (n,) classes.
        labels: (n,) true classes.
    """

    features: Floats
    predicted: Labels
    labels: Labels

    @property
    def wrong(self) -> Mask:
        """(n,) mask of the mistakes."""
        mask: Mask = self.predicted != self.labels
        return mask

    @property
    def error(self) -> float:
        """Share of mistakes."""
        return float(self.wrong.mean())


class Move(NamedTuple):
    """Features (n, 2) of one batch before and after, and the true classes."""

    before: Floats
    after: Floats
    labels: Labels


@dataclass(frozen=True, eq=False)
class PlaneData:
    """The diagrams of a model with two features, and the runs that are drawn on them.

    Attributes:
        diagrams: ``vd``, ``pd`` (upright view), ``civd``, ``cipd`` (a site for each class and rotation), and ``t3a``
            (what its templates make of the plane at the end of the stream).
        traces: By label.
        moves: By label.
    """

    diagrams: Mapping[str, Diagram]
    traces: Mapping[str, Trace]
    moves: Mapping[str, Move]

    def to_arrays(self) -> Tree:
        """For a payload."""
        # The features of a model in float32 lose nothing by it.
        return {
            "diagrams": {name: diagram_to_arrays(diagram) for name, diagram in self.diagrams.items()},
            "traces": {
                name: {
                    "features": t.features.astype(np.float32),
                    "predicted": t.predicted,
                    "labels": t.labels,
                }
                for name, t in self.traces.items()
            },
            "moves": {name: move._asdict() for name, move in self.moves.items()},
        }

    @classmethod
    def from_arrays(cls, tree: Mapping[str, Any]) -> PlaneData:
        """What :meth:`to_arrays` gave."""
        return cls(
            {name: diagram_from_arrays(arrays) for name, arrays in tree["diagrams"].items()},
            {
                name: Trace(arrays["features"].astype(np.float64), arrays["predicted"], arrays["labels"])
                for name, arrays in tree["traces"].items()
            },
            {name: Move(**arrays) for name, arrays in tree["moves"].items()},
        )
