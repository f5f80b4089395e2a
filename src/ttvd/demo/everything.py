"""All registered methods on the demo's digits, each with its own defaults, each in a process of its own."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ttvd.bench import Record, run_stream
from ttvd.bench.run import watch_memory
from ttvd.data.digits import split_digits
from ttvd.demo.job import Domain, stream
from ttvd.methods import Method, create, list_methods
from ttvd.source import collect_features, estimate_fisher
from ttvd.source.features import is_held_out
from ttvd.zoo.catalog import Source, load

DOMAIN = Domain("gaussian_noise", 5)


@dataclass(frozen=True)
class Outcome:
    """What came of one method.

    Attributes:
        method: Its name.
        checkpoint: The source model that has what it needs.
        record: Its rows.
        peak: Bytes above what the process held before the first batch, where the system tells.
    """

    method: str
    checkpoint: str
    record: Record
    peak: int | None


def choose_checkpoint(method: Method) -> str:
    """The demo's model that offers what a method needs."""
    if "rotation head" in method.needs:
        return "digits-rotation"
    if "instance-aware norm" in method.needs:
        return "digits-instance-aware"
    return "digits-sla" if "sites" in method.needs else "digits-plain"


def measure_method(name: str, limit: int, seed: int, folder: Path | None = None) -> Outcome:
    """Stream noisy digits through a method with the defaults of its paper."""
    torch.set_num_threads(2)
    method = list_methods()[name]
    source = load(choose_checkpoint(method), folder)
    adapter = create(name, source.model, **_gather(method, source))
    _, _, images, labels = split_digits()
    shifted = DOMAIN.apply(images[:limit], seed)
    with watch_memory(torch.device("cpu")) as peak:
        record = run_stream(adapter, stream(shifted, labels[:limit], seed))
    return Outcome(name, choose_checkpoint(method), record, peak.bytes)


def _gather(method: Method, source: Source) -> dict[str, Any]:
    """What the method needs of the source data."""
    images, labels, _, _ = split_digits()
    used = ~is_held_out(len(images))
    made: dict[str, Any] = {"sites": source.sites} if "sites" in method.needs else {}
    if "features" in method.needs:
        made["features"] = collect_features(source.model, (images[used], labels[used]))
    if "fisher" in method.needs:
        made["fisher"] = estimate_fisher(source.model, images[used])
    return made


def measure_all(
    limit: int, seed: int, *, folder: Path | None = None, progress: Callable[[str], None] | None = None
) -> list[Outcome]:
    """Measure every registered method; a fresh process for each keeps their memory apart."""
    outcomes = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in list_methods():
            if progress is not None:
                progress(name)
            outcomes.append(pool.submit(measure_method, name, limit, seed, folder).result())
    return outcomes
