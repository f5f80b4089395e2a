"""The checkpoints that come with the package."""

import difflib
import os
from dataclasses import dataclass, replace
from importlib import resources
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
    """A trained model, its sites where there are some, and the card that says where it comes from, likewise."""

    model: nn.Module
    sites: Sites | None = None
    card: Card | None = None


def checkpoint_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Where checkpoints are looked for: the package's own folder unless another is given."""
    if folder is not None:
        return Path(folder)
    return Path(str(resources.files("ttvd.zoo") / "checkpoints"))


def sites_path(folder: str | os.PathLike[str], name: str, fraction: float = 1.0) -> Path:
    """Where the sites of a checkpoint lie, estimated from all source data or from a share of them.

    Example:
        >>> sites_path("models", "net").name, sites_path("models", "net", 0.05).name
        ('net.sites.safetensors', 'net.5pct.sites.safetensors')
    """
    share = "" if fraction == 1.0 else f".{100 * fraction:g}pct"
    return Path(folder) / f"{name}{share}{_SITES}"


def available(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the checkpoints in a folder, the package's own unless given.

    Example:
        >>> isinstance(available(), list)
        True
    """
    files = sorted(checkpoint_folder(folder).glob("*.safetensors"))
    return [path.stem for path in files if not path.name.endswith(_SITES)]


def load(name: str, folder: str | os.PathLike[str] | None = None, *, fraction: float = 1.0) -> Source:
    """Load a checkpoint by name, and its sites from ``<name>.sites.safetensors`` beside it.

    Args:
        name: One of :func:`available`. With ``+anchored`` behind it the model computes the same, by norms that store
            the anchors of the sites (``ttvd.nn.anchors``): for methods that replace statistics and know no sites.
            Those are anchors of all views together; ``+anchored-upright`` is for methods that look at upright images.
        folder: Where to look; the package's own checkpoints unless given.
        fraction: Share of the source data that the sites were estimated from; some checkpoints come with several.

    Raises:
        ValueError: No checkpoint has this name (the nearest names are given), or a file is damaged.
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
    beside = sites_path(path.parent, name, fraction)
    sites = Sites.load(beside) if beside.is_file() else None
    if sites is not None:
        sites.check(model)
    return Source(model, sites, card)


def _anchor(source: Source, name: str, upright: bool) -> Source:
    sites = source.sites
    anchors = None if sites is None else sites.anchors.get(1 if upright else sites.views)
    if sites is None or anchors is None:
        raise ValueError(
            f"{name!r}: this checkpoint has no sites with anchors; ttvd.calibrate measures them, where the model has "
            "batch norms with an affine part and statistics of their own"
        )
    anchor_norms(source.model, anchors)
    return Source(source.model, replace(sites, fingerprint=fingerprint(source.model)), source.card)
