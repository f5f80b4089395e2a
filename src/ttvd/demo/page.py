"""The demo's page: what was done, the table, and the figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from ttvd.data.digits import split_digits
from ttvd.data.streams import iid, order_hash
from ttvd.demo.figures import OURS, draw_figures
from ttvd.demo.job import BATCH, Entry, Results
from ttvd.files import open_atomic
from ttvd.methods import list_methods
from ttvd.report.page import Cell, Page, Table, render

TITLE = "Corrupted digits: adapting a classifier while it is used"
RIVALS = ("source", "bn", "SLA + bn", "SLA + tent")


def write_page(results: Results, path: Path, *, folder: Path | None = None, quick: bool = False) -> Path:
    """Draw the figures and write the page.

    Args:
        results: What ``ttvd.demo.job.measure`` gave.
        path: Of the HTML file; it needs no other file and no network.
        folder: Where the checkpoints are; those of the package unless given.
        quick: Fewer digits and coarser grids.

    Returns:
        The path.
    """
    source, _, images, labels = split_digits()
    exhibits = draw_figures(results, images, labels, folder=folder, quick=quick)
    page = Page(
        TITLE,
        _write_lead(results),
        _list_facts(results, len(source), len(images)),
        make_table(results),
        _write_notes(results),
        [(entry.label, _explain(entry)) for entry in results.entries],
        exhibits,
    )
    with open_atomic(path) as file:
        file.write(render(page).encode())
    return path


def make_table(results: Results) -> Table:
    """A row for each entry: mean error, the error of each domain, calibration, time and the share kept."""
    totals = [[record.metrics().compute() for record in results.of(entry.label)] for entry in results.entries]
    errors = np.array([[total["error"] for total in row] for row in totals])
    eces = np.array([np.mean([total["ece"] for total in row]) for row in totals])
    shares = np.column_stack([errors.mean(1), errors, eces]).round(5)
    best = shares.min(0)
    rows = []
    for entry, values in zip(results.entries, shares, strict=True):
        numbers = [Cell(f"{100 * v:.2f}", float(v), bool(v == b)) for v, b in zip(values, best, strict=True)]
        named = [Cell(entry.label, entry.label), Cell(entry.checkpoint, entry.checkpoint)]
        rows.append([*named, *numbers, _time_cell(results, entry), _kept_cell(results, entry)])
    domains = [f"{domain.label} (%)" for domain in results.domains]
    headings = ["method", "model", "mean error (%)", *domains, "ECE (%)", "ms per batch", "kept (%)"]
    caption = "Error in per cent, lower is better; the best of a column is bold. Click a heading to sort."
    return Table(headings, rows, caption)


def _time_cell(results: Results, entry: Entry) -> Cell:
    milliseconds = 1000 * float(np.median([r.seconds_per_batch() for r in results.of(entry.label)]))
    return Cell(f"{milliseconds:.1f}", milliseconds)


def _kept_cell(results: Results, entry: Entry) -> Cell:
    if list_methods()[entry.method].backwards == 0:
        return Cell("-", "")
    kept = float(np.mean([record.kept() for record in results.of(entry.label)]))
    return Cell(f"{100 * kept:.0f}", kept)


def _write_lead(results: Results) -> list[str]:
    means = {entry.label: _mean_error(results, entry.label) for entry in results.entries}
    shown = [f"{label} {means[label]:.2%}" for label in (*RIVALS, OURS) if label in means]
    corruptions = ", ".join(domain.label for domain in results.domains)
    return [
        "A classifier is trained on clean digits and then meets corrupted ones, batch after batch, without labels. "
        "Each method predicts a batch and may learn from it before it sees the next one; with each corruption it "
        "starts afresh.",
        f"Corruptions, generated with ImageNet-C's constants, and their severities from 1 to 5: {corruptions}. Mean "
        f"error: {', '.join(shown)}.",
    ]


def _mean_error(results: Results, label: str) -> float:
    return float(np.mean([record.metrics().compute()["error"] for record in results.of(label)]))


def _explain(entry: Entry) -> str:
    """What the registry says of the method, and how it is used here."""
    summary = list_methods()[entry.method].summary
    return summary if entry.views == 1 else f"{summary} On the mean over {entry.views} rotations."


def _list_facts(results: Results, source: int, stream: int) -> list[tuple[str, str]]:
    seen = int(next(iter(results.records.values())).sizes().sum())
    return [
        (
            "Data",
            f"{source + stream:,} real MNIST digits: {source:,} source, {seen:,} of {stream:,} streamed",
        ),
        (
            "Stream",
            f"batches of {BATCH} in random order, seed {results.seed}, order {order_hash(iid(seen, results.seed))}",
        ),
        (
            "Models",
            ", ".join(sorted({entry.checkpoint for entry in results.entries})) + ", digits-plane for figures",
        ),
        (
            "Versions",
            f"ttvd {version('ttvd')}, torch {torch.__version__}, Python {platform.python_version()}",
        ),
        ("Hardware", f"{_name_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} used by torch"),
    ]


def _name_processor() -> str:
    """What the system calls its processor."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _write_notes(results: Results) -> list[str]:
    """How sure the comparison is, and how to read the columns."""
    return [
        *compare_rivals(results),
        "SLA entries and the diagram methods use a model that was trained on the four rotations of each digit: "
        "compare ttvd with SLA + bn to see what its adaptation adds to that.",
        "ECE: calibration error over each stream in 15 bins, averaged over corruptions. Time: median batch, prediction "
        "and adaptation. Kept: share of the digits that took part in the gradient step.",
    ]


def compare_rivals(results: Results) -> list[str]:
    """A sentence for each rival of ttvd that was measured: the difference in error and its paired interval."""
    labels = {entry.label for entry in results.entries}
    return [_compare(results, rival) for rival in RIVALS if {OURS, rival} <= labels]


def _compare(results: Results, rival: str) -> str:
    gap = results.compare(OURS, rival)
    low, middle, high = (f"{100 * share:+.2f}" for share in (gap.low, gap.difference, gap.high))
    verdict = {"better": "fewer errors", "worse": "more errors", "tie": "no clear difference"}[gap.verdict]
    return (
        f"{OURS} against {rival}: {middle} points of error, 95% paired interval {low} to {high}: {verdict}."
    )
