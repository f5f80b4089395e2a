"""Draw pictures of the documentation.

    python tools/draw_docs.py docs/images

Writes streams.png (class over time of six streams) and corruptions.png (one digit, every corruption at every severity).
The picture of the README is a screenshot of the figure "Cells in the feature plane" of the demo's page.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ttvd.data import streams
from ttvd.data.digits import load_digits_5k
from ttvd.report.charts import plot_stream
from ttvd.report.contact_sheet import contact_sheet


def draw_streams(path: Path) -> None:
    labels = np.arange(2000) % 10
    orders = {
        "i.i.d.": streams.iid(labels, seed=0),
        "Dirichlet, alpha 1": streams.dirichlet(labels, seed=0, alpha=1.0),
        "Dirichlet, alpha 0.1": streams.dirichlet(labels, seed=0, alpha=0.1),
        "Dirichlet, alpha 0.01": streams.dirichlet(labels, seed=0, alpha=0.01),
        "imbalanced, ratio 20": streams.imbalanced(labels, seed=0, ratio=20),
        "sorted by class": streams.class_sorted(labels, seed=0),
    }
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    for axes, (name, order) in zip(figure.subplots(2, 3).flat, orders.items(), strict=True):
        plot_stream(labels[order], axes)
        axes.set_title(name)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    draw_streams(folder / "streams.png")
    contact_sheet(load_digits_5k()[0][2500], folder / "corruptions.png")


if __name__ == "__main__":
    main()
