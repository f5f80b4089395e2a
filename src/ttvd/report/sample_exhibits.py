"""The paper's sample analysis: images, their distances to all sites in each rotation, and the joint influence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttvd.bench.figures.scene import Array, Description, Floats, Labels
from ttvd.report.naming import find_noun, list_names
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.samples import plot_bars, plot_image
from ttvd.report.style import MUTED, RIGHT, WRONG, new_panel

SIZE = (2.7, 4.1)  # inches of a panel
KEY = ((RIGHT, "true class"), (WRONG, "predicted class, where it is wrong"), (MUTED, "other classes"))


@dataclass(frozen=True, eq=False)
class Sample:
    """One image.

    Attributes:
        images: (v, c, h, w) bytes, one for each rotation.
        distances: (v, k) from each view to the sites of its own rotation.
        influence: (k,) of the cluster-induced Voronoi diagram.
        truth: Its class.
        names: Of the classes.
    """

    images: Array
    distances: Floats
    influence: Floats
    truth: int
    names: Sequence[str]

    @property
    def nearest(self) -> Labels:
        """(v,) class of the nearest site for each rotation."""
        nearest: Labels = self.distances.argmin(1)
        return nearest

    @property
    def joint(self) -> int:
        """The class of the largest influence."""
        return int(self.influence.argmax())

    def angle(self, view: int) -> str:
        """By how much a view is turned."""
        return f"{view * 360 // len(self.nearest)}°"

    def tell(self) -> str:
        """What is to be seen."""
        right = [self.angle(view) for view, found in enumerate(self.nearest) if found == self.truth]
        turned = (
            f"turned by {list_names(right)} nearest to its own" if right else "no rotation nearest to its own"
        )
        return (
            f"The true class is {self.names[self.truth]}. Upright, it lies nearest to the class mean of "
            f"{self.names[self.nearest[0]]}; {turned}, and the joint influence settles on {self.names[self.joint]}."
        )

    def show_view(self, view: int) -> Panel:
        """A rotation of the image above its distances."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=SIZE, layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=[1.0, 1.15])
        chosen = int(self.nearest[view])
        plot_image(self.images[view].transpose(1, 2, 0) / 255, above)
        above.set_title(f"{self.angle(view)} → {self.names[chosen]}")
        label = "distance (smallest wins)"
        plot_bars(self.distances[view], below, truth=self.truth, chosen=chosen, names=self.names, label=label)
        below.set_ylim(0, 1.05 * self.distances.max())
        text = f"The image turned by {self.angle(view)}; nearest class mean: {self.names[chosen]}"
        return Panel(encode(figure), text)

    def show_influence(self) -> Panel:
        """The joint influence of each class."""
        ax, label = new_panel(SIZE), "influence (largest wins)"
        plot_bars(self.influence, ax, truth=self.truth, chosen=self.joint, names=self.names, label=label)
        name = self.names[self.joint]
        ax.set_title(f"CIVD → {name}")
        return Panel(encode(ax), f"Joint influence of each class; the largest is {name}")


def draw_samples(facts: Description, arrays: Mapping[str, Any]) -> list[Exhibit]:
    """One exhibit, with a row of pictures for each image."""
    names, noun = facts["classes"], find_noun(facts["classes"])
    count, views = arrays["distances"].shape[:2]
    columns = {name: arrays[name] for name in ("images", "distances", "influence", "truth")}
    samples = [
        Sample(**{name: column[row] for name, column in columns.items()}, names=names) for row in range(count)
    ]
    title = f"Mistakes that {views} views correct (the paper's sample analysis)"
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
        caption += f" {samples[0].tell()}"
    headings = [f"{row}. {sample.tell()}" if count > 1 else "" for row, sample in enumerate(samples, 1)]
    strips = [
        Strip([*map(sample.show_view, range(views)), sample.show_influence()], views + 1, heading)
        for sample, heading in zip(samples, headings, strict=True)
    ]
    return [Exhibit(title, caption, strips, KEY if samples else (), details)]
