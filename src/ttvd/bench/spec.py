"""What a run is: everything that decides its rows, and nothing else. Its hash is its key in the store."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, Self

from ttvd.bench.run import Record

CLEAN = "none"
Selection = Literal["last", "oracle"]
Join = Literal["continual", "mixed"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Domain:
    """What happens to the images: a corruption at a severity, or nothing.

    Attributes:
        corruption: Name of a corruption, or ``"none"`` for the images as they are.
        severity: 1 (mild) to 5; 0 for clean images.

    Example:
        >>> Domain("gaussian_noise").label
        'gaussian noise 5'
    """

    corruption: str = CLEAN
    severity: int = 5

    def __post_init__(self) -> None:
        if self.corruption == CLEAN:
            object.__setattr__(self, "severity", 0)

    @property
    def label(self) -> str:
        """For tables."""
        return "clean" if self.corruption == CLEAN else f"{self.corruption.replace('_', ' ')} {self.severity}"


@dataclass(frozen=True)
class Spec:
    """One run. Two specs with the same key have the same rows on the same kind of machine.

    Attributes:
        checkpoint: Name of the source model.
        weights: Fingerprint of its weights; for a method that uses the sites that come with it, of those too.
        data: Name of the data set, as ``ttvd data list`` gives them.
        content: Fingerprint of its images and labels.
        domains: What happens to the images; several follow one another (or are mixed) in one stream.
        method: A registered method.
        revision: Revision of that method: it grows when its results change.
        parameters: All its parameters, defaults included, as JSON can hold them.
        constants: Table of the corruptions that are generated, ``"cifar"`` or ``"imagenet"``; ``"official"`` where
            the images come corrupted.
        stream: Name of the order, a function of ``ttvd.data.streams``.
        options: Of the order.
        join: How several domains make one stream.
        batch_size: Images in a batch.
        limit: Use only so many images of the set; None for all.
        views: Views that are aggregated around a method that knows nothing of views; 1 for none.
        sites: Share of the source data that the class means are estimated from.
        selection: ``"last"`` scores what the adapter says; ``"oracle"`` takes ``steps`` steps on each batch and
            scores the best by its labels, as TTAB defines it.
        steps: Of the oracle.
        episodic: Whether the adapter starts again at each batch.
        precision: ``"float32"``, or ``"bfloat16"`` for networks that compute in it (with channels last).
        seed: Of the order and the method. Generated corruptions do not depend on it, as a released set is one set.

    Example:
        >>> spec = Spec("digits-sla", "0" * 16, "digits", "1" * 16, (Domain("fog"),), "tent")
        >>> Spec.from_document(spec.document()) == spec, len(spec.key)
        (True, 16)
    """

    checkpoint: str
    weights: str
    data: str
    content: str
    domains: tuple[Domain, ...]
    method: str
    revision: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict)
    constants: str = "cifar"
    stream: str = "iid"
    options: Mapping[str, Any] = field(default_factory=dict)
    join: Join = "continual"
    batch_size: int = 64
    limit: int | None = None
    views: int = 1
    sites: float = 1.0
    selection: Selection = "last"
    steps: int = 1
    episodic: bool = False
    precision: Precision = "float32"
    seed: int = 0

    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        return json.loads(json.dumps(asdict(self), sort_keys=True, allow_nan=False))  # type: ignore[no-any-return]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The spec that :meth:`document` was taken from."""
        unknown = sorted(set(document) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(f"not a spec of this version: unknown entries {unknown}")
        domains = tuple(Domain(**domain) for domain in document["domains"])
        return cls(**{**document, "domains": domains})

    @property
    def key(self) -> str:
        """The first 16 digits of the SHA-256 of the document."""
        text = json.dumps(self.document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def domain_label(self) -> str:
        """For tables: the domain, or how several are joined."""
        return self.domains[0].label if len(self.domains) == 1 else f"{self.join} ({len(self.domains)})"


@dataclass(frozen=True)
class Facts:
    """What is kept of a run beside its rows; none of it decides the rows.

    Attributes:
        order: Hash of the stream's indices, as ``ttvd.data.streams.order_hash`` gives it.
        device: What it ran on, in words.
        threads: Threads of a CPU run.
        versions: Versions of ttvd, torch, numpy and Python; what has compiled the steps, where they are.
        started: When, in seconds since 1970.
        seconds: From the first batch to the last, data included.
        peak: Bytes above what the process held before the first batch, where the system tells.
        forwards: Forward passes for each image of the stream, as the method states them; those with which an oracle
            looks at its steps do not count.
        backwards: Backward passes, likewise.
    """

    order: str
    device: str
    threads: int
    versions: Mapping[str, str]
    started: float
    seconds: float
    peak: int | None
    forwards: float
    backwards: float


@dataclass(frozen=True)
class Run:
    """A finished run: what was asked, the rows, and the circumstances."""

    spec: Spec
    record: Record
    facts: Facts

    @cached_property
    def totals(self) -> dict[str, float]:
        """The metrics of the whole stream, as ``RunningMetrics.compute`` gives them."""
        return self.record.metrics().compute()


@dataclass(frozen=True)
class Member:
    """A run that a recipe asks for, and what for.

    Attributes:
        recipe: Name of the recipe.
        label: Line of its table.
        role: ``"test"``: its numbers are reported; ``"validation"``: they only choose parameters.
        spec: The run.
        varies: The parameters that the grid of this line tries, in the form of this run.
        condition: What distinguishes its column beside the domain, e.g. ``{"batch_size": 8}``; often empty.
    """

    recipe: str
    label: str
    role: Literal["test", "validation"]
    spec: Spec
    varies: Mapping[str, Any] = field(default_factory=dict)
    condition: Mapping[str, Any] = field(default_factory=dict)
