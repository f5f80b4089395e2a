"""Measure the accuracy of the shipped CIFAR checkpoints and compare it with their cards.

    python tools/check_checkpoints.py --data DIR

DIR holds CIFAR-10 and CIFAR-100 as `ttvd data get` writes them. The command fails if an accuracy differs from its card
by more than rounding on another processor can explain.
"""

import argparse
import sys
from pathlib import Path

from rich.progress import track

from ttvd.data.sets import ImageSet, load_set
from ttvd.source import evaluate
from ttvd.zoo.catalog import Source, available, load

TOLERANCE = 0.001
"""Ten of 10,000 images may lie so close to a decision boundary that rounding decides."""


def measure(source: Source, images: ImageSet) -> dict[str, tuple[float, float]]:
    """Return the accuracy of the card and the measured one, for one view and, with label augmentation, for four."""
    card = source.card
    assert card is not None
    told = {1: card.accuracy_one_view, 4: card.accuracy_four_views}
    return {
        f"{views} view{'s' * (views > 1)}": (
            accuracy,
            evaluate(source.model, images.images, images.labels, views=views, head_views=card.head_views),
        )
        for views, accuracy in told.items()
        if accuracy is not None
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10 and CIFAR-100")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    lines, wrong = [], 0
    names = [name for name in available() if "-cifar" in name]
    for name in track(names, "Measuring"):
        images = load_set(name.split("-")[1], options.data, "test")
        assert isinstance(images, ImageSet)
        source = load(name)
        source.model.to(options.device)
        for views, (told, found) in measure(source, images).items():
            fits = abs(told - found) <= TOLERANCE
            wrong += not fits
            lines.append(
                f"{name:34} {views:8} card {told:.4f}  found {found:.4f}{'' if fits else '  differs'}"
            )
    print(*lines, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
