"""Figures of a store: the store holds their numbers, and drawing them needs no model.

Each kind of figure is drawn by one module, which has the name of the module of ``ttvd.bench.figures`` that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ttvd.bench.figures.scene import Description, unpack
from ttvd.report.document import Figure, Notice
from ttvd.report.figures.feature_plane import draw_feature_plane
from ttvd.report.figures.samples import draw_samples
from ttvd.report.figures.slices import draw_slices
from ttvd.report.style import figure_style

if TYPE_CHECKING:
    from ttvd.bench.store import Figure as StoredFigure

DRAWERS: Mapping[str, Callable[[Description, Mapping[str, Any]], list[Figure]]] = {
    "samples": draw_samples,
    "slices": draw_slices,
    "plane": draw_feature_plane,
}
"""Functions that draw a figure from facts and arrays, by its kind."""


def draw_figure(stored: StoredFigure) -> list[Figure]:
    """Draw a figure that ``ttvd.bench.figures`` computed.

    Args:
        stored: The figure as ``Store.figures`` returns it.

    Raises:
        ValueError: The figure is incomplete, or this version cannot draw its kind.
    """
    facts = dict(stored.description)
    if facts.get("kind") not in DRAWERS:
        raise ValueError(f"it is of the kind {facts.get('kind')!r}; this version draws {', '.join(DRAWERS)}")
    try:
        with figure_style():
            figures = DRAWERS[facts["kind"]](facts, unpack(stored.payload))
        origin = (
            f"Model {facts['checkpoint']} ({facts['weights']}), {facts['images']} images of {facts['data']} in "
            f"random order, batches of {facts['batch_size']}, seed {facts['seed']}."
        )
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error
    return [replace(figure, details=f"{figure.details} {origin}") for figure in figures]


def draw_figures(stored: Sequence[StoredFigure]) -> list[Figure | Notice]:
    """Draw the figures of a recipe; a figure that cannot be drawn is replaced by a notice."""
    drawn: list[Figure | Notice] = []
    for figure in stored:
        try:
            drawn.extend(draw_figure(figure))
        except (ValueError, KeyError) as error:
            drawn.append(Notice(f"The figure {figure.name} of the store cannot be drawn: {error}."))
    return drawn
