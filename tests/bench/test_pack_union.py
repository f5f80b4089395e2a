"""Packing again: runs of several stores come together, and nothing that is committed goes without a word."""

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.report import BASIC, FakeStore, fake_run, list_members
from tests.helpers.store import FACTS, make_run, temporary_folder
from ttvd.bench import packed as packing
from ttvd.bench.export import list_runs
from ttvd.bench.packed import PackedRuns, pack_runs
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Member, Run, Spec
from ttvd.bench.store import Store
from ttvd.bench.study import Study, study
from ttvd.metrics import RunningMetrics

SMALL = BASIC.replace('"fog", "gaussian_noise", "contrast"', '"fog", "contrast"').replace(
    '"source", "bn", "tent", "ttvd"', '"bn", "tent", "ttvd"'
)


def make_store(
    seeds: Sequence[int] = (0, 1), text: str = SMALL, change: Callable[[Spec], Spec] = lambda spec: spec
) -> FakeStore:
    """As ``ttvd bench --seeds`` leaves one: the text of the recipe, and other members."""
    fake = FakeStore()
    fake.texts = {"basic": text}
    members = list_members(replace(parse_recipe(text, "basic"), seeds=tuple(seeds)))
    members = [replace(member, spec=change(member.spec)) for member in members]
    fake.enrolled = {"basic": members}
    fake.runs = {member.spec.key: fake_run(member.spec, 2) for member in members}
    return fake


def pack(fake: FakeStore, folder: Path, **options: bool) -> Path:
    return pack_runs(cast(Store, fake), "basic", folder, **options)[0]


def read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tell(found: Study) -> list[object]:
    """All that a table shows of a study."""
    return [
        (line.label, line.rule, line.parameters, line.tried, line.pending, line.seeds(found.columns),
         line.values("error", found.columns))
        for line in found.lines
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [[(0, 1), (5,)], [(5,), (0, 1)], [(1, 5), (0, 1)]])
def test_seeds_of_several_stores_add_up(tmp_path: Path, parts: list[tuple[int, ...]]) -> None:
    for seeds in parts:
        path = pack(make_store(seeds), tmp_path)
    whole = make_store((0, 1, 5))
    found = PackedRuns(path)
    assert found.done() == whole.done()
    assert tell(study(found, "basic")) == tell(whole.study("basic"))
    before = read(tmp_path)
    pack(make_store(parts[0]), tmp_path)
    assert read(tmp_path) == before


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_no_finished_run_is_ever_lost(parts: list[set[int]], rng: random.Random) -> None:
    done: set[str] = set()
    asked: set[str] = set()
    with temporary_folder() as folder:
        for seeds in parts:
            fake = make_store(sorted(seeds))
            asked |= set(fake.runs)
            fake.lose(*rng.sample(sorted(fake.runs), rng.randrange(len(fake.runs))))
            done |= set(fake.runs)
            found = PackedRuns(pack(fake, folder))
            assert found.done() == done
            assert {member.spec.key for member in found.members("basic")} == asked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: replace(spec, limit=64), r"limit is not given there and 64 here \(line 'bn', fog 5\)"),
        (lambda spec: replace(spec, revision=2), "revision is 1 there and 2 here"),
        (lambda spec: replace(spec, weights="new"), "weights is '7f3a9c1d2b4e6f80' there and 'new' here"),
        (
            lambda spec: replace(spec, parameters={**spec.parameters, "steps": 3}),
            r"parameters\.steps is not given there and 3 here",
        ),
    ],
)
def test_runs_that_cannot_stand_in_one_table_are_refused(
    tmp_path: Path, change: Callable[[Spec], Spec], message: str
) -> None:
    pack(make_store(), tmp_path)
    before = read(tmp_path)
    other = make_store((5,), change=change)  # not even beside other seeds
    with pytest.raises(ValueError, match=f"{message}.*another folder, or give --replace"):
        pack(other, tmp_path)
    assert read(tmp_path) == before
    assert PackedRuns(pack(other, tmp_path, replace=True)).done() == other.done()


def test_a_seed_among_the_parameters_is_no_difference(tmp_path: Path) -> None:
    def seeded(spec: Spec) -> Spec:
        return replace(spec, parameters={**spec.parameters, "seed": spec.seed})

    pack(make_store((0,), change=seeded), tmp_path)
    assert {
        run.spec.seed for run in PackedRuns(pack(make_store((1,), change=seeded), tmp_path))._runs.values()
    } == {0, 1}
    with pytest.raises(ValueError, match=r"parameters\.seed is not given there and 7 here"):
        pack(
            make_store((2,), change=lambda spec: replace(spec, parameters={**spec.parameters, "seed": 7})),
            tmp_path,
        )


def test_replacing_keeps_the_runs_that_are_still_asked_for(tmp_path: Path) -> None:
    pack(make_store((0, 1)), tmp_path)
    other = make_store((1, 5))
    kept = next(key for key, run in other.runs.items() if run.spec.seed == 1)
    other.lose(kept)
    found = PackedRuns(pack(other, tmp_path, replace=True))
    assert found.done() == {*other.runs, kept}
    assert {member.spec.seed for member in found.members("basic")} == {1, 5}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[0.001, 0.0005]",
            "[0.001, 0.5]",
            r"grid\.lr is \[0\.001, 0\.0005\] there and \[0\.001, 0\.5\] here",
        ),
        ("seeds = [0, 1]", "seeds = [0, 1, 2]", r"seeds is \[0, 1\] there and \[0, 1, 2\] here"),
        ('"fog", "contrast"', '"fog", "snow"', r"data\.corruptions is"),
        ('["grid-best", "validation"]', '["grid-best"]', "rules is"),
        ('"bn", "tent"', '"tent"', "methods is"),
    ],
)
def test_another_recipe_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = pack(make_store(), tmp_path)
    before = read(tmp_path)
    text = SMALL.replace(old, new)
    with pytest.raises(ValueError, match=f"not the one of .*{message}.*--replace"):
        pack(make_store(text=text), tmp_path)
    assert read(tmp_path) == before
    # Nor can the file be edited, so that it says of its rows what is not so.
    path.with_suffix(".toml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"is not the recipe that basic\.csv was packed with"):
        PackedRuns(path)


def test_words_of_a_recipe_may_change(tmp_path: Path) -> None:
    path = pack(make_store(), tmp_path)
    text = "# A comment\n" + SMALL.replace("noise and blur", "fog").replace("Invented", "Made up")
    path.with_suffix(".toml").write_text(text, encoding="utf-8")
    assert PackedRuns(path).done() == make_store().done()
    pack(make_store((2,), text), tmp_path)
    assert study(PackedRuns(path), "basic").recipe.title == "Digits under fog"


@pytest.mark.parametrize("content", [b"= no", b"\xff"])
def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    path = pack(make_store(), tmp_path)
    path.with_suffix(".toml").write_bytes(content)
    with pytest.raises(ValueError, match=r"is not TOML|is not a text file"):
        PackedRuns(path)


def test_long_streams_at_batch_size_1_can_be_read(tmp_path: Path) -> None:
    spec = replace(make_run().spec, batch_size=1)
    states = []
    for right in (True, False):
        metrics = RunningMetrics()
        metrics.update(torch.tensor([0 if right else 1]), logits=torch.tensor([[2.0, 0.0]]))
        states.append(metrics.state())
    rng = random.Random(0)
    rows = tuple(Row(states[rng.random() < 0.5], 1.0, 0.01) for _ in range(90_000))
    fake = FakeStore()
    fake.texts, fake.enrolled = {"basic": SMALL}, {"basic": [Member("basic", "bn", "test", spec)]}
    fake.runs = {spec.key: Run(spec, Record(rows), FACTS)}
    path = pack(fake, tmp_path)
    limit = csv.field_size_limit()
    assert max(map(len, path.read_text(encoding="utf-8").split(","))) > limit
    assert torch.equal(PackedRuns(path).load([spec.key])[spec.key].record.wrong(), Record(rows).wrong())
    assert csv.field_size_limit() == limit


def test_a_file_that_cannot_be_read_back_does_not_replace_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(make_store((0,)), tmp_path)
    before = read(tmp_path)

    pack_scores = packing._pack_scores

    def lie(run: Run, *, batches: bool) -> dict[str, str]:
        return pack_scores(run, batches=batches) | {"nll_sum": "0.5"}

    monkeypatch.setattr(packing, "_pack_scores", lie)
    with pytest.raises(ValueError, match=r"basic\.csv was not written: .*the metrics of .* differ"):
        pack(make_store((1,)), tmp_path)
    write_lines = packing._write_lines
    monkeypatch.setattr(
        packing,
        "_write_lines",
        lambda path, lines: write_lines(path, [{**line, "digest": ""} for line in lines]),
    )
    with pytest.raises(ValueError, match=r"basic\.csv was not written: .*damaged"):
        pack(make_store((1,)), tmp_path)
    assert read(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["basic.csv", "basic.toml"]


@pytest.mark.parametrize(
    "name", ["../x", "../../x", "/tmp/x", "a/b", "a\\b", "..\\x", "C:x", "", ".", "..", " "]
)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    fake = make_store()
    fake.texts, fake.enrolled = {name: SMALL}, {name: fake.enrolled["basic"]}
    with pytest.raises(ValueError, match="called like a file, without folders"):
        pack_runs(cast(Store, fake), name, tmp_path / "in" / "rows")
    with Store(tmp_path / "runs.db") as store, pytest.raises(ValueError, match="without folders"):
        store.save_recipe(name, SMALL, [])
    assert [path.name for path in tmp_path.iterdir()] == ["runs.db"]


def test_failures_stay_until_the_run_is_done(tmp_path: Path) -> None:
    first, second = make_store(), make_store()
    key = next(iter(first.runs))
    first.break_run(key, "Traceback: diverged")
    second.lose(key)  # it never tried
    for fake in (first, second):
        found = PackedRuns(pack(fake, tmp_path))
        assert [failure.key for failure in found.failures()] == [key]
        assert (study(found, "basic").failed, study(found, "basic").missing) == (1, 0)
    (known,) = (entry for entry in list_runs(found) if entry.key == key)
    assert known.document()["failure"]["when"] is None
    assert PackedRuns(pack(make_store(), tmp_path)).failures() == []
