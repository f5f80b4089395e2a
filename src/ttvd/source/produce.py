"""From source data to a checkpoint that is ready for deployment: weights, card, sites and temperatures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ttvd.nn.resnet import init_weights
from ttvd.source.calibration import calibrate
from ttvd.source.config import Recipe
from ttvd.source.evaluate import evaluate
from ttvd.source.held_out import is_held_out
from ttvd.source.sites import estimate_sites
from ttvd.source.state import Epoch
from ttvd.source.train import train
from ttvd.zoo.catalog import available, load, sites_path
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

Labelled = tuple[Tensor, Tensor]


def produce(
    folder: Path,
    name: str,
    card: Card,
    recipe: Recipe,
    training: Labelled,
    test: Labelled,
    *,
    fractions: Sequence[float] = (1.0,),
    device: str = "cpu",
    progress: Callable[[Epoch], None] | None = None,
    compile: bool = False,
) -> None:
    """Train a model, estimate its sites, fit its temperatures and write everything into a folder.

    Every tenth training image is held out, for the temperatures and to compare recipes by: the accuracy on them is on
    the card, beside that on the test images, which are looked at once, at the end. Killed and started again, it goes
    on after the last finished epoch; a finished model is not trained again.

    Args:
        folder: Where the files go.
        name: Of the checkpoint.
        card: The architecture, and what the data are; the rest is filled in here.
        recipe: How to train; its seed is that of the initial weights too.
        training: Images and labels.
        test: Images and labels.
        fractions: Shares of the training images that sites are estimated from; a file for each, none for none.
        device: Where to train.
        progress: Called after every epoch.
        compile: As in :func:`~ttvd.source.train`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if _is_done(folder, name, recipe, fractions):
        return
    images, labels = training
    held = is_held_out(len(images))
    model = build_model(card)
    init_weights(model, torch.Generator().manual_seed(recipe.seed))
    model.to(device)
    resume = folder / f"{name}.training"
    train(model, images[~held], labels[~held], recipe, checkpoint=resume, progress=progress, compile=compile)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # missing in torch's stubs
    for fraction in fractions:
        sites = estimate_sites(model, (images[~held], labels[~held]), fraction=fraction)
        sites = calibrate(model, sites, (images[held], labels[held]))
        sites.save(sites_path(folder, name, fraction))
    measure = partial(evaluate, model, head_views=card.head_views)
    several = card.head_views == 4
    done = replace(
        card,
        recipe=asdict(recipe),
        seed=recipe.seed,
        accuracy_one_view=measure(*test),
        accuracy_four_views=measure(*test, views=4) if several else None,
        held_out_one_view=measure(images[held], labels[held]),
        held_out_four_views=measure(images[held], labels[held], views=4) if several else None,
    )
    save_checkpoint(folder / f"{name}.safetensors", model.cpu(), done)
    resume.unlink()


def _is_done(folder: Path, name: str, recipe: Recipe, fractions: Sequence[float]) -> bool:
    """Whether the folder holds this very model, with its sites."""
    if name not in available(folder):
        return False
    found = load(name, folder).card
    assert found is not None
    same = found.seed == recipe.seed and not recipe.differences(dict(found.recipe))
    return same and all(sites_path(folder, name, fraction).is_file() for fraction in fractions)
