"""The methods that the paper's figures show, by their labels. No other file of ``ttvd.bench`` names a method.

The option ``methods`` of a ``[[figures]]`` table replaces single methods: ``methods = { ttvd = "ttvd-paper" }``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FigureMethod:
    """A method in a figure.

    Attributes:
        name: Name of the registered method.
        all_views: Whether all rotations of an image are looked at, or the upright view alone.
        params: Parameters of the method.
    """

    name: str
    all_views: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)


UNADAPTED = "source"
"""Label of the model as it is."""
STATISTICS = "bn"
"""Label of the model with batch statistics and no other adaptation."""

SAMPLES = {STATISTICS: FigureMethod("bn", all_views=True)}
SLICES = {
    UNADAPTED: FigureMethod("source", all_views=True),
    STATISTICS: FigureMethod("bn", all_views=True),
    "ttvd": FigureMethod("ttvd", all_views=True),
}
PLANE = {
    UNADAPTED: FigureMethod("source"),
    "t3a": FigureMethod("t3a"),
    STATISTICS: FigureMethod("bn"),
    "SLA + source": FigureMethod("source", all_views=True),
    "SLA + bn": FigureMethod("bn", all_views=True),
    "tent": FigureMethod("tent", params={"optimizer": "sgd"}),
    "vd": FigureMethod("vd"),
    "civd": FigureMethod("civd", all_views=True),
    "ttvd": FigureMethod("ttvd", all_views=True),
}
PLANE_MOVES = {  # learning rates larger than in use, so that the eye sees where the steps lead
    "vd": FigureMethod("vd", params={"lr": 0.1}),
    "ttvd": FigureMethod("ttvd", all_views=True, params={"lr": 0.02}),
}
