"""LAME: the predictions of a batch, corrected so that neighbours agree."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import full_precision
from ttvd.methods.adapter import Adapter
from ttvd.methods.registry import register
from ttvd.nn.norms import Statistics
from ttvd.nn.split import SplitModel, split

Affinity = Literal["knn", "rbf", "linear"]


@register(
    "lame",
    summary="Changes no weight: pulls the predictions of a batch towards those of their neighbours.",
    paper="Boudiaf et al., CVPR 2022",
    updates="nothing",
    forwards=1,
    backwards=0,
)
class LAME(Adapter):
    """Laplacian adjusted maximum-likelihood estimation.

    Finds the probabilities Y of a batch that stay near the model's p and agree between similar features, by iterating

        Y <- softmax(log p + W Y)

    until the energy sum(Y log Y - Y log p - Y (W Y')) is still, Y' the iterate before. Made for streams whose classes
    come in runs; on a shuffled stream it can hurt. Works with every norm; batch norms use the source statistics.
    Nothing is stored between batches, and the samples of a batch are classified together. The output is log Y.

    Affinities W of features normalised to length 1: ``"knn"`` is 1 for the ``neighbours`` nearest others; ``"rbf"``
    is exp(-d^2 / 2 s^2) with s the mean distance to the ``neighbours``-th nearest, the sample itself counted as the
    first; ``"linear"`` is the cosine. In the last two a sample is its own neighbour too.

    Deviations from the authors' code: log p is exact (theirs adds 1e-10 to p), ``"linear"`` multiplies samples and not
    features, and a batch without any spread has s floored instead of dividing by zero.

    Args:
        model: The classifier.
        affinity: ``"rbf"`` (the default of the common benchmarks), ``"knn"`` or ``"linear"``.
        neighbours: k of the affinity; the authors search 1, 3 and 5.
        steps: Largest number of iterations.
        tolerance: Stop when the energy changes by less than this share.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> out = LAME(net, affinity="knn")(torch.rand(8, 1, 2, 2))
        >>> bool(torch.allclose(out.exp().sum(1), torch.ones(8)))
        True
    """

    model: SplitModel

    def __init__(
        self,
        model: nn.Module,
        *,
        affinity: Affinity = "rbf",
        neighbours: int = 5,
        steps: int = 100,
        tolerance: float = 1e-8,
    ) -> None:
        super().__init__(split(model), statistics=Statistics.source())
        if affinity not in get_args(Affinity):
            raise ValueError(f"affinity must be one of {', '.join(get_args(Affinity))}, got {affinity!r}")
        if neighbours < 1 or steps < 1:
            raise ValueError(f"neighbours and steps must be at least 1, got {neighbours} and {steps}")
        self.affinity, self.neighbours = affinity, neighbours
        self.steps, self.tolerance = steps, tolerance

    def output(self, x: Tensor) -> Tensor:
        """Log-probabilities of the batch, corrected together."""
        z, logits = self.model.features_and_logits(x)
        weights = measure_affinity(F.normalize(z, dim=1), self.affinity, self.neighbours)
        return smooth_labels(logits.log_softmax(1), weights, self.steps, self.tolerance)


@full_precision
def measure_affinity(z: Tensor, affinity: Affinity, neighbours: int) -> Tensor:
    """Affinity (b, b) between unit features (b, d).

    Example:
        >>> measure_affinity(torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), "knn", 1).tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    if affinity == "linear":
        return z @ z.T
    apart = torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist")
    if affinity == "knn":
        others = apart + torch.diag(torch.full_like(apart[0], float("inf")))
        nearest = others.topk(min(neighbours, len(z) - 1), dim=1, largest=False).indices
        return torch.zeros_like(apart).scatter(1, nearest, 1.0)
    width = apart.topk(min(neighbours, len(z)), dim=1, largest=False).values[:, -1].mean()
    return torch.exp(-0.5 * (apart / width.clamp_min(torch.finfo(z.dtype).eps)) ** 2)


@full_precision
def smooth_labels(log_probs: Tensor, weights: Tensor, steps: int, tolerance: float) -> Tensor:
    """Iterate Y <- softmax(log p + W Y) until the energy is still; returns log Y.

    All iterations run and those after the last are discarded: asking the device whether to stop would take longer.
    """
    log_y, still = log_probs, torch.zeros((), dtype=torch.bool, device=weights.device)
    old = torch.full_like(log_probs[0, 0], float("inf"))
    for step in range(steps):
        pull = weights @ log_y.exp()
        new = (log_probs + pull).log_softmax(1)
        energy = (new.exp() * (new - log_probs - pull)).sum()
        log_y = torch.where(still, log_y, new)
        if step > 1:
            still = still | ((energy - old).abs() <= tolerance * old.abs())
        old = energy
    return log_y
