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

from ttvd.bench.fingerprints import check_method, check_origin
from ttvd.bench.memory import watch_memory
from ttvd.bench.resources import Resources
from ttvd.bench.run import Row, run
from ttvd.bench.spec import Domain, Facts, Run, Spec
from ttvd.data import streams
from ttvd.data.prefetch import prefetch
from ttvd.data.sets import ImageFolder
from ttvd.data.streams import Order
from ttvd.engine.acceleration import Precision
from ttvd.engine.module import is_compiled
from ttvd.methods import Adapter, create, find_method
from ttvd.methods.registry import prepare_model
from ttvd.nn.norms import Statistics

_AHEAD = 4  # batches that are decoded ahead
ORDERS: dict[str, Callable[..., Order]] = {
    function.__name__: function
    for function in (
        streams.iid,
        streams.class_sorted,
        streams.dirichlet,
        streams.dirichlet_slots,
        streams.imbalanced,
        streams.label_shift,
    )
}


def execute(spec: Spec, resources: Resources, progress: Callable[[int, int], None] | None = None) -> Run:
    """Do a run.

    Args:
        spec: What to do.
        resources: Where its parts come from.
        progress: Called with the number of batches done and of all batches.
    """
    check_origin(spec, resources)
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

    with resources.adapters.lend(identify_adapter(spec), lambda: build_adapter(spec, resources)) as lent:
        started = time.time()
        where = resources.prepare(spec)  # so that the memory which is measured is that of the adapter's work
        with watch_memory(resources.device) as peak:
            record = run(
                lent.adapter,
                _stream(spec, resources, batches, labels, where),
                progress=advance,
                domains=[0 if spec.join == "mixed" else int(rows[0, 0]) for rows in batches],
                oracle=spec.steps if spec.selection == "oracle" else 0,
                episodic=spec.episodic,
                restrict=None if restriction is None else restriction.restrict,
            )
        taken = lent.correct_peak(min(spec.batch_size, len(order)), peak.bytes)
        compiled = is_compiled(lent.adapter)
    return Run(spec, record, _state_facts(spec, resources, order, started, taken, compiled=compiled))


def identify_adapter(spec: Spec) -> tuple[Hashable, ...]:
    """All that decides what :func:`build_adapter` makes; runs for which it is the same can share an adapter."""
    # The set decides on requirements, and on the size of images, which a memory settles on.
    model = spec.checkpoint, spec.weights, spec.data, spec.sites, spec.views, spec.precision
    method = spec.method, spec.revision, json.dumps(dict(spec.parameters), sort_keys=True)
    # The last two decide nothing but how much memory the steps of a run take.
    return *model, *method, spec.selection, spec.episodic


def build_adapter(spec: Spec, resources: Resources) -> Adapter:
    """The adapter of a run, fresh; an episodic run resets it itself."""
    check_method(spec, resources)
    method, source = find_method(spec.method), resources.source(spec.checkpoint)
    made = resources.requirements(method, spec.checkpoint, spec.data, spec.sites, spec.views)
    parameters = {name: _from_plain(name, value) for name, value in spec.parameters.items()}
    adapter = create(spec.method, prepare_model(source, method, spec.views), **made, **parameters)
    adapter = adapter.to(resources.device)
    half, compiled = spec.precision == "bfloat16", resources.setting.compiled
    if half or compiled:
        precision: Precision = "bfloat16" if half else "float32"
        adapter.accelerate(precision=precision, channels_last=half, compile=compiled)
    return adapter


def to_plain(value: Any) -> Any:
    """A parameter as JSON can hold it."""
    if isinstance(value, Statistics):
        # The text can hold all of them; records that were made before it must keep their hash.
        if value.memory is not None or value.renorm or value.anchored:
            return str(value)
        return {"prior": value.prior, "count": value.count, "momentum": value.momentum}
    return list(value) if isinstance(value, tuple) else value


def _from_plain(name: str, value: Any) -> Any:
    if name == "statistics" and value is not None:
        return Statistics.parse(value) if isinstance(value, str) else Statistics(**value)
    return tuple(value) if isinstance(value, list) else value


def make_order(spec: Spec, resources: Resources) -> Order:
    """Rows (n, 2) of domain and image, in the order of the stream."""
    labels = resources.labels(spec).numpy()
    # Each domain of a stream has an order of its own; the first has that of a stream of its own.
    orders = [
        ORDERS[spec.stream](labels, spec.seed + 1000 * number, **spec.options)
        for number in range(len(spec.domains))
    ]
    return streams.continual(orders) if spec.join == "continual" else streams.mixed(orders, spec.seed)


def cut_order(spec: Spec, order: Order) -> list[Order]:
    """The batches of a stream; where domains follow one another, none has images of two."""
    if spec.join == "mixed":
        return streams.batches(order, spec.batch_size)
    parts = [order[order[:, 0] == number] for number in range(len(spec.domains))]
    return [rows for part in parts for rows in streams.batches(part, spec.batch_size)]


def _stream(
    spec: Spec, resources: Resources, batches: list[Order], labels: Tensor, where: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images and labels; one of several domains keeps the order of its rows.

    All indices go to the device before the first batch (those of images to ``where``): a copy for each batch would
    wait until the device has done all that was asked of it.
    """
    sizes = [len(rows) for rows in batches]
    ways = [np.argsort(rows[:, 0], kind="stable") for rows in batches]  # from that of rows to that of domains
    parts = [np.unique(rows[:, 0], return_counts=True) for rows in batches]
    index = torch.from_numpy(np.concatenate([rows[way, 1] for rows, way in zip(batches, ways, strict=True)]))
    pieces = iter(index.to(where).split([int(count) for _, counts in parts for count in counts]))
    backs = (
        torch.from_numpy(np.concatenate([way.argsort() for way in ways])).to(resources.device).split(sizes)
    )
    truths = labels[torch.from_numpy(np.concatenate(batches)[:, 1])].to(resources.device).split(sizes)
    asked = [(spec.domains[number], next(pieces)) for numbers, _ in parts for number in numbers]
    with closing(_load(spec, resources, asked)) as found:
        for (numbers, _), back, truth in zip(parts, backs, truths, strict=True):
            images = [next(found) for _ in numbers]
            yield (images[0] if len(images) == 1 else torch.cat(images).index_select(0, back)), truth


def _load(
    spec: Spec, resources: Resources, asked: Sequence[tuple[Domain, Tensor]]
) -> Generator[Tensor, None, None]:
    """Images of one domain after another; for an accelerator, pictures on the disk are decoded ahead."""
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


def _state_facts(
    spec: Spec, resources: Resources, order: Order, started: float, peak: int | None, *, compiled: bool
) -> Facts:
    method = find_method(spec.method)
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
