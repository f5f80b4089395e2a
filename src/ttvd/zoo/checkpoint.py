"""Checkpoints: weights in safetensors, and beside them a card in JSON that says how to rebuild the model.

The card names an architecture of this library and its arguments, so that loading never runs code from a file.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet, resnet26
from ttvd.nn.resnet_imagenet import resnet18, resnet50
from ttvd.nn.rotation import RotationNet
from ttvd.zoo.tensorfile import read_tensors, write_bytes, write_tensors

KIND = "ttvd.checkpoint"
FORMAT_VERSION = 1

ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "resnet": ResNet,
    "resnet18": resnet18,
    "resnet26": resnet26,
    "resnet50": resnet50,
}


@dataclass(frozen=True)
class Card:
    """What a checkpoint is and where it comes from.

    Args:
        architecture: A name in ``ARCHITECTURES``.
        arguments: Keyword arguments of the architecture, as JSON can hold them.
        head_views: Views that the head tells apart: 1 for a plain classifier, 4 for an SLA classifier.
        rotation_head: Whether a rotation head was trained beside the classifier.
        data: What it was trained on.
        recipe: How it was trained (``dataclasses.asdict`` of a ``ttvd.source.Recipe``).
        seed: Seed of the training.
        accuracy_one_view: Clean accuracy in [0, 1] on the upright image.
        accuracy_four_views: Clean accuracy with the four views aggregated, for an SLA classifier.
        held_out_one_view: As ``accuracy_one_view``, on held-out training images: what recipes are compared by.
        held_out_four_views: As ``accuracy_four_views``, on the same.

    Example:
        >>> card = Card("resnet26", {"num_classes": 40}, head_views=4, data="CIFAR-10, 50,000 images")
        >>> type(build_model(card)).__name__
        'ResNet'
    """

    architecture: str
    arguments: Mapping[str, Any]
    head_views: int = 1
    rotation_head: bool = False
    data: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    accuracy_one_view: float | None = None
    accuracy_four_views: float | None = None
    held_out_one_view: float | None = None
    held_out_four_views: float | None = None


def build_model(card: Card) -> nn.Module:
    """The model that a card describes, with fresh weights; the global generator is left as it was."""
    if card.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"unknown architecture {card.architecture!r}; this ttvd can build: {known}")
    with torch.random.fork_rng(devices=[]):
        try:
            model = ARCHITECTURES[card.architecture](**card.arguments)
        except TypeError as error:
            raise ValueError(f"cannot build {card.architecture!r} from the card: {error}") from error
        if not card.rotation_head:
            return model
        if not isinstance(model, ResNet):
            raise ValueError(f"a rotation head needs a ResNet for small images, not {card.architecture!r}")
        return RotationNet(model)


def card_path(path: str | os.PathLike[str]) -> Path:
    """Where the card of the checkpoint at ``path`` lies.

    Example:
        >>> card_path("digits.safetensors").name
        'digits.json'
    """
    return Path(path).with_suffix(".json")


def save_checkpoint(path: str | os.PathLike[str], model: nn.Module, card: Card) -> None:
    """Write weights and card, each atomically; a card that does not describe the model is refused.

    Args:
        path: Name of the weights, ending in ``.safetensors``; the card goes beside it.
        model: The trained model.
        card: Its description.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"a checkpoint's name must end in .safetensors, got {path}")
    _load_weights(build_model(card), model.state_dict(), f"the card's {card.architecture!r}")
    document = {"kind": KIND, "version": FORMAT_VERSION, "fingerprint": fingerprint(model), **asdict(card)}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_tensors(path, model.state_dict(), kind=KIND, version=FORMAT_VERSION)
    write_bytes(card_path(path), text.encode())


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[nn.Module, Card]:
    """Rebuild a model, in evaluation mode, and its card.

    Raises:
        FileNotFoundError: The weights or the card are missing.
        ValueError: One of them is damaged, of another kind or version, or they do not belong together.
    """
    weights, _ = read_tensors(path, kind=KIND, version=FORMAT_VERSION)
    card, expected = _read_card(card_path(path))
    model = build_model(card)
    _load_weights(model, weights, str(path))
    if fingerprint(model) != expected:
        raise ValueError(f"{path} and its card do not belong together: the card describes other weights")
    return model.eval(), card


def _load_weights(model: nn.Module, weights: Mapping[str, Any], name: str) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the weights do not fit {name}: {error}") from error


def _read_card(path: Path) -> tuple[Card, str]:
    if not path.is_file():
        raise FileNotFoundError(
            f"no card at {path}; a checkpoint is a .safetensors file and a .json beside it"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ValueError(f"{path} is not the card of a {KIND}")
    version = document.get("version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has version {version!r}, this ttvd reads up to {FORMAT_VERSION}; upgrade ttvd"
        )
    known = {item.name for item in fields(Card)}
    try:
        card = Card(**{key: value for key, value in document.items() if key in known})
        return card, str(document["fingerprint"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a complete card: {error}") from error
