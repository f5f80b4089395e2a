"""Provenance of the numbers: the runs behind each line, and the command, data, devices and versions of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ttvd.report.document import Block, Cell, Facts, Fold, Section, Table, Text, text_cell
from ttvd.report.results import count, format_pairs, format_rule

if TYPE_CHECKING:
    from ttvd.bench.spec import Run, Spec
    from ttvd.bench.study import Line
    from ttvd.report.results import Results

OFFICIAL = "official"
GPUS = ("NVIDIA", "Tesla", "GeForce", "Quadro", "AMD Instinct")
"""Beginnings of the names of devices that need ``--device cuda``."""


def provenance_section(several: Sequence[Results]) -> Section:
    """Return the section that all numbers of the tables link to."""
    text = Text(
        [
            "Each number of the tables links to its runs here: hover over it, or press it. A run is identified by the "
            "hash of everything that decides its rows; ttvd runs finds it in the store by the first digits."
        ]
    )
    folds = [
        Fold(
            results.study.recipe.title,
            [_describe_line(results, line) for line in results.lines],
            count(len(results.all_runs()), "run"),
        )
        for results in several
    ]
    return Section("Provenance of the numbers", "runs", [text, *folds], printed=False)


def _describe_line(results: Results, line: Line) -> Fold:
    """Return what the runs of a line have in common, and a row for each column."""
    runs = results.runs(line)
    columns = [column for column in results.columns if line.runs.get(column)]
    starts = [column for column in results.columns if line.fresh.get(column)]
    table = Table(
        ["column", "seeds", "error (%)", "runs", "order of the stream", "started", "seconds"],
        [
            *(_describe_cell(column.label, line.runs[column]) for column in columns),
            *(_describe_cell(f"{column.label}, fresh start", line.fresh[column]) for column in starts),
        ],
        anchors=[
            *(results.anchor(line, column) for column in columns),
            *(f"{results.anchor(line, column)}-fresh" for column in starts),
        ],
        heads=True,
    )
    note = count(len(runs), "run") + (f", {line.pending} missing" if line.pending else "")
    blocks: list[Block] = (
        [Facts(_list_line_facts(line, runs)), table] if runs else [Text(["No run of this line is done."])]
    )
    return Fold(f"{line.label}, {format_rule(line)}", blocks, note, results.anchor(line))


def _describe_cell(title: str, runs: Sequence[Run]) -> list[Cell]:
    errors = [100 * run.totals["error"] for run in runs]
    seconds = sum(run.facts.seconds for run in runs)
    started = min(run.facts.started for run in runs)
    return [
        text_cell(title),
        text_cell(", ".join(str(run.spec.seed) for run in runs)),
        Cell(", ".join(f"{error:.2f}" for error in errors), sum(errors) / len(errors)),
        text_cell(", ".join(run.spec.key for run in runs)),
        text_cell(_join(runs, lambda run: run.facts.order, ", ")),
        Cell(format_time(started), started),
        Cell(f"{seconds:.1f}", seconds),
    ]


def _list_line_facts(line: Line, runs: Sequence[Run]) -> list[tuple[str, str]]:
    chosen = format_pairs(line.parameters)
    steps = [f"best of {run.spec.steps} steps by the labels of each batch" for run in runs[:1]]
    oracle = steps if line.rule == "oracle" else []
    pairs = [
        ("Chosen by", "; ".join([format_rule(line), *([chosen] if chosen else []), *oracle])),
        ("Method", _join(runs, lambda run: f"{run.spec.method}, revision {run.spec.revision}")),
        ("Parameters", _join(runs, lambda run: _format_parameters(run.spec)) or "none"),
        ("Model", _join(runs, lambda run: _format_model(run.spec))),
        ("Data", _join(runs, lambda run: f"{run.spec.data} ({run.spec.content})")),
        ("Corruptions", _join(runs, lambda run: format_corruptions(run.spec))),
        ("Stream", _join(runs, lambda run: _format_stream(run.spec))),
        ("Device", _join(runs, lambda run: f"{run.facts.device}, threads {run.facts.threads}")),
        ("Versions", _join(runs, lambda run: format_pairs(run.facts.versions))),
        ("Passes", _join(runs, _format_passes)),
        ("Peak memory", _format_memory([run.facts.peak for run in runs])),
        ("Measured", format_span([run.facts.started for run in runs])),
    ]
    return [(name, value) for name, value in pairs if value]


def _join(runs: Sequence[Run], describe: Callable[[Run], str], between: str = "; ") -> str:
    """Join the descriptions of runs in their order; equal ones are listed once."""
    return between.join(dict.fromkeys(describe(run) for run in runs))


def _format_parameters(spec: Spec) -> str:
    """Format all parameters but the seed, which has a column of its own."""
    return format_pairs({name: value for name, value in spec.parameters.items() if name != "seed"})


def _format_model(spec: Spec) -> str:
    views = f", {spec.views} views" if spec.views > 1 else ""
    sites = f", sites from {100 * spec.sites:g} % of the source data" if spec.sites < 1 else ""
    return f"{spec.checkpoint} (weights {spec.weights}){views}{sites}"


def _format_stream(spec: Spec) -> str:
    options = f" ({format_pairs(spec.options)})" if spec.options else ""
    limit = f", a fixed random choice of {spec.limit} images" if spec.limit else ""
    joined = f", {len(spec.domains)} domains {spec.join}" if len(spec.domains) > 1 else ""
    episodic = ", reset before each batch" if spec.episodic else ""
    return f"{spec.stream}{options}, batches of {spec.batch_size}{limit}{joined}{episodic}"


def _format_passes(run: Run) -> str:
    return f"{run.facts.forwards:g} forward and {run.facts.backwards:g} backward for each image"


def _format_memory(peaks: Sequence[int | None]) -> str:
    known = sorted(peak / 1e6 for peak in peaks if peak is not None)
    if not known:
        return ""
    low, high = f"{known[0]:.0f}", f"{known[-1]:.0f}"
    return f"{low} MB" if low == high else f"{low} to {high} MB"


def list_overrides(results: Results) -> list[str]:
    """Return the command-line options that made the runs differ from the recipe."""
    study = results.study
    recipe = study.recipe
    specs = [run.spec for run in results.all_runs()]
    limits = {spec.limit for spec in specs if spec.selection != "oracle"} or {recipe.data.limit}
    seeds = {spec.seed for spec in specs}
    wanted = {seed for part in recipe.methods for seed in part.seeds or recipe.seeds}
    complete = not study.missing and not study.failed
    found = [f"--limit {limit}" for limit in limits if limit != recipe.data.limit and limit is not None]
    if seeds - wanted or (specs and complete and seeds != wanted):
        found.append(f"--seeds {','.join(map(str, sorted(seeds)))}")
    return found


def format_command(results: Results) -> str:
    """Return the command that makes the runs of a study; DATA stands for the folder of the data sets."""
    runs = results.all_runs()
    name = results.study.recipe.name
    words = ["ttvd bench", f"recipes/{name}.toml", "--store", f"out/{name}.db", *list_overrides(results)]
    if any(run.spec.data != "digits" for run in runs):
        words += ["--data", "DATA"]
    if any(run.facts.device.startswith(GPUS) for run in runs):
        words += ["--device", "cuda"]
    if any("compiled" in run.facts.versions for run in runs):
        words.append("--compile")
    return " ".join(words)


def list_facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return names and values that say how some runs were made, all read from the runs themselves."""
    seeds = sorted({run.spec.seed for run in runs})
    return [
        ("Runs", f"{len(runs):,}"),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Data", gather(runs, format_data)),
        ("Models (weights)", gather(runs, lambda run: f"{run.spec.checkpoint} ({run.spec.weights})")),
        ("Precision", gather(runs, lambda run: run.spec.precision)),
        ("Hardware", gather(runs, lambda run: run.facts.device)),
        ("Versions", gather(runs, lambda run: format_pairs(run.facts.versions))),
        ("Measured", format_span([run.facts.started for run in runs])),
    ]


def format_data(run: Run) -> str:
    """Return the data set of a run and where its corruptions come from."""
    return f"{run.spec.data}, corruptions: {format_corruptions(run.spec)}"


def format_corruptions(spec: Spec) -> str:
    """Say whether the corrupted images are the published files or generated."""
    if spec.constants == OFFICIAL:
        return "official files"
    if all(domain.severity == 0 for domain in spec.domains):
        return "none"
    table = {"cifar": "CIFAR-10-C's", "imagenet": "ImageNet-C's"}.get(spec.constants, spec.constants)
    return f"generated with {table} constants"


def format_time(seconds: float) -> str:
    """Format a time in seconds since 1970 as universal time.

    Example:
        >>> format_time(0.0)
        '1970-01-01 00:00 UTC'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_span(times: Sequence[float]) -> str:
    """Format the span from the first to the last time; empty without any."""
    if not times:
        return ""
    first, last = format_time(min(times)), format_time(max(times))
    return first if first == last else f"{first.removesuffix(' UTC')} to {last}"


def gather(runs: Iterable[Run], describe: Callable[[Run], Any]) -> str:
    """Join the descriptions of runs, sorted; equal ones are listed once."""
    return "; ".join(sorted({str(describe(run)) for run in runs}))
