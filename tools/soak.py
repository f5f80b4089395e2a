"""Run every method over a long stream and watch its memory and its numbers.

python tools/soak.py [--batches 20000] [--methods tent ttvd]
"""

import argparse
import gc
import sys
import time

import torch

import ttvd
from ttvd.testing import make_world


def living_elements() -> int:
    gc.collect()
    return sum(o.numel() for o in gc.get_objects() if issubclass(type(o), torch.Tensor))


def soak(name: str, batches: int) -> bool:
    """Stream batches of changing contrast; true if memory stayed flat and every output finite."""
    adapter = make_world(name)[1]()
    generator = torch.Generator().manual_seed(0)
    pool = torch.rand(64, 8, 1, 8, 8, generator=generator)
    finite, started, middle = True, time.perf_counter(), 0
    for step in range(batches):
        x = pool[step % len(pool)] * (0.1 + 0.9 * ((step // 500) % 10) / 9)
        finite &= bool(adapter(x).isfinite().all())
        if step == batches // 10:
            middle = living_elements()
    grown = living_elements() - middle
    rate = batches / (time.perf_counter() - started)
    print(
        f"{name:16} {batches} batches, {rate:6.0f} a second, grown by {grown} elements, finite: {finite}",
        flush=True,
    )
    return finite and grown <= pool[0].numel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--methods", nargs="*", default=list(ttvd.list_methods()))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    passed = [soak(name, chosen.batches) for name in chosen.methods]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
