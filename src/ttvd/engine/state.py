"""The state of an adapter: everything that changes along a stream, and how it is saved, restored and reset."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ttvd.engine.flat import keep_where, lay_together

State = dict[str, Tensor]


class StatefulModule(nn.Module):
    """A module whose state is what may change along a stream.

    The state consists of the parameters that require gradients and of the persistent buffers of the module. Frozen
    weights belong to the user's model: they are neither saved nor restored. A copy of the initial state is made just
    before the first change.

    Attributes:
        networks: Names of the submodules that are copies of the user's model. Of their buffers, only running
            averages that follow the stream belong to the state.
    """

    networks: ClassVar[tuple[str, ...]] = ("model",)

    def __init__(self) -> None:
        super().__init__()
        self._initial: State | None = None
        self._running_averages: set[str] = set()
        self.register_state_dict_post_hook(_drop_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_frozen)  # type: ignore[no-untyped-call]

    def changing(self) -> State:
        """The tensors that may change, by name; not copies."""
        parameters = {name: p.data for name, p in self.named_parameters() if p.requires_grad}
        not_saved = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.named_modules()
            for name in module._non_persistent_buffers_set
        }
        buffers = {
            name: buffer
            for name, buffer in self.named_buffers()
            if name in self._running_averages
            or not (name in not_saved or name.split(".")[0] in self.networks)
        }
        return parameters | buffers

    def snapshot(self) -> State:
        """A copy of everything that may change."""
        return {name: tensor.detach().clone() for name, tensor in self.changing().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a :meth:`snapshot`."""
        self.keep_initial()
        with torch.inference_mode(False):
            for name, tensor in self.changing().items():
                tensor.copy_(state[name])

    def reset(self) -> None:
        """Go back to the state at construction: weights, optimizer, memories, averages."""
        if self._initial is not None:
            self.restore(self._initial)

    @torch.no_grad()
    def reset_where(self, condition: Tensor) -> None:
        """Go back to the state at construction if ``condition``, a scalar, is true; nothing waits for the device."""
        self.keep_initial()
        assert self._initial is not None
        state = self.changing()
        keep_where(~condition, list(state.values()), [self._initial[name] for name in state])

    def keep_initial(self) -> None:
        """Copy the initial state, the first time that it is about to change."""
        if self._initial is None:
            with torch.inference_mode(False):
                self._initial = self.snapshot()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy the state of another adapter of the same method and model; always strict."""
        check_state(self, state_dict)
        self.restore(state_dict)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Do nothing: which parameters adapt is decided at construction."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the flag of this module alone. The model stays in evaluation mode, so dropout stays off."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._initial is not None:
            self._initial = {name: fn(tensor) for name, tensor in self._initial.items()}
        return self


def check_state(module: StatefulModule, state: Mapping[str, Any]) -> None:
    """Refuse a state of another method, of another model, or with parameters that are not finite."""
    own = module.changing()
    wrong = sorted(set(own) ^ set(state)) + [
        name for name, tensor in own.items() if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        raise ValueError(
            f"this state is not one of a {type(module).__name__} on this model: {len(wrong)} entries are missing, "
            f"unknown or of another shape, the first is {wrong[0]!r}. Build the adapter with the same model, "
            "method and parameters as the one that was saved."
        )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in own and not bool(state[name].isfinite().all()):
            raise ValueError(f"this state holds NaN or infinite values in {name!r}: it cannot be continued")


def lay_out(module: StatefulModule) -> bool:
    """Place the state side by side in memory: parameters, then buffers, buffers of one name together.

    Returns:
        Whether any tensor was moved.
    """
    own = module.changing()
    buffers = [(name.rpartition(".")[2], buffer) for name, buffer in module.named_buffers() if name in own]
    buffers.sort(key=lambda pair: pair[0])
    return lay_together(
        [*(p for p in module.parameters() if p.requires_grad), *(buffer for _, buffer in buffers)]
    )


def _drop_frozen(module: StatefulModule, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove the entries that never change from the result of ``state_dict``."""
    for key in set(state) - {prefix + name for name in module.changing()}:
        if key.startswith(prefix):
            del state[key]
    for key, tensor in state.items():
        # A view into shared memory would be pickled together with all of its neighbours.
        own = isinstance(tensor, Tensor) and not tensor.requires_grad and key.startswith(prefix)
        if own and tensor.untyped_storage().nbytes() > tensor.nbytes:
            state[key] = tensor.clone()


def _add_frozen(module: StatefulModule, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook for a state that is loaded as a part of a larger module: add the frozen weights, which are not saved."""
    module.keep_initial()
    for module_prefix, part in module.named_modules(prefix=prefix.removesuffix(".")):
        own: dict[str, Tensor] = {}
        part._save_to_state_dict(own, f"{module_prefix}." if module_prefix else "", keep_vars=True)
        for name, tensor in own.items():
            state.setdefault(name, tensor)
