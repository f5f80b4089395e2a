"""The state of an adapter: everything that changes along a stream, and how it is saved, restored and reset."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from ttvd.engine.flat import keep_where, lay_together
from ttvd.engine.transaction import Kind, Layout, LoggedBuffers, Place, StepLock, Transaction, find_parts

State = dict[str, Tensor]
M = TypeVar("M", bound="StatefulModule")


@runtime_checkable
class ChecksValues(Protocol):
    """A part of a module that knows more about its values than that they are finite."""

    _buffers: dict[str, Tensor | None]

    def check_values(self, state: State) -> None:
        """Refuse buffers that are about to be loaded, by a ValueError."""


class StatefulModule(nn.Module):
    """A module whose state is what may change along a stream.

    The state consists of the parameters that require gradients and of the persistent buffers of the module. Frozen
    weights belong to the user's model: they are neither saved nor restored. A copy of the initial state is made just
    before the first change.

    Attributes:
        networks: Names of the submodules that are copies of the user's model. Of their buffers, only running
            averages that follow the stream belong to the state.
        reports: Names of the buffers outside of the state that tell what the last step did. A step that fails leaves
            them too as they were.
    """

    networks: ClassVar[tuple[str, ...]] = ("model",)
    reports: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self._initial: State | None = None
        self.lock = StepLock()
        self._layout = Layout()
        self._running_averages: set[str] = set()
        self.register_state_dict_post_hook(_copy_changing)  # type: ignore[no-untyped-call]

    def changing(self) -> State:
        """The parameters and buffers that may change, by name; not copies."""
        places = self.find_layout(find_parts(self)).places
        return {place.name: place.tensor for place in places if place.kind != "report"}

    def find_layout(self, parts: list[nn.Module]) -> Layout:
        """Where the tensors are that may change; ``parts`` are the module and everything inside of it."""
        if not self._layout.fits(parts):
            self._layout.set(parts, self.find_places())
        return self._layout

    def find_places(self) -> list[Place]:
        """Search for the places of parameters, then of buffers, that may change."""
        parameters: list[Place] = []
        buffers: list[Place] = []
        seen: set[Tensor] = set()
        for prefix, module in self.named_modules():
            start = f"{prefix}." if prefix else ""
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and parameter not in seen:
                    seen.add(parameter)
                    parameters.append(Place(start + key, module._parameters, key, "state"))
            for key, buffer in module._buffers.items():
                kind = self._classify(prefix, module, key)
                if buffer is not None and kind is not None and buffer not in seen:
                    seen.add(buffer)
                    buffers.append(Place(start + key, module._buffers, key, kind))
        return parameters + buffers

    def _classify(self, prefix: str, module: nn.Module, key: str) -> Kind | None:
        """The kind of a buffer; None for one that does not change."""
        name = f"{prefix}.{key}" if prefix else key
        inside = prefix.partition(".")[0] in self.networks
        if isinstance(module, StatefulModule) and key in module.reports:
            return "report"
        if (inside or key in module._non_persistent_buffers_set) and name not in self._running_averages:
            return None
        if isinstance(module, LoggedBuffers) and key in module.logged and module.is_large:
            return "log"
        return "host" if getattr(module, "on_host", False) else "state"

    @property
    def device(self) -> torch.device:
        """The device that the module computes on."""
        return next(self.parameters()).device

    def snapshot(self) -> State:
        """A copy of everything that may change. Another thread may run a step meanwhile: it has not happened yet."""
        return self.lock.read(self, _copy_state)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a :meth:`snapshot`."""
        self.keep_initial()
        self.lock.change(self, lambda: self._write(state))

    def _write(self, state: Mapping[str, Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._remember_memories()
            for name, tensor in self.changing().items():
                tensor.copy_(state[name])

    def _remember_memories(self) -> None:
        for part in find_parts(self):
            if isinstance(part, LoggedBuffers):
                part.remember_all()

    def reset(self) -> None:
        """Go back to the state at construction: weights, optimizer, memories, averages."""
        if self._initial is not None:
            self.restore(self._initial)

    @torch.no_grad()
    def reset_where(self, condition: Tensor, keep: tuple[str, ...] = ()) -> None:
        """Go back to the state at construction if ``condition``, a scalar, is true; nothing waits for the device.

        The guard keeps what it knows.

        Args:
            condition: A scalar of booleans.
            keep: Starts of the names of what stays as it is.
        """
        self._remember_memories()
        own, initial = self.unguarded()
        names = [name for name in own if not name.startswith(keep)]
        keep_where(~condition, [own[name] for name in names], [initial[name] for name in names])

    def unguarded(self) -> tuple[State, State]:
        """What may change on the device, without the state of the guard, and its initial values; not copies."""
        self.keep_initial()
        assert self._initial is not None
        own = {name: t for name, t in self.changing().items() if name.split(".")[0] != "guard"}
        own = {name: tensor for name, tensor in own.items() if tensor.device == self.device}
        return own, {name: self._initial[name] for name in own}

    def keep_initial(self) -> None:
        """Copy the initial state, the first time that it is about to change."""
        if self._initial is None:
            with torch.inference_mode(False):
                self._initial = _copy_state(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy the state of another adapter of the same method and model; always strict.

        Raises:
            ValueError: An entry is missing, unknown, not finite, or of another shape or type. Nothing has changed.
        """
        self.keep_initial()

        def write() -> None:
            state = self.fit_state(state_dict)
            check_state(self, state)
            self._write(state)

        self.lock.change(self, write)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As a part of a larger module that is loaded: load the state as a whole, or add an error to those of torch."""
        _, _, missing, _, errors = args
        given = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        try:
            if given:
                self.load_state_dict({key.removeprefix(prefix): value for key, value in given.items()})
            else:
                missing += [prefix + name for name in self.changing()]
        except ValueError as error:
            errors.append(str(error))
        # What follows loads each part by itself: let it find what is there.
        for name, part in self.named_modules(prefix=prefix.removesuffix(".")):
            part._save_to_state_dict(state_dict, f"{name}." if name else "", keep_vars=True)

    def fit_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make room for a state that is about to be loaded, where shapes depend on the stream; return what fits."""
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the module between two steps."""
        twin: Self = object.__new__(type(self))
        memo[id(self)] = twin
        self.lock.read(self, lambda module: vars(twin).update(copy.deepcopy(vars(module), memo)))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy, so that a step in another thread cannot change it on the way."""
        # A process that is spawned opens the tensors later: the copy must live as long as the module.
        self.lock.pickled = self.lock.read(self, copy_module)
        return object.__reduce_ex__(self.lock.pickled, protocol)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Do nothing: which parameters adapt is decided at construction."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the flag of this module alone. The model stays in evaluation mode, so dropout stays off."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._layout.clear()
        if self._initial is not None:
            self._initial = {name: fn(tensor) for name, tensor in self._initial.items()}
        return self


def _copy_state(module: StatefulModule) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.changing().items()}


def copy_module(module: M) -> M:
    """A copy of a module with its own state, which shares everything else."""
    found: M = Transaction(module).view(module)
    return found


def check_state(module: StatefulModule, state: Mapping[str, Any]) -> None:
    """Refuse a state of another method or model, of other types, or with values that are not finite."""
    own = module.changing()
    wrong = dict.fromkeys(own.keys() - state.keys(), "is missing")
    wrong |= dict.fromkeys(state.keys() - own.keys(), "is unknown")
    wrong |= {name: f for name in own.keys() & state.keys() if (f := _find_fault(own[name], state[name]))}
    if wrong:
        first = min(wrong)
        raise ValueError(
            f"this state is not one of a {type(module).__name__} on this model: {first!r} {wrong[first]}, "
            f"{len(wrong)} entries are wrong in all. Build the adapter with the same model, method and parameters "
            "as the one that was saved."
        )
    for name, tensor in own.items():
        if tensor.is_floating_point() and not bool(state[name].isfinite().all()):
            raise ValueError(f"this state holds NaN or infinite values in {name!r}: it cannot be continued")
    for prefix, part in module.named_modules():
        if isinstance(part, ChecksValues):
            part.check_values({key: state[f"{prefix}.{key}"] for key in part._buffers})


def _find_fault(own: Tensor, given: object) -> str | None:
    if not isinstance(given, Tensor):
        return f"is no tensor but a {type(given).__name__}"
    if given.shape != own.shape:
        return f"has shape {tuple(given.shape)} and not {tuple(own.shape)}"
    if given.is_meta:
        return "is on the device 'meta' and has no values"
    return None if given.dtype == own.dtype else f"has type {given.dtype} and not {own.dtype}"


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


def _copy_changing(module: StatefulModule, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Make the result of ``state_dict`` a copy of what may change, and of nothing else."""
    own = {prefix + name: tensor for name, tensor in module.snapshot().items()}
    for key in [key for key in state if key.startswith(prefix) and key not in own]:
        del state[key]
    state |= own
