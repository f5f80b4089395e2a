"""The sample analysis: images that one view gets wrong and all views together get right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.figures.paper import SAMPLES, STATISTICS, FigureMethod
from ttvd.bench.figures.scene import (
    GAMMA,
    Array,
    Batches,
    Description,
    FigureOptions,
    Floats,
    Labels,
    Scene,
    Tree,
    build_adapter,
    check_count,
    trace,
)
from ttvd.geometry import Diagram, distances, soft_labels, view_influence, view_scores
from ttvd.nn.split import SplitModel
from ttvd.nn.views import rotate
from ttvd.zoo.sites import Sites


@dataclass(frozen=True)
class SampleOptions(FigureOptions):
    """Options of the sample analysis.

    Attributes:
        count: Number of images to show.
    """

    count: int = 1
    defaults = SAMPLES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("count", self.count)


@dataclass(frozen=True, eq=False)
class Samples:
    """Images that one view gets wrong and all views get right, the clearest first.

    Attributes:
        images: (m, v, c, h, w) bytes, one picture for each rotation.
        distances: (m, v, k) distances from each view to the sites of its own rotation.
        influence: (m, k) influences of the cluster-induced Voronoi diagram.
        truth: (m,) true classes.
    """

    images: Array
    distances: Floats
    influence: Floats
    truth: Labels

    def to_arrays(self) -> Tree:
        """Return the values as named arrays."""
        return dict(vars(self))

    @classmethod
    def from_arrays(cls, tree: Mapping[str, Any]) -> Samples:
        """Return the values that :meth:`to_arrays` was called on."""
        return cls(tree["images"], tree["distances"], tree["influence"], tree["truth"])


@dataclass(frozen=True, eq=False)
class _Candidate:
    margin: float
    truth: int
    image: Tensor
    features: Tensor


def check(scene: Scene, _: SampleOptions) -> None:
    """Raise unless the sites have the temperatures with which margins become probabilities."""
    scene.sites.temperature("vd")
    scene.sites.temperature("civd", GAMMA)


def compute(scene: Scene, options: SampleOptions) -> tuple[Samples, Description]:
    """Compute the values that the figure is drawn from, and facts about them."""
    method = options.figure_methods()[STATISTICS]
    return find_samples(scene.parts, scene.sites, scene.stream, options.count, method)


def find_samples(
    parts: SplitModel,
    sites: Sites,
    stream: Batches,
    count: int = 1,
    method: FigureMethod = SAMPLES[STATISTICS],
) -> tuple[Samples, Description]:
    """Find the images that all views together correct most clearly.

    Two margins of probabilities decide: that of the wrong class over the true one for the upright view, and that of
    the true class over all others for all views. The images with the largest minimum of the two come first.

    Args:
        parts: A label-augmented model.
        sites: Sites of the model.
        stream: Corrupted images.
        count: Number of images to find, each of another class; there may be fewer.
        method: Method that makes the features: batch statistics and no other adaptation.

    Returns:
        The images, and the number of images that were ``seen``, that all views correct (``found``), and that only all
        views get wrong (``spoilt``).
    """
    adapter = build_adapter(method, parts, sites)
    best: dict[int, _Candidate] = {}
    found = spoilt = seen = 0
    for x, y in stream:
        z = torch.from_numpy(trace(adapter, [(x, y)]).features)
        lost, won = _judge(z, y, sites)
        corrected = (lost < 0) & (won > 0)
        seen, found, spoilt = (
            seen + len(y),
            found + int(corrected.sum()),
            spoilt + int(((lost > 0) & (won < 0)).sum()),
        )
        for place in corrected.nonzero()[:, 0].tolist():
            margin, truth = float(torch.minimum(-lost, won)[place]), int(y[place])
            if truth not in best or best[truth].margin < margin:
                best[truth] = _Candidate(margin, truth, x[place].cpu(), z[:, place])
    chosen = nlargest(count, best.values(), key=lambda candidate: candidate.margin)
    return _measure(chosen, sites), {"gamma": GAMMA, "seen": seen, "found": found, "spoilt": spoilt}


def _judge(z: Tensor, truth: Tensor, sites: Sites) -> tuple[Tensor, Tensor]:
    """Margins (b,) of the true class for the upright view, and for all views together."""
    single = soft_labels(-distances(z[0], sites.diagram(1)), sites.temperature("vd"))
    joint = soft_labels(view_scores(z, sites.diagram(), GAMMA), sites.temperature("civd", GAMMA))
    return _margin(single, truth), _margin(joint, truth)


def _margin(probs: Tensor, truth: Tensor) -> Tensor:
    """Probability of the true class minus the largest of the others (b,)."""
    own = probs.gather(1, truth[:, None])[:, 0]
    return own - probs.scatter(1, truth[:, None], -1.0).amax(1)


def _measure(chosen: Sequence[_Candidate], sites: Sites) -> Samples:
    if not chosen:
        nothing = np.empty((0, sites.views, sites.num_classes))
        return Samples(
            np.empty((0, sites.views, 1, 1, 1), np.uint8), nothing, nothing[:, 0], np.empty(0, np.int64)
        )
    z, joint = torch.stack([candidate.features for candidate in chosen], 1), sites.diagram()
    apart = [distances(z[view], Diagram(joint.sites[view :: sites.views])) for view in range(sites.views)]
    turned = torch.stack([rotate(candidate.image[None], sites.views) for candidate in chosen])
    return Samples(
        (255 * turned).round().to(torch.uint8).numpy(),
        torch.stack(apart, 1).double().numpy(),
        view_influence(z, joint, GAMMA).double().numpy(),
        np.array([candidate.truth for candidate in chosen], dtype=np.int64),
    )
