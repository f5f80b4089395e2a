"""Calibration of sites on held-out source data: temperatures, anchors of norms, and the loss of rotations.

The scores of a structure have an arbitrary scale (with gamma = -0.8 and temperature 1, their softmax is nearly
uniform). So the temperature of each structure is fitted once, on held-out source data.
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
from ttvd.nn.views import log_rotations, rotation_nll
from ttvd.source.features import Data, check_labels, choose_rows, iterate_batches, stream_features
from ttvd.zoo.sites import STRUCTURES, Sites, temperature_key

_STEPS = 100
_DOUBLINGS = 60
_TOLERANCE = 1e-12  # relative error of the inverse temperature


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """Fit the temperature that minimises the negative log-likelihood of ``softmax(scores / tau)``.

    The log-likelihood is concave in 1 / tau, so its only maximum is where the slope changes sign. The maximum is
    bracketed and then found by Newton steps, in float64. If all n predictions are right, the likelihood grows without
    end as tau falls. The temperature is then the one at which the mean confidence is (n + 1) / (n + 2): the
    probability of another success after n successes (Laplace's rule of succession).

    Args:
        scores: Scores (n, k); a larger score means a more likely class.
        labels: True classes (n,).

    Raises:
        ValueError: There is no best temperature: the scores are not finite, or they do not favour the true classes.

    Example:
        >>> scores = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
        >>> tau = fit_temperature(scores, torch.tensor([0, 0, 0, 1]))  # three of four are right
        >>> round(torch.tensor(1 / tau).sigmoid().item(), 6)
        0.75
    """
    gaps = _subtract_true_score(scores, labels)
    scale = gaps.std().item()
    if not scale > 0 or _slope(gaps, 0.0)[0] >= 0:
        raise ValueError("no temperature fits: the scores do not favour the true classes")
    low = high = 1 / scale
    for _ in range(_DOUBLINGS):
        if _slope(gaps, high)[0] > 0:
            break
        low, high = high, 2 * high
    else:
        return 1 / _fit_confidence(gaps, 1 / scale)
    while _slope(gaps, low)[0] > 0:
        low /= 2
    inverse = math.sqrt(low * high)
    for _ in range(_STEPS):
        slope, curvature = _slope(gaps, inverse)
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        last, inverse = inverse, inverse - slope / curvature if curvature > 0 else 0.0
        if abs(inverse - last) <= _TOLERANCE * last:
            break
        if not low < inverse < high:  # the Newton step left the bracket: bisect
            inverse = math.sqrt(low * high)
    return 1 / inverse


def _fit_confidence(gaps: Tensor, inverse: float) -> float:
    """Return the inverse temperature at which the mean probability of the true classes is (n + 1) / (n + 2)."""
    target = (len(gaps) + 1) / (len(gaps) + 2)
    low = high = inverse
    while _mean_confidence(gaps, low) > target:
        low /= 2
    for _ in range(_DOUBLINGS):
        if _mean_confidence(gaps, high) >= target:
            break
        high *= 2
    else:
        raise ValueError("no temperature fits: true classes share the highest score with others")
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _mean_confidence(gaps, middle) >= target else (middle, high)
    return high


def _mean_confidence(gaps: Tensor, inverse: float) -> float:
    return float((-torch.logsumexp(gaps * inverse, 1)).exp().mean())


def _subtract_true_score(scores: Tensor, labels: Tensor) -> Tensor:
    """Return scores in float64 minus the score of the true class, which does not change their softmax."""
    if scores.ndim != 2 or len(scores) != len(labels):
        shapes = f"{tuple(scores.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"expected scores (n, k) and labels (n,), got {shapes}")
    check_labels(labels, scores.shape[1])
    values = scores.detach().double()
    if not bool(values.isfinite().all()):
        raise ValueError("no temperature fits: the scores are not finite")
    return values - values.gather(1, labels[:, None].long())


def _slope(gaps: Tensor, inverse: float) -> tuple[float, float]:
    """Return the first and second derivative of the mean negative log-likelihood with respect to 1 / tau."""
    probs = F.softmax(gaps * inverse, 1)
    means = (probs * gaps).sum(1)
    variances = (probs * (gaps - means[:, None]).square()).sum(1)
    first, second = torch.stack([means.mean(), variances.mean()]).tolist()
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
    """Measure temperatures, anchors of norms and the loss of rotations on held-out source data.

    - A temperature for each structure turns its scores into probabilities. ``vd`` and ``pd`` use the upright view
      alone; ``civd@g`` and ``cipd@g`` compare each view with its own sites. The power diagrams are those of the head;
      a head of k outputs has the upright view only.
    - Anchors are the input moments of the batch norms (``ttvd.nn.anchors``); norms that follow a stream start from
      them.
    - The loss of the rotations of the views, if the head tells them apart, is the reference for the loss on a
      stream (``TTVD(adaptive_step=...)``).

    If no temperature fits a structure, because its scores do not favour the true classes, a warning says so and the
    other temperatures are kept. ``structures=()`` measures anchors and rotation loss alone.

    Args:
        model: The model that the sites were estimated with.
        sites: The sites of the model.
        data: Held-out source data in one of the forms of :func:`~ttvd.source.estimate_sites`.
        structures: Structures to calibrate: any of ``vd``, ``civd``, ``pd``, ``cipd``.
        gammas: Exponents of ``civd`` and ``cipd``: TTVD's default, 1, and the paper's, -0.8.
        limit: Largest number of images to use: about the same fraction of every class, or the first images of an
            iterable. A temperature is a single number; more images would cost memory and time for little gain.
        batch_size: Images per forward pass.

    Returns:
        The sites with these temperatures added, and with the anchors and the rotation loss of these data.

    Raises:
        ValueError: The sites belong to another model, there are no images, or no temperature fits at all.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> images, labels = torch.eye(4).view(4, 1, 2, 2), torch.tensor([0, 0, 1, 1])
        >>> from ttvd.source import estimate_sites
        >>> sites = estimate_sites(net, (images, labels), views=1)
        >>> calibrate(net, sites, (images, labels), structures=("vd",))
        Sites(classes=2, views=1, dim=4, fraction=1, temperatures=[vd], anchors=[], rotation_loss=None)
    """
    sites.check(model)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    device = next(model.parameters()).device
    head = split(model).linear
    knows_rotations = head.out_features > sites.num_classes
    rules = _make_rules(sites, head, structures, gammas, device)
    found: dict[str, list[Tensor]] = {key: [] for key in rules}
    labels: list[Tensor] = []
    losses: list[Tensor] = []
    batches = iterate_batches(data, batch_size, indices=choose_rows(data, 1.0, limit, 0, sites.num_classes))
    with watch_norms(model, sites.views) as moments:
        for z, y in stream_features(model, batches, sites.views, sites.num_classes):
            labels.append(y)
            if knows_rotations:
                losses.append(_measure_rotation_loss(z, head, sites.num_classes))
            for key, rule in rules.items():
                found[key].append(rule(z).cpu())  # a device may have no memory for all of them
            if limit is not None and sum(map(len, labels)) >= limit:
                break
    if not labels:
        raise ValueError("there are no images to calibrate on")
    target = torch.cat(labels)
    fitted = _fit_all({key: torch.cat(parts) for key, parts in found.items()}, target, device)
    # Rounding can make the loss of a confident head slightly negative.
    loss = max(0.0, float(torch.cat(losses).mean())) if knows_rotations else None
    return replace(sites.with_temperatures(fitted), anchors=moments.anchors(), rotation_loss=loss)


@torch.no_grad()
def _measure_rotation_loss(z: Tensor, head: nn.Linear, classes: int) -> Tensor:
    """Return -log p(rotation a) of the views a of features (v, b, d), averaged over the views: (b,)."""
    log_probs: Tensor = head(z.to(head.weight.dtype)).float().log_softmax(-1)
    return rotation_nll(log_rotations(log_probs, head.out_features // classes)).mean(1).cpu()


Rule = Callable[[Tensor], Tensor]


@torch.no_grad()
def _make_rules(
    sites: Sites, head: nn.Linear, structures: Sequence[str], gammas: Sequence[float], device: torch.device
) -> dict[str, Rule]:
    """Return, for each key of a temperature, the function from features (v, b, d) to class scores (b, k)."""
    joint = sites.views if head.out_features == sites.num_classes * sites.views else 1
    upright = Diagram.from_linear(head.weight[::joint], None if head.bias is None else head.bias[::joint])
    power = Diagram.from_linear(head.weight, head.bias, views=joint)
    pairs = {
        "vd": (sites.diagram(1), 1),
        "civd": (sites.diagram(), sites.views),
        "pd": (upright, 1),
        "cipd": (power, joint),
    }
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
    """Fit a temperature for each key; one that does not fit does not affect the others."""
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
