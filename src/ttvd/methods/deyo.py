"""DeYO: entropy minimisation on samples whose prediction needs the shape of the object."""

import math
from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.sar import LAST_LAYERS
from ttvd.methods.shared.losses import entropy, mean_over
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.split import exchanged


def shuffle_patches(x: Tensor, order: Tensor) -> Tensor:
    """Images whose n x n patches have changed places: patch i of the result is patch ``order[:, i]`` of the image.

    Sides that n does not divide are resized to the next smaller ones that it does, and back.

    Args:
        x: Images (b, c, h, w).
        order: Permutations of the patches (b, n * n), counted row by row.

    Example:
        >>> shuffle_patches(torch.arange(4.0).view(1, 1, 2, 2), torch.tensor([[3, 1, 2, 0]])).flatten().tolist()
        [3.0, 1.0, 2.0, 0.0]
    """
    n = math.isqrt(order.shape[1])
    size = x.shape[-2:]
    height, width = size[0] // n, size[1] // n
    x = _resize(x, (height * n, width * n))
    patches = F.unfold(x, (height, width), stride=(height, width))
    index = order[:, None].expand(-1, patches.shape[1], -1)
    moved = F.fold(patches.gather(2, index), x.shape[-2:], (height, width), stride=(height, width))
    return _resize(moved, size)


def _resize(x: Tensor, size: Sequence[int]) -> Tensor:
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    return F.interpolate(x, list(size), mode="bilinear", antialias=True)


@register(
    "deyo",
    summary="Entropy of confident samples whose predicted class suffers when their patches are shuffled.",
    paper="Lee et al., ICLR 2024",
    updates="norm affine",
    forwards=2,
    backwards=1,
)
class DeYO(GradientAdapter):
    """Trusts a prediction when it is confident and falls apart with the object: low entropy alone can be spurious.

    Kept are samples with entropy H < margin * ln k whose pseudo-label y loses more than ``drop`` of its probability
    when patches are shuffled: D = p_y(x) - p_y(shuffled x). The loss is the mean over them of
    (exp(pivot * ln k - H) + exp(D)) * H, with the weight held constant.

    Works with batch, group and layer norm, on images of at least ``patches`` pixels a side.

    Deviations from the authors' code: the whole batch is shuffled and forwarded, not its confident part only (so
    nothing waits for the device; batch norms see more images); ``reset`` works; the order of patches is seeded.

    Args:
        model: The classifier.
        margin: Samples below this share of ln k are confident; 0.5 in the paper.
        drop: Least loss of probability: in the authors' scripts 0.3 for batch norm on mild streams, 0.2 for wild ones,
            0.5 for data with spurious correlations.
        pivot: Share of ln k at which the weight of the entropy is 1; 0.4 in the paper.
        patches: Patches a side; 4 in the paper.
        skip: Layers that do not adapt, by prefixes of their names; as in :class:`~ttvd.methods.sar.SAR`.
        lr: Learning rate; 2.5e-4 in the authors' code, plain momentum SGD (five times that for spurious data).
        seed: Seed of the order of patches.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 2))
        >>> DeYO(net)(torch.rand(8, 1, 4, 4)).shape
        torch.Size([8, 2])
    """

    defaults: ClassVar[StepOptions] = {
        "lr": 2.5e-4,
        "momentum": 0.9,
        "steps": 1,
        "statistics": None,
        "prediction": "before",
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        margin: float = 0.5,
        drop: float = 0.3,
        pivot: float = 0.4,
        patches: int = 4,
        skip: Sequence[str] = LAST_LAYERS,
        seed: int = 0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(model, nesterov=False, skip=skip, **options)
        if not (margin > 0.0 and -1.0 <= drop <= 1.0 and patches >= 1):
            raise ValueError(
                "expected margin > 0, drop between -1 and 1 and patches >= 1, "
                f"got {margin}, {drop} and {patches}"
            )
        self.margin, self.drop, self.pivot, self.patches = margin, drop, pivot, patches
        self.random_state = RandomState(seed)

    def random_inputs(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """An order of patches for each image."""
        if x.ndim != 4 or min(x.shape[-2:]) < self.patches:
            raise ValueError(
                f"DeYO shuffles {self.patches} x {self.patches} patches of images (b, c, h, w), "
                f"got a batch of shape {tuple(x.shape)}"
            )
        return (torch.rand(len(x), self.patches**2, generator=generator).argsort(1),)

    def loss(self, x: Tensor, order: Tensor) -> Step:
        """Weighted mean entropy of the samples that are confident and need the shape."""
        shuffled = shuffle_patches(x, order)
        logits = self.output(x)
        values, scale = entropy(logits), math.log(logits.shape[1])
        with torch.no_grad():
            best, labels = logits.softmax(1).max(1)
            suffered = best - self._forward_frozen(shuffled).softmax(1).gather(1, labels[:, None])[:, 0]
            kept = (values < self.margin * scale) & (suffered > self.drop)
            weights = (self.pivot * scale - values).exp() + suffered.exp()
        return Step(logits, mean_over(weights * values, kept), kept.to(values.dtype).mean())

    def _forward_frozen(self, x: Tensor) -> Tensor:
        """Logits; on copies of the buffers, so that running averages do not learn from shuffled images."""
        still = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with exchanged(self.model, still):
            return upcast(self.call_model(x))
