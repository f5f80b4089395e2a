"""What several commands share: devices, parameters of methods, the user's own modules, optional packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ttvd.methods import Method


def add_current_folder() -> None:
    """Let ``package.module:Name`` be imported from the current folder.

    The folder comes last in the search path, so that a file in it cannot hide an installed package.
    """
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def check_device(name: str) -> str:
    """Return the name of a device, after checking that torch can use it."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device is called {name!r}; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device; leave --device out")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no {name}; torch finds {torch.cuda.device_count()} CUDA devices")
    if device.type == "meta" or (device.type == "cpu" and device.index):
        raise ValueError(f"nothing can be computed on {name!r}; use cpu, cuda or cuda:N")
    return name


def parse_parameters(pairs: Iterable[str], method: Method) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` pairs for the parameters of a method.

    Values are numbers, ``true``, ``false``, lists or strings, as in TOML; strings need no quotes. ``statistics`` takes
    the words of ``Statistics.parse``. :func:`ttvd.create` refuses names that the method does not have.

    Args:
        pairs: The pairs, as given on the command line.
        method: The method.

    Example:
        >>> from ttvd.methods import find_method
        >>> parse_parameters(["lr=1e-3", "optimizer=sgd"], find_method("tent"))
        {'lr': 0.001, 'optimizer': 'sgd'}
    """
    from ttvd.nn.norms import Statistics

    defaults, parsed = method.parameters(), dict[str, Any]()
    for name, text in split_pairs(pairs).items():
        value = Statistics.parse(text) if name == "statistics" else parse_value(text)
        if _is_number(defaults.get(name)) and not _is_number(value) and not method.takes_both(name):
            raise ValueError(f"--param {name} must be a number, got {text!r}")
        parsed[name] = value
    return parsed


def split_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Split ``NAME=VALUE`` pairs; a name may be given once."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name:
            raise ValueError(f"--param takes NAME=VALUE, got {pair!r}")
        if name in found:
            raise ValueError(f"--param {name} is given twice")
        found[name] = text
    return found


def parse_value(text: str) -> Any:
    """Parse a value as in TOML; a string needs no quotes."""
    import tomllib

    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    value = document.pop("value")
    return value if not document and isinstance(value, bool | int | float | str | list) else text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def make_console() -> Console:
    """Return a console for standard output whose lines are not cut off where the output is a pipe or a file."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 200)
    return console


def require(module: str, extra: str) -> None:
    """Refuse a command whose optional package is missing, before any work is done.

    Args:
        module: Name of the module that the command imports.
        extra: Extra of ttvd that installs it.

    Example:
        >>> require("no_such_module", "images")
        Traceback (most recent call last):
        ...
        ImportError: this command needs the package no_such_module: pip install 'ttvd[images]'
    """
    if find_spec(module) is None:
        raise ImportError(f"this command needs the package {module}: pip install 'ttvd[{extra}]'")
