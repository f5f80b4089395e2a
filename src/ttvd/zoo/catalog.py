"""Source models by name: shipped checkpoints, checkpoint files, and functions of the user's own code."""

import difflib
import os
import sys
from dataclasses import dataclass, replace
from importlib import import_module, resources
from pathlib import Path

from torch import nn

from ttvd.nn.anchors import anchor_norms
from ttvd.nn.fingerprint import fingerprint
from ttvd.zoo.checkpoint import Card, load_checkpoint
from ttvd.zoo.sites import Sites

_SITES = ".sites.safetensors"
_ANCHORED = "+anchored"
_UPRIGHT = "-upright"


@dataclass(frozen=True, eq=False)
class Source:
    """A trained model with its sites and its card.

    Attributes:
        model: The model, in evaluation mode.
        sites: The sites of the model; None if there are none.
        card: The description of the checkpoint; None if the model does not come from one.
    """

    model: nn.Module
    sites: Sites | None = None
    card: Card | None = None

    def __repr__(self) -> str:
        return f"Source(model={type(self.model).__name__}, sites={self.sites!r}, card={self.card!r})"


def checkpoint_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Return the folder that checkpoints are loaded from: the given one, else the package's own."""
    if folder is not None:
        return Path(folder)
    return Path(str(resources.files("ttvd.zoo") / "checkpoints"))


def sites_path(folder: str | os.PathLike[str], name: str, fraction: float = 1.0) -> Path:
    """Return the path of the sites that were estimated from a fraction of the source data.

    Example:
        >>> sites_path("models", "net").name, sites_path("models", "net", 0.05).name
        ('net.sites.safetensors', 'net.5pct.sites.safetensors')
    """
    share = "" if fraction == 1.0 else f".{100 * fraction:g}pct"
    return Path(folder) / f"{name}{share}{_SITES}"


def available(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """List the names of the checkpoints in a folder; the package's own folder unless given.

    Example:
        >>> "digits-sla" in available()
        True
    """
    files = sorted(checkpoint_folder(folder).glob("*.safetensors"))
    return [path.stem for path in files if not path.name.endswith(_SITES)]


def load(name: str, folder: str | os.PathLike[str] | None = None, *, fraction: float = 1.0) -> Source:
    """Load a checkpoint by name, with the sites in ``<name>.sites.safetensors`` beside it.

    Args:
        name: One of :func:`available`. The suffix ``+anchored`` gives a model that computes the same function with
            norms that store the anchors of the sites (see ``ttvd.nn.anchors``). Methods that replace the statistics
            of norms and use no sites need it. These anchors belong to all views together;
            ``+anchored-upright`` gives the anchors of upright images.
        folder: Folder of the checkpoints; the package's own unless given.
        fraction: Fraction of the source data that the sites were estimated from. Some checkpoints have several.

    Raises:
        ValueError: No checkpoint has this name (the message lists the nearest names), or a file is damaged.
    """
    base, anchored, kind = name.partition(_ANCHORED)
    if anchored and kind in ("", _UPRIGHT):
        return _anchor(load(base, folder, fraction=fraction), name, upright=bool(kind))
    names = available(folder)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are: {names or 'none'}"
        raise ValueError(f"no checkpoint is called {name!r}; {hint}")
    path = checkpoint_folder(folder) / f"{name}.safetensors"
    model, card = load_checkpoint(path)
    return Source(model, _load_sites(sites_path(path.parent, name, fraction), model), card)


def load_source(
    model: str, weights: Path | None = None, sites: Path | None = None, folder: Path | None = None
) -> Source:
    """Load a model and its sites by the name that a command or a recipe gives.

    Args:
        model: Name of a checkpoint, path of a checkpoint (``.safetensors`` with its card beside it), or
            ``package.module:function``, a function without arguments that returns the model.
        weights: Path of safetensors weights for a model that a function returns.
        sites: Path of the sites; those beside the checkpoint unless given.
        folder: Folder of the checkpoints, and of the sites ``function.sites.safetensors`` of a function's model; the
            package's own folder unless given.
    """
    if is_function(model):
        built = _call_function(model, weights)
        beside = None if folder is None else sites_path(folder, model.rpartition(":")[2])
        source = Source(built, _load_sites(beside, built))
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
    return replace(source, sites=found)


def find_sites(model: str, fraction: float, folder: Path | None = None) -> Sites | None:
    """Load the sites of a model that were estimated from a fraction of its source data.

    Args:
        model: Name of the model, as in :func:`load_source`. Anchored models have no site files of their own.
        fraction: Fraction of the source data.
        folder: Folder of the checkpoints, as in :func:`load_source`.

    Returns:
        The sites, or None if there is no such file.
    """
    if is_function(model):
        path = None if folder is None else sites_path(folder, model.rpartition(":")[2], fraction)
    elif model.endswith(".safetensors"):
        path = sites_path(Path(model).parent, Path(model).stem, fraction)
    else:
        path = sites_path(checkpoint_folder(folder), model, fraction)
    return Sites.load(path) if path is not None and path.is_file() else None


def _load_sites(path: Path | None, model: nn.Module) -> Sites | None:
    """Load the sites of a model; None if the file does not exist."""
    if path is None or not path.is_file():
        return None
    sites = Sites.load(path)
    sites.check(model)
    return sites


def _anchor(source: Source, name: str, upright: bool) -> Source:
    """Let the norms of a source model store the anchors of its sites."""
    sites = source.sites
    anchors = None if sites is None else sites.anchors.get(1 if upright else sites.views)
    if sites is None or anchors is None:
        raise ValueError(
            f"{name!r}: this checkpoint has no sites with anchors; ttvd.calibrate measures them if the model has batch "
            "norms with affine parameters and running statistics"
        )
    anchor_norms(source.model, anchors)
    return replace(source, sites=replace(sites, fingerprint=fingerprint(source.model)))


def is_function(model: str) -> bool:
    """Return whether the name of a model is ``package.module:function``: code that :func:`load_source` runs.

    Example:
        >>> is_function("mymodels:make"), is_function("digits-sla"), is_function("models/net.safetensors")
        (True, False, False)
    """
    return ":" in model and not Path(model).exists()


def _call_function(spec: str, weights: Path | None) -> nn.Module:
    """Build the model of ``package.module:function`` and load its weights."""
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
