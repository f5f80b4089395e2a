"""What it costs that steps are transactions: a step by the same step without any protection, in one run.

    python -m benchmarks.transactions
    python -m benchmarks.transactions --device cuda --precision bfloat16 --channels-last [--compile]

The unprotected step takes no lock, saves nothing, and looks at no value. The two take turns; medians over the rounds.
On a CPU, set the variables of `make bench`: otherwise the system gives memory back and forth between the two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.clock import describe_device, find_device, take_turns
from benchmarks.setups import NETWORKS, Mode, Setup
from torch import Tensor

import ttvd
from ttvd.engine import step_runner
from ttvd.engine.step_runner import StepInputs
from ttvd.engine.transaction import StepLock
from ttvd.methods import Adapter


class NoTransaction:
    """Saves nothing and undoes nothing."""

    def __init__(self, *_: object) -> None: ...

    def save(self) -> None: ...


def _step(lock: StepLock, module: Any, begin: Callable[..., Any], finish: Callable[..., Any]) -> Any:
    out = begin(NoTransaction(), lambda: None)
    return finish(NoTransaction()) if out is None else out


def _run(adapter: Adapter, _: object, inputs: StepInputs, *, checked: bool) -> Tensor:
    adapter.kept.fill_(1.0)
    out = adapter.adapt(inputs.x, *inputs.arguments()).detach()
    adapter.runner.required = []
    return out


@contextmanager
def unprotected() -> Iterator[None]:
    """Let steps run without transactions."""
    with (
        patch.object(StepLock, "step", _step),
        patch.object(step_runner, "run_checked", _run),
        patch.object(step_runner, "undo_unless_finite", lambda *_, **__: None),
    ):
        yield


def measure(setup: Setup, batch: int, mode: Mode, seconds: float) -> tuple[float, float]:
    """Milliseconds of a step, and its time by that of the unprotected one."""
    adapter, bare, x = setup.adapter(mode), setup.adapter(mode), setup.batch(batch)
    recorded = setup.device.type == "cuda" and mode.capture

    def run_bare() -> None:
        # A recorded step is unprotected for good. Its launch is not part of what the device takes.
        if recorded and bare.runner.captured_steps():
            bare(x)
            return
        with unprotected():
            bare(x)

    times = take_turns({"step": lambda: adapter(x), "bare": run_bare}, setup.device, seconds)
    return 1e3 * times.median("step"), times.ratio("step", "bare")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--network", choices=list(NETWORKS), default="resnet26")
    parser.add_argument("--methods", nargs="+", default=["ttvd", "tent", "roid", "t3a"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 8, 1])
    parser.add_argument("--seconds", type=float, default=6.0, help="time for a cell")
    args = parser.parse_args()
    device, mode = find_device(args.device), Mode(args.precision, args.channels_last, args.compile)
    print(f"{args.network} on {describe_device(device)}, {mode.label}")
    print(f"{'method':12}{'batch':>6}{'ms':>10}{'cost':>9}")
    for name in args.methods:
        setup = Setup(NETWORKS[args.network], ttvd.list_methods()[name], device)
        for batch in args.batches:
            if args.compile:
                torch.compiler.reset()
            milliseconds, ratio = measure(setup, batch, mode, args.seconds)
            print(f"{name:12}{batch:6}{milliseconds:10.3g}{100 * (ratio - 1):8.2f}%", flush=True)


if __name__ == "__main__":
    main()
