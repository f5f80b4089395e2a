"""The figures of the demo's page on the ten-class models, with what to see in them. All numbers come from the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ttvd.demo.figures import GAMMA, VIEWS
from ttvd.demo.job import Domain, Results
from ttvd.demo.samples import SampleData
from ttvd.report.curves import plot_curves, plot_reliability
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.samples import plot_bars, plot_image
from ttvd.report.style import MUTED, RIGHT, WRONG, new_panel

CURVES = ("ttvd", "tent", "SLA + bn", "cipd", "civd", "bn", "source")
CALIBRATED = ("source", "tent", "SLA + bn", "ttvd")
OURS = "ttvd"
SAMPLE, CURVE, RELIABILITY = (2.7, 4.1), (4.6, 3.3), (3.2, 3.8)  # inches of a panel
DIGITS = [str(digit) for digit in range(10)]


def show_sample(sample: SampleData, domain: Domain) -> Exhibit:
    """The paper's sample analysis."""
    nearest = sample.distances.argmin(1)
    panels = [_show_view(sample, view, int(nearest[view])) for view in range(VIEWS)]
    chosen = int(sample.influence.argmax())
    ax = plot_bars(
        sample.influence,
        new_panel(SAMPLE),
        truth=sample.truth,
        chosen=chosen,
        names=DIGITS,
        label="influence (largest wins)",
    )
    ax.set_title(f"CIVD → {chosen}")
    panels.append(Panel(encode(ax), f"Joint influence of each class; the largest is {chosen}"))
    right = [f"{90 * view}°" for view in range(VIEWS) if nearest[view] == sample.truth]
    caption = (
        f"A {sample.truth} under {domain.label}, and the distance from each of its rotations to the class means of "
        f"that rotation. Upright, it lies nearest to the {nearest[0]}s; {_list(right)} nearest to the "
        f"{sample.truth}s, and the joint influence settles on {chosen}."
    )
    details = (
        f"Influence: sum of distance^({GAMMA:g}) over the views. Features with batch statistics, no other adaptation. "
        f"Of {sample.seen} digits, four views correct {sample.found} mistakes of the upright view and make "
        f"{sample.spoilt} new ones; this is the one whose smaller margin, wrong before or right after, is largest."
    )
    key = ((RIGHT, "true class"), (WRONG, "predicted class, where it is wrong"), (MUTED, "other classes"))
    title = "A digit that four views correct (the paper's sample analysis)"
    return Exhibit(title, caption, (Strip(panels, 5),), key, details)


def _list(angles: Sequence[str]) -> str:
    if not angles:
        return "no rotation lies"
    *rest, last = angles
    return f"turned by {', '.join(rest) + ' and ' if rest else ''}{last} it lies"


def _show_view(sample: SampleData, view: int, chosen: int) -> Panel:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SAMPLE, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[1.0, 1.15])
    plot_image(sample.images[view], above)
    above.set_title(f"{90 * view}° → {chosen}")
    values = sample.distances[view]
    plot_bars(
        values, below, truth=sample.truth, chosen=chosen, names=DIGITS, label="distance (smallest wins)"
    )
    return Panel(encode(figure), f"The digit turned by {90 * view} degrees; nearest class mean: {chosen}")


def show_curves(results: Results) -> Exhibit:
    """Adaptation curves and reliability diagrams."""
    labels = [entry.label for entry in results.entries]
    shown = [label for label in CURVES if label in labels]
    checked = [label for label in CALIBRATED if label in labels]
    panels = [_show_domain(results, domain, shown) for domain in results.domains]
    diagrams = [_show_reliability(results, results.domains[0], label) for label in checked]
    caption = (
        "Above, the error over all digits seen so far: what falls from left to right is what is learned on the way, "
        "what differs at the first batch is statistics and views. Below, accuracy by confidence: bars on the dashed "
        "line mean that a stated confidence can be believed, hatching is the gap, and the grey bars show where the "
        "predictions are."
    )
    strips = (
        Strip(panels, 3, "Error along the stream (a line that is off the scale is named at the top)"),
        Strip(diagrams, 4, f"Reliability on {results.domains[0].label}"),
    )
    return Exhibit("Along the stream, and is the confidence true?", caption, strips)


def _show_domain(results: Results, domain: Domain, labels: Sequence[str]) -> Panel:
    curves = {label: results.records[label, domain.label].curve().numpy() for label in labels}
    ends = sorted(float(curve[-1]) for curve in curves.values())
    # The unadapted model can be many times worse than all others; it must not flatten them.
    crowd = [end for end in ends if end <= 3 * float(np.median(ends))]
    top = min(1.0, 1.35 * max(*crowd, 0.02))
    ax = plot_curves(curves, new_panel(CURVE), top=top, strong=OURS)
    ax.set_title(domain.label)
    return Panel(encode(ax), f"Error so far on {domain.label}, by method")


def _show_reliability(results: Results, domain: Domain, label: str) -> Panel:
    metrics = results.records[label, domain.label].metrics()
    ax = plot_reliability(metrics.reliability(), new_panel(RELIABILITY))
    ax.set_title(f"{label}: ECE {metrics.compute()['ece']:.1%}")
    return Panel(encode(ax), f"Reliability diagram of {label} on {domain.label}")
