"""From a recipe to its runs: which runs it asks for, and what is refused before anything starts."""

from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.bench import copy_checkpoint, make_pictures, make_recipe, make_resources, shared_resources
from ttvd.bench.plan import plan
from ttvd.bench.recipe import list_entries, parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Member, WorkerConfig
from ttvd.cli.bench import read_recipes as apply_flags
from ttvd.data.corruptions import EXTRA

BASE = """
title = "t"
[data]
set = "digits"
corruptions = ["fog"]
[checkpoints]
plain = "digits-plain"
sites = "digits-sla"
"rotation head" = "digits-rotation"
"""
TENT = '[[methods]]\nname = "tent"\n'
DIGITS = 'data.set = "digits"\ndata.corruptions = ["fog"]\ncheckpoints.plain = "digits-plain"\n'


def make_plan(text: str) -> list[Member]:
    return plan(parse_recipe(BASE + text, "test"), shared_resources())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[methods]]\nname = "tnet"', "did you mean tent"),
        ('[[methods]]\nname = "tent"\nparams = { rate = 1 }', "has no parameter 'rate'"),
        ('[[methods]]\nname = "tent"\nparams = { lr = -1.0 }', "lr must be a finite number, at least 0"),
        ('[[methods]]\nname = "tent"\ngrid = { lr = [1.0] }\nrules = ["last"]', "needs one fixed setting"),
        ('[[methods]]\nname = "note"', "note needs instance-aware norms, which digits-plain does not have"),
        ('[[methods]]\nname = "ttt"\ncheckpoint = "digits-plain"', "ttt needs a rotation head"),
        ('[[methods]]\nname = "ttvd"\ncheckpoint = "digits-slo"', "did you mean"),
        ('[[methods]]\nname = "ttvd"\nviews = 4', "takes no views"),
        ('[[methods]]\nname = "t3a"\ncheckpoint = "digits-sla"\nviews = 4', "does not map features"),
        (
            '[[methods]]\nname = "bn"\n[stream]\norder = "dirichlet"\nalpha = [1.0, -1.0]',
            "alpha must be positive",
        ),
        ('[[methods]]\nname = "bn"\ncheckpoint = "digits-plane"\nviews = 4', "tells 3 classes apart"),
        ('[[methods]]\nname = "bn"\n[[methods]]\nname = "bn"', "two lines are called 'bn'"),
        ('[[methods]]\nname = ["bn", "tent"]\nlabel = "x"', "cannot stand for 2 methods"),
    ],
)
def test_what_cannot_run_is_found_before_anything_starts(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"test|method|checkpoint") as caught:
        make_plan(text)
    assert words in str(caught.value)


def test_a_missing_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="no line is called 'x', the reference"):
        plan(
            parse_recipe('reference = "x"\n' + BASE + '[[methods]]\nname = "bn"', "test"),
            shared_resources(),
        )


def test_a_grid_spreads_over_settings_corruptions_seeds_and_roles() -> None:
    members = make_plan(
        '[[methods]]\nname = "tent"\nrules = ["grid-best", "validation"]\nseeds = [0, 1]\n'
        "grid = { lr = [0.1, 0.01, 0.001], momentum = [0.0, 0.9] }"
    )
    roles = Counter(member.role for member in members)
    assert roles == {"test": 3 * 2 * 2, "validation": 3 * 2 * 2 * len(EXTRA)}
    assert len({member.spec.key for member in members}) == len(members)
    assert {tuple(sorted(member.varies)) for member in members} == {("lr", "momentum")}
    one = members[0]
    assert one.spec.parameters["lr"] == one.varies["lr"]


def test_settings_of_the_recipe_reach_only_methods_that_know_them() -> None:
    text = '[params]\noptimizer = "sgd"\n[grid]\nlr = [0.1, 0.2]\n[[methods]]\nname = ["bn", "tent", "sar"]'
    found = {m.label: m.spec.parameters for m in make_plan(text)}
    assert "lr" not in found["bn"]
    assert found["tent"]["optimizer"] == "sgd"
    assert "optimizer" not in found["sar"]
    labels = Counter(m.label for m in make_plan(text))
    assert labels == {"bn": 1, "tent": 2, "sar": 2}


def test_conditions_make_columns() -> None:
    members = make_plan(
        '[stream]\norder = "dirichlet"\nalpha = [1.0, 0.1]\nbatch_size = [8, 4]\n[[methods]]\nname = "bn"'
    )
    assert [dict(m.condition) for m in members] == [
        {"batch_size": size, "alpha": alpha} for size in (8, 4) for alpha in (1.0, 0.1)
    ]
    assert {(m.spec.batch_size, m.spec.options["alpha"]) for m in members} == {
        (8, 1.0),
        (8, 0.1),
        (4, 1.0),
        (4, 0.1),
    }


def test_one_stream_of_several_domains() -> None:
    text = (
        BASE.replace('["fog"]', '["fog", "snow"]') + '[stream]\njoin = "continual"\n[[methods]]\nname = "bn"'
    )
    (member,) = plan(parse_recipe(text, "test"), shared_resources())
    assert [domain.corruption for domain in member.spec.domains] == ["fog", "snow"]


def test_the_oracle_is_for_methods_that_take_steps() -> None:
    text = (
        'rules = ["oracle"]\noracle.steps = 3\noracle.limit = 100\n'
        + BASE
        + '[[methods]]\nname = ["bn", "tent"]'
    )
    found = {m.label: m.spec for m in plan(parse_recipe(text, "test"), shared_resources())}
    assert found["bn"].selection == "last"
    assert (found["tent"].selection, found["tent"].steps, found["tent"].limit) == ("oracle", 3, 100)
    assert found["tent"].episodic


def plan_oracle(seeds: str, lines: str) -> dict[tuple[str, str], list[int]]:
    """Seeds of the runs, by line and selection."""
    text = f'seeds = [0, 1, 2]\nrules = ["last", "oracle"]\noracle.seeds = {seeds}\n' + BASE + lines
    found: dict[tuple[str, str], list[int]] = {}
    for member in plan(parse_recipe(text, "test"), shared_resources()):
        found.setdefault((member.label, member.spec.selection), []).append(member.spec.seed)
    return found


def test_the_oracle_runs_for_some_of_a_line_s_seeds() -> None:
    """For those that are both a line's and the oracle's; nothing else is left out."""
    lines = '[[methods]]\nname = "tent"\n[[methods]]\nname = "sar"\nseeds = [2, 5]\n[[methods]]\nname = "bn"'
    plain = {("tent", "last"): [0, 1, 2], ("sar", "last"): [2, 5], ("bn", "last"): [0, 1, 2]}
    assert plan_oracle("[0, 2]", lines) == {**plain, ("tent", "oracle"): [0, 2], ("sar", "oracle"): [2]}
    with pytest.raises(ValueError, match="line 'sar': none of its seeds is one of \\[oracle\\]"):
        plan_oracle("1", lines)
    everywhere = {**plain, ("tent", "oracle"): [0, 1, 2], ("sar", "oracle"): [2, 5]}
    assert plan_oracle("[5, 2, 1, 0]", lines) == everywhere
    assert parse_recipe(BASE + '[[methods]]\nname = "bn"', "test").oracle.seeds is None


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ('"0"', "seeds must be a whole number or a list of them, got '0'; leave the quotation marks out"),
        ("true", "[oracle] seeds must be a whole number or a list of them"),
        ("[0.5]", "[oracle] seeds must be a whole number or a list of them"),
        ("[]", "[oracle] seeds is empty"),
        ("[1, 1]", "[oracle] seeds has 1 twice"),
        ("[-1]", "seeds must be at least 0"),
    ],
)
def test_seeds_of_the_oracle_that_are_none(seeds: str, words: str) -> None:
    with pytest.raises(ValueError, match="recipe test") as caught:
        plan_oracle(seeds, '[[methods]]\nname = "tent"')
    assert words in str(caught.value)


def test_seeds_on_the_command_line_are_the_oracle_s_too(tmp_path: Path) -> None:
    text = f'rules = ["oracle"]\noracle.seeds = [0]\noracle.steps = 3\n{BASE}[[methods]]\nname = "tent"\nseeds = 9'
    (tmp_path / "some.toml").write_text(text)
    (kept,), (lifted,) = (apply_flags([tmp_path / "some.toml"], None, seeds) for seeds in (None, "1,2"))
    assert kept.oracle.seeds == (0,)
    assert (lifted.oracle.seeds, lifted.oracle.steps) == (None, 3)
    runs = [member.spec for member in plan(lifted, shared_resources())]
    assert [(run.selection, run.seed) for run in runs] == [("oracle", 1), ("oracle", 2)]


def test_the_key_depends_on_what_decides_the_rows() -> None:
    def key(text: str) -> str:
        (member,) = make_plan(text)
        return member.spec.key

    tent = '[[methods]]\nname = "tent"\n'
    base = key(tent)
    assert key(tent) == base
    assert key(tent + 'label = "another name"') == base
    changed = ["params = { lr = 0.5 }", "seeds = [1]", "episodic = true", 'checkpoint = "digits-rotation"']
    assert len({base, *(key(tent + line) for line in changed)}) == 1 + len(changed)


def test_a_method_with_a_seed_gets_that_of_the_run() -> None:
    members = make_plan('[[methods]]\nname = "roid"\nseeds = [3]')
    assert members[0].spec.parameters["seed"] == 3
    members = make_plan('[[methods]]\nname = "roid"\nseeds = [3]\nparams = { seed = 7 }')
    assert members[0].spec.parameters["seed"] == 7


def test_corruptions_that_are_reported_do_not_choose() -> None:
    text = BASE.replace('["fog"]', '["fog", "spatter"]')
    line = '[[methods]]\nname = "tent"\ngrid = { lr = [0.1, 0.2] }\nrules = ["RULE"]'
    with pytest.raises(ValueError, match="spatter is reported and chooses parameters too"):
        plan(parse_recipe(text + line.replace("RULE", "validation"), "test"), shared_resources())
    assert plan(parse_recipe(text + line.replace("RULE", "grid-best"), "test"), shared_resources())


def test_a_search_without_steps_is_never_called_one_fixed_setting() -> None:
    text = BASE + '[[methods]]\nname = "t3a"\ngrid = { supports = [1, 5] }\nrules = ["oracle"]'
    [entry] = list_entries(parse_recipe(text, "test"))
    assert entry.rules == ("grid-best",)


def test_a_whole_number_for_a_real_one_is_the_same_run() -> None:
    keys = {
        make_plan(f'[[methods]]\nname = "tent"\nparams = {{ momentum = {zero} }}')[0].spec.key
        for zero in ("0", "0.0")
    }
    assert len(keys) == 1


def test_a_plan_does_not_go_through_the_source_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy_checkpoint("digits-sla", tmp_path) / "digits-sla.sites.safetensors").unlink()
    monkeypatch.setattr(Resources, "_training", lambda *_: pytest.fail("the source data were asked for"))
    text = BASE.replace("digits-plain", "digits-sla").replace("digits-rotation", "digits-sla")
    recipe = parse_recipe(text + '[[methods]]\nname = ["ttvd", "eata", "adanpc"]', "test")
    assert len(plan(recipe, Resources(WorkerConfig(checkpoints=tmp_path)))) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[params]\noptimiser = "sgd"\n' + TENT, "parameter [params] optimiser; did you mean 'optimizer'"),
        ("[grid]\nlearning_rate = [0.1]\n" + TENT, "no method of it has the parameter [grid] learning_rate"),
        (TENT + 'params = { lr = "0.1" }\n', "line 'tent': lr must be a number, such as 0.001, got '0.1'; leave"),
        (TENT + "params = { lr = true }\n", "lr must be a number"),
        (TENT + "grid = { lr = [[0.1]] }\n", "lr must be a number, such as 0.001, got [0.1]"),
        (TENT + "params = { steps = 1.5 }\n", "steps must be a whole number, such as 1, got 1.5"),
        (TENT + "params = { optimizer = 3 }\n", "optimizer must be a text"),
        ('[[methods]]\nname = "bn"\nparams = { count = "x" }\n', "count must be a number"),
        ('[stream]\norder = "dirichlet"\nalpha = "x"\n' + TENT, "alpha must be a number, such as 0.1, got 'x'"),
    ],
)  # fmt: skip
def test_a_value_that_fits_no_parameter_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="recipe bad") as caught:
        plan(parse_recipe(DIGITS + text, "bad"), shared_resources())
    assert words in str(caught.value)


def test_a_whole_number_will_do_for_a_real_one() -> None:
    members = plan(parse_recipe(DIGITS + TENT + "params = { lr = 0 }\n", "fine"), shared_resources())
    assert [member.spec.parameters["lr"] for member in members] == [0.0]


def test_missing_models_and_data_say_where_they_were_looked_for(tmp_path: Path) -> None:
    lost = 'data.set = "digits"\ncheckpoints.plain = "digits-plian"\n' + TENT
    with pytest.raises(ValueError, match=r"recipe bad: no checkpoint.*--checkpoints FOLDER names another"):
        plan(parse_recipe(lost, "bad"), shared_resources())
    away = DIGITS.replace('"digits"', '"cifar10"') + TENT
    with pytest.raises(FileNotFoundError, match=r"recipe bad: .*--data FOLDER names another") as caught:
        plan(parse_recipe(away, "bad"), Resources(WorkerConfig(data=tmp_path)))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("classes", [4, 6])
def test_a_model_of_another_set_is_refused(tmp_path: Path, classes: int) -> None:
    """Outputs that no class of the set stands for would only take answers away."""
    resources = make_resources(tmp_path, classes=5, count=10)
    other = Resources(resources.config, {"cifar10": make_pictures(20, classes)})
    plan(make_recipe(""), resources)
    with pytest.raises(ValueError, match=f"tiny tells 5 classes apart, cifar10 needs {classes}"):
        plan(make_recipe(""), other)
