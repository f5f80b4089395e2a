"""A second head that predicts rotations, trained jointly with the classifier (TTT, Sun et al. 2020)."""

import copy

import torch
from torch import Tensor, nn

from ttvd.nn.resnet import ResNet


class RotationHead(nn.Module):
    """Predicts by which of ``views`` angles an image was rotated: its own last stage, pooling and a linear layer.

    Args:
        model: The network whose trunk (:meth:`ResNet.forward_trunk`) it shares; the last stage is copied.
        views: Number of angles.
        generator: Random generator of the linear layer's weights; torch's global generator unless given.
    """

    def __init__(self, model: ResNet, views: int = 4, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.stage = copy.deepcopy(model.stages[-1])
        width = next(conv.out_channels for conv in self.stage.modules() if isinstance(conv, nn.Conv2d))
        self.fc = nn.Linear(width, views, bias=False)
        nn.init.normal_(self.fc.weight, 0.0, 0.01, generator=generator)

    def forward(self, maps: Tensor) -> Tensor:
        """Return logits (b, views) of the trunk's feature maps."""
        logits: Tensor = self.fc(self.stage(maps).mean((-2, -1)))
        return logits


class RotationNet(nn.Module):
    """A classifier with a rotation head beside its own head. Calling it returns the logits of the classifier.

    Args:
        model: The classifier.
        views: Number of angles that the rotation head predicts.
        generator: Random generator of the rotation head's weights.

    Example:
        >>> net = RotationNet(ResNet(3, widths=(8, 8), blocks=(1, 1)))
        >>> x = torch.rand(2, 3, 8, 8)
        >>> net(x).shape, net.forward_rotation(x).shape
        (torch.Size([2, 3]), torch.Size([2, 4]))
    """

    def __init__(self, model: ResNet, views: int = 4, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.model = model
        self.rotation = RotationHead(model, views, generator)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return features (b, d) of the classifier."""
        return self.model.forward_features(x)

    def forward_head(self, z: Tensor, pre_logits: bool = False) -> Tensor:
        """Return class logits of features."""
        return self.model.forward_head(z, pre_logits)

    def get_classifier(self) -> nn.Linear:
        """Return the head of the classifier (timm's convention)."""
        return self.model.fc

    def forward_rotation(self, x: Tensor) -> Tensor:
        """Return rotation logits (b, views) of images in [0, 1]."""
        logits: Tensor = self.rotation(self.model.forward_trunk(x))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return class logits of images in [0, 1]."""
        return self.forward_head(self.forward_features(x))
