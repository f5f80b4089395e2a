"""Residual networks for small images (about 32 x 32), with normalisation as the first layer.

:func:`resnet26` is the network of TTAB (Zhao et al., ICML 2023), which the paper uses: a stem of 16 channels, three
stages of four post-activation blocks with 16, 32 and 64 channels, projection shortcuts where the shape changes,
global average pooling and a linear head without bias.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize


def make_norm(norm: str, channels: int, eps: float = 1e-5) -> nn.Module:
    """Make a norm: ``batch``, ``instance-aware`` or ``group`` (with eight groups, as in TTAB and TTT)."""
    if norm == "batch":
        return nn.BatchNorm2d(channels, eps)
    if norm == "group":
        return nn.GroupNorm(8, channels, eps)
    if norm == "instance-aware":
        return InstanceAwareBatchNorm2d(channels, eps=eps)
    raise ValueError(f"norm must be 'batch', 'group' or 'instance-aware', got {norm!r}")


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, with the activation after the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = make_norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = make_norm(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, make_norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map feature maps of ``inputs`` channels to feature maps of ``outputs`` channels."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """A shortcut without weights: every second row and column, between channels of zeros (He et al.'s option A).

    Args:
        inputs: Number of input channels.
        outputs: Number of output channels.

    Example:
        >>> PaddedShortcut(1, 3)(torch.ones(1, 1, 2, 2)).flatten()
        tensor([0., 1., 0.])
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        before = (outputs - inputs) // 2
        self.channels = (before, outputs - inputs - before)

    def forward(self, x: Tensor) -> Tensor:
        """Map feature maps of ``inputs`` channels to feature maps of ``outputs`` channels and half the size."""
        return F.pad(x[..., ::2, ::2], (0, 0, 0, 0, *self.channels))


class ResNet(nn.Module):
    """Residual network for small images.

    Args:
        num_classes: Number of outputs of the head (k * v for an SLA classifier).
        in_channels: Number of channels of the images.
        widths: Number of channels of each stage; the stem has as many as the first stage.
        blocks: Number of blocks of each stage; every stage but the first halves the resolution.
        norm: Kind of norm: ``batch``, ``group`` or ``instance-aware`` (which NOTE needs).
        bias: Whether the head has a bias.
        bottleneck: Dimension of a linear layer before the head (2 gives features in the plane).
        mean: Mean of the input channels, one value or one per channel.
        std: Standard deviation of the input channels, one value or one per channel.
        generator: Random generator of the initial weights; torch's global generator unless given.

    Example:
        >>> net = ResNet(10, in_channels=1, widths=(8, 16, 32), blocks=(1, 1, 1))
        >>> net.forward_features(torch.rand(2, 1, 28, 28)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        num_classes: int,
        *,
        in_channels: int = 3,
        widths: Sequence[int] = (16, 32, 64),
        blocks: Sequence[int] = (4, 4, 4),
        norm: str = "batch",
        bias: bool = False,
        bottleneck: int | None = None,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.25,),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if len(widths) != len(blocks) or not widths or min(*widths, *blocks) < 1:
            raise ValueError(
                f"widths and blocks must be positive and equally many, got {widths} and {blocks}"
            )
        self.normalize = Normalize(in_channels, mean, std)
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, 1, 1, bias=False)
        self.norm1 = make_norm(norm, widths[0])
        inputs = (widths[0], *widths[:-1])
        self.stages = nn.ModuleList(
            _make_stage(inputs[i], widths[i], blocks[i], 1 if i == 0 else 2, norm) for i in range(len(widths))
        )
        self.num_features = bottleneck or widths[-1]
        self.bottleneck = nn.Linear(widths[-1], bottleneck) if bottleneck else nn.Identity()
        self.fc = nn.Linear(self.num_features, num_classes, bias=bias)
        init_weights(self, generator)

    def forward_trunk(self, x: Tensor) -> Tensor:
        """Return the feature maps before the last stage, where a rotation head branches off."""
        x = torch.relu(self.norm1(self.conv1(self.normalize(x))))
        for stage in self.stages[:-1]:
            x = stage(x)
        return x

    def forward_features(self, x: Tensor) -> Tensor:
        """Return features (b, d) of images (b, c, h, w) in [0, 1]."""
        features: Tensor = self.bottleneck(self.stages[-1](self.forward_trunk(x)).mean((-2, -1)))
        return features

    def forward_head(self, z: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits of features; ``pre_logits=True`` returns the features (timm's convention)."""
        return z if pre_logits else self.fc(z)

    def get_classifier(self) -> nn.Linear:
        """Return the head (timm's convention)."""
        return self.fc

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images in [0, 1]."""
        return self.forward_head(self.forward_features(x))


def _make_stage(inputs: int, outputs: int, blocks: int, stride: int, norm: str) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, norm)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1, norm) for _ in range(blocks - 1)))


def init_weights(model: nn.Module, generator: torch.Generator | None) -> None:
    """Initialise weights as TTAB does: convolutions N(0, 2 / (k * k * out)), heads N(0, 0.01^2).

    A bottleneck must preserve the scale of the signal, so its variance is 1 / inputs.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            nn.init.normal_(module.weight, 0.0, math.sqrt(2.0 / fan), generator=generator)
        elif isinstance(module, nn.Linear):
            std = module.in_features**-0.5 if name == "bottleneck" else 0.01
            nn.init.normal_(module.weight, 0.0, std, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def resnet26(
    num_classes: int,
    in_channels: int = 3,
    *,
    norm: str = "batch",
    bias: bool = False,
    bottleneck: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> ResNet:
    """Build TTAB's ResNet-26; it normalises by CIFAR-10's statistics for three channels, else by 0.5 and 0.25.

    Example:
        >>> sum(p.numel() for p in resnet26(10).parameters())
        369680
    """
    usual = (CIFAR10_MEAN, CIFAR10_STD) if in_channels == 3 else ((0.5,), (0.25,))
    return ResNet(
        num_classes,
        in_channels=in_channels,
        norm=norm,
        bias=bias,
        bottleneck=bottleneck,
        mean=usual[0] if mean is None else mean,
        std=usual[1] if std is None else std,
        generator=generator,
    )


def resnet20(
    num_classes: int,
    *,
    mean: Sequence[float] = CIFAR10_MEAN,
    std: Sequence[float] = CIFAR10_STD,
    generator: torch.Generator | None = None,
) -> ResNet:
    """Build the ResNet-20 of He et al. (2016): three blocks a stage, shortcuts without weights, a head with bias.

    Example:
        >>> sum(p.numel() for p in resnet20(10).parameters())
        269722
    """
    model = ResNet(num_classes, blocks=(3, 3, 3), bias=True, mean=mean, std=std, generator=generator)
    for block in model.modules():
        if isinstance(block, BasicBlock) and not isinstance(block.shortcut, nn.Identity):
            block.shortcut = PaddedShortcut(block.conv1.in_channels, block.conv1.out_channels)
    return model
