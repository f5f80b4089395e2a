"""The paper's three figures on the demo's plane model, with what to see in them. All numbers come from the data."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ttvd.data.corruptions import describe
from ttvd.demo.figures import GAMMA, MOVE_LR, MOVE_STEPS, MOVED, PLANE_DOMAIN, PLANE_LR, VIEWS, Floats, Labels
from ttvd.demo.planes import NAMES, TURNED, Plane
from ttvd.geometry import Diagram, margin, power_distances
from ttvd.report import planes
from ttvd.report.page import Exhibit, Panel, Strip, encode
from ttvd.report.style import class_colour, new_panel

KEY = (*((class_colour(k), f"digit {name}") for k, name in enumerate(NAMES)), ("ring", "misclassified"))
PARTITIONS = (
    ("vd", "Voronoi", "source"),
    ("pd", "power", "source"),
    ("civd", "cluster-induced", "SLA + source"),
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
MOVES = (
    ("bn", "vd", "statistics of the batch"),
    ("vd", "vd", f"VD, {MOVE_STEPS} steps"),
    ("ttvd", "cipd", f"TTVD, {MOVE_STEPS} steps"),
)


def show_partitions(plane: Plane) -> Exhibit:
    """The paper's Figure 1."""
    error = {name: trace.error for name, trace in plane.data.traces.items()}
    noise = describe(PLANE_DOMAIN.corruption, PLANE_DOMAIN.severity, "imagenet")["scale"]
    caption = (
        f"A small network squeezes each digit into two numbers, so its feature space can be drawn: gaussian noise "
        f"pushes the features across the walls of every diagram (A). In B, T3A moves the walls and all others move the "
        f"features; statistics of the batch alone bring the error from {error['source']:.1%} to {error['bn']:.1%}, and "
        f"looking at all four rotations brings it to {error['civd']:.1%} (CIVD) and {error['ttvd']:.1%} (TTVD)."
    )
    details = (
        f"Digits 0 to 2, ImageNet-C's gaussian noise of severity {PLANE_DOMAIN.severity} (standard deviation {noise}). "
        f"Gradient methods use SGD with learning rate {PLANE_LR:g}; here their steps add little, batch statistics of "
        f"four views alone reach {error['SLA + bn']:.1%}. Cells are exact, but for the cluster-induced diagram: "
        f"exponent {GAMMA:g} on {plane.resolution} x {plane.resolution} points. The sites of the power diagrams lie "
        f"close to the origin of the features and are left out. With four views each of {TURNED} digits is drawn "
        f"{VIEWS} times, with a ring in B where the joint prediction is wrong."
    )
    strips = (
        Strip(
            [_show_partition(plane, *partition) for partition in PARTITIONS],
            3,
            "A. Three ways to cut the plane, over the features of the unadapted model",
        ),
        Strip(
            [_show_run(plane, *run) for run in RUNS],
            4,
            "B. Features at the moment of prediction, the cells of each method, and its error over the stream",
        ),
    )
    return Exhibit("Cells in the feature plane (the paper's Figure 1)", caption, strips, KEY, details)


def _show_partition(plane: Plane, name: str, title: str, run: str) -> Panel:
    trace = plane.data.traces[run]
    wrong = plane.misplaced(trace, name)
    ax = plane.scatter(trace, plane.ground(name, f"{title}: {wrong.mean():.0%} misplaced"), wrong)
    return Panel(encode(ax), f"{title} diagram over the features of noisy digits")


def _show_run(plane: Plane, name: str, ground: str, title: str) -> Panel:
    trace = plane.data.traces[name]
    wrong = np.broadcast_to(trace.wrong, trace.features.shape[:2])
    ax = plane.scatter(trace, plane.ground(ground, f"{title}: {trace.error:.1%}"), wrong)
    return Panel(encode(ax), f"Features and cells of {title}")


def show_subtraction(plane: Plane) -> Exhibit:
    """The paper's Figure 2."""
    voronoi = plane.data.diagrams["vd"]
    ax = planes.plot_entropy(plane.entropy(), new_panel((3.6, 4.4)), classes=len(NAMES))
    planes.plot_boundaries(voronoi, ax, box=plane.box, colour="white")
    planes.plot_sites(voronoi, ax, names=NAMES)
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
        f"where the two disagree (dots), are not used to adapt. Of the {count} digits that this drops in the middle, "
        f"{lost.mistakes.sum()} are misclassified; of the {count} with the highest entropy, "
        f"{plane.count_uncertain_mistakes('bn', count)} are."
    )
    details = (
        f"Soft labels: softmax(-distance / {plane.data.tau:.2f}), the temperature fitted on held-out source digits. "
        f"Misclassified: by the head, with batch statistics; {lost.total} digits, upright, in the middle. On the right "
        f"the nearest of each class's {VIEWS} sites decides, and all rotations of each digit count."
    )
    title = "Which samples to trust (the paper's Figure 2)"
    return Exhibit(title, caption, (Strip(panels, 3),), KEY, details)


def _show_kept(plane: Plane, voronoi: str, power: str, run: str) -> Panel:
    dashed, solid = plane.nearest(voronoi), plane.nearest(power)
    ax = planes.plot_regions(dashed, new_panel(), kept=dashed.values == solid.values)
    planes.plot_contours(solid, planes.plot_contours(dashed, ax, style="--"))
    dropped = plane.subtract(voronoi, power, run)
    planes.plot_points(dropped.points, dropped.labels, ax, wrong=dropped.mistakes)
    planes.plot_sites(plane.data.diagrams[voronoi], ax, names=NAMES)
    sites = "one site" if voronoi == "vd" else f"{VIEWS} sites"
    ax.set_title(f"{sites} a class: {dropped.kept:.0%} kept")
    return Panel(encode(ax), f"Region on which Voronoi and power diagram agree, {sites} a class")


def show_structures(plane: Plane) -> Exhibit:
    """The paper's Figure 3."""
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
        f"VD has one site for each digit, of its upright view, and cuts through the rotated ones; CIVD gives each "
        f"digit a cluster of {VIEWS} sites and bends its walls around it; CIPD takes weighted sites from the head. "
        f"Below, a batch is brought back by its own statistics; then the VD loss pushes it away from the walls (mean "
        f"distance {away[0]:.1f} before, {away[1]:.1f} after), and TTVD pulls each view towards the cell of the agreed "
        f"digit and its known rotation (mean cross-entropy to the true one {loss[0]:.2f} before, {loss[1]:.2f} after)."
    )
    details = (
        f"Features of all four rotations, with batch statistics. CIVD: joint influence with exponent {GAMMA:g} on "
        f"{plane.resolution} x {plane.resolution} points. CIPD: exact cells of its {VIEWS * len(NAMES)} pairs of digit "
        f"and rotation. Arrows: {MOVE_STEPS} steps on a batch of {MOVED} with learning rates that make the direction "
        f"visible, {MOVE_LR['vd']:g} (VD) and {MOVE_LR['ttvd']:g} (TTVD)."
    )
    strips = (
        Strip(panels, 3, "The same features on three diagrams"),
        Strip([_show_move(plane, *move) for move in MOVES], 3, "How one batch moves"),
    )
    title = "From one site to weighted clusters (the paper's Figure 3)"
    return Exhibit(title, caption, strips, KEY[:-1], details)


def _show_move(plane: Plane, name: str, ground: str, title: str) -> Panel:
    move = plane.data.moves[name]
    ax = planes.plot_moves(move.before, move.after, move.labels, plane.ground(ground, title))
    return Panel(encode(ax), f"Arrows: where the features of one batch go by {title}")


def _measure_loss(points: Floats, labels: Labels, joint: Diagram) -> float:
    """Mean cross-entropy of the views (view-major) to the cells of their own class and rotation."""
    views = torch.arange(joint.views).repeat_interleave(len(points) // joint.views)
    scores = -power_distances(torch.from_numpy(points), Diagram(joint.sites, joint.weights))
    return float(F.cross_entropy(scores, torch.from_numpy(labels) * joint.views + views))
