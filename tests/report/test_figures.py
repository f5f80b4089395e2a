"""The paper's figures are drawn from stored numbers, without a model."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Polygon
from matplotlib.quiver import Quiver

from tests.helpers.bench import make_recipe, make_resources
from ttvd.bench.figures import make_figure
from ttvd.bench.figures.feature_plane import PlaneData
from ttvd.bench.figures.scene import pack, unpack
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.bench.store import Figure as StoredFigure
from ttvd.geometry import Diagram, cells, grid_labels
from ttvd.nn.split import SplitModel, split
from ttvd.report.document import Figure, Notice
from ttvd.report.figures import draw_figure, draw_figures, planar
from ttvd.report.figures.feature_plane import FeaturePlane
from ttvd.report.figures.planar import DEEP, PALE, Box, Grid
from ttvd.report.figures.samples import MOST_NAMES, plot_bars, plot_image
from ttvd.report.figures.slices import RESOLUTION, Slice
from ttvd.report.style import INK, MUTED, RIGHT, WRONG, class_colour, lighten
from ttvd.zoo.sites import Sites

BOX: Box = (-3.0, -3.0, 3.0, 3.0)
SITES = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.1, 0.0]])


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Resources:
    return make_resources(tmp_path_factory.mktemp("model"))


def make(text: str, resources: Resources) -> StoredFigure:
    recipe = make_recipe("[[figures]]\n" + text)
    facts, payload = make_figure(recipe.figures[0], recipe, resources, 0)
    return StoredFigure("01", "colours", json.loads(json.dumps(facts)), payload)


@pytest.fixture(scope="module")
def slices(resources: Resources) -> StoredFigure:
    return make('kind = "slices"', resources)


@pytest.fixture(scope="module")
def samples(resources: Resources) -> StoredFigure:
    return make('kind = "samples"\ncount = 3', resources)


@pytest.fixture(scope="module")
def plane() -> StoredFigure:
    text = 'data = {set = "digits", corruptions = ["gaussian_noise"], constants = "imagenet"}\n'
    text += (
        '[[methods]]\nname = "bn"\n[[figures]]\nkind = "plane"\ncheckpoint = "digits-plane"\nlimit = 192\n'
    )
    recipe = parse_recipe(text, "plane")
    return StoredFigure("01", "plane", *make_figure(recipe.figures[0], recipe, Resources(WorkerConfig()), 0))


@pytest.fixture(scope="module")
def drawn_slices(slices: StoredFigure) -> Figure:
    (figure,) = draw_figure(slices)
    return figure


@pytest.fixture(scope="module")
def drawn_samples(samples: StoredFigure) -> Figure:
    (figure,) = draw_figure(samples)
    return figure


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


def test_cells_of_a_slice_are_those_of_the_space_that_it_cuts(
    slices: StoredFigure, resources: Resources
) -> None:
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


def test_a_slice_says_how_many_are_wrong(slices: StoredFigure, drawn_slices: Figure) -> None:
    figure = drawn_slices
    states, chosen = unpack(slices.payload)["states"], np.array(slices.description["chosen"])
    truth = chosen[unpack(slices.payload)["labels"]]
    for name in ("vd", "pd", "civd", "cipd"):
        assert f"{np.mean(states['bn'][name] != truth):.0%} ({name.upper()})" in figure.caption
    for state, words in (("source", "are wrong without"), ("bn", "with statistics"), ("ttvd", "with steps")):
        assert f"{np.mean(states[state]['civd'] != truth):.0%} {words}" in figure.caption
    assert [len(row.panels) for row in figure.rows] == [4, 4]
    names = [slices.description["classes"][k] for k in chosen]
    assert [text for _, text in figure.key[:3]] == names
    assert "tiny" in figure.details
    assert "gaussian noise 5 with CIFAR-10-C's constants (scale 0.1)" in figure.details


def test_a_slice_of_an_official_set_has_no_clean_picture(slices: StoredFigure) -> None:
    arrays = unpack(slices.payload)
    del arrays["states"]["clean"]
    facts = {**slices.description, "constants": "official", "strength": {}}
    (figure,) = draw_figure(replace(slices, description=facts, payload=pack(arrays)))
    assert [len(row.panels) for row in figure.rows] == [4, 3]
    assert "gaussian noise 5 as it was released" in figure.details


def test_each_sample_is_a_row_with_its_story(samples: StoredFigure, drawn_samples: Figure) -> None:
    figure = drawn_samples
    arrays, names = unpack(samples.payload), samples.description["classes"]
    assert len(figure.rows) == len(arrays["truth"]) > 1
    for number, row in enumerate(figure.rows):
        nearest, truth = arrays["distances"][number].argmin(1), arrays["truth"][number]
        assert len(row.panels) == 5
        assert f"true class is {names[truth]}" in row.heading
        assert f"class mean of {names[nearest[0]]};" in row.heading
        assert f"largest for {names[truth]}" in row.heading
        for view, angle in enumerate(("0°", "90°", "180°", "270°")):
            assert (f" {angle}" in row.heading.split("; ")[1]) == (nearest[view] == truth)
    assert f"correct {samples.description['found']} mistakes" in figure.details


def test_one_sample_is_told_in_the_caption_and_none_is_said_plainly(samples: StoredFigure) -> None:
    arrays = unpack(samples.payload)
    one, none = (
        draw_figure(replace(samples, payload=pack({name: array[:count] for name, array in arrays.items()})))[
            0
        ]
        for count in (1, 0)
    )
    assert "The true class is" in one.caption
    assert one.rows[0].heading == ""
    assert "correct no mistake" in none.caption
    assert (len(none.rows), len(none.key)) == (0, 0)


def test_the_plane_has_the_papers_three_figures(plane: StoredFigure) -> None:
    first, second, third = draw_figure(plane)
    traces = unpack(plane.payload)["traces"]
    for name in ("source", "bn", "civd", "ttvd"):
        error = np.mean(traces[name]["predicted"] != traces[name]["labels"])
        assert f"{error:.1%}" in first.caption
    assert [len(row.panels) for row in first.rows] == [4, 5, 4]
    assert "entropy" in second.caption
    assert "VD loss" in third.caption
    assert [text for _, text in first.key] == ["digit 0", "digit 1", "digit 2", "misclassified"]


def test_misplaced_features_lie_nearer_to_another_site(plane: StoredFigure) -> None:
    view = FeaturePlane(PlaneData.from_arrays(unpack(plane.payload)), dict(plane.description), 50)
    trace, sites = view.data.traces["SLA + source"], view.data.diagrams["civd"].sites.numpy()
    apart = np.linalg.norm(trace.features[:, :, None] - sites, axis=-1)
    joint = np.power(apart, -0.8).reshape(*apart.shape[:2], 3, 4).sum(-1).argmax(-1)
    assert np.array_equal(view.misplaced(trace, "civd"), joint != trace.labels)
    upright = view.data.traces["source"]
    nearest = apart_from(upright.features[0], sites[::4]).argmin(1)
    assert np.array_equal(view.misplaced(upright, "vd")[0], nearest != upright.labels)


def apart_from(points: Any, sites: Any) -> Any:
    return np.array([[np.hypot(*(point - site)) for site in sites] for point in points])


def test_the_same_numbers_give_the_same_pictures(samples: StoredFigure, drawn_samples: Figure) -> None:
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
def test_what_cannot_be_drawn_is_refused(samples: StoredFigure, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_figure(replace(samples, **change))


def test_texts_for_those_who_cannot_see_tell_the_panels_apart(
    drawn_slices: Figure, drawn_samples: Figure
) -> None:
    cells = {panel.text for row in drawn_slices.rows for panel in row.panels}
    assert len(cells) == 7  # of eight: CIVD with batch statistics is in both rows
    told = [panel.text for row in drawn_samples.rows for panel in row.panels]
    assert all("nearest class mean" in text or "influence" in text for text in told)


def test_images_in_colours_and_in_one_channel() -> None:
    pixels = np.linspace(0, 1, 12).reshape(2, 2, 3)
    drawn = plot_image(pixels, Canvas().subplots()).images[0]
    assert np.array_equal(np.asarray(drawn.get_array()), pixels)
    drawn = plot_image(pixels[:, :, :1], Canvas().subplots()).images[0]
    assert np.array_equal(np.asarray(drawn.get_array()), pixels[:, :, 0])


def test_many_classes_name_only_the_two_that_matter() -> None:
    names, values = [f"class {k}" for k in range(MOST_NAMES + 1)], np.arange(1.0, MOST_NAMES + 2)
    ax = plot_bars(values, Canvas().subplots(), truth=4, chosen=9, names=names, label="distance")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["class 9", "class 4"]
    wide = ax.containers[1]
    assert [(to_hex(bar.get_facecolor()), bar.get_height()) for bar in wide] == [(WRONG, 10.0), (RIGHT, 5.0)]
    right = plot_bars(values, Canvas().subplots(), truth=4, chosen=4, names=names, label="distance")
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["class 4"]


def test_long_names_stand_beside_their_sites() -> None:
    sites = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.5]])
    ax = planar.plot_sites(Diagram(sites), Canvas().subplots(), names=["airplane", "bird", "cat"])
    assert [text.get_text() for text in ax.texts] == ["airplane", "bird", "cat"]
    assert np.allclose([np.asarray(marks.get_offsets())[0] for marks in ax.collections], sites)
    assert [text.get_horizontalalignment() for text in ax.texts] == ["right", "left", "center"]
    planar.plot_sites(Diagram(sites[:1]), Canvas().subplots(), names=["airplane"])


def test_regions_of_other_classes_are_grey_and_named_if_large() -> None:
    grid = Grid(
        np.repeat([[0, 1]], 20, axis=0).repeat(10, axis=1), np.linspace(-1, 1, 20), np.linspace(-1, 1, 20)
    )
    grid.values[0, 0] = 2
    ax = planar.plot_regions(grid, Canvas().subplots(), palette=[class_colour(0), MUTED, MUTED])
    corner = np.asarray(ax.images[0].get_array())[0, -1]
    assert to_hex(corner) == lighten(MUTED, planar.PALE)
    planar.name_regions(grid, ax, names={1: "dog", 2: "frog"})
    (name,) = ax.texts
    assert name.get_text() == "dog"
    assert name.get_position()[0] > 0


def test_boxes_hold_the_sites_and_nearly_all_points() -> None:
    points = np.random.default_rng(0).normal(size=(2000, 2))
    xmin, ymin, xmax, ymax = planar.find_box(points, np.array([[9.0, 0.0]]), margin=0.5)
    assert xmax - xmin == pytest.approx(ymax - ymin)
    assert xmax > 9
    inside = (points > [xmin, ymin]).all(1) & (points < [xmax, ymax]).all(1)
    assert inside.mean() > 0.98


def test_the_nearest_site_of_a_cluster_decides() -> None:
    diagram = Diagram(
        torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 0.0], [9.0, 9.0]]), groups=torch.tensor([0, 0, 1, 1])
    )
    grid = planar.label_nearest(diagram, (-2.0, -2.0, 2.0, 2.0), 5)
    assert grid.values[2].tolist() == [0, 0, 1, 0, 0]


def test_a_page_shows_what_can_be_drawn_and_names_what_cannot(samples: StoredFigure) -> None:
    arrays = unpack(samples.payload)
    one = replace(samples, payload=pack({name: array[:1] for name, array in arrays.items()}))
    drawn = draw_figures([one, replace(samples, name="02-samples", payload=b"x")])
    assert isinstance(drawn[0], Figure)
    assert isinstance(drawn[1], Notice)
    assert "02-samples" in drawn[1].text


@pytest.fixture
def ax() -> Axes:
    return Canvas().subplots()


def power_diagram() -> Diagram:
    """Its last site has no cell."""
    return Diagram(SITES, torch.tensor([0.0, 0.0, 0.0, -9.0]))


def halves() -> Grid:
    return Grid(*grid_labels(Diagram(torch.tensor([[-1.0, 0.0], [1.0, 0.0]])), BOX, 8))


def test_every_cell_that_is_not_empty_is_a_patch(ax: Axes) -> None:
    diagram = power_diagram()
    expected = [polygon for polygon in cells(diagram, BOX) if len(polygon)]
    planar.plot_cells(diagram, ax, box=BOX)
    assert len(ax.patches) == len(expected) == 3
    for patch, polygon in zip(ax.patches, expected, strict=True):
        assert isinstance(patch, Polygon)
        assert np.allclose(np.asarray(patch.get_xy())[:-1], polygon)
    assert (*ax.get_xlim(), *ax.get_ylim()) == (-3, 3, -3, 3)


def test_cells_of_a_class_share_its_colour(ax: Axes) -> None:
    planar.plot_cells(Diagram(SITES, groups=torch.tensor([0, 1, 1, 0])), ax, box=BOX)
    fills = [to_hex(patch.get_facecolor()) for patch in ax.patches]
    assert fills == [lighten(class_colour(label), PALE) for label in (0, 1, 1, 0)]


def test_walls_are_drawn_without_the_sides_of_the_box(ax: Axes) -> None:
    planar.plot_boundaries(power_diagram(), ax, box=BOX, style="--")
    (walls,) = ax.collections
    corners = np.concatenate([path.vertices for path in walls.get_paths()])
    assert len(walls.get_paths()) == 3
    assert np.abs(corners).max() > 3
    inside = corners[(np.abs(corners) < 3).all(axis=1)]
    power = ((inside[:, None] - SITES[:3].numpy()) ** 2).sum(-1)
    assert np.allclose(np.diff(np.sort(power, axis=1)[:, :2]), 0, atol=1e-5)


def test_the_kept_region_is_the_agreement_mask(ax: Axes) -> None:
    grid = halves()
    other, _, _ = grid_labels(Diagram(torch.tensor([[-1.0, 0.5], [1.0, -0.5]])), BOX, 8)
    kept = grid.values == other
    planar.plot_regions(grid, ax, kept=kept)
    drawn = np.asarray(ax.images[0].get_array())
    deep = np.array([to_rgb(lighten(class_colour(label), DEEP)) for label in (0, 1)])[grid.values]
    assert 0 < kept.sum() < kept.size
    assert np.array_equal((drawn == deep).all(axis=-1), kept)


def test_contours_lie_between_the_classes(ax: Axes) -> None:
    planar.plot_contours(halves(), ax)
    (contour,) = ax.collections
    line = np.concatenate([path.vertices for path in contour.get_paths()])
    assert np.allclose(line[:, 0], 0)


def test_entropy_is_scaled_to_the_uniform_label(ax: Axes) -> None:
    values = np.linspace(0, np.log(3), 64).reshape(8, 8)
    planar.plot_entropy(Grid(values, *halves()[1:]), ax, classes=3)
    assert np.allclose(ax.images[0].get_clim(), (0.0, np.log(3)))
    assert np.array_equal(np.asarray(ax.images[0].get_array()), values)
    assert isinstance(ax.figure, Canvas)
    assert len(ax.figure.axes) == 2


def test_wrong_points_get_a_ring(ax: Axes) -> None:
    points = np.arange(8.0).reshape(4, 2)
    wrong = np.array([False, True, False, True])
    planar.plot_points(points, np.array([0, 0, 1, 2]), ax, wrong=wrong)
    fine, ringed = ax.collections
    assert isinstance(fine, PathCollection)
    assert isinstance(ringed, PathCollection)
    assert np.array_equal(np.asarray(fine.get_offsets()), points[~wrong])
    assert np.array_equal(np.asarray(ringed.get_offsets()), points[wrong])
    assert [to_hex(colour) for colour in np.asarray(ringed.get_facecolor())] == [
        class_colour(0),
        class_colour(2),
    ]
    assert to_hex(np.asarray(ringed.get_edgecolor())[0]) == INK
    assert np.asarray(fine.get_linewidth())[0] == 0


def test_many_points_become_a_bitmap(ax: Axes) -> None:
    points = np.zeros((planar.MOST_PATHS + 1, 2))
    planar.plot_points(points, np.zeros(len(points), dtype=np.int64), ax)
    assert all(collection.get_rasterized() for collection in ax.collections)


def test_sites_are_named_by_class(ax: Axes) -> None:
    planar.plot_sites(Diagram(SITES, groups=torch.tensor([0, 1, 1, 0])), ax, names=["cat", "dog"])
    assert [text.get_text() for text in ax.texts] == ["cat", "dog", "dog", "cat"]
    assert np.allclose([text.get_position() for text in ax.texts], SITES)


def test_arrows_lead_from_before_to_after(ax: Axes) -> None:
    before, after = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [1.0, 3.0]])
    planar.plot_moves(before, after, np.array([0, 1]), ax)
    (arrows,) = [artist for artist in ax.collections if isinstance(artist, Quiver)]
    assert np.array_equal(arrows.XY, before)
    assert np.array_equal(np.column_stack([arrows.U, arrows.V]), after - before)
    assert (arrows.scale, arrows.scale_units, arrows.angles) == (1.0, "xy", "xy")


@pytest.mark.parametrize(
    "draw",
    [
        lambda points, labels, ax: planar.plot_points(points, labels, ax, wrong=labels > 0),
        lambda points, labels, ax: planar.plot_moves(points, points + 1, labels, ax),
        lambda points, labels, ax: planar.plot_regions(
            Grid(labels.reshape(2, 2), points[:2, 0], points[:2, 1]), ax
        ),
    ],
)
def test_drawing_changes_neither_data_nor_settings(draw: Callable[..., Axes], ax: Axes) -> None:
    points, labels = np.arange(8.0).reshape(4, 2), np.array([0, 1, 2, 0])
    settings, had_pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    assert draw(points, labels, ax) is ax
    assert points.tolist() == np.arange(8.0).reshape(4, 2).tolist()
    assert labels.tolist() == [0, 1, 2, 0]
    assert dict(matplotlib.rcParams) == settings
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


@pytest.mark.parametrize(
    ("truth", "chosen", "expected"),
    [(1, 2, [MUTED, RIGHT, WRONG]), (0, 0, [RIGHT, MUTED, MUTED])],
)
def test_truth_is_green_and_a_wrong_choice_is_red(truth: int, chosen: int, expected: list[str]) -> None:
    values = np.array([3.0, 2.0, 1.0])
    ax = plot_bars(
        values, Canvas().subplots(), truth=truth, chosen=chosen, names=["a", "b", "c"], label="distance"
    )
    assert [to_hex(patch.get_facecolor()) for patch in ax.patches] == expected
    assert np.array_equal([patch.get_height() for patch in ax.containers[0]], values)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["a", "b", "c"]
    assert ax.get_ylabel() == "distance"
    assert values.tolist() == [3.0, 2.0, 1.0]


def test_images_keep_their_grey_levels() -> None:
    pixels = np.array([[0.2, 0.4], [0.4, 0.2]])
    ax = plot_image(pixels, Canvas().subplots())
    assert np.array_equal(np.asarray(ax.images[0].get_array()), pixels)
    assert ax.images[0].get_clim() == (0, 1)
    assert len(ax.get_xticks()) == 0
