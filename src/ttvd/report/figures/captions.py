"""Words for classes and images in captions of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def image_noun(classes: Sequence[str]) -> str:
    """Return the noun for images of some classes: "digit" if all classes are single digits, else "image".

    Example:
        >>> image_noun(["0", "1"]), image_noun(["cat", "dog"])
        ('digit', 'image')
    """
    return "digit" if all(name.isdigit() and len(name) == 1 for name in classes) else "image"


def name_class(name: str) -> str:
    """Return the name of a class for a legend.

    Example:
        >>> name_class("3"), name_class("cat")
        ('digit 3', 'cat')
    """
    return f"digit {name}" if image_noun([name]) == "digit" else name


def list_names(names: Sequence[str]) -> str:
    """Join names for a sentence.

    Example:
        >>> list_names(["cat", "dog", "frog"])
        'cat, dog and frog'
    """
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def describe_images(facts: Mapping[str, Any]) -> str:
    """Describe the corruption of a figure's images, with its constants.

    Example:
        >>> describe_images({"domain": "fog 5", "constants": "imagenet", "strength": {"amount": 3.0, "decay": 1.4}})
        "fog 5 with ImageNet-C's constants (amount 3, decay 1.4)"
        >>> describe_images({"domain": "fog 5", "constants": "official", "strength": {}})
        'fog 5 as it was released'
    """
    domain: str = facts["domain"]
    if not facts["strength"]:
        return domain if domain == "clean" else f"{domain} as it was released"
    table = {"cifar": "CIFAR-10-C", "imagenet": "ImageNet-C"}[facts["constants"]]
    strength = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in facts["strength"].items())
    return f"{domain} with {table}'s constants ({strength})"
