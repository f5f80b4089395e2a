"""The kinds of figures by name: what they take, how they are made, and which are in a store already."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ttvd.bench.figures.plane import PlaneOptions, check_plane, compute_plane
from ttvd.bench.figures.samples import SampleOptions, check_samples, compute_samples
from ttvd.bench.figures.scene import Options, Scene, make_spec, set_scene
from ttvd.bench.figures.slices import SliceOptions, check_slices, compute_slices
from ttvd.bench.figures.values import Description, Tree, pack
from ttvd.bench.recipe import Recipe
from ttvd.bench.recipe.parts import FigurePart
from ttvd.bench.resources import Resources
from ttvd.bench.store import Store
from ttvd.data.checks import check_choice

Check = Callable[[Scene, Any], object]


@dataclass(frozen=True)
class Kind:
    """A kind of figures.

    Attributes:
        options: What it takes.
        check: Raises, if a scene and options do not go together.
        compute: From a scene and options to facts and arrays.
        revision: It grows when its arrays or their meaning change, so that stored figures are made again.
    """

    options: type[Options]
    check: Check
    compute: Callable[[Scene, Any], tuple[Description, Tree]]
    revision: int = 1


KINDS: Mapping[str, Kind] = {
    "samples": Kind(SampleOptions, check_samples, compute_samples),
    "slices": Kind(SliceOptions, check_slices, compute_slices),
    "plane": Kind(PlaneOptions, check_plane, compute_plane),
}


@dataclass(frozen=True)
class Made:
    """What became of the figures of a recipe: their names, and what went wrong with those that could not be made."""

    made: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)


def name_figures(recipe: Recipe) -> dict[str, FigurePart]:
    """The figures of a recipe by the names that they have in a store: place and kind."""
    return {f"{place:02}-{part.kind}": part for place, part in enumerate(recipe.figures, 1)}


def check_figures(recipe: Recipe, resources: Resources | None = None) -> None:
    """Refuse figures that cannot be made, before anything starts.

    Args:
        recipe: Whose figures.
        resources: Where models and data are found; without it only names and values of options are checked.

    Raises:
        ValueError: A kind or an option is unknown (the allowed names are given), a value cannot be used, or the
            model does not have what the figure needs.
    """
    for name, part in name_figures(recipe).items():
        try:
            options = _read_options(part, recipe)
            if resources is not None:
                _check_model(options, recipe, resources, KINDS[part.kind].check)
        except ValueError as error:
            raise ValueError(f"recipe {recipe.name}, figure {name}: {error}") from error


def _read_options(part: FigurePart, recipe: Recipe) -> Options:
    check_choice(part.kind, tuple(KINDS), "kind of figure")
    kind = KINDS[part.kind].options
    for option in part.options:
        check_choice(option, tuple(item.name for item in fields(kind)), f"option of {part.kind}")
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in part.options.items()}
    return kind(**values).complete(recipe)


def _check_model(options: Options, recipe: Recipe, resources: Resources, check: Check) -> None:
    assert options.checkpoint is not None
    if resources.source(options.checkpoint).sites is not None:  # to estimate them now would take long
        check(set_scene(options, recipe, resources, seed=0), options)


def make_figure(
    part: FigurePart, recipe: Recipe, resources: Resources, seed: int = 0
) -> tuple[Description, bytes]:
    """Compute what a figure is drawn from.

    Args:
        part: Kind and options.
        recipe: Whose data.
        resources: Where models and data are found.
        seed: Of the choice and the order of images.

    Returns:
        Facts as JSON can hold them, and arrays as safetensors bytes; ``ttvd.report.figures`` draws them.
    """
    options, kind = _read_options(part, recipe), KINDS[part.kind]
    scene = set_scene(options, recipe, resources, seed)
    facts, arrays = kind.compute(scene, options)
    shared = {"kind": part.kind, "key": _make_key(part, recipe, resources, seed)}
    return shared | scene.description | facts, pack(arrays)


def make_figures(
    recipe: Recipe, resources: Resources, store: Store, progress: Callable[[str], None] | None = None
) -> Made:
    """Make the figures of a recipe that the store does not have; one that fails does not stop the others.

    Args:
        recipe: Whose figures, with its first seed.
        resources: Where models and data are found.
        store: Where figures are kept. One is made again if its options, the model or the data have changed.
        progress: Called with the name of each figure before it is made.
    """
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
    return Made(tuple(made), tuple(kept), failed)


def _make_key(part: FigurePart, recipe: Recipe, resources: Resources, seed: int) -> str:
    """Of everything that decides the figure."""
    options = _read_options(part, recipe)
    spec = make_spec(options, recipe, resources, seed)
    deciding = [part.kind, KINDS[part.kind].revision, asdict(options), spec.key]
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]
