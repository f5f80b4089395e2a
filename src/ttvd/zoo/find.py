"""Models by name: from the zoo, from a checkpoint, or from the user's own code."""

import os
import sys
from importlib import import_module
from pathlib import Path

from torch import nn

from ttvd.zoo.catalog import Source, checkpoint_folder, load, sites_path
from ttvd.zoo.sites import Sites


def find_source(
    model: str, weights: Path | None = None, sites: Path | None = None, folder: Path | None = None
) -> Source:
    """Load a model and its sites.

    Args:
        model: A name from the zoo, a checkpoint of this library (``.safetensors`` with its card beside it), or
            ``package.module:function``, a function without arguments that returns the model.
        weights: Safetensors weights for the last form.
        sites: File of the sites; those of the zoo entry unless given.
        folder: Where checkpoints are looked up by name, and the sites ``function.sites.safetensors`` of a function's
            model; the package's own unless given.
    """
    if ":" in model and not Path(model).exists():
        source = _with_sites(Source(_build(model, weights)), model, folder)
    elif weights is not None:
        raise ValueError("weights go with package.module:function; a checkpoint or a name has its own")
    elif model.endswith(".safetensors"):
        path = Path(model)
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint at {path}")
        source = load(path.stem, path.parent)
    else:
        source = load(model, folder)
    if sites is None:
        return source
    found = Sites.load(sites)
    found.check(source.model)
    return Source(source.model, found, source.card)


def find_sites(model: str, fraction: float, folder: Path | None = None) -> Sites | None:
    """The sites beside a model that were estimated from a share of its source data; None where there are none.

    Args:
        model: As in :func:`find_source`. A model whose norms are anchored is another one than that of the file.
        fraction: The share.
        folder: As in :func:`find_source`.
    """
    if ":" in model and not Path(model).exists():
        path = None if folder is None else sites_path(folder, model.rpartition(":")[2], fraction)
    elif model.endswith(".safetensors"):
        path = sites_path(Path(model).parent, Path(model).stem, fraction)
    else:
        path = sites_path(checkpoint_folder(folder), model, fraction)
    return Sites.load(path) if path is not None and path.is_file() else None


def _with_sites(source: Source, model: str, folder: Path | None) -> Source:
    """With the sites called after the function, where the folder of checkpoints has them."""
    beside = None if folder is None else sites_path(folder, model.rpartition(":")[2])
    if beside is None or not beside.is_file():
        return source
    found = Sites.load(beside)
    found.check(source.model)
    return Source(source.model, found)


def _build(spec: str, weights: Path | None) -> nn.Module:
    module, _, function = spec.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot find {function!r} in {module!r}: {error}") from error
    model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{spec} must return an nn.Module, got {type(model).__name__}")
    if weights is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            model.load_state_dict(load_file(weights))
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{weights} does not fit {spec}: {error}") from error
    return model.eval()
