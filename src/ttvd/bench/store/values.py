"""What the store gives back beside runs and members."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttvd.bench.spec import Facts, Spec


@dataclass(frozen=True)
class Summary:
    """A finished run without its rows.

    Attributes:
        key: Of the spec.
        spec: The run.
        metrics: Error, nll, brier, ece, batch_ece and n of the whole stream, made of the rows.
        facts: The circumstances.
        batches: Number of rows.
        kept: Share of all samples that were used to adapt.
    """

    key: str
    spec: Spec
    metrics: dict[str, float]
    facts: Facts
    batches: int
    kept: float


@dataclass(frozen=True)
class Failure:
    """A run that did not end well.

    Attributes:
        key: Of the spec.
        spec: The run.
        text: The traceback, or what is known of a worker that vanished.
        when: In seconds since 1970; 0 where it is not known.
    """

    key: str
    spec: Spec
    text: str
    when: float


@dataclass(frozen=True)
class Figure:
    """What a figure is drawn from.

    Attributes:
        name: Of the figure.
        recipe: Whose page it is for.
        description: What it shows, as JSON can hold it.
        payload: The arrays, as safetensors bytes.
    """

    name: str
    recipe: str
    description: Mapping[str, Any]
    payload: bytes
