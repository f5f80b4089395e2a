"""Label shift: when the class frequencies change, only the weights of a power diagram move.

If the class-conditional distributions stay and only the class frequencies change, from s to π, the posterior p(k | z)
is multiplied by π_k / s_k and normalised. This adds log(π_k / s_k) to the logits, which is a change of the head's bias.
By the Lemma, the sites W / 2 stay and the weights b + |W|² / 4 move by log(π_k / s_k), times the temperature if there
is one. The walls of the cells move in parallel, away from the classes that have become more frequent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ttvd.geometry.precision import upcast


def shift_weights(scores: Tensor, count: float | Tensor, rounds: int = 3) -> Tensor:
    """Return the change of the weights under label shift: log(k π), where π are the class frequencies of a batch.

    π is estimated by expectation maximisation (Saerens, Latinne and Decaestecker, Neural Computation 2002) with
    s = 1 / k: each round replaces π by the mean posterior under π. The mean includes ``count`` pseudo-images that are
    spread evenly over the classes (a Dirichlet prior). The posterior probability of π never falls from round to round,
    and it has a single maximum. A small batch moves the weights little: if ``count`` is large compared with the batch,
    the weights stay.

    Args:
        scores: Log-posteriors (b, k) for equal class frequencies, up to a constant for each image.
        count: Number of pseudo-images, positive. It keeps every π, and so the result, away from the boundary. The
            value of a scalar tensor is not checked, so nothing waits for a device.
        rounds: Number of rounds, starting from π = 1 / k.

    Returns:
        Changes (k,) in float32 or better, without a gradient; softmax(scores + result) are the posteriors under π.

    Example:
        >>> scores = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 0.0]])  # the third image is ambiguous
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
    prior, gain = count / (count + size), classes * (size / (count + size))
    change = torch.zeros_like(scores[0])
    for _ in range(rounds):
        change = (prior + gain * (scores + change).softmax(1).mean(0)).log()
    return change


def check_count(name: str, count: float) -> None:
    """Raise a ValueError unless ``count``, called ``name``, is a positive number."""
    if not 0.0 < count < math.inf:
        raise ValueError(f"{name} must be a positive, finite number of pseudo-images, got {count}")
