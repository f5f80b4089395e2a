import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.bench import Record, Row, paired_difference, run_stream
from ttvd.metrics import RunningMetrics


def make_stream(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(6, 1, 2, 2, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(count)
    ]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def make_record(wrong: list[int], size: int = 10) -> Record:
    """A record with so many wrong predictions in each batch."""
    rows = []
    for count in wrong:
        metrics = RunningMetrics()
        labels = torch.tensor([0] * (size - count) + [1] * count)
        metrics.update(labels, probs=torch.tensor([[0.9, 0.1]]).expand(size, 2))
        rows.append(Row(metrics.state(), 1.0, 0.1))
    return Record(tuple(rows))


def test_rows_add_up_to_the_whole_stream() -> None:
    stream = make_stream()
    record = run_stream(ttvd.create("source", make_net()), stream)
    whole = RunningMetrics()
    logits = make_net().eval()(torch.cat([x for x, _ in stream]))
    whole.update(torch.cat([y for _, y in stream]), logits=logits)
    totals = record.metrics().compute()
    for name, value in whole.compute().items():
        if name != "batch_ece":
            assert totals[name] == pytest.approx(value, abs=1e-9)
    assert record.curve()[-1] == pytest.approx(totals["error"])
    assert len(record.rows) == 5


def test_labels_cannot_reach_the_adapter() -> None:
    class Spy(nn.Module):
        def forward(self, *args: object) -> Tensor:
            assert len(args) == 1
            return torch.zeros(len(args[0]), 3)  # type: ignore[arg-type]

    spy = Spy()
    spy.register_buffer("kept", torch.ones(()))
    stream = make_stream()
    other = [(x, (y + 1) % 3) for x, y in stream]
    assert len(run_stream(spy, stream).rows) == 5  # type: ignore[arg-type]
    tent = ttvd.create("tent", make_net(), lr=0.1)
    run_stream(tent, stream)
    first = tent.snapshot()
    tent.reset()
    run_stream(tent, other)
    assert all(torch.equal(first[name], value) for name, value in tent.snapshot().items())


def test_curve_kept_and_time() -> None:
    record = make_record([5, 1, 0])
    assert record.curve().tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert record.kept() == 1.0
    assert record.seconds_per_batch() == pytest.approx(0.1)


def test_progress_is_told_of_every_batch() -> None:
    seen: list[Row] = []
    record = run_stream(ttvd.create("bn", make_net()), make_stream(), progress=seen.append)
    assert tuple(seen) == record.rows


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        run_stream(ttvd.create("bn", make_net()), [])


def test_paired_difference_sees_a_constant_gap_through_the_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(2, 8, (40,), generator=generator)
    first, second = make_record(base.tolist()), make_record((base + 1).tolist())
    gap = paired_difference([first], [second])
    assert gap.difference == pytest.approx(-0.1)
    assert gap.low == pytest.approx(-0.1)
    assert gap.verdict == "better"
    assert paired_difference([second], [first]).verdict == "worse"
    assert paired_difference([first], [first]).verdict == "tie"


def test_interval_has_the_width_of_the_normal_approximation() -> None:
    generator = torch.Generator().manual_seed(1)
    one = torch.randint(0, 10, (200,), generator=generator)
    other = torch.randint(0, 10, (200,), generator=generator)
    gap = paired_difference([make_record(one.tolist())], [make_record(other.tolist())])
    spread = float((one - other).double().std()) / 200**0.5 / 10
    assert gap.high - gap.low == pytest.approx(2 * 1.96 * spread, rel=0.05)


def test_unpaired_records_are_refused() -> None:
    with pytest.raises(ValueError, match="same batches"):
        paired_difference([make_record([1, 2])], [make_record([1, 2], size=9)])
    with pytest.raises(ValueError, match="1 and 0"):
        paired_difference([make_record([1])], [])
