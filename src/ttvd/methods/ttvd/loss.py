"""The objectives of TTVD, one value for each sample."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ttvd.geometry import Diagram, distances
from ttvd.methods.shared.losses import entropy


def consensus(log_probs: Tensor, classes: Tensor, head_views: int) -> Tensor:
    """Cross-entropy (b,) of each view against the joint cell of the answered class and its own known rotation.

    Args:
        log_probs: (v, b, k * head_views) logarithms of the probabilities of the joint cells, class-major.
        classes: (b,) answered classes.
        head_views: How many rotations the head tells apart.

    Example:
        >>> log_probs = torch.tensor([[[0.7, 0.1, 0.1, 0.1]], [[0.2, 0.5, 0.2, 0.1]]]).log()  # 2 views, 2 classes
        >>> consensus(log_probs, torch.tensor([0]), 2).mul(-2).exp()  # 0.7 * 0.5
        tensor([0.3500])
    """
    turn = torch.arange(len(log_probs), device=log_probs.device)[:, None] % head_views
    cell = classes * head_views + turn
    return F.nll_loss(log_probs.flatten(0, 1), cell.flatten(), reduction="none").view_as(cell).mean(0)


def joint_entropy(log_probs: Tensor, z: Tensor, voronoi: Diagram) -> Tensor:
    """Entropies (b,) of each view over all sites: of the power diagram and of the Voronoi diagram, with tau 1.

    Args:
        log_probs: (v, b, outputs) logarithms of the probabilities of the power diagram's cells.
        z: (v, b, d) features.
        voronoi: The diagram of all class means.
    """
    to_sites = distances(z.flatten(0, 1), voronoi).unflatten(0, z.shape[:2])
    return entropy(log_probs).mean(0) + entropy(-to_sites).mean(0)
