"""ETA and EATA: entropy minimisation on samples that are confident and new, the latter without forgetting."""

import math
from collections.abc import Mapping
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import entropy, mean_over
from ttvd.nn.split import count_classes

_DECAY = 0.9  # of the moving mean, in the authors' code


def default_similarity(num_classes: int) -> float:
    """The limit of similarity for k classes: the power law through 0.4 at 10 and 0.05 at 1000.

    A certain prediction has cosine 1 / sqrt(k) with a uniform mean, so that one limit cannot fit all k. 0.05 is the
    authors' value for ImageNet, 0.4 the one for CIFAR-10 in public benchmarks.

    Example:
        >>> [round(default_similarity(k), 3) for k in (10, 100, 1000)]
        [0.4, 0.141, 0.05]
    """
    return float(0.4 * (num_classes / 10) ** (-math.log10(8) / 2))


@register(
    "eta",
    summary="Weighted entropy of samples that are confident and unlike the mean prediction so far.",
    paper="Niu et al., ICML 2022",
    updates="norm affine",
    forwards=1,
    backwards=1,
)
class ETA(GradientAdapter):
    """Minimises the entropy H of samples that are confident and not redundant; the surer, the more they weigh.

    Kept are samples with H < E0 = margin * ln k whose prediction has a cosine below ``similarity`` with the moving mean
    of what was kept before. The loss is the mean over them of exp(E0 - H) * H, with the weight held constant.

    Works with batch, group and layer norm. A batch of which nothing is kept changes nothing.

    Deviations from the authors' code: ``reset`` clears the moving mean (theirs forgets it); dropout stays off.

    Args:
        model: The classifier; k is its ``num_classes``, or the size of its last linear layer.
        margin: E0 as a share of ln k; 0.4 in the paper.
        similarity: Limit of the cosine, 0.05 for ImageNet in the paper; :func:`default_similarity` unless given.
        lr: Learning rate; 2.5e-4 for ImageNet in the paper, with plain momentum SGD.

    Attributes:
        mean: Moving mean of the kept predictions (k,); zeros until something has been kept.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> ETA(net)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    defaults: ClassVar[StepOptions] = {
        "lr": 2.5e-4,
        "momentum": 0.9,
        "steps": 1,
        "statistics": None,
        "prediction": "before",
    }
    mean: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        margin: float = 0.4,
        similarity: float | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(model, nesterov=False, **options)
        classes = count_classes(model)
        self.margin = margin
        self.similarity = default_similarity(classes) if similarity is None else similarity
        if not (margin > 0.0 and self.similarity > 0.0):
            raise ValueError(f"margin and similarity must be above 0, got {margin} and {similarity}")
        self.register_buffer("mean", self.adapting()[0].new_zeros(classes))

    def loss(self, x: Tensor) -> Step:
        """Weighted mean entropy of the kept samples."""
        logits = self.output(x)
        values, kept = self.uncertainty(logits), self._keep(logits)
        weights = (self.margin * math.log(logits.shape[1]) - values.detach()).exp()
        return Step(logits, mean_over(weights * values, kept), kept.to(values.dtype).mean())

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Return the entropy of each sample (b,), by which samples are selected and which is minimised."""
        return entropy(logits)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Let the kept predictions enter the moving mean."""
        kept = self._keep(step.out)
        probs = torch.where(kept[:, None], step.out.softmax(1), 0.0).to(self.mean.dtype)
        new = probs.sum(0) / kept.sum().clamp_min(1)
        moved = torch.where(self.mean.any(), _DECAY * self.mean + (1.0 - _DECAY) * new, new)
        self.mean.copy_(torch.where(kept.any(), moved, self.mean))

    @torch.no_grad()
    def _keep(self, logits: Tensor) -> Tensor:
        """Which samples are confident and not redundant; all are new to a mean of zeros."""
        if logits.shape[1] != len(self.mean):
            raise ValueError(
                f"the model was taken to have {len(self.mean)} classes and returns {logits.shape[1]}; give it an "
                "attribute num_classes, or pass ttvd.split(model, head='dotted.name') with the right head"
            )
        confident = self.uncertainty(logits) < self.margin * math.log(logits.shape[1])
        likeness = F.cosine_similarity(self.mean[None], logits.softmax(1).to(self.mean.dtype), dim=1)
        return confident & (likeness.abs() < self.similarity)


@register(
    "eata",
    summary="ETA held near the source where the source task needs it, by the Fisher information.",
    paper="Niu et al., ICML 2022",
    updates="norm affine",
    forwards=1,
    backwards=1,
    needs=frozenset({"fisher"}),
)
class EATA(ETA):
    """:class:`ETA` plus penalty * sum_i F_i (theta_i - theta_i^0)^2, which keeps what the source task needs.

    Works where ETA works. Without anything kept the penalty is not followed either, as in the authors' code.

    Args:
        model: The classifier.
        fisher: Importance of each parameter that adapts, by name, made by ``ttvd.source.estimate_fisher``.
        penalty: Weight of the penalty, beta in the paper: 2000 for ImageNet; public benchmarks use 1 on CIFAR.
        margin, similarity, lr, momentum, steps, statistics, prediction: As in :class:`ETA`.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> EATA(net, {"0.weight": torch.ones(1), "0.bias": torch.ones(1)})(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    importance: Tensor
    source: Tensor

    def __init__(
        self,
        model: nn.Module,
        fisher: Mapping[str, Tensor],
        *,
        penalty: float = 2000.0,
        margin: float = 0.4,
        similarity: float | None = None,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(model, margin=margin, similarity=similarity, **options)
        if not penalty >= 0.0:
            raise ValueError(f"penalty must be at least 0, got {penalty}")
        self.penalty = penalty
        importance = _arrange(fisher, {n: p for n, p in self.model.named_parameters() if p.requires_grad})
        self.register_buffer("importance", importance, persistent=False)
        self.register_buffer("source", self._flat().detach().clone(), persistent=False)

    def loss(self, x: Tensor) -> Step:
        """ETA's loss and the penalty of leaving the source."""
        out, loss, kept, _ = super().loss(x)
        drift = (self.importance * (self._flat() - self.source).square()).sum()
        return Step(out, loss + self.penalty * drift, kept)

    def _flat(self) -> Tensor:
        return torch.cat([p.flatten() for p in self.adapting()])


def _arrange(fisher: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """Importances in the order of the parameters, as one vector."""
    wrong = sorted(set(fisher) ^ set(parameters)) + [
        name for name, p in parameters.items() if name in fisher and fisher[name].shape != p.shape
    ]
    if wrong:
        raise ValueError(
            f"this Fisher information is not of this model: {len(wrong)} entries are missing, unknown or of another "
            f"shape, the first is {wrong[0]!r}; use ttvd.source.estimate_fisher(model, source_images)"
        )
    return torch.cat([fisher[name].to(p).flatten() for name, p in parameters.items()])
