"""The picture of a stream."""

import io
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from ttvd.report.streams import plot_stream


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
