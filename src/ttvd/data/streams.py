"""The order in which samples arrive, and their batches: seeded functions from labels to indices.

An order of one domain, `order(labels, seed, **options)`, is an int64 array of sample indices. An order of several
domains is an int64 array of rows (domain, sample); it is made from an order of each domain. An order depends on its
arguments alone; the global generators are neither read nor changed.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]
Sample = TypeVar("Sample")

Lengths = tuple[int, int, int]
_ATTEMPTS = 100


def iid(labels: int | npt.ArrayLike, seed: int) -> Order:
    """Shuffle all samples; `labels` may be just their number.

    >>> sorted(iid(5, seed=0).tolist())
    [0, 1, 2, 3, 4]
    """
    count = labels if isinstance(labels, int) else len(_check_labels(labels))
    if count < 1:
        raise ValueError(f"a stream needs at least one sample, got {count}")
    return _make_generator(seed).permutation(count)


def class_sorted(labels: npt.ArrayLike, seed: int) -> Order:
    """Show one class after another; the classes and the samples of each come in random order.

    >>> np.diff(np.array([0, 1, 0, 1])[class_sorted([0, 1, 0, 1], seed=0)]).nonzero()[0].tolist()
    [1]
    """
    members, generator = _group_by_class(_check_labels(labels)), _make_generator(seed)
    return np.concatenate([generator.permutation(members[c]) for c in generator.permutation(len(members))])


def dirichlet(
    labels: npt.ArrayLike,
    seed: int,
    *,
    alpha: float = 0.1,
    min_chunk: int = 5,
    num_classes: int | None = None,
) -> Order:
    """Correlate the labels in time, as NOTE (Gong et al., 2022) and TTAB (Zhao et al., 2023) do.

    The stream has as many chunks as there are classes. Each class is divided among the chunks that are not yet full,
    in shares drawn from a symmetric Dirichlet distribution. Inside a chunk the classes come one after another. A small
    alpha gives long runs; a large alpha gives every chunk the class frequencies of the set, still in runs.

    Args:
        labels: Class of each sample.
        seed: Seed of the order.
        alpha: Concentration; 0.1 in NOTE and TTAB.
        min_chunk: Smallest number of samples in a chunk (5 in TTAB, 10 in NOTE); a draw below it is repeated.
        num_classes: If given, each class from 0 to num_classes - 1 must have a sample.

    Example:
        >>> sorted(dirichlet([0, 1] * 20, seed=0).tolist()) == list(range(40))
        True
    """
    _check_alpha(alpha)
    members, generator = _group_by_class(_check_labels(labels, num_classes)), _make_generator(seed)
    total, chunks = sum(map(len, members)), len(members)
    if chunks * min_chunk > total:
        raise ValueError(f"{total} samples cannot fill {chunks} chunks of {min_chunk}: lower min_chunk")
    for _ in range(_ATTEMPTS):
        dealt = _deal_classes(members, chunks, alpha, generator, full=total / chunks)
        if min(sum(map(len, chunk)) for chunk in dealt) >= min_chunk:
            return _join_chunks(dealt, generator)
    raise ValueError(f"{_ATTEMPTS} draws left a chunk below {min_chunk}: raise alpha or lower min_chunk")


def dirichlet_slots(labels: npt.ArrayLike, seed: int, *, alpha: float = 0.1, max_slots: int = 100) -> Order:
    """Correlate the labels in time, as RoTTA (Yuan et al., 2023) does: like `dirichlet`, with unequal chunks.

    There are min(classes, max_slots) chunks, and nothing keeps one of them from taking most of the stream.

    >>> sorted(dirichlet_slots([0, 1] * 20, seed=0).tolist()) == list(range(40))
    True
    """
    _check_alpha(alpha)
    if max_slots < 1:
        raise ValueError(f"max_slots must be at least 1, got {max_slots}")
    members, generator = _group_by_class(_check_labels(labels)), _make_generator(seed)
    slots = min(len(members), max_slots)
    return _join_chunks(_deal_classes(members, slots, alpha, generator, full=np.inf), generator)


def imbalanced(labels: npt.ArrayLike, seed: int, *, ratio: float = 1000, length: int | None = None) -> Order:
    """Let each class dominate one stretch of the stream, as SAR (Niu et al., 2023) and DeYO do.

    In its stretch a class is `ratio` times as likely as any other. As in SAR, samples are drawn **with replacement**:
    some come twice, some never. Ratio 1 is uniform over classes, an infinite ratio sorts by class.

    Args:
        labels: Class of each sample.
        seed: Seed of the order.
        ratio: Ratio of the imbalance, at least 1; SAR reports 1,000 to 500,000 for 1,000 classes.
        length: Number of draws, by default the number of samples (SAR: 100,000 from 50,000).

    Example:
        >>> labels = np.array([0, 0, 0, 1, 1, 1])
        >>> np.diff(labels[imbalanced(labels, seed=0, ratio=np.inf)]).nonzero()[0].tolist()
        [2]
    """
    if not ratio >= 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    members, generator = _group_by_class(_check_labels(labels)), _make_generator(seed)
    k, sizes = len(members), np.array([len(group) for group in members])
    length = int(sizes.sum()) if length is None else length
    if length < k:
        raise ValueError(f"length must be at least the number of classes, {k}, got {length}")
    major = generator.permutation(k)[np.arange(length) * k // length]
    minor = (major + generator.integers(1, max(k, 2), size=length)) % k
    drawn = np.where(generator.random(length) < 1 - (k - 1) / (ratio + k - 1), major, minor)
    places: Order = (np.cumsum(sizes) - sizes)[drawn] + generator.integers(0, sizes[drawn])
    return np.concatenate(members)[places]


def label_shift(labels: npt.ArrayLike, seed: int, *, alpha: float = 4.0, size: int | None = None) -> Order:
    """Draw the class frequencies from a symmetric Dirichlet distribution, then shuffle, as TTAB does.

    A class gives as many samples as its frequency asks for, or all that it has. Without `size` these are the stream,
    which is somewhat shorter than the set. With `size`, other random samples bring it to exactly that length.

    Args:
        labels: Class of each sample.
        seed: Seed of the order.
        alpha: Concentration; 4 in TTAB. A small value leaves few classes.
        size: Length of the stream, at most the number of samples (which would leave no shift).

    Example:
        >>> len(label_shift([0, 1, 2, 3] * 25, seed=0, size=50))
        50
    """
    _check_alpha(alpha)
    members, generator = _group_by_class(_check_labels(labels)), _make_generator(seed)
    total = sum(map(len, members))
    if size is not None and not 1 <= size <= total:
        raise ValueError(f"size must be from 1 to the number of samples, {total}, got {size}")
    wanted = generator.multinomial(size or total, generator.dirichlet(np.full(len(members), alpha)))
    shuffled = [generator.permutation(group) for group in members]
    chosen = np.concatenate([group[:count] for group, count in zip(shuffled, wanted, strict=True)])
    if size is not None:
        rest = np.concatenate([group[count:] for group, count in zip(shuffled, wanted, strict=True)])
        chosen = np.concatenate([chosen, generator.permutation(rest)[: size - len(chosen)]])
    return generator.permutation(chosen)


def continual(orders: Sequence[npt.ArrayLike]) -> Order:
    """Show one domain after another, each in its own order.

    >>> continual([[1, 0], [0, 1]]).tolist()
    [[0, 1], [0, 0], [1, 0], [1, 1]]
    """
    checked = _check_orders(orders)
    domains = np.repeat(np.arange(len(checked)), [len(order) for order in checked])
    return np.column_stack([domains, np.concatenate(checked)])


def mixed(orders: Sequence[npt.ArrayLike], seed: int) -> Order:
    """Interleave the domains at random, each in its own order.

    With an independent `iid` order in each domain this is a shuffle of everything; with correlated orders the
    classes stay correlated in time while the domains change from sample to sample.

    >>> rows = mixed([[2, 0, 1], [0, 1]], seed=0)
    >>> rows[rows[:, 0] == 0, 1].tolist(), rows[rows[:, 0] == 1, 1].tolist()
    ([2, 0, 1], [0, 1])
    """
    rows = continual(orders)
    domains = _make_generator(seed).permutation(rows[:, 0])
    # The i-th time that a domain is drawn it gives its i-th sample: put its rows where its draws are.
    result = np.empty_like(rows)
    result[np.argsort(domains, kind="stable")] = rows
    return result


def onset(clean: npt.ArrayLike, shifted: npt.ArrayLike, lengths: Lengths = (512, 640, 640)) -> Order:
    """Let a shift come and go: clean samples (domain 0), shifted ones (domain 1), clean ones again.

    Args:
        clean: Order of the clean domain. The last part goes on where the first one ends.
        shifted: Order of the shifted domain.
        lengths: Number of samples of the three parts; see :func:`draw_onset` for random ones.

    Example:
        >>> onset([4, 5, 6], [0, 1], (2, 1, 1)).tolist()
        [[0, 4], [0, 5], [1, 0], [0, 6]]
    """
    calm, other = _check_orders([clean, shifted])
    before, during, after = lengths
    if min(lengths) < 1 or before + after > len(calm) or during > len(other):
        raise ValueError(
            f"parts of {before}, {during} and {after} samples need at least one sample each, {before + after} clean "
            f"samples and {during} shifted ones; there are {len(calm)} and {len(other)}"
        )
    parts = [(0, calm[:before]), (1, other[:during]), (0, calm[before : before + after])]
    return np.concatenate([np.column_stack([np.full(len(part), domain), part]) for domain, part in parts])


def draw_onset(
    seed: int,
    *,
    batch_size: int = 64,
    fewest: Lengths = (4, 8, 8),
    most: Lengths = (16, 16, 16),
) -> Lengths:
    """Draw the lengths of an :func:`onset` at random, in whole batches.

    Args:
        seed: Seed of the draw.
        batch_size: Number of samples in a batch.
        fewest: Smallest number of batches of each part.
        most: Largest number of batches of each part.

    Example:
        >>> [length % 64 for length in draw_onset(0)]
        [0, 0, 0]
    """
    _check_batch_size(batch_size)
    if not all(1 <= low <= high for low, high in zip(fewest, most, strict=True)):
        raise ValueError(f"fewest must be at least 1 and at most most, got {fewest} and {most}")
    drawn = _make_generator(seed).integers(fewest, most, endpoint=True)
    before, during, after = (batch_size * int(count) for count in drawn)
    return before, during, after


def parse_lengths(text: str) -> tuple[Lengths, Lengths]:
    """Read the fewest and the most batches of the three parts of an :func:`onset`, for :func:`draw_onset`.

    >>> parse_lengths("8/10/10"), parse_lengths("4-16/8-16/8")
    (((8, 10, 10), (8, 10, 10)), ((4, 8, 8), (16, 16, 8)))
    """
    found = [re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word.strip(), re.ASCII) for word in text.split("/")]
    parts = [(int(match[1]), int(match[2] or match[1])) for match in found if match]
    if len(found) != 3 or len(parts) != 3 or not all(1 <= low <= high for low, high in parts):
        raise ValueError(
            "lengths must be the batches of three parts, or ranges to draw them from, such as '8/10/10' or "
            f"'4-16/8-16/8-16', got {text!r}"
        )
    (a, b), (c, d), (e, f) = parts
    return (a, c, e), (b, d, f)


def recurring(orders: Sequence[npt.ArrayLike], rounds: int) -> Order:
    """Show the domains one after another, over and over; each round has the next part of each domain.

    >>> recurring([[0, 1], [5, 6]], rounds=2).tolist()
    [[0, 0], [1, 5], [0, 1], [1, 6]]
    """
    checked = _check_orders(orders)
    if not 1 <= rounds <= min(map(len, checked)):
        raise ValueError(
            f"rounds must be from 1 to the size of the smallest domain, {min(map(len, checked))}, got {rounds}"
        )
    parts = [np.array_split(order, rounds) for order in checked]
    return np.concatenate(
        [
            np.column_stack([np.full(len(part[number]), domain), part[number]])
            for number in range(rounds)
            for domain, part in enumerate(parts)
        ]
    )


def rare(
    usual: npt.ArrayLike, shifted: npt.ArrayLike, seed: int, *, batch_size: int = 64, every: int = 10
) -> Order:
    """Let one batch in ``every`` come from another domain (1), at a random place; all others are usual ones (0).

    The stream is as long as the usual domain allows; samples that fill no batch are left out.

    Args:
        usual: Order of the usual domain.
        shifted: Order of the rare domain. When it ends it begins again.
        seed: Seed of the places.
        batch_size: Number of samples in a batch.
        every: Number of batches of which one is from the rare domain.

    Example:
        >>> rare(range(6), [8, 9], seed=0, batch_size=2, every=4)[:, 0].reshape(4, 2).sum(1).tolist().count(2)
        1
    """
    _check_batch_size(batch_size)
    calm, other = _check_orders([usual, shifted])
    groups = len(calm) // (batch_size * (every - 1)) if every > 1 else 0
    if groups < 1:
        raise ValueError(
            f"one batch of {batch_size} in {every} needs every > 1 and at least {batch_size * max(every - 1, 1)} "
            f"usual samples, got {len(calm)}"
        )
    batches_ = np.zeros((groups, every), dtype=np.int64)
    batches_[np.arange(groups), _make_generator(seed).integers(0, every, groups)] = 1
    domains = np.repeat(batches_.ravel(), batch_size)
    samples = np.empty_like(domains)
    for domain, order in enumerate((calm, other)):
        places = domains == domain
        samples[places] = np.resize(order, int(places.sum()))
    return np.column_stack([domains, samples])


def gradual(names: Sequence[str], *, peak: int = 5) -> list[tuple[str, int]]:
    """List the domains of a gradual change: every corruption rises to its peak severity and falls back.

    CoTTA (Wang et al., 2022) introduced the sequence 1, 2, 3, 4, 5, 4, 3, 2, 1 for each corruption.

    >>> gradual(["fog", "snow"], peak=2)
    [('fog', 1), ('fog', 2), ('fog', 1), ('snow', 1), ('snow', 2), ('snow', 1)]
    """
    if not names or peak < 1:
        raise ValueError(
            f"gradual needs at least one name and a peak of at least 1, got {names!r} and {peak}"
        )
    severities = [*range(1, peak), *range(peak, 0, -1)]
    return [(name, severity) for name in names for severity in severities]


def batches(order: Order, size: int, *, drop_last: bool = False) -> list[Order]:
    """Cut an order into consecutive batches of indices (or of rows (domain, sample)).

    Args:
        order: Sample indices (n,), or rows (n, 2) of several domains.
        size: Number of samples in a batch; the last batch may have fewer.
        drop_last: Leave a shorter last batch out.

    Example:
        >>> batches(np.array([3, 1, 0, 2, 4]), 2)
        [array([3, 1]), array([0, 2]), array([4])]
    """
    _check_batch_size(size)
    stop = len(order) // size * size if drop_last else len(order)
    if stop == 0:
        raise ValueError(
            f"{len(order)} samples give no batch of {size}" + (": set drop_last=False" if len(order) else "")
        )
    return [order[start : start + size] for start in range(0, stop, size)]


def batch_iterable(
    samples: Iterable[Sample], size: int, *, drop_last: bool = False
) -> Iterator[list[Sample]]:
    """Group samples into lists as they arrive; the source may be endless and is never read ahead of a batch.

    Args:
        samples: Any iterable, for example of images from a camera; `torch.stack` makes a batch of each list.
        size: Number of samples in a batch; when the source ends, the last batch may have fewer.
        drop_last: Leave a shorter last batch out.

    Example:
        >>> from itertools import count
        >>> stream = batch_iterable(count(), 3)
        >>> next(stream), next(stream)
        ([0, 1, 2], [3, 4, 5])
    """
    _check_batch_size(size)  # here and not in the generator below, so that a mistake shows at the call
    return _group_batches(iter(samples), size, size if drop_last else 1)


def order_hash(order: Order) -> str:
    """Return a short digest of an order, the same on every machine: equal digests, equal streams.

    >>> order_hash(np.array([2, 0, 1]))
    '167ee420f2576b2c'
    """
    content = np.ascontiguousarray(order, dtype="<i8")
    return hashlib.sha256(f"{content.shape}".encode() + content.tobytes()).hexdigest()[:16]


def _make_generator(seed: int) -> np.random.Generator:
    if not isinstance(seed, int | np.integer):
        raise TypeError(f"seed must be an integer, so that the order can be repeated, got {seed!r}")
    return np.random.default_rng(seed)


def _deal_classes(
    members: Sequence[Order], chunks: int, alpha: float, generator: np.random.Generator, full: float
) -> list[list[Order]]:
    """Return the samples of each chunk, one array for each class in it."""
    dealt: list[list[Order]] = [[] for _ in range(chunks)]
    sizes = np.zeros(chunks)
    for group in members:
        # A Dirichlet draw with some shares set to zero and renormalised is a Dirichlet draw over the others.
        open_chunks = np.flatnonzero(sizes < full)
        shares = generator.dirichlet(np.full(len(open_chunks), alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(group)).astype(np.int64)
        counts = np.diff(cuts, prepend=0, append=len(group))
        sizes[open_chunks] += counts
        takers = np.flatnonzero(counts)
        parts = np.split(generator.permutation(group), np.cumsum(counts[takers])[:-1])
        for chunk, part in zip(open_chunks[takers], parts, strict=True):
            dealt[chunk].append(part)
    return dealt


def _join_chunks(dealt: list[list[Order]], generator: np.random.Generator) -> Order:
    return np.concatenate([chunk[c] for chunk in dealt for c in generator.permutation(len(chunk))])


def _group_by_class(labels: Order) -> list[Order]:
    """Return the indices of the samples of each class that occurs."""
    counts = np.unique(labels, return_counts=True)[1]
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def _check_labels(labels: npt.ArrayLike, num_classes: int | None = None) -> Order:
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"labels must be a non-empty 1-D array of integers, got {array.dtype} {array.shape}")
    if num_classes is not None and not np.array_equal(np.unique(array), np.arange(num_classes)):
        raise ValueError(f"each class from 0 to {num_classes - 1} needs a sample, got {np.unique(array)}")
    return array.astype(np.int64)


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}")


def _check_orders(orders: Sequence[npt.ArrayLike]) -> list[Order]:
    arrays = [np.asarray(order) for order in orders]
    if not arrays:
        raise ValueError("at least one domain is needed, got none")
    for domain, array in enumerate(arrays):
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(
                f"domain {domain} must be a non-empty 1-D order of indices, got {array.dtype} {array.shape}"
            )
    return [array.astype(np.int64) for array in arrays]


def _group_batches(samples: Iterator[Sample], size: int, fewest: int) -> Iterator[list[Sample]]:
    while len(batch := list(islice(samples, size))) >= fewest:
        yield batch


def _check_batch_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"a batch needs at least one sample, got size={size}")
