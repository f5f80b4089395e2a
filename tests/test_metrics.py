"""The metrics against torchmetrics, scikit-learn and hand-computed values, and their laws."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttvd.metrics import RunningMetrics, brier, ece, error, nll, reliability

# Confidences .9 (right), .6 (wrong), .5 (right, bin edge of 10), .8 (wrong).
PROBS = torch.tensor(
    [[0.9, 0.1, 0.0], [0.3, 0.6, 0.1], [0.25, 0.25, 0.5], [0.8, 0.2, 0.0]], dtype=torch.float64
)
LABELS = torch.tensor([0, 0, 2, 2])


def draw_batch(n: int, k: int, seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, k, generator=generator)
    return logits, torch.randint(k, (n,), generator=generator)


def cut_rows(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]


def draw_calibrated(n: int, seed: int, k: int = 10) -> tuple[Tensor, Tensor]:
    """Labels drawn from the predicted probabilities themselves."""
    probs = draw_batch(n, k, seed, scale=3.0)[0].softmax(dim=1)
    labels = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed + 1))[:, 0]
    return probs, labels


def test_hand_computed() -> None:
    assert error(PROBS, LABELS) == 0.5
    expected = (
        -(math.log(0.9) + math.log(0.3) + math.log(0.5) + math.log(torch.finfo(torch.float32).tiny)) / 4
    )
    assert nll(PROBS, LABELS) == pytest.approx(expected, rel=1e-12)
    squares = [0.1**2 + 0.1**2, 0.7**2 + 0.6**2 + 0.1**2, 0.25**2 * 2 + 0.5**2, 0.8**2 + 0.2**2 + 1]
    assert brier(PROBS, LABELS) == pytest.approx(sum(squares) / 4, rel=1e-12)
    # Four bins: (.25, .5] has .5 right; (.5, .75] has .6 wrong; (.75, 1] has .9 right and .8 wrong.
    assert ece(PROBS, LABELS, bins=4) == pytest.approx((0.5 + 0.6 + 0.7) / 4, rel=1e-12)


def test_reliability_bins_are_open_below_and_closed_above() -> None:
    bins = reliability(PROBS, LABELS, bins=4)
    assert bins.count.tolist() == [0, 1, 1, 2]
    torch.testing.assert_close(bins.confidence[1:], torch.tensor([0.5, 0.6, 0.85], dtype=torch.float64))
    assert bins.accuracy[1:].tolist() == [1.0, 0.0, 0.5]
    assert bins.confidence[0].isnan()
    assert bins.accuracy[0].isnan()


@pytest.mark.parametrize("k", [2, 10, 100])
def test_against_torchmetrics(k: int) -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    logits, labels = draw_batch(2000, k, seed=k)
    probs = logits.double().softmax(dim=1)
    for bins in (10, 15):
        theirs = functional.multiclass_calibration_error(probs, labels, num_classes=k, n_bins=bins, norm="l1")
        assert ece(probs, labels, bins) == pytest.approx(float(theirs), abs=1e-6)
    accuracy = functional.multiclass_accuracy(probs, labels, num_classes=k, average="micro")
    assert error(probs, labels) == pytest.approx(1 - float(accuracy), abs=1e-6)


def test_against_sklearn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = draw_batch(500, 7, seed=3)
    probs = logits.double().softmax(dim=1)
    one_hot = np.eye(7)[labels.numpy()]
    assert nll(probs, labels) == pytest.approx(metrics.log_loss(labels.numpy(), probs.numpy()), rel=1e-9)
    # The mean over the columns of scikit-learn's one-against-all score, times k, is the multi-class sum.
    columns = [metrics.brier_score_loss(one_hot[:, c], probs[:, c].numpy()) for c in range(7)]
    assert brier(probs, labels) == pytest.approx(sum(columns), rel=1e-9)
    assert error(probs, labels) == metrics.zero_one_loss(labels.numpy(), probs.argmax(dim=1).numpy())


def test_running_equals_functions_and_logits_equal_probs() -> None:
    logits, labels = draw_batch(301, 5, seed=1)
    probs = logits.double().softmax(dim=1)
    by_logits, by_probs = RunningMetrics(), RunningMetrics()
    for rows in cut_rows(301, 64):
        by_logits.update(labels[rows], logits=logits[rows])
        by_probs.update(labels[rows], probs=probs[rows])
    assert by_logits.compute() == pytest.approx(by_probs.compute(), rel=1e-12)
    whole = {"error": error, "nll": nll, "brier": brier, "ece": ece}
    computed = by_logits.compute()
    assert {name: computed[name] for name in whole} == pytest.approx(
        {name: function(probs, labels) for name, function in whole.items()}, rel=1e-12
    )
    assert computed["n"] == 301


def test_stored_rows_add_up_exactly() -> None:
    logits, labels = draw_batch(1000, 10, seed=2)
    whole, rows = RunningMetrics(), []
    for part in cut_rows(1000, 64):
        whole.update(labels[part], logits=logits[part])
        row = RunningMetrics()
        row.update(labels[part], logits=logits[part])
        rows.append(json.dumps(row.state()))
    total = RunningMetrics()
    for text in rows:
        total.merge(RunningMetrics.from_state(json.loads(text)))
    assert total.state() == whole.state()
    assert total.compute() == whole.compute()
    assert torch.equal(total.reliability().count, whole.reliability().count)


def test_updates_inside_and_outside_inference_mode() -> None:
    with torch.inference_mode():
        metrics = RunningMetrics()
        metrics.update(LABELS, probs=PROBS.clone())
    metrics.update(LABELS, probs=PROBS)
    assert metrics.compute()["n"] == 8


def test_log_probabilities_with_a_zero_are_logits() -> None:
    metrics = RunningMetrics()
    metrics.update(LABELS, logits=PROBS.log())
    assert metrics.compute()["nll"] == pytest.approx(nll(PROBS, LABELS), rel=1e-12)
    assert math.isfinite(metrics.compute()["nll"])


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 60), k=st.integers(1, 8), bins=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_laws(n: int, k: int, bins: int, seed: int) -> None:
    logits, labels = draw_batch(n, k, seed, scale=5.0)
    probs = logits.softmax(dim=1)
    metrics = RunningMetrics(bins)
    metrics.update(labels, probs=probs)
    values = metrics.compute()
    assert 0 <= values["error"] <= 1
    assert 0 <= values["ece"] <= 1
    assert 0 <= values["brier"] <= 2
    assert values["nll"] >= 0
    assert int(metrics.reliability().count.sum()) == n
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shuffled = RunningMetrics(bins)
    for rows in cut_rows(n, 7):
        shuffled.update(labels[order[rows]], probs=probs[order[rows]])
    assert shuffled.compute() | {"batch_ece": 0} == pytest.approx(
        values | {"batch_ece": 0}, rel=1e-9, abs=1e-12
    )
    # By the triangle inequality the ECE of the parts is never below that of the whole.
    assert shuffled.compute()["batch_ece"] >= values["ece"] - 1e-9


def test_calibrated_predictor_has_small_ece_but_large_batch_ece() -> None:
    probs, labels = draw_calibrated(20_000, seed=0)
    metrics = RunningMetrics()
    for rows in cut_rows(20_000, 64):
        metrics.update(labels[rows], probs=probs[rows])
    values = metrics.compute()
    assert values["ece"] < 0.015
    assert values["batch_ece"] > 0.08


def test_half_precision_probabilities_are_accepted() -> None:
    logits, labels = draw_batch(64, 1000, seed=5)
    exact = nll(logits.softmax(dim=1), labels)
    for dtype in (torch.float16, torch.bfloat16):
        assert nll(logits.softmax(dim=1).to(dtype), labels) == pytest.approx(exact, rel=0.02)
