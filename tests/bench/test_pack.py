"""Packed runs: nothing that a table shows is lost, and a file that is not whole is refused."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.report import BASIC, FakeStore
from tests.helpers.store import FACTS, make_row, make_run, temporary_folder
from ttvd.bench.packed import (
    COLUMNS,
    PackedRecord,
    PackedRuns,
    compute_digest,
    has_batches,
    open_runs,
    pack_runs,
    unpack_runs,
)
from ttvd.bench.run import Record, Row, sum_metrics
from ttvd.bench.spec import Domain, Member, Run
from ttvd.bench.store import Store
from ttvd.bench.study import study
from ttvd.metrics import RunningMetrics
from ttvd.report.results import Results
from ttvd.report.tables import compare_lines

RULES = BASIC.replace('["grid-best", "validation"]', '["grid-best", "validation", "oracle"]')
METRICS = ("error", "nll", "brier", "ece", "batch_ece", "n")


def pack(fake: FakeStore, folder: Path) -> tuple[Path, int]:
    return pack_runs(cast(Store, fake), "basic", folder)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(FakeStore(("basic", RULES), batches=5), tmp_path)[0]


@st.composite
def batches(draw: st.DrawFn, classes: int = 4) -> Row:
    n = draw(st.integers(1, 64))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    metrics = RunningMetrics()
    labels = torch.randint(classes, (n,), generator=generator)
    metrics.update(labels, logits=4 * torch.randn(n, classes, generator=generator))
    share = draw(st.floats(0, 1) | st.just(float("nan")))
    return Row(metrics.state(), share, draw(st.floats(1e-6, 10)), draw(st.integers(0, 2)))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    names = st.text() | st.sampled_from(["a,b", 'say "x"', "two\r\nlines", ""])
    values = (
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names
    )
    spec = replace(
        make_run().spec,
        domains=tuple(Domain("fog", severity) for severity in (1, 2, 3)),
        parameters=draw(st.dictionaries(names, values | st.lists(values), max_size=3)),
        limit=draw(st.none() | st.integers(1)),
        sites=draw(st.sampled_from([1, 1.0, 0.1])),
        episodic=draw(st.booleans()),
    )
    facts = replace(FACTS, device=draw(names), peak=draw(st.none() | st.integers(0, 2**60)))
    return Run(spec, Record(tuple(draw(st.lists(batches(), min_size=1, max_size=6)))), facts)


@settings(max_examples=60, deadline=None)
@given(runs())
@example(replace(make_run(), facts=replace(FACTS, device="a\r\nb\rc")))
def test_what_tables_are_made_of_comes_back_digit_by_digit(run: Run) -> None:
    member = Member("r", "line", "test", run.spec, {"lr": 0.1}, {"batch_size": 8})
    with temporary_folder() as folder, Store(folder / "runs.db") as store:
        store.save_recipe("r", "title = 'r'", [member])
        store.add(run)
        found = PackedRuns(pack_runs(store, "r", folder)[0])
        (back,) = found.load([run.spec.key]).values()
        stored = store.load([run.spec.key])[run.spec.key]
        again, _ = pack_runs(found, "r", folder / "again")
        assert again.read_bytes() == (folder / "r.csv").read_bytes()
        assert found.members("r") == [member]
        assert found.recipes() == store.recipes()
    assert (back.spec, back.facts) == (run.spec, run.facts)
    assert back.totals == stored.totals
    assert repr(back.record.kept()) == repr(stored.record.kept())
    assert back.record.seconds_per_batch() == stored.record.seconds_per_batch()
    assert torch.equal(back.record.curve(), stored.record.curve())
    for number in {row.domain for row in run.record.rows}:
        ours, theirs = (
            sum_metrics([row for row in record.rows if row.domain == number])
            for record in (back.record, stored.record)
        )
        assert ours.state() == theirs.state()


def test_anybody_can_compute_the_numbers_from_the_file(packed: Path) -> None:
    fake = FakeStore(("basic", RULES), batches=5)
    with packed.open(encoding="utf-8", newline="") as file:
        lines = {line["key"]: line for line in csv.DictReader(file)}
    assert set(lines) == fake.done()
    for key, line in lines.items():
        totals = fake.runs[key].totals
        n, correct = int(line["n"]), int(line["correct"])
        confidence, right = (
            [float(x) for x in line[name].split()] for name in ("bin_confidence", "bin_correct")
        )
        ece = sum(abs(a - b) for a, b in zip(confidence, right, strict=True)) / n
        found = ((n - correct) / n, float(line["nll_sum"]) / n, float(line["brier_sum"]) / n, ece)
        assert found == pytest.approx([totals[name] for name in METRICS[:4]], rel=1e-12)
        assert float(line["batch_ece_sum"]) / n == pytest.approx(totals["batch_ece"], rel=1e-12)
        assert float(line["kept"]) == pytest.approx(fake.runs[key].record.kept(), rel=1e-12)
        roles = {asked[2] for asked in json.loads(line["asked"])}
        assert bool(line["right"]) == (roles == {"test"})  # runs that only choose have no batches


def test_every_rule_chooses_the_same_and_shows_the_same(packed: Path) -> None:
    fake = FakeStore(("basic", RULES), batches=5)
    ours, theirs = study(PackedRuns(packed), "basic"), fake.study("basic")
    assert ours.columns == theirs.columns
    assert {line.rule for line in ours.lines} == {"last", "grid-best", "validation", "oracle"}
    for one, other in zip(ours.lines, theirs.lines, strict=True):
        assert (one.label, one.rule, one.parameters, one.tried) == (
            other.label, other.rule, other.parameters, other.tried
        )  # fmt: skip
        for metric in METRICS:
            assert one.values(metric, ours.columns) == other.values(metric, theirs.columns)
    assert [comparison.total for comparison in compare_lines(Results(ours))] == [
        d.total for d in compare_lines(Results(theirs))
    ]
    ours_, theirs_ = Results(ours), Results(theirs)
    for one, other in zip(ours_.lines, theirs_.lines, strict=True):
        assert ours_.milliseconds(one) == theirs_.milliseconds(other)
        assert ours_.kept(one) == theirs_.kept(other)


def test_what_is_missing_and_what_failed_is_told(tmp_path: Path) -> None:
    fake = FakeStore(("basic", BASIC), batches=2)
    first, second, *_ = fake.runs
    fake.lose(first)
    fake.break_run(second, "Traceback: /home/somebody/secret.py broke")
    path, count = pack(fake, tmp_path)
    assert count == len(fake.runs)
    assert "secret" not in path.read_text(encoding="utf-8")
    found, expected = study(PackedRuns(path), "basic"), fake.study("basic")
    assert (found.missing, found.failed) == (expected.missing, expected.failed) == (1, 1)
    assert [line.pending for line in found.lines] == [line.pending for line in expected.lines]


def test_runs_of_several_stores_come_together(tmp_path: Path) -> None:
    fake = FakeStore(("basic", BASIC), batches=2)
    halves = [FakeStore(("basic", BASIC), batches=2) for _ in range(2)]
    for number, key in enumerate(fake.runs):
        halves[number % 2].lose(key)
    for half in halves:
        pack(half, tmp_path / "parts")
    whole, count = pack(fake, tmp_path / "whole")
    assert count == len(fake.runs)
    assert (tmp_path / "parts" / "basic.csv").read_bytes() == whole.read_bytes()


def test_a_store_can_go_on_from_packed_runs(packed: Path, tmp_path: Path) -> None:
    fake = FakeStore(("basic", RULES), batches=5)
    with Store(tmp_path / "new.db") as store:
        assert unpack_runs(PackedRuns(packed), store) == len(fake.runs)
        assert unpack_runs(PackedRuns(packed), store) == 0
        assert store.done() == fake.done()
        found = study(store, "basic")
        loaded = store.load(store.done())
        for line, other in zip(found.lines, fake.study("basic").lines, strict=True):
            assert line.parameters == other.parameters
            for metric in METRICS:
                assert line.mean(metric, found.columns) == pytest.approx(other.mean(metric, found.columns))
        assert not any(has_batches(run) for run in loaded.values())
        # Sums alone must not pass for batches: an interval of a single one would have no width.
        assert all(comparison.total is None for comparison in compare_lines(Results(found)))
        again, _ = pack_runs(store, "basic", packed.parent)
        assert study(PackedRuns(again), "basic").lines[0].runs.keys() == found.lines[0].runs.keys()
        assert all(
            has_batches(run)
            for line in study(PackedRuns(again), "basic").lines
            for c in line.runs.values()
            for run in c
        )


def test_counts_that_were_left_out_are_not_invented() -> None:
    record = PackedRecord((make_row(),), make_row().metrics, (4,), (0,), None, 0.5, 0.1)
    with pytest.raises(ValueError, match="not kept of runs that only choose"):
        record.curve()


def edit(path: Path, change: Callable[[list[dict[str, str]]], Any], *, sealed: bool = False) -> None:
    lines = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
    change(lines)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(line | ({"digest": compute_digest(line)} if sealed else {}) for line in lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[2].update(correct="7"), "line 4 of .* was damaged or edited"),
        (lambda lines: lines[0].update(digest=""), "line 2 of .* was damaged"),
        (lambda lines: lines.pop(), "does not have all lines"),
        (lambda lines: lines.append(lines[0]), "does not have all lines"),
        (lambda lines: [line.pop("order") for line in lines], r"another version of ttvd: .*\(order\)"),
    ],
)
def test_damage_is_noticed(packed: Path, change: Callable[[Any], Any], message: str) -> None:
    edit(packed, change)
    with pytest.raises(ValueError, match=message):
        PackedRuns(packed)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"correct": "7"}, "not the sum over the bins"),
        ({"seed": "77"}, "the key of its spec is"),
        ({"sizes": "64x4"}, "do not sum up to n"),
        ({"sizes": "64x99999999999"}, "more than 10,000,000 batches"),
        ({"right": "1x5"}, "do not sum up to correct"),
        ({"status": "great"}, "its status is 'great'"),
        ({"asked": "{}"}, "does not have all lines"),
        ({"episodic": "__import__('os')"}, "is not a run of this version"),
        ({"parameters": "print(1)"}, "is not a run of this version"),
    ],
)
def test_lines_that_contradict_themselves_are_refused(
    packed: Path, cells: dict[str, str], message: str
) -> None:
    edit(packed, lambda lines: lines[0].update(cells), sealed=True)
    with pytest.raises(ValueError, match=message):
        PackedRuns(packed)


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00", b'"key\n', b"key,asked,digest\n"])
def test_other_files_are_refused(packed: Path, content: bytes) -> None:
    packed.write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no packed runs|cannot be read as CSV|another version"):
        PackedRuns(packed)


def test_a_file_that_was_cut_is_refused(packed: Path) -> None:
    content = packed.read_bytes()
    for share in (0.3, 0.5, 0.9):
        packed.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match=r"damaged|cannot be read|does not have all lines"):
            PackedRuns(packed)


def test_the_recipe_must_lie_beside(packed: Path, tmp_path: Path) -> None:
    packed.with_suffix(".toml").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*basic\.toml"):
        PackedRuns(packed)
    with pytest.raises(FileNotFoundError, match="there is no"):
        PackedRuns(tmp_path / "nothing.csv")


def test_an_unknown_recipe_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean basic"):
        pack_runs(PackedRuns(packed), "basics", tmp_path)
    with pytest.raises(ValueError, match=r"no run in .* begins with 'zz'"):
        PackedRuns(packed).find("zz")


def test_a_store_may_be_called_like_a_file(tmp_path: Path) -> None:
    with Store(tmp_path / "runs.csv") as store:
        store.add(make_run())
    with cast(Store, open_runs(tmp_path / "runs.csv")) as opened:
        assert isinstance(opened, Store)
        assert len(opened.done()) == 1


def test_columns_are_few_and_the_digest_covers_all(packed: Path) -> None:
    line = next(csv.DictReader(io.StringIO(packed.read_text(encoding="utf-8"), newline="")))
    assert list(line) == list(COLUMNS)
    for name in COLUMNS:
        if name != "digest":
            assert compute_digest(line | {name: line[name] + " "}) != line["digest"]
