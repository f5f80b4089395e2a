"""Measure methods on one classifier, on every kind of stream, and print a table.

    python tools/measure_model.py resnet20-cifar10 --folder FOLDER --data DIR --sites 2400 --calibrate 600 \
        --images 8000 --rows rows.csv --device cuda
    python tools/measure_model.py efficientnet-lite0 --folder FOLDER --set imagenet --data DIR/test \
        --sites-data DIR/sites
    python tools/measure_model.py --table rows.csv

Sites are those of the checkpoint unless ``--sites`` or ``--sites-data`` is given. ``--sites N`` estimates them from the
first N training images and calibrates them on the ones that follow, as images that the model was trained on.
``--sites-data`` is a folder of labelled images that the model was not trained on: the first half of each class gives
the sites, the other half calibrates them, and both calibrate if there are two images of a class.

Each cell of the table is error / ECE in per cent, the mean over the corruptions at severity 5, each from a fresh start;
``continual`` and ``mixed`` join the corruptions without a reset, ``onset`` is clean, shifted and clean again. A method
may have parameters: ``ttvd:lr=0.05``. Rows are written as they are measured, and rows that are there are not measured
again.
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import ttvd
from ttvd.data.corruptions import corrupt, select_corruptions
from ttvd.data.sets import ImageFolder, ImageSet, load_set
from ttvd.data.streams import class_sorted, continual, dirichlet, iid, mixed, onset
from ttvd.metrics import RunningMetrics
from ttvd.source import estimate_fisher
from ttvd.source.features import is_held_out

STREAMS = ("shuffled", "clean", "sorted", "sorted-clean", "dirichlet", "batches-of-8", "one-by-one")
JOINED = ("onset", "continual", "mixed")
SIZES = {"batches-of-8": 8, "one-by-one": 1}
LIMITS = {"batches-of-8": 2000, "one-by-one": 500}
METHODS = ("source", "bn", "tent", "sar", "eata", "deyo", "roid", "shot", "ttvd")
FIELDS = ("model", "method", "stream", "corruption", "seed", "images", "error", "ece", "device")
CHUNK = 500

Labelled = tuple[Tensor, Tensor]


class Cell(NamedTuple):
    """One run: a method on a stream of one corruption, or of all of them."""

    method: str
    stream: str
    corruption: str
    seed: int


class World:
    """Images, labels and their corrupted versions on a device; bytes, so that ImageNet fits."""

    def __init__(self, options: argparse.Namespace, corruptions: tuple[str, ...]) -> None:
        self.options, self.corruptions, self.kept = options, corruptions, dict[str, Tensor]()
        if options.set == "imagenet":
            images, labels = load_folder(options.data)
        else:
            images, labels = self.held if options.held_out else self.load("test")
        self.images, self.labels = images[: options.images], labels[: options.images]

    def load(self, split: Literal["train", "test"]) -> Labelled:
        """Images of CIFAR, as bytes, and their labels."""
        found = load_set(self.options.set, self.options.data, split)
        assert isinstance(found, ImageSet)
        return found.images, found.labels

    @cached_property
    def held(self) -> Labelled:
        """Labelled images that no stream has: of ImageNet those for the sites, else held-out training images."""
        if self.options.set == "imagenet":
            return load_folder(self.options.sites_data)
        images, labels = self.load("train")
        held = is_held_out(len(images))
        return images[held], labels[held]

    def corrupted(self, name: str) -> Tensor:
        """All images under a corruption, as bytes."""
        if name in self.kept:
            return self.kept[name]
        file = None if self.options.cache is None else self.options.cache / f"{self.options.set}-{name}.npy"
        if file is not None and file.is_file():
            self.kept[name] = torch.from_numpy(np.load(file)).to(self.options.device)
        else:
            parts = [self._corrupt(name, start) for start in range(0, len(self.images), CHUNK)]
            self.kept[name] = torch.cat(parts)
            if file is not None:
                np.save(file, self.kept[name].cpu().numpy())
        return self.kept[name]

    def _corrupt(self, name: str, start: int) -> Tensor:
        part = self.images[start : start + CHUNK].to(self.options.device)
        if name == "clean":
            return part
        found = corrupt(
            part / 255,
            name,
            seed=1,
            index=range(start, start + len(part)),
            constants="imagenet" if self.options.set == "imagenet" else "cifar",
        )
        return (255 * found).round().byte()

    def batches(self, cell: Cell) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images in [0, 1] with their labels."""
        domains, order = self.order(cell)
        for rows in torch.from_numpy(order).split(SIZES.get(cell.stream, 64)):
            if len(domains) == 1:
                images = self.corrupted(domains[0])[rows[:, 1].to(self.options.device)]
            else:
                images = torch.stack([self.corrupted(domains[d])[i] for d, i in rows.tolist()])
            yield images / 255, self.labels[rows[:, 1]]

    def order(self, cell: Cell) -> tuple[tuple[str, ...], np.ndarray]:
        """The names of the domains, and rows (domain, sample)."""
        labels, seed = self.labels.numpy(), cell.seed
        if cell.stream == "onset":
            return ("clean", cell.corruption), onset(iid(len(labels), seed), iid(len(labels), seed + 1))
        if cell.stream in ("continual", "mixed"):
            count = max(64, len(labels) // len(self.corruptions) // 64 * 64)
            orders = [iid(len(labels), seed + i)[:count] for i in range(len(self.corruptions))]
            return self.corruptions, (
                continual(orders) if cell.stream == "continual" else mixed(orders, seed)
            )
        kind = cell.stream.removesuffix("-clean")
        if kind == "sorted":
            one = class_sorted(labels, seed)
        elif kind == "dirichlet":
            one = dirichlet(labels, seed, alpha=0.1, min_chunk=1)
        else:
            one = iid(len(labels), seed)[: LIMITS.get(kind)]
        return (cell.corruption,), np.column_stack([np.zeros_like(one), one])


def load_folder(place: Path) -> Labelled:
    """All images of class folders as bytes, whatever their order on disk."""
    folder = load_set("imagenet", place)
    assert isinstance(folder, ImageFolder)
    folder = folder.prepared(None, 224)
    rows = torch.arange(len(folder))
    images = torch.cat([(255 * folder.floats(part)).round().byte() for part in rows.split(CHUNK)])
    return images, folder.labels


def find_sites(model: nn.Module, shipped: ttvd.Sites | None, world: World) -> ttvd.Sites:
    options = world.options
    if options.set == "imagenet":
        images, labels = world.held
        first = torch.zeros(len(labels), dtype=torch.bool)
        for label in labels.unique():
            rows = (labels == label).nonzero()[:, 0]
            first[rows[: (len(rows) + 1) // 2]] = True
        rest = torch.ones_like(first) if int(labels.bincount().max()) <= 2 else ~first
        # Turned photographs are views of label-augmented heads alone, and published heads know the classes.
        sites = ttvd.estimate_sites(model, (images[first], labels[first]), views=1)
        return ttvd.calibrate(
            model, sites, (images[rest], labels[rest]), structures=("vd", "pd"), trained_on=False
        )
    if options.sites is None and shipped is not None:
        return shipped
    images, labels = world.load("train")
    first_rows = options.sites or 2400
    last = first_rows + options.calibrate
    sites = ttvd.estimate_sites(model, (images[:first_rows], labels[:first_rows]))
    return ttvd.calibrate(model, sites, (images[first_rows:last], labels[first_rows:last]), trained_on=True)


def keep_sites(path: Path | None, find: Callable[[], ttvd.Sites]) -> ttvd.Sites:
    """Sites from a file, which is written if it is not there yet: with large images they take minutes."""
    if path is not None and path.is_file():
        return ttvd.Sites.load(path)
    sites = find()
    if path is not None:
        sites.save(path)
    return sites


def build(method: str, model: nn.Module, sites: ttvd.Sites, world: World) -> ttvd.Adapter:
    name, _, text = method.partition(":")
    parameters = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            parameters[key] = json.loads(value)
        except json.JSONDecodeError:
            parameters[key] = value
    needs = ttvd.list_methods()[name].needs
    fisher = None
    if "fisher" in needs:
        fisher = estimate_fisher(model, world.held[0][:2000].float() / 255)
    adapter = ttvd.create(name, model, sites=sites, fisher=fisher, **parameters).to(world.options.device)
    return adapter.accelerate(precision=world.options.precision, channels_last=world.options.channels_last)


def measure(adapter: ttvd.Adapter, world: World, cell: Cell) -> tuple[int, float, float]:
    """Number of images, error and ECE in per cent."""
    adapter.renew()
    metrics = RunningMetrics()
    done = [(adapter(images), labels) for images, labels in world.batches(cell)]
    for logits, labels in done:
        metrics.update(labels, logits=logits.float().cpu())
    found = metrics.compute()
    return sum(len(labels) for _, labels in done), 100 * found["error"], 100 * found["ece"]


def list_cells(options: argparse.Namespace, corruptions: tuple[str, ...], method: str) -> list[Cell]:
    cells = []
    for stream in options.streams:
        names = ("clean",) if stream.endswith("clean") else corruptions
        if stream in ("continual", "mixed"):
            names = ("all",)
        cells += [Cell(method, stream, name, seed) for name in names for seed in options.seeds]
    return cells


def read_rows(path: Path | None) -> list[dict[str, str]]:
    if path is None or not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def print_table(rows: list[dict[str, str]]) -> None:
    """A table for each model: methods by streams, means over corruptions, and the spread over seeds."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        streams = list(dict.fromkeys(row["stream"] for row in own))
        print(f"\n{model}\n\n| method |", " | ".join(streams), "|\n|---|", "---:|" * len(streams), sep="")
        for method in dict.fromkeys(row["method"] for row in own):
            cells = [
                describe([row for row in own if row["method"] == method and row["stream"] == stream])
                for stream in streams
            ]
            print(f"| {method} |", " | ".join(cells), "|")


def describe(rows: list[dict[str, str]]) -> str:
    if not rows:
        return "-"
    seeds = sorted({row["seed"] for row in rows})
    means = [
        [statistics.mean(float(row[name]) for row in rows if row["seed"] == seed) for seed in seeds]
        for name in ("error", "ece")
    ]
    spread = f" ±{statistics.stdev(means[0]):.1f}" if len(seeds) > 1 else ""
    return f"{statistics.mean(means[0]):.1f}{spread} / {statistics.mean(means[1]):.1f}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="name of a checkpoint")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; the shipped ones unless given")
    parser.add_argument("--set", default="cifar10", choices=("cifar10", "cifar100", "imagenet"))
    parser.add_argument(
        "--data", type=Path, help="folder with the set; for ImageNet, class folders to test on"
    )
    parser.add_argument("--sites-data", type=Path, help="class folders for the sites, with ImageNet")
    parser.add_argument("--sites", type=int, help="training images to estimate sites from")
    parser.add_argument(
        "--calibrate", type=int, default=600, help="training images after those to calibrate on"
    )
    parser.add_argument("--sites-file", type=Path, help="file to keep the sites in, and to read them from")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--held-out", action="store_true", help="measure on held-out training images")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="names, or NAME:KEY=VALUE,...")
    parser.add_argument("--streams", nargs="+", default=["shuffled", "clean"], choices=STREAMS + JOINED)
    parser.add_argument("--corruptions", default="all", help="names with commas, all or extra")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--channels-last", action="store_true", help="faster for large images, CPUs included")
    parser.add_argument("--cache", type=Path, help="folder for corrupted images; one for each set and split")
    parser.add_argument("--rows", type=Path, help="CSV file that rows are added to, and read from")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of these CSV files and stop")
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.table:
        print_table([row for path in options.table for row in read_rows(path)])
        return
    if options.model is None or options.data is None:
        parser.error("the name of a checkpoint and --data are needed")
    if options.set == "imagenet" and options.sites_data is None:
        parser.error("--set imagenet needs --sites-data, labelled images that are not those of --data")
    corruptions = select_corruptions(options.corruptions)
    world = World(options, corruptions)
    found = ttvd.load(options.model, options.folder)
    model = found.model.to(options.device)
    if options.channels_last:
        for weight in (part for part in model.parameters() if part.ndim == 4):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    with torch.autocast(
        torch.device(options.device).type, torch.bfloat16, enabled=options.precision == "bfloat16"
    ):
        sites = keep_sites(options.sites_file, lambda: find_sites(model, found.sites, world))
    rows = read_rows(options.rows)
    known = {tuple(row[name] for name in FIELDS[:5]) for row in rows}
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    for method in options.methods:
        missing = [
            cell
            for cell in list_cells(options, corruptions, method)
            if (options.model, *map(str, cell)) not in known
        ]
        adapter = build(method, model, sites, world) if missing else None
        for cell in missing:
            assert adapter is not None
            images, error, ece = measure(adapter, world, cell)
            values = (options.model, *cell, images, f"{error:.4f}", f"{ece:.4f}", device)
            rows.append(dict(zip(FIELDS, map(str, values), strict=True)))
            print(" ".join(rows[-1].values()), file=sys.stderr, flush=True)
            if options.rows is not None:
                add_row(options.rows, rows[-1])
        del adapter
    wanted = set(options.methods)
    print_table([row for row in rows if row["model"] == options.model and row["method"] in wanted])


def add_row(path: Path, row: dict[str, str]) -> None:
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
