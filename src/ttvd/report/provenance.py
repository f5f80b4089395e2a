"""Where every number comes from: a place on the page for each line, with a row for each of its groups of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ttvd.report.document import Block, Facts, Fold, Section, Text
from ttvd.report.page import Cell, Table
from ttvd.report.results import count, show_pairs, show_rule

if TYPE_CHECKING:
    from ttvd.bench.spec import Run, Spec
    from ttvd.bench.study import Column, Line
    from ttvd.report.results import Results

OFFICIAL = "official"
GPUS = ("NVIDIA", "Tesla", "GeForce", "Quadro", "AMD Instinct")
"""How the names of devices begin that are used by --device cuda."""


def render_provenance(several: Sequence[Results]) -> Section:
    """The chapter that the numbers of all tables lead to."""
    text = Text(
        [
            "Each number of the tables leads to its runs here: hover over it, or press it. A run is known by the hash "
            "of everything that decides its rows; ttvd runs finds it in the store by the first digits."
        ]
    )
    folds = [
        Fold(
            results.study.recipe.title,
            [describe_line(results, line) for line in results.lines],
            count(len(results.all_runs()), "run"),
        )
        for results in several
    ]
    return Section("Where the numbers come from", "runs", [text, *folds], printed=False)


def describe_line(results: Results, line: Line) -> Fold:
    """What the runs of a line have in common, and a row for each column."""
    runs = results.runs(line)
    columns = [column for column in results.columns if line.runs.get(column)]
    table = Table(
        ["column", "seeds", "error (%)", "runs", "order of the stream", "started", "seconds"],
        [_describe_group(column, line.runs[column]) for column in columns],
        anchors=[results.anchor(line, column) for column in columns],
        heads=True,
    )
    facts = Facts(_list_facts(line, runs))
    note = count(len(runs), "run") + (f", {line.pending} missing" if line.pending else "")
    blocks: list[Block] = [facts, table] if runs else [Text(["No run of this line is done."])]
    return Fold(f"{line.label}, {show_rule(line)}", blocks, note, results.anchor(line))


def _describe_group(column: Column, runs: Sequence[Run]) -> list[Cell]:
    errors = [100 * run.totals["error"] for run in runs]
    mean = sum(errors) / len(errors)
    seconds = sum(run.facts.seconds for run in runs)
    started = min(run.facts.started for run in runs)
    return [
        Cell(column.label, column.label),
        _text(str(run.spec.seed) for run in runs),
        Cell(", ".join(f"{error:.2f}" for error in errors), mean),
        _text(run.spec.key for run in runs),
        _text(_distinct(runs, lambda run: run.facts.order)),
        Cell(show_time(started), started),
        Cell(f"{seconds:.1f}", seconds),
    ]


def _text(words: Iterable[str]) -> Cell:
    text = ", ".join(words)
    return Cell(text, text)


def _list_facts(line: Line, runs: Sequence[Run]) -> list[tuple[str, str]]:
    chosen = show_pairs(line.parameters)
    steps = [f"best of {run.spec.steps} steps by the labels of each batch" for run in runs[:1]]
    oracle = steps if line.rule == "oracle" else []
    pairs = [
        ("Chosen by", "; ".join([show_rule(line), *([chosen] if chosen else []), *oracle])),
        ("Method", _join(runs, lambda run: f"{run.spec.method}, revision {run.spec.revision}")),
        ("Parameters", _join(runs, lambda run: _list_parameters(run.spec)) or "none"),
        ("Model", _join(runs, lambda run: _name_model(run.spec))),
        ("Data", _join(runs, lambda run: f"{run.spec.data} ({run.spec.content})")),
        ("Corruptions", _join(runs, lambda run: render_origin(run.spec))),
        ("Stream", _join(runs, lambda run: _name_stream(run.spec))),
        ("Device", _join(runs, lambda run: f"{run.facts.device}, threads {run.facts.threads}")),
        ("Versions", _join(runs, lambda run: show_pairs(run.facts.versions))),
        (
            "Passes",
            _join(
                runs,
                lambda run: (
                    f"{run.facts.forwards:g} forward and {run.facts.backwards:g} backward for each image"
                ),
            ),
        ),
        ("Peak memory", _range([run.facts.peak for run in runs])),
        ("Line made", show_span([run.facts.started for run in runs])),
    ]
    return [(name, value) for name, value in pairs if value]


def _distinct(runs: Sequence[Run], tell: Callable[[Run], str]) -> list[str]:
    return list(dict.fromkeys(tell(run) for run in runs))


def _join(runs: Sequence[Run], tell: Callable[[Run], str]) -> str:
    """What the runs say, each thing once."""
    return "; ".join(_distinct(runs, tell))


def _list_parameters(spec: Spec) -> str:
    """All but the seed, which differs from run to run and has a column of its own."""
    return show_pairs({name: value for name, value in spec.parameters.items() if name != "seed"})


def _name_model(spec: Spec) -> str:
    views = f", {spec.views} views" if spec.views > 1 else ""
    sites = f", sites from {100 * spec.sites:g} % of the source data" if spec.sites < 1 else ""
    return f"{spec.checkpoint} (weights {spec.weights}){views}{sites}"


def _name_stream(spec: Spec) -> str:
    options = f" ({show_pairs(spec.options)})" if spec.options else ""
    limit = f", a fixed random choice of {spec.limit} images" if spec.limit else ""
    joined = f", {len(spec.domains)} domains {spec.join}" if len(spec.domains) > 1 else ""
    again = ", a fresh start at each batch" if spec.episodic else ""
    return f"{spec.stream}{options}, batches of {spec.batch_size}{limit}{joined}{again}"


def list_overrides(results: Results) -> list[str]:
    """Options of the command line that made the runs differ from what the recipe says."""
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


def show_command(results: Results) -> str:
    """The command that makes the runs of a study; DATA stands for the folder of the data sets."""
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


def sum_up(results: Results, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """How some runs of a study were made: names and values, everything read from the runs themselves."""
    seeds = sorted({run.spec.seed for run in runs})
    models = gather(runs, lambda run: f"{run.spec.checkpoint} ({run.spec.weights})")
    return [
        ("Command", show_command(results)),
        ("Runs", f"{len(runs):,}"),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Data", gather(runs, lambda run: f"{run.spec.data}, corruptions: {render_origin(run.spec)}")),
        ("Models (weights)", models),
        ("Precision", gather(runs, lambda run: run.spec.precision)),
        ("Hardware", gather(runs, lambda run: run.facts.device)),
        ("Versions", gather(runs, lambda run: show_pairs(run.facts.versions))),
        ("Measured", show_span([run.facts.started for run in runs])),
    ]


def render_origin(spec: Spec) -> str:
    """Whether the corrupted images are the published files or made here."""
    if spec.constants == OFFICIAL:
        return "official files"
    if all(domain.severity == 0 for domain in spec.domains):
        return "none"
    table = {"cifar": "CIFAR-10-C's", "imagenet": "ImageNet-C's"}.get(spec.constants, spec.constants)
    return f"generated with {table} constants"


def _range(peaks: Sequence[int | None]) -> str:
    known = sorted(peak / 1e6 for peak in peaks if peak is not None)
    if not known:
        return ""
    low, high = f"{known[0]:.0f}", f"{known[-1]:.0f}"
    return f"{low} MB" if low == high else f"{low} to {high} MB"


def show_time(seconds: float) -> str:
    """A moment, in universal time.

    Example:
        >>> show_time(0.0)
        '1970-01-01 00:00 UTC'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def show_span(moments: Sequence[float]) -> str:
    """From the first to the last moment."""
    if not moments:
        return ""
    first, last = show_time(min(moments)), show_time(max(moments))
    return first if first == last else f"{first.removesuffix(' UTC')} to {last}"


def gather(runs: Iterable[Run], tell: Callable[[Run], Any]) -> str:
    """What runs have to say about something, each answer once, in order."""
    return "; ".join(sorted({str(tell(run)) for run in runs}))
