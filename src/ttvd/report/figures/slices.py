"""Slices: the plane through the sites of three classes, cut out of a space of many features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ttvd.bench.figures.scene import Description, Floats, Mask, diagram_from_arrays
from ttvd.geometry import Diagram, grid_labels
from ttvd.report.document import Figure, Panel, PanelRow
from ttvd.report.figures import planar
from ttvd.report.figures.captions import describe_images, image_noun, list_names, name_class
from ttvd.report.figures.planar import Box, Grid
from ttvd.report.style import MUTED, class_colour, new_panel, to_svg

RESOLUTION = 300
MARGIN = 0.12
# The cells drawn for "cipd" are those of the power diagram of all sites; the mistakes are those of CIPD.
DIAGRAMS = {"vd": "VD", "pd": "PD", "civd": "CIVD", "cipd": "PD of all sites"}
STATES = {"clean": "clean", "source": "corrupted", "bn": "batch statistics", "ttvd": "TTVD"}


def draw_slices(facts: Description, arrays: Mapping[str, Any]) -> list[Figure]:
    """Draw one figure: four diagrams under the same features, and one diagram under features in four states.

    Args:
        facts: What is known of model and images.
        arrays: Diagrams and features as ``ttvd.bench.figures.slices.cut_diagrams`` returns them.
    """
    view, noun = Slice(facts, arrays), image_noun(facts["classes"])
    near, far = view.box("bn"), view.box(*view.states)
    error = {name: float(view.wrong("bn", name).mean()) for name in DIAGRAMS}
    joint = {state: float(view.wrong(state, "civd").mean()) for state in view.states}
    views = facts["views"]
    caption = (
        f"The features have {len(arrays['origin'])} dimensions; this is the plane through the class means of "
        f"{list_names(view.names)}{'' if facts['given'] else ', which are confused most'}. Walls are cut exactly, and "
        f"{noun}s of these classes are projected onto it. A: one view gets {error['vd']:.0%} (VD) or {error['pd']:.0%} "
        f"(PD) of them wrong, {views} views together {error['civd']:.0%} (CIVD) or {error['cipd']:.0%} (CIPD). B: "
        f"under {facts['domain']}, {joint['source']:.0%} are wrong without adaptation"
        f"{view.describe_confusion('source', 'civd')}, {joint['bn']:.0%} with statistics of the batch, "
        f"{joint['ttvd']:.0%} with steps of TTVD."
    )
    rate = "its default learning rate" if facts["lr"] is None else f"learning rate {facts['lr']:g}"
    corners = view.sites.sites.numpy()
    apart = np.linalg.norm(corners - np.roll(corners, 1, axis=0), axis=1).mean()
    details = (
        f"Images: {describe_images(facts)}. Upright views of {len(arrays['labels'])} {noun}s of these classes, among "
        f"others in the stream. Mistakes are counted in all dimensions, by {views} views for CIVD and CIPD, so a ring "
        f"can lie over the right cell: with batch statistics the features are {view.off_plane('bn'):.1f} away from the "
        f"plane on average, the sites {apart:.1f} from each other. VD, PD and PD of all sites: the nearest site, of "
        f"the last among the pairs of class and rotation; its panel counts the mistakes of CIPD, whose cells are not "
        f"drawn. CIVD: joint influence with exponent {facts['gamma']:g}. Cells on {RESOLUTION} x {RESOLUTION} points. "
        f"TTVD with {rate}."
    )
    rows = (
        PanelRow(
            [view.show("bn", name, title, near) for name, title in DIAGRAMS.items()],
            4,
            "A. Four diagrams on one plane, features with batch statistics",
        ),
        PanelRow(
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
    return [Figure("A slice through three sites", caption, rows, key, details)]


@dataclass(frozen=True, eq=False)
class Slice:
    """The plane through three sites.

    Attributes:
        facts: What is known of model and images.
        arrays: Diagrams and features as ``ttvd.bench.figures.slices.cut_diagrams`` returns them.
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
        """Names of the three classes."""
        return [self.facts["classes"][label] for label in self.chosen]

    @property
    def states(self) -> dict[str, str]:
        """The states that were computed, and their titles."""
        return {state: title for state, title in STATES.items() if state in self.arrays["states"]}

    @cached_property
    def sites(self) -> Diagram:
        """The three sites on the plane."""
        return Diagram(diagram_from_arrays(self.arrays["diagrams"]["vd"]).sites[self.chosen])

    def points(self, state: str) -> Floats:
        """Return the features (n, 2) on the plane."""
        points: Floats = self.arrays["states"][state]["points"]
        return points

    def off_plane(self, state: str) -> float:
        """Return the mean distance of the features from the plane."""
        return float(self.arrays["states"][state]["off"].mean())

    def box(self, *states: str) -> Box:
        """Return a square with nearly all features of some states and the three sites."""
        points = np.concatenate([self.points(state) for state in states])
        return planar.find_box(points, self.sites.sites.numpy(), margin=MARGIN)

    def grid(self, name: str, box: Box) -> Grid:
        """Return the classes of the plane's points by a diagram."""
        diagram = diagram_from_arrays(self.arrays["diagrams"][name])
        if name != "civd":
            return planar.label_nearest(diagram, box, RESOLUTION)
        # The power distance of the slice is the squared distance in space: d^gamma is its power gamma / 2.
        return Grid(*grid_labels(diagram, box, RESOLUTION, self.facts["gamma"] / 2, shift=0.0))

    def wrong(self, state: str, name: str) -> Mask:
        """Return a mask (n,) of the images that a diagram misclassifies in the space of all features."""
        mask: Mask = self.arrays["states"][state][name] != np.array(self.chosen)[self.arrays["labels"]]
        return mask

    def describe_confusion(self, state: str, name: str) -> str:
        """Say in brackets which class a diagram gives to most of the misclassified images; empty if none are."""
        found = self.arrays["states"][state][name][self.wrong(state, name)]
        if not len(found):
            return ""
        return f" (most often taken for {self.facts['classes'][np.bincount(found).argmax()]})"

    def show(self, state: str, name: str, title: str, box: Box) -> Panel:
        """Draw the cells of a diagram, features in a state, and the sites."""
        wrong, grid = self.wrong(state, name), self.grid(name, box)
        colours = [MUTED] * len(self.facts["classes"])
        for place, label in enumerate(self.chosen):
            colours[label] = class_colour(place)
        ax = planar.plot_regions(grid, new_panel(), palette=colours)
        planar.plot_contours(grid, ax, colour="white")
        others = {k: name for k, name in enumerate(self.facts["classes"]) if k not in self.chosen}
        planar.name_regions(grid, ax, names=others)
        planar.plot_points(self.points(state), self.arrays["labels"], ax, wrong=wrong)
        planar.plot_sites(self.sites, ax, names=self.names)
        ax.set_title(f"{title}: {wrong.mean():.0%} wrong")
        text = f"Plane through the sites of {list_names(self.names)}: {DIAGRAMS[name]}, {STATES[state]}"
        return Panel(to_svg(ax), text)
