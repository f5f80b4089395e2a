"""Streams whose shift comes and goes: from a recipe to runs, packed files and the errors after each change."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.bench import digits_resources, list_rows
from tests.helpers.cli import refuse_cli
from tests.helpers.engines import PlainEngine, Progress
from ttvd.bench.changes import (
    BACK,
    BACK_LATER,
    RARE,
    SHIFTED,
    SHIFTED_LATER,
    USUAL,
    errors_by_part,
)
from ttvd.bench.encoding import to_json
from ttvd.bench.grid import run_plans
from ttvd.bench.job import cut_order, execute, make_order
from ttvd.bench.packed import PackedRuns, compute_digest, pack_runs, unpack_runs
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe, read_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Domain, Facts, Join, Member, Run, Spec, WorkerConfig
from ttvd.bench.store import Store
from ttvd.bench.study import study
from ttvd.data.streams import draw_onset, iid

BASE = """
data = {{set = "digits", corruptions = ["fog", "gaussian_noise"]{limit}}}
seeds = [0, 1]
checkpoints = {{plain = "digits-plain", sites = "digits-sla"}}
stream = {{batch_size = 16, {stream}}}
[[methods]]
name = {methods}
"""
CLEAN = Domain("none")
FOG = Domain("fog")


@pytest.fixture(scope="module")
def resources() -> Resources:
    return digits_resources()


def make_text(stream: str, methods: str = '["source", "tent"]', limit: str = ", limit = 200") -> str:
    return BASE.format(stream=stream, methods=methods, limit=limit)


def make_members(resources: Resources, stream: str, **more: str) -> list[Member]:
    return plan(parse_recipe(make_text(stream, **more), "test"), resources)


def make_run(join: Join, domains: str, wrong: list[int], size: int = 64, **options: object) -> Run:
    """A run with a batch for each digit of ``domains``, and so many wrong predictions in each."""
    spec = Spec("m", "w", "digits", "c", (CLEAN, FOG), "bn", join=join, options=options, batch_size=size)
    rows = [
        Row(
            {
                "n": size,
                "correct": size - count,
                "nll_sum": 1.0,
                "brier_sum": 1.0,
                "batch_ece_sum": 1.0,
                "bin_count": [float(size)],
                "bin_confidence": [1.0],
                "bin_correct": [float(size - count)],
            },
            1.0,
            0.1,
            int(domain),
        )
        for domain, count in zip(domains, wrong, strict=True)
    ]
    return Run(spec, Record(tuple(rows)), Facts("o", "cpu", 1, {}, 0.0, 1.0, None, 1.0, 1.0))


# Errors by part


def test_errors_after_changes_are_counted_by_hand() -> None:
    run = make_run("onset", "00" + "1111" + "000", [9, 9, 10, 20, 4, 6, 32, 16, 8], lengths="2/4/3")
    assert errors_by_part(run) == {
        SHIFTED: 30 / 128,
        SHIFTED_LATER: 10 / 128,
        BACK: 48 / 128,
        BACK_LATER: 8 / 64,
    }
    fresh = make_run("onset", "1111", [8, 8, 4, 4], lengths="2/4/3", part="shifted")
    assert errors_by_part(fresh) == {SHIFTED: 16 / 128, SHIFTED_LATER: 8 / 128}


def test_a_batch_belongs_to_the_first_images_if_it_begins_within_them() -> None:
    run = make_run("onset", "0111000", [0, 10, 20, 30, 1, 2, 3], size=100, lengths="1/3/3")
    assert errors_by_part(run) == {SHIFTED: 0.15, SHIFTED_LATER: 0.3, BACK: 0.015, BACK_LATER: 0.03}
    short = make_run("onset", "010", [0, 10, 20], size=100, lengths="1/1/1")
    assert errors_by_part(short) == {SHIFTED: 0.1, BACK: 0.2}


def test_errors_by_round_and_of_rare_batches() -> None:
    run = make_run("recurring", "0011" + "01" + "0011", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], rounds=3)
    assert errors_by_part(run) == {"1": 10 / 256, "2": 11 / 128, "3": 34 / 256}
    assert errors_by_part(make_run("rare", "0100110", [1, 32, 1, 1, 16, 16, 1])) == {
        USUAL: 4 / 256,
        RARE: 64 / 192,
    }


def test_other_streams_and_sums_have_no_parts() -> None:
    assert errors_by_part(make_run("continual", "0011", [1, 2, 3, 4])) == {}
    run = make_run("onset", "010", [1, 2, 3], lengths="1/1/1")
    assert errors_by_part(replace(run, spec=replace(run.spec, batch_size=32))) == {}


# From a recipe to its streams


def test_an_onset_goes_from_clean_to_shifted_and_back(resources: Resources) -> None:
    members = make_members(resources, 'join = "onset", lengths = "2-4/3-5/1-6"', methods='["source"]')
    roles = Counter((m.role, m.spec.domains[1].corruption, m.spec.seed) for m in members)
    names = ("fog", "gaussian_noise")
    assert roles == dict.fromkeys(
        ((role, name, seed) for role in ("test", "fresh") for name in names for seed in (0, 1)), 1
    )
    assert len({member.spec.key for member in members}) == 8
    for member in members:
        spec = member.spec
        assert spec.domains[0] == CLEAN
        assert spec.domain_label == f"{spec.domains[1].corruption.replace('_', ' ')} 5"
        lengths = draw_onset(spec.seed, batch_size=16, fewest=(2, 3, 1), most=(4, 5, 6))
        first, second = iid(200, spec.seed), iid(200, spec.seed + 1000)
        order = make_order(spec, resources)
        if member.role == "fresh":
            assert order.tolist() == [[1, image] for image in second[: lengths[1]]]
        else:
            assert order[:, 0].tolist() == [0] * lengths[0] + [1] * lengths[1] + [0] * lengths[2]
            clean = order[order[:, 0] == 0, 1].tolist()
            assert clean == first[: lengths[0] + lengths[2]].tolist()
            assert order[order[:, 0] == 1, 1].tolist() == second[: lengths[1]].tolist()


def test_lengths_have_a_default_and_are_written_in_the_spec(resources: Resources) -> None:
    member = make_members(resources, 'join = "onset"', limit="")[0]
    assert member.spec.options["lengths"] == "8/10/10"
    order = make_order(member.spec, resources)
    assert [len(list(rows)) for rows in np.split(order, [128, 288])] == [128, 160, 160]


def test_the_recipe_for_digits_fits_their_number(resources: Resources) -> None:
    path = Path(__file__).parents[2] / "recipes" / "onset-digits.toml"
    recipe = read_recipe(path)
    members = plan(recipe, resources)
    assert len(members) == 4 * 15 * 2 * 20, "lines, corruptions, the stream and its fresh start, seeds"
    drawn = {len(make_order(m.spec, resources)) for m in members if m.label == "source" and m.role == "test"}
    assert len(drawn) > 5


def test_several_lengths_are_columns(resources: Resources) -> None:
    members = make_members(resources, 'join = "onset", lengths = ["2/2/2", "3/3/3"]', methods='["source"]')
    assert {member.condition["lengths"] for member in members} == {"2/2/2", "3/3/3"}


def test_recurring_visits_all_domains_again_with_other_images(resources: Resources) -> None:
    members = make_members(resources, 'join = "recurring", rounds = 4', methods='["source"]')
    assert [(m.role, m.spec.domain_label) for m in members] == [("test", "recurring (2)")] * 2
    spec = members[0].spec
    order = make_order(spec, resources)
    batches = cut_order(spec, order)
    # 50 images in each visit: three batches of 16 and one of 2.
    assert [len(rows) for rows in batches] == [16, 16, 16, 2] * 8
    assert [int(rows[0, 0]) for rows in batches] == ([0] * 4 + [1] * 4) * 4
    assert all(len(set(rows[:, 0].tolist())) == 1 for rows in batches)
    assert sorted(map(tuple, order.tolist())) == [(d, i) for d in range(2) for i in range(200)]


def test_rare_has_one_shifted_batch_in_so_many(resources: Resources) -> None:
    members = make_members(resources, 'join = "rare", every = 5', methods='["source"]')
    assert {m.role for m in members} == {"test"}
    assert [m.spec.domain_label for m in members].count("fog 5") == 2
    batches = cut_order(members[0].spec, make_order(members[0].spec, resources))
    domains = [set(rows[:, 0].tolist()) for rows in batches]
    assert len(batches) == 5 * (200 // 64)
    for first in range(0, len(batches), 5):
        assert domains[first : first + 5].count({1}) == 1
        assert domains[first : first + 5].count({0}) == 4


@pytest.mark.parametrize("join", ["reset", "continual", "mixed"])
def test_specs_of_other_joins_have_no_new_entries(resources: Resources, join: str) -> None:
    members = make_members(resources, f'join = "{join}"', methods='["source"]')
    assert {(member.role, to_json(dict(member.spec.options))) for member in members} == {("test", "{}")}
    assert {member.spec.join for member in members} == {"continual" if join == "reset" else join}


def test_the_key_of_a_spec_stays_what_it_was() -> None:
    spec = Spec("digits-sla", "0" * 16, "digits", "1" * 16, (Domain("fog"), Domain("snow")), "tent")
    assert (spec.key, replace(spec, join="mixed").key) == ("4629ff2b3bb3c7ba", "8533e7b361fe80fe")


@pytest.mark.parametrize(
    ("stream", "more", "words"),
    [
        ('join = "onset"', {}, ["288 clean samples", "there are 200", "lengths or batch_size", "limit"]),
        ('join = "rare", every = 20', {}, ["304", "got 200", "every or batch_size"]),
        ('join = "recurring", rounds = 201', {}, ["rounds must be from 1 to", "200", "got 201"]),
        ('join = "onset", lengths = "2/3"', {}, ["three parts", "'8/10/10'", "got '2/3'"]),
        ('join = "onset", lengths = "0/3/3"', {}, ["three parts", "got '0/3/3'"]),
        ('join = "onset", lengths = "4-2/3/3"', {}, ["three parts", "got '4-2/3/3'"]),
        ('join = "onset", lengths = 8', {}, ["lengths must be a text", "'8/10/10'", "got 8"]),
        ('join = "recurring", rounds = 2.5', {}, ["rounds must be a whole number", "got 2.5"]),
        ('join = "rare", rounds = 2', {}, ["has no 'rounds'", "every"]),
        ("rounds = 2", {}, ["has no 'rounds'"]),
        ('join = "onset", part = "shifted"', {}, ["has no 'part'", "lengths"]),
        ('join = "onsets"', {}, ["did you mean 'onset'"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    resources: Resources, stream: str, more: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="recipe test") as caught:
        make_members(resources, stream, **more)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_lengths_that_fit_with_one_seed_only_are_refused(resources: Resources) -> None:
    stream = 'join = "onset", lengths = "1-40/1/1"'
    parts = [draw_onset(seed, batch_size=16, fewest=(1, 1, 1), most=(40, 1, 1))[0] for seed in range(20)]
    assert min(parts) + 16 <= 200 < max(parts) + 16
    with pytest.raises(ValueError, match="there are 200 and 200"):
        plan(parse_recipe(make_text(stream).replace("[0, 1]", f"{list(range(20))}"), "test"), resources)


@pytest.mark.parametrize(
    ("join", "data", "words"),
    [
        ("onset", '{set = "digits", corruptions = ["none", "fog"]}', "take 'none' out"),
        ("rare", '{set = "cifar10-c", corruptions = ["fog"]}', "needs clean images, which cifar10-c"),
        ("recurring", '{set = "digits", corruptions = ["fog"]}', "at least two"),
    ],
)
def test_corruptions_that_cannot_be_joined_are_refused(
    resources: Resources, join: str, data: str, words: str
) -> None:
    text = (
        f'data = {data}\nstream.join = "{join}"\ncheckpoints.plain = "digits-plain"\n[[methods]]\nname = "bn"'
    )
    with pytest.raises(ValueError, match=words):
        plan(parse_recipe(text, "test"), resources)


# Runs


def test_a_fresh_start_sees_the_same_images_without_the_memory_of_others(resources: Resources) -> None:
    members = make_members(resources, 'join = "onset", lengths = "3/3/3"')
    by_role = {(m.label, m.role): m.spec for m in members if (m.spec.domains[1], m.spec.seed) == (FOG, 0)}
    runs = {place: execute(spec, resources) for place, spec in by_role.items()}
    for label in ("source", "tent"):
        assert [row.domain for row in runs[label, "test"].record.rows] == [0] * 3 + [1] * 3 + [0] * 3
        assert [row.domain for row in runs[label, "fresh"].record.rows] == [1] * 3
    still = [row.metrics for row in runs["source", "fresh"].record.rows]
    assert still == [row.metrics for row in runs["source", "test"].record.rows[3:6]]
    learned = [row.metrics for row in runs["tent", "fresh"].record.rows]
    assert learned != [row.metrics for row in runs["tent", "test"].record.rows[3:6]]
    again = execute(by_role["tent", "test"], Resources(WorkerConfig()))
    assert list_rows(again) == list_rows(runs["tent", "test"])


def do_grid(store: Store, resources: Resources, stream: str, broken: str = "") -> None:
    """Do all runs of a recipe here; those of a role fail."""
    recipe = parse_recipe(make_text(stream), "test")
    members = plan(recipe, resources)
    failing = {member.spec.key for member in members if member.role == broken}

    def do_run(spec: Spec, _: Resources, progress: Progress) -> Run:
        if spec.key in failing:
            raise RuntimeError("broken on purpose")
        return execute(spec, resources, progress)

    run_plans([(recipe, members)], store, PlainEngine(do_run), WorkerConfig())


def test_a_grid_that_was_broken_off_continues_to_the_same_rows(resources: Resources, tmp_path: Path) -> None:
    stream = 'join = "onset", lengths = "2-3/9/2-3"'
    with Store(tmp_path / "a.db") as whole, Store(tmp_path / "b.db") as parts:
        do_grid(whole, resources, stream)
        do_grid(parts, resources, stream, broken="fresh")
        lines = study(parts, "test").lines
        assert [(line.pending, line.fresh) for line in lines] == [(4, {})] * 2
        assert all(len(line.runs) == 2 for line in lines)
        do_grid(parts, resources, stream)
        runs, again = (store.load(store.done()) for store in (whole, parts))
        assert {key: list_rows(run) for key, run in runs.items()} == {
            key: list_rows(run) for key, run in again.items()
        }
        found = study(parts, "test")
        assert [column.domain for column in found.columns] == ["fog 5", "gaussian noise 5"]
        for line in found.lines:
            assert line.pending == 0
            for column in found.columns:
                assert [run.spec.seed for run in line.fresh[column]] == [0, 1]
                assert all(run.spec.options["part"] == "shifted" for run in line.fresh[column])
                assert all("part" not in run.spec.options for run in line.runs[column])


@pytest.mark.parametrize(
    ("stream", "sizes"),
    [
        ('join = "onset", lengths = "2/9/3"', {"0:16x2 1:16x9 0:16x3", "1:16x9"}),
        ('join = "recurring", rounds = 2', {"0:16x6 0:4 1:16x6 1:4 0:16x6 0:4 1:16x6 1:4"}),
        ('join = "rare", every = 12', None),
    ],
)
def test_packed_runs_know_the_domain_of_each_batch(
    resources: Resources, tmp_path: Path, stream: str, sizes: set[str] | None
) -> None:
    with Store(tmp_path / "runs.db") as store, Store(tmp_path / "sums.db") as sums:
        do_grid(store, resources, stream)
        runs = store.load(store.done())
        path, count = pack_runs(store, "test", tmp_path)
        packed = PackedRuns(path)
        assert count == len(runs)
        for key, run in packed.load(runs).items():
            assert run.record.domains() == runs[key].record.domains()
            assert torch.equal(run.record.wrong(), runs[key].record.wrong())
            assert errors_by_part(run) == errors_by_part(runs[key]) != {}
        if sizes is not None:
            with path.open(newline="") as file:
                assert {line["sizes"] for line in csv.DictReader(file)} == sizes
        before = path.read_bytes()
        pack_runs(packed, "test", tmp_path)
        assert path.read_bytes() == before
        assert unpack_runs(packed, sums) == len(runs)
        assert all(errors_by_part(run) == {} for run in sums.load(runs).values())


def test_a_packed_batch_of_an_unknown_domain_is_refused(resources: Resources, tmp_path: Path) -> None:
    with Store(tmp_path / "runs.db") as store:
        do_grid(store, resources, 'join = "onset", lengths = "2/9/3"')
        path, _ = pack_runs(store, "test", tmp_path)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    lines[0]["sizes"] = lines[0]["sizes"].replace("1:16x9", "7:16x9")
    lines[0]["digest"] = compute_digest(lines[0])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    with pytest.raises(ValueError, match="a domain that the run does not have"):
        PackedRuns(path)


def test_a_dry_run_refuses_lengths_for_which_there_are_too_few_images(tmp_path: Path) -> None:
    recipe = tmp_path / "short.toml"
    recipe.write_text(make_text('join = "onset", lengths = "8/10/10"'))
    output = refuse_cli("bench", recipe, "--store", tmp_path / "runs.db", "--dry-run")
    assert "288 clean samples" in output
    assert "limit" in output
    assert not (tmp_path / "runs.db").exists()
