"""Supports: of each predicted class, the few items of the stream that the model was most certain of."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.adapters.objectives import entropy


class Supports(nn.Module):
    """The memory of T3A and of what was built on it: for each class a fixed number of slots.

    Args:
        classes: Number of classes, k.
        slots: How many items of each class stay, m.
        shape: Shape of one item.
        like: Tells the type and the device.

    Attributes:
        items: (k, m, *shape), the most certain first; zeros where a slot is empty.
        entropies: (k, m) of the predictions that put the items there; infinite where a slot is empty.

    Example:
        >>> memory = Supports(2, 3, (1,), torch.zeros(()))
        >>> memory.offer(torch.tensor([[5.0], [6.0]]), torch.tensor([[2.0, 0.0], [3.0, 0.0]]))
        >>> memory.items.squeeze(2).tolist(), memory.present.tolist()
        ([[6.0, 5.0, 0.0], [0.0, 0.0, 0.0]], [[True, True, False], [False, False, False]])
    """

    items: Tensor
    entropies: Tensor

    def __init__(self, classes: int, slots: int, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        if slots < 1:
            raise ValueError(f"supports must be at least 1 for each class, got {slots}")
        self.register_buffer("items", like.new_zeros(classes, slots, *shape))
        self.register_buffer("entropies", like.new_full((classes, slots), float("inf")))

    @property
    def present(self) -> Tensor:
        """Which slots hold an item, (k, m)."""
        return self.entropies.isfinite()

    @torch.no_grad()
    def offer(self, items: Tensor, logits: Tensor) -> None:
        """Put items (b, *shape) under the classes that logits (b, k) predict; of each the most certain stay.

        Of equally certain ones the older stays.
        """
        classes, slots = self.entropies.shape
        mine = logits.argmax(1) == torch.arange(classes, device=logits.device)[:, None]  # (k, b)
        offered = torch.where(mine, entropy(logits), float("inf"))
        best, order = torch.cat([self.entropies, offered], 1).sort(dim=1, stable=True)
        best, order = best[:, :slots], order[:, :slots]
        own = torch.arange(classes, device=order.device)[:, None] * slots
        index = torch.where(order < slots, own + order, order - slots + classes * slots)
        pool = torch.cat([self.items.flatten(0, 1), items])
        present = best.isfinite().view(classes, slots, *[1] * (items.ndim - 1))
        self.items.copy_(torch.where(present, pool[index], torch.zeros_like(self.items)))
        self.entropies.copy_(best)


@dataclass(frozen=True)
class Jury:
    """Supports that judge other features, through the projections of one or more members (TAST).

    Args:
        slots: Features of the supports, (k, m, d).
        present: Which slots hold one, (k, m).
        project: From features (n, d) to those of e members, (e, n, p). It must be affine: then the projection of the
            mean of the supports is the mean of their projections, at a fraction of the work.
        tau: Scale of the cosine.

    Example:
        >>> slots = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> jury = Jury(slots, torch.ones(2, 1, dtype=torch.bool), lambda z: z[None], tau=10.0)
        >>> jury.score(torch.tensor([[3.0, 0.0]])).tolist()
        [[[10.0, 0.0]]]
        >>> [round(p, 3) for p in jury.ask(torch.tensor([[3.0, 1.0]]), neighbours=1)[1][0].tolist()]
        [1.0, 0.0]
    """

    slots: Tensor
    present: Tensor
    project: Callable[[Tensor], Tensor]
    tau: float

    def score(self, z: Tensor) -> Tensor:
        """Logits (e, b, k) of features: tau times the cosine with the mean of each class; 0 if that has no support."""
        share = self.present.to(z.dtype) / self.present.sum(1, keepdim=True).clamp_min(1)
        means = (self.slots * share[..., None]).sum(1)
        centroids = self.project(means) * self.present.any(1)[:, None]
        logits: Tensor = self.tau * F.normalize(self.project(z), dim=-1) @ F.normalize(centroids, dim=-1).mT
        return logits

    @torch.no_grad()
    def ask(self, z: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """How each member judges the supports that are nearest to a sample, by the cosine of the features themselves.

        Args:
            z: Features (b, d).
            neighbours: How many are asked; all of them where there are fewer.

        Returns:
            Targets (e, b, k), the mean of the neighbours' one-hot labels; and the prediction (b, k), the mean of their
            soft labels over neighbours and members.
        """
        pool = self.slots.flatten(0, 1)
        likeness = F.normalize(z, dim=1) @ F.normalize(pool, dim=1).T
        likeness = likeness.masked_fill(~self.present.flatten(), float("-inf"))
        best, index = likeness.topk(min(neighbours, len(pool)), dim=1)
        found = best.isfinite()
        share = (found / found.sum(1, keepdim=True).clamp_min(1))[..., None].to(z.dtype)  # (b, n, 1)
        logits = self.score(pool[index].flatten(0, 1)).unflatten(1, index.shape)  # (e, b, n, k)
        hard = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(z.dtype)
        return (hard * share).sum(2), (logits.softmax(-1) * share).sum(2).mean(0)


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """KL(targets || softmax(logits)) of (e, b, k), summed over members, averaged over samples and classes alike.

    The mean over classes is what the code of TAST's authors has (torch's default); it divides the gradient by k.
    """
    size = logits.shape[-2] * logits.shape[-1]
    return F.kl_div(logits.log_softmax(-1), targets, reduction="sum") / size
