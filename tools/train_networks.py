"""Train classifiers of other families on CIFAR-10, on which defaults are chosen and measured; none is shipped.

    python tools/train_networks.py --data DIR --out FOLDER --device cuda --compile

``vit``, ``convnext`` and ``resnet26-gn`` have no batch norm: tables are measured on them. On the others defaults are
chosen: ``mobilenet`` and ``resnet8`` have batch norm, ``vit-small`` and ``resnet8-gn`` have none. Every tenth
training image is held out, as for the shipped models. After an interruption, the command continues after the last
finished epoch.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from ttvd.data.sets import ImageSet, load_set
from ttvd.nn.normalize import CIFAR10_MEAN, CIFAR10_STD
from ttvd.source import Epoch, TrainingConfig
from ttvd.source.produce import produce
from ttvd.zoo.checkpoint import Card

WORDS = "CIFAR-10, 45,000 of the 50,000 training images"
USUAL: dict[str, Any] = {"mean": CIFAR10_MEAN, "std": CIFAR10_STD, "num_classes": 10}


class Network(NamedTuple):
    """A network and the settings in which its training differs from the usual ones."""

    architecture: str
    arguments: dict[str, Any]
    training: dict[str, Any]


SMALL: dict[str, Any] = {
    "num_classes": 10,
    "widths": [32, 64, 128],
    "blocks": [1, 1, 1],
    "mean": list(CIFAR10_MEAN),
    "std": list(CIFAR10_STD),
}
ADAMW = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05, "schedule": "onecycle", "nesterov": False}
NETWORKS = {
    "vit": Network(
        "timm",
        {"model": "vit_tiny_patch16_224", "options": {"img_size": 32, "patch_size": 4, "depth": 6}, **USUAL},
        {**ADAMW, "epochs": 150},
    ),
    "convnext": Network(
        "timm",
        {"model": "convnext_atto", "options": {"patch_size": 1}, **USUAL},
        {**ADAMW, "lr": 2e-3, "epochs": 100},
    ),
    "resnet26-gn": Network("resnet26", {"num_classes": 10, "norm": "group"}, {"lr": 0.1, "epochs": 100}),
    "mobilenet": Network(
        "timm", {"model": "mobilenetv2_050", "size": 64, **USUAL}, {"lr": 0.2, "epochs": 80}
    ),
    "resnet8": Network("resnet", SMALL, {"lr": 0.1, "epochs": 60, "seed": 1}),
    "vit-small": Network(
        "timm",
        {
            "model": "vit_tiny_patch16_224",
            "options": {"img_size": 32, "patch_size": 4, "depth": 4, "embed_dim": 96},
            **USUAL,
        },
        {**ADAMW, "epochs": 120, "seed": 1},
    ),
    "resnet8-gn": Network(
        "resnet",
        {**SMALL, "norm": "group"},
        {"lr": 0.1, "epochs": 80, "seed": 1},
    ),
}


def make_config(training: dict[str, Any], epochs: int | None) -> TrainingConfig:
    usual: dict[str, Any] = {
        "objective": "plain",
        "batch_size": 256,
        "nesterov": True,
        "schedule": "onecycle",
        "precision": "bf16",
    }
    chosen = {**usual, **training}
    return TrainingConfig(**(chosen if epochs is None else {**chosen, "epochs": epochs}))


def train_one(name: str, options: argparse.Namespace) -> None:
    sets = [load_set("cifar10", options.data, split) for split in ("train", "test")]
    training, test = ((images.images, images.labels) for images in sets if isinstance(images, ImageSet))
    network = NETWORKS[name]
    config = make_config(network.training, options.epochs)
    card = Card(network.architecture, network.arguments, data=WORDS)
    with Progress() as bars:
        bar = bars.add_task(name, total=config.epochs)

        def advance(epoch: Epoch) -> None:
            bars.update(bar, completed=epoch.number + 1)
            if (epoch.number + 1) % 10 == 0:
                bars.print(
                    f"{name}: epoch {epoch.number + 1}, loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.3f}, "
                    f"{epoch.seconds:.1f} s"
                )

        produce(
            options.out,
            f"{name}-cifar10",
            card,
            config,
            training,
            test,
            device=options.device,
            progress=advance,
            compile=options.compile,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--epochs", type=int, help="of every network; those of the table above if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    options = parser.parse_args()
    for name in options.networks:
        train_one(name, options)


if __name__ == "__main__":
    main()
