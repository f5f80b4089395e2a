"""What `ttvd bench` prints while it works."""

import io

from rich.console import Console

from tests.helpers.engines import make_run, make_spec
from ttvd.bench.engines import Advanced, EndedElsewhere, Event, Failed, Finished, Idle, Message, Started
from ttvd.bench.progress import ProgressEstimate
from ttvd.cli.bench_progress import ProgressBars, ProgressLines

ONE, TWO, THREE, FOUR = (make_spec(seed, method) for seed, method in enumerate(["bn", "tent", "bn", "memo"]))
EVENTS: list[Event] = [
    Message("[Careful] now."),
    Started(ONE.key, "0"),
    Started(TWO.key, "1"),
    Advanced(ONE.key, 1, 2),
    Idle(),
    Finished(ONE.key, make_run(ONE)),
    Started(THREE.key, "0"),
    Advanced(TWO.key, 1, 4),
    Started(TWO.key, "2"),  # its worker was lost
    Failed(TWO.key, "Traceback\nRuntimeError: no [tent] today\n"),
    EndedElsewhere(FOUR.key),
    Finished(THREE.key, make_run(THREE)),
]


def show(kind: type[ProgressLines], terminal: bool) -> str:
    out = io.StringIO()
    with kind(Console(file=out, force_terminal=terminal, width=120, _environ={})) as progress:
        progress.begin([ONE, TWO, THREE, FOUR], 3)
        for event in EVENTS:
            progress.see(event)
    return out.getvalue()


def test_lines() -> None:
    error = 100 * make_run(ONE).totals["error"]
    lines = show(ProgressLines, terminal=False).splitlines()
    assert lines[0] == "4 runs to do, 3 are in the store already"
    assert lines[1] == "[Careful] now."
    assert lines[2] == f"[1/4] bn, fog 5, digits-plain, seed 0: error {error:.1f} %, 0.1 s"
    assert lines[3] == "[2/4] tent, fog 5, digits-plain, seed 1: failed: RuntimeError: no [tent] today"
    assert len(lines) == 5


def test_bars() -> None:
    text = show(ProgressBars, terminal=True)
    assert "4 runs to do, 3 are in the store already" in text
    assert "[Careful] now." in text
    assert "failed: RuntimeError: no [tent] today" in text
    assert "[1/4]" not in text  # the bars show what went well
    assert "4/4 runs" in text


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_and_remaining_time() -> None:
    clock = Clock()
    pace = ProgressEstimate([ONE, TWO, THREE, FOUR], clock)
    assert pace.rates() == (0.0, 0.0)
    assert pace.seconds_left() is None
    pace.see(Started(ONE.key, "0"))
    pace.see(Started(TWO.key, "1"))
    clock.now += 10
    assert pace.seconds_left() is None
    pace.see(Advanced(TWO.key, 1, 4))  # it will take 40 s
    pace.see(Finished(ONE.key, make_run(ONE)))  # 10 s
    assert pace.fraction == 1.25
    assert pace.rates() == (6 * 1.25, (8 + 64) / 10)
    # 30 s of the second, 10 s for the third, which is like the first, 25 s for the unknown; two workers.
    assert pace.seconds_left() == (30 + 10 + 25) / 2
    pace.see(Started(TWO.key, "2"))  # lost, and begun again
    assert pace.fraction == 1.0
    pace.see(Failed(TWO.key, "..."))
    pace.see(EndedElsewhere(FOUR.key))
    pace.see(Started(THREE.key, "2"))
    clock.now += 30
    pace.see(Finished(THREE.key, make_run(THREE)))
    assert (pace.ended, pace.total, pace.fraction) == (4, 4, 4.0)
    assert pace.seconds_left() == 0.0
    assert pace.rates()[0] == 60 * 2 / 40
