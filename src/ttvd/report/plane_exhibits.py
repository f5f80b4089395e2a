"""The paper's three figures on a plane of features, with what to see in them. All numbers come from the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ttvd.bench.figures.feature_plane import PlaneData
from ttvd.bench.figures.scene import Description, Floats, Labels
from ttvd.geometry import Diagram, margin, power_distances
from ttvd.report import planes
from ttvd.report.feature_plane import TURNED, Plane
from ttvd.report.naming import find_noun, list_names, name_class, render_images
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.style import class_colour, new_panel

PARTITIONS = (
    ("vd", "Voronoi", "source"),
    ("pd", "power", "source"),
    ("civd", "cluster-induced", "SLA + source"),
    ("cipd", "power clusters", "SLA + source"),
)
RUNS = (
    ("source", "pd", "before"),
    ("t3a", "t3a", "T3A"),
    ("bn", "pd", "batch norm"),
    ("tent", "pd", "Tent"),
    ("vd", "vd", "VD"),
    ("SLA + source", "cipd", "before, 4 views"),
    ("civd", "civd", "CIVD"),
    ("ttvd", "cipd", "TTVD"),
)


def draw_plane(facts: Description, arrays: Mapping[str, Any], resolution: int = 400) -> list[Exhibit]:
    """The paper's Figures 1, 2 and 3."""
    plane = Plane(PlaneData.from_arrays(arrays), facts, resolution)
    return [show_partitions(plane), show_subtraction(plane), show_structures(plane)]


def _make_key(plane: Plane) -> list[tuple[str, str]]:
    named = [(class_colour(k), name_class(name)) for k, name in enumerate(plane.names)]
    return [*named, ("ring", "misclassified")]


def show_partitions(plane: Plane) -> Exhibit:
    """The paper's Figure 1."""
    facts, noun = plane.facts, find_noun(plane.names)
    error = {name: trace.error for name, trace in plane.data.traces.items()}
    caption = (
        f"A small network squeezes each {noun} into two numbers, so its feature space can be drawn: {facts['domain']} "
        f"pushes the features across the walls of every diagram (A). In B, T3A moves the walls and all others move the "
        f"features; statistics of the batch alone bring the error from {error['source']:.1%} to {error['bn']:.1%}, and "
        f"looking at all {facts['views']} rotations brings it to {error['civd']:.1%} (CIVD) and {error['ttvd']:.1%} "
        "(TTVD)."
    )
    views, grid = facts["views"], f"{plane.resolution} x {plane.resolution} points"
    details = (
        f"{noun.capitalize()}s {list_names(plane.names)}; {render_images(facts)}. Gradient methods use SGD with learning "
        f"rate {facts['lr']:g}; batch statistics of {views} views alone, without a step, reach "
        f"{error['SLA + bn']:.1%}. Cells are exact, but for the cluster-induced diagram: exponent {facts['gamma']:g} "
        f"on {grid}. The sites of the power diagrams lie close to the origin of the features and are left out. With "
        f"{views} views each of {TURNED} {noun}s is drawn {views} times, with a ring in B where the joint prediction "
        "is wrong."
    )
    strips = (
        Strip(
            [_show_partition(plane, *partition) for partition in PARTITIONS],
            4,
            "A. Four ways to cut the plane, over the features of the unadapted model",
        ),
        Strip(
            [_show_run(plane, *run) for run in RUNS],
            4,
            "B. Features at the moment of prediction, the cells of each method, and its error over the stream",
        ),
    )
    title = "Cells in the feature plane (the paper's Figure 1)"
    return Exhibit(title, caption, strips, _make_key(plane), details)


def _show_partition(plane: Plane, name: str, title: str, run: str) -> Panel:
    trace = plane.data.traces[run]
    wrong = plane.misplaced(trace, name)
    ax = plane.scatter(trace, plane.ground(name, f"{title}: {wrong.mean():.0%} misplaced"), wrong)
    return Panel(encode(ax), f"{title} diagram over the features of corrupted {find_noun(plane.names)}s")


def _show_run(plane: Plane, name: str, ground: str, title: str) -> Panel:
    trace = plane.data.traces[name]
    wrong = np.broadcast_to(trace.wrong, trace.features.shape[:2])
    ax = plane.scatter(trace, plane.ground(ground, f"{title}: {trace.error:.1%}"), wrong)
    return Panel(encode(ax), f"Features and cells of {title}")


def show_subtraction(plane: Plane) -> Exhibit:
    """The paper's Figure 2."""
    voronoi, noun = plane.data.diagrams["vd"], find_noun(plane.names)
    ax = planes.plot_entropy(plane.entropy(), new_panel((3.6, 4.4)), classes=len(plane.names))
    planes.plot_boundaries(voronoi, ax, box=plane.box, colour="white")
    planes.plot_sites(voronoi, ax, names=plane.names)
    ax.set_title("entropy of the soft labels")
    panels = [
        Panel(encode(ax), "Entropy landscape of the Voronoi diagram"),
        _show_kept(plane, "vd", "pd", "bn"),
        _show_kept(plane, "civd", "cipd", "SLA + bn"),
    ]
    lost = plane.subtract("vd", "pd", "bn")
    count = len(lost.points)
    caption = (
        f"Left: the entropy of a soft label is high along the walls and falls quickly towards the sites. Middle and "
        f"right: walls of the Voronoi diagram are dashed, of the power diagram solid; samples outside the deep region, "
        f"where the two disagree (dots), are not used to adapt. Of the {count} {noun}s that this drops in the middle, "
        f"{lost.mistakes.sum()} are misclassified; of the {count} with the highest entropy, "
        f"{plane.count_uncertain_mistakes('bn', count)} are."
    )
    details = (
        f"Soft labels: softmax(-distance / {plane.facts['tau']:.2f}), the temperature fitted on held-out source data. "
        f"Misclassified: by the head, with batch statistics; {lost.total} {noun}s, upright, in the middle. On the "
        f"right the nearest of each class's {plane.facts['views']} sites decides, and all rotations of each {noun} "
        "count."
    )
    title = "Which samples to trust (the paper's Figure 2)"
    return Exhibit(title, caption, (Strip(panels, 3),), _make_key(plane), details)


def _show_kept(plane: Plane, voronoi: str, power: str, run: str) -> Panel:
    dashed, solid = plane.nearest(voronoi), plane.nearest(power)
    ax = planes.plot_regions(dashed, new_panel(), kept=dashed.values == solid.values)
    planes.plot_contours(solid, planes.plot_contours(dashed, ax, style="--"))
    dropped = plane.subtract(voronoi, power, run)
    planes.plot_points(dropped.points, dropped.labels, ax, wrong=dropped.mistakes)
    planes.plot_sites(plane.data.diagrams[voronoi], ax, names=plane.names)
    sites = "one site" if voronoi == "vd" else f"{plane.facts['views']} sites"
    ax.set_title(f"{sites} a class: {dropped.kept:.0%} kept")
    return Panel(encode(ax), f"Region on which Voronoi and power diagram agree, {sites} a class")


def show_structures(plane: Plane) -> Exhibit:
    """The paper's Figure 3."""
    facts, noun, views = plane.facts, find_noun(plane.names), plane.facts["views"]
    four, walls = plane.data.traces["SLA + bn"], plane.data.diagrams["vd"]
    panels = []
    for name in ("vd", "civd", "cipd"):
        ax = plane.scatter(
            four, plane.ground(name, name.upper()), np.zeros(four.features.shape[:2], dtype=bool)
        )
        panels.append(Panel(encode(ax), f"{name.upper()} over the features of all rotations"))
    away = [margin(torch.from_numpy(z), walls).mean() for z in plane.data.moves["vd"][:2]]
    pulled = plane.data.moves["ttvd"]
    loss = [_measure_loss(z, pulled.labels, plane.data.diagrams["cipd"]) for z in pulled[:2]]
    caption = (
        f"VD has one site for each {noun}, of its upright view, and cuts through the rotated ones; CIVD gives each "
        f"{noun} a cluster of {views} sites and bends its walls around it; CIPD takes weighted sites from the head. "
        f"Below, a batch is brought back by its own statistics; then the VD loss pushes it away from the walls (mean "
        f"distance {away[0]:.1f} before, {away[1]:.1f} after), and TTVD pulls each view towards the cell of the agreed "
        f"{noun} and its known rotation (mean cross-entropy to the true one {loss[0]:.2f} before, {loss[1]:.2f} after)."
    )
    rates = facts["move_lr"]
    details = (
        f"Features of all {views} rotations, with batch statistics. CIVD: joint influence with exponent "
        f"{facts['gamma']:g} on {plane.resolution} x {plane.resolution} points. CIPD: exact cells of its "
        f"{views * len(plane.names)} pairs of {noun} and rotation. Arrows: {facts['move_steps']} steps on a batch of "
        f"{facts['moved']} with learning rates that make the direction visible, {rates['vd']:g} (VD) and "
        f"{rates['ttvd']:g} (TTVD)."
    )
    moves = (
        ("bn", "vd", "statistics of the batch"),
        ("vd", "vd", f"VD, {facts['move_steps']} steps"),
        ("ttvd", "cipd", f"TTVD, {facts['move_steps']} steps"),
    )
    strips = (
        Strip(panels, 3, "The same features on three diagrams"),
        Strip([_show_move(plane, *move) for move in moves], 3, "How one batch moves"),
    )
    title = "From one site to weighted clusters (the paper's Figure 3)"
    return Exhibit(title, caption, strips, _make_key(plane)[:-1], details)


def _show_move(plane: Plane, name: str, ground: str, title: str) -> Panel:
    move = plane.data.moves[name]
    ax = planes.plot_moves(move.before, move.after, move.labels, plane.ground(ground, title))
    return Panel(encode(ax), f"Arrows: where the features of one batch go by {title}")


def _measure_loss(points: Floats, labels: Labels, joint: Diagram) -> float:
    """Mean cross-entropy of the views (view-major) to the cells of their own class and rotation."""
    views = torch.arange(joint.views).repeat_interleave(len(points) // joint.views)
    scores = -power_distances(torch.from_numpy(points), Diagram(joint.sites, joint.weights))
    return float(F.cross_entropy(scores, torch.from_numpy(labels) * joint.views + views))
