"""Error, negative log-likelihood, Brier score and calibration error of probabilities (b, k) for labels (b,).

`RunningMetrics` accumulates the metrics of a stream, in float64 on the CPU. `sum_batches` scores many batches at once
on the device of their logits, also in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

# A probability of zero for the true class costs -log of this (87.3 nats) instead of infinity.
_TINY = torch.finfo(torch.float32).tiny
_SUMS = ("nll_sum", "brier_sum", "batch_ece_sum")
_BINS = ("bin_count", "bin_confidence", "bin_correct")


@dataclass(frozen=True, eq=False)
class Reliability:
    """Data of a reliability diagram: equal-width bins (lo, hi] of the largest probability.

    Attributes:
        count: Number of samples of each bin (bins,).
        confidence: Mean confidence of each bin (bins,); NaN for an empty bin.
        accuracy: Accuracy of each bin (bins,); NaN for an empty bin.
    """

    count: Tensor
    confidence: Tensor
    accuracy: Tensor


def error(probs: Tensor, labels: Tensor) -> float:
    """Return the share of samples whose most probable class is not the label.

    >>> error(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    return _measure(probs, labels).compute()["error"]


def nll(probs: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-probability of the labels, in nats; at most 87.3 for a single sample.

    >>> round(nll(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([1, 0])), 4)
    0.3466
    """
    return _measure(probs, labels).compute()["nll"]


def brier(probs: Tensor, labels: Tensor) -> float:
    """Return the squared distance between probabilities and one-hot labels, summed over classes, in [0, 2].

    >>> round(brier(torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([0, 1])), 4)
    0.26
    """
    return _measure(probs, labels).compute()["brier"]


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error: the count-weighted mean over bins of |confidence - accuracy|.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([0, 1])), 4)
    0.4
    """
    return _measure(probs, labels, bins).compute()["ece"]


def reliability(probs: Tensor, labels: Tensor, bins: int = 15) -> Reliability:
    """Return count, mean confidence and accuracy of each confidence bin.

    >>> reliability(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), torch.tensor([0, 1]), bins=4).count
    tensor([0, 0, 1, 1])
    """
    return _measure(probs, labels, bins).reliability()


class RunningMetrics:
    """Metrics of a stream, kept as sums: they need constant memory and can be merged.

    `ece` is the calibration error of the whole stream. `batch_ece` is the mean of the calibration errors of the
    batches, weighted by their sizes, which some papers report. It is biased upwards (a perfectly calibrated predictor
    of mean confidence 0.8 gets about 0.1 with batches of 64), so use it only to compare with those papers.

    Args:
        bins: Number of confidence bins.

    >>> metrics = RunningMetrics(bins=15)
    >>> metrics.update(torch.tensor([0, 1]), probs=torch.tensor([[0.9, 0.1], [0.7, 0.3]]))
    >>> {name: round(value, 4) for name, value in metrics.compute().items()}
    {'error': 0.5, 'nll': 0.6547, 'brier': 0.5, 'ece': 0.4, 'batch_ece': 0.4, 'n': 2}
    """

    def __init__(self, bins: int = 15) -> None:
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        self._bins = torch.zeros(len(_BINS), bins, dtype=torch.float64)

    def update(self, labels: Tensor, *, logits: Tensor | None = None, probs: Tensor | None = None) -> None:
        """Add one batch of logits or probabilities (log-probabilities count as logits)."""
        if logits is not None and probs is None:
            values = _check_logits(logits)
        elif probs is not None and logits is None:
            values = _check_probs(probs)
        else:
            raise TypeError("update expects exactly one of logits=... and probs=...")
        labels = _check_labels(labels, *values.shape)
        sums = _sum_samples(values[None], labels[None], self._bins.shape[1])[0]
        self._sums = self._sums + sums[: len(_SUMS)]
        self._bins = self._bins + sums[len(_SUMS) :].view_as(self._bins)

    def merge(self, other: "RunningMetrics") -> None:
        """Add the samples of another object."""
        if (ours := self._bins.shape[1]) != (theirs := other._bins.shape[1]):
            raise ValueError(f"cannot merge {theirs} bins into {ours}: use the same number of bins")
        self._sums, self._bins = self._sums + other._sums, self._bins + other._bins

    def compute(self) -> dict[str, float]:
        """Return error, nll, brier, ece, batch_ece and n."""
        n, correct = self._bins[[0, 2]].sum(dim=1).long().tolist()
        if n == 0:
            raise ValueError("no samples yet: call update before compute")
        nll, brier, batch_ece = (self._sums / n).tolist()
        ece = float((self._bins[1] - self._bins[2]).abs().sum()) / n
        losses = {"error": (n - correct) / n, "nll": nll, "brier": brier}
        return losses | {"ece": ece, "batch_ece": batch_ece, "n": n}

    def reliability(self) -> Reliability:
        """Return count, mean confidence and accuracy of each confidence bin."""
        confidence, accuracy = self._bins[1:] / self._bins[0]
        return Reliability(self._bins[0].long(), confidence, accuracy)

    def state(self) -> dict[str, float | list[float]]:
        """Return the sums as plain numbers and lists, which JSON stores exactly."""
        n, correct = self._bins[[0, 2]].sum(dim=1).long().tolist()
        values = [*self._sums.tolist(), *self._bins.tolist()]
        return {"n": n, "correct": correct, **dict(zip(_SUMS + _BINS, values, strict=True))}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return an object equal to the one that `state` was taken from."""
        expected = {"n", "correct", *_SUMS, *_BINS}
        if set(state) != expected:
            raise ValueError(f"expected the keys {sorted(expected)}, got {sorted(state)}")
        metrics = cls(bins=len(state["bin_count"]))
        metrics._sums = torch.tensor([state[name] for name in _SUMS], dtype=torch.float64)
        metrics._bins = torch.tensor([state[name] for name in _BINS], dtype=torch.float64)
        if metrics._bins[[0, 2]].sum(dim=1).tolist() != [state["n"], state["correct"]]:
            raise ValueError("n or correct is not the sum over the bins: the state is damaged")
        return metrics


def sum_batches(logits: Sequence[Tensor], labels: Sequence[Tensor], bins: int = 15) -> Tensor:
    """Score several batches together on the device of their logits, without waiting for it.

    Batches of one shape share kernels, and each sum has a fixed order, so results are reproducible.

    Args:
        logits: Logits (b, k) of each batch; log-probabilities count as logits.
        labels: Labels (b,) of each batch, on any device.
        bins: Number of confidence bins.

    Returns:
        Table with a row for each batch: the state of its metrics, for `read_sums`, and in the last column 1 if
        `RunningMetrics.update` would refuse the values, else 0.

    >>> table = sum_batches([torch.zeros(2, 2), torch.zeros(3, 2)], [torch.tensor([0, 1]), torch.zeros(3).long()])
    >>> [(state["n"], state["correct"]) for state in read_sums(table)]
    [(2, 1), (3, 3)]
    """
    groups: dict[torch.Size, list[int]] = {}
    for i, (scores, truth) in enumerate(zip(logits, labels, strict=True)):
        _check_kind(scores, "logits")
        _check_label_kind(truth, len(scores))
        groups.setdefault(scores.shape, []).append(i)
    rows: dict[int, Tensor] = {}
    for indices in groups.values():
        scores = torch.stack([logits[i] for i in indices])
        truths = [labels[i].to(scores.device, torch.int64, non_blocking=True) for i in indices]
        table = _sum_group(scores, torch.stack(truths), bins)
        rows.update(zip(indices, table.unbind(), strict=True))
    return torch.stack([rows[i] for i in range(len(logits))])


def read_sums(table: Tensor) -> list[dict[str, float | list[float]]]:
    """Return the state, as `RunningMetrics.state` gives it, of each batch in a table of `sum_batches`."""
    bins = (table.shape[1] - len(_SUMS) - 1) // len(_BINS)
    cuts = [len(_SUMS) + bins * i for i in range(len(_BINS) + 1)]
    states: list[dict[str, float | list[float]]] = []
    for row in table.tolist():
        parts = [row[start:stop] for start, stop in pairwise(cuts)]
        state = dict(zip(_SUMS + _BINS, [*row[: len(_SUMS)], *parts], strict=True))
        states.append({"n": int(sum(parts[0])), "correct": int(sum(parts[2])), **state})
    return states


def _sum_group(logits: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Return the rows of `sum_batches` for logits (m, b, k) and labels (m, b)."""
    scores, k = logits.detach().double(), logits.shape[2]
    wrong = ~scores.amax(dim=2).isfinite() | (labels < 0) | (labels >= k)
    labels = labels.clamp(0, k - 1)  # an index out of range would stop all work on the device
    sums = _sum_samples(scores.softmax(dim=2), labels, bins)
    return torch.cat([sums, wrong.any(dim=1, keepdim=True)], dim=1)


def _sum_samples(probs: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Return the sums of each batch, for probabilities (m, b, k) and labels (m, b).

    Returns:
        Sums (m, 3 + 3 * bins): negative log-likelihood, Brier score and ECE, then count, confidence and correct
        predictions of each confidence bin.
    """
    (batches, _, k), device = probs.shape, probs.device
    confidence, prediction = probs.max(dim=2)
    index = (torch.bucketize(confidence, _make_edges(bins, device)) - 1).clamp(0, bins - 1)
    facts = torch.stack([torch.ones_like(confidence), confidence, (prediction == labels).double()])
    if device.type == "cpu":
        flat = (index + bins * torch.arange(batches)[:, None]).flatten()
        binned = (
            facts.new_zeros(3, batches * bins).index_add_(1, flat, facts.flatten(1)).unflatten(1, (-1, bins))
        )
    else:  # index_add is faster, but on a GPU its order of additions changes from call to call
        binned = (facts[..., None] * (index[..., None] == torch.arange(bins, device=device))).sum(dim=2)
    nll = -probs.gather(2, labels[..., None]).clamp_min(_TINY).log().sum(dim=(1, 2))
    brier = (probs - (labels[..., None] == torch.arange(k, device=device)).double()).square().sum(dim=(1, 2))
    gaps = (binned[1] - binned[2]).abs().sum(dim=1)
    return torch.cat([torch.stack([nll, brier, gaps], dim=1), *binned], dim=1)


@cache
def _make_edges(bins: int, device: torch.device) -> Tensor:
    """Return the edges of the bins. They are computed on the CPU, because devices differ in the last digit."""
    return torch.linspace(0, 1, bins + 1, dtype=torch.float64).to(device)


def _measure(probs: Tensor, labels: Tensor, bins: int = 15) -> RunningMetrics:
    metrics = RunningMetrics(bins)
    metrics.update(labels, probs=probs)
    return metrics


def _check_kind(scores: Tensor, name: str) -> None:
    if scores.ndim != 2 or 0 in scores.shape or not scores.is_floating_point():
        raise ValueError(f"{name} must be a floating (b, k) tensor, got {scores.dtype} {tuple(scores.shape)}")


def _check_scores(scores: Tensor, name: str) -> Tensor:
    _check_kind(scores, name)
    return scores.detach().to("cpu", torch.float64)


def _check_logits(logits: Tensor) -> Tensor:
    values = _check_scores(logits, "logits")
    if not values.amax(dim=1).isfinite().all():  # a single -inf stands for a probability of zero
        raise ValueError("logits hold NaN, +inf or a row of -inf: the predictor has diverged")
    return values.softmax(dim=1)


def _check_probs(probs: Tensor) -> Tensor:
    values = _check_scores(probs, "probs")
    # Rounding every entry to 16 bits changes the sum of a row by up to eps / 2, so these dtypes need a looser bound.
    tolerance = max(1e-4, 2 * torch.finfo(probs.dtype).eps)
    (low, high), off = values.aminmax(), (values.sum(dim=1) - 1).abs().max()
    if not (low >= -tolerance and high <= 1 + tolerance and off <= tolerance):  # in this form NaN fails too
        raise ValueError(
            f"probs must be finite, in [0, 1] and sum to 1, got values in [{low:.4g}, {high:.4g}] and a row "
            f"{off:.2g} away from 1: apply softmax, or pass logits=... to RunningMetrics.update"
        )
    return values.clamp(0, 1)


def _check_label_kind(labels: Tensor, b: int) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != (b,):
        raise ValueError(f"labels must have shape ({b},), one for each row, got {tuple(labels.shape)}")


def _check_labels(labels: Tensor, b: int, k: int) -> Tensor:
    _check_label_kind(labels, b)
    if not 0 <= labels.min() <= labels.max() < k:
        raise ValueError(f"labels must lie in 0..{k - 1}, got {labels.min()} to {labels.max()}")
    return labels.detach().to("cpu", torch.int64)
