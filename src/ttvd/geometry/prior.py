"""Label shift: when the classes come in other shares than before, only the weights of a power diagram move.

If the images of each class look as they did and only the shares of the classes change, from s to π, the posterior
p(k | z) is multiplied by π_k / s_k and normalised. Added to the logits, log(π_k / s_k) is a change of the head's bias:
by the Lemma the sites W / 2 stay where they are and the weights b + |W|² / 4 move by log(π_k / s_k), times the
temperature where there is one. Walls are shifted parallel to themselves, away from the classes that have become
frequent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast


def shift_weights(scores: Tensor, count: float | Tensor, rounds: int = 3) -> Tensor:
    """Returns by how much label shift moves the weights: log(k π), π the shares of the classes in a batch.

    π is estimated by expectation and maximisation (Saerens, Latinne and Decaestecker, Neural Computation 2002), with
    s = 1 / k: each round replaces π by the mean posterior under π, where ``count`` imagined images, spread evenly over
    the classes, are part of the mean. The likelihood of the batch under its Dirichlet prior never falls, and has one
    maximum only. A few images say little, so they move little: without them, or with a count that is large against
    the batch, nothing moves.

    Args:
        scores: (b, k) logarithms of posteriors for classes in equal shares, up to a constant for each image.
        count: number of imagined images, positive; it also keeps every π, and so the result, from the edge. A scalar
            tensor is not looked at, so that nothing waits for a device.
        rounds: how often π is replaced, from 1 / k on.

    Returns:
        (k,) in float32 or better, without a gradient; softmax(scores + result) are the posteriors under π.

    Example:
        >>> scores = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 0.0]])  # the third one could be either
        >>> (scores[2] + shift_weights(scores, count=1.0)).softmax(0).round(decimals=2)
        tensor([0.8200, 0.1800])
    """
    if not isinstance(count, Tensor):
        check_count("count", count)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if scores.ndim != 2 or not len(scores):
        raise ValueError(f"expected scores (b, k) of at least one image, got {tuple(scores.shape)}")
    scores, (size, classes) = upcast(scores.detach()), scores.shape
    imagined, gain = count / (count + size), classes * (size / (count + size))
    moved = torch.zeros_like(scores[0])
    for _ in range(rounds):
        moved = (imagined + gain * (scores + moved).softmax(1).mean(0)).log()
    return moved


def check_count(name: str, count: float) -> None:
    """Raises a ValueError unless ``count``, called ``name``, is a positive number."""
    if not 0.0 < count < math.inf:
        raise ValueError(f"{name} must be a positive, finite number of imagined images, got {count}")
