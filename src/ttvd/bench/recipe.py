"""The parts of a recipe, as values with their defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ttvd.bench.spec import Precision
from ttvd.data.corruptions import CORRUPTIONS, EXTRA

Rule = Literal["last", "grid-best", "validation", "oracle"]
RULES: tuple[Rule, ...] = ("last", "grid-best", "validation", "oracle")
NEEDS = ("rotation head", "instance-aware norm", "sites")


@dataclass(frozen=True)
class DataPart:
    """``[data]``: which images, and what happens to them.

    Attributes:
        set: Name of the data set.
        corruptions: Their names; ``"all"`` are the fifteen of the usual tables, ``"extra"`` the other four.
        severity: Of the corruptions.
        constants: Table of generated corruptions, ``"cifar"`` or ``"imagenet"``.
        limit: Use only so many images.
        validation: Corruptions that choose parameters under the rule ``validation``.
    """

    set: str
    corruptions: tuple[str, ...] = CORRUPTIONS
    severity: int = 5
    constants: str = "cifar"
    limit: int | None = None
    validation: tuple[str, ...] = EXTRA


@dataclass(frozen=True)
class StreamPart:
    """``[stream]``: how the images arrive. A list of values makes a column of the table for each.

    Attributes:
        order: Name of the order.
        join: ``"reset"``: each corruption is a run of its own; ``"continual"`` and ``"mixed"``: all in one run. Only
            mixed batches have images of several corruptions.
        batch_size: Images in a batch.
        options: What is left of the table: options of the order, such as ``alpha``.
    """

    order: tuple[str, ...] = ("iid",)
    join: str = "reset"
    batch_size: tuple[int, ...] = (64,)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class OraclePart:
    """``[oracle]``: for the rule of that name.

    Attributes:
        steps: For each batch.
        episodic: Whether each batch starts afresh.
        limit: Use only so many images.
        seeds: Which of a line's seeds; all of them unless given.
    """

    steps: int = 10
    episodic: bool = True
    limit: int | None = None
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MethodPart:
    """``[[methods]]``: one line of the table, or several with the same settings.

    Attributes:
        name: A registered method, a list of them, or ``"*"`` for all.
        label: How the table calls it; the name unless given.
        checkpoint: The source model; chosen by what the method needs unless given.
        views: Views that are aggregated around a method that knows nothing of views.
        params: Fixed parameters.
        grid: Values to try for each parameter.
        rules: Rules of selection for this line; those of the recipe unless given.
        seeds: Likewise.
        episodic: Whether it starts again at each batch.
    """

    name: tuple[str, ...]
    label: str | None = None
    checkpoint: str | None = None
    views: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rules: tuple[Rule, ...] | None = None
    seeds: tuple[int, ...] | None = None
    episodic: bool = False


@dataclass(frozen=True)
class FigurePart:
    """``[[figures]]``: a picture that needs a model. Its kind, and what this kind takes."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """What a table is made of.

    Attributes:
        name: The name of the file.
        title: Of the table.
        text: The file as it was read.
        data: Which images.
        methods: The lines.
        note: A paragraph for the report.
        rules: Rules of selection; ``last`` where nothing is searched, unless given.
        reference: Label of the line that the others are compared with; the last one unless given.
        seeds: Of order and method.
        stream: How the images arrive.
        checkpoints: Source model by need: ``plain``, and any of ``"rotation head"``, ``"instance-aware norm"``,
            ``sites``.
        params: Fixed parameters for all methods that have them.
        grid: Values to try, likewise.
        sites: Shares of the source data that class means are estimated from.
        precision: ``"float32"``, or ``"bfloat16"``: faster on GPUs, equal within the noise of a seed.
        oracle: For the rule of that name.
        figures: Pictures that need a model.
    """

    name: str
    title: str
    text: str
    data: DataPart
    methods: tuple[MethodPart, ...]
    note: str = ""
    rules: tuple[Rule, ...] | None = None
    reference: str | None = None
    seeds: tuple[int, ...] = (0,)
    stream: StreamPart = StreamPart()
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sites: tuple[float, ...] = (1.0,)
    precision: Precision = "float32"
    oracle: OraclePart = OraclePart()
    figures: tuple[FigurePart, ...] = ()
