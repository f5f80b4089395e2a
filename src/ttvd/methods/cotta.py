"""CoTTA: a slow teacher, averaged over augmentations, and weights that go back to the source at random."""

from typing import ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.shared.augmentations import augment, generator_on
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.norms import apply_statistics, select_parameters
from ttvd.nn.split import shared_copy

Agreement = Literal["teacher", "symmetric"]


@register(
    "cotta",
    summary="Learns from a slow teacher, averaged over augmentations where unsure; forgets at random.",
    paper="Wang et al., CVPR 2022",
    updates="all weights",
    forwards=35,
    backwards=1,
)
class CoTTA(GradientAdapter):
    """Continual adaptation of all weights by the cross-entropy between a teacher's predictions and the student's.

    The teacher is the running average of the student. Where the source model is unsure (its mean confidence on the
    batch is below ``threshold``), the teacher's logits are the mean over ``views`` augmentations, else those of the
    images themselves. After each step every weight goes back to its source value with probability ``restore``. The
    output is the prediction of the teacher before the update.

    Works with batch, group and layer norm; the batch norms of all three networks use the statistics of the batch.
    Deviations from the authors' code: evaluation mode (no dropout); all weights can go back to the source, not only
    those called weight and bias; every image is augmented by its own draws, on [0, 1] images. Whether the source model
    is unsure is the one thing for which an adapter waits for the device: the answer saves ``views`` forward passes.

    Args:
        model: The classifier.
        views: Augmentations that the teacher is averaged over.
        threshold: Confidence of the source model below which they are used; the paper has 0.92 for CIFAR-10, 0.72
            for CIFAR-100 and 0.1 for ImageNet.
        alpha: Share of the past in the teacher, 0.999 in the paper.
        restore: Probability with which a weight goes back; 0.01 for CIFAR, 0.001 for ImageNet.
        agreement: ``"teacher"``, the cross-entropy of the student under the teacher (CIFAR), or ``"symmetric"``, its
            mean with the reverse (ImageNet).
        seed: Seed of the augmentations and of the weights that go back.
        lr: Learning rate; the paper uses Adam with 1e-3 on CIFAR and SGD with 0.01 on ImageNet.
        prediction: The paper predicts before the update; ``"after"`` asks the teacher once more, on the images
            themselves, which is also what ``predict`` does.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> CoTTA(net, views=2)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    networks = ("model", "teacher", "source")
    exact = ("source",)
    dynamic = "it forwards augmentations only where the source model is unsure, and draws them in the step"
    defaults: ClassVar[StepOptions] = {**GradientAdapter.defaults, "optimizer": "adam"}

    def __init__(
        self,
        model: nn.Module,
        *,
        views: int = 32,
        threshold: float = 0.92,
        alpha: float = 0.999,
        restore: float = 0.01,
        agreement: Agreement = "teacher",
        seed: int = 0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(model, parameters="all", **options)
        if views < 1 or not (0.0 <= alpha <= 1.0 and 0.0 <= restore <= 1.0):
            raise ValueError(
                f"views must be at least 1, alpha and restore in [0, 1]; got {views}, {alpha} and {restore}"
            )
        if agreement not in get_args(Agreement):
            raise ValueError(f"agreement must be 'teacher' or 'symmetric', got {agreement!r}")
        self.views, self.threshold, self.agreement = views, threshold, agreement
        self.alpha, self.restore_share = alpha, restore
        self.random_state = RandomState(seed)
        if self.statistics.follows:
            raise ValueError(
                "cotta has three networks and one stream: statistics that follow it are not defined for the teacher; "
                "use batch, source, prior:P or count:N"
            )
        owned = select_parameters(model, "all")
        self.teacher = apply_statistics(shared_copy(model, owned), self.statistics).eval()
        self.source = apply_statistics(shared_copy(model, set()), self.statistics).eval()

    def output(self, x: Tensor) -> Tensor:
        """Logits of the teacher on the images themselves."""
        return upcast(self.call_model(x, self.teacher))

    def loss(self, x: Tensor) -> Step:
        """Mean cross-entropy between teacher and student."""
        target = self._teach(x)
        logits = upcast(self.call_model(x))
        each = -(target.softmax(1) * logits.log_softmax(1)).sum(1)
        if self.agreement == "symmetric":
            each = 0.5 * each - 0.5 * (logits.softmax(1) * target.log_softmax(1)).sum(1)
        return Step(target, each.mean(), torch.ones_like(self.kept))

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Move the teacher towards the student, and set some weights back to those of the source."""
        device = self.kept.device
        with self.random_state.generator() as generator:
            local = generator_on(device, generator)
            three = (network.parameters() for network in (self.model, self.teacher, self.source))
            for weight, slow, source in zip(*three, strict=True):
                slow.lerp_(weight, 1.0 - self.alpha)
                back = torch.rand(weight.shape, generator=local, device=device) < self.restore_share
                weight.copy_(torch.where(back, source, weight))

    @torch.no_grad()
    def _teach(self, x: Tensor) -> Tensor:
        """Logits of the teacher, averaged over augmentations where the source model is unsure."""
        logits = upcast(self.call_model(x, self.source))
        self.require_finite(logits.amax())
        confidence = logits.softmax(1).amax(1).mean()
        if confidence >= self.threshold:
            return self.output(x)
        with self.random_state.generator() as generator:
            return torch.stack([self.output(augment(x, generator)) for _ in range(self.views)]).mean(0)
