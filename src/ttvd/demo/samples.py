"""The sample analysis: a digit that one view gets wrong and four views get right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ttvd.adapters import create
from ttvd.demo.figures import GAMMA, VIEWS, Floats, trace
from ttvd.demo.job import Domain, stream
from ttvd.geometry import Diagram, distances, soft_labels, view_influence, view_scores
from ttvd.models.views import AggregatedViews, rotate
from ttvd.models.zoo import load


@dataclass(frozen=True, eq=False)
class SampleData:
    """A digit that one view gets wrong and four views get right.

    Attributes:
        images: (v, h, w), one for each rotation.
        distances: (v, k) from each view to the sites of its own rotation.
        influence: (k,) of the cluster-induced Voronoi diagram.
        truth: The digit.
        found: Number of digits that are corrected.
        spoilt: Number of digits for which it is the other way round.
        seen: Number of digits looked at.
    """

    images: Floats
    distances: Floats
    influence: Floats
    truth: int
    found: int
    spoilt: int
    seen: int


def find_sample(
    images: Tensor, labels: Tensor, domain: Domain, *, folder: Path | None = None, seed: int = 0
) -> SampleData | None:
    """The digit that four views correct most clearly, with batch statistics and no other adaptation.

    Args:
        images: Clean digits of the stream.
        labels: Their classes.
        domain: What happens to them.
        folder: Where the checkpoints are; those of the package unless given.
        seed: Of corruption and order.

    Returns:
        None where no digit is corrected. Of several, the one whose two margins, of the wrong class over the true one
        for one view and of the true class over all others for four, have the largest minimum, as probabilities.
    """
    source = load("digits-sla", folder)
    assert source.sites is not None
    shifted = domain.apply(images, seed)
    batches = list(stream(shifted, labels, seed))
    seen = trace(create("bn", AggregatedViews(source.model, VIEWS)), batches)
    z, truth = torch.from_numpy(seen.features), torch.from_numpy(seen.labels)
    one, four = source.sites.diagram(1), source.sites.diagram()
    single = soft_labels(-distances(z[0], one), source.sites.temperature("vd"))
    joint = soft_labels(view_scores(z, four, GAMMA), source.sites.temperature("civd", GAMMA))
    lost, won = _margin(single, truth), _margin(joint, truth)
    corrected = (lost < 0) & (won > 0)
    if not bool(corrected.any()):
        return None
    index = int(torch.where(corrected, torch.minimum(-lost, won), -1.0).argmax())
    turned = rotate(torch.cat([x for x, _ in batches])[index : index + 1], VIEWS)
    apart = [distances(z[a, index : index + 1], Diagram(four.sites[a::VIEWS]))[0] for a in range(VIEWS)]
    return SampleData(
        turned[:, 0].double().numpy(),
        torch.stack(apart).numpy(),
        view_influence(z[:, index : index + 1], four, GAMMA)[0].numpy(),
        int(truth[index]),
        int(corrected.sum()),
        int(((lost > 0) & (won < 0)).sum()),
        len(truth),
    )


def _margin(probs: Tensor, truth: Tensor) -> Tensor:
    """Probability of the true class minus the largest of the others (b,)."""
    own = probs.gather(1, truth[:, None])[:, 0]
    return own - probs.scatter(1, truth[:, None], -1.0).amax(1)
