"""Recipes: what is read, what is refused and with which words, and which runs a recipe asks for."""

from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from ttvd.bench.recipe import parse_recipe, plan, read_recipe
from ttvd.bench.recipe.planning import list_entries
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Member
from ttvd.bench.worker_config import WorkerConfig
from ttvd.cli.bench import read_recipes as apply_flags
from ttvd.data.corruptions import CORRUPTIONS, EXTRA
from ttvd.methods import list_methods

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
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


def make_plan(text: str) -> list[Member]:
    return plan(parse_recipe(BASE + text, "test"), Resources(WorkerConfig()))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_are_read(path: Path) -> None:
    recipe = read_recipe(path)
    entries = list_entries(recipe)
    assert recipe.name == path.stem
    assert entries
    assert recipe.title != path.stem


def test_there_is_a_recipe_for_each_table_and_figure_of_the_paper() -> None:
    names = {path.stem for path in RECIPES}
    tables = {f"table1-{data}" for data in ("cifar10", "cifar100", "imagenet-c", "imagenet-r")}
    rest = {"ablation-cifar10", "neighbours-imagenet", "class-means-imagenet", "batch-sizes-imagenet"}
    assert tables | rest | {"dirichlet-imagenet", "curves-imagenet", "samples-cifar10", "mnist-c"} <= names


def test_smoke_runs_every_method() -> None:
    recipe = next(path for path in RECIPES if path.stem == "smoke")
    labels = [entry.label for entry in list_entries(read_recipe(recipe))]
    assert set(list_methods()) <= set(labels)


def test_defaults() -> None:
    recipe = parse_recipe('data.set = "cifar10"\n[[methods]]\nname = "bn"', "short")
    assert recipe.title == "short"
    assert recipe.data.corruptions == CORRUPTIONS
    assert recipe.data.validation == EXTRA
    assert recipe.stream.batch_size == (64,)
    assert recipe.seeds == (0,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data", "is not TOML"),
        ('data.set = "digits"', "no [[methods]]"),
        ('[[methods]]\nname = "bn"', "needs a [data] part"),
        ('data.set = "cifar11"\n[[methods]]\nname = "bn"', "did you mean 'cifar10'"),
        ('tittle = "x"\ndata.set = "digits"\n[[methods]]\nname = "bn"', "did you mean 'title'"),
        ('data.set = "digits"\ndata.severty = 3\n[[methods]]\nname = "bn"', "did you mean 'severity'"),
        (
            'data.set = "digits"\ndata.corruptions = ["frogs"]\n[[methods]]\nname = "bn"',
            "did you mean 'frost'",
        ),
        ('data.set = "digits"\nrules = ["best"]\n[[methods]]\nname = "bn"', "Allowed: last, grid-best"),
        ('data.set = "digits"\nstream.order = "idd"\n[[methods]]\nname = "bn"', "did you mean 'iid'"),
        ('data.set = "digits"\nstream.alpha = 1\n[[methods]]\nname = "bn"', "has no 'alpha'"),
        ('data.set = "digits"\nstream.batch_size = 0\n[[methods]]\nname = "bn"', "at least 1"),
        ('data.set = "digits"\n[[methods]]\nlabel = "bn"', "not complete"),
        ('data.set = "digits"\ndata.severity = 7\n[[methods]]\nname = "bn"', "from 1 to 5"),
        ('data.set = "digits"\ndata.limit = -5\n[[methods]]\nname = "bn"', "limit must be a whole number"),
        ('data.set = "digits"\noracle.steps = 0\n[[methods]]\nname = "bn"', "[oracle] steps must be"),
        ('data.set = "digits"\nsites = [1.5]\n[[methods]]\nname = "bn"', "in (0, 1]"),
        ('data.set = "digits"\n[[methods]]\nname = "bn"\nseeds = [-1]', "a seed must be a whole number"),
        ('data.set = "digits"\nset.lr = inf\n[[methods]]\nname = "bn"', "inf and nan"),
        ('data.set = "digits"\ngrid.lr = 0.1\n[[methods]]\nname = "bn"', "a list of values"),
        ('data.set = "digits"\ncheckpoints.plane = "x"\n[[methods]]\nname = "bn"', "did you mean 'plain'"),
    ],
)
def test_a_bad_recipe_is_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="recipe bad") as caught:
        parse_recipe(text, "bad")
    assert words in str(caught.value)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="recipes/"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        read_recipe(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[methods]]\nname = "tnet"', "did you mean tent"),
        ('[[methods]]\nname = "tent"\nset = { rate = 1 }', "has no parameter 'rate'"),
        ('[[methods]]\nname = "tent"\nset = { lr = -1.0 }', "lr must be at least 0"),
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
            Resources(WorkerConfig()),
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
    (member,) = plan(parse_recipe(text, "test"), Resources(WorkerConfig()))
    assert [domain.corruption for domain in member.spec.domains] == ["fog", "snow"]


def test_the_oracle_is_for_methods_that_take_steps() -> None:
    text = (
        'rules = ["oracle"]\noracle.steps = 3\noracle.limit = 100\n'
        + BASE
        + '[[methods]]\nname = ["bn", "tent"]'
    )
    found = {m.label: m.spec for m in plan(parse_recipe(text, "test"), Resources(WorkerConfig()))}
    assert found["bn"].selection == "last"
    assert (found["tent"].selection, found["tent"].steps, found["tent"].limit) == ("oracle", 3, 100)
    assert found["tent"].episodic


def plan_oracle(seeds: str, lines: str) -> dict[tuple[str, str], list[int]]:
    """Seeds of the runs, by line and selection."""
    text = f'seeds = [0, 1, 2]\nrules = ["last", "oracle"]\noracle.seeds = {seeds}\n' + BASE + lines
    found: dict[tuple[str, str], list[int]] = {}
    for member in plan(parse_recipe(text, "test"), Resources(WorkerConfig())):
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
        ("[-1]", "a seed must be a whole number"),
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
    runs = [member.spec for member in plan(lifted, Resources(WorkerConfig()))]
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
    members = make_plan('[[methods]]\nname = "roid"\nseeds = [3]\nset = { seed = 7 }')
    assert members[0].spec.parameters["seed"] == 7


def test_corruptions_that_are_reported_do_not_choose() -> None:
    text = BASE.replace('["fog"]', '["fog", "spatter"]')
    line = '[[methods]]\nname = "tent"\ngrid = { lr = [0.1, 0.2] }\nrules = ["RULE"]'
    with pytest.raises(ValueError, match="spatter is reported and chooses parameters too"):
        plan(parse_recipe(text + line.replace("RULE", "validation"), "test"), Resources(WorkerConfig()))
    assert plan(parse_recipe(text + line.replace("RULE", "grid-best"), "test"), Resources(WorkerConfig()))


def test_a_search_without_steps_is_never_called_one_fixed_setting() -> None:
    text = BASE + '[[methods]]\nname = "t3a"\ngrid = { supports = [1, 5] }\nrules = ["oracle"]'
    [entry] = list_entries(parse_recipe(text, "test"))
    assert entry.rules == ("grid-best",)


def test_a_whole_number_for_a_real_one_is_the_same_run() -> None:
    keys = {
        make_plan(f'[[methods]]\nname = "tent"\nset = {{ momentum = {zero} }}')[0].spec.key
        for zero in ("0", "0.0")
    }
    assert len(keys) == 1


def test_a_plan_does_not_go_through_the_source_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for end in ("json", "safetensors"):
        name = f"digits-sla.{end}"
        (tmp_path / name).write_bytes((Path(str(files("ttvd.zoo"))) / "checkpoints" / name).read_bytes())
    monkeypatch.setattr(Resources, "_training", lambda *_: pytest.fail("the source data were asked for"))
    text = BASE.replace("digits-plain", "digits-sla").replace("digits-rotation", "digits-sla")
    recipe = parse_recipe(text + '[[methods]]\nname = ["ttvd", "eata", "adanpc"]', "test")
    assert len(plan(recipe, Resources(WorkerConfig(checkpoints=tmp_path)))) == 3
