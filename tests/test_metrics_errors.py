"""What the metrics refuse, and with which words."""

import math

import pytest
import torch
from torch import Tensor

from ttvd.metrics import RunningMetrics, nll

PROBS = torch.tensor([[0.9, 0.1, 0.0], [0.3, 0.6, 0.1], [0.25, 0.25, 0.5], [0.8, 0.2, 0.0]])
LABELS = torch.tensor([0, 0, 2, 2])


@pytest.mark.parametrize(
    ("probs", "labels", "match"),
    [
        (PROBS[0], LABELS[:1], r"\(b, k\)"),
        (PROBS[:0], LABELS[:0], r"\(b, k\)"),
        (torch.ones(2, 3, dtype=torch.int64), LABELS[:2], "floating"),
        (PROBS * 2, LABELS, "softmax"),
        (torch.tensor([[1.5, -0.5]]), LABELS[:1], r"in \[0, 1\]"),
        (torch.tensor([[math.nan, 0.5]]), LABELS[:1], "finite"),
        (torch.tensor([[math.inf, 0.5]]), LABELS[:1], "finite"),
        (PROBS, LABELS[:3], "one for each row"),
        (PROBS, torch.tensor([0, 1, 2, 3]), r"0\.\.2"),
        (PROBS, torch.tensor([0, 1, 2, -1]), r"0\.\.2"),
    ],
)
def test_bad_values_are_refused(probs: Tensor, labels: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        nll(probs, labels)


def test_bad_use_is_refused() -> None:
    metrics = RunningMetrics()
    with pytest.raises(ValueError, match="no samples"):
        metrics.compute()
    with pytest.raises(TypeError, match="integers"):
        metrics.update(LABELS.double(), probs=PROBS)
    for given_both in ({}, {"logits": PROBS, "probs": PROBS}):
        with pytest.raises(TypeError, match="exactly one"):
            metrics.update(LABELS, **given_both)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="diverged"):
            metrics.update(LABELS[:1], logits=torch.tensor([[value, 0.0]]))
    with pytest.raises(ValueError, match="diverged"):
        metrics.update(LABELS[:1], logits=torch.full((1, 3), -math.inf))
    with pytest.raises(ValueError, match="bins"):
        RunningMetrics(bins=0)
    with pytest.raises(ValueError, match="same number of bins"):
        metrics.merge(RunningMetrics(bins=10))


def test_damaged_state_is_refused() -> None:
    metrics = RunningMetrics()
    metrics.update(LABELS, probs=PROBS)
    state = metrics.state()
    with pytest.raises(ValueError, match="damaged"):
        RunningMetrics.from_state(state | {"n": 5})
    with pytest.raises(ValueError, match="keys"):
        RunningMetrics.from_state({"n": 4})
