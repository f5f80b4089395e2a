"""Many batches scored at once, against the running metrics of each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttvd.metrics import RunningMetrics, read_sums, sum_batches

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")),
]


def make_batches(
    sizes: list[int], k: int, seed: int = 0, scale: float = 3.0
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    logits = [scale * torch.randn(size, k, generator=generator) for size in sizes]
    return logits, [torch.randint(k, (size,), generator=generator) for size in sizes]


def score(logits: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float | list[float]]:
    metrics = RunningMetrics(bins)
    metrics.update(labels, logits=logits)
    return metrics.state()


def assert_equal(found: dict[str, float | list[float]], expected: dict[str, float | list[float]]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if name in ("n", "correct", "bin_count", "bin_correct"):
            assert found[name] == value
        else:
            assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    k=st.integers(1, 7),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.1, 3.0, 1000.0]),
    bins=st.sampled_from([1, 4, 15]),
)
def test_ragged_batches_are_scored_as_each_by_itself(
    sizes: list[int], k: int, seed: int, scale: float, bins: int
) -> None:
    logits, labels = make_batches(sizes, k, seed, scale)
    table = sum_batches(logits, labels, bins)
    assert not table[:, -1].any()
    for found, batch, truth in zip(read_sums(table), logits, labels, strict=True):
        assert_equal(found, score(batch, truth, bins))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_devices_and_types(device: str, dtype: torch.dtype) -> None:
    logits, labels = make_batches([64] * 20 + [16], 10)
    given = [batch.to(device, dtype) for batch in logits]
    table = sum_batches(given, [batch.int() for batch in labels])  # labels may be elsewhere
    assert table.device.type == device
    for found, batch, truth in zip(read_sums(table.cpu()), given, labels, strict=True):
        assert_equal(found, score(batch, truth))


@pytest.mark.parametrize("device", DEVICES)
def test_ties_and_zeros(device: str) -> None:
    inf = float("inf")
    logits = [torch.zeros(3, 5), torch.tensor([[0.0, -inf], [-inf, 0.0]]), torch.tensor([[2.0, 2.0, 1.0]])]
    labels = [torch.tensor([0, 1, 4]), torch.tensor([0, 0]), torch.tensor([1])]
    table = sum_batches([batch.to(device) for batch in logits], labels)
    for found, batch, truth in zip(read_sums(table.cpu()), logits, labels, strict=True):
        assert_equal(found, score(batch, truth))


def test_states_are_those_of_running_metrics() -> None:
    logits, labels = make_batches([5, 7], 3)
    whole = RunningMetrics()
    for state in read_sums(sum_batches(logits, labels)):
        whole.merge(RunningMetrics.from_state(state))
    assert whole.compute()["n"] == 12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_of_values_that_would_be_refused_is_marked(device: str, bad: float) -> None:
    logits, labels = make_batches([4, 4, 4, 2], 3)
    logits[1][2, 0] = bad
    labels[2][3] = 3
    labels[3][0] = -1
    table = sum_batches([batch.to(device) for batch in logits], labels)
    assert table[:, -1].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_wrong_kinds_are_refused_at_once() -> None:
    logits, labels = make_batches([4, 4], 3)
    with pytest.raises(ValueError, match="must be a floating"):
        sum_batches([*logits[:1], logits[1][0]], labels)
    with pytest.raises(TypeError, match="labels must be integers"):
        sum_batches(logits, [labels[0], labels[1].float()])
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        sum_batches(logits, [labels[0], labels[1][:3]])
    with pytest.raises(ValueError, match="zip"):
        sum_batches(logits, labels[:1])
