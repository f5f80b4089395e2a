"""The page of a store: complete, honest about what is missing, and every number traceable."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import cast

import pytest

from tests.report.fakes import BASIC, FakeStore
from tests.report.test_results import CONDITIONS
from ttvd.bench.packed import PackedRuns, pack_runs
from ttvd.bench.store import Figure, Store
from ttvd.report.document import Document, find_tables, render_document
from ttvd.report.study_page import make_page, write_report

METHODS = {"tent": "Minimises <entropy>.", "lame": "not here"}


class Reader(HTMLParser):
    """Collects what a page defines and what it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        for name in ("src", "href", "srcset", "action"):
            target = values.get(name) or ""
            (self.links if target.startswith("#") else self.outside).append(target)
        self.outside = [target for target in self.outside if target]


def make_store() -> FakeStore:
    store = FakeStore(("basic", BASIC), ("sizes", CONDITIONS.replace("noise and blur", "small batches")))
    keys = [m.spec.key for m in store.members("basic") if m.label == "tent" and m.role == "test"]
    store.break_run(keys[0], "Traceback\n  ...\nRuntimeError: <out of memory>\n")
    store.lose(keys[1])
    return store


@pytest.fixture(scope="module")
def store() -> FakeStore:
    return make_store()


@pytest.fixture(scope="module")
def page(store: FakeStore) -> Document:
    return make_page(cast(Store, store), methods=METHODS)


@pytest.fixture(scope="module")
def html(page: Document) -> str:
    return render_document(page)


def test_the_page_stands_alone(html: str) -> None:
    reader = Reader(html)
    assert all(target.startswith("data:") for target in reader.outside)
    assert "http" not in re.sub(r'"data:[^"]*"', "", html)
    assert len(reader.ids) == len(set(reader.ids))
    assert set(reader.links) <= {f"#{name}" for name in reader.ids}
    assert len(html) < 4_000_000


def test_every_number_leads_to_its_runs(html: str, store: FakeStore) -> None:
    cells = re.findall(r"<td data-value=\"[^\"]+\"[^>]*>(.*?)</td>", html.partition('id="runs"')[0])
    numbers = [cell for cell in cells if re.match(r"[^<]*\d+\.\d|<u>", re.sub(r"<a[^>]*>", "", cell))]
    assert len(numbers) > 150
    assert all('href="#s' in cell for cell in numbers)
    for name in store.recipes():
        for line in store.study(name).lines:
            for runs in line.runs.values():
                for run in runs:
                    assert run.spec.key in html
                    assert run.facts.order in html


def test_provenance_names_versions_device_data_and_setting(html: str) -> None:
    told = html.partition('id="runs"')[2]
    for text in (
        "torch 2.13.0",
        "AMD EPYC",
        "generated with CIFAR-10-C&#39;s constants",
        "digits-sla (weights 7f3a9c1d2b4e6f80)",
        "lr 0.0005",
        "iid, batches of 64",
        "2026-09-21",
    ):
        assert text in told


def test_failures_and_gaps_are_told(html: str) -> None:
    assert "Not complete: 1 failed run, 1 run not done" in html
    gaps = html.partition('id="gaps"')[2].partition("<section")[0]
    assert "RuntimeError: &lt;out of memory&gt;" in gaps
    assert "tent on" in gaps
    assert "1 failed, 1 not done" in gaps
    assert "†" in html


def test_both_calibration_errors_are_told_apart(html: str) -> None:
    assert "as some papers report it" in html
    assert "It is too high for small batches" in html


def test_rules_and_methods_are_explained(html: str) -> None:
    words = html.partition('id="words"')[2].partition("<section")[0]
    for text in ("It has seen the test labels", "this can be deployed", "Minimises &lt;entropy&gt;."):
        assert text in words
    assert "not here" not in words
    assert "oracle" not in words


def test_the_recipes_are_on_the_page(html: str) -> None:
    assert "[[methods]]" in html
    assert "ttvd bench basic.toml --store runs.db" in html


def test_each_study_has_its_figures(html: str) -> None:
    assert html.count("<figure>") == 2 * 5
    assert html.count('alt=""') == 0


def test_a_complete_store_says_so() -> None:
    store = FakeStore(("sizes", CONDITIONS), batches=3)
    page = make_page(cast(Store, store))
    assert [notice.good for notice in page.notices] == [True]
    assert page.title == "Digits under noise and blur"
    assert [section.title for section in page.sections] == [
        "Results",
        "Failures and missing runs",
        "What the words mean",
        "Where the numbers come from",
    ]
    assert page.tags == []


def test_a_store_whose_runs_are_all_to_come_still_has_a_page() -> None:
    store = FakeStore(("basic", BASIC))
    store.lose(*list(store.runs))
    html = render_document(make_page(cast(Store, store)))
    assert "None of its runs is done yet." in html
    assert "runs not done" in html


def test_only_the_recipes_that_were_asked_for() -> None:
    store = make_store()
    page = make_page(cast(Store, store), ["sizes"])
    assert page.facts[1] == ("Recipes", "sizes")


def test_figures_that_cannot_be_drawn_are_named() -> None:
    store = FakeStore(("sizes", CONDITIONS + '[[figures]]\nkind = "hologram"\n'), batches=3)
    store.pictures = [Figure("01-hologram", "sizes", {"kind": "hologram"}, b"")]
    html = render_document(make_page(cast(Store, store)))
    assert "The figure 01-hologram of the store cannot be drawn" in html
    assert "hologram" in html


def test_bad_questions_are_refused() -> None:
    empty = FakeStore()
    with pytest.raises(ValueError, match="holds no recipe"):
        make_page(cast(Store, empty))
    store = FakeStore(("sizes", CONDITIONS), batches=3)
    with pytest.raises(ValueError, match="no line is called 'tnet'"):
        make_page(cast(Store, store), reference="tnet")
    with pytest.raises(ValueError, match="no recipe 'size'"):
        make_page(cast(Store, store), ["size"])


def test_tables_are_written_beside_the_page(page: Document, tmp_path: Path) -> None:
    first, *others = write_report(page, tmp_path / "new" / "folder")
    assert first == tmp_path / "new" / "folder" / "index.html"
    names = {path.stem for path in others}
    assert names == {table.name for table in find_tables(page)}
    assert {"basic-summary", "basic-error", "basic-ece", "basic-paired", "sizes-conditions-error"} <= names
    assert {path.suffix for path in others} == {".csv", ".md", ".tex"}
    assert all(path.stat().st_size > 0 for path in others)


def test_the_same_store_gives_the_same_page() -> None:
    first, second = (
        render_document(make_page(cast(Store, FakeStore(("sizes", CONDITIONS), batches=3)))) for _ in "ab"
    )
    assert first == second


def test_a_failure_of_packed_runs_has_no_time(tmp_path: Path) -> None:
    fake = FakeStore(("basic", BASIC), batches=2)
    fake.break_run(next(iter(fake.runs)), "Traceback: it broke")
    packed = PackedRuns(pack_runs(cast(Store, fake), "basic", tmp_path)[0])
    for store, told in ((cast(Store, fake), True), (packed, False)):
        text = render_document(make_page(store))
        gaps = text.partition('id="gaps"')[2].partition("</section>")[0]
        assert ("When" in gaps) == told
        assert "1970" not in gaps


def test_tables_stay_in_their_folder(tmp_path: Path) -> None:
    name = "../../../escaped"  # as a store of somebody else may call a recipe
    fake = FakeStore((name, BASIC), batches=2)
    with pytest.raises(ValueError, match="without folders"):
        write_report(make_page(cast(Store, fake)), tmp_path / "in" / "out")
    assert not list(tmp_path.iterdir())
