import pytest
import torch
from torch import nn

from ttvd.source.produce import evaluate


def test_evaluate_counts_and_restores_flags() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Flatten())
    images = torch.eye(4)[:, :, None, None]
    assert evaluate(model, images, torch.tensor([0, 1, 2, 0]), batch_size=3) == 0.75
    assert model.training
    with pytest.raises(ValueError, match="trained on 1 views cannot judge 4"):
        evaluate(model, images, torch.arange(4), views=4)
    with pytest.raises(ValueError, match="4 images and 3 labels"):
        evaluate(model, images, torch.arange(3))
