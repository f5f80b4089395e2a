"""Fine-tuning of a plain classifier by self-supervised label augmentation (SLA)."""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ttvd.nn.split import SplitModel, split
from ttvd.source.config import Epoch, TrainingConfig
from ttvd.source.features import Data, iterate_batches
from ttvd.source.train import train


def finetune(
    model: nn.Module,
    data: Data,
    *,
    flip: bool,
    padding: int = 0,
    epochs: int = 15,
    lr: float = 0.02,
    batch_size: int = 128,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[Epoch], None] | None = None,
) -> SplitModel:
    """Return a copy of a classifier that also tells rotations apart, trained for a few epochs.

    Its head has an output for each class and each of four rotations. Training is SGD with one cycle of the learning
    rate; ``ttvd.source.train`` with a ``TrainingConfig`` of your own has more settings. Compare the copy with the
    classifier on held-out images: fine-tuning can cost clean accuracy (docs/using.md).

    Args:
        model: A classifier of square images in [0, 1] that ends in a linear layer. It is not changed.
        data: Training data in one of the forms of :func:`~ttvd.source.estimate_sites`, without augmentation. All
            images are read into memory.
        flip: Whether to mirror half of the images. Say False where mirroring changes the class, as with digits and
            letters; ``mirror_gain`` of the classifier's sites tells whether it does.
        padding: Zero padding of random crops in pixels; 4 is usual for images of 32 x 32.
        epochs: Number of passes over the data.
        lr: Highest learning rate.
        batch_size: Images per step; each is forwarded in four rotations.
        seed: Seed of the order of the images and of their augmentation.
        checkpoint: Path of the state that is saved after every epoch; an existing one is continued.
        progress: Called after every epoch.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> data = torch.rand(12, 1, 2, 2), torch.arange(12) % 3
        >>> finetune(net, data, flip=False, epochs=1)(data[0]).shape
        torch.Size([12, 12])
    """
    config = TrainingConfig(
        "sla",
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        nesterov=True,
        schedule="onecycle",
        padding=padding,
        flip=flip,
        seed=seed,
    )
    images, labels = read_tensors(data)
    tuned = split(model).augmented(4)
    train(tuned, images, labels, config, checkpoint=checkpoint, progress=progress)
    return tuned


def read_tensors(data: Data) -> tuple[Tensor, Tensor]:
    """Return all images and labels as two tensors.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> images, labels = read_tensors(TensorDataset(torch.rand(5, 1, 2, 2), torch.arange(5)))
        >>> images.shape, labels.shape
        (torch.Size([5, 1, 2, 2]), torch.Size([5]))
    """
    batches = list(iterate_batches(data, 1024))
    if not batches:
        raise ValueError("there are no images to train on")
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)
