"""Slices: the plane through the sites of three classes, cut out of a space that cannot be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ttvd.bench.figures.values import Description, Floats, Mask, diagram_from_arrays
from ttvd.geometry import Diagram, grid_labels
from ttvd.report import planes
from ttvd.report.naming import find_noun, list_names, name_class, render_images
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.planes import Box, Grid
from ttvd.report.style import MUTED, class_colour, new_panel

RESOLUTION = 300
MARGIN = 0.12
DIAGRAMS = ("vd", "pd", "civd", "cipd")
STATES = {"clean": "clean", "source": "corrupted", "bn": "batch statistics", "ttvd": "TTVD"}


@dataclass(frozen=True, eq=False)
class Slice:
    """Draws on the plane through three sites.

    Attributes:
        facts: What is known of model and images.
        arrays: As ``ttvd.bench.figures.slices.cut_diagrams`` gives them.
    """

    facts: Description
    arrays: Mapping[str, Any]

    @property
    def chosen(self) -> list[int]:
        """The three classes."""
        chosen: list[int] = self.facts["chosen"]
        return chosen

    @property
    def names(self) -> list[str]:
        """Of the three classes."""
        return [self.facts["classes"][label] for label in self.chosen]

    @property
    def states(self) -> dict[str, str]:
        """Those states that were computed, and what they are called."""
        return {state: title for state, title in STATES.items() if state in self.arrays["states"]}

    @cached_property
    def sites(self) -> Diagram:
        """The three sites on the plane."""
        return Diagram(diagram_from_arrays(self.arrays["diagrams"]["vd"]).sites[self.chosen])

    def points(self, state: str) -> Floats:
        """(n, 2) features on the plane."""
        points: Floats = self.arrays["states"][state]["points"]
        return points

    def off(self, state: str) -> float:
        """Mean distance of the features from the plane."""
        return float(self.arrays["states"][state]["off"].mean())

    def box(self, *states: str) -> Box:
        """A square that holds nearly all features of these states and the three sites."""
        points = np.concatenate([self.points(state) for state in states])
        return planes.find_box(points, self.sites.sites.numpy(), margin=MARGIN)

    def grid(self, name: str, box: Box) -> Grid:
        """Classes of the plane's points by one of the diagrams."""
        diagram = diagram_from_arrays(self.arrays["diagrams"][name])
        if name != "civd":
            return planes.label_nearest(diagram, box, RESOLUTION)
        # The power distance of the slice is the squared distance in space: d^gamma is its power gamma / 2.
        return Grid(*grid_labels(diagram, box, RESOLUTION, self.facts["gamma"] / 2, shift=0.0))

    def wrong(self, state: str, name: str) -> Mask:
        """(n,) mask of the images to which a diagram gives another class than theirs, in the space of all features."""
        mask: Mask = self.arrays["states"][state][name] != np.array(self.chosen)[self.arrays["labels"]]
        return mask

    def find_favourite(self, state: str, name: str) -> str:
        """Which class a diagram gives to most of the images that it gets wrong, in brackets; nothing if none are."""
        found = self.arrays["states"][state][name][self.wrong(state, name)]
        return (
            f" (most often taken for {self.facts['classes'][np.bincount(found).argmax()]})"
            if len(found)
            else ""
        )

    def show(self, state: str, name: str, title: str, box: Box) -> Panel:
        """Cells of a diagram, features in a state, and the sites."""
        wrong, grid = self.wrong(state, name), self.grid(name, box)
        colours = [MUTED] * len(self.facts["classes"])
        for place, label in enumerate(self.chosen):
            colours[label] = class_colour(place)
        ax = planes.plot_regions(grid, new_panel(), palette=colours)
        planes.plot_contours(grid, ax, colour="white")
        others = {k: name for k, name in enumerate(self.facts["classes"]) if k not in self.chosen}
        planes.name_regions(grid, ax, names=others)
        planes.plot_points(self.points(state), self.arrays["labels"], ax, wrong=wrong)
        planes.plot_sites(self.sites, ax, names=self.names)
        ax.set_title(f"{title}: {wrong.mean():.0%} wrong")
        return Panel(
            encode(ax),
            f"Plane through the sites of {list_names(self.names)}: {name.upper()}, {STATES[state]}",
        )


def draw_slices(facts: Description, arrays: Mapping[str, Any]) -> list[Exhibit]:
    """One exhibit: four diagrams under the same features, and one diagram under features in four states."""
    view, noun = Slice(facts, arrays), find_noun(facts["classes"])
    near, far = view.box("bn"), view.box(*view.states)
    error = {name: float(view.wrong("bn", name).mean()) for name in DIAGRAMS}
    joint = {state: float(view.wrong(state, "civd").mean()) for state in view.states}
    dim, views = len(arrays["origin"]), facts["views"]
    favourite = view.find_favourite("source", "civd")
    caption = (
        f"The features have {dim} dimensions; this is the plane through the class means of {list_names(view.names)}"
        f"{'' if facts['given'] else ', which are confused most'}. Walls are cut exactly, and {noun}s of these classes "
        f"are projected on it. A: one view gets {error['vd']:.0%} (VD) or {error['pd']:.0%} (PD) of them wrong, "
        f"{views} views together {error['civd']:.0%} (CIVD) or {error['cipd']:.0%} (CIPD). B: under {facts['domain']}, "
        f"{joint['source']:.0%} are wrong without adaptation{favourite}, {joint['bn']:.0%} with statistics of the "
        f"batch, {joint['ttvd']:.0%} with steps of TTVD."
    )
    corners = view.sites.sites.numpy()
    apart = np.linalg.norm(corners - np.roll(corners, 1, axis=0), axis=1).mean()
    details = (
        f"Images: {render_images(facts)}. Upright views of {len(arrays['labels'])} {noun}s of these classes, among "
        f"others in the stream. Mistakes are judged in all dimensions, by {views} views for CIVD and CIPD, so a ring "
        f"can lie over the right cell: with batch statistics the features are {view.off('bn'):.1f} away from the plane "
        f"on average, the sites {apart:.1f} from each other. VD, PD and CIPD: the nearest site, of CIPD among the "
        f"pairs of class and rotation; CIVD: joint influence with exponent {facts['gamma']:g}. Cells on {RESOLUTION} x "
        f"{RESOLUTION} points. TTVD with learning rate {facts['lr']:g}."
    )
    strips = (
        Strip(
            [view.show("bn", name, name.upper(), near) for name in DIAGRAMS],
            4,
            "A. Four diagrams on one plane, features with batch statistics",
        ),
        Strip(
            [view.show(state, "civd", title, far) for state, title in view.states.items()],
            4,
            "B. One diagram (CIVD), and what happens to the features",
        ),
    )
    key = [
        *((class_colour(k), name_class(name)) for k, name in enumerate(view.names)),
        (MUTED, "cells of other classes"),
        ("ring", "misclassified"),
    ]
    return [Exhibit("A slice through three sites", caption, strips, key, details)]
