"""Kills `ttvd bench` at random moments and checks that every run in the store equals that of an uninterrupted store.

    python tools/kill_bench.py --kills 95

Kinds of kills: the whole process group, the driver alone, its workers, one of two drivers on one store, and SIGTERM.
After each of them the store must open and hold whole runs only. A store that is complete is followed by an empty one.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttvd.bench.spec import Run
from ttvd.bench.store import Store

KINDS = ("group", "driver", "workers", "two drivers", "SIGTERM")
RECIPE = """
title = "Six short runs"
seeds = [0, 1]
data = {set = "digits", corruptions = ["gaussian_noise"], constants = "imagenet", limit = 64}
stream = {batch_size = 4}
checkpoints = {plain = "digits-plain"}
methods = [{name = ["tent", "cotta", "bn"]}]
"""
RUNS = 6
_PATIENCE = 120.0  # seconds for anything to happen, also on a busy machine

Rows = dict[str, list[tuple[Any, ...]]]


class Bench:
    """A `ttvd bench` that does the recipe, in a session of its own.

    Args:
        folder: Folder for the recipe and the output.
        store: Path of the store.
        jobs: Number of workers.
    """

    def __init__(self, folder: Path, store: Path, jobs: int = 1) -> None:
        recipe = folder / "short.toml"
        recipe.write_text(RECIPE, encoding="utf-8")
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ttvd", "bench", str(recipe), "--store", str(store), "--jobs", str(jobs)],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Process id of the driver, which is also that of its session and process group."""
        return self.process.pid

    def output(self) -> str:
        """Return what it has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_runs(self, count: int) -> None:
        """Wait until so many runs are done, or until it has ended."""
        self._wait(lambda: self.process.poll() is not None or self.output().count("\n[") >= count)

    def wait_for_output(self, text: str) -> None:
        """Wait until it has printed a text, or until it has ended."""
        self._wait(lambda: self.process.poll() is not None or text in self.output())

    def find_processes(self) -> list[int]:
        """Return the living processes of its session, the driver first."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.pid and fields[0] != "Z":
                found.append(int(entry.name))
        return sorted(found, key=lambda pid: (pid != self.pid, pid))

    def find_workers(self) -> list[int]:
        """Return the living workers."""
        return [pid for pid in self.find_processes() if b"spawn_main" in _read(Path(f"/proc/{pid}/cmdline"))]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the driver, unless it has ended."""
        self.process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the driver and its workers, unless the driver has ended."""
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def kill_workers(self) -> int:
        """Kill all workers. Returns how many there were."""
        workers = self.find_workers()
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(workers)

    def end(self) -> int:
        """Wait until it and all its workers have ended. Returns the exit code."""
        code = self.process.wait(_PATIENCE)
        self._wait(lambda: not self.find_processes())
        return code

    def _wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"nothing happened for {_PATIENCE:.0f} s:\n{self.output()}")
            time.sleep(0.01)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def strip(run: Run) -> list[tuple[Any, ...]]:
    """Return all of the rows but their times."""
    return [(row.metrics, row.kept, row.domain) for row in run.record.rows]


def read_rows(store: Path) -> Rows:
    """Return the rows of all finished runs; none where there is no store yet."""
    if not store.exists() or store.stat().st_size == 0:
        return {}
    with Store(store, readonly=True) as opened:
        if opened.failures():
            raise AssertionError(f"runs have failed: {opened.failures()}")
        return {key: strip(run) for key, run in opened.load(opened.done()).items()}


def check_rows(found: Rows, expected: Rows) -> None:
    """Refuse runs that differ from those of an uninterrupted store.

    Raises:
        AssertionError: A run is not expected, or has other rows.
    """
    for key, rows in found.items():
        if rows != expected.get(key):
            raise AssertionError(f"run {key} differs from that of an uninterrupted store")


def kill_once(kind: str, folder: Path, store: Path, rng: random.Random, startup: float) -> None:
    """Start the benchmark and kill it once, at a random moment.

    Args:
        kind: One of ``KINDS``.
        folder: Folder for the recipe and the output.
        store: Path of the store.
        rng: Chooses the moment.
        startup: Seconds that the benchmark takes until its first run.

    Raises:
        AssertionError: Somebody who was not killed did not finish.
    """
    jobs = rng.choice((1, 2))
    benches = [Bench(folder, store, jobs) for _ in range(2 if kind == "two drivers" else 1)]
    victim = rng.choice(benches)
    try:
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0.0, startup))  # while it starts
        else:
            victim.wait_for_runs(rng.randrange(3))
            time.sleep(rng.uniform(0.0, 0.3))  # in the middle of a run
        if kind == "workers":
            victim.kill_workers()
        elif kind == "driver":
            victim.send(signal.SIGKILL)
        elif kind == "SIGTERM":
            victim.send(signal.SIGTERM)
        else:
            victim.kill_group()
        codes = {bench: bench.end() for bench in benches}
    finally:
        for bench in benches:
            bench.kill_group()
    allowed = {"SIGTERM": {130, -signal.SIGTERM}, "workers": set()}.get(kind, {-signal.SIGKILL})
    for bench, code in codes.items():
        if code != 0 and (bench is not victim or code not in allowed):
            raise AssertionError(f"exit code {code} after {kind}:\n{bench.output()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=95)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, count, complete = random.Random(args.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        whole = Bench(folder, folder / "whole.db")
        whole.wait_for_runs(1)
        startup = time.monotonic() - start
        if code := whole.end():
            sys.exit(f"the uninterrupted benchmark ended with exit code {code}:\n{whole.output()}")
        expected = read_rows(folder / "whole.db")
        if len(expected) != RUNS:
            sys.exit(f"the uninterrupted store has {len(expected)} of {RUNS} runs")
        store = folder / "0.db"
        for number in range(args.kills):
            kind = rng.choice(KINDS)
            kill_once(kind, folder, store, rng, startup)
            found = read_rows(store)
            check_rows(found, expected)
            count[kind] += 1
            print(f"{number + 1}/{args.kills} {kind}: {len(found)} of {RUNS} runs, all equal", flush=True)
            if len(found) == RUNS:
                complete += 1
                store = folder / f"{complete}.db"
    kinds = ", ".join(f"{kind} {times}" for kind, times in sorted(count.items()))
    seconds = (time.monotonic() - start) / max(1, args.kills)
    print(
        f"{args.kills} kills ({kinds}), {complete} complete stores, every row equal; {seconds:.1f} s a kill"
    )


if __name__ == "__main__":
    main()
