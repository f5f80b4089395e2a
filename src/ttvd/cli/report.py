"""``ttvd report``: write the page and the tables of a store."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ttvd.bench.store import Reader
    from ttvd.report.document import Document


def report(
    store: Path = typer.Argument(help="Store of `ttvd bench`, or a .csv file of packed runs."),
    out: Path = typer.Option(Path("out/report"), help="Folder for the page and the tables."),
    against: Path | None = typer.Option(
        None, "--against", "--since", help="Another store: write what changed against it instead."
    ),
    recipe: list[str] = typer.Option([], help="Show only this recipe of the store; repeat for more."),
    reference: str | None = typer.Option(
        None, help="Label of the line that the others are compared with; that of the recipe by default."
    ),
) -> None:
    """Write one self-contained page (index.html, or changes.html with --against) and its tables.

    The tables are in OUT/tables as CSV, Markdown and LaTeX (for the package booktabs).
    """
    from rich.console import Console

    from ttvd.bench.packed import open_runs
    from ttvd.cli.arguments import require

    for module in ("matplotlib", "jinja2"):
        require(module, "report")
    if against is not None and (recipe or reference):
        raise ValueError("--against compares whole stores; leave --recipe and --reference out")
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file; give a folder, which is created if needed")
    console = Console()
    with open_runs(store) as opened:
        if against is None:
            with console.status("Drawing"):
                page = _make_page(opened, recipe, reference)
            _write(page, out, "index.html", console)
            return
        with open_runs(against) as other, console.status("Comparing"):
            from ttvd.report.diff import make_diff_page

            names = (store.name, against.name) if store.name != against.name else (str(store), str(against))
            page = make_diff_page(opened, other, names)
        _write(page, out, "changes.html", console)


def _make_page(store: "Reader", recipes: list[str], reference: str | None) -> "Document":
    from ttvd.methods import list_methods
    from ttvd.report.study import make_page

    summaries = {name: method.summary for name, method in list_methods().items()}
    return make_page(store, recipes, reference=reference, methods=summaries)


def _write(page: "Document", out: Path, name: str, console: "Console") -> None:
    from ttvd.report.html import write_report

    first, *tables = write_report(page, out, name)
    for notice in page.notices:
        console.print(notice.text, highlight=False, markup=False, soft_wrap=True)
    if tables:
        console.print(
            f"{len(tables)} table files in {tables[0].parent.resolve()}", soft_wrap=True, highlight=False
        )
    console.print(f"The page to open: [bold]{first.resolve()}[/bold]", soft_wrap=True, highlight=False)
