"""Train small classifiers of Fashion-MNIST on a CPU, and measure them on every kind of stream: a new user's first try.

    apt-get install dataset-fashion-mnist
    python tools/measure_fashion.py --networks cnn cnn-gn mobilenetv3 vit convnext

Its classes differ much in brightness and texture, so a stream that comes sorted by class looks like a shift, and a
shift looks like a change of classes. ``cnn-gn`` has group norm, ``vit`` and ``convnext`` have layer norm. A network
takes some minutes to train and to measure on one core. Cells are
error / ECE in per cent, the mean over the corruptions; *first* and *back* are the errors in the first 128 images after
clean images have become corrupted, and clean again. Each stream is a fresh start.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttvd
from ttvd.data.corruptions import corrupt
from ttvd.data.sets import ImageSet, load_set
from ttvd.data.streams import class_sorted, dirichlet, iid
from ttvd.metrics import RunningMetrics

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CORRUPTIONS = {
    "gaussian_noise": 3,
    "defocus_blur": 3,
    "contrast": 4,
    "pixelate": 5,
    "jpeg_compression": 5,
    "brightness": 4,
}
TRAINING, IMAGES, SITES, PART = 20_000, 1_920, 4_000, 128
CLEAN, SHIFTED = 512, 640
"""Images before a shift, and while it lasts."""
TIMM: dict[str, tuple[str, dict[str, Any], int]] = {
    "mobilenetv3": ("mobilenetv3_small_050", {}, 4),
    "vit": (
        "vit_tiny_patch16_224",
        {"img_size": 28, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3},
        10,
    ),
    "convnext": (
        "convnext_atto",
        {"patch_size": 1, "depths": (1, 1, 2, 1), "dims": (24, 48, 96, 192)},
        8,
    ),
}
"""Networks of timm: the architecture, its options, and the epochs of its training."""
NETWORKS = ("cnn", "cnn-gn", *TIMM)

Part = tuple[str, Tensor, Tensor, int]


def make_network(name: str) -> tuple[nn.Module, int]:
    """A network and the epochs of its training."""
    torch.manual_seed(0)
    if name in TIMM:
        import timm

        architecture, options, epochs = TIMM[name]
        return timm.create_model(architecture, num_classes=10, in_chans=1, **options), epochs
    layers: list[nn.Module] = []
    channels = 1
    for width, stride in ((24, 1), (24, 2), (48, 1), (48, 2), (96, 1)):
        norm = nn.GroupNorm(4, width) if name == "cnn-gn" else nn.BatchNorm2d(width)
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), norm, nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)), 4


def train(name: str, data: ImageSet) -> nn.Module:
    model, epochs = make_network(name)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    steps = TRAINING // 64
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * steps)
    for _ in range(epochs):
        for rows in torch.randperm(TRAINING)[: 64 * steps].split(64):
            images = data.floats(rows)
            mirrored = torch.rand(len(rows)) < 0.5
            images[mirrored] = images[mirrored].flip(-1)
            optimizer.zero_grad()
            F.cross_entropy(model(images), data.labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def list_streams(images: Tensor, labels: Tensor) -> Iterator[Part]:
    """Each stream of clean and of corrupted images: its name, images, labels and size of batches."""
    known = labels.numpy()
    shuffled = iid(len(labels), 0)
    orders = {
        "shuffled": (shuffled, 64),
        "sorted": (class_sorted(known, 0), 64),
        "dirichlet": (dirichlet(known, 0, alpha=0.1, min_chunk=1), 64),
        "batches of 8": (shuffled[:800], 8),
        "one by one": (shuffled[:200], 1),
    }
    for corruption in ("clean", *CORRUPTIONS):
        found = (
            images if corruption == "clean" else corrupt(images, corruption, CORRUPTIONS[corruption], seed=1)
        )
        for name, (order, size) in orders.items():
            where = ", clean" if corruption == "clean" else ""
            yield name + where, found[order], labels[order], size
        if corruption != "clean":
            rows, end = iid(len(labels), 3), CLEAN + SHIFTED
            parts = [images[rows[:CLEAN]], found[rows[CLEAN:end]], images[rows[end:]]]
            yield "onset", torch.cat(parts), labels[rows], 64


def measure(adapter: ttvd.Adapter, part: Part) -> dict[str, tuple[float, float]]:
    """Error and ECE in per cent, by the name of the stream; of an onset also its two changes."""
    name, images, labels, size = part
    metrics = RunningMetrics()
    answers = torch.cat([adapter(batch) for batch in images.split(size)])
    metrics.update(labels, logits=answers)
    found = metrics.compute()
    cells = {name: (100 * found["error"], 100 * found["ece"])}
    if name == "onset":
        wrong = 100 * (answers.argmax(1) != labels).float()
        for moment, start in (("first", CLEAN), ("back", CLEAN + SHIFTED)):
            cells[moment] = (float(wrong[start : start + PART].mean()), float("nan"))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["cnn"], choices=NETWORKS)
    parser.add_argument("--methods", nargs="+", default=["source", "bn", "tent", "ttvd"])
    parser.add_argument(
        "--data", type=Path, default=FOLDER, help="folder with the four files of Fashion-MNIST"
    )
    options = parser.parse_args()
    training, test = (load_set("mnist", options.data, split) for split in ("train", "test"))
    assert isinstance(training, ImageSet)
    assert isinstance(test, ImageSet)
    rows = torch.arange(IMAGES)
    streams = list(list_streams(test.floats(rows), test.labels[rows]))
    for network in options.networks:
        model = train(network, training)
        sites = ttvd.prepare(model, (training.images[:SITES], training.labels[:SITES]), progress=False)
        cells: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for method in options.methods:
            needed = {"sites": sites} if "sites" in ttvd.list_methods()[method].needs else {}
            for part in streams:
                for name, cell in measure(ttvd.create(method, model, **needed), part).items():
                    cells.setdefault(name, {}).setdefault(method, []).append(cell)
        print(
            f"\n{network}\n\n| stream |",
            " | ".join(options.methods),
            "|\n|---|",
            "---:|" * len(options.methods),
        )
        for name, by_method in cells.items():
            means = [np.mean(by_method[method], 0) for method in options.methods]
            texts = [f"{error:.1f}" + ("" if np.isnan(ece) else f" / {ece:.1f}") for error, ece in means]
            print(f"| {name} |", " | ".join(texts), "|", flush=True)


if __name__ == "__main__":
    main()
