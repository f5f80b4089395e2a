"""Diagrams in the plane: exact cells, plane slices of diagrams of any dimension, and labels on a grid.

They serve figures and checks, so they are computed on the CPU in float64, without gradients.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttvd.geometry.diagram import Diagram
from ttvd.geometry.influence import assign

Box: TypeAlias = tuple[float, float, float, float]
Array: TypeAlias = npt.NDArray[np.float64]

# Lengths below this fraction of the box count as zero: far below a pixel, far above the rounding of float64.
RESOLUTION = 1e-12
# Directions closer than this (in radians) span no plane; parallel float32 vectors differ by less.
PARALLEL = 1e-6
# Number of distances in memory at once while labelling a grid (32 MiB).
GRID_CHUNK = 2**22


def cells(diagram: Diagram, box: Box) -> list[Array]:
    """Return the cell of every site of a plane diagram, clipped to a box.

    A cell is the part of the box that remains after clipping it by the bisectors with all other sites. Of two equal
    sites with equal weights, the first gets the cell.

    Args:
        diagram: Two-dimensional Voronoi or power diagram; its groups are not used.
        box: Box (xmin, ymin, xmax, ymax).

    Returns:
        A convex polygon (m, 2) per site, counter-clockwise; (0, 2) if the cell is empty or outside the box.

    Example:
        >>> left, right = cells(Diagram(torch.tensor([[1.0, 0.0], [3.0, 0.0]])), (0.0, 0.0, 4.0, 1.0))
        >>> left.tolist()
        [[0.0, 0.0], [2.0, 0.0], [2.0, 1.0], [0.0, 1.0]]
    """
    xmin, ymin, xmax, ymax = _check_box(box)
    _check_planar(diagram)
    sites = diagram.sites.detach().double().cpu().numpy()
    weights = np.zeros(len(sites))
    if diagram.weights is not None:
        weights = diagram.weights.detach().double().cpu().numpy()
    corners = np.array([[xmin, ymin], [xmax, ymin], [xmax, ymax], [xmin, ymax]])
    return [_cut_cell(corners, sites, weights, index) for index in range(len(sites))]


def slice_plane(diagram: Diagram, origin: Tensor, u: Tensor, v: Tensor) -> Diagram:
    """Return the power diagram on a plane through a diagram of any dimension, exactly.

    On the plane, d² is the squared distance to the projected site plus the squared distance of the site to the plane.
    So the slice has the projected sites, with weights reduced by the squared distance to the plane.

    Args:
        diagram: Voronoi or power diagram; its groups are kept.
        origin: Point (d,) of the plane that becomes (0, 0).
        u: Direction (d,) of the first axis.
        v: Another direction (d,) in the plane; the second axis is its part orthogonal to u.

    Returns:
        A two-dimensional power diagram in float64 on the device of the diagram.

    Example:
        >>> diagram = Diagram(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]))
        >>> flat = slice_plane(diagram, torch.zeros(3), torch.tensor([2.0, 0, 0]), torch.tensor([1.0, 1.0, 0]))
        >>> flat.sites.tolist(), flat.weights.tolist()
        ([[1.0, 2.0], [4.0, 5.0]], [-9.0, 0.0])
    """
    sites = diagram.sites.detach().double()
    start, first, second = (
        _check_vector(vector, diagram, name) for vector, name in ((origin, "origin"), (u, "u"), (v, "v"))
    )
    axes = _span_plane(first, second)
    offsets = sites - start
    projected = offsets @ axes.mT
    weights = sites.new_zeros(len(sites)) if diagram.weights is None else diagram.weights.detach().double()
    return Diagram(projected, weights - (offsets - projected @ axes).square().sum(-1), diagram.groups)


def grid_labels(
    diagram: Diagram, box: Box, resolution: int, gamma: float = 1.0, shift: float | None = None
) -> tuple[npt.NDArray[np.int64], Array, Array]:
    """Return the class of every point of a grid by the point form, which includes cells with curved walls.

    Args:
        diagram: Two-dimensional diagram.
        box: Box (xmin, ymin, xmax, ymax); the outermost grid points lie on its sides.
        resolution: Points per side, r.
        gamma: Exponent of q, as in `ttvd.geometry.assign`.
        shift: Shift of power distances, as in `ttvd.geometry.assign`.

    Returns:
        Labels (r, r) with a row per y and a column per x, the r values of x and the r values of y.

    Example:
        >>> labels, xs, ys = grid_labels(Diagram(torch.tensor([[0.0, 0.0], [1.0, 0.0]])), (0, 0, 1, 1), 2)
        >>> labels.tolist()
        [[0, 1], [0, 1]]
    """
    xmin, ymin, xmax, ymax = _check_box(box)
    _check_planar(diagram)
    if resolution < 2:
        raise ValueError(f"resolution must be at least 2 points per side, got {resolution}")
    xs, ys = np.linspace(xmin, xmax, resolution), np.linspace(ymin, ymax, resolution)
    columns, rows = np.meshgrid(xs, ys)
    points = torch.from_numpy(np.stack([columns.ravel(), rows.ravel()], axis=1))
    with torch.no_grad():
        local = diagram.to("cpu", torch.float64)
        chunks = torch.split(points, max(1, GRID_CHUNK // diagram.num_sites))
        labels = torch.cat([assign(chunk, local, gamma, shift) for chunk in chunks])
    return labels.reshape(resolution, resolution).numpy(), xs, ys


def _cut_cell(corners: Array, sites: Array, weights: Array, index: int) -> Array:
    """Clip the box by the bisectors that cut it, deepest first, until no corner lies in another cell."""
    nothing = np.empty((0, 2))
    steps = sites - sites[index]
    lengths = np.hypot(steps[:, 0], steps[:, 1])
    same = lengths == 0
    ahead = np.arange(len(sites)) < index
    if np.any(same & ((weights > weights[index]) | (ahead & (weights == weights[index])))):
        return nothing
    normals = steps[~same] / lengths[~same, None]
    bounds = (lengths[~same] + (weights[index] - weights[~same]) / lengths[~same]) / 2
    polygon = corners - sites[index]
    tolerance = RESOLUTION * float(np.hypot(*(corners[2] - corners[0])))
    while len(bounds) and len(polygon):
        depths = polygon @ normals.T - bounds
        deepest = depths.argmax(axis=1)
        cutting = np.unique(deepest[depths[np.arange(len(polygon)), deepest] > tolerance])
        if not len(cutting):
            break
        for wall in cutting:
            polygon = _clip(polygon, normals[wall], bounds[wall])
        bounds[cutting] = np.inf
    polygon = _drop_repeated(polygon, tolerance)
    return polygon + sites[index] if len(polygon) else nothing


def _clip(polygon: Array, normal: Array, bound: float) -> Array:
    """Keep the part of a convex polygon where normal · x <= bound."""
    depth = polygon @ normal - bound
    inside = depth <= 0
    if not inside.any():
        return polygon[:0]
    after = np.arange(1, len(polygon) + 1) % len(polygon)
    crossing = inside != inside[after]
    share = np.divide(depth, depth - depth[after], out=np.zeros_like(depth), where=crossing)
    crossings = polygon + share[:, None] * (polygon[after] - polygon)
    kept = np.stack([inside, crossing], axis=1)
    vertices: Array = np.stack([polygon, crossings], axis=1)[kept]
    return vertices


def _drop_repeated(polygon: Array, tolerance: float) -> Array:
    """Drop vertices that equal the one before; a polygon of fewer than three vertices is empty."""
    steps = polygon - np.roll(polygon, 1, axis=0)
    kept = polygon[np.hypot(steps[:, 0], steps[:, 1]) > tolerance]
    return kept if len(kept) > 2 else polygon[:0]


def _span_plane(u: Tensor, v: Tensor) -> Tensor:
    """Return the orthonormal axes (2, d) of the plane of two directions."""
    if not (u.any() and v.any()):
        raise ValueError("u and v must not be zero; give two directions that span the plane")
    first, second = u / u.norm(), v / v.norm()
    second = second - (second @ first) * first
    if float(second.norm()) < PARALLEL:
        raise ValueError("u and v are parallel and span no plane; give two different directions")
    second = second / second.norm()
    # A second pass removes the rounding error of the first if u and v are nearly parallel.
    second = second - (second @ first) * first
    return torch.stack([first, second / second.norm()])


def _check_vector(vector: Tensor, diagram: Diagram, name: str) -> Tensor:
    result = torch.as_tensor(vector, dtype=torch.float64, device=diagram.sites.device).detach()
    if result.shape != (diagram.dim,) or not bool(result.isfinite().all()):
        raise ValueError(f"{name} must be a finite vector ({diagram.dim},), got shape {tuple(result.shape)}")
    return result


def _check_planar(diagram: Diagram) -> None:
    if diagram.dim != 2:
        raise ValueError(
            f"expected a diagram in the plane (d = 2), got d = {diagram.dim}; use slice_plane first"
        )


def _check_box(box: Any) -> Box:
    values = tuple(float(value) for value in box)
    if len(values) != 4 or not np.isfinite(values).all():
        raise ValueError(f"box must be four finite numbers (xmin, ymin, xmax, ymax), got {box}")
    xmin, ymin, xmax, ymax = values
    if not (xmin < xmax and ymin < ymax):
        raise ValueError(f"box must have xmin < xmax and ymin < ymax, got {box}")
    return xmin, ymin, xmax, ymax
