"""The figures of the demo's page: the paper's, and the numbers of the table along the stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from ttvd.bench.figures.feature_plane import trace_plane
from ttvd.bench.figures.samples import find_samples
from ttvd.bench.figures.scene import describe_images
from ttvd.demo.job import BATCH, Domain, Results, stream
from ttvd.nn.split import SplitModel, split
from ttvd.report.curves import plot_curves, plot_reliability
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.plane_exhibits import draw_plane
from ttvd.report.sample_exhibits import draw_samples
from ttvd.report.style import house_style, new_panel
from ttvd.zoo.catalog import load
from ttvd.zoo.sites import Sites

PLANE_DOMAIN = Domain(
    "gaussian_noise", 4
)  # hard enough to fail without adaptation, and clusters can still be seen
SEARCHED = 1024  # digits among which the sample of the sample analysis is looked for
CURVES = ("ttvd", "SLA + tent", "tent", "SLA + bn", "cipd", "civd", "bn", "source")
CALIBRATED = ("source", "SLA + bn", "SLA + tent", "ttvd")
OURS = "ttvd"
CURVE, RELIABILITY = (4.6, 3.3), (3.2, 3.8)  # inches of a panel


def draw_figures(
    results: Results, images: Tensor, labels: Tensor, *, folder: Path | None = None, quick: bool = False
) -> list[Exhibit]:
    """Compute and draw all figures.

    Args:
        results: What ``ttvd.demo.job.measure`` gave.
        images: Clean digits of the stream.
        labels: Their classes.
        folder: Where the checkpoints are; those of the package unless given.
        quick: Fewer digits and coarser grids.
    """
    seed, domain = results.seed, results.domains[0]
    few = (labels < 3).nonzero()[:, 0][: 3 * BATCH if quick else None]
    batches = list(stream(PLANE_DOMAIN.apply(images[few], seed), labels[few], seed))
    plane, constants = trace_plane(*_load("digits-plane", folder), batches)
    some = slice(4 * BATCH if quick else SEARCHED)
    batches = list(stream(domain.apply(images[some], seed), labels[some], seed))
    samples, counts = find_samples(*_load("digits-sla", folder), batches)
    digits = [str(digit) for digit in range(10)]
    with house_style():
        facts = constants | describe_images(PLANE_DOMAIN, "imagenet", digits[:3])
        exhibits = draw_plane(facts, plane.to_arrays(), 200 if quick else 400)
        exhibits += draw_samples(counts | describe_images(domain, "imagenet", digits), vars(samples))
        return [*exhibits, show_curves(results)]


def _load(name: str, folder: Path | None) -> tuple[SplitModel, Sites]:
    source = load(name, folder)
    assert source.sites is not None
    return split(source.model), source.sites


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
