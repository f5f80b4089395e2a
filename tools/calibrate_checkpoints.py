"""Add to the sites of checkpoints what calibration measures today and an older version did not measure.

    python tools/calibrate_checkpoints.py --data DIR [--folder FOLDER] [NAME ...]

Means, temperatures, anchors and rotation loss stay as they are, to the bit. The images are those that training held
out: every tenth training image of CIFAR-10 and CIFAR-100 under ``--data``, or of the digits.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ttvd.data.digits import split_digits
from ttvd.data.sets import ImageSet, load_set
from ttvd.demo.sources import MODELS
from ttvd.source import calibrate
from ttvd.source.features import is_held_out
from ttvd.zoo.catalog import available, checkpoint_folder, load
from ttvd.zoo.sites import Sites

POWER = ("pd", "cipd")
"""Diagrams of the head, which are the same whatever share of the images the class means are from."""


def load_training(name: str, data: Path | None) -> tuple[Tensor, Tensor]:
    for model in MODELS:
        if model.name == name:
            images, labels, _, _ = split_digits(0, model.classes)
            return images, labels
    if data is None:
        raise SystemExit(f"{name} was trained on CIFAR: give its folder by --data")
    found = load_set("cifar100" if "cifar100" in name else "cifar10", data, "train")
    assert isinstance(found, ImageSet)
    return found.images, found.labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="checkpoints; all unless given")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 and CIFAR-100")
    parser.add_argument(
        "--folder", type=Path, help="folder of the checkpoints; the shipped ones unless given"
    )
    options = parser.parse_args()
    folder = checkpoint_folder(options.folder)
    for name in options.names or available(folder):
        source = load(name, folder)
        if source.sites is None:
            continue
        images, labels = load_training(name, options.data)
        held = is_held_out(len(images))
        found = calibrate(
            source.model, source.sites, (images[held], labels[held]), structures=POWER, gammas=(1.0,)
        )
        for path in sorted(folder.glob(f"{name}.*sites.safetensors")):
            old = Sites.load(path)
            replace(
                old.with_temperatures(
                    {key: tau for key, tau in found.temperatures.items() if key == "pd+mirror"}
                ),
                mirror_gain=found.mirror_gain,
                accuracy=found.accuracy,
                inputs=found.inputs,
                agreement_exponent=found.agreement_exponent,
                entropies=found.entropies,
            ).save(path)
            print(f"{path.name}: accuracy {found.accuracy:.4f}, mirroring {found.mirror_gain:+.4f}")


if __name__ == "__main__":
    main()
