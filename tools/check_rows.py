"""Compare a cut-down trial on your machine with the rows that come with the repository.

    ttvd bench recipes/table1-cifar10.toml --data DIR --limit 1000 --seeds 0 --only ttvd --only bn --store out/row.db
    python tools/check_rows.py out/row.db results/rows/table1-cifar10.csv

Each run of the trial is compared with the beginning of the shipped run of the same line, corruption and seed, over as
many images: adapters learn along a stream, so a short stream has more errors. The trial uses a random choice of the
images, so the two errors differ by chance. All corruptions of a line use the same images, so their mean differs as much
as a single one: the bound is 2.6 standard deviations of one corruption. The exit code is 1 if a line differs by more.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from ttvd.bench.packed import open_runs
from ttvd.bench.spec import Run
from ttvd.bench.store import Reader

SURE = 2.6
"""Standard deviations that chance exceeds once in a hundred times."""


class Pair(NamedTuple):
    """Errors of a run of the trial and of the shipped run, and the standard deviation of their difference."""

    trial: float
    shipped: float
    deviation: float


def compare(trial: Run, shipped: Run) -> Pair:
    """Compare a run of the trial with the beginning of the shipped run."""
    wanted, sizes, wrong = trial.totals["n"], shipped.record.sizes(), shipped.record.wrong()
    batches = int((sizes.cumsum(0) < wanted).sum()) + 1
    count = float(sizes[:batches].sum())
    error = float(wrong[:batches].sum()) / count
    return Pair(
        trial.totals["error"], error, math.sqrt(max(error * (1 - error), 1e-4) * (1 / wanted + 1 / count))
    )


def find_pairs(trial: Reader, shipped: Reader) -> dict[str, list[Pair]]:
    """Return the pairs of each line, for the recipes that both have."""
    names = set(trial.recipes()) & set(shipped.recipes())
    if not names:
        raise ValueError("the trial and the rows have no recipe in common: give those of one recipe")
    pairs: dict[str, list[Pair]] = {}
    for name in sorted(names):
        known = {_identify(run): run for run in _load(shipped, name).values()}
        runs = _load(trial, name)
        for member in trial.members(name):
            run = runs.get(member.spec.key)
            if run is not None and member.role == "test" and _identify(run) in known:
                pairs.setdefault(member.label, []).append(compare(run, known[_identify(run)]))
    if not pairs:
        raise ValueError("no run of the trial has a shipped one: its method, setting or weights are others")
    return pairs


def _load(source: Reader, recipe: str) -> Mapping[str, Run]:
    done = source.done()
    return source.load(member.spec.key for member in source.members(recipe) if member.spec.key in done)


def _identify(run: Run) -> str:
    """Return a key that is the same for runs that differ in the number of images alone."""
    return replace(run.spec, limit=None).key


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trial", type=Path, help="store that `ttvd bench --limit N` has filled")
    parser.add_argument("rows", type=Path, help="packed rows, a .csv file of results/rows")
    options = parser.parse_args()
    try:
        with open_runs(options.trial) as trial, open_runs(options.rows) as shipped:
            pairs = find_pairs(trial, shipped)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"check_rows: {error}")
    apart = 0
    print(f"{'line':24} {'runs':>4}  {'here':>6}  {'shipped':>7}  {'differs':>7}  {'chance':>6}")
    for label, found in pairs.items():
        here, there = 100 * mean(pair.trial for pair in found), 100 * mean(pair.shipped for pair in found)
        bound = 100 * SURE * mean(pair.deviation for pair in found)
        apart += abs(here - there) > bound
        verdict = "" if abs(here - there) <= bound else "  more than chance"
        print(
            f"{label:24} {len(found):4}  {here:5.2f}%  {there:6.2f}%  {here - there:+6.2f}   {bound:5.2f}{verdict}"
        )
    sys.exit(1 if apart else 0)


if __name__ == "__main__":
    main()
