"""Pieces of losses: per sample and unreduced, the caller reduces."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ttvd.geometry.precision import full_precision


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last dimension, in nats.

    Example:
        >>> round(entropy(torch.zeros(1, 4)).exp().item(), 4)
        4.0
    """
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask is true; 0 where it is nowhere true.

    Values outside the mask do not matter, not even when they are not finite.
    """
    chosen = torch.where(mask, values, 0.0)
    return chosen.sum() / mask.sum().clamp_min(1)


@full_precision
def differentiate(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of a loss by parameters; None where it does not depend on one.

    Without autocast, which would compute the gradients of what was done in float32 in half precision; what was done
    in half precision has its gradients in that.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> differentiate(x.square(), [x])
        (tensor(6.),)
    """
    return torch.autograd.grad(loss, list(parameters), allow_unused=True)


def imbalance(logits: Tensor) -> Tensor:
    """How far the mean prediction of a batch is from uniform: sum of p log p, a scalar.

    One sample says nothing of the balance of classes, so the term is scaled by (b - 1) / b.
    """
    size = len(logits)
    mean = logits.log_softmax(-1).logsumexp(0) - math.log(size)
    return (mean.exp() * mean).sum() * ((size - 1) / size)
