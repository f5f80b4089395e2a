"""Tables of streams whose shift comes and goes, against means by hand."""

from pathlib import Path

import pytest

from tests.helpers.bench import shared_resources
from tests.helpers.report import BASIC, FakeStore
from ttvd.bench.packed import PackedRuns, pack_runs
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Facts, Run, Spec
from ttvd.bench.store import Store
from ttvd.bench.study import study
from ttvd.report.changes import list_changes
from ttvd.report.document import Table
from ttvd.report.export import render_markdown
from ttvd.report.html import render_html
from ttvd.report.results import Results
from ttvd.report.results_folder import make_document
from ttvd.report.study import make_page

TEXT = """
title = "Coming and going"
data = {{set = "digits", corruptions = ["fog", "snow"]}}
seeds = [0, 1]
checkpoints = {{plain = "digits-plain", sites = "digits-sla"}}
stream = {{{stream}}}
[[methods]]
name = ["source", "tent"]
[[methods]]
name = "tent"
label = "no source"
checkpoint = "digits-sla"
views = 4
"""
ONSET = 'join = "onset", lengths = "1/3/3"'
# Wrong predictions of 64 by method: batches before the shift, in it, and after it.
WRONG = {
    "source": ([2], [40, 40, 40], [2, 4, 6]),
    "tent": ([2], [30, 26, 20], [20, 12, 6]),
}
FRESH = {"source": [40, 40, 40], "tent": [22, 18, 16]}


def make_run(spec: Spec) -> Run:
    """A run with the wrong predictions above, one more in each batch of snow, and two more in each with seed 1."""
    before, during, after = WRONG[spec.method]
    if spec.join == "recurring":
        rounds = spec.options["rounds"]
        wrong = [(domain, 10 * (number + 1)) for number in range(rounds) for domain in (0, 1)]
    elif spec.options.get("part") == "shifted":
        wrong = [(1, count) for count in FRESH[spec.method]]
    else:
        groups = ((0, before), (1, during), (0, after))
        wrong = [(domain, count) for domain, counts in groups for count in counts]
    more = (spec.domains[-1].corruption == "snow") + 2 * spec.seed
    rows = [Row(_make_state(count + more), 1.0, 0.01, domain) for domain, count in wrong]
    facts = Facts(f"order {spec.seed}", "cpu", 1, {"ttvd": "0"}, 1.7e9, 1.0, None, 1.0, 1.0)
    return Run(spec, Record(tuple(rows)), facts)


def _make_state(wrong: int) -> dict[str, float | list[float]]:
    right = 64 - wrong
    sums = {"nll_sum": 1.0, "brier_sum": 1.0, "batch_ece_sum": 1.0}
    bins = {"bin_count": [64.0], "bin_confidence": [32.0], "bin_correct": [float(right)]}
    return {"n": 64, "correct": right, **sums, **bins}


def fill(path: Path, stream: str, lose: str = "") -> Store:
    """A store with all runs of the recipe; without the fresh starts, or others of a role, of seed 1."""
    text = TEXT.format(stream=stream)
    members = plan(parse_recipe(text, "changes"), shared_resources())
    store = Store(path / "runs.db")
    store.save_recipe("changes", text, members)
    for member in members:
        if (member.role, member.spec.seed) != (lose, 1):
            store.add(make_run(member.spec))
    return store


def read_cells(table: Table) -> dict[str, list[str]]:
    """The texts of the numbers, by line."""
    return {row[0].text: [cell.text for cell in row[2:]] for row in table.rows}


def test_the_table_of_an_onset_has_the_means_that_a_hand_gets(tmp_path: Path) -> None:
    with fill(tmp_path, ONSET) as store:
        (change,) = list_changes(Results(study(store, "changes")))
    assert change.table.spans == [
        ("", 2),
        ("shifted (%)", 2),
        ("above a fresh start (points)", 2),
        ("clean again (%)", 2),
        ("above source (points)", 2),
    ]
    # Each mean has 1.5 wrong predictions more than the numbers above; differences have not.
    share = {count: f"{100 * (count + 1.5) / 64:.1f}" for count in (3, 6, 16, 20, 28, 40)}
    cells = read_cells(change.table)
    assert cells["tent"] == [
        *(share[28], share[20]),
        *(f"{100 * 8 / 64:+.1f}", f"{100 * 4 / 64:+.1f}"),
        *(share[16], share[6]),
        *(f"{100 * 13 / 64:+.1f}", "+0.0"),
    ]
    assert cells["source"] == [share[40], share[40], "+0.0", "+0.0", share[3], share[6], "+0.0", "+0.0"]
    assert cells["no source"][:-2] == cells["tent"][:-2]
    assert cells["no source"][-2:] == ["-", "-"]
    notes = {cell.note for row in change.table.rows for cell in row[2:] if cell.value != ""}
    assert notes == {f"±{100 * 2 / 64 / 2**0.5:.1f}", "±0.0"}


def test_missing_fresh_starts_leave_a_mark(tmp_path: Path) -> None:
    with fill(tmp_path, ONSET, lose="fresh") as store:
        (change,) = list_changes(Results(study(store, "changes")))
    assert read_cells(change.table)["tent"][2:4] == ["+12.5 †", "+6.2 †"]
    assert "†" not in "".join(read_cells(change.table)["tent"][:2])


def test_lengths_have_a_table_each(tmp_path: Path) -> None:
    with fill(tmp_path, 'join = "onset", lengths = ["1/3/3", "2/3/3"]') as store:
        changes = list_changes(Results(study(store, "changes")))
    assert [change.title for change in changes] == [
        "After a change: lengths 1/3/3",
        "After a change: lengths 2/3/3",
    ]
    assert [change.table.name for change in changes] == ["changes-changes-1", "changes-changes-2"]


def test_the_table_of_a_recurring_stream_has_a_column_for_each_round(tmp_path: Path) -> None:
    with fill(tmp_path, 'join = "recurring", rounds = 3') as store:
        (change,) = list_changes(Results(study(store, "changes")))
    assert change.table.spans == [("", 2), ("error (%) in round", 3)]
    assert read_cells(change.table)["tent"] == [f"{100 * (10 * n + 2) / 64:.1f}" for n in (1, 2, 3)]


def test_the_table_of_a_rare_stream_tells_the_two_domains_apart(tmp_path: Path) -> None:
    with fill(tmp_path, 'join = "rare", every = 3') as store:
        (change,) = list_changes(Results(study(store, "changes")))
    tent = read_cells(change.table)["tent"]
    assert tent[0] == f"{100 * (76 / 3 + 1.5) / 64:.1f}"
    assert tent[1] == f"{100 * (40 / 4 + 1.5) / 64:.1f}"
    assert tent[2:] == [f"{100 * (76 - 120) / 3 / 64:+.1f}", f"{100 * (40 - 14) / 4 / 64:+.1f}"]


def test_other_studies_have_no_such_table() -> None:
    assert list_changes(Results(FakeStore(("basic", BASIC)).study("basic"))) == []


@pytest.mark.parametrize("stream", [ONSET, 'join = "recurring", rounds = 3', 'join = "rare", every = 3'])
def test_pages_and_documents_show_it_from_a_store_and_from_packed_runs(tmp_path: Path, stream: str) -> None:
    with fill(tmp_path, stream) as store:
        packed = PackedRuns(pack_runs(store, "changes", tmp_path)[0])
        (ours,), (theirs,) = (list_changes(Results(study(runs, "changes"))) for runs in (store, packed))
        assert ours.table == theirs.table
        page = render_html(make_page(store))
    assert ours.title in page
    assert ("fog 5, fresh start" in page) == (stream == ONSET)
    text, _ = render_markdown(make_document(Results(study(packed, "changes"))))
    assert f"## {ours.title}" in text
    section = text.partition(f"## {ours.title}")[2].partition("\n## ")[0]
    runs = 24 if stream == ONSET else 12 if "rare" in stream else 6
    assert f"Runs: {runs}." in section
