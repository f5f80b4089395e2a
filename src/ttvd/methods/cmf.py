"""CMF: ROID held near a source model that a Kalman filter moves along the stream."""

from typing import Unpack

import torch
from torch import Tensor, nn

from ttvd.methods.gradient import Step, StepOptions
from ttvd.methods.registry import register
from ttvd.methods.roid import ROID
from ttvd.nn.norms import apply_statistics, select_parameters
from ttvd.nn.split import shared_copy

_REFERENCE = 38_400  # affine parameters of the norms of ViT-B/16, for which the authors give q
_SLOWEST, _STILL = 0.89, 0.9999  # the authors' bounds of beta: the second counts as 1


@register(
    "cmf",
    summary="ROID held near a hidden model: a Kalman filter of the weights along the stream.",
    paper="Lee and Chang, ICLR 2024",
    updates="norm affine",
    forwards=2,
    backwards=2,
)
class CMF(ROID):
    """Continual momentum filtering: :class:`~ttvd.methods.roid.ROID` whose anchor moves.

    The loss, the weights of the samples and the corrected prior are ROID's. ROID pulls the weights theta back to those
    of the source. Here they are pulled to a hidden model h, which a Kalman filter estimates from the weights of all
    steps so far. After each step, with v the variance of h, r = 1 - Q and Q = q * (number of adapting parameters) /
    38,400:

    1. predict: h <- alpha h + (1 - alpha) theta_source, v <- alpha^2 v + Q;
    2. update: beta = r / (v + r), not below 0.89, and 1 from 0.9999 on; h <- beta h + (1 - beta) theta, v <- beta v;
    3. ensemble: theta <- gamma theta + (1 - gamma) h.

    h starts at the source, v at 0. A model with few adapting parameters has a small Q: then h hardly leaves the source,
    and this is ROID.

    Works with batch, group and layer norm; batch norms use the statistics of the batch. A batch of one is one sample of
    weight 1, as in ROID.

    Deviations from the authors' code, beside those of ROID: ``reset`` sets v to 0 (theirs keeps it); h holds the
    parameters that adapt (theirs is a whole model, whose other parameters never change).

    Args:
        model: The classifier.
        temperature: Temperature of the weights of the samples; 1/3 in the paper.
        alpha: Share of the hidden model that stays when it moves towards the source; 0.99 in the paper.
        gamma: Share of the adapted weights in the weights after a step; 0.99 in the paper.
        q: Variance that a step adds to the hidden model, for 38,400 parameters: 0.005 in the paper. It must lie below 1
            after scaling.
        beta: Share of the past in the running mean prediction, 0.9 in the paper.
        batch_size: What the weighted sums are divided by, as in ROID.
        seed: Seed of the augmentations.
        lr: Learning rate; the authors take ROID's.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> CMF(net)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    networks = ("model", "source", "hidden")
    variance: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1 / 3,
        alpha: float = 0.99,
        gamma: float = 0.99,
        q: float = 0.005,
        beta: float = 0.9,
        batch_size: int | None = None,
        seed: int = 0,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(
            model,
            temperature=temperature,
            alpha=alpha,
            beta=beta,
            batch_size=batch_size,
            seed=seed,
            **options,
        )
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        count = sum(p.numel() for p in self.adapting())
        self.gamma, self.noise = gamma, q * count / _REFERENCE
        if not 0.0 <= self.noise < 1.0:
            raise ValueError(
                f"q * {count} adapting parameters / {_REFERENCE} must lie in [0, 1), got {self.noise:g}; give a q of "
                f"at least 0 and below {_REFERENCE / count:g}"
            )
        owned = select_parameters(model, "norm")
        self.hidden = apply_statistics(shared_copy(model, owned), self.statistics).eval()
        self.register_buffer("variance", self.probe.new_zeros((), requires_grad=False))

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Filter the weights, and move them towards the hidden model."""
        predicted, trust = self.alpha**2 * self.variance + self.noise, 1.0 - self.noise
        beta = (trust / (predicted + trust)).clamp_min(_SLOWEST)
        beta = torch.where(beta < _STILL, beta, 1.0)
        self.variance.copy_(beta * predicted)
        networks = (self.model, self.hidden, self.source)
        for own, hidden, source in zip(*(network.parameters() for network in networks), strict=True):
            if own.requires_grad:
                hidden.lerp_(source, 1.0 - self.alpha)
                hidden.lerp_(own, (1.0 - beta).to(own.dtype))
                own.lerp_(hidden, 1.0 - self.gamma)
