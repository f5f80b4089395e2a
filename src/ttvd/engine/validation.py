"""Checks of what enters an adapter, before anything has changed."""

import torch
from torch import Tensor

_SLACK = 1e-3  # resampling filters overshoot a little


def check_inputs(x: Tensor, *, device: torch.device, dtype: torch.dtype, values: bool) -> None:
    """Refuse a batch that cannot be meant.

    Args:
        x: The batch.
        device: The device of the model.
        dtype: The data type in which the model computes.
        values: Check the values too. On an accelerator this waits for the device.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"expected a torch tensor, got {type(x).__name__}; pass the images of a batch as one tensor "
            "(torch.as_tensor makes one of an array)"
        )
    if x.ndim < 2 or x.shape[0] == 0:
        raise ValueError(f"expected a batch (b, ...) with b >= 1, got a tensor of shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"expected floating-point images in [0, 1], got {x.dtype}; use x.float() / 255")
    if x.device != device:
        raise ValueError(f"the model is on {device} and the batch on {x.device}; use x.to('{device}')")
    if x.dtype != dtype and not torch.is_autocast_enabled(device.type):
        raise TypeError(f"the model computes in {dtype} and the batch is {x.dtype}; use x.to({dtype})")
    if values:
        _check_values(x)


def checks_values(validation: str, cheap: bool) -> bool:
    """Whether to check the values of a batch: ``"always"``, ``"never"``, or with ``"auto"`` where it is cheap."""
    if validation not in ("auto", "always", "never"):
        raise ValueError(f"adapter.validation must be 'auto', 'always' or 'never', got {validation!r}")
    return validation == "always" or (validation == "auto" and cheap)


def check_logits(logits: object, size: int) -> None:
    """Refuse the output of a model for ``size`` samples unless it is logits."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != size:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(f"the model must return logits of shape (b, k), got {got}; wrap it so that it does")


def _check_values(x: Tensor) -> None:
    low, high = (bound.item() for bound in torch.aminmax(x.detach()))
    if not (abs(low) < float("inf") and abs(high) < float("inf")):
        bad = (~x.detach().flatten(1).isfinite()).any(1).nonzero().flatten().tolist()
        raise ValueError(
            f"the batch holds NaN or infinite values in samples {bad[:8]}; leave those samples out"
        )
    if x.ndim == 4 and (low < -_SLACK or high > 1.0 + _SLACK):
        raise ValueError(
            f"expected images in [0, 1], got values from {low:.4g} to {high:.4g}. Divide 0..255 images by 255; if the "
            "images are standardised already, make that the first layer of the model and pass [0, 1] images."
        )
