"""Figures that need a model. Their values are computed here and kept in a store; ``ttvd.report`` draws them.

- `samples`: images that four views correct, with their distances to all sites.
- `slices`: the plane through three sites, in the space of all features.
- `feature_plane`: the diagrams and runs of a model with two features.
- `scene`: the model and the stream that they share.
- `paper`: the methods that they show.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ttvd.bench.figures import feature_plane, samples, slices
from ttvd.bench.figures.scene import Description, FigureOptions, Scene, Tree, make_scene, make_spec, pack
from ttvd.bench.recipe import check_code
from ttvd.bench.resources import Resources
from ttvd.data.checks import check_choice

if TYPE_CHECKING:
    from ttvd.bench.recipe import FigurePart, Recipe
    from ttvd.bench.store import Store


class FigureValues(Protocol):
    """The values that a figure is drawn from."""

    def to_arrays(self) -> Tree:
        """Return the values as named arrays."""


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure.

    Attributes:
        options: Class of its options.
        check: Function that raises if a scene and options do not go together.
        compute: Function from a scene and options to values and facts.
        revision: Number that grows when the values or their meaning change, so that stored figures are made again.
    """

    options: type[FigureOptions]
    check: Callable[[Scene, Any], object]
    compute: Callable[[Scene, Any], tuple[FigureValues, Description]]
    revision: int = 1


KINDS: Mapping[str, FigureKind] = {
    "samples": FigureKind(samples.SampleOptions, samples.check, samples.compute),
    "slices": FigureKind(slices.SliceOptions, slices.check, slices.compute),
    "plane": FigureKind(feature_plane.PlaneOptions, feature_plane.check, feature_plane.compute),
}


@dataclass(frozen=True)
class FigureOutcome:
    """What :func:`make_figures` did.

    Attributes:
        made: Names of the figures that were made.
        kept: Names of the figures that the store had.
        failed: Traceback of each figure that could not be made, by name.
    """

    made: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)


def name_figures(recipe: Recipe) -> dict[str, FigurePart]:
    """Return the figures of a recipe by the names that they have in a store: place and kind."""
    return {f"{place:02}-{part.kind}": part for place, part in enumerate(recipe.figures, 1)}


def check_figures(recipe: Recipe, resources: Resources | None = None) -> None:
    """Refuse figures that cannot be made, before anything starts.

    Args:
        recipe: The recipe.
        resources: Models and data; without them only names and values of options are checked.

    Raises:
        ValueError: The recipe names code that is not allowed, a kind or an option is unknown (the allowed names are
            given), a value cannot be used, the model does not have what the figure needs, or its sites would need
            training images that are not there.
    """
    check_code(recipe, allow_code=resources is not None and resources.config.allow_code)
    for name, part in name_figures(recipe).items():
        try:
            options = _read_options(part, recipe)
            if resources is not None:
                _check_model(options, recipe, resources, KINDS[part.kind])
        except ValueError as error:
            raise ValueError(f"recipe {recipe.name}, figure {name}: {error}") from error


def _read_options(part: FigurePart, recipe: Recipe) -> FigureOptions:
    check_choice(part.kind, tuple(KINDS), "kind of figure")
    kind = KINDS[part.kind].options
    for option in part.options:
        check_choice(option, tuple(item.name for item in fields(kind)), f"option of {part.kind}")
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in part.options.items()}
    return kind(**values).complete(recipe)


def _check_model(options: FigureOptions, recipe: Recipe, resources: Resources, kind: FigureKind) -> None:
    assert options.checkpoint is not None
    if resources.sites_beside(options.checkpoint, 1.0) is None:
        resources.check_training(recipe.data.set)  # to estimate the sites now would take long
        return
    scene = make_scene(options, recipe, resources, seed=0)
    kind.check(scene, options)
    stream = scene.stream
    images = resources.batch(stream.spec, stream.spec.domains[0], stream.rows[:2])
    try:
        with torch.no_grad():
            scene.parts(images)
    except RuntimeError as error:
        raise ValueError(
            f"{options.checkpoint} does not take the images of {recipe.data.set}: {error}"
        ) from error


def make_figure(
    part: FigurePart, recipe: Recipe, resources: Resources, seed: int = 0
) -> tuple[Description, bytes]:
    """Compute the values of a figure.

    Args:
        part: Kind and options.
        recipe: Recipe with the data.
        resources: Models and data.
        seed: Seed of the choice and the order of images.

    Returns:
        Facts as JSON values, and arrays as safetensors bytes; ``ttvd.report.figures`` draws them.
    """
    check_code(recipe, allow_code=resources.config.allow_code)
    options, kind = _read_options(part, recipe), KINDS[part.kind]
    scene = make_scene(options, recipe, resources, seed)
    values, facts = kind.compute(scene, options)
    shared = {"kind": part.kind, "key": _make_key(part, recipe, resources, seed)}
    return shared | scene.description | facts, pack(values.to_arrays())


def make_figures(
    recipe: Recipe, resources: Resources, store: Store, progress: Callable[[str], None] | None = None
) -> FigureOutcome:
    """Make the figures of a recipe that the store does not have; one that fails does not stop the others.

    Args:
        recipe: The recipe. Its first seed is used.
        resources: Models and data.
        store: Store of the figures. A figure is made again if its options, the model or the data have changed.
        progress: Function that is called with the name of each figure before it is made.
    """
    check_code(recipe, allow_code=resources.config.allow_code)
    have = {figure.name: figure.description.get("key") for figure in store.figures(recipe.name)}
    made, kept, failed = [], [], {}
    for name, part in name_figures(recipe).items():
        try:
            if have.get(name) == _make_key(part, recipe, resources, recipe.seeds[0]):
                kept.append(name)
                continue
            if progress is not None:
                progress(name)
            description, payload = make_figure(part, recipe, resources, recipe.seeds[0])
        except Exception:
            failed[name] = traceback.format_exc()
            continue
        store.put_figure(name, recipe.name, description, payload)
        made.append(name)
    return FigureOutcome(tuple(made), tuple(kept), failed)


def _make_key(part: FigurePart, recipe: Recipe, resources: Resources, seed: int) -> str:
    """A hash of everything that decides the figure."""
    options = _read_options(part, recipe)
    spec = make_spec(options, recipe, resources, seed)
    entries = asdict(options)
    if not entries["methods"]:
        del entries["methods"]  # figures of the usual methods keep the keys that they have in stores
    deciding = [part.kind, KINDS[part.kind].revision, entries, spec.key]
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]
