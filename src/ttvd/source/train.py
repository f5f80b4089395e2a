"""Training of source models: one loop for label augmentation (SLA), plain training and a joint rotation head.

It runs under ``torchrun`` unchanged: every process takes its share of each batch, and the gradients are summed.
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
from ttvd.source.config import Epoch, TrainingConfig, TrainingState
from ttvd.source.distributed import Group, join_group, local_device
from ttvd.source.features import check_pairs, to_unit
from ttvd.source.steps import TrainingSteps, can_record, check_model, make_optimizer


@dataclass(frozen=True)
class History:
    """The epochs of a training, including those before an interruption."""

    epochs: tuple[Epoch, ...]


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    config: TrainingConfig,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[Epoch], None] | None = None,
    compile: bool = False,
    capture: Literal["auto", "never"] = "auto",
) -> History:
    """Train a model in place and leave it in evaluation mode.

    On a GPU, in one process, a step is recorded as a CUDA graph, because small networks wait for Python otherwise.

    Args:
        model: Classifier of images in [0, 1] with k * 4 outputs for SLA or k outputs for plain training; a
            ``RotationNet`` for joint training. It is trained on its device (under torchrun with GPUs, on the GPU of
            the process).
        images: The whole set (n, c, h, w), uint8 or floating point in [0, 1]; moved to the device once.
        labels: Classes (n,).
        config: The settings of the training.
        checkpoint: Path of the state that is saved after every epoch. If the file exists, the training continues from
            it, with the same result as without the interruption.
        progress: Called after every epoch, in the first process only.
        compile: Whether ``torch.compile`` compiles the forward and backward pass. This takes a minute at the start and
            rounds slightly differently. It needs a C++ compiler, and Triton on a GPU.
        capture: ``"auto"`` records steps where possible. Use ``"never"`` for a model whose forward pass takes
            decisions in Python that change from step to step (such as layers dropped at random): a graph would repeat
            the decision of the recorded step.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2 * 4))
        >>> images, labels = torch.rand(8, 1, 2, 2), torch.arange(8) % 2
        >>> history = train(model, images, labels, TrainingConfig(epochs=2, batch_size=4, padding=0))
        >>> len(history.epochs)
        2
    """
    check_pairs(images, labels)
    device = local_device(model)
    model.to(device).eval()
    check_model(model, config.objective, to_unit(images[:2].to(device)), int(labels.max()) + 1)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    group = join_group(device)
    group.broadcast(model)
    record = capture == "auto" and can_record(device, group)
    optimizer = make_optimizer(model, config, record)
    state = TrainingState(model, optimizer, config, _describe(images, labels))
    epochs = state.resume(checkpoint) if checkpoint is not None else []
    if len(set(done := group.gather(len(epochs), device))) > 1:
        raise ValueError(f"the processes see different checkpoints, {done} epochs; use a shared folder")
    data = (images.to(device), labels.to(device, torch.int64))
    steps = TrainingSteps(state, data, group, compile, record)
    for number in range(len(epochs), config.epochs):
        epochs.append(_train_epoch(state, steps, number, group))
        if group.rank == 0 and checkpoint is not None:
            state.save(checkpoint, epochs)
        if group.rank == 0 and progress is not None:
            progress(epochs[-1])
    model.zero_grad()
    model.eval()
    return History(tuple(epochs))


def _train_epoch(state: TrainingState, steps: TrainingSteps, number: int, group: Group) -> Epoch:
    config, device = state.config, steps.device
    started = time.perf_counter()
    order, draws = (rows.to(device) for rows in draw_epoch(config, steps.images, number, group))
    rates = [config.learning_rate(number * len(order) + step, len(order)) for step in range(len(order))]
    state.model.train()
    with _seeded(device, _seed(config, number, 1 + group.rank)):
        totals = steps.run(order, draws, rates)
    group.average_buffers(state.model)
    loss, accuracy = (group.sum_(totals) / (len(order) * group.world)).tolist()
    return Epoch(number, loss, accuracy, rates[-1], time.perf_counter() - started)


def draw_epoch(config: TrainingConfig, images: int, number: int, group: Group) -> tuple[Tensor, Tensor]:
    """Draw this process's share of every batch: indices (steps, share) and draws of the crops (steps, share, 3).

    All processes draw the same numbers and take their own columns, so the draws do not depend on the number of
    processes. Images that do not fill a last batch are left out of this epoch.
    """
    size = min(config.batch_size, images - images % group.world)
    if size < 1 or size % group.world:
        raise ValueError(f"a batch of {size} images cannot be shared equally by {group.world} processes")
    generator = torch.Generator().manual_seed(_seed(config, number, 0))
    steps = images // size
    order = torch.randperm(images, generator=generator)[: steps * size].view(steps, size)
    draws = draw_crops(steps * size, config.padding, config.flip, generator).view(steps, size, 3)
    return order[:, group.rank :: group.world], draws[:, group.rank :: group.world]


def _seed(config: TrainingConfig, epoch: int, stream: int) -> int:
    return int(np.random.SeedSequence((config.seed, epoch, stream)).generate_state(1)[0])


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global generators, which dropout draws from, and restore their states afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _describe(images: Tensor, labels: Tensor) -> str:
    digest = hashlib.sha256(labels.cpu().to(torch.int64).contiguous().numpy().data).hexdigest()
    return f"{'x'.join(map(str, images.shape))} {images.dtype}, labels {digest[:12]}"
