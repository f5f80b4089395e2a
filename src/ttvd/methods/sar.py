"""SAR: sharpness-aware entropy minimisation on confident samples, with recovery from collapse."""

import math
from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.gradient import GradientAdapter, Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import differentiate, entropy, mean_over
from ttvd.nn.split import exchanged

LAST_LAYERS = ("layer4", "blocks.9", "blocks.10", "blocks.11", "norm")
"""What the authors leave alone: the last stage of ResNets; the last three blocks of ViT-B and its final norm."""
_TINY = 1e-12  # added to the length of the gradient, as in the public code of SAM that the authors use


@register(
    "sar",
    summary="Entropy of confident samples, made flat by a sharpness-aware step; starts again on collapse.",
    paper="Niu et al., ICLR 2023",
    updates="norm affine",
    forwards=2,
    backwards=2,
)
class SAR(GradientAdapter):
    """Minimises the entropy of confident samples where it is flat, and recovers when the model collapses.

    Samples with entropy below E0 = margin * ln k count. Their mean entropy gives a gradient g; the gradient at
    theta + rho * g / |g|, of those among them that are still below E0 there, is the one that is followed. When the
    running mean of that second loss falls below collapse * ln k, everything starts again from the source.

    Works with batch, group and layer norm; the authors recommend the latter two.

    Deviations from the authors' code: after a restart the running mean starts again too (theirs keeps its low value,
    and restarts again at once); an empty selection changes nothing (theirs still follows the momentum); the threshold
    of collapse scales with ln k as E0 does, from the paper's 0.2 nats at 1000 classes: the mean entropy of a healthy
    model of ten classes can be below 0.2 all the time, which would restart it at nearly every batch.

    Args:
        model: The classifier.
        margin: E0 as a share of ln k; 0.4 in the paper.
        rho: Length of the step uphill; 0.05 in the paper.
        collapse: Start again below this share of ln k; 0 for never.
        decay: Weight of the past in the running mean; 0.9 in the authors' code.
        skip: Layers that do not adapt, by prefixes of their names: by default the last stage of ResNets
            (``layer4``), the last three blocks of ViT-B and its final norm, as in the paper. Models without such
            names adapt in all norms.
        lr: Learning rate; the authors use 2.5e-4 for ResNets (times batch size / 32 when it is below 32, twice that
            for a batch of one), 1e-3 for ViT (times batch size / 64), with plain momentum SGD.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> SAR(net)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    defaults: ClassVar[StepOptions] = {
        "lr": 2.5e-4,
        "momentum": 0.9,
        "steps": 1,
        "statistics": None,
        "prediction": "before",
    }
    ema: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        margin: float = 0.4,
        rho: float = 0.05,
        collapse: float = 0.029,
        decay: float = 0.9,
        skip: Sequence[str] = LAST_LAYERS,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(model, nesterov=False, skip=skip, **options)
        if not (margin > 0.0 and rho >= 0.0 and collapse >= 0.0 and 0.0 <= decay < 1.0):
            raise ValueError(
                "expected margin > 0, rho >= 0, collapse >= 0 and decay in [0, 1), "
                f"got {margin}, {rho}, {collapse} and {decay}"
            )
        self.margin, self.rho, self.collapse, self.decay = margin, rho, collapse, decay
        # Negative, which no mean of entropies is: no loss has been seen yet.
        self.register_buffer("ema", self.adapting()[0].new_full((), -1.0))

    def loss(self, x: Tensor) -> Step:
        """Mean entropy of the confident samples, with the gradients from uphill."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        out = self.output(x)
        first, sure = self._minimised(out, torch.ones_like(out[:, 0], dtype=torch.bool))
        uphill = self._climb(named, first)
        second, surer = self._minimised(self._forward_with(x, uphill), sure)
        gradients = differentiate(second, list(uphill.values()))
        kept = surer.to(second.dtype).mean() * second.isfinite()
        return Step(out, second, kept, gradients)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Update the running mean of the loss; where that is below the threshold, everything starts again."""
        loss, floor = step.loss.detach(), self.collapse * math.log(step.out.shape[1])
        mean = torch.where(self.ema < 0, loss, self.decay * self.ema + (1.0 - self.decay) * loss)
        self.ema.copy_(torch.where(step.kept > 0, mean, self.ema))
        self.reset_where((self.ema >= 0) & (self.ema < floor))

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Return the entropy of each sample (b,), by which samples are selected and which is minimised."""
        return entropy(logits)

    def _minimised(self, logits: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
        """Mean entropy of the confident samples, and which they are."""
        values = self.uncertainty(logits)
        sure = among & (values.detach() < self.margin * math.log(logits.shape[1]))
        return mean_over(values, sure), sure

    def _climb(self, named: dict[str, nn.Parameter], loss: Tensor) -> dict[str, Tensor]:
        """Copies of the parameters, moved by rho along the gradient of the loss."""
        found = zip(named.values(), differentiate(loss, list(named.values())), strict=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in found]
        length = torch.cat([g.reshape(-1) for g in gradients]).norm() + _TINY
        moved = zip(named.items(), gradients, strict=True)
        return {name: (p + self.rho * g / length).detach().requires_grad_() for (name, p), g in moved}

    def _forward_with(self, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Logits under other parameters; on copies of the buffers, so that running averages learn only once."""
        still = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with exchanged(self.model, {**parameters, **still}):
            return upcast(self.call_model(x))
