"""Tells when the source should answer in place of the adapter: it is much surer, and near its sites."""

from typing import NamedTuple

import torch
from torch import Tensor

from ttvd.geometry.distance import squared_distances
from ttvd.geometry.precision import upcast
from ttvd.methods.shared.losses import all_finite, entropy
from ttvd.nn.norms import TracksStream

WINDOW = 64
"""Images that the averages are taken from; a larger batch fills the window alone."""
LEAST, MOST = 1.4, 1.6
"""Ratio of the entropies up to which the adapter answers, and from which on the source does."""
NEAR, FAR = 0.4, 0.5
"""Way of the features from their sites, as a share of the way to the next site: the source is trusted, and is not."""
FLOOR = 0.02
"""Entropy of the source, as a share of ln k, below which it counts as no surer."""


class SourceAverages(NamedTuple):
    """Averages over the last images of how sure adapter and source are, and of where the source's features lie.

    Attributes:
        entropies: Mean entropy of the answers of the adapter and of the source, (2,).
        offset: Mean of the source's features minus the sites of the predicted classes, (d,).
        reach: Mean distance of these sites to the next site.
        images: Number of images from which this is known.
    """

    entropies: Tensor
    offset: Tensor
    reach: Tensor
    images: Tensor


class SourceCheck(TracksStream):
    """Compares the answers of the adapter with those of the source for the same images.

    Statistics of the stream remove what all images of a batch have in common. In a batch of one class, that is the
    class: the features lie between the cells then, and the answers become unsure. The source is as sure of a batch of
    one class as of any other. So an adapter whose entropy is far above that of the source has lost what the source can
    still see.

    A source can also be sure and wrong, because a shift has moved all of its features into one cell. Then they do not
    lie around the site of that cell: their mean is far from it. Within a class, features spread to all sides, and the
    mean of a batch lies near the site, however far the single ones are. The source is trusted while this offset is less
    than half of the way to the next site, where the wall is.

    Args:
        sites: Class means (k, d) of the source's features, of two or more classes.
        like: A tensor with the device and the data type of the state.

    Example:
        >>> sites = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
        >>> check = SourceCheck(sites, torch.zeros(()))
        >>> sure, unsure, z = torch.tensor([[4.0, 0.0]]), torch.tensor([[0.5, 0.0]]), sites[:1]
        >>> [check.hold(check.look(unsure, sure, features)).item() for features in (z, z - 3.0)]
        [1.0, 0.0]
        >>> check.hold(check.look(sure, unsure, z)).item()
        0.0
    """

    entropies: Tensor
    offset: Tensor
    reach: Tensor
    images: Tensor
    sites: Tensor
    ways: Tensor

    def __init__(self, sites: Tensor, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        known = sites.detach().to(like.device, dtype)
        self.register_buffer("sites", known, persistent=False)
        self.register_buffer("ways", _find_ways(known), persistent=False)
        self.floor = FLOOR * float(torch.tensor(float(len(known))).log())
        for name, shape in (("entropies", (2,)), ("offset", known.shape[1:]), ("reach", ()), ("images", ())):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=like.device))

    def averages(self) -> SourceAverages:
        """What is stored; not copies."""
        return SourceAverages(self.entropies, self.offset, self.reach, self.images)

    @torch.no_grad()
    def look(self, adapted: Tensor, source: Tensor, features: Tensor) -> SourceAverages:
        """The averages with a batch, or those that are stored if it is among them. Nothing is stored.

        Args:
            adapted: Scores (b, k) of the adapter.
            source: Scores (b, k) of the source.
            features: Features (b, d) of the source.
        """
        if self.settled:
            return self.averages()
        kept, size = self.images.clamp_max(max(0, WINDOW - len(source))), len(source)
        share, dtype = size / (kept + size), self.offset.dtype
        entropies = torch.stack([entropy(upcast(scores)).mean() for scores in (adapted, source)]).to(dtype)
        classes = source.argmax(1)
        return SourceAverages(
            torch.lerp(self.entropies, entropies, share),
            torch.lerp(self.offset, (features.to(dtype) - self.sites[classes]).mean(0), share),
            torch.lerp(self.reach, self.ways[classes].mean(), share),
            kept + size,
        )

    @torch.no_grad()
    def hold(self, found: SourceAverages) -> Tensor:
        """How much the source answers in place of the adapter, a scalar from 0 to 1."""
        adapted, source = found.entropies.unbind()
        lost = (adapted / source.clamp_min(self.floor) - LEAST) / (MOST - LEAST)
        way = found.offset.norm() / found.reach.clamp_min(torch.finfo(found.reach.dtype).tiny)
        trusted: Tensor = (FAR - way) / (FAR - NEAR)
        return lost.clamp(0.0, 1.0) * trusted.clamp(0.0, 1.0)

    @torch.no_grad()
    def update(self, found: SourceAverages) -> None:
        """Store what :meth:`look` found, inside ``following_stream`` and not inside ``settled_stream``."""
        if not self.following or self.settled:
            return
        fine = all_finite(torch.cat([part.flatten() for part in found]))
        for old, new in zip(self.averages(), found, strict=True):
            old.copy_(torch.where(fine, new, old))


def _find_ways(sites: Tensor) -> Tensor:
    """Return the distance of each site to the next one, (k,); a thousand at a time, for sets of many classes."""
    ways = []
    for rows in torch.arange(len(sites), device=sites.device).split(1024):
        squares = squared_distances(sites[rows], sites)
        squares[torch.arange(len(rows)), rows] = torch.inf
        ways.append(squares.amin(1).sqrt())
    return torch.cat(ways)
