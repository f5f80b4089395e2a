"""Kills `ttvd adapt` by SIGKILL again and again, resumes it, and compares its file with that of an uninterrupted run.

    python tools/kill_adapt.py --kills 200 --fresh 10

Half of the kills are aimed: at the start of a run, at its resume before the first batch, at its end. Such a process
kills itself just before or after one of its operations on files. A timer kills the others at any moment. Processes are
forks of this one, so that none has to import torch; some more are new processes of the real command (`--fresh`). A run
is killed and resumed until it ends by itself, then the next one begins.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ttvd.deploy
from ttvd.cli.main import app

AIMS = ("start", "resume", "end", "any")
IMAGES, BATCH = 24, 2
OPERATIONS = ("open", "write", "fsync", "ftruncate", "replace", "unlink")
"""Functions of `os` that a process counts."""


def write_images(folder: Path) -> Path:
    """Write the images of all runs."""
    path = folder / "images.npy"
    np.save(path, np.random.default_rng(0).integers(0, 256, (IMAGES, 28, 28), dtype=np.uint8))
    return path


def find_state(out: Path) -> Path:
    """Return where the state of a run is."""
    return Path(f"{out}.state")


def make_command(images: Path, out: Path) -> list[str]:
    """Return the arguments of `ttvd adapt`. It resumes where there is a state, as a user would."""
    state = find_state(out)
    command = [
        "adapt",
        str(images),
        "--model",
        "digits-plain",
        "--method",
        "tent",
        "--batch-size",
        str(BATCH),
    ]
    command += ["--out", str(out), "--save-state", str(state)]
    return command + ["--resume"] * state.exists()


def fork(command: list[str], before: Callable[[], None] = lambda: None) -> int:
    """Run a command in a fork of this process, which saves its state every three batches. Returns its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        ttvd.deploy.StateFile = partial(ttvd.deploy.StateFile, every=3)  # type: ignore[assignment, misc]
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
            before()
            app(command, standalone_mode=False)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def count_operations(
    files: Path, *, report: int | None = None, kill_at: int | None = None, after: bool = False
) -> None:
    """Count the operations of this process on files in a folder from now on.

    Args:
        files: The folder.
        report: File that gets a byte for each operation.
        kill_at: Number of the operation at which this process kills itself.
        after: Whether it does the operation first.
    """
    count = [0]

    def watch(name: str) -> None:
        original = getattr(os, name)

        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            place = (
                os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.path.abspath(target)
            )
            if not place.startswith(str(files)):
                return original(target, *arguments, **options)
            count[0] += 1
            if report is not None:
                write(report, b".")
            if count[0] == kill_at and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(target, *arguments, **options)
            if count[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, name, call)

    write = os.write
    for name in OPERATIONS:
        watch(name)


class Killer:
    """Runs the command again and again, and kills it.

    Args:
        folder: Empty folder for all files.
        seed: Seed of all choices.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder, self._rng, self._number = folder, random.Random(seed), 0
        self._images = write_images(folder)
        self._expected: dict[str, bytes] = {}
        self.kills, self.complete = Counter[str](), 0
        self._operations: dict[str, int] = {}
        (folder / "whole").mkdir()
        for suffix in (".csv", ".parquet"):
            self._run_whole(suffix)
        self._begin()

    def _run_whole(self, suffix: str) -> None:
        """Do the run without a kill. Note its file, its time, and how many operations on files it takes."""
        out = self._folder / "whole" / f"out{suffix}"
        reader, writer = os.pipe()
        start = time.monotonic()
        pid = fork(make_command(self._images, out), partial(count_operations, out.parent, report=writer))
        os.close(writer)
        with open(reader, "rb") as file:
            self._operations[suffix] = len(file.read())
        self._end(pid)
        self._seconds = time.monotonic() - start
        self._expected[suffix] = out.read_bytes()

    def _begin(self) -> None:
        """Begin with an empty folder."""
        self._number += 1
        self._place = self._folder / str(self._number)
        self._place.mkdir()
        self._suffix = self._rng.choice((".csv", ".parquet"))
        self.out = self._place / f"out{self._suffix}"

    def _end(self, pid: int) -> bool:
        """Wait for a process. Returns whether it was killed; any other failure is an error."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, -signal.SIGKILL):
            raise AssertionError(f"exit code {code} in {self._folder}; see the traceback above")
        return code != 0

    def kill_once(self, aim: str) -> None:
        """Start or resume the run, and kill it once. A run that has ended is checked, and the next one begins.

        Raises:
            AssertionError: The run ended otherwise than by the kill, or with other files than an uninterrupted run.
        """
        rng = self._rng
        if aim in ("start", "end") and find_state(self.out).exists():
            self.finish()
        while aim == "resume" and not find_state(self.out).exists():
            self.kill_once("any")
        command = make_command(self._images, self.out)
        if aim == "any":
            pid = fork(command)
            time.sleep(rng.uniform(0.0, self._seconds))
            os.kill(pid, signal.SIGKILL)
        else:
            at = self._operations[self._suffix] - rng.randrange(12) if aim == "end" else rng.randint(1, 9)
            after = rng.random() < 0.5
            pid = fork(command, partial(count_operations, self._place, kill_at=at, after=after))
        self._note(aim, self._end(pid))

    def kill_fresh(self) -> None:
        """Kill a new process of the real command at a random moment after it has touched its files."""
        command = [sys.executable, "-m", "ttvd", *make_command(self._images, self.out)]
        before = len(os.listdir(self._place))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while (
            process.poll() is None and len(os.listdir(self._place)) == before and self._rng.random() < 0.999
        ):
            time.sleep(0.005)
        time.sleep(self._rng.uniform(0.0, 0.2))
        process.kill()
        error = process.communicate()[1]
        if process.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(f"exit code {process.returncode}:\n{error}")
        self._note("fresh", process.returncode != 0)

    def _note(self, aim: str, was_killed: bool) -> None:
        self.kills[aim] += was_killed
        if not was_killed:
            self.check()

    def finish(self) -> None:
        """Let the run end, and check it."""
        if self._end(fork(make_command(self._images, self.out))):
            raise AssertionError("somebody else has killed the run")
        self.check()

    def check(self) -> None:
        """Compare the files of a run that has ended with those of an uninterrupted one, and begin the next."""
        left = sorted(path.name for path in self._place.iterdir())
        if left != sorted([self.out.name, find_state(self.out).name]):
            raise AssertionError(f"a run has left {left}")
        if self.out.read_bytes() != self._expected[self._suffix]:
            raise AssertionError(f"{self.out} differs from that of an uninterrupted run")
        self.complete += 1
        self._begin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--fresh", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        killer, aims = Killer(Path(folder), args.seed), random.Random(args.seed)
        while killer.kills.total() < args.kills:
            killer.kill_once(aims.choice(AIMS[:3]) if aims.random() < 0.5 else "any")
        killer.finish()
        while killer.kills["fresh"] < args.fresh:
            killer.kill_fresh()
        killer.finish()
    kinds = ", ".join(f"{aim} {count}" for aim, count in sorted(killer.kills.items()))
    seconds = (time.monotonic() - start) / max(1, killer.kills.total())
    total, complete = killer.kills.total(), killer.complete
    print(f"{total} kills ({kinds}), {complete} complete runs, every file equal; {seconds:.2f} s a kill")


if __name__ == "__main__":
    main()
