"""Pictures of results."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ttvd
from ttvd.metrics import RunningMetrics
from ttvd.report.curves import plot_curves, plot_reliability, spread
from ttvd.report.drawings import draw_curves
from ttvd.report.folder import read_study
from ttvd.report.style import PALETTE, house_style, line_colours


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


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
    moved = spread(values, gap)
    order = np.argsort(values, kind="stable")
    assert np.all(np.diff(np.array(moved)[order]) >= gap - 1e-6)
    assert np.isclose(np.mean(moved), np.mean(values), atol=1e-6)


def test_values_far_apart_stay_where_they_are() -> None:
    assert spread([9.0, 1.0, 5.0], gap=3.0) == [9.0, 1.0, 5.0]


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
    with house_style():
        assert dict(matplotlib.rcParams) != before
    assert dict(matplotlib.rcParams) == before


def test_the_axis_of_a_long_stream_counts_its_batches() -> None:
    """2,355 batches of fifteen corruptions in a row, drawn with fewer points."""
    results = read_study(Path(ttvd.__file__).parents[2] / "results" / "rows" / "continual-cifar10.csv")
    figure = draw_curves(results, results.lines)
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_xlim() == (1, 15 * 157)
    assert {float(np.asarray(line.get_xdata())[-1]) for line in axes.lines} == {15 * 157}
    assert len(np.asarray(axes.lines[0].get_xdata())) < 1000
