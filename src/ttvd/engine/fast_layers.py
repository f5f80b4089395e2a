"""Layers that compute the same as torch's, in a form that is faster on GPUs or when compiled."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 16
"""Number of channels that folded images are padded to: tensor cores need multiples of eight, most kernels have 16."""


def fold_conv(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """Compute a convolution of stride 2 as one of stride 1 on blocks of 2 x 2 pixels.

    Tensor cores multiply many channels at a time, and the first layer of a network has three. With the pixels of a
    block as channels there are four times as many, at a quarter of the positions.

    Args:
        x: Images (b, c, h, w), h and w even.
        weight: Weights (o, c, kh, kw).
        bias: Bias (o,), or None.
        padding: Rows and columns of zeros on each side, as in ``F.conv2d``.

    Example:
        >>> x, weight = torch.rand(2, 3, 8, 8), torch.rand(5, 3, 7, 7)
        >>> torch.allclose(fold_conv(x, weight, None, (3, 3)), F.conv2d(x, weight, None, 2, 3), rtol=1e-4)
        True
    """
    margins: list[int] = []
    pads: list[int] = []
    sizes: list[int] = []
    for side, kernel, zeros in zip(x.shape[2:], weight.shape[2:], padding, strict=True):
        before = zeros % 2  # blocks begin at even positions, so windows must too
        after = (kernel + before) % 2
        blocks = (kernel + before + after) // 2
        first = (zeros + before) // 2
        outputs = (side + 2 * zeros - kernel) // 2 + 1
        margins[:0] = [before, after]
        pads[:0] = [first, outputs + blocks - 1 - side // 2 - first]
        sizes.append(blocks)
    more = max(0, CHANNELS - 4 * x.shape[1])
    folded = F.pad(weight, margins).unflatten(3, (sizes[1], 2)).unflatten(2, (sizes[0], 2))
    folded = F.pad(folded.permute(0, 1, 3, 5, 2, 4).flatten(1, 3), (0, 0, 0, 0, 0, more))
    pixels = F.pad(F.pixel_unshuffle(x, 2), (*pads, 0, more))
    layout = torch.channels_last
    return F.conv2d(pixels.contiguous(memory_format=layout), folded.contiguous(memory_format=layout), bias)


class FoldedConv(nn.Conv2d):
    """A convolution of stride 2 on few channels, folded in half precision on a GPU, where that is faster."""

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        """Whether it can replace a layer."""
        return (
            type(layer) is nn.Conv2d
            and layer.stride == (2, 2)
            and layer.dilation == (1, 1)
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
            and 4 * layer.in_channels <= CHANNELS
        )

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Conv2d``."""
        even = input.ndim == 4 and len(input) > 0 and not any(side % 2 for side in input.shape[2:])
        if not (even and input.is_cuda and self.weight.dtype.itemsize == 2):
            return super().forward(input)
        assert not isinstance(self.padding, str)
        high, wide = self.padding
        return fold_conv(input, self.weight, self.bias, (high, wide))


class _Frozen(torch.autograd.Function):
    """A convolution with a gradient for its input alone, which does not depend on the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.settings, ctx.groups, ctx.sides = (stride, padding, dilation), groups, x.shape[2:]
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        sides = zip(ctx.sides, gradient.shape[2:], weight.shape[2:], *ctx.settings, strict=True)
        # Rows or columns at the end that no window reaches.
        beyond = [
            side - ((size - 1) * stride - 2 * zeros + dilation * (kernel - 1) + 1)
            for side, size, kernel, stride, zeros, dilation in sides
        ]
        by_x = torch.ops.aten.convolution(gradient, weight, None, *ctx.settings, True, beyond, ctx.groups)
        return by_x, *[None] * 6


class FrozenConv(nn.Conv2d):
    """A convolution that does not save its input for the backward pass, if compiled and if its weights do not adapt.

    torch saves the input for the gradients of the weights, and the backward pass of the activation before it then reads
    it once more. The tensors that the norm before saves suffice.
    """

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        """Whether it can replace a layer."""
        return (
            type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        )

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Conv2d``."""
        adapts = any(part is not None and part.requires_grad for part in (self.weight, self.bias))
        kind = input.device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != input.dtype
        plain = input.ndim == 4 and input.dtype == self.weight.dtype and not (adapts or cast)
        if not (plain and torch.compiler.is_compiling()):
            return super().forward(input)
        found: Tensor = _Frozen.apply(  # type: ignore[no-untyped-call]
            *(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        )
        return found


def pool_twice(x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Max pooling by square windows in two passes: along rows, then along columns.

    A value lies in up to four windows of 3 x 3 at stride 2, and its gradient must read all of them. In two passes it
    reads two and two. Among equal values the same one gets the gradient: the first of the first row.

    Example:
        >>> x = torch.rand(2, 3, 8, 8)
        >>> torch.equal(pool_twice(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1))
        True
    """
    rows = F.max_pool2d(x, (1, kernel), (1, stride), (0, padding))
    return F.max_pool2d(rows, (kernel, 1), (stride, 1), (padding, 0))


class PoolTwice(nn.MaxPool2d):
    """Max pooling by overlapping square windows, in two passes on a GPU, where that is faster."""

    @classmethod
    def takes(cls, layer: nn.Module) -> bool:
        """Whether it can replace a layer."""
        return (
            type(layer) is nn.MaxPool2d
            and isinstance(layer.kernel_size, int)
            and isinstance(layer.stride, int)
            and isinstance(layer.padding, int)
            and layer.kernel_size > layer.stride
            and layer.dilation == 1
            and not layer.return_indices
            and not layer.ceil_mode
        )

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.MaxPool2d``."""
        if not input.is_cuda:
            whole: Tensor = super().forward(input)
            return whole
        assert isinstance(self.kernel_size, int)
        assert isinstance(self.stride, int)
        assert isinstance(self.padding, int)
        return pool_twice(input, self.kernel_size, self.stride, self.padding)


def exchange_layers(network: nn.Module) -> None:
    """Replace layers of a network by their faster forms, in place; parameters and names stay."""
    for layer in network.modules():
        for kind in (FoldedConv, FrozenConv, PoolTwice):
            if kind.takes(layer):
                layer.__class__ = kind
