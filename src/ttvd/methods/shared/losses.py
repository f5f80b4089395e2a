"""Pieces of losses, for each sample unless said otherwise."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ttvd.engine.flat import all_finite as all_finite
from ttvd.engine.flat import find_largest as find_largest
from ttvd.geometry.precision import full_precision, upcast


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last dimension, in nats.

    Example:
        >>> round(entropy(torch.zeros(1, 4)).exp().item(), 4)
        4.0
    """
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def opinion_entropy(logits: Tensor) -> Tensor:
    """Entropy of the opinion that subjective logic reads off logits (..., k), in nats.

    An opinion is a belief b_i = e^x_i / (S + k) in each class and the uncertainty k / (S + k), with S the sum of all
    e^x_j: the softmax of the logits and of ln k. The length of the logits has no gradient, so steps turn the logits and
    do not make them longer.

    Example:
        >>> round(opinion_entropy(torch.zeros(1, 4)).item(), 4)  # beliefs of 1/8 and an uncertainty of 1/2
        1.3863
    """
    length = logits.norm(dim=-1, keepdim=True)
    # The quotient is 1 in value; logits that are all 0 have no direction, and get no gradient.
    turned = logits * (length.detach() / length.clamp_min(torch.finfo(length.dtype).tiny))
    unsure = torch.full_like(length, math.log(logits.shape[-1]))
    return entropy(torch.cat([turned, unsure], dim=-1))


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask is true; 0 where it is nowhere true.

    Values outside the mask do not matter, not even when they are not finite.
    """
    chosen = torch.where(mask, values, 0.0)
    return chosen.sum() / mask.sum().clamp_min(1)


@full_precision
def differentiate(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of a loss by parameters; None where it does not depend on one.

    Autocast is off, since it would compute the gradients of float32 operations in half precision. Operations that ran
    in half precision have gradients in half precision.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> differentiate(x.square(), [x])
        (tensor(6.),)
    """
    return torch.autograd.grad(loss, list(parameters), allow_unused=True)


def imbalance(logits: Tensor) -> Tensor:
    """How far the mean prediction of a batch is from uniform: sum of p log p, a scalar.

    One sample shows nothing of the balance of the classes, so the term is scaled by (b - 1) / b.
    """
    size = len(logits)
    mean = logits.log_softmax(-1).logsumexp(0) - math.log(size)
    return (mean.exp() * mean).sum() * ((size - 1) / size)


def log_posteriors(logits: Tensor) -> Tensor:
    """log softmax over the last dimension, in float32 or better."""
    found: Tensor = upcast(logits).log_softmax(-1)
    return found


def soft_likelihood_ratio(log_probs: Tensor, *, clip: float | None = None) -> Tensor:
    """Soft likelihood ratio -sum p log(p / (1 - p)) over the last dimension, which has size two or more.

    log(p / (1 - p)) is the score of a cell minus that of all others together, so the loss is not bounded below: in the
    limit it falls as fast as the score of the chosen cell grows. Without ``clip``, the largest p is compared with the
    sum of the others and not with its own complement, which rounding would make 0.

    Args:
        log_probs: Logarithms of probabilities, from :func:`log_posteriors`. With ``clip``, logits do as well.
        clip: Upper bound of the probabilities, and 1e-5 is added to the ratios, as in ROID.

    Example:
        >>> logits = torch.tensor([[3.0, 0.0, 0.0], [500.0, 0.0, -9e9]])
        >>> soft_likelihood_ratio(log_posteriors(logits)).round(decimals=2)
        tensor([  -1.8200, -500.0000])
        >>> soft_likelihood_ratio(logits, clip=0.99).round(decimals=2)
        tensor([-1.8200, -4.5500])
    """
    if clip is not None:
        clipped = log_probs.softmax(-1).clamp_max(clip)
        return -(clipped * torch.log(clipped / (1.0 - clipped) + 1e-5)).sum(-1)
    probs = log_probs.exp()
    cells = torch.arange(log_probs.shape[-1], device=log_probs.device)
    largest = cells == log_probs.detach().argmax(-1, keepdim=True)
    rest = log_probs.masked_fill(largest, -math.inf).logsumexp(-1, keepdim=True)
    # At most 1/2 is left where the largest is not, and its own place must not give 0 * inf as a gradient.
    others = torch.where(largest, rest, torch.log1p(-probs.masked_fill(largest, 0.0)))
    return -(probs * (log_probs - others)).sum(-1)
