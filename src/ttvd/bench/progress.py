"""How far a grid is, how fast it goes, and how long it will take."""

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from ttvd.bench.engines.events import Advanced, Broken, Event, Finished, Passed, Started
from ttvd.bench.spec import Spec


class Pace:
    """Counts runs and images.

    Methods differ widely in cost, so the time that is left is estimated from how long runs of each method took.

    Args:
        missing: The runs to do.
        clock: Seconds.

    Example:
        >>> from ttvd.bench.spec import Domain
        >>> spec = Spec("digits-sla", "", "digits", "", (Domain("fog"),), "tent")
        >>> pace = Pace([spec], clock=iter([0.0, 2.0, 2.0]).__next__)
        >>> pace.see(Started(spec.key, "0"))
        >>> pace.see(Advanced(spec.key, 1, 4))
        >>> pace.fraction, pace.seconds_left()
        (0.25, 6.0)
    """

    def __init__(self, missing: Sequence[Spec], clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting = {spec.key: spec for spec in missing}
        self._clock = clock
        self._running: dict[str, tuple[Spec, float]] = {}
        self._shares: dict[str, float] = {}
        self._images: dict[str, int] = {}
        self._took: dict[str, list[float]] = {}
        self._began: float | None = None
        self._here, self._most = 0, 1
        self.total, self.ended = len(self._waiting), 0

    def see(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, Started):
            spec = self._waiting.pop(event.key, None) or self._running[event.key][0]
            now = self._clock()
            self._began = now if self._began is None else self._began
            self._running[event.key] = spec, now
            self._shares[event.key] = 0.0
            self._images.pop(event.key, None)
            self._most = max(self._most, len(self._running))
        elif isinstance(event, Advanced):
            self._shares[event.key] = event.done / event.total
            self._images[event.key] = event.done * self._running[event.key][0].batch_size
        elif isinstance(event, Finished | Broken | Passed):
            self._end(event)

    def _end(self, event: Finished | Broken | Passed) -> None:
        self.ended += 1
        self._waiting.pop(event.key, None)
        spec, start = self._running.pop(event.key, (None, 0.0))
        self._shares.pop(event.key, None)
        if isinstance(event, Finished):
            self._here += 1
            self._images[event.key] = int(event.run.record.sizes().sum())
            if spec is not None:
                self._took.setdefault(spec.method, []).append(self._clock() - start)

    @property
    def fraction(self) -> float:
        """Runs that are done, with parts of those that are going on."""
        return self.ended + sum(self._shares.values())

    def rates(self) -> tuple[float, float]:
        """Runs in a minute and images in a second, since the first run began."""
        seconds = 0.0 if self._began is None else self._clock() - self._began
        if seconds <= 0:
            return 0.0, 0.0
        done = self._here + sum(self._shares.values())
        return 60 * done / seconds, sum(self._images.values()) / seconds

    def seconds_left(self) -> float | None:
        """An estimate; None before anything is known."""
        now = self._clock()
        took = {method: fmean(times) for method, times in self._took.items()}
        for key, (spec, start) in self._running.items():
            if self._shares[key] > 0 and spec.method not in took:
                took[spec.method] = (now - start) / self._shares[key]
        if not took:
            return None
        usual = fmean(took.values())
        left = sum(took.get(spec.method, usual) for spec in self._waiting.values())
        left += sum(
            took.get(spec.method, usual) * (1 - self._shares[key]) for key, (spec, _) in self._running.items()
        )
        return left / self._most
