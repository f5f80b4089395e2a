"""Training of source models: one loop for label augmentation (SLA), plain and joint rotation training.

Run it under ``torchrun`` unchanged: every process takes its share of each batch and the gradients are summed.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ttvd.nn.augment import draw_crops
from ttvd.source.config import Recipe
from ttvd.source.distributed import Group, join_group, local_device
from ttvd.source.images import check_images, check_labels, to_unit
from ttvd.source.objectives import check_model
from ttvd.source.state import Epoch, Training
from ttvd.source.steps import Steps, can_record, make_optimizer


@dataclass(frozen=True)
class History:
    """The epochs of a training, those before an interruption included."""

    epochs: tuple[Epoch, ...]


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[Epoch], None] | None = None,
    compile: bool = False,
    capture: Literal["auto", "never"] = "auto",
) -> History:
    """Train a model in place; it is left in evaluation mode.

    On a GPU, in one process, a step is recorded as a CUDA graph: small networks wait for Python otherwise.

    Args:
        model: Takes images in [0, 1]; k * 4 outputs for SLA, k for plain training, a ``RotationNet`` for joint
            training. It is trained on the device it is on (under torchrun with GPUs: on the process's own).
        images: The whole set (n, c, h, w), uint8 or floating point in [0, 1]; moved to the device once.
        labels: Classes (n,).
        recipe: How to train.
        checkpoint: Where to keep the state after every epoch. A state that is already there is continued, and
            the result is the same as without the interruption.
        progress: Called after every epoch, in the first process only.
        compile: Let ``torch.compile`` make kernels for forward and backward pass, which takes a minute at the start
            and rounds a little differently. A C++ compiler is needed, and Triton on a GPU.
        capture: ``"never"`` for a model whose forward pass decides something in Python from step to step (layers that
            are dropped at random, say): a graph would repeat the decision of the step that was recorded.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2 * 4))
        >>> images, labels = torch.rand(8, 1, 2, 2), torch.arange(8) % 2
        >>> history = train(model, images, labels, Recipe(epochs=2, batch_size=4, padding=0))
        >>> len(history.epochs)
        2
    """
    check_images(images)
    check_labels(labels)
    if len(images) != len(labels):
        raise ValueError(f"got {len(images)} images and {len(labels)} labels")
    device = local_device(model)
    model.to(device).eval()
    check_model(model, recipe.objective, to_unit(images[:2].to(device)), int(labels.max()) + 1)
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    group = join_group(device)
    group.broadcast(model)
    record = capture == "auto" and can_record(device, group)
    optimizer = make_optimizer(model, recipe, record)
    training = Training(model, optimizer, recipe, _describe(images, labels))
    epochs = training.resume(checkpoint) if checkpoint is not None else []
    if len(set(done := group.gather(len(epochs), device))) > 1:
        raise ValueError(f"the processes see different checkpoints, {done} epochs; use a shared folder")
    data = (images.to(device), labels.to(device, torch.int64))
    steps = Steps(training, data, group, compile, record)
    for number in range(len(epochs), recipe.epochs):
        epochs.append(_train_epoch(training, steps, number, group))
        if group.rank == 0 and checkpoint is not None:
            training.save(checkpoint, epochs)
        if group.rank == 0 and progress is not None:
            progress(epochs[-1])
    model.zero_grad()
    model.eval()
    return History(tuple(epochs))


def _train_epoch(training: Training, steps: Steps, number: int, group: Group) -> Epoch:
    recipe, device = training.recipe, steps.device
    started = time.perf_counter()
    order, draws = (rows.to(device) for rows in plan_epoch(recipe, steps.images, number, group))
    rates = [recipe.learning_rate(number * len(order) + step, len(order)) for step in range(len(order))]
    training.model.train()
    with _seeded(device, _seed(recipe, number, 1 + group.rank)):
        totals = steps.run(order, draws, rates)
    group.average_buffers(training.model)
    loss, accuracy = (group.sum_(totals) / (len(order) * group.world)).tolist()
    return Epoch(number, loss, accuracy, rates[-1], time.perf_counter() - started)


def plan_epoch(recipe: Recipe, images: int, number: int, group: Group) -> tuple[Tensor, Tensor]:
    """This process's share of every batch: image numbers (steps, share) and their crops (steps, share, 3).

    All processes draw the same numbers and then take their columns, so that the plan does not depend on how many
    they are. Images that do not fill a last batch wait for the next epoch.
    """
    size = min(recipe.batch_size, images - images % group.world)
    if size < 1 or size % group.world:
        raise ValueError(f"a batch of {size} images cannot be shared equally by {group.world} processes")
    generator = torch.Generator().manual_seed(_seed(recipe, number, 0))
    steps = images // size
    order = torch.randperm(images, generator=generator)[: steps * size].view(steps, size)
    draws = draw_crops(steps * size, recipe.padding, recipe.flip, generator).view(steps, size, 3)
    return order[:, group.rank :: group.world], draws[:, group.rank :: group.world]


def _seed(recipe: Recipe, epoch: int, stream: int) -> int:
    return int(np.random.SeedSequence((recipe.seed, epoch, stream)).generate_state(1)[0])


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Let dropout and the like draw from a seeded generator, and give the caller's generators back untouched."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _describe(images: Tensor, labels: Tensor) -> str:
    digest = hashlib.sha256(labels.cpu().to(torch.int64).contiguous().numpy().data).hexdigest()
    return f"{'x'.join(map(str, images.shape))} {images.dtype}, labels {digest[:12]}"
