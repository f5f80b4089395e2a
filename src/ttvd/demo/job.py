"""The demo's main job: corrupt held-out digits, stream them, adapt with every method, and measure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ttvd.bench import Interval, Record, Row, paired_difference, run_stream, spec
from ttvd.data.corruptions import corrupt
from ttvd.data.digits import split_digits
from ttvd.data.streams import batches, iid
from ttvd.methods import Adapter, create
from ttvd.nn.views import AggregatedViews
from ttvd.zoo.catalog import Source, load

BATCH = 64


class Domain(spec.Domain):
    """A corruption at a severity, with ImageNet-C's constants: CIFAR's are too mild for white on black."""

    def apply(self, images: Tensor, seed: int) -> Tensor:
        """The corrupted images."""
        return corrupt(images, self.corruption, self.severity, constants="imagenet", seed=seed)


@dataclass(frozen=True)
class Entry:
    """A line of the demo's table.

    Attributes:
        label: How the table calls it.
        method: The registered method.
        checkpoint: The source model.
        views: Views that are aggregated around a method that knows nothing of views; 1 for the others.
        parameters: Of the method.
    """

    label: str
    method: str
    checkpoint: str
    views: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def build(self, source: Source) -> Adapter:
        """A fresh adapter around the source model."""
        model: nn.Module = source.model
        if self.views > 1:
            model = AggregatedViews(model, self.views)
        return create(self.method, model, sites=source.sites, **self.parameters)


DOMAINS = (Domain("gaussian_noise", 5), Domain("pixelate", 5), Domain("contrast", 3))

# Each learning rate has the lowest error of its grid on other corruptions than the demo's, everything else at its
# default: python tools/tune_demo.py --limit 1000 (on the same digits, with their labels).
ENTRIES = (
    Entry("source", "source", "digits-plain"),
    Entry("bn", "bn", "digits-plain"),
    Entry("tent", "tent", "digits-plain", parameters={"lr": 0.03}),
    Entry("t3a", "t3a", "digits-plain"),
    Entry("SLA + source", "source", "digits-sla", views=4),
    Entry("SLA + bn", "bn", "digits-sla", views=4),
    Entry("SLA + tent", "tent", "digits-sla", views=4, parameters={"lr": 0.03}),
    Entry("vd", "vd", "digits-sla", parameters={"lr": 0.1}),
    Entry("civd", "civd", "digits-sla", parameters={"lr": 0.1}),
    Entry("cipd", "cipd", "digits-sla", parameters={"lr": 0.1}),
    Entry("ttvd-reference", "ttvd-reference", "digits-sla", parameters={"lr": 0.03}),
    Entry("ttvd", "ttvd", "digits-sla"),
)


@dataclass(frozen=True)
class Results:
    """All records of the demo, by label of the entry and of the domain."""

    records: Mapping[tuple[str, str], Record]
    entries: Sequence[Entry]
    domains: Sequence[Domain]
    seed: int

    def of(self, entry: str) -> list[Record]:
        """The records of an entry, one for each domain."""
        return [self.records[entry, domain.label] for domain in self.domains]

    def compare(self, first: str, second: str) -> Interval:
        """Paired difference in error over all domains."""
        return paired_difference(self.of(first), self.of(second))


def stream(images: Tensor, labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 64 in a seeded order."""
    for index in batches(iid(len(labels), seed), BATCH):
        rows = torch.from_numpy(index)
        yield images[rows], labels[rows]


def measure(
    entries: Sequence[Entry] = ENTRIES,
    domains: Sequence[Domain] = DOMAINS,
    *,
    folder: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: Callable[[Entry, Domain, Row], None] | None = None,
) -> Results:
    """Run every entry on every domain; all entries see the same images in the same order.

    Args:
        entries: Lines of the table.
        domains: What happens to the images.
        folder: Where the checkpoints are; those of the package unless given.
        limit: Use only so many images of the stream.
        seed: Of corruption and order. The split of the digits is that of the checkpoints.
        progress: Called after each batch.
    """
    sources = {name: load(name, folder) for name in {entry.checkpoint for entry in entries}}
    _, _, images, labels = split_digits()
    images, labels = images[:limit], labels[:limit]
    records: dict[tuple[str, str], Record] = {}
    for domain in domains:
        shifted = domain.apply(images, seed)
        for entry in entries:
            report = None if progress is None else _report(progress, entry, domain)
            adapter = entry.build(sources[entry.checkpoint])
            records[entry.label, domain.label] = run_stream(
                adapter, stream(shifted, labels, seed), progress=report
            )
    return Results(records, entries, domains, seed)


def _report(
    progress: Callable[[Entry, Domain, Row], None], entry: Entry, domain: Domain
) -> Callable[[Row], None]:
    return lambda row: progress(entry, domain, row)
