"""Progress of ``ttvd bench``: live bars on a terminal, otherwise a line for each run."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from ttvd.bench.engines import Event
    from ttvd.bench.progress import ProgressEstimate
    from ttvd.bench.spec import Spec


class ProgressLines:
    """Prints a line for each run that ends and for each note.

    Args:
        console: Console to print to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._specs: dict[str, Spec] = {}
        self._pace: ProgressEstimate | None = None

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, missing: Sequence[Spec], skipped: int) -> None:
        """Print how many runs there are to execute."""
        from ttvd.bench.progress import ProgressEstimate

        self._specs = {spec.key: spec for spec in missing}
        self._pace = ProgressEstimate(missing)
        before = f", {skipped} are in the store already" if skipped else ""
        self.write(f"{count_runs(len(missing))} to do{before}")

    def see(self, event: Event) -> None:
        """Print a line about an event that users should know of."""
        from ttvd.bench.engines import Failed, Finished, Message

        assert self._pace is not None
        self._pace.see(event)
        if isinstance(event, Finished):
            totals, seconds = event.run.totals, event.run.facts.seconds
            self._write_end(event.key, f"error {100 * totals['error']:.1f} %, {seconds:.1f} s")
        elif isinstance(event, Failed):
            self._write_end(event.key, f"failed: {event.text.strip().splitlines()[-1]}")
        elif isinstance(event, Message):
            self.write(event.text)

    def _write_end(self, key: str, text: str) -> None:
        assert self._pace is not None
        self.write(f"[{self._pace.ended}/{self._pace.total}] {describe(self._specs[key])}: {text}")

    def write(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class ProgressBars(ProgressLines):
    """Shows a bar for all runs, with rate and remaining time, and one for each worker; prints failures and notes."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(console)
        text = TextColumn("{task.description}", markup=False)
        self._bars = Progress(BarColumn(20), text, console=console, transient=True)
        self._all = self._bars.add_task("starting", total=None)
        self._tasks: dict[str, TaskID] = {}
        self._workers: dict[str, str] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def see(self, event: Event) -> None:
        """Update the bars."""
        from ttvd.bench.engines import Advanced, Failed, Finished, Started

        if isinstance(event, Finished) and self._pace is not None:
            self._pace.see(event)  # the bars show it
        else:
            super().see(event)
        if isinstance(event, Started):
            self._assign(event.key, event.worker)
        elif isinstance(event, Advanced):
            worker = self._workers[event.key]
            text = f"{self._title(event.key)} · batch {event.done}/{event.total}"
            self._bars.update(self._tasks[worker], completed=event.done, total=event.total, description=text)
        elif isinstance(event, Finished | Failed) and event.key in self._workers:
            worker = self._workers.pop(event.key)
            self._bars.reset(self._tasks[worker], total=1, completed=0, description=f"{worker} free")
        self._update_total()

    def _title(self, key: str) -> str:
        return f"{self._workers[key]} {describe(self._specs[key])}"

    def _assign(self, key: str, worker: str) -> None:
        """Show a run in the bar of its worker. If the run was started before, its worker died: that bar is removed."""
        old = self._workers.get(key)
        if old is not None and old != worker:
            self._bars.remove_task(self._tasks.pop(old))
        self._workers[key] = worker
        if worker not in self._tasks:
            self._tasks[worker] = self._bars.add_task("")
        self._bars.reset(self._tasks[worker], total=None, description=self._title(key))

    def _update_total(self) -> None:
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
    """Describe a run in a few words.

    Example:
        >>> from ttvd.bench.spec import Domain, Spec
        >>> describe(Spec("digits-sla", "", "digits", "", (Domain("fog"),), "tent"))
        'tent, fog 5, digits-sla, seed 0'
    """
    return f"{spec.method}, {spec.domain_label}, {spec.checkpoint}, seed {spec.seed}"


def count_runs(count: int) -> str:
    """Return a number of runs in words."""
    return "1 run" if count == 1 else f"{count} runs"


def format_time(seconds: float) -> str:
    """Format a time as minutes and seconds, with hours if needed.

    Example:
        >>> format_time(75), format_time(7384)
        ('1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
