"""How fast sites are estimated: images a second against a bare forward pass of the same views.

    python -m benchmarks.sites
    python -m benchmarks.sites --device cuda --networks resnet26 resnet50 --images 20000 --out sites.csv

The bare pass has its views ready as floating-point images in batches; the estimate starts from bytes, turns them,
checks everything and adds up float64 sums of each class and view. It should reach 0.95 of the bare pass.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from benchmarks.clock import describe_device, find_device, take_turns
from benchmarks.setups import NETWORKS, Network
from benchmarks.table import Row, Table
from torch import Tensor, nn

import ttvd
from ttvd.nn.views import rotate


def measure_sites(
    network: Network, device: torch.device, images: int, views: int, batch: int, seconds: float
) -> Row:
    """Estimate sites of random images, and forward as many."""
    torch.manual_seed(0)
    net = network.make(network.classes * 4).eval().to(device)
    pixels = torch.randint(256, (images, 3, network.side, network.side), dtype=torch.uint8).to(device)
    labels = (torch.arange(images) % min(network.classes, images)).to(device)
    ready = [rotate(part.float() / 255, views) for part in pixels[: 2 * batch].split(batch)]
    passes = -(-images // batch)

    def estimate() -> object:
        return ttvd.estimate_sites(net, (pixels, labels), views=views, batch_size=batch)

    def forward() -> None:
        forward_all(net, [ready[i % len(ready)] for i in range(passes)])

    times = take_turns({"sites": estimate, "forward": forward}, device, seconds)
    spent, share = times.median("sites"), times.ratio("forward", "sites")
    return Row(
        group="sites",
        name=f"{network.side} x {network.side}",
        setting=f"{views} views",
        ms=1e3 * spent * batch / images,
        images=images / spent,
        floor=1 / share,
        note=f"{share:.2f} of a bare forward pass",
    )


@torch.inference_mode()
def forward_all(net: nn.Module, batches: list[Tensor]) -> None:
    """The bare pass."""
    for x in batches:
        net(x)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    device = find_device(args.device)
    table = Table(
        f"Sites on {describe_device(device)}, float32, {args.images} images in batches of {args.batch}."
    )
    for name in args.networks:
        for views in args.views:
            row = measure_sites(NETWORKS[name], device, args.images, views, args.batch, args.seconds)
            table.add(row)
    table.close(args.out)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", nargs="+", default=["resnet26"], choices=list(NETWORKS))
    parser.add_argument("--images", type=int, default=1024, help="a multiple of the batch")
    parser.add_argument("--views", nargs="+", type=int, default=[1, 4], choices=(1, 2, 4))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0, help="for the rounds of a cell, at least")
    parser.add_argument("--out", type=Path, help="CSV file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
