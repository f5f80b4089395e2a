"""Accuracy of a source model on clean images, for one view or several."""

import torch
from torch import Tensor, nn

from ttvd.nn.split import evaluating
from ttvd.nn.views import aggregate, rotate
from ttvd.source.images import check_images, check_labels, to_unit


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
    """Share of the images that are classified rightly, in evaluation mode.

    Args:
        model: Takes images in [0, 1] and returns (b, k * head_views).
        images: (n, c, h, w), uint8 or floating point in [0, 1].
        labels: Classes (n,).
        views: How many turns of each image are shown and aggregated.
        head_views: How many the head tells apart: 1 for a plain classifier, 4 for an SLA classifier.
        batch_size: Images per forward pass.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Identity())
        >>> evaluate(model, torch.eye(2).view(2, 2, 1, 1), torch.tensor([0, 0]))
        0.5
    """
    check_images(images)
    check_labels(labels)
    if len(images) != len(labels):
        raise ValueError(f"got {len(images)} images and {len(labels)} labels")
    like = next(model.parameters(), images.new_zeros(0, dtype=torch.float32))
    device = like.device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with evaluating(model):
        for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            logits = aggregate(model(rotate(to_unit(x.to(device)).to(like.dtype), views)), views, head_views)
            correct += (logits.argmax(1) == y.to(device)).sum()
    return correct.item() / len(labels)
