"""Checkpoints: weights in a safetensors file, and a card in JSON beside it that says how to rebuild the model.

The card names an architecture of this library and its arguments, so loading a checkpoint never runs code from a file.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet, resnet20, resnet26
from ttvd.nn.resnet_imagenet import resnet18, resnet50
from ttvd.nn.rotation import RotationNet
from ttvd.nn.timm_network import timm_network
from ttvd.zoo.tensorfile import check_format, read_tensors, write_bytes, write_tensors

KIND = "ttvd.checkpoint"
FORMAT_VERSION = 2
_REMEDY = (
    "read its weights with safetensors.torch.load_file, load them into the model and write the checkpoint again with "
    "ttvd.zoo.checkpoint.save_checkpoint"
)

ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "resnet": ResNet,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet26": resnet26,
    "resnet50": resnet50,
    "timm": timm_network,
}


@dataclass(frozen=True)
class Card:
    """Description of a checkpoint: architecture, training and accuracy.

    Args:
        architecture: Name of the architecture, one of ``ARCHITECTURES``.
        arguments: Keyword arguments of the architecture; JSON must be able to hold them.
        head_views: Number of rotations that the head tells apart: 1 for a plain classifier, 4 for a classifier
            trained with self-supervised label augmentation (SLA).
        rotation_head: Whether a rotation head was trained beside the classifier.
        data: Description of the training data.
        training: Training settings (``dataclasses.asdict`` of a ``ttvd.source.TrainingConfig``).
        seed: Seed of the training.
        accuracy_one_view: Clean accuracy in [0, 1] on the upright image.
        accuracy_four_views: Clean accuracy of the four aggregated views, for an SLA classifier.
        held_out_one_view: Like ``accuracy_one_view``, on held-out training images. Choices are compared by it.
        held_out_four_views: Like ``accuracy_four_views``, on the same images.
        input_shape: Channels, height and width of the images that the model was trained on; None if unknown.

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
    training: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    accuracy_one_view: float | None = None
    accuracy_four_views: float | None = None
    held_out_one_view: float | None = None
    held_out_four_views: float | None = None
    input_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, kind, word in (
            *((name, str, "a text") for name in ("architecture", "data")),
            *((name, Mapping, "a table of names and values") for name in ("arguments", "training")),
            ("head_views", int, "a whole number"),
            ("rotation_head", bool, "true or false"),
            ("seed", int | None, "a whole number"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{name} must be {word}, got {value!r}")
        if self.head_views < 1:
            raise ValueError(f"head_views must be at least 1, got {self.head_views}")
        for name in ("accuracy_one_view", "accuracy_four_views", "held_out_one_view", "held_out_four_views"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 <= value <= 1):
                raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
        if self.input_shape is None:
            return
        shape = tuple(self.input_shape)  # JSON has lists for tuples
        if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"input_shape must be (channels, height, width), got {self.input_shape!r}")
        object.__setattr__(self, "input_shape", shape)


def build_model(card: Card, seed: int | None = None) -> nn.Module:
    """Build the model that a card describes, with fresh weights; ``seed`` makes them repeatable.

    The model gets the attributes ``trained_input_shape`` and ``head_views`` of the card, which
    :func:`ttvd.nn.split.check_input_shape` and ``ttvd.estimate_sites`` read. The global random generator stays as
    it was.
    """
    if card.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"unknown architecture {card.architecture!r}; this ttvd can build: {known}")
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        try:
            model = ARCHITECTURES[card.architecture](**card.arguments)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise ValueError(f"cannot build {card.architecture!r} from the card: {error}") from error
        if card.rotation_head:
            if not isinstance(model, ResNet):
                raise ValueError(
                    f"a rotation head needs a ResNet for small images, not {card.architecture!r}"
                )
            model = RotationNet(model)
    model.trained_input_shape = card.input_shape  # type: ignore[assignment]  # a plain attribute, not a module
    model.head_views = card.head_views  # type: ignore[assignment]
    return model


def card_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the card that belongs to the checkpoint at ``path``.

    Example:
        >>> card_path("digits.safetensors").name
        'digits.json'
    """
    return Path(path).with_suffix(".json")


def save_checkpoint(path: str | os.PathLike[str], model: nn.Module, card: Card) -> None:
    """Write weights and card, each atomically. A card that does not describe the model is refused.

    Args:
        path: Path of the weights, ending in ``.safetensors``; the card goes beside it.
        model: The trained model.
        card: Description of the model.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"a checkpoint's name must end in .safetensors, got {path}")
    _load_weights(build_model(card), model.state_dict(), f"the card's {card.architecture!r}")
    document = {"kind": KIND, "format": FORMAT_VERSION, "fingerprint": fingerprint(model), **asdict(card)}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    write_tensors(path, model.state_dict(), kind=KIND, version=FORMAT_VERSION)
    write_bytes(card_path(path), text.encode())


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[nn.Module, Card]:
    """Load a model, in evaluation mode, and its card.

    Raises:
        FileNotFoundError: The weights or the card are missing.
        ValueError: One of them is damaged, of another kind or format, or they do not belong together.
    """
    weights, _ = read_tensors(path, kind=KIND, version=FORMAT_VERSION, remedy=_REMEDY)
    card, expected = _read_card(card_path(path))
    try:
        _check_size(card, weights)
        model = build_model(card)
    except ValueError as error:
        raise ValueError(
            f"the card {card_path(path)} does not describe {Path(path).name}: {error}"
        ) from error
    if strange := [name for name, value in weights.items() if not bool(value.isfinite().all())]:
        raise ValueError(f"{path} has weights that are not finite: {strange[0]}; {_REMEDY}")
    _load_weights(model, weights, str(path))
    if fingerprint(model) != expected:
        raise ValueError(f"{path} and its card do not belong together: the card describes other weights")
    return model.eval(), card


def _check_size(card: Card, weights: Mapping[str, Tensor]) -> None:
    """Refuse a card whose model is larger than the weights, before memory is taken for it."""
    most = sum(value.numel() for value in weights.values())
    for name, value in (*card.arguments.items(), *_find_options(card)):
        numbers = value if isinstance(value, list | tuple) else [value]
        # A block has several tensors, and nothing is counted that has no element.
        limit = len(weights) if name in ("blocks", "depth", "depths", "layers") else most
        if any(isinstance(number, int | float) and not abs(number) <= limit for number in numbers):
            raise ValueError(f"{name} = {value!r} is more than the weights have")
    with torch.device("meta"), _SkipRandomInit(), warnings.catch_warnings():  # shapes without memory
        warnings.simplefilter("ignore")  # of layers without elements, which are refused below
        found = sum(value.numel() for value in build_model(card).state_dict().values())
    if found != most:
        raise ValueError(f"the weights do not fit its model: they have {most} numbers instead of {found}")


class _SkipRandomInit(TorchFunctionMode):
    """Skips the initialisation of weights by normal numbers.

    For weights without memory, torch would import its compiler for that, which takes a second.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (nn.init.normal_, Tensor.normal_):
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def _find_options(card: Card) -> list[tuple[str, Any]]:
    options = card.arguments.get("options")
    return list(options.items()) if isinstance(options, Mapping) else []


def _load_weights(model: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the weights do not fit {name}: {error}") from error


def _read_card(path: Path) -> tuple[Card, str]:
    """Read a card and the fingerprint of the weights that it describes."""
    if not path.is_file():
        raise FileNotFoundError(
            f"no card at {path}; a checkpoint is a .safetensors file and a .json beside it"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ValueError(f"{path} is not the card of a {KIND}")
    check_format(path, KIND, document.get("format"), FORMAT_VERSION, _REMEDY)
    known = {item.name for item in fields(Card)}
    try:
        card = Card(**{key: value for key, value in document.items() if key in known})
        return card, str(document["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a complete card: {error}") from error
