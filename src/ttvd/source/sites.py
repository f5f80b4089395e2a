"""Estimation of sites: class means of features per view, in one pass over source data, summed in float64."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.split import SplitModel, split
from ttvd.nn.views import TURNS, check_views
from ttvd.source.distributed import Group, join_group, local_device
from ttvd.source.features import (
    Data,
    check_labels,
    choose_fraction,
    find_labels,
    iterate_batches,
    stream_features,
)
from ttvd.zoo.sites import Sites


class SiteAccumulator:
    """Running sums of features per class and view. Two accumulators can be merged.

    Args:
        num_classes: Number of classes, k.
        views: Number of views, v.
        dim: Dimension of the features, d.
        device: Device of the sums.

    Example:
        >>> sums = SiteAccumulator(num_classes=2, views=1, dim=1)
        >>> sums.update(torch.tensor([[[1.0], [3.0], [5.0]]]), torch.tensor([0, 0, 1]))
        >>> sums.means().flatten().tolist()
        [2.0, 5.0]
    """

    def __init__(
        self, num_classes: int, views: int, dim: int, device: torch.device | str | None = None
    ) -> None:
        self.sums = torch.zeros(num_classes, views, dim, dtype=torch.float64, device=device)
        self.counts = torch.zeros(num_classes, views, dtype=torch.int64, device=device)

    def update(self, z: Tensor, labels: Tensor) -> None:
        """Add features (v, b, d) of labels (b,)."""
        values = z.detach().to(self.sums.device, torch.float64)
        self.sums.index_add_(0, labels.to(self.sums.device), values.transpose(0, 1))
        self.counts += torch.bincount(labels.to(self.counts.device), minlength=len(self.counts))[:, None]

    def merge(self, other: "SiteAccumulator") -> None:
        """Add the sums of another accumulator."""
        if self.sums.shape != other.sums.shape:
            raise ValueError(
                f"cannot merge sums of shape {tuple(other.sums.shape)} into {tuple(self.sums.shape)}"
            )
        self.sums += other.sums.to(self.sums.device)
        self.counts += other.counts.to(self.counts.device)

    def reduce(self, group: Group) -> None:
        """Sum the accumulators of all processes; every process gets the result."""
        group.sum_(self.sums)
        group.sum_(self.counts)

    def keep_classes(self, num_classes: int) -> None:
        """Drop all classes but the first ``num_classes``."""
        self.sums, self.counts = self.sums[:num_classes], self.counts[:num_classes]

    def means(self) -> Tensor:
        """Return class means (k, v, d) in float64; a ValueError names the classes without samples."""
        _check_counts(self.counts.amin(1))
        return self.sums / self.counts[..., None]


def _check_counts(counts: Tensor) -> None:
    """Raise a ValueError that names the classes without samples, by the numbers of samples (k,)."""
    if empty := (counts == 0).nonzero().flatten().tolist():
        shown = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        raise ValueError(
            f"no samples of class {shown} ({len(empty)} of {len(counts)} classes): a class without "
            "samples has no site; use more data, a larger fraction, or the right num_classes"
        )


def estimate_sites(
    model: nn.Module,
    data: Data,
    *,
    num_classes: int | None = None,
    views: int = 4,
    fraction: float = 1.0,
    seed: int = 0,
    batch_size: int = 256,
    progress: Callable[[int], None] | None = None,
) -> Sites:
    """Estimate the class means of the features, per class and view, in one pass in evaluation mode.

    Under torchrun, whole batches are distributed over the processes and the sums are added, so every process
    returns the sites that a single process would have found.

    Args:
        model: A ``SplitModel``, or a classifier that :func:`ttvd.nn.split.split` understands.
        data: A pair ``(images, labels)`` of tensors, a map-style dataset, or an iterable of batches such as a
            ``DataLoader``. Images are uint8 or floating point in [0, 1], as the model sees them in use, without
            augmentation.
        num_classes: Number of classes. Unless given, it is found from the head: a head of n outputs has n classes. It
            has n / 4 classes with four rotations (or n / 2 with two) if the card of its checkpoint or the labels say
            so: the labels must then be those of exactly n / 4 classes.
        views: Number of rotations of each image that get a site: 1, 2 or 4.
        fraction: Fraction of every class to use (the paper uses 10 % and 1 % of ImageNet); must be 1 for an iterable.
        seed: Seed of the choice of images.
        batch_size: Images per forward pass; each is forwarded ``views`` times.
        progress: Called with the number of images that this process has finished.

    Raises:
        ValueError: The labels do not fit the outputs of the head, or a class has no samples.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3 * 4))
        >>> estimate_sites(net, (torch.rand(9, 1, 2, 2), torch.arange(9) % 3)).means.shape
        torch.Size([3, 4, 4])
    """
    check_views(views)
    parts = split(model)
    labels, indices = find_labels(data), None
    if labels is not None:
        check_labels(labels, num_classes)
        num_classes = num_classes or infer_classes(int(labels.max()) + 1, parts)
        _check_counts(torch.bincount(labels.cpu().long(), minlength=num_classes))
        indices = choose_fraction(labels, fraction, seed)
    elif fraction != 1.0:
        raise ValueError("an iterable of batches needs fraction=1, because its labels are not known ahead")
    device = local_device(model)
    group = join_group(device)
    batches = iterate_batches(data, batch_size, indices=indices, group=group)
    rows = num_classes or parts.linear.out_features  # there are no more classes than outputs
    sums = _sum_features(stream_features(model, batches, views, rows), rows, progress)
    sums = _reduce(sums, (rows, views), group, device)
    if num_classes is None:
        sums.keep_classes(infer_classes(int(sums.counts[:, 0].nonzero().max()) + 1, parts))
    return Sites(sums.means().cpu(), sums.counts.cpu(), fingerprint(model), fraction)


def infer_classes(labelled: int, parts: SplitModel) -> int:
    """Return the number of classes if labels from 0 to ``labelled - 1`` fit the head, else raise a ValueError."""
    outputs, told = parts.linear.out_features, getattr(parts.model, "head_views", None)  # told by the card
    if outputs not in [labelled * views for views in (TURNS if told is None else [told])]:
        raise ValueError(
            f"the labels show {labelled} classes and the model's head has {outputs} outputs. Labels must be the "
            "numbers of its outputs, and every class needs samples: use data of all classes. If there are no more "
            f"classes than that, write ttvd.estimate_sites(model, data, num_classes={labelled})"
        )
    return labelled


def _sum_features(
    stream: Iterable[tuple[Tensor, Tensor]], num_classes: int, progress: Callable[[int], None] | None
) -> SiteAccumulator | None:
    """Return the sums of this process; None if it got no batch."""
    sums, done = None, 0
    for z, labels in stream:
        sums = sums or SiteAccumulator(num_classes, z.shape[0], z.shape[-1], z.device)
        sums.update(z, labels)
        done += len(labels)
        if progress is not None:
            progress(done)
    return sums


def _reduce(
    sums: SiteAccumulator | None, shape: tuple[int, int], group: Group, device: torch.device
) -> SiteAccumulator:
    """Return the sums over all processes, also in a process that got no batch and does not know the dimension."""
    dim = max(group.gather(0 if sums is None else sums.sums.shape[-1], device))
    if dim == 0:
        raise ValueError("there are no images to estimate sites from")
    sums = sums or SiteAccumulator(*shape, dim, device)
    sums.reduce(group)
    return sums
