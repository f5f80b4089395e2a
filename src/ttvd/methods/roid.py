"""ROID: certainty- and diversity-weighted self-training that stays near the source."""

from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.shared.augmentations import augment
from ttvd.methods.shared.losses import entropy, soft_likelihood_ratio
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.norms import apply_statistics, following_stream
from ttvd.nn.split import count_classes, shared_copy


@register(
    "roid",
    summary="Weighted soft likelihood ratios and consistency, weights pulled back to the source, priors corrected.",
    paper="Marsden et al., WACV 2024",
    updates="norm affine",
    forwards=2,
    backwards=2,
)
class ROID(GradientAdapter):
    """Robust online test-time adaptation: self-training on certain samples that are unlike the others.

    Minimises the soft likelihood ratio -sum p log(p / (1 - p)), p clipped at 0.99, of each sample and the symmetric
    cross-entropy between it and an augmented copy.

    With u the cosine distance of p to the running mean prediction and c the negative entropy, both scaled to [0, 1]
    within the batch, a sample weighs exp(u c / temperature), and 0 where u is below its mean. After each step
    theta <- alpha theta + (1 - alpha) theta_source. The output is the log of p times the smoothed prior, normalised:
    (prior + s) / (1 + s k) with s = max(1/b, 1/k) / max(prior), where the prior is the mean prediction of the batch.

    Works with batch, group and layer norm; batch norms use the statistics of the batch. Where all of a batch are
    alike, as in a batch of one, u and c are 0: the samples weigh 1.

    Deviations from the authors' code: the correction multiplies probabilities, as in the paper (theirs multiplies
    logits); the augmented forward sees the whole batch and not only the samples of weight above 0, which matters to
    batch statistics alone; every image is augmented by its own draws; the model runs in evaluation mode.

    Args:
        model: The classifier.
        temperature: Temperature of the weights; 1/3 in the paper.
        alpha: Share of the adapted weights in the weights after a step, 0.99 in the paper; the rest is the source's.
        beta: Share of the past in the running mean prediction, 0.9 in the paper.
        batch_size: What the weighted sums are divided by; the paper's is the batch size of the stream also where the
            last batch is smaller. None for the size of the batch at hand.
        seed: Seed of the augmentations.
        lr: Learning rate; the paper uses Adam with 1e-3 on CIFAR and SGD with 2.5e-4 on ImageNet.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> ROID(net)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    networks: ClassVar[tuple[str, ...]] = ("model", "source")
    defaults: ClassVar[StepOptions] = {**GradientAdapter.defaults, "optimizer": "adam"}
    mean: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1 / 3,
        alpha: float = 0.99,
        beta: float = 0.9,
        batch_size: int | None = None,
        seed: int = 0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(model, **options)
        if not (temperature > 0.0 and 0.0 <= alpha <= 1.0 and 0.0 <= beta <= 1.0):
            raise ValueError(
                "temperature must be positive, alpha and beta in [0, 1]; "
                f"got {temperature}, {alpha} and {beta}"
            )
        self.temperature, self.alpha, self.beta, self.batch_size = temperature, alpha, beta, batch_size
        self.random_state = RandomState(seed)
        self.source = apply_statistics(shared_copy(model, set()), self.statistics).eval()
        classes = count_classes(model)
        self.register_buffer("mean", self.probe.new_full((classes,), 1.0 / classes, requires_grad=False))

    def output(self, x: Tensor) -> Tensor:
        """Log-probabilities after the correction of the prior."""
        return correct_prior(upcast(self.call_model(x)))

    def random_inputs(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """An augmented copy of each image."""
        return (augment(x, generator, padding="reflection", degrade=False),)

    def loss(self, x: Tensor, augmented: Tensor) -> Step:
        """Weighted likelihood ratios and consistency; the running mean prediction follows the batch."""
        logits = upcast(self.call_model(x))
        weights = weigh_samples(logits.detach(), self.mean, self.temperature)
        self.mean.lerp_(logits.detach().softmax(1).mean(0).to(self.mean.dtype), 1.0 - self.beta)
        with following_stream(self.model, False):  # averages learn from the images alone
            others = upcast(self.call_model(augmented))
        each = soft_likelihood_ratio(logits, clip=0.99) + symmetric_cross_entropy(others, logits)
        loss = (weights * each).sum() / (self.batch_size or len(x))
        return Step(correct_prior(logits), loss, (weights > 0).to(self.kept.dtype).mean())

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Move the weights a little back to those of the source."""
        for own, source in zip(self.model.parameters(), self.source.parameters(), strict=True):
            if own.requires_grad:
                own.lerp_(source, 1.0 - self.alpha)


def weigh_samples(logits: Tensor, mean: Tensor, temperature: float) -> Tensor:
    """Weights (b,): large for certain samples unlike the mean prediction (k,), 0 for those that are like it."""
    diversity = _scale(1.0 - F.cosine_similarity(mean[None], logits.softmax(1), dim=1))
    certainty = _scale(-entropy(logits))
    weights = torch.exp(diversity * certainty / temperature)
    return torch.where(diversity < diversity.mean(), torch.zeros_like(weights), weights)


def _scale(values: Tensor) -> Tensor:
    """To [0, 1]; 0 where all are alike."""
    low, high = values.aminmax()
    return (values - low) / torch.where(high > low, high - low, torch.ones_like(low))


def symmetric_cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    """Mean (b,) of the cross-entropies of each prediction under the other."""
    forth = (b.softmax(1) * a.log_softmax(1)).sum(1)
    back = (a.softmax(1) * b.log_softmax(1)).sum(1)
    return -0.5 * (forth + back)


def correct_prior(logits: Tensor) -> Tensor:
    """Log-probabilities, multiplied by the smoothed mean prediction of the batch."""
    prior = logits.softmax(1).mean(0)
    size, classes = logits.shape
    smooth = max(1.0 / size, 1.0 / classes) / prior.max()
    return (logits.log_softmax(1) + torch.log((prior + smooth) / (1.0 + smooth * classes))).log_softmax(1)
