"""Figures by their kinds: what is refused before anything starts, and what is stored."""

from pathlib import Path

import pytest

from tests.helpers.bench import make_recipe, make_resources
from ttvd.bench.figures import check_figures, make_figure, make_figures
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.bench.store import Store

SAMPLES = '[[figures]]\nkind = "samples"\ncount = 2\n'
SLICES = '[[figures]]\nkind = "slices"\n'


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Resources:
    return make_resources(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "slice"', "kind of figure 'slice'; did you mean 'slices'. Known: samples, slices, plane"),
        (
            'kind = "samples"\ncuont = 3',
            "'cuont'; did you mean 'count'. Known: checkpoint, corruption, .*count",
        ),
        ('kind = "samples"\nclasses = [1, 2, 3]', "option of samples 'classes'"),
        ('kind = "samples"\ncount = 0', "count must be a whole number of at least 1, got 0"),
        ('kind = "slices"\nlimit = 2.5', "limit must be a whole number"),
        ('kind = "slices"\ncorruption = "fogg"', "did you mean 'fog'"),
        ('kind = "slices"\nseverity = 6', "severity must be an integer from 1 to 5"),
        ('kind = "slices"\nclasses = ["cat", "dog"]', "three different names or numbers"),
        ('kind = "slices"\nclasses = ["cat", "dog", "cat"]', "three different names or numbers"),
        ('kind = "plane"\nlr = -1', "lr must be a positive number, got -1"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"recipe colours, figure 01-.*{message}"):
        check_figures(make_recipe("[[figures]]\n" + text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "slices"\nclasses = ["cat", "dgo", "frog"]', "class 'dgo'; did you mean 'dog'"),
        ('kind = "slices"\nclasses = [0, 1, 9]', "unknown class '9'"),
        ('kind = "plane"', "needs a model with 2 features, this one has 6"),
        ('kind = "samples"\ncheckpoint = "tny"', "did you mean 'tiny'"),
    ],
)
def test_models_that_lack_something_are_refused(text: str, message: str, resources: Resources) -> None:
    recipe = make_recipe("[[figures]]\n" + text)
    check_figures(recipe)
    with pytest.raises(ValueError, match=message):
        check_figures(recipe, resources)


def test_a_model_without_rotations_is_refused_and_so_is_a_missing_one() -> None:
    text = 'data.set = "digits"\n[[methods]]\nname = "bn"\n[[figures]]\nkind = "samples"\n'
    with pytest.raises(ValueError, match="give it a checkpoint"):
        check_figures(parse_recipe(text, "none"))
    with pytest.raises(ValueError, match="label-augmented"):
        check_figures(parse_recipe(text + 'checkpoint = "digits-plain"', "plain"), Resources(WorkerConfig()))


def test_the_recipes_of_the_repository_have_figures_that_can_be_made() -> None:
    for path in sorted(Path(__file__).parents[2].glob("recipes/*.toml")):
        check_figures(parse_recipe(path.read_text(), path.stem))


def test_figures_are_stored_once_and_made_again_when_something_changed(
    resources: Resources, tmp_path: Path
) -> None:
    recipe, told = make_recipe(SAMPLES + SLICES), list[str]()
    with Store(tmp_path / "runs.db") as store:
        assert make_figures(recipe, resources, store, told.append).made == ("01-samples", "02-slices")
        first = store.figures("colours")
        assert [figure.description["kind"] for figure in first] == ["samples", "slices"]
        assert first[0].payload == make_figure(recipe.figures[0], recipe, resources, 0)[1]
        again = make_figures(recipe, resources, store, told.append)
        assert (again.made, again.kept, told) == (
            (),
            ("01-samples", "02-slices"),
            ["01-samples", "02-slices"],
        )
        changed = make_recipe(SAMPLES + SLICES + "lr = 0.1\n")
        assert make_figures(changed, resources, store).made == ("02-slices",)
        assert store.figures("colours")[1].description["lr"] == 0.1
        assert make_figures(make_recipe(SAMPLES, "seeds = [3]\n"), resources, store).made == ("01-samples",)
        other = make_resources(tmp_path, count=160)
        assert make_figures(make_recipe(SAMPLES, "seeds = [3]\n"), other, store).made == ("01-samples",)


def test_a_figure_that_fails_does_not_stop_the_others(resources: Resources, tmp_path: Path) -> None:
    recipe = make_recipe('[[figures]]\nkind = "plane"\n' + SAMPLES)
    with Store(tmp_path / "runs.db") as store:
        outcome = make_figures(recipe, resources, store)
        assert outcome.made == ("02-samples",)
        assert "needs a model with 2 features" in outcome.failed["01-plane"]
        assert [figure.name for figure in store.figures("colours")] == ["02-samples"]
