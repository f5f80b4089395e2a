"""The job of a worker: one spec in, one finished run out."""

import json
import platform
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.resources import Resources
from ttvd.bench.run import Row, run_stream, watch_memory
from ttvd.bench.spec import FRESH, JOINS, ORDERS, Domain, Facts, Run, Spec
from ttvd.data import streams
from ttvd.data.loading import prefetch
from ttvd.data.sets import ImageFolder
from ttvd.data.streams import Order
from ttvd.engine.acceleration import Precision
from ttvd.engine.module import is_compiled
from ttvd.methods import Adapter, create
from ttvd.methods.registry import prepare_model
from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.norms import Statistics

_AHEAD = 4  # batches that are decoded ahead


def execute(spec: Spec, resources: Resources, progress: Callable[[int, int], None] | None = None) -> Run:
    """Do a run.

    Args:
        spec: The run.
        resources: Models, images and adapters.
        progress: Function that is called with the number of batches done and the number of all batches.

    Raises:
        ValueError: The model or the images are not those with which the run was planned.
    """
    check_fingerprints(spec, resources)
    order = make_order(spec, resources)
    batches = cut_order(spec, order)
    labels = resources.labels(spec)
    restriction = resources.restriction(spec.data)
    done = 0

    def advance(_: Row) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(batches))

    with resources.adapters.use(identify_adapter(spec), lambda: build_adapter(spec, resources)) as cached:
        started = time.time()
        index_device = resources.prepare(
            spec
        )  # before memory is measured, which is that of the adapter's work
        with watch_memory(resources.device) as peak:
            record = run_stream(
                cached.adapter,
                load_batches(spec, resources, batches, labels, index_device),
                progress=advance,
                domains=[0 if spec.join == "mixed" else int(rows[0, 0]) for rows in batches],
                oracle=spec.steps if spec.selection == "oracle" else 0,
                episodic=spec.episodic,
                restrict=None if restriction is None else restriction.restrict,
            )
        peak_bytes = cached.correct_peak(min(spec.batch_size, len(order)), peak.bytes)
        compiled = is_compiled(cached.adapter)
    return Run(spec, record, _collect_facts(spec, resources, order, started, peak_bytes, compiled=compiled))


def check_fingerprints(spec: Spec, resources: Resources) -> None:
    """Raise if model or images differ from those with which a run was planned: its key would be wrong."""
    method = resources.method(spec.method)
    found = resources.weights(spec.checkpoint, method, spec.sites, spec.parameters)
    if found != spec.weights:
        raise ValueError(
            f"{spec.checkpoint} has the weights {found} here and had {spec.weights} where the run was planned: all "
            "machines need the same files, and a function that makes a model must make the same one each time"
        )
    if (content := resources.content(spec.data, spec.domains)) != spec.content:
        raise ValueError(
            f"the images of {spec.data} are others here ({content}) than where the run was planned ({spec.content}): "
            "all machines need the same files; if they were changed meanwhile, start again"
        )


def check_model(spec: Spec, resources: Resources) -> None:
    """Raise if the source model of a run lacks a part that the method needs."""
    method, source = resources.method(spec.method), resources.source(spec.checkpoint)
    lacks = []
    if "rotation head" in method.needs and not (source.card and source.card.rotation_head):
        lacks.append("a rotation head")
    if "instance-aware norm" in method.needs and not any(
        isinstance(module, InstanceAwareBatchNorm2d) for module in source.model.modules()
    ):
        lacks.append("instance-aware norms")
    if "features" in method.needs and spec.views > 1:
        raise ValueError(f"{spec.method} looks at the features of one view; leave views out")
    if lacks:
        raise ValueError(f"{spec.method} needs {' and '.join(lacks)}, which {spec.checkpoint} does not have")


def identify_adapter(spec: Spec) -> tuple[Hashable, ...]:
    """Return everything that decides what :func:`build_adapter` builds. Runs with equal values share an adapter."""
    # The set decides the statistics of the source data, and the size of images, for which a memory allocates once.
    model = spec.checkpoint, spec.weights, spec.data, spec.sites, spec.views, spec.precision
    method = spec.method, spec.revision, json.dumps(dict(spec.parameters), sort_keys=True)
    # The last two decide only how much memory the steps of a run take.
    return *model, *method, spec.selection, spec.episodic


def build_adapter(spec: Spec, resources: Resources) -> Adapter:
    """Build the adapter of a run; the loop of an episodic run resets it."""
    check_model(spec, resources)
    method, source = resources.method(spec.method), resources.source(spec.checkpoint)
    statistics = resources.source_statistics(method, spec.checkpoint, spec.data, spec.sites, spec.views)
    parameters = {name: _from_plain(name, value) for name, value in spec.parameters.items()}
    adapter = create(spec.method, prepare_model(source, method, spec.views), **statistics, **parameters)
    adapter = adapter.to(resources.device)
    half, compiled = spec.precision == "bfloat16", resources.config.compiled
    if half or compiled:
        precision: Precision = "bfloat16" if half else "float32"
        adapter.accelerate(precision=precision, channels_last=half, compile=compiled)
    return adapter


def to_plain(value: Any) -> Any:
    """Return a parameter as a JSON value."""
    if isinstance(value, Statistics):
        # The text could hold all of them; the dictionary stays, so that stored runs keep their keys.
        if value.memory is not None or value.renorm or value.anchored:
            return str(value)
        return {"prior": value.prior, "count": value.count, "momentum": value.momentum}
    return list(value) if isinstance(value, tuple) else value


def _from_plain(name: str, value: Any) -> Any:
    if name == "statistics" and value is not None:
        return Statistics.parse(value) if isinstance(value, str) else Statistics(**value)
    return tuple(value) if isinstance(value, list) else value


def make_order(spec: Spec, resources: Resources) -> Order:
    """Return rows (n, 2) of domain and image, in the order of the stream.

    Raises:
        ValueError: The options do not fit each other or the number of images.
    """
    labels = resources.labels(spec).numpy()
    own = {**JOINS[spec.join], **FRESH}
    options = {name: value for name, value in spec.options.items() if name not in own}
    # Each domain has an order of its own; the first one has the order that it would have alone.
    orders = [
        ORDERS[spec.stream](labels, spec.seed + 1000 * number, **options)
        for number in range(len(spec.domains))
    ]
    try:
        return _join_orders(spec, orders)
    except ValueError as error:
        raise ValueError(
            f"[stream] join {spec.join!r} with {len(labels)} images: {error}. Give other values to "
            f"{' or '.join([*JOINS[spec.join], 'batch_size'])}, or let [data] limit be higher"
        ) from error


def _join_orders(spec: Spec, orders: Sequence[Order]) -> Order:
    """Join the orders of the domains."""
    if spec.join == "recurring":
        return streams.recurring(orders, spec.options["rounds"])
    if spec.join == "rare":
        clean, shifted = orders
        every = spec.options["every"]
        return streams.rare(clean, shifted, spec.seed, batch_size=spec.batch_size, every=every)
    if spec.join == "onset":
        clean, shifted = orders
        fewest, most = streams.parse_lengths(spec.options["lengths"])
        lengths = streams.draw_onset(spec.seed, batch_size=spec.batch_size, fewest=fewest, most=most)
        rows = streams.onset(clean, shifted, lengths)
        return rows[rows[:, 0] == 1] if spec.options.items() >= FRESH.items() else rows
    return streams.continual(orders) if spec.join == "continual" else streams.mixed(orders, spec.seed)


def cut_order(spec: Spec, order: Order) -> list[Order]:
    """Return the batches of a stream. Where domains follow one another, no batch has images of two."""
    if spec.join == "mixed":
        return streams.batches(order, spec.batch_size)
    visits = np.split(order, np.flatnonzero(np.diff(order[:, 0])) + 1)
    return [rows for visit in visits for rows in streams.batches(visit, spec.batch_size)]


def load_batches(
    spec: Spec, resources: Resources, batches: list[Order], labels: Tensor, index_device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images and labels; a batch of several domains keeps the order of its rows.

    All indices are copied before the first batch, those of images to ``index_device``: a copy for each batch would wait
    for the device.
    """
    sizes = [len(rows) for rows in batches]
    by_domain = [np.argsort(rows[:, 0], kind="stable") for rows in batches]
    parts = [np.unique(rows[:, 0], return_counts=True) for rows in batches]
    index = torch.from_numpy(
        np.concatenate([rows[places, 1] for rows, places in zip(batches, by_domain, strict=True)])
    )
    pieces = iter(index.to(index_device).split([int(count) for _, counts in parts for count in counts]))
    backs = (
        torch.from_numpy(np.concatenate([places.argsort() for places in by_domain]))
        .to(resources.device)
        .split(sizes)
    )
    truths = labels[torch.from_numpy(np.concatenate(batches)[:, 1])].to(resources.device).split(sizes)
    asked = [(spec.domains[number], next(pieces)) for numbers, _ in parts for number in numbers]
    with closing(_load_pieces(spec, resources, asked)) as found:
        for (numbers, _), back, truth in zip(parts, backs, truths, strict=True):
            images = [next(found) for _ in numbers]
            yield (images[0] if len(images) == 1 else torch.cat(images).index_select(0, back)), truth


def _load_pieces(
    spec: Spec, resources: Resources, asked: Sequence[tuple[Domain, Tensor]]
) -> Generator[Tensor, None, None]:
    """Yield the images of each piece of one domain; for an accelerator, pictures on the disk are decoded ahead."""
    folders = [
        base for domain, _ in asked if isinstance(base := resources.base(spec.data, domain), ImageFolder)
    ]
    if len(folders) < len(asked):
        yield from (resources.batch(spec, domain, index) for domain, index in asked)
        return
    rows = [resources.rows(spec)[index] for _, index in asked]
    # On a processor, threads that decode would slow down the steps that are timed.
    workers = 0 if resources.device.type == "cpu" else None
    ahead = _AHEAD * (len(spec.domains) if spec.join == "mixed" else 1)  # a batch may be in as many pieces
    requests = zip(folders, rows, strict=True)
    with closing(prefetch(requests, resources.device, workers=workers, ahead=ahead)) as pictures:
        for (domain, _), places, images in zip(asked, rows, pictures, strict=True):
            yield resources.apply(spec, domain, images, places)


def _collect_facts(
    spec: Spec, resources: Resources, order: Order, started: float, peak: int | None, *, compiled: bool
) -> Facts:
    method = resources.method(spec.method)
    times = spec.views * int(spec.parameters.get("steps") or 1)
    if spec.selection == "oracle":
        times *= spec.steps
    return Facts(
        order=streams.order_hash(order),
        device=_name_device(resources.device),
        threads=torch.get_num_threads(),
        versions=_list_versions() | ({"compiled": "inductor"} if compiled else {}),
        started=started,
        seconds=time.time() - started,
        peak=peak,
        forwards=float(method.forwards * times),
        backwards=float(method.backwards * times),
    )


def _name_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            line = next(line for line in file if line.startswith("model name"))
        return line.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _list_versions() -> dict[str, str]:
    from ttvd import __version__

    return {
        "ttvd": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
