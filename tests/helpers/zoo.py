"""A small checkpoint."""

from pathlib import Path

from torch import nn

from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

SMALL = {"num_classes": 8, "in_channels": 1, "widths": [8, 16], "blocks": [1, 1], "norm": "group"}


CARD = Card(
    "resnet",
    SMALL,
    head_views=4,
    data="toy, 100 images",
    training={"lr": 0.1, "milestones": [1, 2]},
    seed=3,
    accuracy_one_view=0.91,
    accuracy_four_views=0.93,
)


def save_toy(folder: Path, name: str = "toy", card: Card = CARD) -> nn.Module:
    model = build_model(card)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    save_checkpoint(folder / f"{name}.safetensors", model, card)
    return model
