"""What a run is: everything that decides its rows. The hash of a :class:`Spec` is the key of the run in a store."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from ttvd.bench.run import Record
from ttvd.data import streams
from ttvd.data.streams import Order

CLEAN = "none"
"""The name of the domain whose images are not corrupted."""
OFFICIAL = "official"
"""The entry ``Spec.constants`` of images that come corrupted."""
Selection = Literal["last", "oracle"]
Join = Literal["continual", "mixed", "onset", "recurring", "rare"]
Precision = Literal["float32", "bfloat16"]
Role = Literal["test", "validation", "fresh"]

ORDERS: Mapping[str, Callable[..., Order]] = {
    function.__name__: function
    for function in (
        streams.iid,
        streams.class_sorted,
        streams.dirichlet,
        streams.dirichlet_slots,
        streams.imbalanced,
        streams.label_shift,
    )
}
"""The orders of a stream by name; the keyword arguments of each function are its options."""

JOINS: Mapping[Join, Mapping[str, Any]] = {
    "continual": {},
    "mixed": {},
    "onset": {"lengths": "8/10/10"},
    "recurring": {"rounds": 10},
    "rare": {"every": 10},
}
"""How domains form one stream: the options of each way, with their defaults."""
WITH_CLEAN: tuple[Join, ...] = ("onset", "rare")
"""Joins of clean images (domain 0) and one corruption (domain 1)."""
FRESH: Mapping[str, Any] = {"part": "shifted"}
"""Further options of a run that shows the shifted part of an onset alone, to a fresh adapter."""


@dataclass(frozen=True)
class Domain:
    """A corruption at a severity, or clean images.

    Attributes:
        corruption: Name of a corruption, or ``"none"`` for clean images.
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
        """The name of the domain in tables."""
        return "clean" if self.corruption == CLEAN else f"{self.corruption.replace('_', ' ')} {self.severity}"


@dataclass(frozen=True)
class Spec:
    """One run. Two specs with the same key have the same rows on the same kind of machine.

    Attributes:
        checkpoint: Name of the source model.
        weights: Fingerprint of the model's weights. For a method that uses sites, the fingerprint of the sites follows
            after a plus sign.
        data: Name of the data set, as ``ttvd data list`` gives it.
        content: Fingerprint of the images and labels.
        domains: Corruptions of the images. Several domains form one stream.
        method: Name of a registered method.
        revision: Revision of the method. It grows when the method's results change.
        parameters: All parameters of the method, defaults included, as JSON values.
        constants: Table of the generated corruptions, ``"cifar"`` or ``"imagenet"``; ``"official"`` where the images
            come corrupted.
        stream: Name of the order of the images, one of ``ORDERS``.
        options: Options of the order and of the join.
        join: How several domains form one stream, one of ``JOINS``.
        batch_size: Number of images in a batch.
        limit: Number of images that are used; None for all.
        views: Number of views that are aggregated around a method that handles no views itself; 1 for none.
        sites: Fraction of the source data from which class means are estimated.
        selection: ``"last"`` scores the adapter's output. ``"oracle"`` takes ``steps`` steps on each batch and scores
            the best one by its labels, as TTAB defines it.
        steps: Number of steps of the oracle.
        episodic: Whether the adapter is reset before each batch.
        precision: ``"float32"``, or ``"bfloat16"`` for networks that compute in bfloat16 with channels last.
        seed: Seed of the order and of the method. Generated corruptions do not depend on it.

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
        """Return the spec as plain JSON values."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        # asdict(self) would copy all parameters too.
        values["domains"] = [asdict(domain) for domain in self.domains]
        return json.loads(json.dumps(values, sort_keys=True, allow_nan=False))  # type: ignore[no-any-return]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the spec that :meth:`document` was called on."""
        unknown = sorted(set(document) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(f"not a spec of this version: unknown entries {unknown}")
        domains = tuple(Domain(**domain) for domain in document["domains"])
        return cls(**{**document, "domains": domains})

    @cached_property
    def key(self) -> str:
        """The first 16 digits of the SHA-256 of the document."""
        text = json.dumps(self.document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def domain_label(self) -> str:
        """The name of the domain in tables; for several domains, how they are joined."""
        main = self.main_domain
        return f"{self.join} ({len(self.domains)})" if main is None else main.label

    @property
    def main_domain(self) -> Domain | None:
        """The domain that names the run: the only one, or the one beside clean images; None for several."""
        return self.domains[-1] if len(self.domains) == 1 or self.join in WITH_CLEAN else None


def is_own_code(method: str) -> bool:
    """Return whether the name of a method is ``package.module:Class`` of a module outside of ttvd.

    Example:
        >>> is_own_code("mymethods:Colder"), is_own_code("ttvd.methods.tent:Tent"), is_own_code("tent")
        (True, False, False)
    """
    return ":" in method and not method.startswith("ttvd.")


@dataclass(frozen=True)
class Facts:
    """The circumstances of a run. They do not decide its rows.

    Attributes:
        order: Hash of the stream's indices, as ``ttvd.data.streams.order_hash`` gives it.
        device: Name of the device.
        threads: Number of threads of a run on a CPU.
        versions: Versions of ttvd, torch, numpy and Python; with compiled steps also the compiler.
        started: Start of the run in seconds since 1970.
        seconds: Time from the first batch to the last, loading of data included.
        peak: Peak memory in bytes above what the process held before the first batch; None where it is unknown.
        forwards: Number of forward passes for each image, as the method declares it. The forward passes with which an
            oracle judges its steps do not count.
        backwards: Number of backward passes for each image.
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
    """A finished run: its spec, its rows and its circumstances."""

    spec: Spec
    record: Record
    facts: Facts

    @cached_property
    def totals(self) -> dict[str, float]:
        """The metrics of the whole stream, as ``RunningMetrics.compute`` gives them."""
        return self.record.metrics().compute()


@dataclass(frozen=True)
class Member:
    """A run that a recipe asks for, and its place in the table.

    Attributes:
        recipe: Name of the recipe.
        label: Label of the line in the table.
        role: ``"test"`` for runs that are reported, ``"validation"`` for runs that only choose parameters,
            ``"fresh"`` for fresh starts with which runs of an onset are compared.
        spec: The run.
        varies: Values of the parameters that the grid of this line varies.
        condition: What distinguishes the column beside the domain, e.g. ``{"batch_size": 8}``; often empty.
    """

    recipe: str
    label: str
    role: Role
    spec: Spec
    varies: Mapping[str, Any] = field(default_factory=dict)
    condition: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerConfig:
    """Where a worker finds its files and on what device it computes. Nothing of this decides the rows of a run.

    Attributes:
        data: Folder of the data sets; the digits need none.
        checkpoints: Folder of the source models; the package's own unless given.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        threads: Number of threads of a run on a CPU. The last digits of results can depend on it.
        compiled: Whether ``torch.compile`` fuses the steps. The last digits of results can depend on it too.
        allow_code: Whether ``package.module:Name`` in a recipe may be imported and run. Unless given, such a recipe is
            refused.
    """

    data: Path | None = None
    checkpoints: Path | None = None
    device: str = "cpu"
    threads: int = 1
    compiled: bool = False
    allow_code: bool = False
