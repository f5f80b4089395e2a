"""Precision, memory layout and compilation of an adapter's own copy of a network."""

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ttvd.engine.compiling import compile_once, get_fusing, is_fusing, raise_recompile_limit, set_fusing
from ttvd.engine.fast_layers import exchange_layers

Precision = Literal["float32", "bfloat16"]


class HasDevice(Protocol):
    """What :func:`keeping_modes` asks of an adapter."""

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""


S = TypeVar("S", bound=HasDevice)


def choose_dtype(precision: Precision, own: torch.dtype) -> torch.dtype | None:
    """The data type for autocast, or None for no autocast.

    Args:
        precision: The precision that the user asks for.
        own: The data type of the model.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if precision == "float32":
        return None
    if own != torch.float32:
        raise ValueError(f"{precision} is for models in float32, this one is in {own}")
    return torch.bfloat16


class PreciseLinear(nn.Linear):
    """A linear layer that computes in the data type of its weights, also inside of autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits of features."""
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(self.weight.dtype), self.weight, self.bias)


def prepare_network(
    network: nn.Module,
    head: nn.Linear | None,
    *,
    dtype: torch.dtype | None,
    channels_last: bool,
    exact: bool,
    compile: bool,
) -> None:
    """Change the weights and layers of a network for speed, in place. Parameters may get new storage.

    Args:
        network: An adapter's copy of a model.
        head: The last linear layer of the network, or None. It computes the logits and stays in float32.
        dtype: The data type of convolutions and linear layers under autocast, or None for no autocast. Frozen
            weights are cast here once instead of in every step.
        channels_last: Store the channels of a pixel next to each other, as the tensor cores of GPUs prefer.
        exact: The method also reads the frozen weights as numbers, so they must not be rounded.
        compile: Compile what lies between the convolutions; the last layer stays as it is.
    """
    if head is not None and (compile or dtype is not None) and type(head) is nn.Linear:
        head.__class__ = PreciseLinear
    if dtype is not None and not exact:
        layers = (m for m in network.modules() if isinstance(m, _ConvNd | nn.Linear) and m is not head)
        for parameter in (p for layer in layers for p in layer.parameters(recurse=False)):
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    if channels_last:
        for parameter in (p for p in network.parameters() if p.ndim == 4):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    if compile:
        exchange_layers(network)
        _exclude_heads()
        raise_recompile_limit()
        # As nn.Module.compile, which however makes a reference cycle through the module.
        network._compiled_call_impl = _CompiledCall(network)


class ThreadModes:
    """The modes of torch in this thread: gradients, autocast, and whether functions are fused.

    An interrupt can cut off the end of a ``with`` block, which then does not give back what it has set. A nesting of
    autocast that does not end would keep outdated copies of weights for good.

    Args:
        device_type: The device whose autocast matters beside that of the CPU.
    """

    def __init__(self, device_type: str) -> None:
        self._grad, self._fusing = torch.is_grad_enabled(), get_fusing()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device_type}
        ]
        self._caching, self._nesting = torch.is_autocast_cache_enabled(), _read_nesting()

    def restore(self) -> None:
        """Set the modes to what they were."""
        set_fusing(self._fusing)
        torch.set_grad_enabled(self._grad)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caching)
        while _read_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if self._nesting == 0:
            torch.clear_autocast_cache()


def _read_nesting() -> int:
    torch.autocast_increment_nesting()
    nesting: int = torch.autocast_decrement_nesting()
    return nesting


def keeping_modes(method: Callable[[S, Tensor], Tensor]) -> Callable[[S, Tensor], Tensor]:
    """Decorate a method of an adapter: whatever raises inside, the modes of the thread are what they were."""

    @functools.wraps(method)
    def call(adapter: S, x: Tensor) -> Tensor:
        modes = ThreadModes(adapter.device.type)
        try:
            return method(adapter, x)
        except BaseException:
            modes.restore()
            raise

    return call


class _CompiledCall:
    """Calls the forward pass of a module, compiled in compiled steps, without keeping the module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, call = self._module(), compile_once(_call) if is_fusing() else _call
        assert module is not None
        return call(module, *args, **kwargs)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


@cache
def _exclude_heads() -> None:
    """Exclude last layers from compilation: a hook on them comes and goes with every call."""
    # Not where the class is defined: that would load the compiler together with the library.
    PreciseLinear.forward = torch.compiler.disable(PreciseLinear.forward)  # type: ignore[method-assign]


def autocasting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Compute in a data type by autocast; None leaves the caller's mode alone."""
    # The cache of autocast may hold casts of old weights, or casts made where no gradient was wanted.
    torch.clear_autocast_cache()
    return torch.autocast(device_type, dtype) if dtype is not None else nullcontext()
