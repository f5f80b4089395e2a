"""Optional packages: which extra of the pip package installs them."""

from importlib.util import find_spec


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
