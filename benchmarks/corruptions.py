"""Milliseconds per image of the 15 corruptions: ours against imagecorruptions-imaug, in one run.

    python benchmarks/corruptions.py --side 32 --images 512
    python benchmarks/corruptions.py --side 224 --images 16
    python benchmarks/corruptions.py --device cuda --side 32 --images 10000 --constants cifar

Both use `--workers` cores: ours as torch threads, the reference as processes that share the images. Rounds
alternate and the best counts, so that other load on the machine hits both alike. The reference knows the ImageNet
constants only; with `--constants cifar`, on a device or without the package, our times stand alone.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt
import torch

from ttvd.data.corruptions import CORRUPTIONS, corrupt

Bytes = npt.NDArray[np.uint8]


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.workers)
    pixels = make_photos(args.images, args.side)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).to(args.device)
    options = {"severity": args.severity, "constants": args.constants}
    ours = {name: partial(corrupt, images, name, **options) for name in CORRUPTIONS}
    if args.device != "cpu" or args.constants != "imagenet" or find_spec("imagecorruptions") is None:
        print_table(
            {name: (time_best([run], args.rounds)[0], None) for name, run in ours.items()}, args.images
        )
        return
    with ProcessPoolExecutor(
        args.workers, mp_context=get_context("spawn"), initializer=warm_reference
    ) as pool:
        parts = np.array_split(pixels, args.workers)
        rows: dict[str, tuple[float, float | None]] = {}
        for name, run in ours.items():
            reference = partial(run_reference, pool, parts, name, args.severity)
            first, second = time_best([run, reference], args.rounds)
            rows[name] = (first, second)
    print_table(rows, args.images)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--constants", choices=("imagenet", "cifar"), default="imagenet")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def make_photos(count: int, side: int) -> Bytes:
    """Smooth random colour images: JPEG and the blurs cost what they cost on photographs."""
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)
    return smooth.mul(255).byte().permute(0, 2, 3, 1).contiguous().numpy()


def time_best(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Best seconds of each run after one warm-up; the runs take turns."""
    best = [float("inf")] * len(runs)
    for turn in range(rounds + 1):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                best[number] = min(best[number], time.perf_counter() - start)
    return best


def warm_reference() -> None:
    """Import the reference in a worker, on one thread, and compile what it compiles."""
    warnings.simplefilter("ignore")
    import cv2
    import imagecorruptions

    cv2.setNumThreads(1)
    imagecorruptions.corrupt(np.zeros((32, 32, 3), np.uint8), corruption_name="glass_blur", severity=5)


def corrupt_part(part: Bytes, name: str, severity: int) -> Bytes:
    import imagecorruptions

    return np.stack(
        [imagecorruptions.corrupt(image, corruption_name=name, severity=severity) for image in part]
    )


def run_reference(pool: ProcessPoolExecutor, parts: list[Bytes], name: str, severity: int) -> None:
    list(pool.map(partial(corrupt_part, name=name, severity=severity), parts))


def print_table(rows: dict[str, tuple[float, float | None]], images: int) -> None:
    scale = 1000 / images
    print(f"{'corruption':20}{'ours ms':>10}{'reference ms':>14}{'ratio':>8}")
    total = (sum(ours for ours, _ in rows.values()), sum(other or 0.0 for _, other in rows.values()) or None)
    for name, (ours, other) in {**rows, "sum of 15": total}.items():
        right = f"{other * scale:14.3f}{other / ours:8.1f}" if other else ""
        print(f"{name:20}{ours * scale:10.3f}{right}")
    print(f"all images: {total[0]:.2f} s")


if __name__ == "__main__":
    main()
