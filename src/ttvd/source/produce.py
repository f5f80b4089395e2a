"""Production of a checkpoint from source data: training, sites, calibration and accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ttvd.nn.resnet import init_weights
from ttvd.nn.split import check_input_shape, evaluating, unwrap_output
from ttvd.nn.views import aggregate, rotate
from ttvd.source.calibration import calibrate
from ttvd.source.config import Epoch, TrainingConfig
from ttvd.source.features import check_pairs, is_held_out, to_unit
from ttvd.source.sites import estimate_sites
from ttvd.source.train import train
from ttvd.zoo.catalog import available, load, sites_path
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

Labelled = tuple[Tensor, Tensor]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    views: int = 1,
    head_views: int = 1,
    batch_size: int = 512,
) -> float:
    """Return the accuracy of a source model in evaluation mode.

    Args:
        model: Classifier of images in [0, 1] with k * head_views outputs.
        images: Images (n, c, h, w), uint8 or floating point in [0, 1].
        labels: Classes (n,).
        views: Number of rotations of each image that are forwarded and aggregated.
        head_views: Number of rotations that the head tells apart: 1 for a plain classifier, 4 for an SLA classifier.
        batch_size: Images per forward pass.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Identity())
        >>> evaluate(model, torch.eye(2).view(2, 2, 1, 1), torch.tensor([0, 0]))
        0.5
    """
    check_pairs(images, labels)
    check_input_shape(model, images.shape)
    like = next(model.parameters(), images.new_zeros(0, dtype=torch.float32))
    device = like.device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with evaluating(model):
        for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            outputs = unwrap_output(model(rotate(to_unit(x.to(device)).to(like.dtype), views)))
            correct += (aggregate(outputs, views, head_views).argmax(1) == y.to(device)).sum()
    return correct.item() / len(labels)


def produce(
    folder: Path,
    name: str,
    card: Card,
    config: TrainingConfig,
    training: Labelled,
    test: Labelled,
    *,
    fractions: Sequence[float] = (1.0,),
    device: str = "cpu",
    progress: Callable[[Epoch], None] | None = None,
    compile: bool = False,
) -> None:
    """Train a model, estimate and calibrate its sites, and write checkpoint, card and sites into a folder.

    Every tenth training image is held out for calibration and for the comparison of settings. The card states the
    accuracy on them and on the test images, which are used once, at the end. After an interruption, the call continues
    after the last finished epoch; a finished model is not trained again.

    Args:
        folder: Folder of the files.
        name: Name of the checkpoint.
        card: Architecture and description of the data; the other fields are filled in here.
        config: Settings of the training; their seed is also that of the initial weights.
        training: Training images and labels.
        test: Test images and labels.
        fractions: Fractions of the training images that sites are estimated from; each gets a file of its own.
        device: Device of the training.
        progress: Called after every epoch.
        compile: Whether to compile the model, as in :func:`~ttvd.source.train`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if _is_done(folder, name, config, fractions):
        return
    images, labels = training
    held = is_held_out(len(images))
    model = _initialise(card, config.seed).to(device)
    resume = folder / f"{name}.training"
    train(model, images[~held], labels[~held], config, checkpoint=resume, progress=progress, compile=compile)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # missing in torch's stubs
    for fraction in fractions:
        sites = estimate_sites(model, (images[~held], labels[~held]), fraction=fraction)
        sites = calibrate(model, sites, (images[held], labels[held]))
        sites.save(sites_path(folder, name, fraction))
    measure = partial(evaluate, model, head_views=card.head_views)
    several = card.head_views == 4
    done = replace(
        card,
        training=asdict(config),
        seed=config.seed,
        input_shape=tuple(images.shape[1:]),
        accuracy_one_view=measure(*test),
        accuracy_four_views=measure(*test, views=4) if several else None,
        held_out_one_view=measure(images[held], labels[held]),
        held_out_four_views=measure(images[held], labels[held], views=4) if several else None,
    )
    save_checkpoint(folder / f"{name}.safetensors", model.cpu(), done)
    resume.unlink()


def _initialise(card: Card, seed: int) -> nn.Module:
    """Build a model with weights that depend on the seed alone: drawn as TTAB does, or as the network itself does."""
    if card.architecture == "timm":
        return build_model(card, seed)
    model = build_model(card)
    init_weights(model, torch.Generator().manual_seed(seed))
    return model


def _is_done(folder: Path, name: str, config: TrainingConfig, fractions: Sequence[float]) -> bool:
    """Return whether the folder holds a model of these settings, with its sites."""
    if name not in available(folder):
        return False
    found = load(name, folder).card
    assert found is not None
    same = found.seed == config.seed and not config.differences(dict(found.training))
    return same and all(sites_path(folder, name, fraction).is_file() for fraction in fractions)
