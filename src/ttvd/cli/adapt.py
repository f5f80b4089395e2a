"""``ttvd adapt``: the deployer's command, from a folder of images to a file of predictions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ttvd.deploy.job import Summary


def adapt(
    source: Path = typer.Argument(help="A folder of pictures, an .npy array, or a .txt list of files."),
    model: str = typer.Option(
        help="Zoo name, checkpoint file, or package.module:function that returns a model."
    ),
    out: Path = typer.Option(help="File for the predictions, .csv or .parquet."),
    weights: Path | None = typer.Option(None, help="Safetensors weights for package.module:function."),
    sites: Path | None = typer.Option(None, help="The model's sites; a zoo model has its own."),
    method: str = typer.Option("ttvd", help="See `ttvd methods`."),
    set_: list[str] = typer.Option([], "--set", help="Parameter of the method, NAME=VALUE; repeat for more."),
    views: int = typer.Option(
        1, help="Views to aggregate around a method that knows nothing of views: 1, 2 or 4."
    ),
    batch_size: int = typer.Option(64, min=1),
    resize: int | None = typer.Option(None, min=1, help="Shorter side of pictures before cropping."),
    crop: int | None = typer.Option(None, min=1, help="Side of the square cut from the centre of pictures."),
    gray: bool = typer.Option(False, help="Turn pictures into one channel."),
    state: Path | None = typer.Option(None, help="Continue from this state."),
    save_state: Path | None = typer.Option(None, help="Save the state here at the end, or when interrupted."),
    unreadable: str = typer.Option("stop", help="What to do with images that cannot be read: stop or skip."),
    device: str = typer.Option("cpu", help="Where to compute, e.g. cuda."),
) -> None:
    """Predict a stream of images in order, adapting on the way.

    Confidences are the softmax of what the method returns; those of ttvd and its stages are calibrated on source data.
    """
    from rich.console import Console

    from ttvd.adapters import create, find_method
    from ttvd.deploy import job, models
    from ttvd.deploy.inputs import iterate_batches, open_inputs

    console = Console(stderr=True)
    if unreadable not in ("stop", "skip"):
        raise ValueError(f"--unreadable must be stop or skip, got {unreadable!r}")
    found = models.find_source(model, weights, sites)
    parameters = _parse(set_)
    seen = models.fit_to_method(found, find_method(method), views).to(device)
    adapter = create(method, seen, sites=found.sites, **parameters)
    if state is not None:
        models.load_state(state, adapter, seen, method, parameters)
    inputs = open_inputs(source, resize=resize, crop=crop, gray=gray)
    start, summary = adapter.snapshot(), job.Summary()
    batches = iterate_batches(inputs, batch_size, on_unreadable=unreadable)  # type: ignore[arg-type]
    with job.PredictionFile(out) as file:
        try:
            for batch in _track(batches, len(inputs), console):
                job.adapt_batch(adapter, batch, inputs, file, summary)
        finally:
            if save_state is not None:
                models.save_state(save_state, adapter, seen, method, parameters)
    summary.moved = job.measure_move(adapter, start)
    _report(summary, out, console)


def _track(batches: Any, total: int, console: "Console") -> Any:
    from rich.progress import Progress

    with Progress(console=console) as bars:
        bar = bars.add_task("Adapting", total=total)
        for batch in batches:
            yield batch
            bars.update(bar, advance=len(batch.positions) + len(batch.unreadable))


def _parse(settings: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; numbers and true/false are read as such."""
    import json

    parsed: dict[str, Any] = {}
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not sign or not name:
            raise ValueError(f"--set takes NAME=VALUE, got {setting!r}")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


def _report(summary: "Summary", out: Path, console: "Console") -> None:
    from rich.table import Table

    table = Table("part of the stream", "entropy / ln k", "kept %", box=None)
    size = max(1, -(-len(summary.kept) // 5))
    for first in range(0, len(summary.kept), size):
        part = slice(first, first + size)
        entropies, kept = summary.entropies[part], summary.kept[part]
        last = min(first + size, len(summary.kept))
        means = (sum(entropies) / len(entropies), 100 * sum(kept) / len(kept))
        table.add_row(f"batches {first + 1}-{last}", f"{means[0]:.3f}", f"{means[1]:.0f}")
    console.print(table)
    counts = ", ".join(f"{label}: {count}" for label, count in sorted(summary.histogram.items()))
    console.print(f"predictions by class: {counts}", highlight=False)
    console.print(f"parameters moved by {100 * summary.moved:.2f} % of their length", highlight=False)
    for name, reason in summary.unreadable[:10]:
        console.print(f"unreadable: {name}: {reason}", highlight=False, style="yellow")
    console.print(f"{summary.images} predictions in {out}, {len(summary.unreadable)} images left out")
