"""What commands must know before they begin: optional packages, devices, values of parameters."""

from importlib.util import find_spec
from typing import Any


def require(module: str, extra: str) -> None:
    """Say which extra to install when an optional package is missing, before any work is done."""
    if find_spec(module) is None:
        raise ImportError(f"this needs the package {module}: pip install 'ttvd[{extra}]'")


def check_device(name: str) -> str:
    """A device that torch knows and that is there."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device is called {name!r}; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device that this torch can use; leave --device out")
    return name


def parse_settings(settings: list[str], allowed: dict[str, Any]) -> dict[str, Any]:
    """NAME=VALUE pairs for the parameters of a method; numbers and true/false are read as such.

    ``statistics`` is batch, source, prior:P, count:N, momentum:M or track:COUNT:MEMORY, with :renorm if wanted.
    """
    import json

    from ttvd.nn.norms import Statistics

    parsed: dict[str, Any] = {}
    for setting in settings:
        name, sign, text = setting.partition("=")
        if not sign or not name:
            raise ValueError(f"--set takes NAME=VALUE, got {setting!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        number = isinstance(allowed.get(name), int | float) and not isinstance(allowed.get(name), bool)
        if number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} is a number, got {text!r}")
        parsed[name] = Statistics.parse(text) if name == "statistics" else value
    return parsed
