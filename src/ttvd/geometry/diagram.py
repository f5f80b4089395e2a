"""The diagram, which every geometric function takes: sites, their weights and their classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast


class CentredSites(NamedTuple):
    """Sites minus their mean, with what distances need of them; computed once and not for every batch.

    Attributes:
        slopes: Minus twice the centred sites (..., s, d): a squared distance is |z|² + slopes z + squares.
        squares: Squared lengths (..., s) of the centred sites.
        centre: Mean (d,) of the sites, without a gradient. It affects rounding only: cancellation is smallest near
            the mean of the sites.
        floor: Smallest value of a squared distance before a root, log or power (see `ttvd.geometry.floor`).
    """

    slopes: Tensor
    squares: Tensor
    centre: Tensor
    floor: Tensor

    def by_view(self, views: int) -> CentredSites:
        """Return the same for class-major sites (s, d) arranged as (v, k, d)."""
        slopes = self.slopes.unflatten(0, (-1, views)).transpose(0, 1)
        return self._replace(slopes=slopes, squares=self.squares.unflatten(0, (-1, views)).mT)


def centre_sites(sites: Tensor, dtype: torch.dtype | None = None) -> CentredSites:
    """Return sites (s, d) minus their mean, in float32 or better unless a dtype is given.

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
    return CentredSites(-2 * sites, squares, centre, floor)


def pair_squares(z: Tensor, centred: CentredSites) -> Tensor:
    """Return squared distances (..., b, s) of points (..., b, d) to centred sites (..., s, d), without checks."""
    dtype = centred.slopes.dtype
    with torch.autocast(z.device.type, enabled=False):
        z = z.to(dtype) - centred.centre
        norms = z.square().sum(-1, keepdim=True) + centred.squares.unsqueeze(-2)
        add_product = torch.addmm if z.ndim == 2 else torch.baddbmm
        squares = add_product(norms, z, centred.slopes.mT)
    # Rounding errors of d products grow like a random walk (Higham and Mary 2019), sqrt(d) eps / 2. None of 10,000
    # points on sites of up to 2,048 features exceeded twice that.
    noise = (1 + math.sqrt(z.shape[-1])) * torch.finfo(dtype).eps * norms.detach()
    return torch.where(squares <= noise, 0, squares)


@dataclass(frozen=True, eq=False)
class Diagram:
    """A Voronoi or power diagram; cluster-induced if it has groups.

    The tensors are neither copied nor detached, so gradients can reach the sites. The constructor checks them, which
    waits for the device; nothing that is computed from the diagram later waits.

    Attributes:
        sites: Points (s, d), floating and finite. The squares of their distances must be normal numbers of the
            dtype, which in float32 means distances between about 1e-15 and 1e17.
        weights: Squared weights v² (s,) of a power diagram. They are signed: those of a linear head or of a slice
            can be negative. None makes a Voronoi diagram, in which two equal sites are an error. In a power diagram,
            the heavier of two equal sites wins and the cell of the other is empty.
        groups: Class (s,) of each site, int64; every class from 0 to k - 1 must be present. None means that site i
            is class i.

    Example:
        >>> diagram = Diagram(torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]]))
        >>> diagram.num_sites, diagram.dim, diagram.num_classes, diagram.views
        (3, 2, 3, 1)
    """

    sites: Tensor
    weights: Tensor | None = None
    groups: Tensor | None = None
    # Read from the groups once, because reading the tensor later would wait for the device.
    _num_classes: int = field(init=False, repr=False)
    _views: int | None = field(init=False, repr=False)
    _equal_clusters: bool = field(init=False, repr=False)
    _centred: CentredSites | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_sites(self.sites)
        if self.weights is None:
            _check_distinct(self.sites)
        else:
            _check_weights(self.weights, self.sites)
        sizes = [1] * self.num_sites if self.groups is None else _count_groups(self.groups, self.sites)
        equal = len(set(sizes)) == 1
        class_major = self.groups is None or bool((self.groups.diff() >= 0).all())
        centred = centre_sites(self.sites.detach())
        _check_scale(centred, self.weights)
        # Sites that require gradients are centred again in every call, so that gradients reach them.
        object.__setattr__(self, "_centred", None if self.sites.requires_grad else centred)
        object.__setattr__(self, "_num_classes", len(sizes))
        object.__setattr__(self, "_equal_clusters", equal)
        object.__setattr__(self, "_views", sizes[0] if equal and class_major else None)

    @classmethod
    def from_means(cls, means: Tensor) -> Diagram:
        """Make the Voronoi diagram of class means, cluster-induced if every class has a mean per view.

        Args:
            means: Class means (k, d) or (k, v, d).

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
        """Make the power diagram of a linear classifier in its feature space.

        The paper's Lemma: µ = W / 2 and v² = b + |W|² / 4, so that d² - v² = |z|² - logit.

        Args:
            weight: Weight (s, d) of a `torch.nn.Linear`; pass it detached unless gradients must reach the head.
            bias: Bias (s,); None for zeros.
            views: Outputs per class of a joint head in class-major order (output = class * views + view).

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
        """Return the linear head (W, b) with the same cells: W = 2 µ and b = v² - |µ|².

        Example:
            >>> Diagram(torch.tensor([[1.0, 0.0], [0.0, 2.0]])).to_linear()
            (tensor([[2., 0.],
                    [0., 4.]]), tensor([-1., -4.]))
        """
        sites = upcast(self.sites)
        bias = -sites.square().sum(-1)
        return 2 * sites, bias if self.weights is None else bias + self.weights

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diagram:
        """Return the diagram on a device, with sites and weights in a floating dtype.

        Example:
            >>> Diagram(torch.eye(3)).to(dtype=torch.float64).sites.dtype
            torch.float64
        """
        weights = None if self.weights is None else self.weights.to(device=device, dtype=dtype)
        groups = None if self.groups is None else self.groups.to(device=device)
        return Diagram(self.sites.to(device=device, dtype=dtype), weights, groups)

    def centred(self, dtype: torch.dtype | None = None) -> CentredSites:
        """Return the sites minus their mean, in float32 or better unless a dtype is given.

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
        """Sites per class v; a ValueError unless site class * v + a is the a-th site of every class."""
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
    """Return the number of sites of every class."""
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


def _check_scale(centred: CentredSites, weights: Tensor | None) -> None:
    """Refuse sites whose squared distances overflow or underflow: their cells would be wrong without an error."""
    limits = torch.finfo(centred.squares.dtype)
    largest = centred.squares.max()
    varied = (
        torch.zeros_like(largest) if weights is None else (weights.detach().max() - weights.detach().min())
    )
    size, scale, range_ = torch.stack(
        [centred.slopes.abs().max() / 2, largest, varied.to(largest.dtype)]
    ).tolist()
    smallest = limits.tiny / limits.eps
    # Points may lie some 30 times farther from the centre than the sites.
    if not scale <= limits.max / 1024 or (size > 0 and scale < smallest and range_ < smallest):
        raise ValueError(
            f"squared distances of sites with coordinates up to {size:.3g} from their mean do not fit "
            f"{limits.dtype}; scale the sites to about 1 (and the weights by the square of that factor), or pass them "
            "in float64"
        )


def _check_distinct(sites: Tensor) -> None:
    # Sorting rows stops at the first feature that differs: 21,000 x 2,048 takes about a second on a CPU.
    # Autocast is off because torch.unique concatenates rows, which autocast cannot do in float64.
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
