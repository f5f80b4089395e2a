"""Frozen weights belong to the model that an adapter was given: they are not saved with the adapter's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ttvd.engine.flat import lay_together

if TYPE_CHECKING:
    from ttvd.methods.adapter import Adapter


def find_changing(adapter: Adapter) -> dict[str, Tensor]:
    """What may change, by name: parameters that require gradients, and buffers that are the adapter's own."""
    parameters = {name: p.data for name, p in adapter.named_parameters() if p.requires_grad}
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in adapter.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = {
        name: buffer
        for name, buffer in adapter.named_buffers()
        if name in adapter._averages or not (name in passing or name.split(".")[0] in adapter.networks)
    }
    return parameters | buffers


def lay_out(adapter: Adapter) -> bool:
    """Put what may change side by side in memory: parameters, and then buffers, those of one name together.

    Returns:
        Whether something has been moved.
    """
    own = find_changing(adapter)
    buffers = [(name.rpartition(".")[2], buffer) for name, buffer in adapter.named_buffers() if name in own]
    buffers.sort(key=lambda pair: pair[0])
    return lay_together(
        [*(p for p in adapter.parameters() if p.requires_grad), *(buffer for _, buffer in buffers)]
    )


def drop_frozen(adapter: Adapter, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook of ``state_dict``: the saved state is what may change."""
    for key in set(state) - {prefix + name for name in adapter._changing()}:
        if key.startswith(prefix):
            del state[key]
    for key, tensor in state.items():
        # What lies side by side would be pickled with all of its neighbours.
        own = isinstance(tensor, Tensor) and not tensor.requires_grad and key.startswith(prefix)
        if own and tensor.untyped_storage().nbytes() > tensor.nbytes:
            state[key] = tensor.clone()


def add_frozen(adapter: Adapter, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook for a state that is loaded as a part of a larger module: the frozen weights it lacks are there already."""
    adapter._remember()
    for module_prefix, module in adapter.named_modules(prefix=prefix.removesuffix(".")):
        own: dict[str, Tensor] = {}
        module._save_to_state_dict(own, f"{module_prefix}." if module_prefix else "", keep_vars=True)
        for name, tensor in own.items():
            state.setdefault(name, tensor)


def check_state(adapter: Adapter, state: Mapping[str, Any]) -> None:
    """Refuse a state that is not one of an adapter like this."""
    own = adapter._changing()
    wrong = sorted(set(own) ^ set(state)) + [
        name for name, tensor in own.items() if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(
            f"this state is not one of a {type(adapter).__name__} on this model: {len(wrong)} entries are missing, "
            f"unknown or of another shape, the first is {wrong[0]!r}. Build the adapter with the same model, "
            "method and parameters as the one that was saved."
        )
    for name, parameter in adapter.named_parameters():
        if parameter.requires_grad and name in own and not bool(state[name].isfinite().all()):
            raise ValueError(f"this state holds NaN or infinite values in {name!r}: it cannot be continued")
