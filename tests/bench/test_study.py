"""Which setting of a grid a rule chooses, counted by hand on invented errors."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.helpers.bench import shared_resources
from ttvd.bench.plan import plan
from ttvd.bench.recipe import Recipe, parse_recipe
from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Facts, Member, Run, Spec
from ttvd.bench.store import Store
from ttvd.bench.study import Column, study
from ttvd.metrics import RunningMetrics

TEXT = """
rules = ["grid-best", "validation"]
seeds = [0, 1]
data.set = "digits"
data.corruptions = ["fog", "snow"]
data.validation = ["spatter"]
checkpoints.plain = "digits-plain"
[[methods]]
name = "bn"
[[methods]]
name = "tent"
grid = { lr = [0.1, 0.2, 0.3] }
"""
# Wrong answers of 100 by learning rate and corruption, the same for both seeds but for one more with seed 1.
WRONG = {
    0.1: {"fog": 10, "snow": 30, "spatter": 20},
    0.2: {"fog": 14, "snow": 20, "spatter": 25},
    0.3: {"fog": 16, "snow": 22, "spatter": 11},
}
FACTS = Facts("o", "cpu", 1, {"ttvd": "0"}, 0.0, 1.0, None, 1.0, 1.0)


def invent(spec: Spec) -> Run:
    wrong = WRONG.get(spec.parameters.get("lr", 0.1), WRONG[0.1])[spec.domains[0].corruption] + spec.seed
    metrics = RunningMetrics()
    metrics.update(
        torch.tensor([0] * (100 - wrong) + [1] * wrong), probs=torch.tensor([[0.9, 0.1]]).expand(100, 2)
    )
    return Run(spec, Record((Row(metrics.state(), 1.0, 0.1),)), FACTS)


@pytest.fixture(scope="module")
def members() -> list[Member]:
    return plan(parse_recipe(TEXT, "r"), shared_resources())


@pytest.fixture
def store(tmp_path: Path, members: list[Member]) -> Store:
    store = Store(tmp_path / "runs.sqlite")
    store.save_recipe("r", TEXT, members)
    return store


def fill(store: Store, members: list[Member]) -> None:
    for member in members:
        store.add(invent(member.spec))


def test_rules_choose_as_they_say(store: Store, members: list[Member]) -> None:
    fill(store, members)
    found = study(store, "r")
    fog, snow = found.columns
    assert (fog, snow) == (Column("fog 5"), Column("snow 5"))
    lines = {(line.label, line.rule): line for line in found.lines}
    assert set(lines) == {("bn", "last"), ("tent", "grid-best"), ("tent", "validation")}
    best, deployed = lines["tent", "grid-best"], lines["tent", "validation"]
    assert best.parameters == {"lr": 0.2}  # (14 + 20) / 2 is the lowest mean over the reported columns
    assert deployed.parameters == {"lr": 0.3}  # 11 is the lowest on the held-out corruption
    assert best.tried == deployed.tried == 3
    assert best.values("error", [fog, snow]) == pytest.approx([0.17, 0.18])
    assert best.mean("error", [fog, snow]) == pytest.approx(0.175)
    assert best.spread("error", [fog, snow]) == pytest.approx(0.01 / 2**0.5)
    assert deployed.mean("error", [snow]) == pytest.approx(0.225)
    assert (found.missing, found.failed, best.pending) == (0, 0, 0)


def test_a_setting_with_missing_runs_is_not_compared(store: Store, members: list[Member]) -> None:
    gone = [m for m in members if m.varies.get("lr") == 0.2 and m.spec.domains[0].corruption == "fog"]
    fill(store, [member for member in members if member not in gone])
    found = study(store, "r")
    line = next(line for line in found.lines if line.rule == "grid-best")
    assert line.parameters == {"lr": 0.3}
    assert line.pending == found.missing == len(gone) == 2


def test_failed_runs_are_counted_apart(store: Store, members: list[Member]) -> None:
    fill(store, members[1:])
    store.fail(members[0].spec, "Traceback: it broke")
    found = study(store, "r")
    assert (found.missing, found.failed) == (0, 1)


def test_an_empty_store_gives_empty_lines(store: Store) -> None:
    found = study(store, "r")
    assert found.missing > 0
    for line in found.lines:
        assert line.mean("error", found.columns) is None
        assert line.spread("error", found.columns) is None
    with pytest.raises(ValueError, match="has no recipe 'x'; it has: r"):
        study(store, "x")


def test_a_seed_counts_only_when_it_has_all_columns(store: Store, members: list[Member]) -> None:
    fill(store, [m for m in members if not (m.spec.seed == 1 and m.spec.domains[0].corruption == "snow")])
    found = study(store, "r")
    bn = found.lines[0]
    assert bn.seeds(found.columns) == [0]
    assert bn.seeds(found.columns[:1]) == [0, 1]
    assert bn.spread("error", found.columns) is None


def test_reference_and_conditions(store: Store, members: list[Member]) -> None:
    found = study(store, "r")
    assert found.reference() == "tent"
    assert found.conditions() == [()]
    recipe: Recipe = dataclasses.replace(found.recipe, reference="bn")
    assert dataclasses.replace(found, recipe=recipe).reference() == "bn"
    assert Column("fog 5", (("batch_size", 8),)).label == "fog 5, batch size 8"
    assert Column("").label == "all"


def test_a_rule_that_judges_nothing_chooses_nothing(tmp_path: Path, members: list[Member]) -> None:
    store = Store(tmp_path / "runs.sqlite")
    tests = [member for member in members if member.role == "test"]
    store.save_recipe("r", TEXT, tests)
    fill(store, tests)
    found = study(store, "r")
    lines = {line.rule: line for line in found.lines if line.label == "tent"}
    assert lines["grid-best"].parameters == {"lr": 0.2}
    line = lines["validation"]
    assert (line.parameters, line.runs, line.tried) == ({}, {}, 3)
    assert line.mean("error", found.columns) is None


def test_no_setting_passes_for_the_best_while_no_seed_has_all(store: Store, members: list[Member]) -> None:
    """And none has all seeds."""
    lacking = {0.1: 0, 0.2: 1, 0.3: 1}
    gone = [m for m in members if m.varies and m.role == "test" and m.spec.seed == lacking[m.varies["lr"]]]
    fill(store, [member for member in members if member not in gone])
    lines = {line.rule: line for line in study(store, "r").lines if line.label == "tent"}
    assert (lines["grid-best"].parameters, lines["grid-best"].runs) == ({}, {})
    assert lines["grid-best"].pending == len(gone) == 6
    assert lines["validation"].parameters == {"lr": 0.3}  # its own runs are there


def test_a_setting_that_never_ran_keeps_nobody_from_being_compared(
    store: Store, members: list[Member]
) -> None:
    lacking = {0.1: (0, 1), 0.2: (1,), 0.3: ()}
    fill(store, [m for m in members if not m.varies or m.spec.seed not in lacking[m.varies["lr"]]])
    lines = {line.rule: line for line in study(store, "r").lines if line.label == "tent"}
    assert lines["grid-best"].parameters == {"lr": 0.2}
    assert lines["validation"].parameters == {"lr": 0.3}


@pytest.mark.parametrize("begun", [(), (0.1,)], ids=["no run of seed 1", "one setting of seed 1"])
def test_the_seeds_that_all_settings_have_decide(
    begun: tuple[float, ...], store: Store, members: list[Member]
) -> None:
    """A setting that is ahead of the others does not win by that."""
    gone = [m for m in members if m.varies and m.spec.seed == 1 and m.varies["lr"] not in begun]
    fill(store, [member for member in members if member not in gone])
    found = study(store, "r")
    lines = {line.rule: line for line in found.lines if line.label == "tent"}
    assert lines["grid-best"].parameters == {"lr": 0.2}
    assert lines["validation"].parameters == {"lr": 0.3}
    assert lines["grid-best"].values("error", found.columns) == pytest.approx([0.17])
    assert lines["grid-best"].pending == len(gone)


def test_lines_without_a_run_are_there_if_they_were_asked_for(store: Store, members: list[Member]) -> None:
    store.save_recipe("r", TEXT, [member for member in members if member.label == "bn"])
    found = study(store, "r")
    assert [(line.label, line.tried, line.runs) for line in found.lines] == [("bn", 1, {})]
    assert found.reference() == "bn"
