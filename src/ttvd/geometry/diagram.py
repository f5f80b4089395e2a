"""The one value that every geometric function takes: sites, their weights and the classes they belong to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast


class Centred(NamedTuple):
    """Sites less their mean.

    Attributes:
        slopes: (..., s, d), minus twice the centred sites: a squared distance is |z|² + slopes z + squares.
        squares: (..., s) squared lengths of the centred sites.
        centre: (d,) mean of the sites, without a gradient. It changes rounding only: near the middle of the sites
            there is least to cancel.
        floor: The least value of a squared distance before a root, log or power (see `ttvd.geometry.floor`).
    """

    slopes: Tensor
    squares: Tensor
    centre: Tensor
    floor: Tensor

    def by_view(self, views: int) -> Centred:
        """Returns the same with class-major sites (s, d) arranged as (v, k, d)."""
        slopes = self.slopes.unflatten(0, (-1, views)).transpose(0, 1)
        return self._replace(slopes=slopes, squares=self.squares.unflatten(0, (-1, views)).mT)


def centre_sites(sites: Tensor, dtype: torch.dtype | None = None) -> Centred:
    """Returns sites (s, d) seen from their mean, in float32 or better unless a dtype is given.

    Example:
        >>> centre_sites(torch.tensor([[1.0], [3.0]])).slopes.tolist()
        [[2.0], [-2.0]]
    """
    sites = upcast(sites) if dtype is None else sites.to(dtype)
    centre = sites.detach().mean(0)
    sites = sites - centre
    squares = sites.square().sum(-1)
    limits = torch.finfo(sites.dtype)
    floor = (limits.eps * squares.detach().mean()).clamp(min=limits.tiny)
    return Centred(-2 * sites, squares, centre, floor)


def pair_squares(z: Tensor, centred: Centred) -> Tensor:
    """Returns squared distances (..., b, s) of points (..., b, d) to centred sites (..., s, d), without checks."""
    dtype = centred.slopes.dtype
    with torch.autocast(z.device.type, enabled=False):
        z = z.to(dtype) - centred.centre
        norms = z.square().sum(-1, keepdim=True) + centred.squares.unsqueeze(-2)
        add_product = torch.addmm if z.ndim == 2 else torch.baddbmm
        squares = add_product(norms, z, centred.slopes.mT)
    # Rounding errors of d products add up like a random walk (Higham and Mary 2019), sqrt(d) eps / 2; twice that
    # was not exceeded by any of 10,000 points on sites of up to 2,048 features.
    noise = (1 + math.sqrt(z.shape[-1])) * torch.finfo(dtype).eps * norms.detach()
    return torch.where(squares <= noise, 0, squares)


@dataclass(frozen=True, eq=False)
class Diagram:
    """A Voronoi or power diagram, cluster-induced when it has groups.

    The tensors are kept as they are given (not copied, not detached), so that gradients can reach the sites.
    Checking them waits for the device once; nothing that is computed from a finished diagram does.

    Attributes:
        sites: (s, d) points, floating and finite.
        weights: (s,) squared weights v² of a power diagram. They are signed: those of a linear head or of a
            slice can be negative. None makes a Voronoi diagram, in which two equal sites are an error; in a
            power diagram the heavier of two equal sites wins and the cell of the other is empty.
        groups: (s,) class of each site as int64, every class from 0 to k - 1 present. None: site i is class i.

    Example:
        >>> diagram = Diagram(torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]]))
        >>> diagram.num_sites, diagram.dim, diagram.num_classes, diagram.views
        (3, 2, 3, 1)
    """

    sites: Tensor
    weights: Tensor | None = None
    groups: Tensor | None = None
    # Read from the groups once: asking the tensor again later would wait for the device.
    _num_classes: int = field(init=False, repr=False)
    _views: int | None = field(init=False, repr=False)
    _equal_clusters: bool = field(init=False, repr=False)
    _centred: Centred | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_sites(self.sites)
        if self.weights is None:
            _check_distinct(self.sites)
        else:
            _check_weights(self.weights, self.sites)
        sizes = [1] * self.num_sites if self.groups is None else _count_groups(self.groups, self.sites)
        equal = len(set(sizes)) == 1
        class_major = self.groups is None or bool((self.groups.diff() >= 0).all())
        # Sites that learn are looked at anew each time, so that gradients reach them.
        object.__setattr__(self, "_centred", None if self.sites.requires_grad else centre_sites(self.sites))
        object.__setattr__(self, "_num_classes", len(sizes))
        object.__setattr__(self, "_equal_clusters", equal)
        object.__setattr__(self, "_views", sizes[0] if equal and class_major else None)

    @classmethod
    def from_means(cls, means: Tensor) -> Diagram:
        """Makes the Voronoi diagram of class means, cluster-induced if every class has a mean per view.

        Args:
            means: (k, d) or (k, v, d).

        Example:
            >>> Diagram.from_means(torch.arange(12.0).reshape(2, 3, 2)).groups
            tensor([0, 0, 0, 1, 1, 1])
        """
        got = _describe(means, "means")
        if means.ndim not in (2, 3):
            raise ValueError(f"means must be a tensor (k, d) or (k, v, d), got {got}")
        if means.ndim == 2:
            return cls(means)
        num_classes, views, dim = means.shape
        return cls(means.reshape(-1, dim), groups=_class_major(num_classes, views, means.device))

    @classmethod
    def from_linear(cls, weight: Tensor, bias: Tensor | None = None, views: int = 1) -> Diagram:
        """Makes the power diagram that a linear classifier draws in its feature space.

        The paper's Lemma: µ = W / 2 and v² = b + |W|² / 4, so that d² - v² = |z|² - logit.

        Args:
            weight: (s, d) as in `torch.nn.Linear`; pass it detached unless gradients shall reach the head.
            bias: (s,), or None for zeros.
            views: outputs per class of a joint head in class-major order (output = class * views + view).

        Example:
            >>> diagram = Diagram.from_linear(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([1.0, 0.0]))
            >>> diagram.sites.tolist(), diagram.weights.tolist()
            ([[1.0, 0.0], [0.0, 2.0]], [2.0, 4.0])
        """
        _check_sites(weight, "weight")
        if bias is not None:
            _check_weights(bias, weight, "bias")
        if views < 1 or weight.shape[0] % views:
            raise ValueError(f"views must divide the {weight.shape[0]} rows of weight, got views={views}")
        sites = upcast(weight) / 2
        weights = sites.square().sum(-1)
        weights = weights if bias is None else weights + bias
        groups = _class_major(weight.shape[0] // views, views, weight.device) if views > 1 else None
        return cls(sites, weights, groups)

    def to_linear(self) -> tuple[Tensor, Tensor]:
        """Returns the linear head (W, b) with the same cells: W = 2 µ and b = v² - |µ|².

        Example:
            >>> Diagram(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).to_linear()
            (tensor([[2., 0.],
                    [0., 4.]]), tensor([-1., -4.]))
        """
        sites = upcast(self.sites)
        bias = -sites.square().sum(-1)
        return 2 * sites, bias if self.weights is None else bias + self.weights

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diagram:
        """Returns the diagram on a device, with sites and weights in a floating dtype.

        Example:
            >>> Diagram(torch.eye(3)).to(dtype=torch.float64).sites.dtype
            torch.float64
        """
        weights = None if self.weights is None else self.weights.to(device=device, dtype=dtype)
        groups = None if self.groups is None else self.groups.to(device=device)
        return Diagram(self.sites.to(device=device, dtype=dtype), weights, groups)

    def centred(self, dtype: torch.dtype | None = None) -> Centred:
        """Returns the sites seen from their mean; in float32 or better, or in a dtype.

        Example:
            >>> Diagram(torch.tensor([[1.0], [3.0]])).centred().centre
            tensor([2.])
        """
        known = self._centred
        if known is not None and dtype in (None, known.slopes.dtype):
            return known
        return centre_sites(self.sites, dtype)

    @property
    def num_sites(self) -> int:
        """Number of sites s."""
        return self.sites.shape[0]

    @property
    def dim(self) -> int:
        """Number of features d."""
        return self.sites.shape[1]

    @property
    def num_classes(self) -> int:
        """Number of classes k."""
        return self._num_classes

    @property
    def equal_clusters(self) -> bool:
        """Whether every class has the same number of sites."""
        return self._equal_clusters

    @property
    def class_major(self) -> bool:
        """Whether every class has the same number of sites and they lie one class after the other."""
        return self._views is not None

    @property
    def views(self) -> int:
        """Sites per class v; an error unless site class * v + a is the a-th site of every class."""
        if self._views is None:
            raise ValueError(
                "views needs the same number of sites in every class and class-major order "
                "(groups 0, 0, ..., 1, 1, ...); sort the sites by class, or use the point functions"
            )
        return self._views


def _class_major(num_classes: int, views: int, device: torch.device) -> Tensor:
    return torch.arange(num_classes, device=device).repeat_interleave(views)


def _describe(value: object, name: str) -> str:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}")
    return f"shape {tuple(value.shape)}, {value.dtype}, on {value.device}"


def _check_finite(values: Tensor, name: str) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity; check what they were computed from")


def _check_sites(sites: Tensor, name: str = "sites") -> None:
    got = _describe(sites, name)
    if sites.ndim != 2 or 0 in sites.shape or not sites.is_floating_point():
        raise ValueError(f"{name} must be a floating tensor (s, d) with s, d >= 1, got {got}")
    _check_finite(sites, name)


def _check_weights(weights: Tensor, sites: Tensor, name: str = "weights") -> None:
    got, expected = _describe(weights, name), f"floating tensor ({sites.shape[0]},) on {sites.device}"
    if weights.shape != sites.shape[:1] or weights.device != sites.device or not weights.is_floating_point():
        raise ValueError(f"{name} must be a {expected}, one value per site, got {got}")
    _check_finite(weights, name)


def _count_groups(groups: Tensor, sites: Tensor) -> list[int]:
    """Returns the number of sites of every class."""
    got, expected = _describe(groups, "groups"), f"int64 tensor ({sites.shape[0]},) on {sites.device}"
    if groups.shape != sites.shape[:1] or groups.device != sites.device or groups.dtype != torch.int64:
        raise ValueError(f"groups must be an {expected}, the class of each site, got {got}")
    found, counts = torch.unique(groups, return_counts=True)
    sizes: list[int] = counts.tolist()
    if found.tolist() != list(range(len(sizes))):
        raise ValueError(
            f"groups must name every class from 0 to k - 1, got {len(sizes)} classes from {int(found[0])} to "
            f"{int(found[-1])}; renumber them without gaps"
        )
    return sizes


def _check_distinct(sites: Tensor) -> None:
    # Sorting rows stops at the first differing feature: 21,000 x 2,048 takes about a second on a CPU.
    # Autocast is off because it cannot concatenate float64, which is how torch puts the rows together again.
    with torch.autocast(sites.device.type, enabled=False):
        _, row, counts = torch.unique(sites.detach(), dim=0, return_inverse=True, return_counts=True)
    if counts.numel() == sites.shape[0]:
        return
    first = int((counts[row] > 1).nonzero()[0])
    second = int((row == row[first]).nonzero()[1])
    raise ValueError(
        f"sites {first} and {second} are equal, so their Voronoi cells are undefined; "
        "drop one of them, or give weights (in a power diagram the heavier one wins)"
    )
