"""Many tensors as one vector, so that one kernel replaces one for each of them."""

from collections.abc import Iterable, Sequence
from operator import itemgetter

import torch
from torch import Tensor

_LARGE = 65536  # elements of a tensor that is better read than copied


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one type and device into a new vector.

    Example:
        >>> flatten([torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)]).tolist()
        [1.0, 2.0, 3.0]
    """
    return torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into a vector with the shapes of the tensors in ``like``."""
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def find_runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views that join neighbours: tensors that follow each other in memory, in this order, become one vector.

    Example:
        >>> whole = torch.arange(5.0)
        >>> [run.tolist() for run in find_runs([whole[:2], whole[2:4].view(2, 1), torch.ones(1)])]
        [[0.0, 1.0, 2.0, 3.0], [1.0]]
    """
    starts: list[tuple[Tensor, int]] = []
    end: int | None = None
    for tensor in tensors:
        place, solid = tensor.data_ptr(), tensor.is_contiguous()
        if place == end and solid and _share_storage(starts[-1][0], tensor):
            starts[-1] = (starts[-1][0], starts[-1][1] + tensor.numel())
        else:
            starts.append((tensor, tensor.numel()))
        end = place + tensor.nbytes if solid else None
    found = [(start.detach() if start.requires_grad else start, size) for start, size in starts]
    return [start if start.numel() == size else start.as_strided([size], [1]) for start, size in found]


def _share_storage(one: Tensor, other: Tensor) -> bool:
    """Whether one view can cover both tensors: they may be neighbours by accident."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and one.dtype == other.dtype


def lay_together(tensors: Sequence[Tensor]) -> bool:
    """Place tensors of one type and device next to each other in memory, in their order; their values stay.

    Only tensors of one dimension whose size is a multiple of 16 bytes are moved, since kernels need that alignment.

    Returns:
        Whether any tensor was moved.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.ndim == 1 and tensor.numel() and not tensor.numel() * tensor.itemsize % 16:
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    apart = [group for group in groups.values() if len(find_runs(group)) > 1]
    for group in apart:
        for tensor, part in zip(group, unflatten(flatten([t.detach() for t in group]), group), strict=True):
            tensor.data = part
    return bool(apart)


def all_finite(tensor: Tensor) -> Tensor:
    """Whether every element is a finite number, as a scalar tensor.

    This takes one pass; ``isfinite().all()`` takes several.

    Example:
        >>> [bool(all_finite(torch.tensor([1.0, value]))) for value in (2.0, -torch.inf, torch.nan)]
        [True, False, False]
    """
    return _find_largest(tensor) < torch.inf


@torch.no_grad()
def find_largest(tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value in tensors of one device, as a scalar tensor; NaN if an element is NaN.

    Tensors of integers are left out.

    Example:
        >>> find_largest([torch.tensor(1.0), torch.tensor([2.0, -3.0])])
        tensor(3.)
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point and tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor)
    found: list[Tensor] = []
    for group in groups.values():
        # Small ones are joined, since each operation costs something.
        found += [_find_largest(tensor) for tensor in group if tensor.numel() > _LARGE]
        if small := [tensor for tensor in group if tensor.numel() <= _LARGE]:
            found.append(_find_largest(flatten(small)))
    if not found:
        return torch.zeros(())
    return found[0] if len(found) == 1 else torch.stack([value.double() for value in found]).amax()


def _find_largest(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = torch.aminmax(tensor.detach())  # on a CPU many times faster than a norm
        return torch.maximum(high, -low)
    largest: Tensor = torch.linalg.vector_norm(tensor.detach(), torch.inf)
    return largest


class Copies:
    """Copies of tensors of one type and device, in one vector.

    Args:
        tensors: The tensors.
        by_runs: Copy neighbours in memory together, so that :func:`keep_where` can put them back together. On a CPU it
            takes longer to find them than it saves.

    Example:
        >>> tensor = torch.ones(2)
        >>> copies = Copies([tensor])
        >>> tensor.zero_().tolist(), copies.tensors()
        ([0.0, 0.0], [tensor([1., 1.])])
    """

    @torch.no_grad()
    def __init__(self, tensors: list[Tensor], by_runs: bool = False) -> None:
        self._order = _by_place(tensors) if by_runs else None
        self._ordered = tensors if self._order is None else [tensors[i] for i in self._order]
        self._vector = flatten(tensors if self._order is None else find_runs(self._ordered))

    def tensors(self) -> list[Tensor]:
        """The copies, in the order of the tensors."""
        copies = unflatten(self._vector, self._ordered)
        if self._order is None:
            return copies
        return [copy for _, copy in sorted(zip(self._order, copies, strict=True), key=itemgetter(0))]


def _by_place(tensors: Sequence[Tensor]) -> list[int]:
    """Indices of tensors in the order in which they lie in memory."""
    return sorted(range(len(tensors)), key=lambda i: tensors[i].data_ptr())


@torch.no_grad()
def keep_where(condition: Tensor, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Keep the tensors if ``condition``, a scalar, is true; otherwise copy the others into them.

    Nothing waits for the device. The shape of the other may differ: it is broadcast. Tensors on another device than the
    condition stay as they are.

    Example:
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> keep_where(torch.tensor(False), [a], [b])
        >>> a.tolist()
        [1.0, 1.0]
    """
    groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for i in _by_place(tensors):
        tensor, other = tensors[i], others[i]
        if tensor.device != condition.device:
            continue
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            tensor.copy_(torch.where(condition, tensor, other))
        else:
            groups.setdefault(tensor.dtype, []).append((tensor, other))
    for pairs in groups.values():
        own, theirs = zip(*pairs, strict=True)
        runs = find_runs(own)
        write_runs(own, runs, torch.where(condition, join_runs(runs), join_runs(find_runs(theirs))))


def write_runs(tensors: Sequence[Tensor], runs: list[Tensor], vector: Tensor) -> None:
    """Copy a vector into tensors, one after the other, by their runs from :func:`find_runs`."""
    torch._foreach_copy_(runs, unflatten(vector, runs))
    note_change(tensors, runs)


def note_change(tensors: Sequence[Tensor], runs: Sequence[Tensor]) -> None:
    """Tell autograd of a write to the runs of tensors: it notices the first tensor of each run only."""
    if len(runs) < len(tensors):
        torch.autograd.graph.increment_version(list(tensors))


def join_runs(runs: Sequence[Tensor]) -> Tensor:
    """The runs of :func:`find_runs` as one vector to read from; a view where there is one run."""
    return runs[0].reshape(-1) if len(runs) == 1 else flatten(runs)
