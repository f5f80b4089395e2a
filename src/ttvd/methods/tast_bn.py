"""TAST-BN: nearest supports teach the norms; the supports are images."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.shared.prototypes import PrototypeEnsemble, divergence
from ttvd.methods.shared.supports import Supports
from ttvd.nn.split import SplitModel, split


@register(
    "tast-bn",
    summary="The norms' affine parameters learn what the nearest stored images are taken for.",
    paper="Jang et al., ICLR 2023",
    updates="norm affine, stored images",
    forwards=2,
    backwards=1,
)
class TASTBN(GradientAdapter):
    """TAST without an ensemble: the norms learn, so supports are stored as images and forwarded at each step.

    The model labels a batch, and of each predicted class the most certain images stay. Then batch and stored images
    pass the network together; the rest is as in TAST with one member and no projection: the cosine with the mean
    feature of each class, the k nearest stored images as teachers and as prediction.

    Works with batch, group and layer norm (the authors have batch norm only). Batch norms use the statistics of the
    batch alone to label it, and those of batch and stored images together afterwards. At each step all stored images
    are forwarded and differentiated besides the batch; how many there are decides the size of the forward pass and is
    read back from the device. Before the first batch nothing is stored, and ``predict`` is the model's own. The
    room for images is made when the first one shows their shape. Deviations from the authors' code: evaluation mode,
    so that dropout stays off; more classes than ``capacity`` are refused, where theirs keep nothing and fail; fewer
    supports than k neighbours are all asked.

    Args:
        model: The classifier.
        supports: Images of each class that stay, M in the paper, which tried 1 to 100.
        capacity: Images that are stored in all; ``supports`` is cut down to capacity / classes. 150 in the authors'
            code.
        k: Number of neighbours; the paper tried 1, 2, 4 and 8. At most ``supports``.
        tau: Scale of the cosines; 10 in the authors' code.
        lr: Learning rate; 1e-3 with Adam in the paper.
        steps: Gradient steps for each batch; the paper tried 1 and 3.
        prediction: The authors' code predicts before the last update.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> TASTBN(net)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    defaults: ClassVar[StepOptions] = {
        "lr": 1e-3,
        "optimizer": "adam",
        "momentum": 0.9,
        "steps": 1,
        "prediction": "before",
    }
    model: SplitModel
    dynamic = "it forwards as many images as its memory holds"

    def __init__(
        self,
        model: nn.Module,
        *,
        supports: int = 100,
        capacity: int = 150,
        k: int = 1,
        tau: float = 10.0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(split(model), **options)
        classes = self.model.linear.out_features
        if capacity < classes:
            raise ValueError(
                f"tast-bn stores at least one image of each of the {classes} classes, capacity={capacity} is less"
            )
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        slots = min(supports, capacity // classes)
        self.k, self.tau = min(k, slots), tau
        # A single black pixel: whatever the images will be, copying it over them empties the memory.
        self.memory = Supports(classes, slots, (1, 1, 1), self.probe.detach())

    def output(self, x: Tensor) -> Tensor:
        """Logarithm of what the nearest stored images are taken for."""
        if not bool(self.memory.present.any()):
            return super().output(x)
        z, ensemble = self._embed(x)
        return ensemble.knn_predict(z, self.k)[1].log()

    def adapt(self, x: Tensor) -> Tensor:
        """Store the most certain images, then learn from them."""
        self._make_room(x.shape[1:])
        with torch.no_grad():
            logits = super().output(x)
            self.require_finite(logits.amax())
            self.memory.offer(x, logits)
        return super().adapt(x)

    def loss(self, x: Tensor) -> Step:
        """Divergence from the neighbours' labels."""
        z, ensemble = self._embed(x)
        targets, out = ensemble.knn_predict(z, self.k)
        return Step(out.log(), divergence(ensemble.score(z), targets), torch.ones_like(self.kept))

    def fit_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The memory takes the room that the images of a state need."""
        own, items = self.memory.items, state.get("memory.items")
        if isinstance(items, Tensor) and items.shape[:2] == own.shape[:2]:
            self.memory.items = own.new_zeros(items.shape)
        return state

    def _embed(self, x: Tensor) -> tuple[Tensor, PrototypeEnsemble]:
        """Features of a batch, and the stored images by theirs."""
        present = self.memory.present
        features = self.model.features(torch.cat([x, self.memory.items[present]]))
        z, known = features[: len(x)], features[len(x) :]
        slots = z.new_zeros(*present.shape, z.shape[1])
        slots = slots.index_put(present.nonzero(as_tuple=True), known)
        return z, PrototypeEnsemble.of(slots, present, lambda features: features[None], self.tau)

    def _make_room(self, shape: torch.Size) -> None:
        items = self.memory.items
        if len(shape) != 3:
            raise ValueError(f"tast-bn stores images (c, h, w), got inputs of shape {tuple(shape)}")
        if items.shape[2:] == shape:
            return
        if bool(self.memory.present.any()):
            raise ValueError(
                f"the stored images have shape {tuple(items.shape[2:])}, the new ones {tuple(shape)}; "
                "images of one stream must have one shape: resize them, or call reset() first"
            )
        self.memory.items = items.new_zeros(*items.shape[:2], *shape)
