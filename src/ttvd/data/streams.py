"""Orders of the samples of one domain: `order(labels, seed, **options)` gives an int64 array of indices.

An order depends on its arguments alone; the global generators are neither read nor changed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]

_ATTEMPTS = 100


def make_generator(seed: int) -> np.random.Generator:
    """Return a generator of its own for one order."""
    if not isinstance(seed, int | np.integer):
        raise TypeError(f"seed must be an integer, so that the order can be repeated, got {seed!r}")
    return np.random.default_rng(seed)


def iid(labels: int | npt.ArrayLike, seed: int) -> Order:
    """Shuffle all samples; `labels` may be just their number.

    >>> sorted(iid(5, seed=0).tolist())
    [0, 1, 2, 3, 4]
    """
    count = labels if isinstance(labels, int) else len(_check_labels(labels))
    if count < 1:
        raise ValueError(f"a stream needs at least one sample, got {count}")
    return make_generator(seed).permutation(count)


def class_sorted(labels: npt.ArrayLike, seed: int) -> Order:
    """Show one class after the other; the classes, and the samples of each, come in random order.

    >>> np.diff(np.array([0, 1, 0, 1])[class_sorted([0, 1, 0, 1], seed=0)]).nonzero()[0].tolist()
    [1]
    """
    members, generator = _group_samples(_check_labels(labels)), make_generator(seed)
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

    The stream has as many chunks as there are classes. Each class is dealt to the chunks that are not yet full,
    in shares drawn from a symmetric Dirichlet distribution; inside a chunk the classes come one after another.
    A small alpha gives long runs; a large one gives every chunk the frequencies of the set, still in runs.

    Args:
        labels: Class of each sample.
        seed: Seed of the order.
        alpha: Concentration; 0.1 in NOTE and TTAB.
        min_chunk: Fewest samples in a chunk (5 in TTAB, 10 in NOTE); draws with a smaller one are repeated.
        num_classes: If given, each class 0..num_classes - 1 must have a sample.

    Example:
        >>> sorted(dirichlet([0, 1] * 20, seed=0).tolist()) == list(range(40))
        True
    """
    _check_alpha(alpha)
    members, generator = _group_samples(_check_labels(labels, num_classes)), make_generator(seed)
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
    members, generator = _group_samples(_check_labels(labels)), make_generator(seed)
    slots = min(len(members), max_slots)
    return _join_chunks(_deal_classes(members, slots, alpha, generator, full=np.inf), generator)


def imbalanced(labels: npt.ArrayLike, seed: int, *, ratio: float = 1000, length: int | None = None) -> Order:
    """Let each class dominate one stretch of the stream, as SAR (Niu et al., 2023) and DeYO do.

    In its stretch a class is `ratio` times as likely as any other. Samples are drawn **with replacement**, as
    there: some come twice, some never. Ratio 1 is uniform over classes, infinity is sorted by class.

    Args:
        labels: Class of each sample.
        seed: Seed of the order.
        ratio: Imbalance, at least 1; SAR reports 1,000 to 500,000 for 1,000 classes.
        length: Number of draws, by default as many as there are samples (SAR: 100,000 from 50,000).

    Example:
        >>> labels = np.array([0, 0, 0, 1, 1, 1])
        >>> np.diff(labels[imbalanced(labels, seed=0, ratio=np.inf)]).nonzero()[0].tolist()
        [2]
    """
    if not ratio >= 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    members, generator = _group_samples(_check_labels(labels)), make_generator(seed)
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

    A class gives as many samples as its frequency asks for, or all it has. Without `size` that is the stream,
    somewhat shorter than the set. With `size`, other samples picked at random bring it to exactly that number.

    Args:
        labels: Class of each sample.
        seed: Seed of the order.
        alpha: Concentration; 4 in TTAB. A small one leaves a few classes.
        size: Length of the stream, at most the number of samples (which would leave no shift).

    Example:
        >>> len(label_shift([0, 1, 2, 3] * 25, seed=0, size=50))
        50
    """
    _check_alpha(alpha)
    members, generator = _group_samples(_check_labels(labels)), make_generator(seed)
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


def _deal_classes(
    members: Sequence[Order], chunks: int, alpha: float, generator: np.random.Generator, full: float
) -> list[list[Order]]:
    """Return, for each chunk, its samples of each class that it has."""
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


def _group_samples(labels: Order) -> list[Order]:
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
