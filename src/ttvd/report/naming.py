"""How captions speak of classes and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def find_noun(classes: Sequence[str]) -> str:
    """What images of these classes are: digits where all classes are numbers of one digit.

    Example:
        >>> find_noun(["0", "1"]), find_noun(["cat", "dog"])
        ('digit', 'image')
    """
    return "digit" if all(name.isdigit() and len(name) == 1 for name in classes) else "image"


def name_class(name: str) -> str:
    """A class in a legend.

    Example:
        >>> name_class("3"), name_class("cat")
        ('digit 3', 'cat')
    """
    return f"digit {name}" if find_noun([name]) == "digit" else name


def list_names(names: Sequence[str]) -> str:
    """Names in a sentence.

    Example:
        >>> list_names(["cat", "dog", "frog"])
        'cat, dog and frog'
    """
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def render_images(facts: Mapping[str, Any]) -> str:
    """What happened to the images of a figure, with the constants behind it.

    Example:
        >>> render_images({"domain": "fog 5", "constants": "imagenet", "strength": {"amount": 3.0, "decay": 1.4}})
        "fog 5 with ImageNet-C's constants (amount 3, decay 1.4)"
        >>> render_images({"domain": "fog 5", "constants": "official", "strength": {}})
        'fog 5 as it was released'
    """
    domain: str = facts["domain"]
    if not facts["strength"]:
        return domain if domain == "clean" else f"{domain} as it was released"
    table = {"cifar": "CIFAR-10-C", "imagenet": "ImageNet-C"}[facts["constants"]]
    strength = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in facts["strength"].items())
    return f"{domain} with {table}'s constants ({strength})"
