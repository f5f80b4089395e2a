"""Measure the guard on streams that do harm and on streams that do none.

    python tools/measure_guard.py digits-sla digits-plain --batch-size 32
    python tools/measure_guard.py resnet26-cifar10-sla --set cifar10 --data DIR --device cuda

A harmless stream is clean or corrupted; ``sorted:NAME`` sorts it by class. There the guard must not act where the
adapter without it beats the source: such a freeze or rollback is a false alarm. On a harmful stream, which follows on
ten clean batches, it must act soon, and clean images must be predicted as before: at once, and while adapting. The
last lines are the cost of the guard: the time of a step with it, divided by that of a step without.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import ttvd
from ttvd.data.corruptions import CORRUPTIONS, corrupt
from ttvd.data.sets import ImageSet, load_set
from ttvd.methods.registry import find_method, prepare_model
from ttvd.zoo.catalog import Source, load_source

HARMFUL = ("noise", "black", "inverted", "one-image", "one-class")
WARM_UP, AFTER = 10, 128


class Data(NamedTuple):
    """Images (n, c, h, w) and labels (n,) on the device."""

    images: Tensor
    labels: Tensor


def make_order(name: str, data: Data, length: int) -> Tensor:
    """Indices of a stream: passes over the data in random orders, or sorted by class."""
    generator = torch.Generator().manual_seed(0)
    count = len(data.labels)
    if name.startswith("sorted:"):
        once = data.labels.cpu().argsort(stable=True)
        return once.repeat(-(-length // count))[:length]
    passes = [torch.randperm(count, generator=generator) for _ in range(-(-length // count))]
    return torch.cat(passes)[:length]


def stream(name: str, data: Data, batches: int, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches of images, with labels where classes have a meaning."""
    device, shape = data.images.device, (size, *data.images.shape[1:])
    generator = torch.Generator().manual_seed(1)
    if name in ("noise", "black", "one-image"):
        for _ in range(batches):
            if name == "noise":
                yield torch.rand(shape, generator=generator).to(device), None
            else:
                one = data.images[:1] if name == "one-image" else torch.zeros_like(data.images[:1])
                yield one.expand(shape).clone(), None
        return
    if name == "one-class":
        own = (data.labels == 3).nonzero()[:, 0].cpu()
        order = own[torch.randint(len(own), (batches * size,), generator=generator)]
    else:
        order = make_order(name, data, batches * size)
    corruption = name.removeprefix("sorted:")
    images = data.images
    if corruption in CORRUPTIONS:
        images = corrupt(images, corruption, constants="cifar")
    for part in order.to(device).split(size):
        batch = images[part]
        yield 1.0 - batch if name == "inverted" else batch, data.labels[part]


class Run(NamedTuple):
    """What happened on a stream: error in per cent, first batch at which the guard acted, and its last status."""

    error: float
    acted: int | None
    status: ttvd.methods.GuardStatus | None


def run(adapter: ttvd.Adapter, name: str, data: Data, batches: int, size: int) -> Run:
    wrong, seen, acted = torch.zeros((), device=data.images.device), 0, None
    for number, (batch, labels) in enumerate(stream(name, data, batches, size), start=1):
        answers = adapter(batch).argmax(1)
        if labels is not None:
            wrong, seen = wrong + (answers != labels).sum(), seen + len(labels)
        if acted is None and adapter.guard is not None and number % 4 == 0:
            status = adapter.status
            assert status is not None
            acted = number if status.freezes + status.rollbacks + status.returns else None
    return Run(100 * float(wrong) / max(seen, 1) if seen else float("nan"), acted, adapter.status)


def measure_error(adapter: ttvd.Adapter, data: Data, adapting: int | None = None) -> float:
    """Error in per cent of predictions, or while adapting, in batches of this size."""
    if adapting is None:
        pairs = zip(data.images.split(100), data.labels.split(100), strict=True)
        wrong = [(adapter.predict(images).argmax(1) != labels).sum() for images, labels in pairs]
    else:
        pairs = zip(data.images.split(adapting), data.labels.split(adapting), strict=True)
        wrong = [(adapter(images).argmax(1) != labels).sum() for images, labels in pairs]
    return 100 * float(torch.stack(wrong).sum()) / len(data.labels)


def make(source: Source, method: str, device: str, guard: bool) -> ttvd.Adapter:
    found = find_method(method)
    model = prepare_model(source, found, 1).to(device)
    return ttvd.create(method, model, sites=source.sites if "sites" in found.needs else None, guard=guard)


def measure_harmless(source: Source, name: str, data: Data, options: argparse.Namespace) -> tuple[int, int]:
    """One line of the table; returns the false alarms and the batches."""
    size, batches, method, device = options.batch_size, options.batches, options.method, options.device
    guarded = run(make(source, method, device, True), name, data, batches, size)
    without = run(make(source, method, device, False), name, data, batches, size)
    doing_nothing = find_method("source")
    model = prepare_model(source, doing_nothing, 1).to(device)
    reference = run(ttvd.create("source", model), name, data, min(batches, 32), size)
    status = guarded.status
    assert status is not None
    actions = status.freezes + status.rollbacks + status.returns
    false = actions if without.error < reference.error else 0
    print(
        f"  {name:24} guarded {guarded.error:5.1f}  without {without.error:5.1f}  source {reference.error:5.1f}  "
        f"information {status.information:4.2f}  {status.state:11} actions {actions}  false alarms {false}  "
        f"{status.reason}",
        flush=True,
    )
    return false, batches


def measure_harmful(source: Source, name: str, data: Data, options: argparse.Namespace) -> None:
    size, method, device = options.batch_size, options.method, options.device
    clean, batches = data, 500 if name == "noise" else 300
    words = []
    for guard in (False, True):
        adapter = make(source, method, device, guard)
        run(adapter, "clean", clean, WARM_UP, size)
        before = measure_error(adapter, clean)
        done = run(adapter, name, data, batches, size)
        after = measure_error(adapter, clean)
        first = Data(clean.images[:AFTER], clean.labels[:AFTER])
        adapting = measure_error(adapter, first, adapting=size)
        words.append(f"predict {before:5.1f} -> {after:5.1f}, first {AFTER} {adapting:5.1f}")
    status = done.status
    assert status is not None
    print(
        f"  {name:10} without: {words[0]}   guarded: {words[1]}   acted by batch {done.acted}, {status.state}: "
        f"{status.reason} ({status.freezes} freezes, {status.rollbacks} rollbacks, {status.returns} returns)",
        flush=True,
    )


def measure_cost(source: Source, data: Data, options: argparse.Namespace) -> None:
    """Time of a step with the guard over that without, in alternating rounds of 80 batches."""
    size, rounds, length = options.batch_size, 6, 40
    adapters = [make(source, options.method, options.device, guard) for guard in (False, True)]
    batches = [batch for batch, _ in stream("clean", data, 2 * length, size)]
    times = [[0.0] * rounds for _ in adapters]
    for number in range(-1, rounds):  # the first round warms up
        for which, adapter in enumerate(adapters):
            synchronize(options.device)
            start = time.perf_counter()
            for batch in batches:
                adapter(batch)
            synchronize(options.device)
            if number >= 0:
                times[which][number] = time.perf_counter() - start
    ratios = sorted(one / other for other, one in zip(*times, strict=True))
    step = 1000 * min(times[0]) / len(batches)
    print(
        f"  step of {step:.2f} ms; with the guard x {ratios[rounds // 2]:.3f} "
        f"(from {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def load_data(options: argparse.Namespace) -> Data:
    found = load_set(options.set, options.data)
    assert isinstance(found, ImageSet)
    chosen = torch.arange(len(found.labels))[: options.images]
    return Data(found.floats(chosen).to(options.device), found.labels[chosen].to(options.device))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", help="names or files of checkpoints")
    parser.add_argument("--method", default="ttvd")
    parser.add_argument("--set", default="digits")
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--batches", type=int, default=64, help="length of a harmless stream")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--harmless", nargs="*", default=["clean", *CORRUPTIONS])
    parser.add_argument("--harmful", nargs="*", default=list(HARMFUL))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-cost", action="store_true")
    options = parser.parse_args()
    data, totals = load_data(options), [0, 0]
    for name in options.checkpoints:
        source = load_source(name, None, None)
        print(f"{name}, {options.method}, batches of {options.batch_size}", flush=True)
        for harmless in options.harmless:
            totals = [
                sum(pair)
                for pair in zip(totals, measure_harmless(source, harmless, data, options), strict=True)
            ]
        for harmful in options.harmful:
            measure_harmful(source, harmful, data, options)
        if not options.no_cost:
            measure_cost(source, data, options)
    print(f"false alarms: {totals[0]} in {totals[1]} batches of harmless streams")


if __name__ == "__main__":
    main()
