"""Recipes: what is read, what is refused and with which words, and how they are cut down."""

from pathlib import Path

import pytest

from tests.helpers.bench import shared_resources
from ttvd.bench.plan import plan
from ttvd.bench.recipe import cut_limit, cut_lines, cut_seeds, list_entries, parse_recipe, read_recipe
from ttvd.data.corruptions import CORRUPTIONS, EXTRA
from ttvd.methods import list_methods

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TENT = '[[methods]]\nname = "tent"\n'
TEXT = """
data.set = "digits"
data.corruptions = ["fog"]
reference = "bn"
checkpoints.plain = "digits-plain"
grid.lr = [0.01, 0.001]

[[methods]]
name = ["source", "bn", "tent"]

[[methods]]
name = "bn"
label = "SLA + bn"
checkpoint = "digits-sla"
views = 4
seeds = [3, 4]
"""


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
        ('data.set = "digits"\ndata.severity = 7\n[[methods]]\nname = "bn"', "severity must be at most 5"),
        (
            'data.set = "digits"\ndata.limit = -5\n[[methods]]\nname = "bn"',
            "limit must be at least 1, got -5",
        ),
        ('data.set = "digits"\noracle.steps = 0\n[[methods]]\nname = "bn"', "[oracle] steps must be"),
        ('data.set = "digits"\nsites = [1.5]\n[[methods]]\nname = "bn"', "sites must be at most 1"),
        ('data.set = "digits"\n[[methods]]\nname = "bn"\nseeds = [-1]', "seeds must be at least 0"),
        ("x = " + 5000 * "[" + 5000 * "]", "nested too deeply"),
        (
            'data.set = "digits"\nseeds = 9223372036854775808\n[[methods]]\nname = "bn"',
            "seeds must be at most",
        ),
        ('data.set = "digits"\nparams.tau = 2020-01-01\n[[methods]]\nname = "bn"', "dates and times"),
        ('data.set = "digits"\nparams.lr = inf\n[[methods]]\nname = "bn"', "inf and nan"),
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
        ("", "is empty; it needs at least [data]"),
        ('name = "x"\n', "it is called like its file"),
        ("title = 3\n", "title must be a text in quotation marks, got 3"),
        (
            'seeds = "0"\n',
            "seeds must be a whole number or a list of them, got '0'; leave the quotation marks out",
        ),
        ("seeds = true\n", "seeds must be a whole number"),
        ("seeds = []\n", "seeds is empty"),
        ("seeds = [1, 1]\n", "seeds has 1 twice"),
        ("rules = []\n", "rules is empty"),
        ('sites = "half"\n', "sites must be a number or a list of them, got 'half'"),
        ("params = 3\n", "params must be a table"),
        ('checkpoints = "digits-plain"\n', "checkpoints must be a table"),
        ("checkpoints.plain = 3\n", "[checkpoints] plain must be a text"),
        ('data = ["digits"]\n', "[data] must be a table"),
        ("data.limit = 3\n", "[data] is not complete: it needs set"),
        ("data.set = 3\n", "[data] set must be a text"),
        ('data.set = "digits"\ndata.corruptions = []\n', "[data] corruptions is empty"),
        ('data.set = "digits"\ndata.corruptions = 3\n', "[data] corruptions must be a text"),
        ('data.set = "digits"\ndata.corruptions = ["fog", "fog"]\n', "[data] corruptions has 'fog' twice"),
        ('data.set = "digits"\ndata.validation = []\n', "[data] validation is empty"),
        ('data.set = "digits"\ndata.limit = "9"\n', "[data] limit must be a whole number, got '9'; leave"),
        (
            'data.set = "digits"\ndata.severity = [3, 5]\n',
            "[data] severity must be a whole number, got [3, 5]",
        ),
        ("stream = 3\n", "[stream] must be a table"),
        ("stream.batch_size = []\n", "[stream] batch_size is empty"),
        ("stream.batch_size = [8, 8]\n", "[stream] batch_size has 8 twice"),
        ('stream.join = ["reset"]\n', "[stream] join ['reset'] is unknown; did you mean 'reset'"),
        ('stream.order = "dirichlet"\nstream.alpha = []\n', "[stream] alpha is empty"),
        ('oracle.episodic = "true"\n', "[oracle] episodic must be true or false, got 'true'; leave"),
        ("grid.lr = [0.1, 0.1]\n", "[grid] lr has 0.1 twice"),
        ('methods.name = "tent"\n', "methods must be made of tables under [[methods]], with double brackets"),
        ('methods = ["tent"]\n', "methods must be made of tables under [[methods]]"),
        ('[[methods]]\nlabel = "x"\n', "[[methods]] is not complete: it needs name"),
        ("[[methods]]\nname = []\n", "[[methods]] name is empty"),
        (TENT + "label = 3\n", "[[methods]] label must be a text"),
        (TENT + 'views = "4"\n', "[[methods]] views must be a whole number, got '4'; leave"),
        (TENT + 'params = "lr"\n', "[[methods]] params must be a table"),
    ],
)
def test_an_entry_of_the_wrong_kind_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="recipe bad") as caught:
        parse_recipe(text, "bad")
    assert words in str(caught.value)


def test_an_entry_of_several_lines_is_counted() -> None:
    text = 'data.set = "digits"\n' + TENT + TENT + "views = 0\n"
    with pytest.raises(ValueError, match=r"\[\[methods\]\] \(entry 2\) views must be at least 1, got 0"):
        parse_recipe(text, "bad")


@pytest.mark.parametrize(
    ("group", "names"),
    [("all", CORRUPTIONS), ("extra", EXTRA), ("every", (*CORRUPTIONS, *EXTRA)), ("fog", ("fog",))],
)
def test_names_of_groups_can_stand_in_a_list(group: str, names: tuple[str, ...]) -> None:
    recipe = parse_recipe(f'data.set = "digits"\ndata.corruptions = ["none", "{group}"]\n' + TENT, "both")
    assert recipe.data.corruptions == ("none", *names)


def test_lines_that_stay_ask_for_the_same_runs() -> None:
    recipe, resources = parse_recipe(TEXT, "small"), shared_resources()
    cut = cut_lines(recipe, ["tent", "SLA + bn"])
    assert [entry.label for entry in list_entries(cut)] == ["tent", "SLA + bn"]
    wanted = [member for member in plan(recipe, resources) if member.label in ("tent", "SLA + bn")]
    assert plan(cut, resources) == wanted


def test_a_reference_is_kept_where_it_is_one_of_them() -> None:
    recipe = parse_recipe(TEXT, "small")
    assert cut_lines(recipe, ["bn", "source"]).reference == "bn"
    assert cut_lines(recipe, ["source"]).reference is None


def test_a_line_that_is_not_there_is_missed_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="no line 'Tent'; it has: source, bn, tent, SLA"):
        cut_lines(parse_recipe(TEXT, "small"), ["bn", "Tent"])


def test_limits_and_seeds_are_those_of_all_lines() -> None:
    recipe = cut_seeds(cut_limit(parse_recipe(TEXT, "small"), 128), (7,))
    specs = [member.spec for member in plan(recipe, shared_resources())]
    assert {(spec.limit, spec.seed) for spec in specs} == {(128, 7)}
    with pytest.raises(ValueError, match="seeds must be whole numbers from 0"):
        cut_seeds(recipe, (2**63,))
