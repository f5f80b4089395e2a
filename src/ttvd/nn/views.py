"""Views of an image: rotations by quarter turns, their joint labels and the aggregation of their predictions.

The layout is that of self-supervised label augmentation (SLA; Lee, Hwang and Shin, ICML 2020): a classifier
has k * v outputs, in column ``class * v + view``, and batches of views are view-major: block ``a`` holds all b
images, rotated by the a-th angle.
"""

import torch
from torch import Tensor, nn

from ttvd.nn.split import count_classes, unwrap_output

TURNS = {1: (0,), 2: (0, 2), 4: (0, 1, 2, 3)}
"""Quarter turns for each number of views."""


def check_views(views: int) -> None:
    """Raise a ValueError unless ``views`` is 1, 2 or 4."""
    if views not in TURNS:
        raise ValueError(
            f"views must be 1, 2 or 4 (rotations by 0; 0, 180; 0, 90, 180, 270 degrees), got {views!r}"
        )


def rotate(x: Tensor, views: int) -> Tensor:
    """Stack the rotated copies of a batch of images.

    Args:
        x: Images (b, c, h, w). They must be square for 4 views, because a quarter turn swaps height and width.
        views: Number of views: 1, 2 or 4.

    Returns:
        Images (v * b, c, h, w), view-major: block a is ``torch.rot90`` of the batch by the a-th angle.

    Example:
        >>> x = torch.arange(4.0).reshape(1, 1, 2, 2)
        >>> rotate(x, 4).flatten(1).tolist()
        [[0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 0.0, 2.0], [3.0, 2.0, 1.0, 0.0], [2.0, 0.0, 3.0, 1.0]]
    """
    check_views(views)
    if x.ndim != 4:
        raise ValueError(f"expected a batch of images (b, c, h, w), got a tensor of shape {tuple(x.shape)}")
    if views == 4 and x.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"quarter turns need square images, got height {x.shape[-2]} and width {x.shape[-1]} "
            "of (b, c, h, w); crop or resize them, or estimate the sites with views=2"
        )
    return torch.cat([torch.rot90(x, turn, (-2, -1)) for turn in TURNS[views]])


def join_labels(labels: Tensor, views: int) -> Tensor:
    """Return the joint labels of class and view, in the order of :func:`rotate`.

    Args:
        labels: Classes (b,).
        views: Number of views: 1, 2 or 4.

    Returns:
        Joint labels (v * b,): ``class * v + view``.

    Example:
        >>> join_labels(torch.tensor([0, 2]), 2).tolist()
        [0, 4, 1, 5]
    """
    check_views(views)
    index = torch.arange(views, device=labels.device, dtype=labels.dtype)
    return (labels * views + index[:, None]).flatten()


def aggregate(logits: Tensor, views: int, head_views: int | None = None) -> Tensor:
    """Average, over the views, the logits that belong to each view's own rotation (SLA's aggregation).

    Args:
        logits: Logits (v * b, k * h), rows in the order of :func:`rotate`, columns class-major.
        views: Number of views in the rows, v.
        head_views: Number of views that the head was trained on, h; a multiple of v, and v unless given.

    Returns:
        Class logits (b, k).

    Example:
        >>> rows = torch.tensor([[1.0, 9.0, 2.0, 9.0], [9.0, 3.0, 9.0, 6.0]])  # one image
        >>> aggregate(rows, 2).tolist()
        [[2.0, 4.0]]
    """
    head = views if head_views is None else head_views
    _check_head_views(views, head)
    if logits.ndim != 2 or logits.shape[0] % views or logits.shape[1] % head:
        raise ValueError(
            f"expected logits of shape (views * b, k * head_views) with views={views} and head_views={head}, "
            f"got {tuple(logits.shape)}"
        )
    blocks = logits.reshape(views, -1, logits.shape[1] // head, head)
    return blocks[..., :: head // views].diagonal(dim1=0, dim2=3).mean(-1)


def log_rotations(log_probs: Tensor, rotations: int) -> Tensor:
    """Return the log-probabilities of the rotations, summed over the classes.

    Args:
        log_probs: Log-probabilities (v, b, k * rotations) of the joint labels, class-major.
        rotations: Number of rotations that the head tells apart.

    Returns:
        Log-probabilities (v, b, rotations).

    Example:
        >>> uniform = torch.zeros(2, 1, 3 * 2).log_softmax(-1)  # two views, three classes, two rotations
        >>> log_rotations(uniform, 2).exp().flatten()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    found: Tensor = log_probs.unflatten(-1, (-1, rotations)).logsumexp(2)
    return found


def rotation_nll(log_probs: Tensor) -> Tensor:
    """Return the negative log-probability of each view's own rotation.

    The rotation of a view is known without labels, so this loss can be measured at test time.

    Args:
        log_probs: Log-probabilities (v, b, rotations) of :func:`log_rotations`; view a has the a-th rotation.

    Returns:
        Losses (b, v), unreduced.

    Example:
        >>> sure = torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]]).log()  # two views of one image
        >>> rotation_nll(sure).exp()
        tensor([[1.1111, 2.0000]])
    """
    return -log_probs.diagonal(dim1=0, dim2=2)


def _check_head_views(views: int, head_views: int) -> None:
    check_views(views)
    check_views(head_views)
    if head_views % views:
        raise ValueError(
            f"a head trained on {head_views} views cannot judge {views} views; use at most {head_views}"
        )


class AggregatedViews(nn.Module):
    """A k-way classifier that averages the predictions of an SLA classifier with k * v outputs over its views.

    A comparison with SLA needs two controls: ``views=1`` forwards the upright image alone and reads the matching
    columns, ``views=4`` averages the four views.

    Args:
        model: Classifier that maps images (b, c, h, w) to logits (b, k * head_views).
        views: Number of views that are forwarded.
        head_views: Number of views that the model was trained on.

    Example:
        >>> sla = nn.Sequential(nn.Flatten(), nn.Linear(4, 3 * 4))
        >>> AggregatedViews(sla, views=4)(torch.rand(5, 1, 2, 2)).shape
        torch.Size([5, 3])
    """

    def __init__(self, model: nn.Module, views: int = 4, head_views: int = 4) -> None:
        super().__init__()
        _check_head_views(views, head_views)
        self.model = model
        self.views = views
        self.head_views = head_views

    @property
    def num_classes(self) -> int:
        """Number of classes, k."""
        return count_classes(self.model) // self.head_views

    def forward(self, x: Tensor) -> Tensor:
        """Return class logits (b, k) of images (b, c, h, w)."""
        return aggregate(unwrap_output(self.model(rotate(x, self.views))), self.views, self.head_views)
