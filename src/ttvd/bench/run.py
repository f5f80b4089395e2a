"""The loop that every number in every table comes from. Only this loop and the metrics see labels.

On an accelerator the loop never waits for the device: outputs are scored there in chunks, and their scores are read
while the device works on the next chunk.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.methods.adapter import Adapter
from ttvd.metrics import RunningMetrics, read_sums, sum_batches
from ttvd.nn.norms import follows_stream, settled_stream

CHUNK = 32
"""Batches that an accelerator scores at once; the host is at most two chunks ahead of their scores."""
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Row:
    """What is kept of one batch.

    Attributes:
        metrics: Sufficient statistics of the batch, as :meth:`~ttvd.RunningMetrics.state` gives them.
        kept: Share of the batch that was used to adapt.
        seconds: Time in the adapter, device included.
        domain: Number of the domain of the batch; 0 where there is one domain, or where domains are mixed.
    """

    metrics: dict[str, float | list[float]]
    kept: float
    seconds: float
    domain: int = 0


@dataclass(frozen=True)
class Record:
    """The rows of a run, one for each batch. All totals are computed from the rows.

    Example:
        >>> from torch import nn
        >>> import ttvd
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> record = run_stream(ttvd.create("source", net), [(torch.rand(8, 1, 2, 2), torch.zeros(8).long())])
        >>> record.metrics().compute()["n"]
        8
    """

    rows: tuple[Row, ...]

    def metrics(self) -> RunningMetrics:
        """Return the metrics of the whole stream."""
        return sum_metrics(self.rows)

    def sizes(self) -> Tensor:
        """Return the number of samples in each batch, float64."""
        return torch.tensor([row.metrics["n"] for row in self.rows], dtype=torch.float64)

    def wrong(self) -> Tensor:
        """Return the number of wrong predictions in each batch, float64."""
        return self.sizes() - torch.tensor([row.metrics["correct"] for row in self.rows], dtype=torch.float64)

    def domains(self) -> list[int]:
        """Return the number of the domain of each batch."""
        return [row.domain for row in self.rows]

    def curve(self) -> Tensor:
        """Return the error over all samples so far, after each batch."""
        return self.wrong().cumsum(0) / self.sizes().cumsum(0)

    def kept(self) -> float:
        """Return the share of all samples that were used to adapt."""
        shares = torch.tensor([row.kept for row in self.rows], dtype=torch.float64)
        return float((self.sizes() * shares).sum() / self.sizes().sum())

    def seconds_per_batch(self) -> float:
        """Return the median time of a batch. The first batch, which warms up, counts only if it is alone."""
        times = [row.seconds for row in self.rows[1:] or self.rows]
        return float(torch.tensor(times).median())


def sum_metrics(rows: Sequence[Row]) -> RunningMetrics:
    """Return the metrics of some batches together."""
    states = [row.metrics for row in rows]
    # One sum for each entry instead of a merge for each row: reports add up hundreds of thousands of rows.
    totals = {name: np.sum([state[name] for state in states], axis=0).tolist() for name in states[0]}
    return RunningMetrics.from_state(totals)


def run_stream(
    adapter: Adapter,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    progress: Callable[[Row], None] | None = None,
    domains: Sequence[int] | None = None,
    oracle: int = 0,
    episodic: bool = False,
    restrict: Callable[[Tensor], Tensor] | None = None,
) -> Record:
    """Stream batches through an adapter and score its outputs.

    Args:
        adapter: The adapter. It starts from its present state; call ``reset()`` before for a fresh start.
        batches: Images and labels. The labels never reach the adapter.
        progress: Function that is called after each batch; on an accelerator some batches later.
        domains: Number of the domain of each batch; 0 for all unless given.
        oracle: If above 0, the number of steps that are tried on each batch. The best one by its labels is scored, see
            :func:`choose_step`. It measures what a perfect choice could reach.
        episodic: Whether the adapter is reset before each batch.
        restrict: Function that maps logits to the outputs that are scored, for a set that shows a part of the classes.

    Raises:
        ValueError: There are no batches, or the outputs are not finite.
    """
    rows: list[Row] = []
    queue = ScoreQueue()

    def append(scores: Sequence[BatchScore]) -> None:
        for score in scores:
            rows.append(Row(*score, domain=0 if domains is None else domains[len(rows)]))
            if progress is not None:
                progress(rows[-1])

    for x, labels in batches:
        timer = BatchTimer(x.device)
        if episodic:
            adapter.reset()
        logits = choose_step(adapter, x, labels, oracle, restrict) if oracle else adapter(x)
        timer.stop()
        logits = logits if oracle or restrict is None else restrict(logits)
        append(queue.add(BatchOutput(logits, labels, adapter.kept.detach().clone(), timer)))
    append(queue.finish())
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
    """Take several steps on one batch and go back to the one that is best by its labels (TTAB's oracle).

    After each step the batch is predicted anew. The step with the most correct predictions wins; among equal ones, the
    step with the lowest cross-entropy. The adapter continues from there, optimizer included. Steps are judged by the
    outputs that are scored, which ``restrict`` computes from the logits.

    Returns:
        The outputs after the best step.
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


class BatchTimer:
    """Measures the time from its creation to :meth:`stop`; on CUDA by the device's events, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        )
        self._device = device
        self._record(0)
        self._start = time.perf_counter()

    def stop(self) -> None:
        """End the measurement."""
        self._stop = time.perf_counter()
        self._record(1)

    def _record(self, number: int) -> None:
        if self._events:  # on the stream of the device, which need not be the current one
            self._events[number].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        """Return the time; on CUDA this waits until the device has reached the end."""
        if not self._events:
            return self._stop - self._start
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class BatchScore(NamedTuple):
    """Sufficient statistics of a batch, the share that was used to adapt, and the time in the adapter."""

    metrics: dict[str, float | list[float]]
    kept: float
    seconds: float


class BatchOutput(NamedTuple):
    """The output of an adapter for a batch, before it is scored."""

    logits: Tensor
    labels: Tensor
    kept: Tensor
    timer: BatchTimer

    def score(self) -> BatchScore:
        """Score this batch alone, on the host."""
        batch = RunningMetrics()
        batch.update(self.labels, logits=self.logits)
        return BatchScore(batch.state(), float(self.kept), self.timer.seconds())


class OutputChunk:
    """Outputs that are scored together on their device, with one copy to the host that nobody waits for.

    Args:
        outputs: At least one output, all on one device.
    """

    def __init__(self, outputs: list[BatchOutput]) -> None:
        self._outputs = outputs
        sums = sum_batches([output.logits for output in outputs], [output.labels for output in outputs])
        kept = torch.stack([output.kept for output in outputs]).to(sums)
        table = torch.cat([sums, kept[:, None]], dim=1)
        self._table = table.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if table.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(table.device))

    def scores(self) -> list[BatchScore]:
        """Return the score of each output; this waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        sums, kept = self._table[:, :-1], self._table[:, -1].tolist()
        if sums[:, -1].any():
            for output in self._outputs:
                output.score()  # raises the error of the batch that is wrong
        times = [output.timer.seconds() for output in self._outputs]
        return [BatchScore(*score) for score in zip(read_sums(sums), kept, times, strict=True)]


class ScoreQueue:
    """Takes outputs and returns their scores in order: on a CPU at once, on an accelerator some batches later."""

    def __init__(self) -> None:
        self._waiting: list[BatchOutput] = []
        self._underway: OutputChunk | None = None

    def add(self, output: BatchOutput) -> list[BatchScore]:
        """Add an output and return the scores that are known by now."""
        if not output.logits.is_cuda:
            return [output.score()]
        self._waiting.append(output)
        return self._advance() if len(self._waiting) == CHUNK else []

    def finish(self) -> list[BatchScore]:
        """Return the scores of all other outputs."""
        return [*(self._advance() if self._waiting else []), *self._advance()]

    def _advance(self) -> list[BatchScore]:
        """Start the next chunk, and read the one before it while the device is busy."""
        before, self._underway = self._underway, OutputChunk(self._waiting) if self._waiting else None
        self._waiting = []
        return [] if before is None else before.scores()


@dataclass
class PeakMemory:
    """The result of :func:`watch_memory`: bytes above what was held before; None where they cannot be measured."""

    bytes: int | None = None


@contextmanager
def watch_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the peak memory use inside the block, above the use at its start.

    On CUDA this is what torch allocates. On a Linux CPU it is the resident memory of the process; after earlier large
    work in the same process it says little. On other systems it is not known.
    """
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - start
        return
    known = device.type == "cpu" and _reset_resident_peak()
    before = _read_status("VmRSS") if known else 0
    yield peak
    if known:
        peak.bytes = max(0, _read_status("VmHWM") - before)


def _reset_resident_peak() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _STATUS.is_file()


def _read_status(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])
