"""Reads odd files of every kind for as long as there is time, and prints the first case of every fault.

    python tools/fuzz.py --seconds 300
    python tools/fuzz.py --target store --cases 5000 --seed 1

A case has a number. The same target and number give the same file, so a fault can be looked at again:

    python tools/fuzz.py --target store --seed 1234 --cases 1 --keep odd.db

Of a fault in a text, the shortest file that still shows it is kept.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.fuzz import TARGETS, Fuzzer, FuzzError, open_fuzzer  # noqa: E402


def main() -> None:
    """Fuzz all targets, or those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="all unless given")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for all targets together")
    parser.add_argument("--cases", type=int, default=1_000_000, help="at most so many cases of a target")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, help="write the file of the first fault here")
    options = parser.parse_args()
    names = options.target or list(TARGETS)
    seeds, faults = range(options.seed, options.seed + options.cases), 0
    for name in names:
        found = fuzz(name, seeds, options.seconds / len(names))
        for text, (seed, content) in found.items():
            faults += 1
            print(f"  case {seed}: {text}\n  {content[:200]!r}", flush=True)
            if options.keep is not None and faults == 1:
                options.keep.write_bytes(content)
    sys.exit(1 if faults else 0)


def fuzz(name: str, seeds: range, seconds: float) -> dict[str, tuple[int, bytes]]:
    """Try cases of a target until the time is over, and print how they ended.

    Returns:
        The first case of every fault: its number and a short file that shows it, by what happened.
    """
    outcomes: Counter[str] = Counter()
    found: dict[str, tuple[int, bytes]] = {}
    end = time.monotonic() + seconds
    with open_fuzzer(name) as fuzzer:
        for seed in seeds:
            if time.monotonic() > end:
                break
            content = fuzzer.make(seed)
            outcome = try_case(fuzzer, content)
            outcomes["fault" if isinstance(outcome, FuzzError) else outcome] += 1
            if isinstance(outcome, FuzzError) and (place := locate(outcome)) not in found:
                found[place] = seed, shorten(fuzzer, content, place)
    words = ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items()))
    print(f"{name}: {outcomes.total()} cases from {seeds.start} on: {words}", flush=True)
    return found


def try_case(fuzzer: Fuzzer, content: bytes) -> str | FuzzError:
    """Run a case."""
    try:
        return fuzzer.run(content)
    except FuzzError as fault:
        return fault


def locate(fault: FuzzError) -> str:
    """Return what happened and the line of ttvd where it did; faults with equal texts are one."""
    text = str(fault)[:300]
    if fault.__cause__ is None:
        return text
    frames = traceback.extract_tb(fault.__cause__.__traceback__)
    last = next((frame for frame in reversed(frames) if "ttvd" in Path(frame.filename).parts), frames[-1])
    kind = type(fault.__cause__).__name__
    return (
        f"{kind} in {Path(last.filename).name}:{last.lineno}: {text}"
        if len(text) < 300
        else f"{kind}: {text}"
    )


def shorten(fuzzer: Fuzzer, content: bytes, place: str) -> bytes:
    """Take pieces out of a file as long as the same thing happens."""
    if len(content) > 20_000:
        return content
    size, end = len(content) // 2, time.monotonic() + 10
    while size and time.monotonic() < end:
        for at in range(0, len(content), size):
            less = content[:at] + content[at + size :]
            outcome = try_case(fuzzer, less)
            if isinstance(outcome, FuzzError) and locate(outcome) == place:
                content = less
                break
        else:
            size //= 2
    return content


if __name__ == "__main__":
    main()
