"""Estimation of sites: one pass over source data, class means per view, summed in float64."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ttvd.nn.split import split
from ttvd.nn.views import TURNS, check_views
from ttvd.source.distributed import Group, join_group, local_device
from ttvd.source.features import Data, find_labels, iterate_batches, stream_features
from ttvd.source.images import check_labels
from ttvd.zoo.sites import Sites, fingerprint


class SiteAccumulator:
    """Running sums of features per class and view; two of them can be merged.

    Args:
        num_classes: Number of classes, k.
        views: Number of views, v.
        dim: Dimension of the features, d.
        device: Where the sums live.

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
        """Add what another accumulator has seen."""
        if self.sums.shape != other.sums.shape:
            raise ValueError(
                f"cannot merge sums of shape {tuple(other.sums.shape)} into {tuple(self.sums.shape)}"
            )
        self.sums += other.sums.to(self.sums.device)
        self.counts += other.counts.to(self.counts.device)

    def reduce(self, group: Group) -> None:
        """Add up the accumulators of all processes, in every one of them."""
        group.sum_(self.sums)
        group.sum_(self.counts)

    def means(self) -> Tensor:
        """Class means (k, v, d) in float64; a ValueError names the classes without samples."""
        if empty := (self.counts == 0).any(1).nonzero().flatten().tolist():
            shown = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
            raise ValueError(
                f"no samples of class {shown} ({len(empty)} of {len(self.counts)} classes): a class without "
                "samples has no site; use more data, a larger fraction, or the right num_classes"
            )
        return self.sums / self.counts[..., None]


def choose_fraction(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Sorted numbers of a seeded random share of the images, the same share of every class.

    Of n images of a class it takes ``round(fraction * n)``, but at least one.

    Example:
        >>> len(choose_fraction(torch.arange(40) % 4, 0.1, seed=0))
        4
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")
    if fraction == 1.0:
        return torch.arange(len(labels))
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[
        labels[order].argsort(stable=True)
    ]  # the classes one after another, each in random order
    sizes = labels.unique(return_counts=True)[1].tolist()
    kept = [rows[: max(1, round(fraction * len(rows)))] for rows in by_class.split(sizes)]
    return torch.cat(kept).sort().values


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
    """Class means of the features, per class and view, in one pass in evaluation mode.

    Under torchrun whole batches are dealt to the processes and the sums are added, so that every process
    returns the sites that one alone would have found.

    Args:
        model: A ``SplitModel``, or any classifier that :func:`ttvd.nn.split` understands.
        data: Tensors ``(images, labels)``, a map-style dataset, or an iterable of batches; images are uint8 or
            floating point in [0, 1]. Give images as the model sees them in use, without augmentation.
        num_classes: Found from the labels unless given, and then the head must have an output for each class, or
            for each class and turn; an iterable needs it.
        views: How many turns of each image get a site: 1, 2 or 4.
        fraction: Share of every class to use (the paper used 10 % and 1 % of ImageNet); 1 for an iterable.
        seed: Decides which images a fraction takes.
        batch_size: Images per forward pass; each is shown ``views`` times.
        progress: Called with the number of images done so far in this process.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3 * 4))
        >>> sites = estimate_sites(net, (torch.rand(9, 1, 2, 2), torch.arange(9) % 3))
        >>> tuple(sites.means.shape)
        (3, 4, 4)
    """
    check_views(views)
    known = num_classes is not None
    num_classes, indices = _choose(data, num_classes, fraction, seed)
    if not known:
        _check_head(split(model).linear.out_features, num_classes)
    device = local_device(model)
    group = join_group(device)
    batches = iterate_batches(data, batch_size, indices=indices, group=group)
    sums = _sum_features(stream_features(model, batches, views, num_classes), num_classes, progress)
    sums = _reduce(sums, (num_classes, views), group, device)
    return Sites(sums.means().cpu(), sums.counts.cpu(), fingerprint(model), fraction)


def _choose(data: Data, num_classes: int | None, fraction: float, seed: int) -> tuple[int, Tensor | None]:
    """The number of classes, and which images to use (None for the whole of a stream)."""
    labels = find_labels(data)
    if labels is not None:
        check_labels(labels, num_classes)
        return num_classes or int(labels.max()) + 1, choose_fraction(labels, fraction, seed)
    if num_classes is None or fraction != 1.0:
        raise ValueError(
            "an iterable of batches needs num_classes and fraction=1: its labels are not known ahead"
        )
    return num_classes, None


def _check_head(outputs: int, num_classes: int) -> None:
    """Refuse data whose labels cannot be the outputs of the head: those of a part of the classes are counted anew."""
    if outputs not in [num_classes * views for views in TURNS]:
        raise ValueError(
            f"the labels show {num_classes} classes and the model's head has {outputs} outputs: labels must be the "
            "numbers of its outputs, and every class needs a folder, or samples; num_classes=... says otherwise"
        )


def _sum_features(
    stream: Iterable[tuple[Tensor, Tensor]], num_classes: int, progress: Callable[[int], None] | None
) -> SiteAccumulator | None:
    """The sums of this process; None when no batch came its way."""
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
    """The sums over all processes, also in one that had no batch and so does not know the dimension."""
    dim = max(group.gather(0 if sums is None else sums.sums.shape[-1], device))
    if dim == 0:
        raise ValueError("there are no images to estimate sites from")
    sums = sums or SiteAccumulator(*shape, dim, device)
    sums.reduce(group)
    return sums
