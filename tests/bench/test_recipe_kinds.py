"""Recipes with entries of the wrong kind: each is answered with what was expected, what came and what to do."""

from pathlib import Path

import pytest

from tests.helpers.bench import make_pictures, make_recipe, make_resources
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.data.corruptions import CORRUPTIONS

TENT = '[[methods]]\nname = "tent"\n'
DIGITS = 'data.set = "digits"\ndata.corruptions = ["fog"]\ncheckpoints.plain = "digits-plain"\n'


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
        plan(parse_recipe(DIGITS + text, "bad"), Resources(WorkerConfig()))
    assert words in str(caught.value)


def test_a_whole_number_will_do_for_a_real_one() -> None:
    members = plan(parse_recipe(DIGITS + TENT + "params = { lr = 0 }\n", "fine"), Resources(WorkerConfig()))
    assert [member.spec.parameters["lr"] for member in members] == [0.0]


def test_names_of_groups_can_stand_in_a_list() -> None:
    recipe = parse_recipe('data.set = "digits"\ndata.corruptions = ["none", "all"]\n' + TENT, "both")
    assert recipe.data.corruptions == ("none", *CORRUPTIONS)


def test_missing_models_and_data_say_where_they_were_looked_for(tmp_path: Path) -> None:
    lost = 'data.set = "digits"\ncheckpoints.plain = "digits-plian"\n' + TENT
    with pytest.raises(ValueError, match=r"recipe bad: no checkpoint.*--checkpoints FOLDER names another"):
        plan(parse_recipe(lost, "bad"), Resources(WorkerConfig()))
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
