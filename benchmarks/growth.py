"""How cost grows: with classes, with sites of a class, with the length of a stream, with workers.

    python -m benchmarks.growth                                   # CPU: streams up to 10,000 batches
    python -m benchmarks.growth --device cuda --dim 2048 --lengths 100 1000 10000 100000
    python -m benchmarks.growth --parts grid --jobs 1 2 4 --runs 16

- *classes*: the geometry of a TTVD step (four views) and a whole T3A update, on features that are there.
- *sites*: point influence of clusters and its gradient.
- *stream*: milliseconds a batch and living memory after so many batches; both should not grow.
- *grid*: a grid of real runs (digits) by processes and by Ray; efficiency is the time that workers spend in runs by the
  time that they are paid for, their start included.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmarks.clock import Run, describe_device, find_device, take_turns, time_calls
from benchmarks.floors import Recorded
from benchmarks.geometry import isolate_geometry
from benchmarks.grids import measure_grid
from benchmarks.setups import TEMPERATURES
from benchmarks.table import Row, Table
from torch import nn

import ttvd
from ttvd.geometry import Diagram, point_scores
from ttvd.methods import Adapter
from ttvd.nn.fingerprint import fingerprint
from ttvd.testing import make_world
from ttvd.zoo.sites import Sites

CLASSES = (10, 1_000, 21_000)
SITES = (1, 2, 4, 8, 16)
LENGTHS = (100, 1_000, 10_000)
SUPPORTS = 20  # of each class in T3A: with 21,000 classes a hundred would not fit into every memory
BATCH = 64


def measure_classes(
    device: torch.device, dim: int, seconds: float, classes: tuple[int, ...] = CLASSES
) -> Iterator[Row]:
    """Geometry of TTVD and update of T3A for more and more classes."""
    for name in ("ttvd", "t3a"):
        first = None
        for count in classes:
            run = isolate_geometry(_make_adapter(name, count, dim, device), _images(device))
            assert run is not None
            spent = _time(run, device, seconds)
            first = first or spent
            yield _make_row(f"classes, {dim} features", name, f"{count:,} classes", spent, first)
            del run


def _make_adapter(name: str, classes: int, dim: int, device: torch.device) -> Adapter:
    """A method around a network that is nothing but a norm and a head."""
    torch.manual_seed(0)
    views = 4 if name == "ttvd" else 1
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(12, dim), nn.BatchNorm1d(dim), nn.Linear(dim, classes * views)
    )
    net.eval().to(device)
    if name != "ttvd":
        return ttvd.create(name, net, supports=SUPPORTS)
    means = torch.randn(classes, views, dim).double()
    sites = Sites(means, torch.ones(classes, views).long(), fingerprint(net), temperatures=TEMPERATURES)
    return ttvd.create(name, net, sites=sites)


def _images(device: torch.device) -> torch.Tensor:
    return torch.rand(BATCH, 3, 2, 2, generator=torch.Generator().manual_seed(0)).to(device)


def measure_sites(
    device: torch.device, dim: int, seconds: float, counts: tuple[int, ...] = SITES, classes: int = 1_000
) -> Iterator[Row]:
    """Point influence of clusters of more and more sites, with its gradient."""
    first = None
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(BATCH, dim, generator=generator).to(device).requires_grad_()
    for count in counts:
        means = torch.randn(classes, count, dim, generator=generator).to(device)
        diagram = Diagram.from_means(means)

        def run(diagram: Diagram = diagram) -> object:
            return torch.autograd.grad(point_scores(z, diagram, gamma=-0.8).sum(), z)

        spent = take_turns({"run": run}, device, seconds).median("run")
        first = first or spent
        yield _make_row(
            f"sites, {classes:,} classes, {dim} features",
            "cluster-induced",
            f"{count} sites a class",
            spent,
            first,
        )


def _time(run: Run, device: torch.device, seconds: float) -> float:
    run = Recorded(run, device) if device.type == "cuda" else run
    return take_turns({"run": run}, device, seconds).median("run")


def _make_row(group: str, name: str, setting: str, spent: float, first: float) -> Row:
    return Row(
        group, name, setting, ms=1e3 * spent, images=BATCH / spent, note=f"{spent / first:.1f} x the first"
    )


def measure_stream(device: torch.device, lengths: tuple[int, ...] = LENGTHS) -> Iterator[Row]:
    """Time and memory of a stream after so many batches; small images, so that nothing hides behind the network."""
    for name in ("ttvd", "t3a", "eta"):
        adapter = make_world(name, device=str(device))[1]()
        pool = torch.rand(64, 8, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
        state = {"step": 0}

        def step(
            adapter: Adapter = adapter, pool: torch.Tensor = pool, state: dict[str, int] = state
        ) -> None:
            adapter(pool[state["step"] % len(pool)])
            state["step"] += 1

        for _ in range(10):
            step()
        base, done = count_living(device), 0
        for length in lengths:
            spent = time_calls(step, device, length - done)
            done, grown = length, count_living(device) - base
            note = f"{grown:+,} bytes since the first batches"
            yield Row("stream", name, f"{length:,} batches", ms=1e3 * spent, note=note)


def count_living(device: torch.device) -> int:
    """Bytes of tensors: what the allocator has given out on a GPU, what Python knows of on a CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_allocated(device))
    return sum(o.nbytes for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and not o.is_sparse)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    device = find_device(args.device)
    table = Table(f"Growth on {describe_device(device)}, float32.")
    if "classes" in args.parts:
        table.extend(measure_classes(device, args.dim, args.seconds, tuple(args.classes)))
    if "sites" in args.parts:
        table.extend(measure_sites(device, args.dim, args.seconds))
    if "stream" in args.parts:
        table.extend(measure_stream(device, tuple(args.lengths)))
    if "grid" in args.parts:
        for kind in ("processes",) if args.no_ray else ("processes", "Ray"):
            table.extend(measure_grid(kind, tuple(args.jobs), args.runs, args.limit))
    table.close(args.out)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["classes", "sites", "stream", "grid"]
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--dim", type=int, default=512, help="of the features")
    parser.add_argument("--classes", nargs="+", type=int, default=list(CLASSES))
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=list(LENGTHS), help="of streams, in batches"
    )
    parser.add_argument("--jobs", nargs="+", type=int, default=[1, 2], help="workers of the grid")
    parser.add_argument("--runs", type=int, default=8, help="of the grid")
    parser.add_argument("--limit", type=int, default=2000, help="images of a run of the grid")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the rounds of a cell, at least")
    parser.add_argument("--out", type=Path, help="CSV file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
