"""The page: everything inside, nothing from elsewhere."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes

from ttvd.bench import Record, Row
from ttvd.data.digits import split_digits
from ttvd.demo.job import Domain, Entry, Results
from ttvd.demo.page import make_table, write_page
from ttvd.demo.sources import PLANS
from ttvd.metrics import RunningMetrics
from ttvd.nn.resnet import init_weights
from ttvd.report.page import Cell, Exhibit, Page, Panel, Strip, Table, encode, render
from ttvd.report.style import house_style, new_panel
from ttvd.source import estimate_sites
from ttvd.zoo.checkpoint import build_model, save_checkpoint

ENTRIES = (
    Entry("source", "source", "digits-plain"),
    Entry("SLA + bn", "bn", "digits-sla", views=4),
    Entry("ttvd", "ttvd", "digits-sla"),
)
TEMPERATURES = ("vd", "pd", "civd@-0.8", "civd@1", "cipd@-0.8", "cipd@1")
DOMAINS = (Domain("gaussian_noise", 5), Domain("contrast", 3))


class Reader(HTMLParser):
    """Collects elements and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


def record(right: int, kept: float) -> Record:
    """Two batches of ten, of which ``right`` samples each are right, with confidence 0.75."""
    metrics = RunningMetrics()
    labels = (torch.arange(10) >= right).long()
    metrics.update(labels, probs=torch.tensor([[0.75, 0.25]]).repeat(10, 1))
    return Record((Row(metrics.state(), kept, 0.5), Row(metrics.state(), kept, 0.002)))


def results() -> Results:
    right = {"source": (1, 2), "SLA + bn": (6, 7), "ttvd": (8, 6)}
    records = {
        (label, domain.label): record(count, 0.5 if label == "ttvd" else 1.0)
        for label, counts in right.items()
        for domain, count in zip(DOMAINS, counts, strict=True)
    }
    return Results(records, ENTRIES, DOMAINS, seed=0)


def draw() -> Axes:
    with house_style():
        ax = new_panel()
        ax.plot([0, 1], [0, 1])
    return ax


def test_pictures_are_the_same_bytes_every_time() -> None:
    first, second = encode(draw()), encode(draw())
    assert first == second
    assert b"<svg" in base64.b64decode(first.partition(",")[2])


def test_a_page_holds_what_it_is_given_and_escapes_it() -> None:
    exhibit = Exhibit(
        "A <b> title",
        "caption & more",
        [Strip([Panel(encode(draw()), 'say "this"')], 4, "heading")],
        details="small",
    )
    table = Table(["error"], [[Cell("?", "")], [Cell("<50>", 0.5, best=True)]])
    html = render(
        Page("Title", ["lead"], [("Seed", "7")], table, ["a note"], [("bn", "statistics")], [exhibit])
    )
    for text in (
        "1. A &lt;b&gt; title",
        "caption &amp; more",
        "heading",
        "small",
        "lead",
        "7",
        "a note",
        "statistics",
    ):
        assert text in html
    assert '<td data-value="0.5" class="best">&lt;50&gt;</td>' in html
    assert "say &#34;this&#34;" in html
    assert all(reference.startswith("data:") for reference in read(html).references)


def test_the_table_is_made_of_the_records() -> None:
    table = make_table(results())
    assert list(table.headings) == [
        "method",
        "model",
        "mean error (%)",
        "gaussian noise 5 (%)",
        "contrast 3 (%)",
        "ECE (%)",
        "ms per batch",
        "kept (%)",
    ]
    texts = [[cell.text for cell in row] for row in table.rows]
    assert texts[0] == ["source", "digits-plain", "85.00", "90.00", "80.00", "60.00", "2.0", "-"]
    assert texts[2] == ["ttvd", "digits-sla", "30.00", "20.00", "40.00", "10.00", "2.0", "50"]
    best = [[cell.text for cell in row if cell.best] for row in table.rows]
    assert best == [[], ["30.00", "10.00"], ["30.00", "20.00", "10.00"]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models with sites of their own: enough to draw, and made in a moment."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for plan in PLANS:
        images, labels, _, _ = split_digits(0, plan.classes)
        model = build_model(plan.card())
        init_weights(model, torch.Generator().manual_seed(0))
        model.eval()
        save_checkpoint(folder / f"{plan.name}.safetensors", model, plan.card())
        sites = estimate_sites(model, (images[:200], labels[:200]))
        sites = sites.with_temperatures(dict.fromkeys(TEMPERATURES, 1.0))
        sites.save(folder / f"{plan.name}.sites.safetensors")
    return folder


def test_the_demo_page_stands_alone(checkpoints: Path, tmp_path: Path) -> None:
    path = write_page(results(), tmp_path / "demo.html", folder=checkpoints, quick=True)
    html = path.read_text(encoding="utf-8")
    assert "http" not in re.sub(r'"data:[^"]*"', "", html)
    reader = read(html)
    assert all(reference.startswith("data:") for reference in reader.references)
    assert {"iframe", "object", "embed"}.isdisjoint(reader.tags)
    for entry in ENTRIES:
        assert f'data-value="{entry.label}"' in html
    gap = results().compare("ttvd", "SLA + bn")
    assert f"ttvd against SLA + bn: {100 * gap.difference:+.2f} points" in html
    assert len(re.findall("<h2>", html)) >= 5
    assert reader.tags.count("img") >= 11 + 3 + 6 + len(DOMAINS) + len(ENTRIES)
    assert len(html) < 4_000_000
