"""Pieces of losses: per sample and unreduced, the caller reduces."""

import math

import torch
from torch import Tensor


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
    chosen = torch.where(mask, values, torch.zeros_like(values))
    return chosen.sum() / mask.sum().clamp_min(1)


def imbalance(logits: Tensor) -> Tensor:
    """How far the mean prediction of a batch is from uniform: sum of p log p, a scalar.

    One sample says nothing of the balance of classes, so the term is scaled by (b - 1) / b.
    """
    size = len(logits)
    mean = logits.log_softmax(-1).logsumexp(0) - math.log(size)
    return (mean.exp() * mean).sum() * ((size - 1) / size)
