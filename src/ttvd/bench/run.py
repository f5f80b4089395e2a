"""The one loop: every number in every table comes from here. Only this loop and the metrics see labels."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ttvd.adapters.base import Adapter
from ttvd.metrics import RunningMetrics


@dataclass(frozen=True)
class Row:
    """What is kept of one batch.

    Attributes:
        metrics: Sufficient statistics of the batch, as :meth:`~ttvd.RunningMetrics.state` gives them.
        kept: Share of the batch that was used to adapt.
        seconds: Time in the adapter, device included.
    """

    metrics: dict[str, float | list[float]]
    kept: float
    seconds: float


@dataclass(frozen=True)
class Record:
    """What is kept of a run: a row for each batch. All totals are made of the rows.

    Example:
        >>> from torch import nn
        >>> import ttvd
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> record = run(ttvd.create("source", net), [(torch.rand(8, 1, 2, 2), torch.zeros(8).long())])
        >>> record.metrics().compute()["n"]
        8
    """

    rows: tuple[Row, ...]

    def metrics(self) -> RunningMetrics:
        """The metrics of the whole stream."""
        total = RunningMetrics.from_state(self.rows[0].metrics)
        for row in self.rows[1:]:
            total.merge(RunningMetrics.from_state(row.metrics))
        return total

    def sizes(self) -> Tensor:
        """Samples in each batch, float64."""
        return torch.tensor([row.metrics["n"] for row in self.rows], dtype=torch.float64)

    def wrong(self) -> Tensor:
        """Wrong predictions in each batch, float64."""
        return self.sizes() - torch.tensor([row.metrics["correct"] for row in self.rows], dtype=torch.float64)

    def curve(self) -> Tensor:
        """Error over all samples seen so far, after each batch."""
        return self.wrong().cumsum(0) / self.sizes().cumsum(0)

    def kept(self) -> float:
        """Share of all samples that were used to adapt."""
        shares = torch.tensor([row.kept for row in self.rows], dtype=torch.float64)
        return float((self.sizes() * shares).sum() / self.sizes().sum())

    def seconds_per_batch(self) -> float:
        """Median time of a batch; the first, which warms up, does not count when there are others."""
        times = [row.seconds for row in self.rows[1:] or self.rows]
        return float(torch.tensor(times).median())


def run(
    adapter: Adapter,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    progress: Callable[[Row], None] | None = None,
) -> Record:
    """Stream batches through an adapter and score what it says.

    Args:
        adapter: Goes on from the state that it is in; ``reset()`` it first for a fresh start.
        batches: Images and labels; the labels never reach the adapter.
        progress: Called after each batch.
    """
    rows = []
    for x, labels in batches:
        _wait_for(x)
        start = time.perf_counter()
        logits = adapter(x)
        _wait_for(x)
        seconds = time.perf_counter() - start
        batch = RunningMetrics()
        batch.update(labels, logits=logits)
        rows.append(Row(batch.state(), float(adapter.kept), seconds))
        if progress is not None:
            progress(rows[-1])
    if not rows:
        raise ValueError("the stream is empty: there is nothing to measure")
    return Record(tuple(rows))


def _wait_for(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
