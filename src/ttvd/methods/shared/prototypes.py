"""An ensemble of prototype classifiers over stored supports (TAST)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.geometry.precision import full_precision

_SHORT = 1e-12  # what is shorter is divided by this, as in torch's normalize


@dataclass(frozen=True)
class PrototypeEnsemble:
    """Classifies features by the supports nearest to them, through the projections of one or more members (TAST).

    Args:
        slots: Features of the supports, (k, m, d); zeros where there is none.
        present: Which slots hold one, (k, m).
        means: Means of the supports of each class, (k, d); zeros where it has none.
        lengths: Lengths of the features, (k, m).
        project: From features (n, d) to those of e members, (e, n, p). It must be affine: then the projection of the
            mean of the supports is the mean of their projections, at a fraction of the work.
        tau: Scale of the cosine.

    Example:
        >>> slots = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> ensemble = PrototypeEnsemble.of(slots, torch.ones(2, 1, dtype=torch.bool), lambda z: z[None], tau=10.0)
        >>> ensemble.score(torch.tensor([[3.0, 0.0]])).tolist()
        [[[10.0, 0.0]]]
        >>> [round(p, 3) for p in ensemble.knn_predict(torch.tensor([[3.0, 1.0]]), neighbours=1)[1][0].tolist()]
        [1.0, 0.0]
    """

    slots: Tensor
    present: Tensor
    means: Tensor
    lengths: Tensor
    project: Callable[[Tensor], Tensor]
    tau: float

    @classmethod
    def of(
        cls, slots: Tensor, present: Tensor, project: Callable[[Tensor], Tensor], tau: float
    ) -> "PrototypeEnsemble":
        """The ensemble of supports; their means and lengths are computed here."""
        means = slots.sum(1) / present.sum(1, keepdim=True).clamp_min(1)
        return cls(slots, present, means, torch.linalg.vector_norm(slots.detach(), dim=-1), project, tau)

    @full_precision
    def score(self, z: Tensor) -> Tensor:
        """Logits (e, b, k) of features: tau times the cosine with the mean of each class; 0 if that has no support."""
        centroids = self.project(self.means) * self.present.any(1)[:, None]
        logits: Tensor = self.tau * F.normalize(self.project(z), dim=-1) @ F.normalize(centroids, dim=-1).mT
        return logits

    @torch.no_grad()
    @full_precision
    def knn_predict(self, z: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """Classify samples by their nearest supports; nearness is the cosine of the features themselves.

        Args:
            z: Features (b, d).
            neighbours: How many supports vote; all of them where there are fewer.

        Returns:
            Targets (e, b, k), the mean of the neighbours' one-hot labels; and the prediction (b, k), the mean of their
            soft labels over neighbours and members.
        """
        pool = self.slots.flatten(0, 1)
        # Divided afterwards: normalising the pool would copy all that is stored.
        likeness = F.normalize(z, dim=1) @ pool.T / self.lengths.flatten().clamp_min(_SHORT)
        likeness = likeness.masked_fill(~self.present.flatten(), float("-inf"))
        best, index = likeness.topk(min(neighbours, len(pool)), dim=1)
        found = best.isfinite()
        share = (found / found.sum(1, keepdim=True).clamp_min(1))[..., None].to(z.dtype)  # (b, n, 1)
        logits = self.score(pool[index].flatten(0, 1)).unflatten(1, index.shape)  # (e, b, n, k)
        hard = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        return (hard * share).sum(2), (logits.softmax(-1) * share).sum(2).mean(0)


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """KL(targets || softmax(logits)) of (e, b, k), summed over members, averaged over samples and classes alike.

    The mean over classes is what the code of TAST's authors has (torch's default); it divides the gradient by k.
    """
    size = logits.shape[-2] * logits.shape[-1]
    return F.kl_div(logits.log_softmax(-1), targets, reduction="sum") / size
