"""Where batch norms take their statistics from at test time, and which gradient they have."""

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
"""The words of :meth:`Statistics.parse`, and what the numbers behind them are."""

_FLAGS = ("renorm", "anchored")


@dataclass(frozen=True)
class Statistics:
    """Where a batch-norm layer takes its mean and variance from at test time.

    mean = p * source + (1 - p) * batch, and the same for the variance (the biased one, so that p = 0 is exactly
    the batch norm of training). Group, layer and instance norm have no such choice and are left as they are.

    Attributes:
        prior: p, between 0 (the batch alone) and 1 (the source alone).
        count: If given, p = count / (count + batch size) instead: a pseudo-count of source samples (Schneider et
            al. 2020), which trusts a small batch less. The batch is what is forwarded: views count.
        momentum: If given, the statistics are an average that follows the stream:
            average <- (1 - momentum) * average + momentum * batch, starting at the source; ``prior`` is not used.
        memory: If given, the statistics are tracked: an average that follows the stream by evidence. It starts at
            the source, worth ``count`` samples; a batch of b enters with the weight b / (b + n), where n is what the
            average is worth, ``count`` and all samples since, but never more than ``memory``. Until that many all
            samples count alike, then the older ones less and less. Averaged are the means and the variances of
            batches; by how much the means of batches differ is not added to the variance. Views count here too: a
            method that forwards four views of an image wants four times the numbers.
        renorm: Values as these statistics say, but the gradient of batch norm on the batch (batch renormalisation,
            Ioffe 2017). A loss cannot be lowered by moving or scaling a feature of all samples under batch norm; it
            can with any share of other statistics, and on small batches losses do so until they collapse.
        anchored: Begin with anchored norms (``ttvd.nn.anchors``): the source are clean images as they come in use,
            and not as they were augmented in training. It takes sites that know the anchors.

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
        """Those of the batch at hand."""
        return cls(prior=0.0)

    @classmethod
    def source(cls) -> "Statistics":
        """Those stored at training."""
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
        """Whether they are an average that follows the stream, and so a state."""
        return self.momentum is not None or self.memory is not None

    def source_share(self, batch: int) -> float:
        """p for a batch of this size; where an average follows the stream, for the first one."""
        if self.momentum is not None:
            return 1.0 - self.momentum
        return self.prior if self.count is None else self.count / (self.count + batch)
