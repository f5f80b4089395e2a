"""``ttvd adapt``: from a folder of images to a file of predictions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ttvd.deploy import BatchResult, Inputs, StreamSummary
    from ttvd.methods import GuardStatus, Method
    from ttvd.zoo.catalog import Source


FELL_BACK = 3
"""Exit code of a stream on which the guard went back to the source."""


def adapt(
    source: Path = typer.Argument(help="Folder of pictures, .npy array, or .txt list of files."),
    model: str = typer.Option(
        help="Name of a checkpoint, checkpoint file, or package.module:function that returns a model."
    ),
    out: Path = typer.Option(help="File for the predictions, .csv or .parquet."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace output files that exist."),
    weights: Path | None = typer.Option(None, help="Safetensors weights for package.module:function."),
    sites: Path | None = typer.Option(
        None, help="Sites of the model; default: the file beside its checkpoint."
    ),
    method: str = typer.Option("ttvd", help="Name of a method (see `ttvd methods`) or package.module:Class."),
    param: list[str] = typer.Option([], help="Parameter of the method, NAME=VALUE; can be repeated."),
    views: int = typer.Option(
        1, help="Number of views (1, 2 or 4) that are aggregated for a method that does not do so itself."
    ),
    classes: Path | None = typer.Option(
        None, help="Text file with the name of a class on each line; adds a column."
    ),
    batch_size: int = typer.Option(
        64, min=1, help="Number of images that are predicted and adapted to together."
    ),
    size: int | None = typer.Option(
        None, min=1, help="Resize pictures to this size; short for --resize and --crop."
    ),
    resize: int | None = typer.Option(
        None, min=1, help="Resize the shorter side of pictures to this length."
    ),
    crop: int | None = typer.Option(None, min=1, help="Then cut a square of this side from the centre."),
    interpolation: Literal["bilinear", "bicubic"] = typer.Option(
        "bilinear", help="Interpolation of --resize."
    ),
    gray: bool = typer.Option(False, "--gray", help="Convert pictures to one channel."),
    ignore_orientation: bool = typer.Option(
        False, "--ignore-orientation", help="Do not turn pictures upright as their EXIF data say."
    ),
    max_pixels: int | None = typer.Option(
        None, min=1, help="Limit on the pixels of an image, which bounds the memory; default: 67 million."
    ),
    state: Path | None = typer.Option(None, help="Begin with this state."),
    save_state: Path | None = typer.Option(
        None, help="Save the state to this file, on the way and at the end."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Continue an interrupted run from the state in --save-state."
    ),
    unreadable: Literal["stop", "skip"] = typer.Option(
        "stop", help="What to do with images, and with folders below SOURCE, that cannot be used."
    ),
    guard: bool | None = typer.Option(
        None,
        "--guard/--no-guard",
        help="Stop the adapter where it does harm, and say so; on by default for ttvd.",
    ),
    device: str = typer.Option("cpu", help="Device to compute on, for example cuda."),
) -> None:
    """Predict a stream of images in order and adapt on the way.

    Confidences are the softmax of the logits that the method returns. Those of ttvd and of its ablations are
    calibrated on source data. If the guard had to go back to the source, the exit code is 3.
    """
    from rich.console import Console

    from ttvd.cli.arguments import add_current_folder, check_device, parse_parameters, require
    from ttvd.data.decoding import MAX_PIXELS
    from ttvd.data.loading import describe_skipped
    from ttvd.deploy import StateFile, adapt_stream, open_inputs
    from ttvd.deploy.states import identify
    from ttvd.methods import create, find_method
    from ttvd.methods.registry import prepare_model
    from ttvd.zoo.catalog import load_source

    if resume and (save_state is None or state is not None):
        raise ValueError(
            "--resume needs --save-state FILE, the state that the run saved, and excludes --state"
        )
    inputs_by_option = {"SOURCE": source, "--model": Path(model), "--weights": weights, "--sites": sites}
    _check_files(out, save_state, inputs_by_option | {"--classes": classes}, state)
    goes_on = resume or overwrite or (save_state == state)
    if save_state is not None and save_state.is_file() and not goes_on:
        raise FileExistsError(
            f"{save_state} exists; continue its run with --resume, or replace it with --overwrite"
        )
    if size is not None and (resize is not None or crop is not None):
        raise ValueError("--size excludes --resize and --crop")
    if source.suffix != ".npy":
        require("PIL", "images")
    if out.suffix == ".parquet":
        require("pyarrow", "parquet")
    add_current_folder()
    chosen, found = find_method(method), load_source(model, weights, sites)
    _check_needs(chosen, found)
    parameters = parse_parameters(param, chosen)
    seen = prepare_model(found, chosen, views).to(check_device(device))
    adapter = create(method, seen, sites=found.sites, guard=guard, **parameters)
    resize, crop = resize or size, crop or size
    # What Pillow finds strange in a file is no news: the picture is right, or the reader says why it is refused.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    inputs = open_inputs(
        source,
        resize=resize,
        crop=crop,
        interpolation=interpolation,
        gray=gray,
        apply_orientation=not ignore_orientation,
        max_pixels=max_pixels or MAX_PIXELS,
        on_unreadable=unreadable,
    )
    # The preparation changes what the model sees, so a run is resumed with the same one only.
    prepared = f"resize {resize}, crop {crop}, {interpolation}, {'gray' if gray else 'colours'}"
    prepared += ", orientation ignored" if ignore_orientation else ", upright"
    inputs = replace(inputs, identity=f"{inputs.identity}, {prepared}")
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if inputs.skipped:
        console.print(describe_skipped(inputs.skipped), style="yellow", soft_wrap=True)
    _check_size(inputs, found)
    identity = _identify_more(chosen, found, views) | identify(method, parameters, seen)
    identity["guard"] = "off" if adapter.guard is None else "on"
    if state is not None:
        StateFile(state, identity).load(adapter)
    with _Progress(console, len(inputs)) as progress:
        summary = adapt_stream(
            adapter,
            inputs,
            out=out,
            classes=None if classes is None else _read_classes(classes),
            batch_size=batch_size,
            on_unreadable=unreadable,
            state=None if save_state is None else StateFile(save_state, identity),
            resume=resume,
            overwrite=overwrite,
            callbacks=[progress.show],
        )
    _print_summary(summary, out, console)
    if summary.rows == 0:
        raise typer.Exit(1)
    if summary.guard is not None and summary.guard.returns:
        raise typer.Exit(FELL_BACK)


def _check_files(
    out: Path, save_state: Path | None, inputs: Mapping[str, Path | None], state: Path | None
) -> None:
    """Refuse an output that would replace an input. Only the state that a run begins with may be replaced."""
    from ttvd.deploy.predictions import partial_path
    from ttvd.files import is_same_file

    outputs = {"--out": out, "the rows of --out": partial_path(out), "--save-state": save_state}
    for option, path in outputs.items():
        more = {} if option == "--save-state" else {"--state": state}
        for other, read in {**inputs, **more}.items():
            if path is not None and read is not None and is_same_file(path, read):
                raise ValueError(f"{option} and {other} are the same file, {path}; choose another output")


def _read_classes(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text file in UTF-8 with a name on each line: {error}") from error


def _identify_more(method: Method, source: Source, views: int) -> dict[str, str]:
    """Describe what the results of a command depend on beside the model, the method and its parameters."""
    from ttvd.bench.resources import hash_sites, list_site_parts

    sites = source.sites if "sites" in method.needs else None
    digest = "none" if sites is None else hash_sites(sites, list_site_parts(sites))
    return {"method revision": str(method.revision), "views": str(views), "sites": digest}


def _check_needs(method: Method, source: Source) -> None:
    """Refuse a method that needs more than the command line can give."""
    if "sites" in method.needs and source.sites is None:
        raise ValueError(
            f"{method.name} needs the sites of the model: --sites FILE, made by ttvd.estimate_sites"
        )
    if missing := sorted(method.needs & {"features", "fisher"}):
        raise ValueError(
            f"{method.name} needs {', '.join(missing)} of the source data: use ttvd.create in Python"
        )


def _check_size(inputs: Inputs, source: Source) -> None:
    """Refuse images of another shape than the card of the model says. The first readable image counts."""
    expected = None if source.card is None else source.card.input_shape
    for position in range(min(len(inputs), 64)) if expected is not None else ():
        try:
            shape = tuple(inputs.read(position).shape)
        except (ValueError, OSError):
            continue  # the stream says what is wrong with this image
        if shape != expected:
            raise ValueError(
                f"the model takes images of shape (c, h, w) = {expected}, {inputs.names[position]} has {shape}; "
                "--size resizes pictures, --gray makes one channel (ttvd.deploy.adapt_stream takes any size)"
            )
        return


class _Progress:
    """A progress bar, and a message about the rows that are kept if the stream is interrupted."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import Progress

        self._bars = Progress(console=console)
        self._bar = self._bars.add_task("Adapting", total=total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._bars.stop()
        for note in getattr(error, "__notes__", ()):
            typer.echo(f"ttvd: stopped; {note}", err=True)

    def show(self, result: BatchResult) -> None:
        self._bars.update(self._bar, completed=result.position.images)


def _print_summary(summary: StreamSummary, out: Path, console: Console) -> None:
    from rich.table import Table

    from ttvd.files import escape_cell

    table = Table("part of the stream", "entropy / ln k", "kept %", box=None)
    batches = len(summary.kept)
    for first in range(0, batches, step := max(1, math.ceil(batches / 5))):
        last = min(first + step, batches)
        entropy = sum(summary.entropies[first:last]) / (last - first)
        kept = sum(summary.kept[first:last]) / (last - first)
        table.add_row(f"batches {first + 1}-{last}", f"{entropy:.3f}", f"{100 * kept:.0f}")
    console.print(table)
    counts = ", ".join(f"{label}: {count}" for label, count in sorted(summary.histogram.items()))
    console.print(f"predictions by class: {counts}")
    console.print(f"parameters moved by {100 * summary.moved:.2f} % of their norm")
    if summary.guard is not None:
        console.print(describe_guard(summary.guard), soft_wrap=True)
    for name, reason in summary.unreadable[:10]:
        console.print(f"left out: {escape_cell(name)}: {reason}", style="yellow", soft_wrap=True)
    earlier = summary.rows - summary.images
    note = f" ({earlier} of them from before)" if earlier else ""
    console.print(f"{summary.rows} predictions in {out}{note}, {len(summary.unreadable)} images left out")


def describe_guard(status: GuardStatus) -> str:
    """Return one line about what the guard saw and did.

    Example:
        >>> from ttvd.methods import GuardStatus
        >>> status = GuardStatus("adapting", "", 40, 0, 0, 0, 9.1, 9.0, 1.02, 0.97, None)
        >>> describe_guard(status)
        'guard: adapting, never acted; information 1.02 and agreement 0.97 with the source'
    """
    acted = {
        "freezes": status.freezes,
        "rollbacks": status.rollbacks,
        "returns to the source": status.returns,
    }
    words = ", ".join(f"{count} {name}" for name, count in acted.items() if count)
    done = f"{words}; last because {status.reason}" if words else "never acted"
    seen = f"information {status.information:.2f} and agreement {status.agreement:.2f} with the source"
    return f"guard: {status.state}, {done}; {seen}"
