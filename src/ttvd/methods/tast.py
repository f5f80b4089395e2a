"""TAST: nearest supports teach an ensemble of small projections of the features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.methods.adapter import Adapter, Timing
from ttvd.methods.gradient import build_optimizer
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import differentiate
from ttvd.methods.shared.prototypes import PrototypeEnsemble, divergence
from ttvd.methods.shared.supports import FeatureSupports
from ttvd.nn.norms import Statistics
from ttvd.nn.split import SplitModel, split


class Heads(nn.Module):
    """A BatchEnsemble of linear maps: one matrix, and for each member two scalings and a bias.

    Args:
        members: Number of maps, e.
        dim: Dimension of the features, d; that of the projections is a quarter of it.
        seed: Seed of the initial weights.
    """

    def __init__(self, members: int, dim: int, seed: int) -> None:
        super().__init__()
        if members < 1:
            raise ValueError(f"members must be at least 1, got {members}")
        generator, width = torch.Generator().manual_seed(seed), max(dim // 4, 1)
        shapes = {"weight": (width, dim), "inner": (members, dim), "outer": (members, width)}
        for name, shape in shapes.items():
            values = nn.init.kaiming_normal_(torch.empty(shape), generator=generator)
            self.register_parameter(name, nn.Parameter(values))
        self.bias = nn.Parameter(torch.zeros(members, width))

    def forward(self, z: Tensor) -> Tensor:
        """Features (n, d) to projections (e, n, d / 4)."""
        inner, outer = self.get_parameter("inner")[:, None], self.get_parameter("outer")[:, None]
        return F.linear(z * inner, self.get_parameter("weight")) * outer + self.bias[:, None]


@register(
    "tast",
    summary="Small projections of the features learn what the nearest supports are taken for.",
    paper="Jang et al., ICLR 2023",
    updates="projection heads, supports",
    forwards=1,
    backwards=0,
)
class TAST(Adapter):
    """Test-time adaptation via self-training with nearest neighbours; the network itself stays as it is.

    Supports are collected as in T3A (features as they are, not normalised). A member e of an ensemble of random
    projections h_e gives a feature z the logits tau cos(h_e(z), c_e), with c_e the mean of the projected supports of
    each class. The k supports nearest to a sample vote: their hard labels under each member are the member's target,
    the mean of their soft labels over the ensemble is the prediction. The members, and nothing else, learn

        sum over e of KL(target_e || softmax(logits_e)).

    Works with any norm; batch norms keep the statistics of the source. Deviations from the authors' code: a bounded
    support set only (their M = -1 keeps every sample); ``reset`` goes back to the same projections instead of drawing
    new ones; fewer supports than k neighbours are all asked.

    Args:
        model: The classifier.
        members: Size of the ensemble; the paper tried 1, 5, 10 and 20, TTVD's comparison has 5.
        supports: Supports of each class, M in the paper; it tried 1 to 100 and all, TTVD's comparison has 100.
        k: Number of neighbours; the paper tried 1, 2, 4 and 8, TTVD's comparison has 1. At most ``supports``.
        tau: Scale of the cosines; 10 in the authors' code.
        lr: Learning rate; 1e-3 with Adam in the paper.
        optimizer: ``"adam"`` or ``"sgd"``.
        momentum: Momentum of SGD, first beta of Adam.
        steps: Gradient steps for each batch; the paper tried 1 and 3.
        prediction: The authors' code predicts before the last update.
        seed: Seed of the random projections.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> TAST(net, supports=5)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    model: SplitModel

    def __init__(
        self,
        model: nn.Module,
        *,
        members: int = 5,
        supports: int = 100,
        k: int = 1,
        tau: float = 10.0,
        lr: float = 1e-3,
        optimizer: str = "adam",
        momentum: float = 0.9,
        steps: int = 1,
        prediction: Timing = "before",
        seed: int = 0,
    ) -> None:
        super().__init__(split(model), statistics=Statistics.source())
        if k < 1 or steps < 1:
            raise ValueError(f"k and steps must be at least 1, got {k} and {steps}")
        if prediction not in ("before", "after"):
            raise ValueError(f"prediction must be 'before' or 'after', got {prediction!r}")
        rows = self.model.linear.weight.detach()
        self.k, self.tau, self.steps, self.prediction = min(k, supports), tau, steps, prediction
        self.memory = FeatureSupports(len(rows), supports, rows.shape[1], rows)
        with torch.no_grad():
            self.memory.offer(rows, self.model.head(rows))
        self.heads = Heads(members, rows.shape[1], seed).to(rows)
        self.optimizer = build_optimizer(optimizer, list(self.heads.parameters()), lr, momentum)

    def output(self, x: Tensor) -> Tensor:
        """Logarithm of what the nearest supports are taken for."""
        return self._ensemble.knn_predict(self.model.features(x), self.k)[1].log()

    def adapt(self, x: Tensor) -> Tensor:
        """Collect the batch, then let the projections learn from its neighbours."""
        with torch.no_grad():
            z, logits = self.model.features_and_logits(x)
        self.require_finite(logits.amax())
        self.memory.offer(z, logits)
        for _ in range(self.steps):
            targets, out = self._ensemble.knn_predict(z, self.k)
            self._learn(z, targets)
        if self.prediction == "after":
            out = self._ensemble.knn_predict(z, self.k)[1]
        return out.log()

    @property
    def _ensemble(self) -> PrototypeEnsemble:
        memory = self.memory
        return PrototypeEnsemble(
            memory.items, memory.present, memory.means, memory.lengths, self.heads, self.tau
        )

    def _learn(self, z: Tensor, targets: Tensor) -> None:
        parameters = list(self.heads.parameters())
        with torch.enable_grad():
            loss = divergence(self._ensemble.score(z), targets)
            gradients = differentiate(loss, parameters)
        self.require_finite(self.optimizer.step(parameters, gradients, torch.ones_like(self.kept)))
