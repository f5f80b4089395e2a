"""The one loop: every number in every table comes from here. Only this loop and the metrics see labels."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.bench.scoring import Answer, Clock, Score, Scores
from ttvd.methods.adapter import Adapter
from ttvd.metrics import RunningMetrics
from ttvd.nn.norms import follows_stream, settled_stream


@dataclass(frozen=True)
class Row:
    """What is kept of one batch.

    Attributes:
        metrics: Sufficient statistics of the batch, as :meth:`~ttvd.RunningMetrics.state` gives them.
        kept: Share of the batch that was used to adapt.
        seconds: Time in the adapter, device included.
        domain: Number of the domain that the batch comes from; 0 where there is one, or where they are mixed.
    """

    metrics: dict[str, float | list[float]]
    kept: float
    seconds: float
    domain: int = 0


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
        return sum_metrics(self.rows)

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


def sum_metrics(rows: Sequence[Row]) -> RunningMetrics:
    """The metrics of some batches together."""
    states = [row.metrics for row in rows]
    # One sum for each entry instead of a merge for each row: reports add up hundreds of thousands of rows.
    totals = {name: np.sum([state[name] for state in states], axis=0).tolist() for name in states[0]}
    return RunningMetrics.from_state(totals)


def run(
    adapter: Adapter,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    progress: Callable[[Row], None] | None = None,
    domains: Sequence[int] | None = None,
    oracle: int = 0,
    episodic: bool = False,
    restrict: Callable[[Tensor], Tensor] | None = None,
) -> Record:
    """Stream batches through an adapter and score what it says.

    Args:
        adapter: Goes on from the state that it is in; ``reset()`` it first for a fresh start.
        batches: Images and labels; the labels never reach the adapter.
        progress: Called after each batch; on an accelerator a number of batches later, so that nothing waits for it.
        domains: Number of the domain of each batch; 0 for all unless given.
        oracle: If above 0, take so many steps on each batch and score the best of them by its labels: see
            :func:`choose_step`. It measures what a perfect choice could reach; nobody has it in use.
        episodic: Start again before each batch, and not before each step on it.
        restrict: Made of the logits before they are scored, for a set that shows a part of the classes.
    """
    rows: list[Row] = []
    waiting = Scores()

    def settle(scores: Sequence[Score]) -> None:
        for score in scores:
            rows.append(Row(*score, domain=0 if domains is None else domains[len(rows)]))
            if progress is not None:
                progress(rows[-1])

    for x, labels in batches:
        clock = Clock(x.device)
        if episodic:
            adapter.reset()
        logits = choose_step(adapter, x, labels, oracle, restrict) if oracle else adapter(x)
        clock.stop()
        logits = logits if oracle or restrict is None else restrict(logits)
        settle(waiting.add(Answer(logits, labels, adapter.kept.detach().clone(), clock)))
    settle(waiting.finish())
    if not rows:
        raise ValueError("the stream is empty: there is nothing to measure")
    return Record(tuple(rows))


def choose_step(
    adapter: Adapter,
    x: Tensor,
    labels: Tensor,
    steps: int,
    restrict: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Step several times on one batch and stay at the step that its labels like best (TTAB's oracle).

    After each step the batch is predicted anew. The step with the most correct predictions wins, the lower
    cross-entropy where they tie; the adapter goes on from there, optimizer included. Steps are judged by the outputs
    that are scored, which ``restrict`` makes of the logits.
    """
    best: tuple[int, float] | None = None
    chosen, state, kept = torch.empty(0), adapter.snapshot(), adapter.kept.clone()
    truth, follows = labels.to(x.device), follows_stream(adapter)
    for step in range(steps):
        # The batch counts once for averages that follow the stream, however many steps are tried on it.
        with settled_stream(adapter) if step and follows else nullcontext():
            adapter(x)
        with settled_stream(adapter) if follows else nullcontext():
            logits = adapter.predict(x) if restrict is None else restrict(adapter.predict(x))
        loss = F.cross_entropy(logits.double(), truth)
        score = int((logits.argmax(1) == truth).sum()), -float(loss)
        if best is None or score > best:
            best, chosen, state, kept = score, logits, adapter.snapshot(), adapter.kept.clone()
    adapter.restore(state)
    adapter.kept.copy_(kept)
    return chosen
