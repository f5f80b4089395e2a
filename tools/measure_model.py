"""Measure methods on a classifier for CIFAR, on several kinds of streams, and print a table.

    python tools/measure_model.py resnet20-cifar10 --folder FOLDER --data DIR --sites 2400 --calibrate 600 \
        --images 8000 --methods source tent ttvd --streams shuffled sorted --device cuda

Sites are those of the checkpoint unless ``--sites`` is given: then they are estimated from the first training images,
and calibrated on the ones that follow, as images that the model was trained on. Each cell is error / ECE in per cent,
the mean over the corruptions at severity 5, every one from a fresh start. ``NAME/clean`` is a stream of clean images.
Streams of shifts that come and go are recipes (``recipes/onset-*.toml``).
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

import ttvd
from ttvd.data.corruptions import corrupt, select_corruptions
from ttvd.data.sets import ImageSet, load_set
from ttvd.data.streams import class_sorted, dirichlet, iid
from ttvd.metrics import RunningMetrics
from ttvd.source import estimate_fisher
from ttvd.source.features import is_held_out

STREAMS = {"shuffled": 64, "sorted": 64, "dirichlet": 64, "batches-of-8": 8, "one-by-one": 1}
LIMITS = {"batches-of-8": 2000, "one-by-one": 500}
CHUNK = 500


class World:
    """Images, labels and their corrupted versions on a device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.kept = options, dict[str, Tensor]()
        name = "cifar100" if "cifar100" in options.model else "cifar10"
        train, test = (load_set(name, options.data, split) for split in ("train", "test"))
        assert isinstance(train, ImageSet)
        assert isinstance(test, ImageSet)
        self.train = train.images, train.labels
        held = is_held_out(len(train.images))
        self.held = train.images[held], train.labels[held]
        images, labels = self.held if options.held_out else (test.images, test.labels)
        self.images, self.labels = images[: options.images].float() / 255, labels[: options.images]

    def corrupted(self, name: str) -> Tensor:
        if name not in self.kept:
            parts = self.images.split(CHUNK)
            if name != "clean":
                parts = tuple(
                    corrupt(
                        part.to(self.options.device),
                        name,
                        seed=1,
                        index=range(i * CHUNK, i * CHUNK + len(part)),
                    )
                    for i, part in enumerate(parts)
                )
            self.kept[name] = torch.cat([part.to(self.options.device) for part in parts])
        return self.kept[name]

    def order(self, stream: str) -> Tensor:
        labels, seed = self.labels.numpy(), self.options.seed
        if stream == "sorted":
            return torch.from_numpy(class_sorted(labels, seed))
        if stream == "dirichlet":
            return torch.from_numpy(dirichlet(labels, seed, alpha=0.1))
        return torch.from_numpy(iid(len(labels), seed)[: LIMITS.get(stream)])


def measure(adapter: ttvd.Adapter, world: World, stream: str, corruptions: tuple[str, ...]) -> str:
    """Error and ECE, the means over the corruptions."""
    kind, _, clean = stream.partition("/")
    found = []
    for name in ("clean",) if clean else corruptions:
        adapter.renew()
        images, order, metrics = world.corrupted(name), world.order(kind), RunningMetrics()
        for rows in order.split(STREAMS[kind]):
            metrics.update(world.labels[rows], logits=adapter(images[rows.to(images.device)]).cpu())
        result = metrics.compute()
        found.append((100 * result["error"], 100 * result["ece"]))
    error, ece = (statistics.mean(values) for values in zip(*found, strict=True))
    return f"{error:.2f} / {ece:.1f}"


def build(name: str, model: nn.Module, sites: ttvd.Sites, world: World) -> ttvd.Adapter:
    needs = ttvd.list_methods()[name].needs
    fisher = estimate_fisher(model, world.held[0][:2000]) if "fisher" in needs else None
    return ttvd.create(name, model, sites=sites, fisher=fisher).to(world.options.device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="name of a checkpoint")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; the shipped ones unless given")
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10 or CIFAR-100")
    parser.add_argument("--sites", type=int, help="training images to estimate sites from")
    parser.add_argument(
        "--calibrate", type=int, default=600, help="training images after those to calibrate on"
    )
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--held-out", action="store_true", help="measure on held-out training images")
    parser.add_argument("--methods", nargs="+", default=["source", "ttvd"])
    parser.add_argument("--streams", nargs="+", default=["shuffled", "shuffled/clean"])
    parser.add_argument("--corruptions", default="all", help="names with commas, all or extra")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    corruptions, world = select_corruptions(options.corruptions), World(options)
    found = ttvd.load(options.model, options.folder)
    model, sites = found.model.to(options.device), found.sites
    if options.sites is not None or sites is None:
        images, labels = world.train
        first, last = options.sites or 2400, (options.sites or 2400) + options.calibrate
        sites = ttvd.estimate_sites(model, (images[:first], labels[:first]))
        sites = ttvd.calibrate(model, sites, (images[first:last], labels[first:last]), trained_on=True)
    print("| method |", " | ".join(options.streams), "|")
    for name in options.methods:
        adapter = build(name, model, sites, world)
        cells = [measure(adapter, world, stream, corruptions) for stream in options.streams]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
