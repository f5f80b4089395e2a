"""Pictures from the disk: how many are decoded a second, and how long somebody who uses them has to wait.

    python -m benchmarks.inputs
    python -m benchmarks.inputs --device cuda --pictures 1024 --batch 64 --workers 1 2 4 8 16 --steps 0 20 50 100

Photographs as ImageNet has them (JPEG, 500 x 375, about 90 kB) are resized to 256 and cut to 224: one after the other
(`ImageFolder.floats` and a copy to the device), and ahead, by threads (`ttvd.data.loading`). A step of 0 ms asks for
batches without a pause, which is the rate of decoding. During a longer step the caller sleeps, as one does who waits
for an accelerator; the note says which share of its time it waited for pictures, once it had the first. Ways take
turns, and it is the time on the wall that counts, the best of some rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.clock import describe_device, find_device
from benchmarks.corruptions import make_photos
from benchmarks.table import Row, Table
from torch import Tensor

from ttvd.data.loading import prefetch
from ttvd.data.sets import ImageFolder

Load = Callable[[], Iterable[Tensor]]
WIDTH, HEIGHT = 500, 375
ONE_BY_ONE = "one by one"


def make_pictures(root: Path, count: int) -> ImageFolder:
    """Write photographs with a little grain, without which they would be too easy to decode."""
    from PIL import Image

    (root / "pictures").mkdir(parents=True)
    noise = torch.Generator().manual_seed(1)
    for number, photo in enumerate(make_photos(count, WIDTH)):
        image = torch.from_numpy(photo[:HEIGHT]).float()
        grain = torch.randn(image.shape, generator=noise).mul_(12)
        pixels = (image + grain).clamp_(0, 255).byte().numpy()
        Image.fromarray(pixels).save(root / "pictures" / f"{number:05}.jpg", quality=90)
    return ImageFolder(root)


def list_ways(
    folder: ImageFolder, batch: int, workers: Sequence[int], device: torch.device
) -> dict[str, Load]:
    """Ways to go through the pictures once, by name."""
    parts = torch.arange(len(folder)).split(batch)

    def load_one_by_one() -> Iterator[Tensor]:
        return (folder.floats(rows).to(device) for rows in parts)

    def load_ahead(count: int) -> Load:
        return lambda: prefetch([(folder, rows) for rows in parts], device, workers=count)

    return {ONE_BY_ONE: load_one_by_one} | {_name(count): load_ahead(count) for count in workers}


def _name(workers: int) -> str:
    return f"{workers} thread{'s' if workers > 1 else ''} ahead"


class Pass(NamedTuple):
    """Seconds that it took to use all pictures, to get the first batch, and to wait for the others."""

    total: float
    first: float
    waited: float


def use(batches: Iterable[Tensor], step: float, device: torch.device) -> Pass:
    """Ask for batches, with a step after each."""
    waits, start = [], time.perf_counter()
    stream = iter(batches)
    while True:
        asked = time.perf_counter()
        images = next(stream, None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        waits.append(time.perf_counter() - asked)
        if images is None:
            return Pass(time.perf_counter() - start, waits[0], sum(waits[1:]))
        time.sleep(step)


def measure_inputs(
    folder: ImageFolder, batch: int, workers: Sequence[int], step: float, device: torch.device, rounds: int
) -> Iterator[Row]:
    """Rows for one length of a step, in seconds; the best of some rounds counts, as others may use the machine."""
    ways = list_ways(folder, batch, workers, device)
    for load in ways.values():
        next(iter(load()))
    passes: dict[str, list[Pass]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, load in ways.items():
            passes[name].append(use(load(), step, device))
    usual = min(passes[ONE_BY_ONE]).total
    for name, found in passes.items():
        total, first, waited = min(found)
        waits = f", waits {waited / (total - first):.0%} of the time" if step else ""
        yield Row(
            group=f"inputs, steps of {1e3 * step:g} ms",
            name=name,
            setting=f"batch {batch}",
            ms=1e3 * total * batch / len(folder),
            images=len(folder) / total,
            note=f"{usual / total:.2f} x one by one{waits}",
        )


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    device = find_device(args.device)
    table = Table(
        f"Pictures from the disk to {describe_device(device)}; {os.cpu_count()} processors, "
        f"{args.pictures} pictures of {WIDTH} x {HEIGHT}."
    )
    with tempfile.TemporaryDirectory() as place:
        folder = make_pictures(Path(place), args.pictures)
        for step in args.steps:
            table.extend(measure_inputs(folder, args.batch, args.workers, step / 1e3, device, args.rounds))
    table.close(args.out)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4], help="threads that decode")
    parser.add_argument("--steps", nargs="+", type=float, default=[0.0, 50.0, 100.0], help="milliseconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="CSV file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
