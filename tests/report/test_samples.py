"""Pictures of a single image."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ttvd.report.samples import plot_bars, plot_image
from ttvd.report.style import MUTED, RIGHT, WRONG


@pytest.mark.parametrize(
    ("truth", "chosen", "expected"),
    [(1, 2, [MUTED, RIGHT, WRONG]), (0, 0, [RIGHT, MUTED, MUTED])],
)
def test_truth_is_green_and_a_wrong_choice_is_red(truth: int, chosen: int, expected: list[str]) -> None:
    values = np.array([3.0, 2.0, 1.0])
    ax = plot_bars(
        values, Figure().subplots(), truth=truth, chosen=chosen, names=["a", "b", "c"], label="distance"
    )
    assert [to_hex(patch.get_facecolor()) for patch in ax.patches] == expected
    assert np.array_equal([patch.get_height() for patch in ax.containers[0]], values)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["a", "b", "c"]
    assert ax.get_ylabel() == "distance"
    assert values.tolist() == [3.0, 2.0, 1.0]


def test_images_keep_their_grey_levels() -> None:
    pixels = np.array([[0.2, 0.4], [0.4, 0.2]])
    ax = plot_image(pixels, Figure().subplots())
    assert np.array_equal(np.asarray(ax.images[0].get_array()), pixels)
    assert ax.images[0].get_clim() == (0, 1)
    assert len(ax.get_xticks()) == 0
