"""Orders over several domains: int64 arrays of rows (domain, sample).

A domain is given by its own order, so that any order of `orders` can be used inside each of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ttvd.data.streams.orders import Order, make_generator


def continual(orders: Sequence[npt.ArrayLike]) -> Order:
    """Show one domain after the other, each in its own order.

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
    domains = make_generator(seed).permutation(rows[:, 0])
    # The i-th time that a domain is drawn it gives its i-th sample: put its rows where its draws are.
    result = np.empty_like(rows)
    result[np.argsort(domains, kind="stable")] = rows
    return result


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
