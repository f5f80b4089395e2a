"""``ttvd bench`` is killed again and again; the store ends as if nothing had happened. The long version is a tool."""

import random
import signal
import time
from pathlib import Path

import pytest
from tools.kill_bench import RUNS, Bench, check_rows, read_rows

from tests.helpers.engines import do_here, strip
from ttvd.bench.store import Store


@pytest.mark.slow
def test_every_row_is_that_of_an_uninterrupted_store(tmp_path: Path) -> None:
    store, moments = tmp_path / "runs.db", random.Random(0)

    def start(runs: int) -> Bench:
        """Start a driver, and wait for the middle of a run."""
        bench = Bench(tmp_path, store)
        bench.wait_for_output("to do")
        bench.wait_for_runs(runs)
        time.sleep(moments.uniform(0.0, 0.1))
        return bench

    bench = start(2)
    bench.kill_group()
    assert bench.end() < 0
    with Store(store, readonly=True) as opened:
        alone = do_here([member.spec for member in opened.members("short")])
    expected = {key: strip(run) for key, run in alone.items()}
    assert len(expected) == RUNS
    check_rows(read_rows(store), expected)

    first, second = Bench(tmp_path, store), start(0)
    first.send(signal.SIGKILL)
    assert second.kill_workers() == 1
    assert first.end() < 0  # its worker has noticed
    assert second.end() == 0, second.output()
    assert read_rows(store) == expected
