"""Make CIFAR checkpoints that start from a classifier without rotations.

    python tools/finetune_cifar.py --data DIR --checkpoints FOLDER --device cuda --compile

It takes the k-way classifier of `resnet26-{set}-rotation` in FOLDER (made by tools/train_cifar.py) and writes

- `resnet26-{set}-plain`: the same weights with sites of four rotations, to use TTVD without any training;
- `resnet26-{set}-finetuned`: the same classifier with a head of k x 4 outputs, fine-tuned for a few epochs by
  self-supervised label augmentation (SLA).

Sites come from the images that the classifier was trained on, temperatures from the held-out tenth. The test images are
used once, for the card. After an interruption, the command continues after the last finished epoch; finished
checkpoints are not made again. recipes/plain-cifar10.toml and plain-cifar100.toml compare the two.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.progress import Progress
from torch import nn

from ttvd.data.sets import ImageSet, load_set
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.rotation import RotationNet
from ttvd.nn.split import split
from ttvd.source import Epoch, TrainingConfig, calibrate, estimate_sites, evaluate, train
from ttvd.source.features import is_held_out
from ttvd.zoo.catalog import available, load, sites_path
from ttvd.zoo.checkpoint import Card, save_checkpoint
from ttvd.zoo.sites import Sites

VIEWS = 4


@dataclass(frozen=True, eq=False)
class Job:
    """One data set: its images and the classifier to start from.

    Attributes:
        name: Name of the data set.
        training: Images that the classifier was trained on.
        held_out: The tenth of the training images that was held out.
        test: Test images, for the accuracy on the card.
        start: The k-way classifier, without its rotation head.
        card: Card of the classifier.
        words: Origin of the classifier and number of images, for the new cards.
    """

    name: str
    training: ImageSet
    held_out: ImageSet
    test: ImageSet
    start: nn.Module
    card: Card
    words: str


def load_start(data: str, options: argparse.Namespace) -> tuple[nn.Module, Card]:
    """Load the k-way classifier of the checkpoint with a rotation head, and a card that describes it alone."""
    name = f"resnet26-{data}-rotation"
    if name not in available(options.checkpoints):
        raise FileNotFoundError(
            f"no checkpoint {name} in {options.checkpoints}. Make it first: python tools/train_cifar.py "
            f"--data {options.data} --out {options.checkpoints} --sets {data} --kinds rotation "
            f"--device {options.device}"
        )
    source = load(name, options.checkpoints)
    assert source.card is not None
    if not isinstance(source.model, RotationNet):
        raise ValueError(f"{name} in {options.checkpoints} has no rotation head: it is another model")
    return source.model.model, replace(source.card, rotation_head=False)


def prepare(data: str, options: argparse.Namespace) -> Job:
    """Load everything that one data set needs, so that missing files are reported before the first epoch."""
    start, card = load_start(data, options)
    training, test = _load_images(data, options, "train"), _load_images(data, options, "test")
    # --limit keeps the split: every tenth of the first images is among every tenth of all images.
    held = is_held_out(len(training))
    used, kept = (training.subset(mask.nonzero()[:, 0]) for mask in (~held, held))
    words = f"from resnet26-{data}-rotation, fingerprint {fingerprint(start)} without its rotation head"
    if options.limit is not None:
        words += f"; a trial with {len(used):,} of the training images"
    return Job(data, used, kept, test, start, card, words)


def _load_images(data: str, options: argparse.Namespace, part: Literal["train", "test"]) -> ImageSet:
    images = load_set(data, options.data, part)
    assert isinstance(images, ImageSet)
    return images if options.limit is None else images.subset(slice(options.limit))


def augment(job: Job) -> tuple[nn.Module, Card]:
    """Copy the classifier with k x 4 outputs, in which all rotations of a class start with the row of the class."""
    arguments = {**job.card.arguments, "num_classes": job.card.arguments["num_classes"] * VIEWS}
    return split(job.start).augmented(VIEWS).model, replace(job.card, arguments=arguments, head_views=VIEWS)


def make_config(epochs: int, lr: float) -> TrainingConfig:
    """Return the settings of tools/train_cifar.py with a smaller learning rate, which keeps what was learnt."""
    return TrainingConfig(
        "sla",
        epochs=epochs,
        lr=lr,
        nesterov=True,
        schedule="onecycle",
        padding=4,
        flip=True,  # a mirrored photograph shows the same class
        precision="bf16",
        channels_last=True,
    )


def make_sites(model: nn.Module, job: Job, name: str, bars: Progress) -> Sites:
    """Estimate and calibrate the sites of a model."""
    bar = bars.add_task(f"{name}, sites", total=len(job.training))
    classes = int(job.card.arguments["num_classes"])
    sites = estimate_sites(
        model,
        job.training,
        num_classes=classes,
        views=VIEWS,
        progress=lambda count: bars.update(bar, completed=count),
    )
    return calibrate(model, sites, job.held_out)


def is_done(folder: Path, name: str, card: Card) -> bool:
    """Return whether the folder holds this model with its sites; an unreadable one is made again."""
    if name not in available(folder):
        return False
    try:
        found = load(name, folder)
    except (ValueError, FileNotFoundError):
        return False
    if found.card is None or found.sites is None:
        return False
    # The description names the weights that the model started from. JSON has lists for tuples.
    config = json.loads(json.dumps(dict(card.training)))
    return found.card.data == card.data and found.card.training == config


def make_plain(job: Job, options: argparse.Namespace, bars: Progress) -> None:
    """Write the classifier as it is, with sites of four rotations; the weights and so the accuracy stay the same."""
    name = f"resnet26-{job.name}-plain"
    card = replace(job.card, data=f"{job.card.data}; {job.words}")
    if is_done(options.out, name, card):
        bars.print(f"{name}: is there already")
        return
    model = job.start.to(options.device)
    make_sites(model, job, name, bars).save(sites_path(options.out, name))
    save_checkpoint(options.out / f"{name}.safetensors", model.cpu(), card)


def make_finetuned(job: Job, options: argparse.Namespace, bars: Progress) -> None:
    """Fine-tune the classifier for a few epochs by label augmentation, and write it with its own sites."""
    name, config = f"resnet26-{job.name}-finetuned", make_config(options.epochs, options.lr)
    model, card = augment(job)
    words = f"{job.card.data}; fine-tuned for {options.epochs} epochs by label augmentation {job.words}"
    if options.limit is not None:
        words += f", measured on {len(job.test):,} of the test images"
    card = replace(card, data=words, training=asdict(config), seed=config.seed)
    if is_done(options.out, name, card):
        bars.print(f"{name}: is there already")
        return
    bar = bars.add_task(name, total=options.epochs)

    def advance(epoch: Epoch) -> None:
        bars.update(bar, completed=epoch.number + 1)
        bars.print(
            f"{name}: epoch {epoch.number + 1}, loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.3f}, "
            f"{epoch.seconds:.1f} s"
        )

    # The state of a training records its data and settings but not its initial weights, so the file name does.
    resume = options.out / f"{name}-{fingerprint(job.start)}.training"
    images, labels = job.training.images, job.training.labels
    model.to(options.device)
    train(model, images, labels, config, checkpoint=resume, progress=advance, compile=options.compile)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # missing in torch's stubs
    make_sites(model, job, name, bars).save(sites_path(options.out, name))
    measure = partial(evaluate, model, job.test.images, job.test.labels, head_views=VIEWS)
    card = replace(card, accuracy_one_view=measure(), accuracy_four_views=measure(views=VIEWS))
    save_checkpoint(options.out / f"{name}.safetensors", model.cpu(), card)
    resume.unlink()
    before = job.card.accuracy_one_view
    bars.print(
        f"{name}: clean accuracy {card.accuracy_one_view:.4f} with one view, {card.accuracy_four_views:.4f} with "
        f"four{'' if before is None else f'; {before:.4f} before'}"
    )


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10 and CIFAR-100")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder with resnet26-*-rotation")
    parser.add_argument("--out", type=Path, help="folder for the new checkpoints; the same unless given")
    parser.add_argument("--sets", nargs="+", default=["cifar10", "cifar100"], choices=["cifar10", "cifar100"])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.02, help="highest learning rate of the one cycle")
    parser.add_argument("--limit", type=int, help="use only the first images of each set, for a trial")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit must be at least 1, got {options.limit}")
    options.out = options.out or options.checkpoints
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    try:
        make_config(options.epochs, options.lr)  # refuses what cannot be trained with
        jobs = [prepare(data, options) for data in options.sets]
        options.out.mkdir(parents=True, exist_ok=True)
        with Progress() as bars:
            for job in jobs:
                make_plain(job, options, bars)
                make_finetuned(job, options, bars)
    except (ValueError, OSError) as error:
        raise SystemExit(f"finetune_cifar: {error}") from error


if __name__ == "__main__":
    main()
