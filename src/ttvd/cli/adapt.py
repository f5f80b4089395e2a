"""``ttvd adapt``: the deployer's command, from a folder of images to a file of predictions."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ttvd.deploy.inputs import Batch, Inputs
    from ttvd.deploy.states import Place, StateFile
    from ttvd.deploy.stream import PredictionFile, Summary
    from ttvd.methods import Adapter
    from ttvd.zoo.catalog import Source

SAVE_EVERY = 100  # batches between two saved states


def adapt(
    source: Path = typer.Argument(help="A folder of pictures, an .npy array, or a .txt list of files."),
    model: str = typer.Option(
        help="Zoo name, checkpoint file, or package.module:function that returns a model."
    ),
    out: Path = typer.Option(help="File for the predictions, .csv or .parquet."),
    weights: Path | None = typer.Option(None, help="Safetensors weights for package.module:function."),
    sites: Path | None = typer.Option(None, help="The model's sites; those of a checkpoint lie beside it."),
    method: str = typer.Option("ttvd", help="See `ttvd methods`."),
    set_: list[str] = typer.Option([], "--set", help="Parameter of the method, NAME=VALUE; repeat for more."),
    views: int = typer.Option(
        1, help="Views to aggregate around a method that knows nothing of views: 1, 2 or 4."
    ),
    classes: Path | None = typer.Option(None, help="Names of the classes, one a line, for a column more."),
    batch_size: int = typer.Option(64, min=1, help="Images that are predicted and adapted to together."),
    resize: int | None = typer.Option(None, min=1, help="Shorter side of pictures before cropping."),
    crop: int | None = typer.Option(None, min=1, help="Side of the square cut from the centre of pictures."),
    interpolation: str = typer.Option("bilinear", help="Of the resizing: bilinear or bicubic."),
    gray: bool = typer.Option(False, help="Turn pictures into one channel."),
    state: Path | None = typer.Option(None, help="Begin with this state."),
    save_state: Path | None = typer.Option(None, help="Save the state here, on the way and at the end."),
    resume: bool = typer.Option(
        False, help="Go on with a run that was cut off, from the state that it saved."
    ),
    unreadable: str = typer.Option("stop", help="What to do with images that cannot be used: stop or skip."),
    device: str = typer.Option("cpu", help="Where to compute, e.g. cuda."),
) -> None:
    """Predict a stream of images in order, adapting on the way.

    Confidences are the softmax of what the method returns; those of ttvd and its stages are calibrated on source data.
    """
    from rich.console import Console

    from ttvd.cli.arguments import check_device
    from ttvd.cli.extras import require
    from ttvd.deploy import job
    from ttvd.deploy.inputs import iterate_batches, open_inputs
    from ttvd.deploy.states import Place, StateFile
    from ttvd.methods import create, find_method
    from ttvd.methods.fitting import fit_to_method
    from ttvd.zoo.find import find_source

    if interpolation not in ("bilinear", "bicubic"):
        raise ValueError(f"--interpolation must be bilinear or bicubic, got {interpolation!r}")
    if unreadable not in ("stop", "skip"):
        raise ValueError(f"--unreadable must be stop or skip, got {unreadable!r}")
    if resume and (save_state is None or state is not None):
        raise ValueError(
            "--resume goes with --save-state FILE, the state that was saved on the way, and no --state"
        )
    if source.suffix != ".npy":
        require("PIL", "images")
    chosen, console = find_method(method), Console(stderr=True)
    found = find_source(model, weights, sites)
    _check_needs(chosen.name, chosen.needs, found)
    parameters = parse_settings(set_, chosen.parameters())
    seen = fit_to_method(found, chosen, views).to(check_device(device))
    adapter = create(method, seen, sites=found.sites, **parameters)
    inputs = open_inputs(source, resize=resize, crop=crop, interpolation=interpolation, gray=gray)  # type: ignore[arg-type]
    prepared = f"resize {resize}, crop {crop}, {interpolation}, {'gray' if gray else 'colours'}"
    stream = {"input": inputs.identity, "batch size": str(batch_size), "preparation": prepared}
    place = Place()
    if state is not None or resume:
        path = state or save_state
        assert path is not None
        place = StateFile(path, seen, method, parameters, stream).load(adapter, resume=resume)
    names = None if classes is None else classes.read_text(encoding="utf-8").splitlines()
    keeper = None if save_state is None else StateFile(save_state, seen, method, parameters, stream)
    start, summary = adapter.snapshot(), job.Summary()
    batches = iterate_batches(inputs, batch_size, on_unreadable=unreadable, start=place.position)  # type: ignore[arg-type]
    with job.PredictionFile(out, classes=names, rows=place.rows if resume else None) as file:
        tracked = _track(batches, inputs, place.position, console)
        _stream(adapter, tracked, inputs, file, summary, keeper, place)
    summary.moved = job.measure_move(adapter, start)
    _report(summary, out, file.rows, console)
    if file.rows == 0:
        raise typer.Exit(1)


def _check_needs(method: str, needs: frozenset[str], found: "Source") -> None:
    """What the method needs besides the model, in the words of the command line."""
    if "sites" in needs and found.sites is None:
        raise ValueError(f"{method} needs the sites of the model: --sites FILE, made by ttvd.estimate_sites")
    if more := needs & {"features", "fisher"}:
        raise ValueError(
            f"{method} needs {', '.join(more)} of the source data: use it from Python, ttvd.create"
        )


def _stream(
    adapter: "Adapter",
    batches: Iterator["Batch"],
    inputs: "Inputs",
    file: "PredictionFile",
    summary: "Summary",
    keeper: "StateFile | None",
    place: "Place",
) -> None:
    """All batches, with the state saved at the start (an unwritable path must show now), on the way and at the end.

    A batch that is cut off may have changed the adapter in part. So an interruption waits for its end; where it does
    not, or the batch fails, the state that was saved before stays.
    """
    from ttvd.deploy.states import Place
    from ttvd.deploy.stream import adapt_batch

    whole = True

    def save() -> None:
        if keeper is not None:
            keeper.save(adapter, place)

    with _Patience() as patience:
        try:
            for number, batch in enumerate(batches):
                if number == 0:
                    save()
                whole = False
                adapt_batch(adapter, batch, inputs, file, summary)
                place, whole = Place(batch.stop, file.rows), True
                if patience.asked:
                    raise KeyboardInterrupt
                if number % SAVE_EVERY == SAVE_EVERY - 1:
                    save()
        except BaseException:
            if whole:
                save()
            if file.rows:
                hint = "" if keeper is None else " --resume goes on."
                typer.echo(f"ttvd: stopped; {file.rows} rows are in {file.partial}.{hint}", err=True)
            raise
        save()


class _Patience:
    """Takes Ctrl-C and SIGTERM: the first one is noted, for the end of the batch; the second one interrupts at once.

    Attributes:
        asked: Whether somebody wants an end.
    """

    asked = False

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def _track(batches: Any, inputs: "Inputs", start: int, console: "Console") -> Iterator["Batch"]:
    from rich.progress import Progress

    with Progress(console=console) as bars:
        bar = bars.add_task("Adapting", total=len(inputs), completed=start)
        for batch in batches:
            yield batch
            bars.update(bar, completed=batch.stop)


def _report(summary: "Summary", out: Path, rows: int, console: "Console") -> None:
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
        console.print(f"left out: {name}: {reason}", highlight=False, style="yellow")
    earlier = f" ({rows - summary.images} of them from before)" if rows > summary.images else ""
    console.print(f"{rows} predictions in {out}{earlier}, {len(summary.unreadable)} images left out")
