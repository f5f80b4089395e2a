from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.source import make_net, make_stripes, same_weights
from ttvd.source import TrainingConfig, finetune, train
from ttvd.source.finetune import read_tensors


@pytest.mark.parametrize("form", ["tensors", "dataset", "loader"])
def test_finetuning_is_training_of_an_augmented_copy(form: str) -> None:
    net, (images, labels) = make_net(3), make_stripes(48)
    before = make_net(3)
    forms: dict[str, Any] = {"tensors": (images, labels), "dataset": TensorDataset(images, labels)}
    forms["loader"] = DataLoader(forms["dataset"], batch_size=7)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 16, "lr": 0.01, "padding": 1, "flip": True}
    found = finetune(net, forms[form], **options)
    expected = make_net(12)
    weights = net.state_dict()
    expected.load_state_dict(weights | {"fc.weight": weights["fc.weight"].repeat_interleave(4, 0)})
    train(expected, images, labels, TrainingConfig("sla", nesterov=True, schedule="onecycle", **options))
    assert same_weights(found.model, expected)
    assert same_weights(net, before)


def test_mirroring_is_the_callers_choice() -> None:
    """Digits must not be mirrored, so there is no default."""
    data = make_stripes(48)
    with pytest.raises(TypeError, match="flip"):
        finetune(make_net(3), data)  # type: ignore[call-arg]
    one, other = (finetune(make_net(3), data, flip=flip, epochs=1, batch_size=16) for flip in (True, False))
    assert not same_weights(one, other)


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="no images to train on"):
        finetune(nn.Linear(2, 2), [], flip=False)
    images, labels = make_stripes(10)
    assert torch.equal(read_tensors((images, labels))[0], images)
