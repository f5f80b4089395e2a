"""The sample analysis: images that one view gets wrong and all views together get right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.figures.scene import GAMMA, Batches, Options, Scene, check_count, trace
from ttvd.bench.figures.values import Array, Description, Floats, Labels, Tree
from ttvd.geometry import Diagram, distances, soft_labels, view_influence, view_scores
from ttvd.methods import create
from ttvd.nn.split import SplitModel
from ttvd.nn.views import AggregatedViews, rotate
from ttvd.zoo.sites import Sites


@dataclass(frozen=True)
class SampleOptions(Options):
    """Of the sample analysis.

    Attributes:
        count: How many images to show.
    """

    count: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("count", self.count)


@dataclass(frozen=True, eq=False)
class Samples:
    """Images that one view gets wrong and all views get right, the clearest first.

    Attributes:
        images: (m, v, c, h, w) bytes, one for each rotation.
        distances: (m, v, k) from each view to the sites of its own rotation.
        influence: (m, k) of the cluster-induced Voronoi diagram.
        truth: (m,) classes.
    """

    images: Array
    distances: Floats
    influence: Floats
    truth: Labels


@dataclass(frozen=True, eq=False)
class _Candidate:
    margin: float
    truth: int
    image: Tensor
    features: Tensor


def check_samples(scene: Scene, _: SampleOptions) -> None:
    """Raise unless margins can be compared as probabilities."""
    scene.sites.temperature("vd")
    scene.sites.temperature("civd", GAMMA)


def compute_samples(scene: Scene, options: SampleOptions) -> tuple[Description, Tree]:
    """What the figure is drawn from."""
    samples, counts = find_samples(scene.parts, scene.sites, scene.stream, options.count)
    return counts, vars(samples)


def find_samples(
    parts: SplitModel, sites: Sites, stream: Batches, count: int = 1
) -> tuple[Samples, Description]:
    """The images that all views correct most clearly, with batch statistics and no other adaptation.

    Args:
        parts: A label-augmented model.
        sites: Its sites.
        stream: Corrupted images.
        count: How many to find, each of another class; fewer where no more classes have one.

    Returns:
        The images, those first whose two margins, of the wrong class over the true one for one view and of the true
        class over all others for all views, have the largest minimum, as probabilities. And how many images were
        ``seen``, are corrected (``found``), and are got wrong by all views only (``spoilt``).
    """
    adapter = create("bn", AggregatedViews(parts, sites.views, sites.views))
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
