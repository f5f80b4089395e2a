"""What an adapter said of its batches, on the way to scores. Nothing here makes the device wait."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from ttvd.metrics import RunningMetrics, read_sums, sum_batches

CHUNK = 32
"""Batches that an accelerator has scored at once; the host is at most two chunks ahead of their scores."""


class Score(NamedTuple):
    """Of one batch: its sufficient statistics, the share that was used to adapt, and the time in the adapter."""

    metrics: dict[str, float | list[float]]
    kept: float
    seconds: float


class Clock:
    """Time from here to :meth:`stop`; on CUDA by the device's own events, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        )
        self._device = device
        self._record(0)
        self._start = time.perf_counter()

    def stop(self) -> None:
        """The time ends here."""
        self._stop = time.perf_counter()
        self._record(1)

    def _record(self, number: int) -> None:
        if self._events:  # on the stream of the device, which need not be the current one
            self._events[number].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        """The time; waits for the device to come to its end."""
        if not self._events:
            return self._stop - self._start
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class Answer(NamedTuple):
    """What the adapter said of a batch, until somebody looks."""

    logits: Tensor
    labels: Tensor
    kept: Tensor
    clock: Clock

    def score(self) -> Score:
        """By itself, on the host."""
        batch = RunningMetrics()
        batch.update(self.labels, logits=self.logits)
        return Score(batch.state(), float(self.kept), self.clock.seconds())


class Chunk:
    """Answers that are scored together where they are, with one copy to the host, which nobody waits for.

    Args:
        answers: At least one, all on one device.
    """

    def __init__(self, answers: list[Answer]) -> None:
        self._answers = answers
        sums = sum_batches([answer.logits for answer in answers], [answer.labels for answer in answers])
        kept = torch.stack([answer.kept for answer in answers]).to(sums)
        table = torch.cat([sums, kept[:, None]], dim=1)
        self._table = table.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if table.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(table.device))

    def scores(self) -> list[Score]:
        """One for each answer; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        sums, kept = self._table[:, :-1], self._table[:, -1].tolist()
        if sums[:, -1].any():
            for answer in self._answers:
                answer.score()  # says what is wrong with which values
        times = [answer.clock.seconds() for answer in self._answers]
        return [Score(*score) for score in zip(read_sums(sums), kept, times, strict=True)]


class Scores:
    """Takes answers and gives their scores back in order: on a CPU at once, on an accelerator some batches later."""

    def __init__(self) -> None:
        self._waiting: list[Answer] = []
        self._underway: Chunk | None = None

    def add(self, answer: Answer) -> list[Score]:
        """Take one; returns the scores that are known by now."""
        if not answer.logits.is_cuda:
            return [answer.score()]
        self._waiting.append(answer)
        return self._advance() if len(self._waiting) == CHUNK else []

    def finish(self) -> list[Score]:
        """The scores of all others."""
        return [*(self._advance() if self._waiting else []), *self._advance()]

    def _advance(self) -> list[Score]:
        """Have the waiting ones scored, and read the chunk before them while the device is busy with that."""
        before, self._underway = self._underway, Chunk(self._waiting) if self._waiting else None
        self._waiting = []
        return [] if before is None else before.scores()
