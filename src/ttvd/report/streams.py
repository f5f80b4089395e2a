"""A picture of a stream: which class comes when."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_stream(labels: npt.ArrayLike, ax: "Axes | None" = None) -> "Axes":
    """Draw the class of each sample against its place in the stream.

    Args:
        labels: Labels in the order of the stream, `labels[order]`.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The axes; `ax.figure.savefig(path)` writes the picture.

    Example:
        >>> plot_stream([0, 0, 1, 1]).get_ylabel()
        'class'
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(labels)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"labels must be a non-empty 1-D array, got shape {values.shape}")
    if ax is None:
        ax = Figure(figsize=(8, 2.5), layout="constrained").subplots()
    # One bitmap instead of a path for each sample keeps vector files small.
    ax.plot(np.arange(values.size), values, linestyle="none", marker="|", markersize=4, rasterized=True)
    ax.set(xlabel="sample", ylabel="class", xlim=(-0.5, values.size - 0.5))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return ax
