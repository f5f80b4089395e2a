"""What a reader has at hand when the README's lines begin: a trained classifier, its data and a stream."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ttvd.data.digits import split_digits


@cache
def make_reader() -> dict[str, Any]:
    """A small network of the reader's own, trained for a second on digits, and names for its data."""
    torch.manual_seed(0)
    images, labels, unseen, _ = split_digits()
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 12 * 12, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for batch in torch.randperm(2_000)[:1_920].split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    model.eval()

    return {
        "model": model,
        "training_data": (images[:2_000], labels[:2_000]),
        "held_out_data": (images[2_000:2_600], labels[2_000:2_600]),
        "stream": unseen[:192].split(64),
    }
