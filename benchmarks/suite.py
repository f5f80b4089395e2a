"""All benchmarks of cost on this machine's processor as one table, in under five minutes: `make bench`.

    python -m benchmarks.suite --out out/bench.csv

A choice of what the single benchmarks measure: steps of methods (`benchmarks.steps`, which explains the columns), sites
(`benchmarks.sites`), pictures from the disk (`benchmarks.inputs`), growth (`benchmarks.growth`). What would begin after
`--minutes` is left out and named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.clock import describe_device
from benchmarks.grids import measure_grid
from benchmarks.setups import NETWORKS, Mode, Setup
from benchmarks.steps import Plan, measure_cell
from benchmarks.table import Row, Table

import ttvd
from benchmarks import growth, inputs, sites

CPU = torch.device("cpu")
STEPS = (
    ("resnet26", 64, ("ttvd", "tent", "source", "bn", "t3a", "eta", "sar", "shot")),
    ("resnet26", 8, ("ttvd", "tent", "sar", "shot")),
    ("resnet26", 1, ("ttvd", "tent", "sar", "shot")),
    ("resnet50", 1, ("ttvd", "tent")),
    ("vit-b16", 1, ("tent",)),
)


class Piece(NamedTuple):
    """A part of the table: its name, and what makes its rows."""

    name: str
    measure: Callable[[], Iterable[Row]]


def list_pieces(seconds: float, jobs: int) -> Iterator[Piece]:
    """Everything, in the order in which it matters."""
    for network, batch, methods in STEPS:
        for method in methods:
            yield Piece(f"{method} on {network}, batch {batch}", _make_step(network, batch, method, seconds))
    yield Piece("sites", lambda: _measure_sites(seconds))
    yield Piece("inputs", _measure_inputs)
    yield Piece("growth with classes", lambda: growth.measure_classes(CPU, 256, seconds))
    yield Piece("growth with sites", lambda: growth.measure_sites(CPU, 256, seconds, (1, 4, 16)))
    yield Piece("growth of streams", lambda: growth.measure_stream(CPU, (100, 1_000)))
    yield Piece("grid", lambda: measure_grid("processes", (1, jobs), runs=8, limit=2_000))
    yield Piece("grid on Ray", lambda: measure_grid("Ray", (jobs,), runs=8, limit=2_000))


def _make_step(network: str, batch: int, method: str, seconds: float) -> Callable[[], Iterable[Row]]:
    def measure() -> Iterator[Row]:
        plan = Plan(CPU, Mode(), seconds, ("plain", "public") if network == "resnet26" else ("plain",), 60.0)
        kind = NETWORKS[network]
        group = f"{network}, {kind.side} x {kind.side}"
        yield measure_cell(Setup(kind, ttvd.list_methods()[method], CPU), batch, plan, group)

    return measure


def _measure_sites(seconds: float) -> Iterator[Row]:
    for views in (1, 4):
        yield sites.measure_sites(NETWORKS["resnet26"], CPU, 256, views, 128, seconds)


def _measure_inputs() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        folder = inputs.make_pictures(Path(place), 128)
        yield from inputs.measure_inputs(folder, 32, (1, 2), 0.1, CPU, 2)


def run_suite(pieces: Iterable[Piece], table: Table, minutes: float) -> None:
    """Measure piece by piece, as long as there is time."""
    end = time.monotonic() + 60 * minutes
    late = []
    for piece in pieces:
        if time.monotonic() >= end:
            late.append(piece.name)
            continue
        try:
            table.extend(piece.measure())
        except ImportError as error:
            table.note(f"Left out: {piece.name} ({error}).")
    if late:
        table.note(f"Left out, as the {minutes:g} minutes were over: {', '.join(late)}.")


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    started = time.monotonic()
    table = Table(f"Cost on {describe_device(CPU)}, float32. Columns: python -m benchmarks.steps --help.")
    run_suite(list_pieces(args.seconds, args.jobs), table, args.minutes)
    table.note(f"All of it took {(time.monotonic() - started) / 60:.1f} minutes.")
    table.close(args.out)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="after which nothing new begins")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the rounds of a cell, at least")
    parser.add_argument("--jobs", type=int, default=2, help="workers of the grid")
    parser.add_argument("--out", type=Path, help="CSV file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
