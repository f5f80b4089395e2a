"""Calibration of sites on held-out source data: temperatures, anchors of norms, accuracy, rotations and mirroring.

The scores of a structure have an arbitrary scale (with gamma = -0.8 and temperature 1, their softmax is nearly
uniform). So the temperature of each structure is fitted once, on held-out source data.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry import Diagram, view_scores
from ttvd.nn.anchors import watch_norms
from ttvd.nn.descriptors import InputMoments, describe, measure_inputs
from ttvd.nn.split import SplitModel, shared_copy, split
from ttvd.nn.views import log_rotations, rotation_nll
from ttvd.source.distort import ImageSample, distort, find_strength
from ttvd.source.features import (
    Batch,
    Data,
    check_labels,
    choose_rows,
    compute_features,
    iterate_batches,
    to_unit,
)
from ttvd.zoo.sites import MIRROR_KEY, STRUCTURES, Sites, temperature_key

_FEW = 5.0  # errors and disagreements that count as seen before the first image
_STEPS = 100
_DOUBLINGS = 60
_TOLERANCE = 1e-12  # relative error of the inverse temperature
_MAX_SCORES = 20_000_000  # of one structure: 80 MB, and twice that while its temperature is fitted
_QUANTILES = 65  # of entropies
_DISTORTED = 1_000  # images that are kept in memory to be distorted
NEARLY_ALL = 0.99
"""Accuracy from which on images are taken for images that the model was trained on, unless the caller knows."""


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
    # Without any wrong prediction no slope is positive: do not search for one among many scores.
    for _ in range(_DOUBLINGS if bool((gaps > 0).any()) else 0):
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
        if not low < middle < high:
            break
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
    trained_on: bool | None = False,
    progress: Callable[[int], None] | None = None,
) -> Sites:
    """Measure on held-out source data what the sites need: temperatures, anchors of norms, accuracy and more.

    - A temperature for each structure turns its scores into probabilities. ``vd`` and ``pd`` use the upright view
      alone; ``civd@g`` and ``cipd@g`` compare each view with its own sites. The power diagrams are those of the head;
      a head of k outputs has the upright view only.
    - Anchors are the input moments of the batch norms (``ttvd.nn.anchors``); norms that follow a stream start from
      them.
    - The loss of the rotations of the views, if the head tells them apart, is the reference for the loss on a
      stream (``TTVD(adaptive_step=...)``).
    - The accuracy of upright images, and what it gains if the logits of the mirrored image are averaged in
      (``mirror_gain``). With ``pd``, the averaged logits of a plain head get a temperature too, ``pd+mirror``. How
      often the two views agree, compared with the accuracy, turns agreement on a stream into an accuracy there.
    - Moments of the descriptors of the images (``ttvd.nn.descriptors``): with them a stream is compared.
    - Quantiles of the entropy of the predictions, for the guard; not on images that the model was trained on.

    If no temperature fits a structure, because its scores do not favour the true classes, a warning says so and the
    other temperatures are kept. ``structures=()`` fits no temperature.

    Args:
        model: The model that the sites were estimated with.
        sites: The sites of the model.
        data: Held-out source data in one of the forms of :func:`~ttvd.source.estimate_sites`.
        structures: Structures to calibrate: any of ``vd``, ``civd``, ``pd``, ``cipd``.
        gammas: Exponents of ``civd`` and ``cipd``: TTVD's default, 1, and the paper's, -0.8.
        limit: Largest number of images to use: about the same fraction of every class, or the first images of an
            iterable. A temperature is a single number; more images would cost memory and time for little gain. With
            more than 1,000 classes there are fewer images, so that there are no more than 20 million scores.
        batch_size: Images per forward pass.
        trained_on: Whether the model was trained on these images. If so, up to 1,000 of them are also distorted
            (``ttvd.source.distort``), and each temperature is the higher one of the images as they are and the
            distorted ones, because a temperature of images that a model knows by heart is too sharp. None: decide by
            the accuracy, 99 per cent or more.
        progress: Called with the number of images that are finished.

    Returns:
        The sites with these temperatures added, and with the other figures of these data.

    Raises:
        ValueError: The sites belong to another model, there are no images, or no temperature fits at all.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> images, labels = torch.eye(4).view(4, 1, 2, 2), torch.tensor([0, 0, 1, 1])
        >>> from ttvd.source import estimate_sites
        >>> sites = estimate_sites(net, (images, labels), views=1)
        >>> list(calibrate(net, sites, (images, labels), structures=("vd",)).temperatures)
        ['vd']
    """
    parts = split(model)
    sites.check(parts)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    limit = max(1, min(limit or _MAX_SCORES, _MAX_SCORES // sites.num_classes))
    batches = iterate_batches(data, batch_size, indices=choose_rows(data, 1.0, limit, 0, sites.num_classes))
    measured = _Measurements(parts, sites, structures, gammas)
    sample = ImageSample(_DISTORTED)
    with watch_norms(model, sites.views) as moments:
        for images, labels in batches:
            measured.update(images, labels)
            if trained_on is not False:
                sample.update(images, labels)
            if progress is not None:
                progress(measured.count)
            if measured.count >= limit:
                break
    if not measured.count:
        raise ValueError("there are no images to calibrate on")
    fitted, failed = measured.fit_temperatures()
    failed.pop(MIRROR_KEY, None)  # where mirrored images say nothing, no temperature is missed
    if failed and not fitted.keys() - {MIRROR_KEY}:
        raise ValueError("; ".join(failed.values()))
    if failed:
        warnings.warn(f"{'; '.join(failed.values())}; the other temperatures are kept", stacklevel=2)
    accuracy = measured.right / measured.count
    if trained_on is None and accuracy >= NEARLY_ALL:
        warnings.warn(
            f"{accuracy:.1%} of {measured.count} images are classified correctly, as if the model was trained on them. "
            "Temperatures are fitted on distorted images, so that they are not too sharp; pass trained_on=False if "
            "the model has never seen these images, and held-out images if there are any",
            stacklevel=2,
        )
        trained_on = True
    hardest = measured
    if trained_on:
        hardest = distorted = _Measurements(parts, sites, structures, gammas)
        _measure_distorted(sample, distorted, batch_size)
        hard, _ = distorted.fit_temperatures()
        fitted = {key: max(tau, hard.get(key, tau)) for key, tau in fitted.items()}
    return replace(
        sites.with_temperatures(fitted),
        anchors=moments.anchors(),
        rotation_loss=measured.rotation_loss(),
        mirror_gain=(measured.right_averaged - measured.right) / measured.count,
        accuracy=accuracy,
        inputs=measured.inputs(sites.num_classes),
        agreement_exponent=hardest.agreement_exponent(),
        entropies={} if trained_on else measured.entropies(fitted),
    )


def _measure_distorted(sample: ImageSample, measured: "_Measurements", batch_size: int) -> None:
    """Measure the images of a sample, distorted until the model loses one right answer in eight."""

    def batches(strength: float) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for x, y in zip(sample.images.split(batch_size), sample.labels.split(batch_size), strict=True):
            yield distort(to_unit(x), strength, generator), y

    strength = find_strength(
        lambda strength: sum(measured.count_right(*batch) for batch in batches(strength)) / len(sample.labels)
    )
    for batch in batches(strength):
        measured.update(*batch)


class _Measurements:
    """What held-out images tell, batch by batch.

    Args:
        parts: The model; hooks of its norms see the images, and not the mirrored ones.
        sites: The sites of the model.
        structures: Structures that need a temperature.
        gammas: Exponents of the cluster-induced ones.

    Attributes:
        count: Number of images.
        right: Number of upright images that the model classifies correctly.
        right_averaged: The same with the mean logits of upright and mirrored images.
        apart: Number of images whose upright and mirrored views get different classes.
    """

    def __init__(
        self, parts: SplitModel, sites: Sites, structures: Sequence[str], gammas: Sequence[float]
    ) -> None:
        self.count = self.right = self.right_averaged = self.apart = 0
        self._parts, self._sites = parts, sites
        self._unwatched = shared_copy(parts, set())
        self._head = parts.linear
        self._device = self._head.weight.device
        self._rotations = self._head.out_features // sites.num_classes
        self._rules = _make_rules(sites, self._head, structures, gammas, self._device)
        self._averages = "pd" in structures and self._rotations == 1
        keys = [*self._rules, *([MIRROR_KEY] if self._averages else [])]
        self._scores: dict[str, list[Tensor]] = {key: [] for key in keys}
        self._labels: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._descriptors: list[Tensor] = []

    @torch.no_grad()
    def update(self, images: Tensor, labels: Tensor) -> None:
        """Add a batch of images (b, c, h, w) and labels (b,)."""
        views, classes = self._sites.views, self._sites.num_classes
        z, labels = compute_features(self._parts, images, labels, views, classes)
        mirrored, _ = compute_features(self._unwatched, images.flip(-1), labels, 1, classes)
        upright = self._class_logits(z[0])
        flipped = self._class_logits(mirrored[0])
        averaged = (upright + flipped) / 2
        self.count += len(labels)
        self.right += int((upright.argmax(1) == labels).sum())
        self.right_averaged += int((averaged.argmax(1) == labels).sum())
        self.apart += int((upright.argmax(1) != flipped.argmax(1)).sum())
        self._labels.append(labels)
        self._descriptors.append(describe(to_unit(images)).to(labels.device))
        if self._rotations > 1:
            self._losses.append(_measure_rotation_loss(z, self._head, self._rotations))
        found = {key: rule(z) for key, rule in self._rules.items()}
        for key, scores in {**found, **({MIRROR_KEY: averaged} if self._averages else {})}.items():
            self._scores[key].append(scores.cpu())  # a device may have no memory for all of them

    def count_right(self, images: Tensor, labels: Tensor) -> int:
        """Return how many upright images the model classifies correctly; nothing else is measured."""
        z, labels = compute_features(self._unwatched, images, labels, 1, self._sites.num_classes)
        return int((self._class_logits(z[0]).argmax(1) == labels).sum())

    def fit_temperatures(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the temperatures that fit, and a message for each key that none fits."""
        fitted: dict[str, float] = {}
        failed: dict[str, str] = {}
        labels = torch.cat(self._labels)
        for key, parts in self._scores.items():
            try:
                fitted[key] = fit_temperature(torch.cat(parts).to(self._device), labels)
            except ValueError as error:
                failed[key] = f"cannot calibrate {key!r}: {error}"
        return fitted, failed

    def entropies(self, temperatures: Mapping[str, float]) -> dict[str, Tensor]:
        """Return sorted quantiles of the entropy of the predictions, by the keys of the temperatures."""
        found: dict[str, Tensor] = {}
        for key, tau in temperatures.items():
            each = torch.cat([_entropy(part / tau) for part in self._scores[key]])
            found[key] = each.quantile(torch.linspace(0, 1, _QUANTILES, dtype=torch.float64))
        return found

    def agreement_exponent(self) -> float:
        """Return r of accuracy = agreement^r, with the accuracy of the averaged logits and the agreement of both views.

        A few images more count as wrong and as disagreed upon, so that a handful of images does not decide.
        """
        count = self.count + 2 * _FEW
        return math.log((self.right_averaged + _FEW) / count) / math.log((count - _FEW - self.apart) / count)

    def inputs(self, num_classes: int) -> InputMoments:
        """Return the moments of the descriptors of the images."""
        return measure_inputs(torch.cat(self._descriptors), torch.cat(self._labels), num_classes)

    def rotation_loss(self) -> float | None:
        """Return the mean loss of the rotations; None for a head that does not tell them apart."""
        # Rounding can make the loss of a confident head slightly negative.
        return max(0.0, float(torch.cat(self._losses).mean())) if self._losses else None

    def _class_logits(self, z: Tensor) -> Tensor:
        """Return the logits (b, k) of the head, or of its rows of the upright view."""
        weight, bias = self._head.weight[:: self._rotations], self._head.bias
        offset = None if bias is None else bias[:: self._rotations].to(z.dtype)
        return F.linear(z, weight.to(z.dtype), offset)


def _entropy(scores: Tensor) -> Tensor:
    """Return the entropy of softmax(scores), (b,), float64."""
    found: Tensor = torch.special.entr(scores.double().softmax(1)).sum(1)
    return found


@torch.no_grad()
def _measure_rotation_loss(z: Tensor, head: nn.Linear, rotations: int) -> Tensor:
    """Return -log p(rotation a) of the views a of features (v, b, d), averaged over the views: (b,)."""
    log_probs: Tensor = head(z.to(head.weight.dtype)).float().log_softmax(-1)
    return rotation_nll(log_rotations(log_probs, rotations)).mean(1).cpu()


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
