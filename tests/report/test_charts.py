"""Pictures of whole tables."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.report.fakes import BASIC, fake_study
from ttvd.bench.compare import Interval
from ttvd.report.charts import Point, find_front, plot_differences, plot_kept, plot_scores, plot_tradeoff
from ttvd.report.comparisons import hold_duels
from ttvd.report.pictures import (
    MOST,
    explain_choice,
    give_colours,
    pick_lines,
    show_duels,
    show_each_stream,
    show_reliability,
    show_stream,
    show_tradeoffs,
)
from ttvd.report.results import Results
from ttvd.report.style import MUTED, PALETTE, RIGHT, WRONG, house_style

MANY = BASIC.replace('"tent", ', '"t3a", "shot", "tent", "sar", "eata", "cotta", "rotta", "roid", ')


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


@pytest.fixture(scope="module")
def results() -> Results:
    return Results(fake_study(MANY, batches=6))


def test_the_front_is_what_nothing_beats() -> None:
    points = [Point("a", 1, 9), Point("b", 2, 5), Point("c", 3, 7), Point("d", 4, 5), Point("e", 5, 1)]
    assert [point.name for point in find_front(points)] == ["a", "b", "e"]


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
    plot_scores({"a": (3, 1, 0), "b": (0, 0, 4)}, ax)
    widths = [[patch.get_width() for patch in bars] for bars in ax.containers]
    assert widths == [[3, 0], [1, 0], [0, 4]]
    assert [text.get_text() for text in ax.texts] == ["3", "1", "4"]


def test_of_many_lines_the_reference_the_controls_and_the_best_are_drawn(results: Results) -> None:
    lines = pick_lines(results)
    labels = [line.label for line in lines]
    assert len(labels) == len(set(labels)) == MOST
    assert {"source", "bn", "ttvd"} <= set(labels)
    assert {line.rule for line in lines} == {"last", "validation"}
    drawn = max(results.error(line) or 0 for line in lines if line.label not in ("source", "bn"))
    left = [line for line in results.lines if line.label not in labels]
    assert min(results.error(line) or 0 for line in left if line.rule == "validation") >= drawn
    assert f"{MOST} of 11 lines" in explain_choice(results, lines)
    assert give_colours(results, lines)["ttvd"] == PALETTE[0]


def test_figures_say_in_words_what_they_show(results: Results) -> None:
    lines, comparisons = pick_lines(results), hold_duels(results)
    with house_style():
        exhibits = [
            show_stream(results, lines),
            show_each_stream(results, lines),
            show_tradeoffs(results, lines),
            show_reliability(results, lines),
            show_duels(results, comparisons, lines),
        ]
    for exhibit in exhibits:
        assert exhibit is not None
        assert exhibit.caption
        for strip in exhibit.strips:
            assert all(panel.text and panel.source.startswith("data:image/svg") for panel in strip.panels)
    counts = [
        sum(len(strip.panels) for strip in exhibit.strips) for exhibit in exhibits if exhibit is not None
    ]
    assert counts == [2, 3, 2, MOST, 2]


def test_nothing_is_drawn_of_nothing() -> None:
    study = fake_study()
    empty = Results(type(study)(study.recipe, study.columns, (), 0, 0))
    assert show_stream(empty, []) is None
    assert show_each_stream(empty, []) is None
    assert show_tradeoffs(empty, []) is None
    assert show_duels(empty, [], []) is None
