"""Drawing stored figures, without a model."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Canvas

from tests.helpers.bench import make_recipe, make_resources
from ttvd.bench.figures import make_figure
from ttvd.bench.figures.feature_plane import PlaneData
from ttvd.bench.figures.scene import pack, unpack
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.bench.store import Figure
from ttvd.geometry import Diagram
from ttvd.nn.split import SplitModel, split
from ttvd.report import planes
from ttvd.report.document import Notice
from ttvd.report.feature_plane import Plane
from ttvd.report.figures import draw_figure
from ttvd.report.gallery import draw_gallery
from ttvd.report.page import Exhibit
from ttvd.report.planes import Box, Grid
from ttvd.report.samples import NAMED, plot_bars, plot_image
from ttvd.report.slice_exhibits import RESOLUTION, Slice
from ttvd.report.style import MUTED, RIGHT, WRONG, class_colour, lighten
from ttvd.zoo.sites import Sites

BOX: Box = (-2.0, -2.0, 2.0, 2.0)


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Resources:
    return make_resources(tmp_path_factory.mktemp("model"))


def make(text: str, resources: Resources) -> Figure:
    recipe = make_recipe("[[figures]]\n" + text)
    facts, payload = make_figure(recipe.figures[0], recipe, resources, 0)
    return Figure("01", "colours", json.loads(json.dumps(facts)), payload)


@pytest.fixture(scope="module")
def slices(resources: Resources) -> Figure:
    return make('kind = "slices"', resources)


@pytest.fixture(scope="module")
def samples(resources: Resources) -> Figure:
    return make('kind = "samples"\ncount = 3', resources)


@pytest.fixture(scope="module")
def plane() -> Figure:
    text = 'data = {set = "digits", corruptions = ["gaussian_noise"], constants = "imagenet"}\n'
    text += (
        '[[methods]]\nname = "bn"\n[[figures]]\nkind = "plane"\ncheckpoint = "digits-plane"\nlimit = 192\n'
    )
    recipe = parse_recipe(text, "plane")
    return Figure("01", "plane", *make_figure(recipe.figures[0], recipe, Resources(WorkerConfig()), 0))


@pytest.fixture(scope="module")
def drawn_slices(slices: Figure) -> Exhibit:
    (exhibit,) = draw_figure(slices)
    return exhibit


@pytest.fixture(scope="module")
def drawn_samples(samples: Figure) -> Exhibit:
    (exhibit,) = draw_figure(samples)
    return exhibit


def find_model(resources: Resources) -> tuple[SplitModel, Sites]:
    source = resources.source("tiny")
    assert source.sites is not None
    return split(source.model), source.sites


def label_space(points: Any, parts: SplitModel, sites: Sites) -> dict[str, Any]:
    """Classes of points of the space of all features, by the definitions of the diagrams."""
    z, k = torch.from_numpy(points), sites.num_classes
    logits = z @ parts.linear.weight.detach().double().T + parts.linear.bias.detach().double()
    apart = torch.stack([(z - site).norm(dim=1) for site in sites.means.flatten(0, 1)], 1)
    return {
        "vd": apart[:, ::4].argmin(1),
        "pd": logits[:, ::4].argmax(1),
        "civd": apart.pow(-0.8).unflatten(1, (k, 4)).sum(2).argmax(1),
        "cipd": logits.argmax(1) // 4,
    }


def test_cells_of_a_slice_are_those_of_the_space_that_it_cuts(slices: Figure, resources: Resources) -> None:
    arrays = unpack(slices.payload)
    view = Slice(dict(slices.description), arrays)
    box = view.box("bn", "source")
    xs, ys = np.linspace(box[0], box[2], RESOLUTION), np.linspace(box[1], box[3], RESOLUTION)
    rows, columns = np.random.default_rng(0).integers(RESOLUTION, size=(2, 4000))
    points = arrays["origin"] + np.stack([xs[columns], ys[rows]], 1) @ arrays["axes"]
    for name, expected in label_space(points, *find_model(resources)).items():
        found = view.grid(name, box).values[rows, columns]
        assert np.mean(found == expected.numpy()) > 0.999, name
        assert len(np.unique(found)) > 1


def test_a_slice_says_how_many_are_wrong(slices: Figure, drawn_slices: Exhibit) -> None:
    exhibit = drawn_slices
    states, chosen = unpack(slices.payload)["states"], np.array(slices.description["chosen"])
    truth = chosen[unpack(slices.payload)["labels"]]
    for name in ("vd", "pd", "civd", "cipd"):
        assert f"{np.mean(states['bn'][name] != truth):.0%} ({name.upper()})" in exhibit.caption
    for state, words in (("source", "are wrong without"), ("bn", "with statistics"), ("ttvd", "with steps")):
        assert f"{np.mean(states[state]['civd'] != truth):.0%} {words}" in exhibit.caption
    assert [len(strip.panels) for strip in exhibit.strips] == [4, 4]
    names = [slices.description["classes"][k] for k in chosen]
    assert [text for _, text in exhibit.key[:3]] == names
    assert "tiny" in exhibit.details
    assert "gaussian noise 5 with CIFAR-10-C's constants (scale 0.1)" in exhibit.details


def test_a_slice_of_an_official_set_has_no_clean_picture(slices: Figure) -> None:
    arrays = unpack(slices.payload)
    del arrays["states"]["clean"]
    facts = {**slices.description, "constants": "official", "strength": {}}
    (exhibit,) = draw_figure(replace(slices, description=facts, payload=pack(arrays)))
    assert [len(strip.panels) for strip in exhibit.strips] == [4, 3]
    assert "gaussian noise 5 as it was released" in exhibit.details


def test_each_sample_is_a_row_with_its_story(samples: Figure, drawn_samples: Exhibit) -> None:
    exhibit = drawn_samples
    arrays, names = unpack(samples.payload), samples.description["classes"]
    assert len(exhibit.strips) == len(arrays["truth"]) > 1
    for row, strip in enumerate(exhibit.strips):
        nearest, truth = arrays["distances"][row].argmin(1), arrays["truth"][row]
        assert len(strip.panels) == 5
        assert f"true class is {names[truth]}" in strip.heading
        assert f"class mean of {names[nearest[0]]};" in strip.heading
        assert f"settles on {names[truth]}" in strip.heading
        for view, angle in enumerate(("0°", "90°", "180°", "270°")):
            assert (f" {angle}" in strip.heading.split("; ")[1]) == (nearest[view] == truth)
    assert f"correct {samples.description['found']} mistakes" in exhibit.details


def test_one_sample_is_told_in_the_caption_and_none_is_said_plainly(samples: Figure) -> None:
    arrays = unpack(samples.payload)
    one, none = (
        draw_figure(replace(samples, payload=pack({name: array[:count] for name, array in arrays.items()})))[
            0
        ]
        for count in (1, 0)
    )
    assert "The true class is" in one.caption
    assert one.strips[0].heading == ""
    assert "correct no mistake" in none.caption
    assert (len(none.strips), len(none.key)) == (0, 0)


def test_the_plane_has_the_papers_three_figures(plane: Figure) -> None:
    first, second, third = draw_figure(plane)
    traces = unpack(plane.payload)["traces"]
    for name in ("source", "bn", "civd", "ttvd"):
        error = np.mean(traces[name]["predicted"] != traces[name]["labels"])
        assert f"{error:.1%}" in first.caption
    assert [len(strip.panels) for strip in first.strips] == [4, 8]
    assert "entropy" in second.caption
    assert "VD loss" in third.caption
    assert [text for _, text in first.key] == ["digit 0", "digit 1", "digit 2", "misclassified"]


def test_misplaced_features_lie_nearer_to_another_site(plane: Figure) -> None:
    view = Plane(PlaneData.from_arrays(unpack(plane.payload)), dict(plane.description), 50)
    trace, sites = view.data.traces["SLA + source"], view.data.diagrams["civd"].sites.numpy()
    apart = np.linalg.norm(trace.features[:, :, None] - sites, axis=-1)
    joint = np.power(apart, -0.8).reshape(*apart.shape[:2], 3, 4).sum(-1).argmax(-1)
    assert np.array_equal(view.misplaced(trace, "civd"), joint != trace.labels)
    upright = view.data.traces["source"]
    nearest = apart_from(upright.features[0], sites[::4]).argmin(1)
    assert np.array_equal(view.misplaced(upright, "vd")[0], nearest != upright.labels)


def apart_from(points: Any, sites: Any) -> Any:
    return np.array([[np.hypot(*(point - site)) for site in sites] for point in points])


def test_the_same_numbers_give_the_same_pictures(samples: Figure, drawn_samples: Exhibit) -> None:
    assert draw_figure(samples) == [drawn_samples]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"description": {"kind": "hologram"}}, "kind 'hologram'; this version draws samples, slices, plane"),
        ({"description": {}}, "kind None"),
        ({"payload": b"nothing"}, "not the arrays of a figure"),
        ({"payload": pack({"truth": np.zeros(2)})}, "it lacks 'distances'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(samples: Figure, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_figure(replace(samples, **change))


def test_texts_for_those_who_cannot_see_tell_the_panels_apart(
    drawn_slices: Exhibit, drawn_samples: Exhibit
) -> None:
    cells = {panel.text for strip in drawn_slices.strips for panel in strip.panels}
    assert len(cells) == 7  # of eight: CIVD with batch statistics is in both rows
    told = [panel.text for strip in drawn_samples.strips for panel in strip.panels]
    assert all("nearest class mean" in text or "influence" in text for text in told)


def test_images_in_colours_and_in_one_channel() -> None:
    pixels = np.linspace(0, 1, 12).reshape(2, 2, 3)
    drawn = plot_image(pixels, Canvas().subplots()).images[0]
    assert np.array_equal(np.asarray(drawn.get_array()), pixels)
    drawn = plot_image(pixels[:, :, :1], Canvas().subplots()).images[0]
    assert np.array_equal(np.asarray(drawn.get_array()), pixels[:, :, 0])


def test_many_classes_name_only_the_two_that_matter() -> None:
    names, values = [f"class {k}" for k in range(NAMED + 1)], np.arange(1.0, NAMED + 2)
    ax = plot_bars(values, Canvas().subplots(), truth=4, chosen=9, names=names, label="distance")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["class 9", "class 4"]
    wide = ax.containers[1]
    assert [(to_hex(bar.get_facecolor()), bar.get_height()) for bar in wide] == [(WRONG, 10.0), (RIGHT, 5.0)]
    right = plot_bars(values, Canvas().subplots(), truth=4, chosen=4, names=names, label="distance")
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["class 4"]


def test_long_names_stand_beside_their_sites() -> None:
    sites = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.5]])
    ax = planes.plot_sites(Diagram(sites), Canvas().subplots(), names=["airplane", "bird", "cat"])
    assert [text.get_text() for text in ax.texts] == ["airplane", "bird", "cat"]
    assert np.allclose([np.asarray(marks.get_offsets())[0] for marks in ax.collections], sites)
    assert [text.get_horizontalalignment() for text in ax.texts] == ["right", "left", "center"]
    planes.plot_sites(Diagram(sites[:1]), Canvas().subplots(), names=["airplane"])


def test_regions_of_other_classes_are_grey_and_named_if_large() -> None:
    grid = Grid(
        np.repeat([[0, 1]], 20, axis=0).repeat(10, axis=1), np.linspace(-1, 1, 20), np.linspace(-1, 1, 20)
    )
    grid.values[0, 0] = 2
    ax = planes.plot_regions(grid, Canvas().subplots(), palette=[class_colour(0), MUTED, MUTED])
    corner = np.asarray(ax.images[0].get_array())[0, -1]
    assert to_hex(corner) == lighten(MUTED, planes.PALE)
    planes.name_regions(grid, ax, names={1: "dog", 2: "frog"})
    (name,) = ax.texts
    assert name.get_text() == "dog"
    assert name.get_position()[0] > 0


def test_boxes_hold_the_sites_and_nearly_all_points() -> None:
    points = np.random.default_rng(0).normal(size=(2000, 2))
    xmin, ymin, xmax, ymax = planes.find_box(points, np.array([[9.0, 0.0]]), margin=0.5)
    assert xmax - xmin == pytest.approx(ymax - ymin)
    assert xmax > 9
    inside = (points > [xmin, ymin]).all(1) & (points < [xmax, ymax]).all(1)
    assert inside.mean() > 0.98


def test_the_nearest_site_of_a_cluster_decides() -> None:
    diagram = Diagram(
        torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 0.0], [9.0, 9.0]]), groups=torch.tensor([0, 0, 1, 1])
    )
    grid = planes.label_nearest(diagram, BOX, 5)
    assert grid.values[2].tolist() == [0, 0, 1, 0, 0]


def test_a_page_shows_what_can_be_drawn_and_names_what_cannot(samples: Figure) -> None:
    arrays = unpack(samples.payload)
    one = replace(samples, payload=pack({name: array[:1] for name, array in arrays.items()}))
    drawn = draw_gallery([one, replace(samples, name="02-samples", payload=b"x")])
    assert isinstance(drawn[0], Exhibit)
    assert isinstance(drawn[1], Notice)
    assert "02-samples" in drawn[1].text
