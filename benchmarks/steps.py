"""Cost of a step of each method, compared with its floor and with plain eager code.

    python -m benchmarks.steps                                                   # what two CPU cores can do in a while
    python -m benchmarks.steps --methods tent ttvd --networks resnet26 --batches 64
    python -m benchmarks.steps --device cuda --precision bfloat16 --channels-last --compile --out steps.csv

Columns: milliseconds a step and images a second; time by that of the *floor*, the bare forward and backward passes of
as many images (registry entry, views counted) through the same network in the same precision, layout and graph mode;
how much longer a *plain* eager step takes, and the step of *public* code (`benchmarks/rivals.py`; both always float32,
channels first, one kernel at a time); megabytes at the peak, and by those of the floor; share of *geometry*: what is
done with features and logits (distances, influences, filter, loss and its gradient), timed alone on features that are
kept. All of them take turns in rounds; medians; warm-up does not count. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.clock import Run, Times, describe_device, find_device, peak_memory, take_turns
from benchmarks.counts import count_forward
from benchmarks.floors import Floor, Recorded, is_recorded, list_passes
from benchmarks.geometry import isolate_geometry
from benchmarks.plain import Plain
from benchmarks.rivals import RIVALS
from benchmarks.setups import NETWORKS, Mode, Network, Setup
from benchmarks.table import Row, Table

import ttvd
from ttvd.methods import Adapter, Method

LONGEST = {"cpu": 4.0, "cuda": float("inf")}
"""Seconds that the floor of a step may take by estimate; longer ones are left out."""
_RATE = 6e10  # operations a second on which this estimate rests: two CPU cores


Makers = dict[str, Callable[[], Run | None]]


class Plan(NamedTuple):
    """What is measured in every cell.

    Attributes:
        device: Device of the steps.
        mode: Precision, layout, compiled or not.
        seconds: Time for the rounds of a cell.
        rivals: Kinds of rivals: "plain", "public".
        longest: Longest estimated time of a floor, in seconds; longer ones are left out.
    """

    device: torch.device
    mode: Mode
    seconds: float
    rivals: tuple[str, ...]
    longest: float


class Measured(NamedTuple):
    """What was measured in a cell.

    Attributes:
        times: Times of all contenders.
        sizes: Peak memory of our step and of the floor, in bytes.
        kept: Share of the batch that our step used.
    """

    times: Times
    sizes: Mapping[str, int | None]
    kept: float


def measure_cell(setup: Setup, batch: int, plan: Plan, group: str) -> Row:
    """Time a method at a batch size against its floor and its rivals."""
    if plan.mode.compile:
        torch.compiler.reset()  # else the eighth network of a run would be the last that is compiled
    makers = _list_contenders(setup, batch, plan)
    measured = _measure_together(makers, plan) or _measure_apart(makers, plan)
    return _make_row(group, setup.method, batch, measured)


def _list_contenders(setup: Setup, batch: int, plan: Plan) -> Makers:
    x = setup.batch(batch)
    makers: Makers = {
        "ours": lambda: partial(setup.adapter(plan.mode), x),
        "floor": lambda: _make_floor(setup, x, plan),
        "geometry": lambda: _make_geometry(setup, x, plan),
    }
    for kind in plan.rivals:
        rival = RIVALS[kind].get(setup.method.name)
        if rival is not None and batch >= rival.least:
            makers[kind] = partial(_make_rival, rival, setup, x)
    return makers


def _make_floor(setup: Setup, x: torch.Tensor, plan: Plan) -> Run:
    adapter = setup.adapter(plan.mode)
    inside = getattr(adapter, "adapter", adapter)
    floor = Floor(inside, list_passes(setup.method, inside), x)
    return Recorded(floor, plan.device) if is_recorded(adapter, plan.device) else floor


def _measure_together(makers: Makers, plan: Plan) -> Measured | None:
    """All in turns; None where there is not enough memory."""
    try:
        runs = {name: made for name, make in makers.items() if (made := make()) is not None}
        sizes = {name: _measure_memory(runs[name], plan) for name in ("ours", "floor")}
        return Measured(take_turns(runs, plan.device, plan.seconds), sizes, _read_kept(runs["ours"]))
    except torch.OutOfMemoryError:
        return None


def _measure_apart(makers: Makers, plan: Plan) -> Measured:
    """One after the other, where there is not enough memory for all at once; on a GPU nobody else disturbs."""
    rounds: dict[str, list[float]] = {}
    sizes: dict[str, int | None] = {}
    kept = 1.0
    for name, make in makers.items():
        free_memory(plan.device)
        try:
            if (run := make()) is None:
                continue
            sizes[name] = _measure_memory(run, plan)
            rounds[name] = take_turns({name: run}, plan.device, plan.seconds / len(makers)).rounds[name]
            kept = _read_kept(run) if name == "ours" else kept
        except torch.OutOfMemoryError:
            if name == "ours":
                raise
        run = None
    fewest = min(map(len, rounds.values()))
    return Measured(Times({name: times[:fewest] for name, times in rounds.items()}), sizes, kept)


def _read_kept(run: Run) -> float:
    assert isinstance(run, partial)
    adapter = getattr(run.func, "adapter", run.func)
    assert isinstance(adapter, Adapter)
    return float(adapter.kept)


def _make_rival(kind: type[Plain], setup: Setup, x: torch.Tensor) -> Run:
    return partial(kind(setup.net, **setup.gather()), x)


def _make_geometry(setup: Setup, x: torch.Tensor, plan: Plan) -> Run | None:
    adapter = setup.adapter(replace(plan.mode, compile=False))
    recorded = is_recorded(adapter, plan.device)
    run = isolate_geometry(adapter, x)
    return Recorded(run, plan.device) if run is not None and recorded else run


def _measure_memory(run: Run, plan: Plan) -> int | None:
    if plan.device.type == "cpu":
        if plan.mode.compile:
            return None  # what is compiled is not seen
        run()
    return peak_memory(run, plan.device)


def _make_row(group: str, method: Method, batch: int, measured: Measured) -> Row:
    times, sizes = measured.times, measured.sizes
    seconds, own, bare = times.median("ours"), sizes.get("ours"), sizes.get("floor")

    def compare(name: str, other: str) -> float | None:
        return times.ratio(name, other) if {name, other} <= set(times.rounds) else None

    return Row(
        group=group,
        name=method.name,
        setting=f"batch {batch}",
        ms=1e3 * seconds,
        images=batch / seconds,
        floor=compare("ours", "floor"),
        plain=compare("plain", "ours"),
        public=compare("public", "ours"),
        megabytes=None if own is None else own / 1e6,
        memory=own / bare if own and bare else None,
        geometry=compare("geometry", "ours"),
        note="" if measured.kept == 1.0 else f"{measured.kept:.0%} kept",
    )


def estimate_seconds(network: Network, method: Method, batch: int) -> float:
    """How long the floor of a step may take on two CPU cores."""
    with torch.device("meta"):
        net, x = network.make(network.classes), torch.empty(1, 3, network.side, network.side)
    back = 2 if method.updates in ("features", "all weights", "all weights, for one image") else 1
    return count_forward(net, x) * batch * (method.forwards + back * method.backwards) / _RATE


def measure_all(
    table: Table, plan: Plan, methods: list[str], networks: list[str], batches: list[int]
) -> None:
    """All cells; what is left out is noted."""
    for name in networks:
        group = f"{name}, {NETWORKS[name].side} x {NETWORKS[name].side}"
        for method, batch in _list_cells(methods, batches):
            if estimate_seconds(NETWORKS[name], method, batch) > plan.longest:
                table.note(
                    f"Left out, as a step takes more than about {plan.longest:g} s here: see --longest."
                )
                continue
            try:
                table.add(measure_cell(Setup(NETWORKS[name], method, plan.device), batch, plan, group))
            except (ValueError, ImportError, torch.OutOfMemoryError) as error:
                table.note(f"{method.name} on {name}, batch {batch}: {str(error).splitlines()[0]}.")
            free_memory(plan.device)


def free_memory(device: torch.device) -> None:
    """Free memory that is not in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _list_cells(methods: list[str], batches: list[int]) -> Iterator[tuple[Method, int]]:
    for name in methods:
        for batch in batches:
            yield ttvd.list_methods()[name], batch


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    device = find_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    mode = Mode(args.precision, args.channels_last, args.compile, not args.no_graphs)
    longest = LONGEST[device.type] if args.longest is None else args.longest
    plan = Plan(device, mode, args.seconds, tuple(args.rivals), longest)
    torch.backends.cudnn.benchmark = args.tune
    table = Table(f"Steps on {describe_device(device)}, {mode.label}{', tuned' if args.tune else ''}.")
    measure_all(table, plan, args.methods, args.networks, args.batches)
    table.close(args.out)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tune", action="store_true", help="torch.backends.cudnn.benchmark = True, for all")
    parser.add_argument("--no-graphs", action="store_true", help="do not record CUDA graphs")
    parser.add_argument(
        "--methods", nargs="+", default=list(ttvd.list_methods()), choices=list(ttvd.list_methods())
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--rivals", nargs="*", default=list(RIVALS), choices=list(RIVALS))
    parser.add_argument("--seconds", type=float, default=1.0, help="for the rounds of a cell, at least")
    parser.add_argument(
        "--longest", type=float, help="leave out steps whose floor is estimated to take longer"
    )
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--out", type=Path, help="CSV file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
