"""Charts and the figures of a study."""

import io
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import ttvd
from tests.helpers.report import BASIC, fake_study
from ttvd.bench.compare import Interval
from ttvd.bench.study import Cell
from ttvd.metrics import RunningMetrics
from ttvd.report.charts import (
    Point,
    pareto_front,
    plot_curves,
    plot_differences,
    plot_kept,
    plot_reliability,
    plot_stream,
    plot_tradeoff,
    plot_verdicts,
    spread_apart,
)
from ttvd.report.results import Results
from ttvd.report.results_folder import read_study
from ttvd.report.study_figures import (
    MOST_LINES,
    explain_choice,
    name_conditions,
    pick_colours,
    pick_lines,
    show_comparisons,
    show_each_stream,
    show_reliability,
    show_stream,
    show_stream_file,
    show_tradeoffs,
)
from ttvd.report.style import MUTED, PALETTE, RIGHT, WRONG, figure_style, line_colours
from ttvd.report.tables import compare_lines

MANY = BASIC.replace('"tent", ', '"t3a", "shot", "tent", "sar", "eata", "cotta", "rotta", "roid", ')


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(fake_study(MANY, batches=6))


def test_the_front_is_what_nothing_beats() -> None:
    points = [Point("a", 1, 9), Point("b", 2, 5), Point("c", 3, 7), Point("d", 4, 5), Point("e", 5, 1)]
    assert [point.name for point in pareto_front(points)] == ["a", "b", "e"]


def test_points_lie_where_they_belong_and_keep_their_colour(ax: Axes) -> None:
    points = [Point("source", 0.1, 60.0), Point("ttvd", 2.0, 30.0)]
    plot_tradeoff(points, ax, colours={"ttvd": "#0072b2"}, log=True)
    drawn = [np.asarray(dot.get_offsets())[0].tolist() for dot in ax.collections]
    assert drawn == [[0.1, 60.0], [2.0, 30.0]]
    fills = [to_hex(np.asarray(dot.get_facecolor())[0]) for dot in ax.collections]
    assert fills == [MUTED, "#0072b2"]
    assert ax.get_xscale() == "log"


def test_names_never_hide_each_other(ax: Axes) -> None:
    points = [Point(f"method number {k}", 1.0 + 1e-4 * k, 50.0) for k in range(30)]
    plot_tradeoff(points, ax)
    names = [text.get_text() for text in ax.texts]
    assert 0 < len(names) < 30
    assert names[0] == "method number 0"


def test_shares_are_drawn_in_per_cent(ax: Axes) -> None:
    plot_kept({"eata": np.array([0.5, 0.75])}, ax)
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [50.0, 75.0]
    assert ax.texts[0].get_text() == "eata 75"


def test_intervals_are_coloured_by_their_verdict(ax: Axes) -> None:
    intervals = {
        "a": Interval(-0.02, -0.03, -0.01),
        "b": Interval(0.0, -0.01, 0.01),
        "c": Interval(0.05, 0.04, 0.06),
    }
    plot_differences(intervals, ax, reference="ttvd")
    assert [to_hex(line.get_color()) for line in ax.lines[:3]] == [RIGHT, MUTED, WRONG]
    assert np.asarray(ax.lines[0].get_xdata()).tolist() == pytest.approx([-3.0, -1.0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c"]
    assert "ttvd" in ax.get_xlabel()


def test_bars_count_wins_ties_and_losses(ax: Axes) -> None:
    plot_verdicts({"a": (3, 1, 0), "b": (0, 0, 4)}, ax)
    widths = [[patch.get_width() for patch in bars] for bars in ax.containers]
    assert widths == [[3, 0], [1, 0], [0, 4]]
    assert [text.get_text() for text in ax.texts] == ["3", "1", "4"]


def test_of_many_lines_the_reference_the_controls_and_the_best_are_drawn(results: Results) -> None:
    lines = pick_lines(results)
    labels = [line.label for line in lines]
    assert len(labels) == len(set(labels)) == MOST_LINES
    assert {"source", "bn", "ttvd"} <= set(labels)
    assert {line.rule for line in lines} == {"last", "validation"}
    drawn = max(results.error(line) or 0 for line in lines if line.label not in ("source", "bn"))
    left = [line for line in results.lines if line.label not in labels]
    assert min(results.error(line) or 0 for line in left if line.rule == "validation") >= drawn
    assert f"{MOST_LINES} of 11 lines" in explain_choice(results, lines)
    assert pick_colours(results, lines)["ttvd"] == PALETTE[0]


def test_figures_say_in_words_what_they_show(results: Results) -> None:
    lines, comparisons = pick_lines(results), compare_lines(results)
    with figure_style():
        figures = [
            show_stream(results, lines),
            show_each_stream(results, lines),
            show_tradeoffs(results, lines),
            show_reliability(results, lines),
            show_comparisons(results, comparisons, lines),
        ]
    for figure in figures:
        assert figure is not None
        assert figure.caption
        for row in figure.rows:
            assert all(panel.text and b"<svg" in panel.svg for panel in row.panels)
    counts = [sum(len(row.panels) for row in figure.rows) for figure in figures if figure is not None]
    assert counts == [2, 3, 2, MOST_LINES, 2]


def test_nothing_is_drawn_of_nothing() -> None:
    study = fake_study()
    empty = Results(type(study)(study.recipe, study.columns, (), 0, 0))
    assert show_stream(empty, []) is None
    assert show_each_stream(empty, []) is None
    assert show_tradeoffs(empty, []) is None
    assert show_comparisons(empty, [], []) is None


def test_lines_show_per_cent_and_are_named_at_their_ends(ax: Axes) -> None:
    curves = {"source": np.array([0.9, 0.9]), "bn": np.array([0.4, 0.3]), "ttvd": np.array([0.4, 0.2])}
    before = {name: curve.copy() for name, curve in curves.items()}
    plot_curves(curves, ax, top=0.5, strong="ttvd")
    for line, (name, curve) in zip(ax.lines, curves.items(), strict=True):
        assert np.allclose(np.asarray(line.get_ydata()), 100 * curve)
        assert line.get_color() == line_colours(list(curves))[name]
        assert np.array_equal(curve, before[name])
    assert [text.get_text() for text in ax.texts] == ["source 90.0 ↑", "bn 30.0", "ttvd 20.0"]
    assert ax.get_ylim() == (0, 50)
    assert ax.texts[0].get_position()[1] == 50
    assert ax.lines[2].get_linewidth() > ax.lines[1].get_linewidth()


def test_curves_with_fewer_points_than_batches_end_at_the_last_batch(ax: Axes) -> None:
    plot_curves({"bn": np.array([0.4, 0.3, 0.2, 0.1])}, ax, batches=1000)
    assert np.asarray(ax.lines[0].get_xdata()).tolist() == [250, 500, 750, 1000]
    assert ax.get_xlim() == (1, 1000)


def test_a_stream_of_one_batch_is_a_point(ax: Axes) -> None:
    plot_curves({"bn": np.array([0.4])}, ax)
    assert ax.lines[0].get_marker() == "o"
    assert ax.get_xlim()[0] < ax.get_xlim()[1]


def test_source_is_grey_and_the_others_differ() -> None:
    colours = line_colours(["bn", "source", "tent"])
    assert [colours["bn"], colours["tent"]] == list(PALETTE[:2])
    assert colours["source"] not in PALETTE


@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=12),
    st.floats(0.1, 10),
)
def test_spread_values_keep_their_distance_order_and_mean(values: list[float], gap: float) -> None:
    moved = spread_apart(values, gap)
    order = np.argsort(values, kind="stable")
    assert np.all(np.diff(np.array(moved)[order]) >= gap - 1e-6)
    assert np.isclose(np.mean(moved), np.mean(values), atol=1e-6)


def test_values_far_apart_stay_where_they_are() -> None:
    assert spread_apart([9.0, 1.0, 5.0], gap=3.0) == [9.0, 1.0, 5.0]


def test_reliability_bars_are_the_accuracies_of_the_used_bins(ax: Axes) -> None:
    metrics = RunningMetrics(bins=4)
    probs = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.9, 0.1], [0.95, 0.05]])
    metrics.update(torch.tensor([0, 1, 0, 0]), probs=probs)
    plot_reliability(metrics.reliability(), ax)
    accuracy, gap, share = (list(bars) for bars in ax.containers)
    assert [patch.get_height() for patch in accuracy] == [0.5, 1.0]
    assert [patch.get_x() for patch in accuracy] == [0.5, 0.75]
    edges = [(patch.get_y(), patch.get_y() + patch.get_height()) for patch in gap]
    assert np.allclose(edges, [(0.5, 0.65), (0.925, 1.0)])
    heights = [patch.get_height() for patch in share]
    assert heights[0] == heights[1]


def test_the_style_is_left_behind() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with figure_style():
        assert dict(matplotlib.rcParams) != before
    assert dict(matplotlib.rcParams) == before


def test_the_axis_of_a_long_stream_counts_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,355 batches of fifteen corruptions in a row are drawn with fewer points."""
    drawn = []

    def plot(curves: dict[str, Any], ax: Axes, *, batches: int, **options: Any) -> Axes:
        drawn.append(batches)
        assert all(len(curve) < 1000 for curve in curves.values())
        return plot_curves(curves, ax, batches=batches, **options)

    monkeypatch.setattr("ttvd.report.study_figures.plot_curves", plot)
    results = read_study(Path(ttvd.__file__).parents[2] / "results" / "rows" / "continual-cifar10.csv")
    figure = show_stream_file(results, results.lines, "continual")
    assert figure is not None
    assert drawn == [15 * 157]
    assert len(figure.rows[0].panels) == 1


def test_every_sample_is_drawn() -> None:
    labels = np.array([2, 0, 0, 1, 2])
    ax = plot_stream(labels)
    assert np.array_equal(ax.lines[0].get_xydata(), np.column_stack([np.arange(5), labels]))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("sample", "class")
    target = io.BytesIO()
    assert isinstance(ax.figure, Figure)
    ax.figure.savefig(target, format="png")
    assert target.getvalue().startswith(b"\x89PNG")


def test_given_axes_are_used_and_nothing_else_changes() -> None:
    before = dict(matplotlib.rcParams)
    had_pyplot = "matplotlib.pyplot" in sys.modules
    figure = Figure()
    left, right = figure.subplots(1, 2)
    labels = np.array([0, 1, 1])
    assert plot_stream(labels, ax=left) is left
    assert len(left.lines) == 1
    assert len(right.lines) == 0
    assert labels.tolist() == [0, 1, 1]
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


@pytest.mark.parametrize("labels", [[], [[0, 1]]])
def test_bad_labels_are_refused(labels: list[int]) -> None:
    with pytest.raises(ValueError, match="non-empty 1-D"):
        plot_stream(labels)


@pytest.mark.parametrize(
    ("conditions", "ticks", "label"),
    [
        (
            [(("sites", 1.0),), (("sites", 0.05),)],
            ["100", "5"],
            "share of the source data for class means (%)",
        ),
        ([(("batch_size", 64),), (("batch_size", 8),)], ["64", "8"], "batch size"),
        (
            [(("alpha", 0.1), ("batch_size", 64)), (("alpha", 0.01), ("batch_size", 8))],
            ["0.1\n64", "0.01\n8"],
            "alpha, batch size",
        ),
    ],
)
def test_values_stand_below_each_other(conditions: list[Cell], ticks: list[str], label: str) -> None:
    assert name_conditions(conditions) == (ticks, label)


def test_conditions_that_vary_different_things_are_written_out() -> None:
    ticks, label = name_conditions([(("batch_size", 64),), (("batch_size", 8), ("alpha", 0.1))])
    assert ticks[0] == "batch size 64"
    assert not label
