"""The paper's sample analysis: images, their distances to all sites in each rotation, and the joint influence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ttvd.bench.figures.scene import Array, Description, Floats, Labels
from ttvd.report.document import Figure, Panel, PanelRow
from ttvd.report.figures.captions import image_noun, list_names
from ttvd.report.style import MUTED, RIGHT, WRONG, new_panel, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (2.7, 4.1)
"""Size of a panel in inches."""

MOST_NAMES = 20
"""Number of classes up to which each has its name below its bar."""

KEY = ((RIGHT, "true class"), (WRONG, "predicted class, where it is wrong"), (MUTED, "other classes"))


def draw_samples(facts: Description, arrays: Mapping[str, Any]) -> list[Figure]:
    """Draw one figure with a row of pictures for each image.

    Args:
        facts: What is known of model and images.
        arrays: ``images``, ``distances``, ``influence`` and ``truth``, with a row for each image.
    """
    names, noun = facts["classes"], image_noun(facts["classes"])
    count, views = arrays["distances"].shape[:2]
    columns = {name: arrays[name] for name in ("images", "distances", "influence", "truth")}
    samples = [
        Sample(**{name: column[row] for name, column in columns.items()}, names=names) for row in range(count)
    ]
    details = (
        f"Influence: sum of distance^({facts['gamma']:g}) over the views. Features with batch statistics, no other "
        f"adaptation. Of {facts['seen']} {noun}s, {views} views together correct {facts['found']} mistakes of the "
        f"upright view and make {facts['spoilt']} new ones. Shown: at most one {noun} of each class, those that are "
        "corrected by the largest margin (the smaller one of wrong before and right after)."
    )
    caption = (
        f"Under {facts['domain']}: the distances from each rotation of one {noun} to all class means of that rotation, "
        "and their joint influence."
    )
    if not samples:
        caption = f"Under {facts['domain']}, {views} views together correct no mistake of the upright view."
    elif count == 1:
        caption += f" {samples[0].describe()}"
    headings = [f"{row}. {sample.describe()}" if count > 1 else "" for row, sample in enumerate(samples, 1)]
    rows = [
        PanelRow([*map(sample.show_view, range(views)), sample.show_influence()], views + 1, heading)
        for sample, heading in zip(samples, headings, strict=True)
    ]
    title = f"Mistakes that {views} views correct (the paper's sample analysis)"
    return [Figure(title, caption, rows, KEY if samples else (), details)]


@dataclass(frozen=True, eq=False)
class Sample:
    """One image.

    Attributes:
        images: Bytes (v, c, h, w) of the rotations.
        distances: Distances (v, k) from each view to the sites of its own rotation.
        influence: Influences (k,) of the cluster-induced Voronoi diagram.
        truth: True class.
        names: Names of the classes.
    """

    images: Array
    distances: Floats
    influence: Floats
    truth: int
    names: Sequence[str]

    @property
    def nearest(self) -> Labels:
        """Class (v,) of the nearest site for each rotation."""
        nearest: Labels = self.distances.argmin(1)
        return nearest

    @property
    def joint(self) -> int:
        """Class of the largest influence."""
        return int(self.influence.argmax())

    def angle(self, view: int) -> str:
        """Return the angle of a view."""
        return f"{view * 360 // len(self.nearest)}°"

    def describe(self) -> str:
        """Describe the predictions of the views and of all views together."""
        right = [self.angle(view) for view, found in enumerate(self.nearest) if found == self.truth]
        rotated = (
            f"rotated by {list_names(right)} nearest to its own"
            if right
            else "no rotation nearest to its own"
        )
        return (
            f"The true class is {self.names[self.truth]}. Upright, it lies nearest to the class mean of "
            f"{self.names[self.nearest[0]]}; {rotated}, and the joint influence is largest for "
            f"{self.names[self.joint]}."
        )

    def show_view(self, view: int) -> Panel:
        """Draw a rotation of the image above its distances."""
        from matplotlib.figure import Figure as Canvas

        figure = Canvas(figsize=SIZE, layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=[1.0, 1.15])
        chosen = int(self.nearest[view])
        plot_image(self.images[view].transpose(1, 2, 0) / 255, above)
        above.set_title(f"{self.angle(view)} → {self.names[chosen]}")
        label = "distance (smallest wins)"
        plot_bars(self.distances[view], below, truth=self.truth, chosen=chosen, names=self.names, label=label)
        below.set_ylim(0, 1.05 * self.distances.max())
        text = f"The image rotated by {self.angle(view)}; nearest class mean: {self.names[chosen]}"
        return Panel(to_svg(figure), text)

    def show_influence(self) -> Panel:
        """Draw the joint influence of each class."""
        ax, label = new_panel(SIZE), "influence (largest wins)"
        plot_bars(self.influence, ax, truth=self.truth, chosen=self.joint, names=self.names, label=label)
        name = self.names[self.joint]
        ax.set_title(f"CIVD → {name}")
        return Panel(to_svg(ax), f"Joint influence of each class; the largest is {name}")


def plot_image(pixels: Floats, ax: Axes) -> Axes:
    """Show an image in [0, 1] without ticks: grey (h, w) or (h, w, 1), or coloured (h, w, 3)."""
    if pixels.shape[2:] == (1,):
        pixels = pixels[:, :, 0]
    ax.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


def plot_bars(values: Floats, ax: Axes, *, truth: int, chosen: int, names: Sequence[str], label: str) -> Axes:
    """Draw a bar for each class: green for the true class, red for the predicted class if it is another.

    Args:
        values: Distances or influences (k,).
        ax: Axes to draw on.
        truth: True class.
        chosen: Predicted class.
        names: Names of the classes.
        label: Name of the values.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> names = ["cat", "dog"]
        >>> len(plot_bars(np.array([1.0, 2.0]), ax, truth=0, chosen=1, names=names, label="distance").patches)
        2
    """
    places = np.arange(len(values))
    colours = [MUTED] * len(values)
    colours[chosen] = WRONG
    colours[truth] = RIGHT
    ax.bar(places, values, color=colours, width=0.72)
    if len(values) > MOST_NAMES:  # too thin to be seen: the two that matter are drawn again, wider
        marked = [chosen, truth] if chosen != truth else [truth]
        ax.bar(marked, values[marked], color=[colours[k] for k in marked], width=0.016 * len(values))
        ax.set_xticks(marked, [names[k] for k in marked], rotation=20, ha="right", rotation_mode="anchor")
    else:
        ax.set_xticks(places, names, rotation=90 if max(map(len, names)) > 2 else 0)
    ax.set(ylabel=label, xlim=(-0.6, len(values) - 0.4))
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="x", length=0)
    return ax
