"""Small networks, and data that they can learn."""

import torch
from torch import Tensor, nn

from ttvd.nn.resnet import ResNet


def make_net(outputs: int = 12, seed: int = 0, norm: str = "batch") -> ResNet:
    generator = torch.Generator().manual_seed(seed)
    return ResNet(outputs, in_channels=1, widths=(8, 16), blocks=(1, 1), norm=norm, generator=generator)


def make_data(count: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return torch.rand(count, 1, 6, 6, generator=generator), labels


def make_stripes(count: int = 192, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes of noisy uint8 images told apart by the shape of a bright region, under every rotation."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = torch.rand(count, 1, 8, 8, generator=generator) * 0.4
    images[labels == 0, :, :3, 1:7] += 0.5
    images[labels == 1, :, 1:4, 1:4] += 0.5
    images[labels == 2, :, 5:, 3:] += 0.5
    images[labels == 2, :, :2, 3:5] += 0.5
    return (images * 255).to(torch.uint8), labels


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
