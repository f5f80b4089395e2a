"""What may be changed in a network for the sake of speed, in the adapter's own copy of it."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ttvd.engine.compiling import allow_graphs
from ttvd.engine.fast_layers import exchange_layers
from ttvd.nn.split import SplitModel, split

Precision = Literal["float32", "bfloat16"]


def choose_dtype(precision: Precision, own: torch.dtype) -> torch.dtype | None:
    """The type for autocast, None for no autocast, around a model whose ``own`` type is given."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if precision == "float32":
        return None
    if own != torch.float32:
        raise ValueError(f"{precision} is for models in float32, this one is in {own}")
    return torch.bfloat16


class PreciseLinear(nn.Linear):
    """A linear layer that computes in the type of its weights, whatever autocast says."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits of features."""
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(self.weight.dtype), self.weight, self.bias)


def prepare_network(
    network: nn.Module, dtype: torch.dtype | None, channels_last: bool, *, exact: bool, compile: bool
) -> None:
    """Make the weights of a network fit for a type and a layout, in place; the parameters get new storage.

    Args:
        network: An adapter's copy.
        dtype: Of the convolutions and linear layers under autocast; None for no autocast. Weights that are frozen
            are cast here, once, and not in every step. The last layer, which makes the logits, is left in float32.
        channels_last: Store the channels of images together, as the tensor cores of GPUs want them. Convolutions
            whose weights are stored so give their output the same layout.
        exact: The frozen weights are used as numbers too, and must not be rounded.
        compile: Let ``torch.compile`` fuse what lies between the convolutions; the last layer stays as it is.
    """
    if dtype is not None:
        head = _keep_head(network)
        layers = (m for m in network.modules() if isinstance(m, _ConvNd | nn.Linear) and m is not head)
        for parameter in (p for layer in layers for p in layer.parameters(recurse=False)):
            if not parameter.requires_grad and not exact:
                parameter.data = parameter.data.to(dtype)
    if channels_last:
        for parameter in (p for p in network.parameters() if p.ndim == 4):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    if compile:
        _compile_network(network)


def _compile_network(network: nn.Module) -> None:
    exchange_layers(network)
    _keep_head(network)
    _hide_heads()
    inner = network.model if isinstance(network, SplitModel) else network
    allow_graphs()
    inner.compile(dynamic=False)


def is_of_compiler(error: Exception) -> bool:
    """Whether it was ``torch.compile`` that failed, and not what it should have compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def eager_networks(compiled: bool) -> AbstractContextManager[object]:
    """Let networks that are ``compiled`` run as they are written: a batch that comes once is not worth the wait."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@cache
def _hide_heads() -> None:
    """Take last layers out of what is compiled: what enters them is watched by a hook that comes and goes."""
    # Not where the class is written, for that would load the compiler together with the library.
    PreciseLinear.forward = torch.compiler.disable(PreciseLinear.forward)  # type: ignore[method-assign]


def _keep_head(network: nn.Module) -> nn.Module | None:
    """Exempt the last linear layer from autocast, and say which it is; None where there is no such layer."""
    if not any(isinstance(module, nn.Linear) for module in network.modules()):
        return None
    head = split(network).linear
    if type(head) is nn.Linear:
        head.__class__ = PreciseLinear
    return head
