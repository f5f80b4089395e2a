"""Oracles of the geometry suite: plain Python double loops that follow the definitions word by word."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import shapely
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ttvd.geometry import Diagram


def loop_squared(z: Tensor, sites: Tensor) -> Tensor:
    """Squared Euclidean distances (b, s) in float64."""
    rows = [
        [sum((x - y) ** 2 for x, y in zip(p, q, strict=True)) for q in sites.tolist()] for p in z.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


def loop_margin(z: Tensor, sites: Tensor, weights: Tensor, labels: list[int]) -> Tensor:
    """The smallest signed distance (b,) to a bisector of the site given for each row."""
    power, apart = (
        (loop_squared(z, sites) - weights.double()).tolist(),
        loop_squared(sites, sites).sqrt().tolist(),
    )
    rows = [
        min((p[j] - p[i]) / (2 * apart[i][j]) for j in range(len(p)) if j != i)
        for p, i in zip(power, labels, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def loop_reach(z: Tensor, site: int, diagram: Diagram, shift: float | None) -> tuple[float, bool]:
    """The quantity q that is raised to gamma, and whether the floor raised it."""
    sites, info = diagram.sites.double(), torch.finfo(diagram.sites.dtype)
    spread = float((sites - sites.mean(0)).square().sum(1).mean())
    floor = info.eps * max(spread, info.tiny)
    q = sum((x - y) ** 2 for x, y in zip(z.tolist(), sites[site].tolist(), strict=True))
    if diagram.weights is None:
        return math.sqrt(max(q, floor)), q < floor
    q += (float(diagram.weights.max()) if shift is None else shift) - float(diagram.weights[site])
    return max(q, floor), q < floor


def loop_influence(
    z: Tensor, diagram: Diagram, gamma: float, shift: float | None = None, centred: bool = False
) -> Tensor:
    """F of (b, d) in point form or of (v, b, d) in view form; `centred` adds the constant of the scores."""
    groups = list(range(diagram.num_sites)) if diagram.groups is None else diagram.groups.tolist()
    out = torch.zeros(z.shape[-2], diagram.num_classes, dtype=torch.float64)
    sign = math.copysign(1.0, gamma)
    for row in range(z.shape[-2]):
        for site, label in enumerate(groups):
            q, _ = loop_reach(z[row] if z.ndim == 2 else z[site % len(z), row], site, diagram, shift)
            if gamma == 0:
                out[row, label] -= math.log(q)
            else:
                out[row, label] -= sign * (math.expm1(gamma * math.log(q)) if centred else q**gamma)
    return out


def loop_floored(z: Tensor, diagram: Diagram, shift: float | None) -> float:
    """Share of the q that the floor raised; (v, b, d) meets only the site of its own view."""
    flags = [
        loop_reach(point, site, diagram, shift)[1]
        for site in range(diagram.num_sites)
        for point in (z if z.ndim == 2 else z[site % len(z)])
    ]
    return sum(flags) / len(flags)


def clip_cell(diagram: Diagram, site: int, box: tuple[float, float, float, float]) -> shapely.Polygon:
    """The cell of one site: the box cut with a huge square on the near side of every bisector."""
    sites = diagram.sites.numpy()
    weights = np.zeros(len(sites)) if diagram.weights is None else diagram.weights.numpy()
    cell = shapely.box(*box)
    for other in range(len(sites)):
        if other != site:
            across = sites[other] - sites[site]
            gap = np.hypot(*across)
            normal = across / gap
            along = 1e3 * np.array([-normal[1], normal[0]])
            foot = sites[site] + normal * (gap / 2 + (weights[site] - weights[other]) / (2 * gap))
            ends = [foot - along, foot + along]
            cell &= shapely.Polygon([*ends, ends[1] - 2e3 * normal, ends[0] - 2e3 * normal])
    return cell


class Watch(TorchDispatchMode):
    """Remembers which operations ran and the largest storage that any of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and write down its name and the bytes behind its results."""
        out = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name.removeprefix("aten::"))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def run_watched(work: Callable[[], object]) -> tuple[int, set[str]]:
    """Bytes of the largest tensor that `work` made, and the names of the operations that it used."""
    with Watch() as watch:
        work()
    return watch.largest, watch.names


@pytest.fixture(scope="session")
def naive_squared() -> Callable[..., Tensor]:
    return loop_squared


@pytest.fixture(scope="session")
def naive_margin() -> Callable[..., Tensor]:
    return loop_margin


@pytest.fixture(scope="session")
def naive_influence() -> Callable[..., Tensor]:
    return loop_influence


@pytest.fixture(scope="session")
def naive_floored() -> Callable[..., float]:
    return loop_floored


@pytest.fixture(scope="session")
def naive_cell() -> Callable[..., shapely.Polygon]:
    return clip_cell


@pytest.fixture(scope="session")
def watched() -> Callable[[Callable[[], object]], tuple[int, set[str]]]:
    return run_watched
