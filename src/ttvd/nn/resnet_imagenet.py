"""ResNet-18 and ResNet-50 for large images, with the parameter names of torchvision.

Weights that were published for torchvision's networks load directly (``model.load_state_dict(weights)``). The
normalisation is a layer of the network, so images are passed in [0, 1].
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ttvd.nn.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from ttvd.nn.resnet import make_norm


class Block(nn.Module):
    """A basic block (two 3 x 3 convolutions) or a bottleneck (1 x 1, 3 x 3, 1 x 1).

    Args:
        inputs: Number of input channels.
        width: Number of channels of the 3 x 3 convolutions.
        stride: Stride of the block.
        expansion: Ratio of output channels to ``width``: 1 for the basic block, 4 for the bottleneck.
        norm: Kind of norm: ``batch``, ``group`` or ``instance-aware``.
        eps: Constant that the norms add to variances.
        stride_first: Whether a bottleneck has its stride in the first 1 x 1 convolution, not in the 3 x 3.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        expansion: int,
        norm: str = "batch",
        *,
        eps: float = 1e-5,
        stride_first: bool = False,
    ) -> None:
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        else:
            first, second = (stride, 1) if stride_first else (1, stride)
            shapes = [(inputs, width, 1, first), (width, width, 3, second), (width, outputs, 1, 1)]
        self.depth = len(shapes)
        for i, (channels, filters, size, step) in enumerate(shapes, 1):
            self.add_module(f"conv{i}", nn.Conv2d(channels, filters, size, step, size // 2, bias=False))
            self.add_module(f"bn{i}", make_norm(norm, filters, eps))
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, make_norm(norm, outputs, eps))

    def forward(self, x: Tensor) -> Tensor:
        """Map feature maps of ``inputs`` channels to feature maps of ``width * expansion`` channels."""
        shortcut = x if self.downsample is None else self.downsample(x)
        for i in range(1, self.depth + 1):
            x = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x))
            x = torch.relu(x + shortcut if i == self.depth else x)
        return x


class ImageNetResNet(nn.Module):
    """Residual network of four stages with a 7 x 7 stem.

    Args:
        num_classes: Number of outputs of the head (k * v for an SLA classifier).
        blocks: Number of blocks of each of the four stages.
        expansion: 1 for basic blocks, 4 for bottlenecks.
        norm: Kind of norm: ``batch``, ``group`` or ``instance-aware`` (which NOTE needs).
        eps: Constant that the norms add to variances.
        stride_first: Whether bottlenecks have their stride in the first 1 x 1 convolution, as He et al. (2016) and
            Keras have it; torchvision has it in the 3 x 3.
        mean: Mean of each input channel; not part of ``state_dict()``.
        std: Standard deviation of each input channel; not part of ``state_dict()``.
        generator: Random generator of the convolutions' initial weights; torch's global generator unless given.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        blocks: Sequence[int] = (2, 2, 2, 2),
        expansion: int = 1,
        norm: str = "batch",
        eps: float = 1e-5,
        stride_first: bool = False,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.normalize = Normalize(3, mean, std, persistent=False)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = make_norm(norm, 64, eps)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for i, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True)):
            stage = nn.Sequential()
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                stage.append(
                    Block(inputs, width, stride, expansion, norm, eps=eps, stride_first=stride_first)
                )
                inputs = width * expansion
            self.add_module(f"layer{i + 1}", stage)
        self.num_features = inputs
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(
                    module.weight, mode="fan_out", nonlinearity="relu", generator=generator
                )

    def forward_features(self, x: Tensor) -> Tensor:
        """Return features (b, d) of images (b, 3, h, w) in [0, 1]."""
        x = self.maxpool(torch.relu(self.bn1(self.conv1(self.normalize(x)))))
        for i in range(1, 5):
            x = getattr(self, f"layer{i}")(x)
        return x.mean((-2, -1))

    def forward_head(self, z: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits of features; ``pre_logits=True`` returns the features (timm's convention)."""
        return z if pre_logits else self.fc(z)

    def get_classifier(self) -> nn.Linear:
        """Return the head (timm's convention)."""
        return self.fc

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images in [0, 1]."""
        return self.forward_head(self.forward_features(x))


def resnet18(
    num_classes: int = 1000, *, norm: str = "batch", generator: torch.Generator | None = None
) -> ImageNetResNet:
    """Build a ResNet-18 (11.7 million parameters).

    Example:
        >>> sum(p.numel() for p in resnet18().parameters())
        11689512
    """
    return ImageNetResNet(num_classes, blocks=(2, 2, 2, 2), expansion=1, norm=norm, generator=generator)


def resnet50(
    num_classes: int = 1000,
    *,
    norm: str = "batch",
    eps: float = 1e-5,
    stride_first: bool = False,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    generator: torch.Generator | None = None,
) -> ImageNetResNet:
    """Build a ResNet-50 (25.6 million parameters); :class:`ImageNetResNet` describes the arguments."""
    return ImageNetResNet(
        num_classes,
        blocks=(3, 4, 6, 3),
        expansion=4,
        norm=norm,
        eps=eps,
        stride_first=stride_first,
        mean=mean,
        std=std,
        generator=generator,
    )
