"""What a step does beside the network, alone: it is timed on features and logits that are kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ttvd.methods import ETA, LAME, SHOT, T3A, TAST, TTVD, AdaNPC, Adapter, GradientAdapter, Tent
from ttvd.nn.norms import following_stream

_LOSSES = (Tent, SHOT, ETA)
_PROTOTYPES = (T3A, TAST, LAME, AdaNPC)


def isolate_geometry(adapter: Adapter, x: Tensor) -> Callable[[], object] | None:
    """Scores, filter, loss, its gradient by features and logits, and what is measured along the stream; or the update
    of prototypes.

    Args:
        adapter: It is changed, and good for nothing else afterwards.
        x: A batch.

    Returns:
        What does it once; None for a method whose step cannot be taken apart so.
    """
    if isinstance(adapter, TTVD):
        return _isolate_ttvd(adapter, x)
    if isinstance(adapter, _LOSSES):
        return _isolate_loss(adapter, x)
    if isinstance(adapter, _PROTOTYPES):
        return _isolate_prototypes(adapter, x)
    return None


def _isolate_ttvd(adapter: TTVD, x: Tensor) -> Callable[[], object]:
    with torch.no_grad(), adapter.autocasting():
        z, logits = (tensor.clone().requires_grad_() for tensor in adapter.forward_views(x))
    adapter.forward_views = lambda x, evidence=None: (z, logits)  # type: ignore[method-assign]

    def judge() -> object:
        with following_stream(adapter.stream_parts()):
            return torch.autograd.grad(adapter.loss(x).loss, [z, logits], allow_unused=True)

    return judge


def _isolate_loss(adapter: GradientAdapter, x: Tensor) -> Callable[[], object]:
    with torch.no_grad(), adapter.autocasting():
        logits = adapter.output(x).clone().requires_grad_()
    adapter.output = lambda x: logits  # type: ignore[method-assign]
    return lambda: torch.autograd.grad(adapter.loss(x).loss, logits)


def _isolate_prototypes(adapter: T3A | TAST | LAME | AdaNPC, x: Tensor) -> Callable[[], object]:
    with torch.no_grad(), adapter.autocasting():
        seen = adapter.model.features_and_logits(x)
    adapter.model.features_and_logits = lambda x: seen  # type: ignore[method-assign]
    return lambda: adapter.adapt(x)
