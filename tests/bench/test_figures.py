"""Figures that need a model: their numbers, against plain loops and definitions."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.bench import NAMES, make_pictures, make_recipe, make_resources
from ttvd.bench.figures import check_figures, make_figure, make_figures
from ttvd.bench.figures.feature_plane import PlaneData, PlaneOptions
from ttvd.bench.figures.samples import SampleOptions
from ttvd.bench.figures.scene import Scene, Trace, make_scene, pack, unpack
from ttvd.bench.figures.slices import choose_classes
from ttvd.bench.recipe import Recipe, parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.bench.store import Store
from ttvd.data.corruptions import corrupt
from ttvd.nn.split import split
from ttvd.nn.views import rotate
from ttvd.zoo.sites import Sites

GAMMA = -0.8
SAMPLES = '[[figures]]\nkind = "samples"\ncount = 2\n'
SLICES = '[[figures]]\nkind = "slices"\n'


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Resources:
    return make_resources(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def scene(resources: Resources) -> Scene:
    recipe = make_recipe(SAMPLES)
    return make_scene(SampleOptions().complete(recipe), recipe, resources, seed=0)


def make(
    figures: str, resources: Resources, seed: int = 0, extra: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    recipe = make_recipe(figures, extra)
    facts, payload = make_figure(recipe.figures[0], recipe, resources, seed)
    return facts, unpack(payload)


def look(scene: Scene, statistics: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each batch: images, features (v, b, d) of all rotations, labels; by a model in torch's own modes."""
    model = copy.deepcopy(scene.parts.model).train(statistics == "batch")
    for x, y in scene.stream:
        with torch.no_grad():
            z = split(model).features(rotate(x, 4))
        yield x, z.unflatten(0, (4, -1)).double(), y


def measure(z: Tensor, site: Tensor) -> float:
    return math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(z, site, strict=True)))


def test_the_stream_holds_the_corrupted_images_of_the_set(resources: Resources) -> None:
    recipe = make_recipe(SAMPLES)
    options = SampleOptions(limit=100, severity=3).complete(recipe)
    stream = make_scene(options, recipe, resources, seed=4).stream
    images, labels = (torch.cat(parts) for parts in zip(*stream, strict=True))
    pictures = make_pictures(320, 5)
    noisy = corrupt(pictures.floats(), "gaussian_noise", 3)
    assert len(images) == 100
    assert torch.equal(stream.rows.sort().values, stream.rows.unique())
    for image, label in zip(images, labels, strict=True):
        (row,) = (noisy == image).flatten(1).all(1).nonzero()[:, 0].tolist()
        assert label == pictures.labels[row]
    clean = stream.clean()
    assert clean is not None
    before = torch.cat([x for x, _ in clean])
    assert torch.equal(corrupt(before, "gaussian_noise", 3, index=_find(pictures.floats(), before)), images)


def _find(all_images: Tensor, some: Tensor) -> list[int]:
    return [int((all_images == image).flatten(1).all(1).nonzero()[0, 0]) for image in some]


def test_a_stream_is_enriched_without_repeating_an_image(resources: Resources) -> None:
    recipe = make_recipe(SAMPLES)
    stream = make_scene(SampleOptions(limit=10).complete(recipe), recipe, resources, seed=0).stream
    more = stream.enrich([0, 3], 12)
    counts = more.labels[more.rows].bincount(minlength=5)
    assert counts[0] == counts[3] == 12
    assert (
        counts.sum()
        == len(more.rows.unique())
        == 10 + sum(12 - int((stream.labels[stream.rows] == k).sum()) for k in (0, 3))
    )
    assert len(more.enrich([0], 1000).rows.unique()) == len(more.rows) + 64 - 12


def test_samples_have_the_distances_and_influences_of_their_definitions(
    resources: Resources, scene: Scene
) -> None:
    facts, arrays = make(SAMPLES, resources)
    means = scene.sites.means
    found: list[tuple[float, int, list[list[float]], Tensor]] = []
    spoilt = 0
    for x, z, y in look(scene, "batch"):
        for place in range(len(y)):
            apart = [[measure(z[view, place], means[k, view]) for k in range(5)] for view in range(4)]
            influence = [sum(apart[view][k] ** GAMMA for view in range(4)) for k in range(5)]
            lost = margin([-d / 0.05 for d in apart[0]], int(y[place]))
            won = margin(influence, int(y[place]))
            spoilt += lost > 0 > won
            if lost < 0 < won:
                found.append((min(-lost, won), int(y[place]), apart, x[place]))
    assert (facts["seen"], facts["found"], facts["spoilt"]) == (320, len(found), spoilt)
    found.sort(key=lambda item: -item[0])
    others = [item for item in found if item[1] != found[0][1]]
    for row, (_, truth, apart, image) in enumerate((found[0], others[0])):
        assert arrays["truth"][row] == truth
        assert np.allclose(arrays["distances"][row], apart, rtol=1e-4)
        influence = [sum(apart[view][k] ** GAMMA for view in range(4)) for k in range(5)]
        assert np.allclose(arrays["influence"][row], influence, rtol=1e-4)
        assert influence.index(max(influence)) == truth != apart[0].index(min(apart[0]))
        turned = torch.stack([torch.rot90(image, view, (1, 2)) for view in range(4)])
        assert np.array_equal(arrays["images"][row], (255 * turned).round().byte().numpy())


def margin(scores: list[float], truth: int) -> float:
    total = sum(math.exp(score) for score in scores)
    probs = [math.exp(score) / total for score in scores]
    return probs[truth] - max(p for k, p in enumerate(probs) if k != truth)


def test_slices_are_exact_and_features_are_projected(resources: Resources, scene: Scene) -> None:
    facts, arrays = make(SLICES + 'classes = ["cat", 0, "frog"]\n', resources)
    assert facts["chosen"] == [2, 0, 4]
    origin, axes, means = arrays["origin"], arrays["axes"], scene.sites.means.numpy()
    assert np.allclose(axes @ axes.T, np.eye(2))
    rng = np.random.default_rng(0)
    points = rng.normal(size=(50, 2))
    spatial = origin + points @ axes
    for name, sites in (("vd", means[:, 0]), ("civd", means.reshape(20, -1))):
        cut = arrays["diagrams"][name]
        whole = np.square(spatial[:, None] - sites).sum(-1)
        flat = np.square(points[:, None] - cut["sites"]).sum(-1) - cut["weights"]
        assert np.allclose(flat, whole, atol=1e-5)
    assert np.allclose(arrays["diagrams"]["vd"]["weights"][[2, 0, 4]], 0, atol=1e-8)
    z, y = (
        torch.cat(parts, dim)
        for parts, dim in zip(
            zip(*((z, y) for _, z, y in look(scene, "batch")), strict=True), (1, 0), strict=True
        )
    )
    kept = torch.isin(y, torch.tensor([0, 2, 4]))
    state, upright = arrays["states"]["bn"], z[0, kept].numpy()
    assert np.array_equal(np.array([2, 0, 4])[arrays["labels"]], y[kept].numpy())
    back = origin + state["points"] @ axes
    assert np.allclose((upright - back) @ axes.T, 0, atol=1e-5)
    assert np.allclose(np.linalg.norm(upright - back, axis=1), state["off"], atol=1e-5)
    for name, classes in predict(z[:, kept], scene).items():
        assert np.mean(state[name] == classes) > 0.99, name


def predict(z: Tensor, scene: Scene) -> dict[str, Any]:
    """Classes by the definitions of the diagrams, in the space of all features."""
    means, linear = scene.sites.means, scene.parts.linear
    logits = (z @ linear.weight.double().T + linear.bias.double()).unflatten(-1, (5, 4))
    apart = (z[:, :, None] - means.transpose(0, 1)[:, None]).norm(dim=-1)
    own = torch.stack([logits[view, :, :, view] for view in range(4)])
    power = z.square().sum(-1)[..., None] - own  # d² - v² = |z|² - (W z + b)
    shift = (linear.bias.double() + linear.weight.double().square().sum(1) / 4).max()
    return {
        "vd": apart[0].argmin(1).numpy(),
        "pd": logits[0, :, :, 0].argmax(1).numpy(),
        "civd": apart.pow(GAMMA).sum(0).argmax(1).numpy(),
        "cipd": (power + shift).pow(GAMMA).sum(0).argmax(1).numpy(),
    }


def test_the_states_of_a_slice_are_those_of_the_model(resources: Resources, scene: Scene) -> None:
    facts, arrays = make(SLICES, resources)
    assert set(arrays["states"]) == {"clean", "source", "bn", "ttvd"}
    chosen = torch.tensor(facts["chosen"])
    clean = scene.stream.clean()
    assert clean is not None
    for name, stream in (("source", scene.stream), ("clean", clean)):
        whole = replace(scene, stream=stream)
        pairs = [(z[0], y) for _, z, y in look(whole, "source")]
        z, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        projected = (z[torch.isin(y, chosen)].numpy() - arrays["origin"]) @ arrays["axes"].T
        assert np.allclose(arrays["states"][name]["points"], projected, atol=1e-5)
    assert not np.allclose(arrays["states"]["ttvd"]["points"], arrays["states"]["bn"]["points"], atol=1e-3)
    assert facts["lr"] is None  # its default, which depends on the model


def make_sites(*places: float) -> Sites:
    means = torch.tensor([[[place, 0.0]] for place in places], dtype=torch.float64)
    return Sites(means, torch.ones(len(places), 1, dtype=torch.int64), "none")


def test_the_most_confused_classes_are_chosen_and_the_nearest_without_mistakes() -> None:
    sites = make_sites(0.0, 1.0, 10.0, 11.5, 30.0)
    right = np.array([0, 1, 2, 3, 4])
    at_home = sites.means[:, 0].numpy()[None]
    assert choose_classes(Trace(at_home, right, right), sites) == [0, 1, 2]
    astray = at_home[:, [4, 4, 4, 4, 1, 2]]  # three of class 3 and one of class 0 lie at the site of class 4
    labels = np.array([3, 3, 3, 0, 1, 2])
    assert choose_classes(Trace(astray, labels, labels), sites) == [0, 3, 4]


def test_figures_do_not_depend_on_anything_but_their_seed(resources: Resources) -> None:
    for figures in (SAMPLES, SLICES):
        recipe = make_recipe(figures)
        first, again = (make_figure(recipe.figures[0], recipe, resources, 0) for _ in range(2))
        assert first == again
        torch.manual_seed(7)
        assert make_figure(recipe.figures[0], recipe, resources, 0) == first
        assert make_figure(recipe.figures[0], recipe, resources, 1)[0]["key"] != first[0]["key"]


@pytest.fixture(scope="module")
def digits() -> Resources:
    return Resources(WorkerConfig())


@pytest.fixture(scope="module")
def plane(digits: Resources) -> tuple[dict[str, Any], PlaneData]:
    text = 'data = {set = "digits", corruptions = ["gaussian_noise"], constants = "imagenet"}\n'
    text += (
        '[[methods]]\nname = "bn"\n[[figures]]\nkind = "plane"\ncheckpoint = "digits-plane"\nseverity = 4\n'
    )
    recipe = parse_recipe(text + "limit = 192\n", "plane")
    facts, payload = make_figure(recipe.figures[0], recipe, digits, 0)
    return facts, PlaneData.from_arrays(unpack(payload))


def test_the_plane_shows_what_the_methods_saw(
    digits: Resources, plane: tuple[dict[str, Any], PlaneData]
) -> None:
    facts, data = plane
    assert facts["classes"] == ["0", "1", "2"]
    assert facts["strength"] == {"scale": 0.26}
    recipe = parse_recipe('data = {set = "digits", constants = "imagenet"}\n[[methods]]\nname = "bn"', "x")
    options = PlaneOptions("digits-plane", "gaussian_noise", 4, 192).complete(recipe)
    scene = make_scene(options, recipe, digits, seed=0)
    for name, statistics, views in (("source", "source", 1), ("SLA + bn", "batch", 4)):
        trace, start = data.traces[name], 0
        for _, z, y in look(scene, statistics):
            part = slice(start, start + len(y))
            assert np.allclose(trace.features[:, part], z[:views], atol=1e-4)
            own = torch.stack([scene.parts.head(z[view].float())[:, view::4] for view in range(views)])
            assert np.mean(trace.predicted[part] == own.mean(0).argmax(1).numpy()) > 0.98
            assert np.array_equal(trace.labels[part], y)
            start = part.stop
        assert start == facts["images"] == 192
    assert np.allclose(data.diagrams["vd"].sites, scene.sites.means[:, 0])
    assert {name: move.before.shape for name, move in data.moves.items()} == {
        "bn": (32, 2),
        "vd": (32, 2),
        "ttvd": (128, 2),
    }
    assert np.array_equal(data.moves["bn"].after, data.moves["vd"].before)


def test_values_survive_their_journey_as_bytes(plane: tuple[dict[str, Any], PlaneData]) -> None:
    data = plane[1]
    again = PlaneData.from_arrays(unpack(pack(data.to_arrays())))
    for name, trace in data.traces.items():
        assert np.array_equal(again.traces[name].features, trace.features)
        assert again.traces[name].error == trace.error
    for name, diagram in data.diagrams.items():
        assert torch.equal(again.diagrams[name].sites, diagram.sites)
        assert again.diagrams[name].views == diagram.views
    assert pack({"a": np.zeros((0, 3))}) == pack({"a": np.zeros((0, 3))})
    for damaged in (b"", b"no arrays", pack(data.to_arrays())[:-9]):
        with pytest.raises(ValueError, match="not the arrays of a figure"):
            unpack(damaged)


def test_sets_that_come_corrupted_have_no_clean_images(resources: Resources) -> None:
    own = Resources(resources.config, {"cifar10-c/gaussian_noise/5": make_pictures(128, 5)})
    recipe: Recipe = replace(make_recipe(SLICES), data=replace(make_recipe(SLICES).data, set="cifar10-c"))
    facts, payload = make_figure(recipe.figures[0], recipe, own, 0)
    assert set(unpack(payload)["states"]) == {"source", "bn", "ttvd"}
    assert facts["constants"] == "official"
    assert facts["classes"] == list(NAMES)


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


def test_methods_of_a_figure_can_be_replaced(resources: Resources) -> None:
    usual = make(SLICES, resources)
    facts, arrays = make(SLICES + 'methods = { ttvd = "civd" }\n', resources)
    assert facts["key"] != usual[0]["key"]
    assert facts["lr"] == 0.001  # that of the other method
    assert np.array_equal(arrays["states"]["bn"]["points"], usual[1]["states"]["bn"]["points"])
    assert not np.array_equal(arrays["states"]["ttvd"]["points"], usual[1]["states"]["ttvd"]["points"])
    for wrong, words in (
        ('{ tvd = "civd" }', "did you mean 'ttvd'"),
        ('{ ttvd = "cvid" }', "did you mean civd"),
    ):
        with pytest.raises(ValueError, match=words):
            check_figures(make_recipe(SLICES + f"methods = {wrong}\n"))
