"""Where the numbers of a figure come from: a label-augmented source model, and a stream of corrupted images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttvd.bench.figures.values import Description, Trace
from ttvd.bench.recipe import Recipe
from ttvd.bench.resources import CORRUPTED, OFFICIAL, PARTIAL, Resources
from ttvd.bench.spec import CLEAN, Domain, Spec
from ttvd.data.checks import check_choice, check_severity
from ttvd.data.corruptions import CORRUPTIONS, EXTRA, describe
from ttvd.data.streams import batches, iid
from ttvd.geometry import Diagram
from ttvd.methods import Adapter, find_method
from ttvd.nn.split import SplitModel, split
from ttvd.zoo.sites import Sites

Batches = Iterable[tuple[Tensor, Tensor]]
"""Images and labels; figures may go through them more than once."""

GAMMA = -0.8
"""The paper's exponent of the influence."""


@dataclass(frozen=True)
class Options:
    """What every figure takes.

    Attributes:
        checkpoint: The source model; the recipe's model for methods that need sites, unless given.
        corruption: Of the images; the first of the recipe unless given.
        severity: Of the corruption; the recipe's unless given.
        limit: Use only so many images, drawn at random.
    """

    checkpoint: str | None = None
    corruption: str | None = None
    severity: int | None = None
    limit: int = 2048

    def __post_init__(self) -> None:
        if self.corruption is not None:
            check_choice(self.corruption, (*CORRUPTIONS, *EXTRA, CLEAN), "corruption")
        if self.severity is not None:
            check_severity(self.severity)
        check_count("limit", self.limit)

    def complete(self, recipe: Recipe) -> Options:
        """With what the recipe says in the place of what is not given."""
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
class Stream:
    """Batches in a seeded order, which can be gone through again.

    Attributes:
        resources: Where images come from.
        spec: Which images.
        labels: (n,) of all images of the spec, as outputs of the model.
        rows: The places of those that are used.
    """

    resources: Resources
    spec: Spec
    labels: Tensor
    rows: Tensor

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches(iid(len(self.rows), self.spec.seed), self.spec.batch_size):
            rows = self.rows[torch.from_numpy(index)]
            yield self.resources.batch(self.spec, self.spec.domains[0], rows), self.labels[rows]

    def clean(self) -> Stream | None:
        """The same images in the same order as they were before the corruption; None where the set comes corrupted."""
        if self.spec.data in CORRUPTED:
            return None
        return replace(self, spec=replace(self.spec, domains=(Domain(),)))

    def enrich(self, classes: Sequence[int], count: int) -> Stream:
        """With so many images of each of these classes, where the set has them and the stream has fewer."""
        more = [(self.labels == label).nonzero()[:, 0] for label in classes]
        have = [self.rows[self.labels[self.rows] == label] for label in classes]
        extra = [
            rows[: max(0, count - len(own))]
            for rows, own in zip(map(_without, more, have), have, strict=True)
        ]
        return replace(self, rows=torch.cat([self.rows, *extra]))


def _without(rows: Tensor, used: Tensor) -> Tensor:
    return rows[~torch.isin(rows, used)]


@dataclass(frozen=True, eq=False)
class Scene:
    """What a figure is made from.

    Attributes:
        parts: The source model.
        sites: Its class means.
        stream: The images.
        description: The facts that all figures share.
    """

    parts: SplitModel
    sites: Sites
    stream: Stream
    description: Description


def set_scene(options: Options, recipe: Recipe, resources: Resources, seed: int) -> Scene:
    """Gather what a figure needs.

    Args:
        options: Complete, as :meth:`Options.complete` makes them.
        recipe: Which data.
        resources: Where model and data are found.
        seed: Of the choice and the order of the images.
    """
    assert options.checkpoint is not None
    parts, sites = find_model(options.checkpoint, recipe.data.set, resources)
    spec = make_spec(options, recipe, resources, seed)
    labels, names = _read_labels(spec, resources, sites.num_classes)
    usable = (labels < sites.num_classes).nonzero()[:, 0]
    if len(usable) == 0:
        raise ValueError(f"{spec.data} has no image of a class that {spec.checkpoint} knows")
    chosen = np.random.default_rng(seed).permutation(len(usable))[: options.limit]
    stream = Stream(resources, spec, labels, usable[torch.from_numpy(np.sort(chosen))])
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
    """A source model whose head tells rotations apart, and its sites."""
    parts = split(resources.source(checkpoint).model)
    sites: Sites = resources.requirements(find_method("civd"), checkpoint, data, 1.0)["sites"]
    if sites.views == 1 or parts.linear.out_features != sites.num_classes * sites.views:
        raise ValueError(
            f"{checkpoint} has {parts.linear.out_features} outputs for {sites.num_classes} classes; a figure needs a "
            "label-augmented model, whose head tells the rotations of each class apart"
        )
    return parts, sites


def make_spec(options: Options, recipe: Recipe, resources: Resources, seed: int) -> Spec:
    """Which images a figure uses: those of the recipe's runs, so that they are not corrupted once more."""
    assert options.checkpoint is not None
    assert options.corruption is not None
    assert options.severity is not None
    data, domain = recipe.data, Domain(options.corruption, options.severity)
    return Spec(
        checkpoint=options.checkpoint,
        weights=resources.weights(options.checkpoint, find_method("civd"), 1.0, {}),
        data=data.set,
        content=resources.content(data.set, [domain]),
        domains=(domain,),
        method="bn",
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
    """What is known of the images: what happened to them, and what their classes are called."""
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
    """The power diagrams of a label-augmented head: of the upright view, and of all views."""
    linear = parts.linear
    weight, bias = linear.weight.detach().cpu(), None if linear.bias is None else linear.bias.detach().cpu()
    upright = Diagram.from_linear(weight[::views], None if bias is None else bias[::views])
    return upright, Diagram.from_linear(weight, bias, views=views)


def trace(adapter: Adapter, stream: Batches) -> Trace:
    """Run an adapter and keep the features that entered its head."""
    adapter.capture = "never"  # what is recorded as a graph calls no hook when it is repeated
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
