"""AdaNPC: a nearest-neighbour classifier over source features and confident test features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.methods.adapter import Adapter, LoggedBuffers
from ttvd.methods.registry import register
from ttvd.nn.norms import Statistics
from ttvd.nn.split import SplitModel, split
from ttvd.zoo.source_features import SourceFeatures

_FLOOR = 1e-5
"""Added to every probability in the authors' code, so that a class without neighbours has a logarithm."""


@register(
    "adanpc",
    summary="Asks the nearest source features, and the test features it was confident of.",
    paper="Zhang et al., ICML 2023",
    updates="memory of features",
    forwards=1,
    backwards=0,
    needs=frozenset({"features"}),
)
class AdaNPC(LoggedBuffers, Adapter):
    """A non-parametric classifier in place of the head; the network itself stays as it is, source statistics included.

    With s_i the cosines of a feature and its k nearest neighbours in memory, of labels y_i,

        p_c = sum over i with y_i = c of softmax(s / tau)_i + 1e-5, at most 1;

    the output is log p. A sample whose confidence max p is at least beta then enters the memory with its predicted
    label; a whole batch is classified before any of it enters.

    Works with any norm; batch norms keep the statistics of the source. Deviations from the authors' code: theirs takes
    the maximum of softmax(p) for the confidence, which for ten classes cannot exceed 0.232 (``double_softmax=True``
    does that too); theirs starts with a random vector of label 0, which is left out; theirs grows without bound, here
    the oldest test samples make room for new ones and the source samples stay; features are the model's own, not
    trained with a nearest-neighbour loss.

    Args:
        model: The classifier; of its head only the number of classes is used.
        features: Source features that the memory starts with, collected with this model; no part of the state.
        k: Number of neighbours; 100 in the authors' code, which also tried 1 to 200.
        tau: Temperature of the cosines; 0.1 in the authors' code, which also tried 0.01 to 0.5.
        beta: Confidence that a sample needs to enter the memory; 0.1 in the authors' code, which with up to ten
            classes lets every sample in. Above 1 nothing enters.
        capacity: Test samples that the memory holds; one pass over the test sets of CIFAR fits by default.
        double_softmax: Measure the confidence as the authors' code does.

    Example:
        >>> from ttvd.source.features import collect_features
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> memory = collect_features(net, (torch.rand(9, 1, 2, 2), torch.arange(9) % 2))
        >>> AdaNPC(net, memory, k=5)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    logged = ("keys", "labels")
    model: SplitModel
    source_keys: Tensor
    source_labels: Tensor
    keys: Tensor
    labels: Tensor
    count: Tensor

    def __init__(
        self,
        model: nn.Module,
        features: SourceFeatures,
        *,
        k: int = 100,
        tau: float = 0.1,
        beta: float = 0.1,
        capacity: int = 10_000,
        double_softmax: bool = False,
    ) -> None:
        parts = split(model)
        features.check(parts)
        super().__init__(parts, statistics=Statistics.source())
        if k < 1 or capacity < 1 or not tau > 0.0:
            raise ValueError(
                f"k and capacity must be at least 1 and tau positive, got {k}, {capacity} and {tau}"
            )
        self.k, self.tau, self.beta, self.double_softmax = k, tau, beta, double_softmax
        device, dtype = self.probe.device, torch.promote_types(self.probe.dtype, torch.float32)
        known = features.features.to(device, dtype)
        self.register_buffer("source_keys", known, persistent=False)
        self.register_buffer("source_labels", features.labels.to(device), persistent=False)
        self.register_buffer("keys", known.new_zeros(capacity, features.dim))
        self.register_buffer("labels", self.source_labels.new_zeros(capacity))
        self.register_buffer("count", self.source_labels.new_zeros(()))

    def output(self, x: Tensor) -> Tensor:
        """Logarithm of the neighbours' votes."""
        return self._vote(self._embed(x)).log()

    def adapt(self, x: Tensor) -> Tensor:
        """Classify the batch, then store the confident samples."""
        with torch.no_grad():
            z = self._embed(x)
            votes = self._vote(z)
            confidence = (votes.softmax(1) if self.double_softmax else votes).amax(1)
            sure = confidence >= self.beta
            self.kept.copy_(sure.float().mean())
            pieces = (part.split(len(self.keys)) for part in (z, votes.argmax(1), sure))
            for piece in zip(*pieces, strict=True):
                self._store(*piece)
            return votes.log()

    def _embed(self, x: Tensor) -> Tensor:
        return F.normalize(self.model.features(x).to(self.keys.dtype), dim=1)

    def _vote(self, z: Tensor) -> Tensor:
        """Probabilities (b, c) of the classes, not quite normalised."""
        # Neighbours differ by less than half precision can tell.
        with torch.autocast(z.device.type, enabled=False):
            likeness, labels = self._find_neighbours(z)
        weights = (likeness / self.tau).softmax(1)
        votes = z.new_zeros(len(z), self.model.linear.out_features).scatter_add(1, labels, weights)
        return (votes + _FLOOR).clamp_max(1.0)

    def _find_neighbours(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and labels (b, k) of the nearest, over both memories; a place that is empty has cosine -inf."""
        known, old = (z @ self.source_keys.T).topk(min(self.k, len(self.source_keys)), dim=1)
        empty = torch.arange(len(self.keys), device=z.device) >= self.count
        likeness = (z @ self.keys.T).masked_fill(empty, float("-inf"))
        seen, new = likeness.topk(min(self.k, len(self.keys)), dim=1)
        both, labels = torch.cat([known, seen], 1), torch.cat([self.source_labels[old], self.labels[new]], 1)
        best, order = both.topk(min(self.k, both.shape[1]), dim=1)
        return best, labels.gather(1, order)

    def _store(self, z: Tensor, labels: Tensor, sure: Tensor) -> None:
        """Write the sure ones over the oldest, in their order; there are at most as many as the memory holds."""
        order = sure.logical_not().argsort(stable=True)
        slots = (self.count + torch.arange(len(z), device=z.device)) % len(self.keys)
        chosen = sure[order]
        self.keys[slots] = torch.where(chosen[:, None], z[order], self.remember(self.keys, slots))
        self.labels[slots] = torch.where(chosen, labels[order], self.remember(self.labels, slots))
        self.count += sure.sum()
