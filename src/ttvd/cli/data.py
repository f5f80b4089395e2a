"""``ttvd data``, ``ttvd corrupt`` and ``ttvd contact-sheet``: data sets and their corrupted versions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

data_app = typer.Typer(help="Download the official data sets.", no_args_is_help=True)
_FROST = "Sheets of the frost: procedural, or pictures (needs the extra corruptions)."
_NAMES = "Names with commas, all (the 15), extra (the other 4) or every (all 19)."


@data_app.command("get")
def get_data(
    name: str = typer.Argument(help="Name of the set; `ttvd data list` shows the names."),
    root: Path = typer.Option(..., help="Folder for the sets."),
) -> None:
    """Download a set, check it and put it where ttvd finds it. An interrupted download is continued."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from ttvd.data.catalog import find_published
    from ttvd.data.download import download_set, is_complete

    existed = is_complete(find_published(name), root)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console()
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file)
            bars.update(tasks[file], completed=done, total=total)

        folder = download_set(name, root, progress=show)
    state = "was there already; delete it to download it again" if existed else "is complete and checked"
    console.print(f"{name} {state}: {folder.resolve()}", soft_wrap=True, highlight=False, markup=False)


@data_app.command("list")
def list_data(
    root: Path | None = typer.Option(None, help="Also show which sets are complete in this folder."),
) -> None:
    """List the sets that can be downloaded, with their size and their web page."""
    from rich.console import Console
    from rich.table import Table

    from ttvd.data.download import list_sets

    table = Table("set", "download", "web page", *(["complete"] if root else []), box=None)
    for published, complete in list_sets(root):
        state = [] if complete is None else ["yes" if complete else "no"]
        table.add_row(published.name, published.size, published.page, *state)
    Console().print(table)


def corrupt_set(
    source: Path | None = typer.Argument(
        None, help="Folder or file of the clean set; the digits by default."
    ),
    out: Path = typer.Option(..., help="Folder of the result."),
    name: str | None = typer.Option(
        None, "--set", help="cifar10, cifar100, mnist, fashion-mnist, imagenet, folder, arrays or digits."
    ),
    split: str = typer.Option("test", help="test or train."),
    corruptions: str = typer.Option("all", help=_NAMES),
    severities: str = typer.Option("1,2,3,4,5", help="Severities from 1 to 5, with commas."),
    seed: int = typer.Option(0, min=0, help="Seed of the random fields."),
    constants: str | None = typer.Option(
        None, help="Table of constants, cifar or imagenet; by default that of the layout."
    ),
    layout: str | None = typer.Option(
        None, help="cifar (.npy files) or folder (image files); by default that of the set."
    ),
    image_format: str = typer.Option("jpeg", "--format", help="Format of image files: jpeg or png."),
    frost: str = typer.Option("procedural", help=_FROST),
    device: str = typer.Option("cpu", help="Device that computes the corruptions."),
    workers: int = typer.Option(2, min=0, help="Threads that decode and encode image files."),
    resize: int | None = typer.Option(
        None, min=0, help="Shorter side of image files, 0 to keep it; 256 for imagenet sets, else 0."
    ),
    crop: int | None = typer.Option(
        None,
        min=0,
        help="Side of the square cut from image files, 0 for none; 224 for imagenet sets, else 0.",
    ),
) -> None:
    """Write the corrupted version of a clean set, with a manifest. An interrupted run is continued."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from ttvd.data.corruptions import select_corruptions
    from ttvd.data.export import ExportSettings, export_set, open_clean_set, parse_severities
    from ttvd.data.loading import describe_skipped
    from ttvd.data.sets import ImageFolder

    clean = open_clean_set(source, name, cast(Any, split), resize=resize, crop=crop)
    form = layout or ("folder" if isinstance(clean, ImageFolder) else "cifar")
    settings = ExportSettings(
        corruptions=select_corruptions(corruptions),
        severities=parse_severities(severities),
        seed=seed,
        constants=cast(Any, constants or ("imagenet" if form == "folder" else "cifar")),
        frost=cast(Any, frost),
        device=device,
    )
    console = Console()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        total = len(settings.corruptions) * len(settings.severities) * len(clean)
        bar = bars.add_task("Corrupting", total=total)
        folder = export_set(
            clean,
            out,
            settings,
            layout=cast(Any, form),
            image_format=cast(Any, image_format),
            workers=workers,
            progress=lambda corruption, count: bars.update(bar, advance=count, description=corruption),
        )
    height, width = clean.floats([0]).shape[2:]
    done = (
        f"{len(clean):,} images of {width} x {height}, {len(settings.corruptions)} corruptions, "
        f"severities {list(settings.severities)}, {settings.constants} constants"
    )
    console.print(f"{done}: {folder.resolve()}", soft_wrap=True, highlight=False, markup=False)
    if isinstance(clean, ImageFolder) and clean.skipped:
        console.print(describe_skipped(clean.skipped), soft_wrap=True, highlight=False, markup=False)


def draw_contact_sheet(
    out: Path = typer.Option(..., help="File for the figure; its suffix decides the format."),
    image: Path | None = typer.Option(None, help="Image to corrupt; a digit by default."),
    corruptions: str = typer.Option("every", help=_NAMES),
    constants: str = typer.Option("imagenet", help="Table of constants: cifar or imagenet."),
    seed: int = typer.Option(0, min=0, help="Seed of the random fields."),
    size: int = typer.Option(224, min=8, help="Side of the square that is cut from the image."),
    frost: str = typer.Option("procedural", help=_FROST),
) -> None:
    """Draw one image under corruptions at every severity."""
    from rich.console import Console

    from ttvd.data.corruptions import select_corruptions
    from ttvd.data.digits import load_digits_5k
    from ttvd.data.loading import read_image
    from ttvd.report.contact_sheet import contact_sheet

    console = Console()
    clean = load_digits_5k()[0][2500] if image is None else read_image(image, resize=size, crop=size)
    with console.status("Drawing"):
        contact_sheet(
            clean,
            out,
            names=select_corruptions(corruptions),
            constants=cast(Any, constants),
            seed=seed,
            frost=cast(Any, frost),
        )
    console.print(f"The contact sheet: {out.resolve()}", soft_wrap=True, highlight=False, markup=False)
