"""MEMO: every image adapts the model to itself alone."""

import math

import torch
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.adapter import Adapter
from ttvd.methods.registry import register
from ttvd.methods.shared.augmix import augmix
from ttvd.methods.shared.losses import differentiate, entropy, find_largest
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.norms import Statistics
from ttvd.nn.split import exchanged


@register(
    "memo",
    summary="For each image alone: minimises the entropy of the mean prediction over its augmentations.",
    paper="Zhang et al., NeurIPS 2022",
    updates="all weights, for one image",
    forwards=33,
    backwards=32,
)
class MEMO(Adapter):
    """Marginal entropy minimisation with one test point.

    Each image takes a gradient step of all weights on the entropy of the mean of softmax(logits) over its AugMix views
    and is predicted with the changed weights, which are then forgotten.

    Works with batch, group and layer norm and with any batch size: images do not see each other. Batch norms mix the
    source statistics with those of the views (at the prediction: of the image) at ``prior``. Nothing but the state of
    the random generator changes from image to image. ``predict`` gives the logits of each image without a step.

    Deviations from the authors' code: those of :func:`~ttvd.methods.shared.augmix.augmix`; the batch variance is the
    biased one.

    Args:
        model: The classifier.
        lr: Learning rate of SGD without momentum; 0.005 for CIFAR, 2.5e-4 for ImageNet in the paper.
        steps: Gradient steps for each image.
        views: Augmentations of each image; 32 for CIFAR, 64 for ImageNet in the paper.
        prior: Share of the source statistics; 16/17 in the paper.
        seed: Seed of the augmentations.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> MEMO(net, views=4)(torch.rand(2, 1, 2, 2)).shape
        torch.Size([2, 2])
    """

    prediction = "after"
    exact = ("model",)
    dynamic = "every image draws its own augmentations"

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 0.005,
        steps: int = 1,
        views: int = 32,
        prior: float = 16 / 17,
        seed: int = 0,
    ) -> None:
        super().__init__(model, statistics=Statistics(prior=prior))
        if steps < 1 or views < 1 or not 0.0 <= lr < math.inf:
            raise ValueError(
                f"steps and views must be at least 1 and lr at least 0, got {steps}, {views} and {lr}"
            )
        self.lr, self.steps, self.views = lr, steps, views
        self.random_state = RandomState(seed)

    def output(self, x: Tensor) -> Tensor:
        """Logits of each image by itself, without a step."""
        return torch.cat([upcast(self.call_model(image[None])) for image in x])

    def adapt(self, x: Tensor) -> Tensor:
        """Logits of each image, by the weights that it has adapted."""
        return torch.cat([self._adapt_to(image[None]) for image in x])

    def _adapt_to(self, image: Tensor) -> Tensor:
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        for _ in range(self.steps):
            with self.random_state.generator() as generator:
                views = augmix(image, self.views, generator)
            weights |= self._step(weights, views)
        with torch.no_grad(), exchanged(self.model, weights):
            return upcast(self.call_model(image))

    @torch.enable_grad()
    def _step(self, weights: dict[str, Tensor], views: Tensor) -> dict[str, Tensor]:
        """The weights after one step on the entropy of the mean prediction."""
        moving = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        with exchanged(self.model, moving):
            logits = upcast(self.call_model(views))
        mean = logits.log_softmax(1).logsumexp(0) - math.log(len(views))
        gradients = differentiate(entropy(mean), list(moving.values()))
        found = {n: g for n, g in zip(moving, gradients, strict=True) if g is not None}
        largest = find_largest(found.values())
        self.require_finite(largest)
        fine = largest < torch.inf
        return {n: weights[n] - self.lr * torch.where(fine, g, torch.zeros_like(g)) for n, g in found.items()}
