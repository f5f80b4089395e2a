"""How far a grid is, how fast it goes, and how long it will take."""

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from ttvd.bench.engines import Advanced, EndedElsewhere, Event, Failed, Finished, Started
from ttvd.bench.spec import Spec


class ProgressEstimate:
    """Counts runs and images, and estimates the remaining time.

    Methods differ widely in cost, so the estimate uses how long runs of each method took.

    Args:
        missing: The runs to do.
        clock: Returns the time in seconds.

    Attributes:
        total: Number of runs to do.
        ended: Number of runs that have ended, here or elsewhere, well or not.

    Example:
        >>> from ttvd.bench.spec import Domain
        >>> spec = Spec("digits-sla", "", "digits", "", (Domain("fog"),), "tent")
        >>> progress = ProgressEstimate([spec], clock=iter([0.0, 2.0, 2.0]).__next__)
        >>> progress.see(Started(spec.key, "0"))
        >>> progress.see(Advanced(spec.key, 1, 4))
        >>> progress.fraction, progress.seconds_left()
        (0.25, 6.0)
    """

    def __init__(self, missing: Sequence[Spec], clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting = {spec.key: spec for spec in missing}
        self._clock = clock
        self._running: dict[str, tuple[Spec, float]] = {}  # run and time of its start
        self._shares: dict[str, float] = {}  # share of each running run that is done
        self._images: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}  # seconds of each finished run, by method
        self._began: float | None = None
        self._done, self._most_at_once = 0, 1
        self.total, self.ended = len(self._waiting), 0

    def see(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Started):
            spec = self._waiting.pop(event.key, None) or self._running[event.key][0]
            now = self._clock()
            self._began = now if self._began is None else self._began
            self._running[event.key] = spec, now
            self._shares[event.key] = 0.0
            self._images.pop(event.key, None)
            self._most_at_once = max(self._most_at_once, len(self._running))
        elif isinstance(event, Advanced):
            self._shares[event.key] = event.done / event.total
            self._images[event.key] = event.done * self._running[event.key][0].batch_size
        elif isinstance(event, Finished | Failed | EndedElsewhere):
            self._end(event)

    def _end(self, event: Finished | Failed | EndedElsewhere) -> None:
        self.ended += 1
        self._waiting.pop(event.key, None)
        spec, start = self._running.pop(event.key, (None, 0.0))
        self._shares.pop(event.key, None)
        if isinstance(event, Finished):
            self._done += 1
            self._images[event.key] = int(event.run.record.sizes().sum())
            if spec is not None:
                self._times.setdefault(spec.method, []).append(self._clock() - start)

    @property
    def fraction(self) -> float:
        """Number of runs that have ended, with parts of those that are going on."""
        return self.ended + sum(self._shares.values())

    def rates(self) -> tuple[float, float]:
        """Return runs per minute and images per second, since the first run began."""
        seconds = 0.0 if self._began is None else self._clock() - self._began
        if seconds <= 0:
            return 0.0, 0.0
        done = self._done + sum(self._shares.values())
        return 60 * done / seconds, sum(self._images.values()) / seconds

    def seconds_left(self) -> float | None:
        """Estimate the remaining seconds; None before anything is known."""
        now = self._clock()
        times = {method: fmean(seconds) for method, seconds in self._times.items()}
        for key, (spec, start) in self._running.items():
            if self._shares[key] > 0 and spec.method not in times:
                times[spec.method] = (now - start) / self._shares[key]
        if not times:
            return None
        usual = fmean(times.values())
        left = sum(times.get(spec.method, usual) for spec in self._waiting.values())
        for key, (spec, _) in self._running.items():
            left += times.get(spec.method, usual) * (1 - self._shares[key])
        return left / self._most_at_once
