"""Run every method over a long stream and watch its memory and its numbers.

python tools/soak.py [--batches 20000] [--methods tent ttvd]
"""

import argparse
import gc
import sys
import time

import torch
from torch import nn

import ttvd
from ttvd.models.resnet import ResNet


def living_elements() -> int:
    gc.collect()
    return sum(o.numel() for o in gc.get_objects() if issubclass(type(o), torch.Tensor))


def soak(name: str, batches: int) -> bool:
    """Stream batches of changing contrast; true if memory stayed flat and every output finite."""
    generator = torch.Generator().manual_seed(0)
    net: nn.Module = ResNet(12, in_channels=1, widths=(8,), blocks=(1,), bias=True, generator=generator)
    sites = ttvd.estimate_sites(net, (torch.rand(60, 1, 8, 8, generator=generator), torch.arange(60) % 3))
    needs_sites = "sites" in ttvd.methods()[name].needs
    parameters = {"tau": 1.0} if needs_sites else {}
    adapter = ttvd.create(name, net, sites=sites if needs_sites else None, **parameters)
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
    parser.add_argument("--methods", nargs="*", default=list(ttvd.methods()))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    passed = [soak(name, chosen.batches) for name in chosen.methods]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
