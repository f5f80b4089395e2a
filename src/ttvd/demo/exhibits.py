"""The paper's three figures on the demo's plane model, with what to see in them. All numbers come from the data."""

from __future__ import annotations

import numpy as np
import torch

from ttvd.data.corruptions import describe
from ttvd.demo.figures import GAMMA, MOVE_LR, MOVE_STEPS, PLANE_DOMAIN, PLANE_LR, VIEWS, Move
from ttvd.demo.planes import NAMES, TURNED, Plane
from ttvd.geometry import Diagram, assign, margin
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
        f"A small network squeezes each digit into two numbers, so its feature space can be drawn. Gaussian noise "
        f"(ImageNet-C's severity {PLANE_DOMAIN.severity}, standard deviation {noise}) pushes the features across the "
        f"walls of every diagram in A. In B, T3A moves the walls and all others move the features. Statistics of the "
        f"batch alone bring the error from {error['source']:.1%} to {error['bn']:.1%} with one view and to "
        f"{error['SLA + bn']:.1%} with four; here the gradient steps (all SGD, learning rate {PLANE_LR:g}) add little, "
        f"and it is the four rotations that set CIVD and TTVD apart."
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
            f"B. Features at the moment of prediction, cells, and error over the stream (four views: {TURNED} digits, "
            f"each drawn {VIEWS} times)",
        ),
    )
    return Exhibit("Cells in the feature plane (the paper's Figure 1)", caption, strips, KEY)


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
    one, four = plane.subtract("vd", "pd", "bn"), plane.subtract("civd", "cipd", "SLA + bn")
    dropped = len(one.points)
    caption = (
        f"Left: the entropy of softmax(-distance / {plane.data.tau:.2f}) is high along the walls and falls quickly "
        f"towards the sites (temperature fitted on held-out source digits). Middle and right: walls of the Voronoi "
        f"diagram dashed, of the power diagram solid; only in the deep region do both name the same class, and only "
        f"samples there are used to adapt. Subtraction drops {dropped} of {one.total} noisy digits (dots), of which the "
        f"head gets {one.mistakes.sum()} wrong; the {dropped} digits of highest entropy hold only "
        f"{plane.count_uncertain_mistakes('bn', dropped)} of its mistakes. On the right the nearest of each class's "
        f"{VIEWS} sites decides, over the features of all rotations."
    )
    return Exhibit("Which samples to trust (the paper's Figure 2)", caption, (Strip(panels, 3),), KEY)


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
    home = [_count_home(z, plane.data.moves["ttvd"], plane.data.diagrams["cipd"]) for z in (0, 1)]
    caption = (
        f"VD has one site for each digit, of its upright view. CIVD gives each digit a cluster of {VIEWS} sites, one "
        f"for each rotation, whose joint influence (exponent {GAMMA:g}; drawn on {plane.resolution} x "
        f"{plane.resolution} points) bends the walls. CIPD takes sites and weights from the head; drawn are the exact "
        f"cells of its {VIEWS * len(NAMES)} pairs of digit and rotation. Below, one batch moves: its own statistics "
        f"bring it back, then {MOVE_STEPS} steps with a learning rate of {MOVE_LR:g}, larger than in use, show where "
        f"the losses lead. With VD the mean distance to the nearest wall grows from {away[0]:.1f} to {away[1]:.1f}; "
        f"with TTVD {home[1]:.0%} of the views, {home[0]:.0%} before, lie in the cell of their own digit and rotation."
    )
    strips = (
        Strip(panels, 3, "The same features on three diagrams"),
        Strip([_show_move(plane, *move) for move in MOVES], 3, "How one batch moves"),
    )
    return Exhibit("From one site to weighted clusters (the paper's Figure 3)", caption, strips, KEY[:-1])


def _show_move(plane: Plane, name: str, ground: str, title: str) -> Panel:
    move = plane.data.moves[name]
    ax = planes.plot_moves(move.before, move.after, move.labels, plane.ground(ground, title))
    return Panel(encode(ax), f"Arrows: where the features of one batch go by {title}")


def _count_home(when: int, move: Move, joint: Diagram) -> float:
    """Share of the views, before (0) or after (1) a move, in the cell of their own class and rotation."""
    points = torch.from_numpy(move[when])
    views = torch.arange(joint.views).repeat_interleave(len(points) // joint.views)
    cell = assign(points, Diagram(joint.sites, joint.weights))
    return float((cell == torch.from_numpy(move.labels) * joint.views + views).double().mean())
