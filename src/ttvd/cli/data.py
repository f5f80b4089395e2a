"""``ttvd data``, ``ttvd corrupt`` and ``ttvd contact-sheet``: sets, their corrupted versions, and a look at them."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ttvd.data.export import Layout, Plan
    from ttvd.data.sets import ImageFolder, ImageSet

data_app = typer.Typer(help="Get the official data sets.", no_args_is_help=True)


@data_app.command("get")
def get_data(
    name: str = typer.Argument(help="Name of the set; `ttvd data list` shows them."),
    root: Path = typer.Option(..., help="Folder for the sets."),
) -> None:
    """Download a set, check it and lay it out where ttvd finds it; goes on where it was interrupted."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from ttvd.data.fetch import fetch_set, find_source, is_complete

    source = find_source(name)
    home = root / source.home
    there = all(is_complete(item, home) for item in source.downloads)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console()
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file)
            bars.update(tasks[file], completed=done, total=total)

        folder = fetch_set(name, root, progress=advance)
    state = "was there already; delete it to get it again" if there else "is there, checked"
    console.print(f"{name} {state}: [bold]{folder.resolve()}[/bold]", soft_wrap=True, highlight=False)


@data_app.command("list")
def list_data(
    root: Path | None = typer.Option(None, help="Also show which sets are complete in this folder."),
) -> None:
    """List the sets that can be had, their size and their home page."""
    from rich.console import Console
    from rich.table import Table

    from ttvd.data.fetch import SOURCES, is_complete

    table = Table("set", "download", "home page", *(["there"] if root else []), box=None)
    for source in SOURCES.values():
        row = [source.name, source.size, source.page]
        if root is not None:
            home = root / source.home
            row.append("yes" if all(is_complete(item, home) for item in source.downloads) else "no")
        table.add_row(*row)
    Console().print(table)


def corrupt_set(
    source: Path | None = typer.Argument(None, help="Folder or file of the clean set; none for the digits."),
    out: Path = typer.Option(..., help="Folder of the result."),
    name: str | None = typer.Option(
        None, "--set", help="cifar10, cifar100, mnist, fashion-mnist, imagenet, folder, arrays or digits."
    ),
    split: str = typer.Option("test", help="test or train."),
    corruptions: str = typer.Option("common", help="Names with commas, `common` (the 15) or `all` (19)."),
    severities: str = typer.Option("1,2,3,4,5", help="From 1 to 5, with commas."),
    seed: int = typer.Option(0, min=0, help="Seed of the random fields."),
    constants: str | None = typer.Option(None, help="cifar or imagenet; by the layout unless given."),
    layout: str | None = typer.Option(None, help="cifar (.npy files) or folder (pictures); by the set."),
    image_format: str = typer.Option("jpeg", "--format", help="Of pictures: jpeg or png."),
    frost: str = typer.Option("procedural", help="procedural, or pictures (needs the extra corruptions)."),
    device: str = typer.Option("cpu", help="Where the corruptions are computed."),
    workers: int = typer.Option(2, min=0, help="Processes that decode pictures."),
    resize: int | None = typer.Option(
        None, min=0, help="Shorter side of pictures, 0 to keep it; 256 for imagenet sets, else 0."
    ),
    crop: int | None = typer.Option(
        None, min=0, help="Side of the square cut from pictures, 0 for none; 224 for imagenet sets, else 0."
    ),
) -> None:
    """Write the corrupted version of a clean set, with a manifest; goes on where it was interrupted."""
    from ttvd.data.export import Plan, read_names, read_severities
    from ttvd.data.sets import ImageFolder

    clean = _prepare(_load_clean(source, name, split), name, resize, crop)
    form = layout or ("folder" if isinstance(clean, ImageFolder) else "cifar")
    plan = Plan(
        corruptions=read_names(corruptions),
        severities=read_severities(severities),
        seed=seed,
        constants=cast(
            Literal["cifar", "imagenet"], constants or ("imagenet" if form == "folder" else "cifar")
        ),
        frost=cast(Literal["procedural", "pictures"], frost),
        device=device,
    )
    _export(clean, out, plan, cast("Layout", form), cast(Literal["jpeg", "png"], image_format), workers)


def draw_contact_sheet(
    out: Path = typer.Option(..., help="Picture to write; its suffix decides the format."),
    image: Path | None = typer.Option(None, help="Picture to corrupt; a digit unless given."),
    constants: str = typer.Option("imagenet", help="Table of constants: cifar or imagenet."),
    seed: int = typer.Option(0, min=0, help="Seed of the random fields."),
    size: int = typer.Option(224, min=8, help="Side of the square that is cut from the picture."),
    frost: str = typer.Option("procedural", help="procedural, or pictures (needs the extra corruptions)."),
) -> None:
    """Draw one picture under every corruption at every severity."""
    from rich.console import Console

    from ttvd.data.digits import load_digits_5k
    from ttvd.data.sets import read_image
    from ttvd.report.contact_sheet import contact_sheet

    console = Console()
    clean = load_digits_5k()[0][2500] if image is None else read_image(image, resize=size, crop=size)
    with console.status("Drawing"):
        contact_sheet(
            clean,
            out,
            constants=cast(Literal["cifar", "imagenet"], constants),
            seed=seed,
            frost=cast(Literal["procedural", "pictures"], frost),
        )
    console.print(f"The contact sheet: [bold]{out.resolve()}[/bold]", soft_wrap=True)


def _load_clean(source: Path | None, name: str | None, split: str) -> "ImageSet | ImageFolder":
    from ttvd.data.sets import load_set

    if source is None and name not in (None, "digits"):
        raise ValueError(f"the set {name} needs the folder it lies in: ttvd corrupt FOLDER --set {name}")
    if source is not None and not source.exists():
        raise FileNotFoundError(f"no file or folder {source}")
    guess = "digits" if source is None else "folder" if source.is_dir() else "arrays"
    return load_set(name or guess, source or Path(), cast(Literal["train", "test"], split))


def _prepare(
    clean: "ImageSet | ImageFolder", name: str | None, resize: int | None, crop: int | None
) -> "ImageSet | ImageFolder":
    from ttvd.data.sets import ImageFolder

    if not isinstance(clean, ImageFolder):
        if resize is not None or crop is not None:
            raise ValueError(f"--resize and --crop are for folders of pictures, {clean.name} is an array")
        return clean
    usual = (clean.resize, clean.crop) if (name or "").startswith("imagenet") else (None, None)
    given = [
        default if side is None else side or None for side, default in zip((resize, crop), usual, strict=True)
    ]
    clean = clean.prepared(*given)
    clean.check_size()
    return clean


def _export(
    clean: "ImageSet | ImageFolder",
    out: Path,
    plan: "Plan",
    layout: "Layout",
    image_format: Literal["jpeg", "png"],
    workers: int,
) -> None:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from ttvd.data.export import export_set

    console = Console()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        total = len(plan.corruptions) * len(plan.severities) * len(clean)
        bar = bars.add_task("Corrupting", total=total)

        def advance(corruption: str, count: int) -> None:
            bars.update(bar, advance=count, description=corruption)

        folder = export_set(
            clean, out, plan, layout=layout, image_format=image_format, workers=workers, advance=advance
        )
    height, width = clean.floats([0]).shape[2:]
    done = (
        f"{len(clean):,} images of {width} x {height}, {len(plan.corruptions)} corruptions, "
        f"severities {list(plan.severities)}, {plan.constants} constants"
    )
    console.print(f"{done}: [bold]{folder.resolve()}[/bold]", soft_wrap=True, highlight=False)
