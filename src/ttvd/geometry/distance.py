"""Distances from points to sites, and from points to the walls of their cells.

All functions are differentiable, compute in float32 or better whatever the autocast state, and do not synchronise
with the device, so a CUDA graph can capture them. Distances come from one matrix product (which honours torch's
float32 matmul precision); a tensor (b, s, d) is never made.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ttvd.geometry.diagram import Diagram, centre_sites, pair_squares
from ttvd.geometry.precision import upcast


def squared_distances(z: Tensor, sites: Tensor) -> Tensor:
    """Return the squared Euclidean distance of every point to every site.

    Values below the rounding error of the product are zero and have a zero gradient: a point that equals a site has
    distance zero exactly.

    Args:
        z: Points (b, d).
        sites: Sites (s, d).

    Returns:
        Squared distances (b, s), never negative.

    Example:
        >>> squared_distances(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        tensor([[25.,  0.]])
    """
    if sites.ndim != 2 or not sites.is_floating_point():
        raise ValueError(f"sites must be a floating tensor (s, d), got {tuple(sites.shape)} {sites.dtype}")
    check_points(z, sites, ndim=2)
    return pair_squares(z, centre_sites(sites, common_dtype(z, sites)))


def power_distances(z: Tensor, diagram: Diagram) -> Tensor:
    """Return the power distance d² - v² of every point to every site (d² when there are no weights).

    Args:
        z: Points (b, d).
        diagram: The diagram; its groups are not used.

    Returns:
        Power distances (b, s); they can be negative.

    Example:
        >>> power_distances(torch.tensor([[3.0, 4.0]]), Diagram(torch.zeros(1, 2), torch.tensor([30.0])))
        tensor([[-5.]])
    """
    check_points(z, diagram.sites, ndim=2)
    squares = pair_squares(z, diagram.centred(common_dtype(z, diagram.sites)))
    return squares if diagram.weights is None else squares - diagram.weights


def distances(z: Tensor, diagram: Diagram) -> Tensor:
    """Return the Euclidean distance of every point to every site, not below the square root of `floor`.

    Args:
        z: Points (b, d).
        diagram: The diagram; its weights and groups are not used.

    Returns:
        Distances (b, s). On a site, the gradient is zero.

    Example:
        >>> distances(torch.tensor([[3.0, 4.0]]), Diagram(torch.tensor([[0.0, 0.0], [3.0, 0.0]])))
        tensor([[5., 4.]])
    """
    check_points(z, diagram.sites, ndim=2)
    squares = pair_squares(z, diagram.centred(common_dtype(z, diagram.sites)))
    return squares.clamp(min=floor(diagram, squares.dtype)).sqrt()


def floor(diagram: Diagram, dtype: torch.dtype | None = None) -> Tensor:
    """Return the smallest value of a squared or shifted power distance before a root, log or power.

    It is the machine epsilon of the dtype times the mean squared distance of the sites to their mean, but at least
    the smallest normal number. So roots, logarithms and powers are finite on a site and have a zero gradient there.

    Args:
        diagram: The diagram whose sites set the scale.
        dtype: Dtype of the distances; float32, or float64 for float64 sites, unless given.

    Example:
        >>> float(floor(Diagram(torch.tensor([[-1.0], [1.0]])))) == torch.finfo(torch.float32).eps
        True
    """
    return diagram.centred(dtype).floor


def margin(z: Tensor, diagram: Diagram, labels: Tensor | None = None) -> Tensor:
    """Return the signed distance of every point to the nearest wall of a cell.

    For cell i, it is the minimum over j of (p_j - p_i) / (2 |µ_i - µ_j|) with power distances p: the Euclidean
    distance to the nearest bisector, positive inside the cell. A diagram of one site has no wall, so the margin is
    infinite. A site that coincides with site i has no bisector with it either: it counts as infinity if it is lighter
    and as minus infinity if it is heavier (the cell is empty). Differences of nearly equal distances lose digits, so
    the margin is computed in float64.

    Args:
        z: Points (b, d).
        diagram: Voronoi or power diagram without groups (cluster-induced cells have curved walls).
        labels: Cells (b,) to measure in, int64; the cell of each point unless given.

    Returns:
        Margins (b,) in the dtype of the other distances.

    Example:
        >>> margin(torch.tensor([[1.0, 5.0]]), Diagram(torch.tensor([[0.0, 0.0], [4.0, 0.0]])))
        tensor([1.])
    """
    if diagram.groups is not None:
        raise ValueError("margin needs a diagram without groups; cluster-induced cells have no flat walls")
    check_points(z, diagram.sites, ndim=2)
    sites = diagram.sites.double()
    powers = power_distances(z.double(), diagram).double()
    cell = powers.argmin(-1) if labels is None else _check_labels(labels, z)
    gaps = powers - powers.gather(-1, cell[:, None])
    between = squared_distances(sites[cell], sites)
    offsets = gaps / (2 * between.clamp(min=floor(diagram, torch.float64)).sqrt())
    offsets = torch.where((between == 0) & (gaps != 0), gaps.detach().sign() * math.inf, offsets)
    own = torch.arange(diagram.num_sites, device=z.device) == cell[:, None]
    nearest = offsets.masked_fill(own, math.inf).amin(-1)
    return nearest.to(common_dtype(z, diagram.sites))


def common_dtype(z: Tensor, sites: Tensor) -> torch.dtype:
    """Return the dtype in which points are compared with sites: float32 or better."""
    return torch.promote_types(upcast(z).dtype, sites.dtype)


def check_points(z: Tensor, sites: Tensor, ndim: int) -> None:
    """Raise an error unless z holds points in the space of the sites."""
    shape = "(b, d)" if ndim == 2 else "(v, b, d)"
    if not z.is_floating_point():
        raise TypeError(f"z must be a floating tensor {shape}, got {z.dtype}; convert it with z.float()")
    if z.ndim != ndim:
        raise ValueError(f"z must be {shape}, got shape {tuple(z.shape)}")
    if z.shape[-1] != sites.shape[-1]:
        raise ValueError(f"z has {z.shape[-1]} features but the sites have {sites.shape[-1]}")
    if z.device != sites.device:
        raise ValueError(f"z is on {z.device} but the sites are on {sites.device}; move one of them")


def _check_labels(labels: Tensor, z: Tensor) -> Tensor:
    if labels.dtype != torch.int64 or labels.shape != z.shape[:1] or labels.device != z.device:
        raise ValueError(
            f"labels must be an int64 tensor ({z.shape[0]},) on {z.device}, one cell per point, "
            f"got shape {tuple(labels.shape)}, {labels.dtype}, on {labels.device}"
        )
    return labels
