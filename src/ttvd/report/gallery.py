"""Figures whose data lie in the store: drawn where this version knows how, named where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ttvd.report.document import Notice

if TYPE_CHECKING:
    from ttvd.bench.store import Figure
    from ttvd.report.page import Exhibit


def draw_gallery(figures: Sequence[Figure]) -> list[Exhibit | Notice]:
    """Draw what a store holds for a recipe; a figure that cannot be drawn is not passed over in silence.

    Args:
        figures: As ``Store.figures`` gives them.
    """
    drawn: list[Exhibit | Notice] = []
    for figure in figures:
        from ttvd.report.figures import draw_figure

        try:
            drawn.extend(draw_figure(figure))
        except (ValueError, KeyError) as error:
            drawn.append(Notice(f"The figure {figure.name} of the store cannot be drawn: {error}."))
    return drawn
