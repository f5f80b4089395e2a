"""Temperatures: how sharp the softmax of influences must be to mean a probability.

Influences have arbitrary scales (with gamma = -0.8 and temperature 1 their softmax is nearly uniform), so the
temperature of each structure is fitted once, on held-out source data.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry import Diagram, view_scores
from ttvd.nn.anchors import watch_norms
from ttvd.nn.split import split
from ttvd.source.collect import choose_rows
from ttvd.source.features import Data, iterate_batches, stream_features
from ttvd.source.images import check_labels
from ttvd.zoo.sites import STRUCTURES, Sites, temperature_key

_STEPS = 100
_DOUBLINGS = 60
_CLOSE = 1e-12  # how far the inverse temperature may be from the best, relatively


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """The temperature with the smallest negative log-likelihood of ``softmax(scores / tau)``.

    The likelihood is concave in 1 / tau, so its only maximum is where the slope changes sign; that point is
    bracketed and then found by Newton's steps, in float64. Where all n predictions are right, the sharper the likelier:
    the temperature is then the one at which the mean confidence is (n + 1) / (n + 2), which is what n successes promise
    of the next image (Laplace's rule of succession).

    Args:
        scores: (n, k), the larger the likelier.
        labels: True classes (n,).

    Raises:
        ValueError: There is no best temperature: the scores are not finite, or they say nothing about the labels (the
            flatter the better).

    Example:
        >>> scores = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
        >>> tau = fit_temperature(scores, torch.tensor([0, 0, 0, 1]))  # three of four are right
        >>> round(torch.tensor(1 / tau).sigmoid().item(), 6)
        0.75
    """
    gaps = _compare_scores(scores, labels)
    scale = gaps.std().item()
    if not scale > 0 or _slope(gaps, 0.0)[0] >= 0:
        raise ValueError("no temperature fits: the scores do not favour the true classes")
    low = high = 1 / scale
    for _ in range(_DOUBLINGS):
        if _slope(gaps, high)[0] > 0:
            break
        low, high = high, 2 * high
    else:
        return 1 / _promise(gaps, 1 / scale)
    while _slope(gaps, low)[0] > 0:
        low /= 2
    inverse = math.sqrt(low * high)
    for _ in range(_STEPS):
        slope, bend = _slope(gaps, inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        last, inverse = inverse, inverse - slope / bend if bend > 0 else 0.0
        if abs(inverse - last) <= _CLOSE * last:
            break
        if not low < inverse < high:  # a step too far: halve
            inverse = math.sqrt(low * high)
    return 1 / inverse


def _promise(gaps: Tensor, inverse: float) -> float:
    """The inverse temperature at which the true classes have the mean probability of the rule of succession."""
    aim = (len(gaps) + 1) / (len(gaps) + 2)
    low = high = inverse
    while _sureness(gaps, low) > aim:
        low /= 2
    for _ in range(_DOUBLINGS):
        if _sureness(gaps, high) >= aim:
            break
        high *= 2
    else:
        raise ValueError("no temperature fits: true classes share the highest score with others")
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _sureness(gaps, middle) >= aim else (middle, high)
    return high


def _sureness(gaps: Tensor, inverse: float) -> float:
    return float((-torch.logsumexp(gaps * inverse, 1)).exp().mean())


def _compare_scores(scores: Tensor, labels: Tensor) -> Tensor:
    """Scores in float64 less the score of the true class, which leaves the softmax as it is."""
    if scores.ndim != 2 or len(scores) != len(labels):
        shapes = f"{tuple(scores.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"expected scores (n, k) and labels (n,), got {shapes}")
    check_labels(labels, scores.shape[1])
    values = scores.detach().double()
    if not bool(values.isfinite().all()):
        raise ValueError("no temperature fits: the scores are not finite")
    return values - values.gather(1, labels[:, None].long())


def _slope(gaps: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean negative log-likelihood by 1 / tau."""
    chances = F.softmax(gaps * inverse, 1)
    means = (chances * gaps).sum(1)
    spread = (chances * (gaps - means[:, None]).square()).sum(1)
    first, second = torch.stack([means.mean(), spread.mean()]).tolist()
    return first, second


def calibrate(
    model: nn.Module,
    sites: Sites,
    data: Data,
    *,
    structures: Sequence[str] = STRUCTURES,
    gammas: Sequence[float] = (1.0, -0.8),
    limit: int | None = 20_000,
    batch_size: int = 256,
) -> Sites:
    """Measure on held-out source data what sites alone do not tell: temperatures, anchors of norms, loss of rotations.

    Anchors are what the data show to the batch norms (``ttvd.nn.anchors``); norms that follow a stream start there.
    The loss of the rotations of the views, where the head tells them apart, is what streams are held against
    (``TTVD(adaptive_step=...)``). ``structures=()`` measures these two alone. Where no temperature fits a structure (its
    scores say nothing about the labels), a warning says so and the others are kept.

    ``vd`` and ``pd`` look at the upright view alone, ``civd@g`` and ``cipd@g`` compare each view with its own
    sites. The power diagrams are those of the head; a head of k outputs knows the upright view only.

    Args:
        model: The model that the sites were estimated with.
        sites: Its sites.
        data: Held-out source data in one of the forms of :func:`estimate_sites`.
        structures: Any of ``vd``, ``civd``, ``pd``, ``cipd``.
        gammas: Exponents for ``civd`` and ``cipd``: by default that of TTVD's default, 1, and the paper's, -0.8.
        limit: Use at most so many images, about the same share of every class; of an iterable the first ones. A
            temperature is one number: for it, all of ImageNet's would be gigabytes of scores and hours of decoding.
        batch_size: Images per forward pass.

    Returns:
        The sites with these temperatures added, and the anchors and the rotation loss of these data.

    Raises:
        ValueError: The sites are of another model, there are no images, or no temperature fits at all.
    """
    sites.check(model)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    device = next(model.parameters()).device
    head = split(model).linear
    several = head.out_features > sites.num_classes
    rules = _make_rules(sites, head, structures, gammas, device)
    found: dict[str, list[Tensor]] = {key: [] for key in rules}
    labels: list[Tensor] = []
    rotations: list[Tensor] = []
    batches = iterate_batches(data, batch_size, indices=choose_rows(data, 1.0, limit, 0, sites.num_classes))
    with watch_norms(model, sites.views) as moments:
        for z, y in stream_features(model, batches, sites.views, sites.num_classes):
            labels.append(y)
            if several:
                rotations.append(_lose_rotations(z, head, sites.num_classes))
            for key, rule in rules.items():
                found[key].append(rule(z).cpu())  # a device may have no room for all of them
            if limit is not None and sum(map(len, labels)) >= limit:
                break
    if not labels:
        raise ValueError("there are no images to calibrate on")
    target = torch.cat(labels)
    fitted = _fit_all({key: torch.cat(parts) for key, parts in found.items()}, target, device)
    # Of a head that is sure, rounding may make it less than nothing.
    loss = max(0.0, float(torch.cat(rotations).mean())) if several else None
    return replace(sites.with_temperatures(fitted), anchors=moments.anchors(), rotation_loss=loss)


@torch.no_grad()
def _lose_rotations(z: Tensor, head: nn.Linear, classes: int) -> Tensor:
    """-log p(rotation a) of the views a of images, averaged over the views: (b,)."""
    cells: Tensor = head(z.to(head.weight.dtype)).float().log_softmax(-1)
    known: Tensor = cells.unflatten(-1, (classes, -1)).logsumexp(2)  # (v, b, rotations)
    return -known.diagonal(dim1=0, dim2=2).mean(1).cpu()


Rule = Callable[[Tensor], Tensor]


@torch.no_grad()
def _make_rules(
    sites: Sites, head: nn.Linear, structures: Sequence[str], gammas: Sequence[float], device: torch.device
) -> dict[str, Rule]:
    """For each key of a temperature the function from features (v, b, d) to class scores (b, k)."""
    joint = sites.views if head.out_features == sites.num_classes * sites.views else 1
    upright = Diagram.from_linear(head.weight[::joint], None if head.bias is None else head.bias[::joint])
    power = Diagram.from_linear(head.weight, head.bias, views=joint)
    pairs = {"vd": (sites.diagram(1), 1), "civd": (sites.diagram(), sites.views), "pd": (upright, 1)}
    pairs["cipd"] = (power, joint)
    rules: dict[str, Rule] = {}
    for structure in structures:
        for gamma in gammas if structure in ("civd", "cipd") else (1.0,):
            key = temperature_key(structure, gamma)
            diagram, views = pairs[structure]
            rules[key] = partial(_score, diagram.to(device), views, gamma)
    return rules


def _score(diagram: Diagram, views: int, gamma: float, z: Tensor) -> Tensor:
    return view_scores(z[:views], diagram, gamma)


def _fit_all(scores: dict[str, Tensor], labels: Tensor, device: torch.device) -> dict[str, float]:
    """A temperature for each key; one that does not fit must not cost the others."""
    fitted: dict[str, float] = {}
    failed: list[str] = []
    for key, values in scores.items():
        try:
            fitted[key] = fit_temperature(values.to(device), labels)
        except ValueError as error:
            failed.append(f"cannot calibrate {key!r}: {error}")
    if failed and not fitted:
        raise ValueError("; ".join(failed))
    if failed:
        warnings.warn(f"{'; '.join(failed)}; the other temperatures are kept", stacklevel=3)
    return fitted
