"""Policies for the statistics of batch norms at test time."""

import math
from dataclasses import dataclass
from typing import Any

_KINDS = {
    "batch": (),
    "source": (),
    "prior": ("prior",),
    "count": ("count",),
    "momentum": ("momentum",),
    "track": ("count", "memory"),
}
"""The kinds of :meth:`Statistics.parse`, and the attributes that their numbers set."""

_FLAGS = ("renorm", "anchored")


@dataclass(frozen=True)
class Statistics:
    """Where a batch-norm layer takes its mean and variance from at test time.

    mean = p * source + (1 - p) * batch, and likewise for the variance. The variance of the batch is the biased one, so
    p = 0 is exactly the batch norm of training. Group, layer and instance norm have no such choice and stay as they
    are.

    Attributes:
        prior: p, between 0 (the batch alone) and 1 (the source alone).
        count: If given, p = count / (count + batch size) instead: a pseudo-count of source samples (Schneider et
            al. 2020), which trusts a small batch less. The batch size is that of the layer's input, views included.
        momentum: If given, the statistics are an average that follows the stream:
            average <- (1 - momentum) * average + momentum * batch, starting at the source; ``prior`` is not used.
        memory: If given, the statistics are tracked: an average that follows the stream and weighs samples equally
            until ``memory`` of them are in it. The average starts at the source and counts as n = ``count`` samples. A
            batch of b samples enters with the weight b / (b + n), and n grows by b, up to ``memory``; from there on
            older samples fade. Means and variances of batches are averaged; the variance between the means of batches
            is not added. Views count as samples: a method that forwards four views of an image needs four times the
            numbers.
        renorm: Normalise by these statistics, but use the gradient of batch norm on the batch (batch renormalisation,
            Ioffe 2017). With batch norm, a loss cannot be lowered by moving or scaling a feature of all samples. With
            other statistics it can, and on small batches losses do so until the model collapses.
        anchored: Start from anchored norms (``ttvd.nn.anchors``): their source statistics are those of clean images
            instead of training images with augmentation. The sites must hold the anchors.

    Example:
        >>> Statistics.batch().source_share(64), Statistics(count=16).source_share(48)
        (0.0, 0.25)
        >>> tracked = Statistics(count=64, memory=1024, renorm=True)
    """

    prior: float = 0.0
    count: float | None = None
    momentum: float | None = None
    memory: float | None = None
    renorm: bool = False
    anchored: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.prior <= 1.0:
            raise ValueError(
                f"prior is the share of the source statistics, between 0 and 1; got {self.prior}"
            )
        if self.count is not None and not 0.0 <= self.count < math.inf:
            raise ValueError(f"count is a number of source samples, at least 0; got {self.count}")
        if self.momentum is not None and not 0.0 < self.momentum <= 1.0:
            raise ValueError(f"momentum must lie in (0, 1]; got {self.momentum}")
        if self.count is not None and self.momentum is not None:
            raise ValueError("give either a pseudo-count or a momentum, not both")
        if self.memory is not None and (self.count is None or not self.memory >= self.count):
            raise ValueError(
                "memory is the most samples that tracked statistics are worth, at least the count that they start "
                f"with; got memory={self.memory}, count={self.count}"
            )

    @classmethod
    def batch(cls) -> "Statistics":
        """The statistics of the present batch."""
        return cls(prior=0.0)

    @classmethod
    def source(cls) -> "Statistics":
        """The statistics stored at training."""
        return cls(prior=1.0)

    @classmethod
    def parse(cls, text: str) -> "Statistics":
        """From ``batch``, ``source``, ``prior:P``, ``count:N``, ``momentum:M`` or ``track:COUNT:MEMORY``.

        ``:renorm``, ``:anchored`` or both in this order may follow each of them. ``str`` gives such a text back.

        Example:
            >>> Statistics.parse("count:16")
            Statistics(prior=0.0, count=16.0, momentum=None, memory=None, renorm=False, anchored=False)
            >>> str(Statistics.parse("track:64:inf:renorm"))
            'track:64:inf:renorm'
        """
        kind, *words = text.split(":")
        flags = {}
        for name in reversed(_FLAGS):
            flags[name] = words[-1:] == [name]
            words = words[:-1] if flags[name] else words
        try:
            numbers = dict(zip(_KINDS[kind], map(float, words), strict=True))
        except (KeyError, ValueError) as error:
            raise ValueError(
                "statistics are batch, source, prior:P, count:N, momentum:M or track:COUNT:MEMORY, with or without "
                f":renorm, :anchored or both in this order behind; got {text!r}"
            ) from error
        known: dict[str, Any] = {"prior": 1.0} if kind == "source" else numbers
        return cls(**known, **flags)

    def __str__(self) -> str:
        if self.momentum is not None:
            kind = "momentum"
        elif self.count is not None:
            kind = "count" if self.memory is None else "track"
        else:
            kind = {0.0: "batch", 1.0: "source"}.get(self.prior, "prior")
        numbers = [repr(float(getattr(self, name))).removesuffix(".0") for name in _KINDS[kind]]
        return ":".join([kind, *numbers, *(name for name in _FLAGS if getattr(self, name))])

    @property
    def follows(self) -> bool:
        """Whether the statistics are an average that follows the stream, and so belong to the state."""
        return self.momentum is not None or self.memory is not None

    def source_share(self, batch: int) -> float:
        """p for a batch of this size; for the first batch where an average follows the stream."""
        if self.momentum is not None:
            return 1.0 - self.momentum
        return self.prior if self.count is None else self.count / (self.count + batch)
