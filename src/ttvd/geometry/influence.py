"""Influence of clusters of sites on points: Voronoi, power and cluster-induced diagrams in one formula.

The influence of class k on a point is F_k = -sign(γ) Σ_a q_a^γ over the sites a of its cluster, and -Σ_a log q_a
for γ = 0, whose ordering is the limit of the others. q is the distance d in a Voronoi diagram (VD, CIVD) and the
shifted power distance d² - v² + shift in a power diagram (PD, CIPD), where the shift makes fractional powers
defined. A q below its floor is raised to the floor and has no gradient (see `ttvd.geometry.floor`;
`floored_fraction` measures how often). q^γ is exp(γ log q) with an exponent that is limited where the sum over sites
or its gradient would overflow, so F is finite for every γ.

There are two forms. The *point* form compares one z with all sites of a cluster (a partition of space). The *view*
form compares the a-th view of a sample with the a-th site of each cluster only. *Scores* are influences that stay
precise for γ near 0. All functions are differentiable, compute in float32 or better, and do not synchronise with the
device.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from ttvd.geometry.diagram import Diagram, pair_squares
from ttvd.geometry.distance import check_points, common_dtype, floor
from ttvd.geometry.precision import upcast

# Margin for the factors that multiply the gradient with respect to q on its way to z.
GRADIENT_ROOM = 1e8


def point_influence(z: Tensor, diagram: Diagram, gamma: float, shift: float | None = None) -> Tensor:
    """Return the influence of every cluster on one point: the paper's definition of CIVD and CIPD.

    Args:
        z: Points (b, d).
        diagram: Diagram with weights for power distances, and with groups for clusters of more than one site.
        gamma: Exponent of q.
        shift: Constant added to d² - v² if there are weights; the largest weight unless given, which is the smallest
            shift for which no q is negative anywhere. A Voronoi diagram does not use it.

    Returns:
        Influences (b, k); the class with the largest influence owns the point.

    Example:
        >>> diagram = Diagram(torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]]), groups=torch.tensor([0, 0, 1]))
        >>> point_influence(torch.zeros(1, 2), diagram, gamma=1.0).round(decimals=3)
        tensor([[-15.,  -1.]])
    """
    return _sum_sites(_weigh(_point_squares(z, diagram, shift), diagram, gamma), diagram)


def view_influence(z: Tensor, diagram: Diagram, gamma: float, shift: float | None = None) -> Tensor:
    """Return the influence of every cluster on a sample whose a-th view is compared with a-th sites only.

    Args:
        z: Features (v, b, d) of the views.
        diagram: Class-major diagram with v sites per class: site class * v + a belongs to view a.
        gamma: Exponent of q.
        shift: Shift of power distances, as in `point_influence`.

    Returns:
        Influences (b, k).

    Example:
        >>> diagram = Diagram.from_means(torch.tensor([[[3.0, 4.0], [6.0, 8.0]], [[0.0, 1.0], [0.0, 2.0]]]))
        >>> view_influence(torch.zeros(2, 1, 2), diagram, gamma=1.0).round(decimals=3)
        tensor([[-15.,  -3.]])
    """
    return _weigh(_view_squares(z, diagram, shift), diagram, gamma).sum(0)


def point_scores(z: Tensor, diagram: Diagram, gamma: float, shift: float | None = None) -> Tensor:
    """Return `point_influence` plus the constant sign(γ) n without cancellation; n is the size of a cluster.

    Cells and softmax equal those of the influence, but -sign(γ) Σ (q^γ - 1) stays precise if γ is small. Clusters of
    different sizes would need different constants; for them, and for γ = 0, the result is the influence. Arguments and
    shapes are those of `point_influence`.

    Example:
        >>> diagram = Diagram(torch.tensor([[1.0], [math.e]]))
        >>> (point_scores(torch.zeros(1, 1), diagram, gamma=1e-8) / 1e-8).round(decimals=3)
        tensor([[ 0., -1.]])
    """
    squares = _point_squares(z, diagram, shift)
    return _sum_sites(_weigh(squares, diagram, gamma, less_one=diagram.equal_clusters), diagram)


def view_scores(z: Tensor, diagram: Diagram, gamma: float, shift: float | None = None) -> Tensor:
    """Return `view_influence` plus the constant sign(γ) v, without cancellation (see `point_scores`).

    Arguments and shapes are those of `view_influence`.

    Example:
        >>> diagram = Diagram.from_means(torch.tensor([[[1.0], [-1.0]], [[2.0], [-2.0]]]))
        >>> view_scores(torch.zeros(2, 1, 1), diagram, gamma=1.0).round(decimals=3)
        tensor([[ 0., -2.]])
    """
    return _weigh(_view_squares(z, diagram, shift), diagram, gamma, less_one=True).sum(0)


def floored_fraction(z: Tensor, diagram: Diagram, shift: float | None = None) -> Tensor:
    """Return the fraction of all q that are raised to the floor, as a scalar tensor.

    Args:
        z: Points (b, d), or features of views (v, b, d).
        diagram: Diagram, as in `point_influence` or `view_influence`.
        shift: Shift of power distances, as in `point_influence`.

    Example:
        >>> floored_fraction(torch.tensor([[0.0, 1.0]]), Diagram(torch.eye(2)), None)
        tensor(0.5000)
    """
    squares = _squares(z, diagram, shift)
    raised = squares.detach() < floor(diagram, squares.dtype)
    return raised.sum(dtype=squares.dtype) / max(raised.numel(), 1)


def soft_labels(influence: Tensor, tau: float = 1.0) -> Tensor:
    """Return softmax(influence / tau) over the last dimension, in float32 or better.

    Args:
        influence: Influences, scores or negative distances (b, k).
        tau: Temperature, positive.

    Example:
        >>> soft_labels(torch.tensor([[0.0, 2.0]]), tau=1e-3)
        tensor([[0., 1.]])
    """
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau must be a positive number, got {tau}")
    influence = upcast(influence)
    # Subtracting the maximum first keeps large influences finite under a small temperature.
    return ((influence - influence.detach().amax(-1, keepdim=True)) / tau).softmax(-1)


def assign(z: Tensor, diagram: Diagram, gamma: float = 1.0, shift: float | None = None) -> Tensor:
    """Return the class of the cell that each point lies in.

    Without groups, it is the class of the smallest (power) distance, whatever γ and shift are. With groups, it is
    the class of the largest score.

    Args:
        z: Points (b, d) for the point form, features (v, b, d) for the view form.
        diagram: Diagram, as in `point_influence` or `view_influence`.
        gamma: Exponent of q.
        shift: Shift of power distances, as in `point_influence`.

    Returns:
        Classes (b,), int64.

    Example:
        >>> assign(torch.tensor([[0.4], [0.6]]), Diagram(torch.tensor([[0.0], [1.0]])))
        tensor([0, 1])
    """
    if diagram.groups is None:
        squares = _squares(z, diagram, shift=0.0)
        return (squares if z.ndim == 2 else squares.sum(0)).argmin(-1)
    scores = view_scores if z.ndim == 3 else point_scores
    return scores(z, diagram, gamma, shift).argmax(-1)


def agreement(*labels: Tensor) -> Tensor:
    """Return where all label vectors name the same class.

    Args:
        *labels: One vector (b,) per diagram, all on one device. A single vector agrees with itself everywhere.

    Returns:
        Mask (b,), bool.

    Example:
        >>> agreement(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2]))
        tensor([ True, False, False])
    """
    if not labels:
        raise ValueError("agreement needs at least one vector of labels, got none")
    first = labels[0]
    for other in labels:
        if other.ndim != 1 or other.shape != first.shape or other.device != first.device:
            described = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in labels)
            raise ValueError(f"labels must be vectors (b,) of one length on one device, got {described}")
    same = [other == first for other in labels[1:]] or [torch.ones_like(first, dtype=torch.bool)]
    return reduce(torch.logical_and, same)


def kept_fraction(mask: Tensor) -> Tensor:
    """Return the fraction of samples that a mask keeps, as a float32 scalar tensor (0 for an empty batch).

    Example:
        >>> kept_fraction(torch.tensor([True, False, True, True]))
        tensor(0.7500)
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}")
    return mask.sum(dtype=torch.float32) / max(mask.numel(), 1)


def _squares(z: Tensor, diagram: Diagram, shift: float | None) -> Tensor:
    return _view_squares(z, diagram, shift) if z.ndim == 3 else _point_squares(z, diagram, shift)


def _point_squares(z: Tensor, diagram: Diagram, shift: float | None) -> Tensor:
    """Return d², or d² - v² + shift if there are weights, of points to all sites: (b, s), not floored."""
    check_points(z, diagram.sites, ndim=2)
    squares = pair_squares(z, diagram.centred(common_dtype(z, diagram.sites)))
    return squares if diagram.weights is None else squares + _lift(diagram.weights, shift)


def _view_squares(z: Tensor, diagram: Diagram, shift: float | None) -> Tensor:
    """Return d², or d² - v² + shift if there are weights, of views to their own sites: (v, b, k), not floored."""
    check_points(z, diagram.sites, ndim=3)
    if z.shape[0] != diagram.views:
        raise ValueError(f"z holds {z.shape[0]} views but every class has {diagram.views} sites")
    centred = diagram.centred(common_dtype(z, diagram.sites))
    squares = pair_squares(z, centred.by_view(diagram.views))
    if diagram.weights is None:
        return squares
    lift: Tensor = _lift(diagram.weights, shift).unflatten(0, (-1, diagram.views))
    return squares + lift.mT.unsqueeze(1)


def _lift(weights: Tensor, shift: float | None) -> Tensor:
    weights = upcast(weights)
    if shift is None:
        return weights.max() - weights
    if not math.isfinite(shift):
        raise ValueError(f"shift must be a finite number or None, got {shift}")
    return shift - weights


def _weigh(squares: Tensor, diagram: Diagram, gamma: float, less_one: bool = False) -> Tensor:
    """Return -sign(γ) q^γ of every site, or -sign(γ) (q^γ - 1) with less_one, or -log q if γ = 0."""
    if not math.isfinite(gamma):
        raise ValueError(f"gamma must be a finite number, got {gamma}")
    squares = squares.clamp(min=floor(diagram, squares.dtype))
    power = gamma / 2 if diagram.weights is None else gamma
    if power == 1:  # the aggregation of logits; a logarithm would cost digits
        return 1 - squares if less_one else -squares
    log_squares = squares.log()
    if power == 0:
        return -log_squares / 2 if diagram.weights is None else -log_squares
    exponent = (power * log_squares).clamp(max=_largest_exponent(power, diagram.num_sites, squares.dtype))
    return -math.copysign(1, power) * (exponent.expm1() if less_one else exponent.exp())


def _largest_exponent(power: float, terms: int, dtype: torch.dtype) -> float:
    """Return the exponent up to which a sum of terms q^power and its gradient are finite numbers."""
    room = math.log(torch.finfo(dtype).max) - math.log(terms * (1 + abs(power)))
    if power > 0:
        return room
    # A negative power is large where q is small, and its derivative is larger by 1 / q = exp(exponent / |power|).
    return (room - math.log(GRADIENT_ROOM)) / (1 + 1 / abs(power))


def _sum_sites(terms: Tensor, diagram: Diagram) -> Tensor:
    """Sum (b, s) over the sites of every class: (b, k)."""
    if diagram.groups is None:
        return terms
    if diagram.class_major:
        return terms.reshape(-1, diagram.num_classes, diagram.views).sum(-1)
    return terms.new_zeros(terms.shape[0], diagram.num_classes).index_add(-1, diagram.groups, terms)
