"""Supports: of each predicted class, the few items of the stream that the model was most certain of."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ttvd.engine.transaction import LoggedBuffers
from ttvd.methods.shared.losses import entropy

EMPTY = 8192.0
"""The entropy of an empty slot: above all others, and a number of every floating-point type."""
_AT_ONCE = 512  # samples that are compared with one another


class Places(NamedTuple):
    """Where the samples of a batch go.

    Attributes:
        classes: (b,) under which they are put.
        slots: (b,) which they get there, if they are more certain than what is in it.
        source: (b,) which sample gets that slot: itself, or another one of its class where there are more than slots.
        enters: (b,) whether that sample does get it.
    """

    classes: Tensor
    slots: Tensor
    source: Tensor
    enters: Tensor

    @property
    def once(self) -> Tensor:
        """(b,) samples that enter, each of them once."""
        return self.enters & (self.source == torch.arange(len(self.source), device=self.source.device))


class Supports(LoggedBuffers):
    """The memory of T3A and of what was built on it: for each class a fixed number of slots.

    What a batch costs does not depend on how much is stored: only the slots that change are written.

    Args:
        classes: Number of classes, k.
        slots: Number of items of each class that stay, m.
        shape: Shape of one item.
        like: Tells the type and the device.

    Attributes:
        items: (k, m, *shape), in no order; zeros where a slot is empty, which the last ones of a class are.
        entropies: (k, m) of the predictions that put the items there; ``EMPTY`` where a slot is empty.
        ages: (k, m) how many items were offered before the one that is there.
        seen: Number of items that were offered.

    Example:
        >>> memory = Supports(2, 3, (1,), torch.zeros(()))
        >>> memory.offer(torch.tensor([[5.0], [6.0]]), torch.tensor([[2.0, 0.0], [3.0, 0.0]]))
        >>> memory.items.squeeze(2).tolist(), memory.present.tolist()
        ([[6.0, 5.0, 0.0], [0.0, 0.0, 0.0]], [[True, True, False], [False, False, False]])
    """

    logged: ClassVar[tuple[str, ...]] = ("items", "entropies", "ages")
    items: Tensor
    entropies: Tensor
    ages: Tensor
    seen: Tensor

    def __init__(self, classes: int, slots: int, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        if slots < 1:
            raise ValueError(f"supports must be at least 1 for each class, got {slots}")
        self.register_buffer("items", like.new_zeros(classes, slots, *shape))
        self.register_buffer("entropies", like.new_full((classes, slots), EMPTY))
        self.register_buffer("ages", like.new_zeros(classes, slots, dtype=torch.int64))
        self.register_buffer("seen", like.new_zeros((), dtype=torch.int64))

    @property
    def present(self) -> Tensor:
        """Which slots hold an item, (k, m)."""
        return self.entropies < EMPTY

    @torch.no_grad()
    def offer(self, items: Tensor, logits: Tensor) -> None:
        """Put items (b, *shape) under the classes that logits (b, k) predict; of each the most certain stay.

        Of equally certain ones the older stays. What has no entropy, as of logits that are not finite, is refused.
        """
        for some, predicted in zip(items.split(_AT_ONCE), logits.split(_AT_ONCE), strict=True):
            values = entropy(predicted).to(self.entropies.dtype)
            values = torch.where(values.isfinite(), values, EMPTY)
            places = self._find_places(predicted.argmax(1), values)
            self._write(places, some.to(self.items.dtype), values)

    def _find_places(self, classes: Tensor, values: Tensor) -> Places:
        """The most certain of a class competes with the worst that is stored of it, the next with the next."""
        slots = self.entropies.shape[1]
        rank = _rank_in_class(classes, values)
        place = rank.clamp_max(slots - 1)
        source = torch.arange(len(classes), device=classes.device)
        if len(classes) > slots:  # those that find no slot repeat what the last one that finds one does
            source = ((classes == classes[:, None]) & (rank == place[:, None])).int().argmax(1)
        # Of those that are equally bad the newest is the worst; of empty slots the first.
        newest = self.ages[classes].argsort(dim=1, descending=True, stable=True)
        known, order = self.entropies[classes].gather(1, newest).sort(dim=1, descending=True, stable=True)
        worst = newest.gather(1, order).gather(1, place[:, None])[:, 0]
        return Places(classes, worst, source, values[source] < known.gather(1, place[:, None])[:, 0])

    def _write(self, places: Places, items: Tensor, values: Tensor) -> None:
        """Exchange what is in the slots of the samples that enter."""
        where = places.classes, places.slots
        ages = self.seen + torch.arange(len(items), device=items.device)
        for stored, offered in ((self.items, items), (self.entropies, values), (self.ages, ages)):
            enters = places.enters.view(-1, *[1] * (offered.ndim - 1))
            old = self.remember(stored, *where)
            stored.index_put_(where, torch.where(enters, offered[places.source], old))
        self.seen += len(items) * (values < EMPTY).any()


class FeatureSupports(Supports):
    """Supports that are features, and what is asked of them most often, kept up to date.

    Args:
        classes: As in :class:`Supports`.
        slots: As in :class:`Supports`.
        dim: Dimension of the features, d.
        like: As in :class:`Supports`.

    Attributes:
        sums: (k, d) sums of the features of each class, in float64: after millions of exchanges they are still exact
            to more digits than the features have.
        lengths: (k, m) of the features.

    Example:
        >>> memory = FeatureSupports(2, 1, 1, torch.zeros(()))
        >>> memory.offer(torch.tensor([[5.0], [6.0]]), torch.tensor([[2.0, 0.0], [3.0, 0.0]]))
        >>> memory.sums.tolist(), memory.means.tolist()
        ([[6.0], [0.0]], [[6.0], [0.0]])
    """

    logged = (*Supports.logged, "sums", "lengths")
    sums: Tensor
    lengths: Tensor

    def __init__(self, classes: int, slots: int, dim: int, like: Tensor) -> None:
        super().__init__(classes, slots, (dim,), like)
        self.register_buffer("sums", like.new_zeros(classes, dim, dtype=torch.float64))
        self.register_buffer("lengths", like.new_zeros(classes, slots))

    @property
    def means(self) -> Tensor:
        """(k, d) means of the features of each class; zeros where it has none."""
        counts = self.present.sum(1, keepdim=True).clamp_min(1)
        return (self.sums / counts).to(self.items.dtype)

    def add(self, z: Tensor, classes: Tensor) -> None:
        """Let features (b, d) enter the sums of their classes (b,), and no slot."""
        self.remember(self.sums, classes)
        self.sums.index_add_(0, classes, z.to(self.sums.dtype))

    def _write(self, places: Places, items: Tensor, values: Tensor) -> None:
        where = places.classes, places.slots
        gone = self.items[where].to(self.sums.dtype)
        super()._write(places, items, values)
        gain = torch.where(places.once[:, None], items.to(self.sums.dtype) - gone, 0.0)
        self.add(gain, places.classes)
        self.remember(self.lengths, *where)
        self.lengths.index_put_(where, torch.linalg.vector_norm(self.items[where], dim=1))


def _rank_in_class(classes: Tensor, values: Tensor) -> Tensor:
    """How many of the same class come before each sample (b,): those below it, and of its equals the earlier ones."""
    order = torch.arange(len(values), device=values.device)
    same, tied = classes == classes[:, None], (values == values[:, None]) & (order < order[:, None])
    return (same & ((values < values[:, None]) | tied)).sum(1)
