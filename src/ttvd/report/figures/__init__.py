"""From the figures of a store to exhibits: what is stored is numbers, and no model is needed to draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ttvd.bench.figures.values import Description, unpack
from ttvd.report.page import Exhibit
from ttvd.report.plane_exhibits import draw_plane
from ttvd.report.sample_exhibits import draw_samples
from ttvd.report.slice_exhibits import draw_slices
from ttvd.report.style import house_style

if TYPE_CHECKING:
    from ttvd.bench.store import Figure

DRAWERS: Mapping[str, Callable[[Description, Mapping[str, Any]], list[Exhibit]]] = {
    "samples": draw_samples,
    "slices": draw_slices,
    "plane": draw_plane,
}
"""By kind: from facts and arrays to what a page shows."""


def draw_figure(figure: Figure) -> list[Exhibit]:
    """Draw what ``ttvd.bench.figures`` computed.

    Args:
        figure: As ``Store.figures`` gives it.

    Raises:
        ValueError: It is of a kind that this version cannot draw, or incomplete.
    """
    facts = dict(figure.description)
    if facts.get("kind") not in DRAWERS:
        raise ValueError(f"it is of the kind {facts.get('kind')!r}; this version draws {', '.join(DRAWERS)}")
    try:
        with house_style():
            exhibits = DRAWERS[facts["kind"]](facts, unpack(figure.payload))
        return [
            replace(exhibit, details=f"{exhibit.details} {_render_origin(facts)}") for exhibit in exhibits
        ]
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from error


def _render_origin(facts: Description) -> str:
    return (
        f"Model {facts['checkpoint']} ({facts['weights']}), {facts['images']} images of {facts['data']} in random "
        f"order, batches of {facts['batch_size']}, seed {facts['seed']}."
    )
