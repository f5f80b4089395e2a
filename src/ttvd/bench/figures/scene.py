"""What all figures share: a label-augmented source model, a stream of corrupted images, and arrays as bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttvd.bench.figures.paper import STATISTICS, FigureMethod
from ttvd.bench.resources import CORRUPTED, PARTIAL, Resources
from ttvd.bench.spec import CLEAN, OFFICIAL, Domain, Spec
from ttvd.data.checks import check_choice, check_severity
from ttvd.data.corruptions import CORRUPTIONS, EXTRA, describe
from ttvd.data.streams import batches, iid
from ttvd.geometry import Diagram
from ttvd.methods import Adapter, create, find_method
from ttvd.nn.split import SplitModel, split
from ttvd.nn.views import AggregatedViews
from ttvd.zoo.sites import Sites

if TYPE_CHECKING:
    from ttvd.bench.recipe import Recipe

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Labels: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Tree: TypeAlias = Mapping[str, "Array | Tree"]
"""Named arrays, which may lie in mappings of mappings."""
Description: TypeAlias = dict[str, Any]
"""Facts as JSON values."""
Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]
"""Images and labels. Figures may iterate over them more than once."""

GAMMA = -0.8
"""The paper's exponent of the influence."""
_SEPARATOR = "/"  # in the names of packed arrays


@dataclass(frozen=True)
class FigureOptions:
    """The options that every figure takes.

    Attributes:
        checkpoint: Source model; the recipe's model for methods that need sites, unless given.
        corruption: Corruption of the images; the first one of the recipe unless given.
        severity: Severity of the corruption; that of the recipe unless given.
        limit: Number of images, drawn at random.
        methods: Registered methods that replace those of ``ttvd.bench.figures.paper``, by label.
        defaults: The methods of this kind of figure, by label.
    """

    checkpoint: str | None = None
    corruption: str | None = None
    severity: int | None = None
    limit: int = 2048
    methods: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    defaults: ClassVar[Mapping[str, FigureMethod]] = {}

    def __post_init__(self) -> None:
        if self.checkpoint is not None and not isinstance(self.checkpoint, str):
            raise ValueError(f"checkpoint must be a text in quotation marks, got {self.checkpoint!r}")
        if self.corruption is not None:
            check_choice(self.corruption, (*CORRUPTIONS, *EXTRA, CLEAN), "corruption")
        if self.severity is not None:
            check_severity(self.severity)
        check_count("limit", self.limit)
        if not isinstance(self.methods, Mapping):
            raise ValueError(f"methods must be a table of labels and names of methods, got {self.methods!r}")
        for label, name in self.methods.items():
            check_choice(label, tuple(self.defaults), "label of a method")
            find_method(str(name))

    def figure_methods(self) -> dict[str, FigureMethod]:
        """Return the methods of the figure by label."""
        return {
            label: replace(method, name=self.methods.get(label, method.name))
            for label, method in self.defaults.items()
        }

    def complete(self, recipe: Recipe) -> FigureOptions:
        """Return the options with entries of the recipe where none are given."""
        checkpoint = self.checkpoint or recipe.checkpoints.get("sites")
        if checkpoint is None:
            raise ValueError("give it a checkpoint, or [checkpoints] one for methods that need sites")
        return replace(
            self,
            checkpoint=checkpoint,
            corruption=self.corruption or recipe.data.corruptions[0],
            severity=self.severity or recipe.data.severity,
        )


def check_count(name: str, value: Any) -> None:
    """Raise unless a value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raise unless a value is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


@dataclass(frozen=True, eq=False)
class FigureStream:
    """Batches of images in a seeded order. It can be iterated over again.

    Attributes:
        resources: Images.
        spec: Set, domain and batch size.
        labels: (n,) labels of all images of the spec, as outputs of the model.
        rows: Indices of the images that are used.
    """

    resources: Resources
    spec: Spec
    labels: Tensor
    rows: Tensor

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches(iid(len(self.rows), self.spec.seed), self.spec.batch_size):
            rows = self.rows[torch.from_numpy(index)]
            yield self.resources.batch(self.spec, self.spec.domains[0], rows), self.labels[rows]

    def clean(self) -> FigureStream | None:
        """Return the same images in the same order without the corruption; None where the set comes corrupted."""
        if self.spec.data in CORRUPTED:
            return None
        return replace(self, spec=replace(self.spec, domains=(Domain(),)))

    def enrich(self, classes: Sequence[int], count: int) -> FigureStream:
        """Return a stream with at least ``count`` images of each of these classes, as far as the set has them."""
        extra = []
        for label in classes:
            used = self.rows[self.labels[self.rows] == label]
            rows = (self.labels == label).nonzero()[:, 0]
            extra.append(rows[~torch.isin(rows, used)][: max(0, count - len(used))])
        return replace(self, rows=torch.cat([self.rows, *extra]))


@dataclass(frozen=True, eq=False)
class Scene:
    """A source model and a stream of images.

    Attributes:
        parts: Source model.
        sites: Class means of the source model.
        stream: Images.
        description: Facts that all figures share.
    """

    parts: SplitModel
    sites: Sites
    stream: FigureStream
    description: Description


def make_scene(options: FigureOptions, recipe: Recipe, resources: Resources, seed: int) -> Scene:
    """Gather the model and the images of a figure.

    Args:
        options: Complete options, as :meth:`FigureOptions.complete` returns them.
        recipe: Recipe with the data.
        resources: Models and data.
        seed: Seed of the choice and the order of the images.
    """
    assert options.checkpoint is not None
    parts, sites = find_model(options.checkpoint, recipe.data.set, resources)
    spec = make_spec(options, recipe, resources, seed)
    labels, names = _read_labels(spec, resources, sites.num_classes)
    usable = (labels < sites.num_classes).nonzero()[:, 0]
    if len(usable) == 0:
        raise ValueError(f"{spec.data} has no image of a class that {spec.checkpoint} knows")
    chosen = np.random.default_rng(seed).permutation(len(usable))[: options.limit]
    stream = FigureStream(resources, spec, labels, usable[torch.from_numpy(np.sort(chosen))])
    facts = {
        "data": spec.data,
        "checkpoint": spec.checkpoint,
        "weights": spec.weights,
        "batch_size": spec.batch_size,
        "seed": seed,
        "images": len(chosen),
    }
    return Scene(parts, sites, stream, facts | describe_images(spec.domains[0], spec.constants, names))


def find_model(checkpoint: str, data: str, resources: Resources) -> tuple[SplitModel, Sites]:
    """Return a source model whose head tells rotations apart, and its sites."""
    parts, sites = split(resources.source(checkpoint).model), resources.sites(checkpoint, data)
    if sites.views == 1 or parts.linear.out_features != sites.num_classes * sites.views:
        raise ValueError(
            f"{checkpoint} has {parts.linear.out_features} outputs for {sites.num_classes} classes; a figure needs a "
            "label-augmented model, whose head tells the rotations of each class apart"
        )
    return parts, sites


def make_spec(options: FigureOptions, recipe: Recipe, resources: Resources, seed: int) -> Spec:
    """Return the images of a figure as a spec. They are those of the recipe's runs, so they are corrupted once."""
    assert options.checkpoint is not None
    assert options.corruption is not None
    assert options.severity is not None
    data, domain = recipe.data, Domain(options.corruption, options.severity)
    return Spec(
        checkpoint=options.checkpoint,
        weights=resources.weights_with_sites(options.checkpoint, 1.0, frozenset()),
        data=data.set,
        content=resources.content(data.set, [domain]),
        domains=(domain,),
        method=STATISTICS,
        constants=OFFICIAL if data.set in CORRUPTED else data.constants,
        batch_size=recipe.stream.batch_size[0],
        limit=data.limit,
        seed=seed,
    )


def _read_labels(spec: Spec, resources: Resources, outputs: int) -> tuple[Tensor, list[str]]:
    """Labels as outputs of the model, and the names of the outputs; numbers where the set names no classes."""
    labels, partial = resources.labels(spec), resources.restriction(spec.data)
    if partial is not None:
        labels = partial.to_outputs(labels)
    classes = resources.base(PARTIAL.get(spec.data, spec.data), spec.domains[0]).classes or ()
    return labels, [classes[k] if k < len(classes) else str(k) for k in range(outputs)]


def describe_images(domain: Domain, constants: str, names: Sequence[str]) -> Description:
    """Return facts about the images: their corruption and the names of their classes."""
    generated = domain.corruption != CLEAN and constants != OFFICIAL
    table: Any = constants
    record = describe(domain.corruption, domain.severity, table) if generated else {}
    shared = ("corruption", "severity", "constants", "source")
    return {
        "domain": domain.label,
        "constants": constants if generated else OFFICIAL,
        "strength": {name: value for name, value in record.items() if name not in shared},
        "classes": list(names),
    }


def power_diagrams(parts: SplitModel, views: int) -> tuple[Diagram, Diagram]:
    """Return the power diagrams of a label-augmented head: of the upright view, and of all views."""
    linear = parts.linear
    weight, bias = linear.weight.detach().cpu(), None if linear.bias is None else linear.bias.detach().cpu()
    upright = Diagram.from_linear(weight[::views], None if bias is None else bias[::views])
    return upright, Diagram.from_linear(weight, bias, views=views)


def build_adapter(method: FigureMethod, parts: SplitModel, sites: Sites, **params: Any) -> Adapter:
    """Build the adapter of a method in a figure around a label-augmented model.

    It has no guard, whose looks at the source would be passes of other features.

    Args:
        method: The method.
        parts: Source model.
        sites: Class means of the source model.
        **params: Further parameters; those that the method does not have are left out.
    """
    entry = find_method(method.name)
    chosen = {name: value for name, value in params.items() if name in entry.parameters()} | dict(
        method.params
    )
    if "sites" in entry.needs:
        return create(method.name, parts, sites=sites, guard=False, **chosen)
    several = AggregatedViews(parts, sites.views, sites.views)
    return create(method.name, several if method.all_views else parts.upright(sites.views), **chosen)


def trace(adapter: Adapter, stream: Batches) -> Trace:
    """Run an adapter and keep the features that entered its head."""
    adapter.capture = "never"  # a recorded graph calls no hook when it is repeated
    seen: list[Tensor] = []
    hook = split(adapter.model).linear.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach())
    )
    features, predicted, labels = [], [], []
    for x, y in stream:
        predicted.append(adapter(x).argmax(1).cpu())
        features.append(seen[-1].unflatten(0, (-1, len(x))).cpu())
        labels.append(y)
        seen.clear()
    hook.remove()
    joined = torch.cat(features, 1).double().numpy()
    return Trace(joined, torch.cat(predicted).numpy(), torch.cat(labels).numpy())


def pack(tree: Tree) -> bytes:
    """Return named arrays as safetensors bytes; the same arrays give the same bytes.

    Example:
        >>> unpack(pack({"a": {"b": np.arange(3)}}))
        {'a': {'b': array([0, 1, 2])}}
    """
    from safetensors.numpy import save

    return save(_flatten(tree))


def unpack(payload: bytes) -> dict[str, Any]:
    """Return the arrays that :func:`pack` was given.

    Raises:
        ValueError: The bytes are not those of a figure.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        flat = load(payload)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"not the arrays of a figure: {error}") from error
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *path, last = name.split(_SEPARATOR)
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = array
    return tree


def _flatten(tree: Tree, prefix: str = "") -> dict[str, Array]:
    flat: dict[str, Array] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}{_SEPARATOR}")
        else:
            flat[prefix + name] = np.ascontiguousarray(value)
    return flat


def diagram_to_arrays(diagram: Diagram) -> dict[str, Array]:
    """Return the parts that a diagram has, as arrays."""
    parts = {"sites": diagram.sites, "weights": diagram.weights, "groups": diagram.groups}
    return {name: part.detach().cpu().numpy() for name, part in parts.items() if part is not None}


def diagram_from_arrays(arrays: Mapping[str, Array]) -> Diagram:
    """Return the diagram that :func:`diagram_to_arrays` was given, on the CPU."""
    return Diagram(**{name: torch.from_numpy(array) for name, array in arrays.items()})


@dataclass(frozen=True, eq=False)
class Trace:
    """Features and predictions of a method along a stream.

    Attributes:
        features: (v, n, d) features of the views at the moment of prediction.
        predicted: (n,) predicted classes.
        labels: (n,) true classes.
    """

    features: Floats
    predicted: Labels
    labels: Labels

    @property
    def wrong(self) -> Mask:
        """Mask (n,) of the mistakes."""
        mask: Mask = self.predicted != self.labels
        return mask

    @property
    def error(self) -> float:
        """Share of mistakes."""
        return float(self.wrong.mean())
