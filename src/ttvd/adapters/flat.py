"""Many tensors as one vector: what would be a kernel for each of them is one for all."""

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of tensors of one type and device, one after the other.

    Example:
        >>> flatten([torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)]).tolist()
        [1.0, 2.0, 3.0]
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into a vector, of the shapes of the tensors in ``like``."""
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def all_finite(tensor: Tensor) -> Tensor:
    """Whether every element is a finite number, as a scalar tensor.

    In one pass; ``isfinite().all()`` has several.

    Example:
        >>> [bool(all_finite(torch.tensor([1.0, value]))) for value in (2.0, -torch.inf, torch.nan)]
        [True, False, False]
    """
    largest: Tensor = torch.linalg.vector_norm(tensor.detach(), torch.inf)  # NaN if one is
    return largest < torch.inf


@torch.no_grad()
def copy_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors; those of one type and device share their memory."""
    copies = list(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    for indices in groups.values():
        chosen = [tensors[i] for i in indices]
        for i, copy in zip(indices, unflatten(flatten(chosen), chosen), strict=True):
            copies[i] = copy
    return copies


@torch.no_grad()
def keep_where(condition: Tensor, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Leave the tensors as they are if ``condition``, a scalar, is true; else they become the others, in place.

    Nothing waits for the device. Pairs need not share a shape (one is spread over the other) or a device with the
    condition (they stay as they are).

    Example:
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> keep_where(torch.tensor(False), [a], [b])
        >>> a.tolist()
        [1.0, 1.0]
    """
    groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for tensor, other in zip(tensors, others, strict=True):
        if tensor.device != condition.device:
            continue
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            tensor.copy_(torch.where(condition, tensor, other))
        else:
            groups.setdefault(tensor.dtype, []).append((tensor, other))
    for pairs in groups.values():
        own, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        chosen = torch.where(condition, flatten(own), flatten(theirs))
        torch._foreach_copy_(own, unflatten(chosen, own))
