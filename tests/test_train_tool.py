"""The tool that makes the checkpoints: its recipes are those on the cards of the shipped ones."""

import json
from dataclasses import asdict

import pytest
from tools import train_cifar as tool

from ttvd.zoo.catalog import load


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize("kind", list(tool.KINDS))
def test_shipped_checkpoints_come_of_the_recipes(data: str, kind: str) -> None:
    card = load(f"resnet26-{data}-{kind}").card
    assert card is not None
    config = tool.make_config(data, kind, None)
    assert json.loads(json.dumps(asdict(config))) == card.training
    made = tool.make_card(data, kind, {"cifar10": 10, "cifar100": 100}[data])
    told = asdict(card)
    assert all(told[name] == value for name, value in asdict(made).items() if value not in (None, {}))
    shorter = tool.make_config(data, kind, 3)
    assert config.differences(json.loads(json.dumps(asdict(shorter)))) == [
        f"epochs (stored 3, now {config.epochs})"
    ]
