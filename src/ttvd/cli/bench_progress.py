"""What ``ttvd bench`` shows while it works: live bars on a terminal, a line for each run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from ttvd.bench.engines import Event
    from ttvd.bench.progress import Pace
    from ttvd.bench.spec import Spec


class Lines:
    """A line for each run that ends, and for what should be known.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._specs: dict[str, Spec] = {}
        self._pace: Pace | None = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, missing: Sequence[Spec], skipped: int) -> None:
        """Say how much there is to do."""
        from ttvd.bench.progress import Pace

        self._specs = {spec.key: spec for spec in missing}
        self._pace = Pace(missing)
        before = f", {skipped} are in the store already" if skipped else ""
        self.write(f"{count_runs(len(missing))} to do{before}")

    def see(self, event: Event) -> None:
        """Write a line, if there is something to say."""
        from ttvd.bench.engines import Broken, Finished, Noted

        assert self._pace is not None
        self._pace.see(event)
        if isinstance(event, Finished):
            totals, seconds = event.run.totals, event.run.facts.seconds
            self._conclude(event.key, f"error {100 * totals['error']:.1f} %, {seconds:.1f} s")
        elif isinstance(event, Broken):
            self._conclude(event.key, f"failed: {event.text.strip().splitlines()[-1]}")
        elif isinstance(event, Noted):
            self.write(event.text)

    def _conclude(self, key: str, text: str) -> None:
        assert self._pace is not None
        self.write(f"[{self._pace.ended}/{self._pace.total}] {describe(self._specs[key])}: {text}")

    def write(self, text: str) -> None:
        """Write a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bars(Lines):
    """A bar for all runs with rate and remaining time, and one for each worker; lines only for failures and notes."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(console)
        text = TextColumn("{task.description}", markup=False)
        self._bars = Progress(BarColumn(20), text, console=console, transient=True)
        self._all = self._bars.add_task("starting", total=None)
        self._lines: dict[str, TaskID] = {}
        self._workers: dict[str, str] = {}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def see(self, event: Event) -> None:
        """Move the bars."""
        from ttvd.bench.engines import Advanced, Broken, Finished, Started

        if isinstance(event, Finished) and self._pace is not None:
            self._pace.see(event)  # no line for it
        else:
            super().see(event)
        if isinstance(event, Started):
            self._place(event.key, event.worker)
        elif isinstance(event, Advanced):
            worker = self._workers[event.key]
            text = f"{self._title(event.key)} · batch {event.done}/{event.total}"
            self._bars.update(self._lines[worker], completed=event.done, total=event.total, description=text)
        elif isinstance(event, Finished | Broken) and event.key in self._workers:
            worker = self._workers.pop(event.key)
            self._bars.reset(self._lines[worker], total=1, completed=0, description=f"{worker} free")
        self._sum_up()

    def _title(self, key: str) -> str:
        return f"{self._workers[key]} {describe(self._specs[key])}"

    def _place(self, key: str, worker: str) -> None:
        """Give a run the line of its worker; a run that comes again leaves its old line, whose worker is dead."""
        old = self._workers.get(key)
        if old is not None and old != worker:
            self._bars.remove_task(self._lines.pop(old))
        self._workers[key] = worker
        if worker not in self._lines:
            self._lines[worker] = self._bars.add_task("")
        self._bars.reset(self._lines[worker], total=None, description=self._title(key))

    def _sum_up(self) -> None:
        assert self._pace is not None
        runs, images = self._pace.rates()
        left = self._pace.seconds_left()
        words = [f"{self._pace.ended}/{count_runs(self._pace.total)}"]
        if runs:
            words += [f"{runs:.3g} runs/min", f"{images:,.0f} images/s"]
        if left is not None:
            words.append(f"{format_time(left)} left")
        total = max(1, self._pace.total)
        self._bars.update(
            self._all, completed=self._pace.fraction, total=total, description=" · ".join(words)
        )


def describe(spec: Spec) -> str:
    """A run in a few words.

    Example:
        >>> from ttvd.bench.spec import Domain, Spec
        >>> describe(Spec("digits-sla", "", "digits", "", (Domain("fog"),), "tent"))
        'tent, fog 5, digits-sla, seed 0'
    """
    return f"{spec.method}, {spec.domain_label}, {spec.checkpoint}, seed {spec.seed}"


def count_runs(count: int) -> str:
    """A number of runs in words."""
    return "1 run" if count == 1 else f"{count} runs"


def format_time(seconds: float) -> str:
    """As people read it.

    Example:
        >>> format_time(75), format_time(7384)
        ('1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
