"""Fingerprint of a model's weights: a short hash that ties sites, runs and checkpoints to the model."""

import hashlib

import torch
from torch import Tensor, nn


def fingerprint(module: nn.Module) -> str:
    """Return a short hash of a module's weights: names, shapes, dtypes and bytes of its state.

    The hash depends neither on the device, nor on train/eval flags, nor on a wrapper that puts the same prefix before
    all names (``DistributedDataParallel``, ``torch.compile``, ``SplitModel``).

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> fingerprint(layer) == fingerprint(nn.Sequential(layer).eval())
        True
    """
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    state |= dict(module.named_buffers())  # a normalisation layer may have non-persistent buffers
    start = shared_prefix(list(state))
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name[start:]} {tuple(value.shape)} {value.dtype}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def shared_prefix(names: list[str]) -> int:
    """Return the length of the leading dotted parts that all names share; the last part never counts."""
    length = 0
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        length += len(parts[0]) + 1
    return length
