"""Make the CIFAR checkpoints that come with the package.

    python tools/train_cifar.py --data DIR --out src/ttvd/zoo/checkpoints --device cuda --compile

It trains three models of TTAB's ResNet-26 for each of CIFAR-10 and CIFAR-100: with label augmentation (for TTVD), with
joint class and rotation heads (for TTT, and for all k-way baselines as in TTAB), and with instance-aware norms (for
NOTE; on CIFAR-10 with a rotation head too). Every tenth training image is held out; the test images are used once, for
the card. After an interruption, the command continues after the last finished epoch.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ttvd.data.sets import ImageSet, load_set
from ttvd.source import Epoch, TrainingConfig
from ttvd.source.produce import produce
from ttvd.zoo.checkpoint import Card

KINDS = {"sla": "batch", "rotation": "batch", "instance-aware": "instance-aware"}
EPOCHS = {"sla": 100, "rotation": 80, "instance-aware": 80}
# The network cannot memorise the four hundred joint labels of CIFAR-100: they need longer training and less weight
# decay. Instance-aware norms learn more slowly, and on CIFAR-10 they stay below 92 % without rotations.
OTHERS: dict[tuple[str, str], dict[str, Any]] = {
    ("cifar100", "sla"): {"epochs": 150, "weight_decay": 3e-4},
    ("cifar10", "instance-aware"): {"objective": "rotation", "epochs": 160, "weight_decay": 3e-4},
    ("cifar100", "instance-aware"): {"epochs": 180},
}
FRACTIONS = (1.0, 0.1, 0.05, 0.01)
# Mean and deviation of the channels; ResNet-26 has those of CIFAR-10 by default.
STATISTICS = {"cifar100": {"mean": [0.5071, 0.4865, 0.4409], "std": [0.2673, 0.2564, 0.2762]}}


def make_card(data: str, kind: str, classes: int) -> Card:
    objective = make_config(data, kind, None).objective
    head_views = 4 if objective == "sla" else 1
    arguments = {"num_classes": classes * head_views, "norm": KINDS[kind], **STATISTICS.get(data, {})}
    words = f"{data.upper().replace('CIFAR', 'CIFAR-')}, 45,000 of the 50,000 training images"
    return Card("resnet26", arguments, head_views, objective == "rotation", data=words)


def make_config(data: str, kind: str, epochs: int | None) -> TrainingConfig:
    """Return TTAB's settings (augmentation, batch size, weight decay unless in ``OTHERS``) with one cycle."""
    usual = TrainingConfig(
        objective=kind if kind in ("sla", "rotation") else "plain",
        epochs=EPOCHS[kind],
        lr=0.3,
        nesterov=True,
        schedule="onecycle",
        precision="bf16",
        channels_last=True,
    )
    config = replace(usual, **OTHERS.get((data, kind), {}))
    return config if epochs is None else replace(config, epochs=epochs)


def train_one(data: str, kind: str, options: argparse.Namespace) -> None:
    sets = [load_set(data, options.data, split) for split in ("train", "test")]
    training, test = ((images.images, images.labels) for images in sets if isinstance(images, ImageSet))
    name = f"resnet26-{data}-{kind}"
    classes = int(training[1].max()) + 1
    config = make_config(data, kind, options.epochs)
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
            name,
            make_card(data, kind, classes),
            config,
            training,
            test,
            fractions=FRACTIONS if kind == "sla" else (1.0,),
            device=options.device,
            progress=advance,
            compile=options.compile,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10 and CIFAR-100")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--sets", nargs="+", default=["cifar10", "cifar100"], choices=["cifar10", "cifar100"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--epochs", type=int, help="of every model; those of the shipped ones if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    options = parser.parse_args()
    for data in options.sets:
        for kind in options.kinds:
            train_one(data, kind, options)


if __name__ == "__main__":
    main()
