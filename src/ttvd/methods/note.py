"""NOTE: instance-aware norms and a memory that is balanced by the predictions."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.methods.gradient import Step
from ttvd.methods.registry import register
from ttvd.methods.shared.memory import Clock, Memory, MemoryAdapter
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.norms import Statistics, Temporarily
from ttvd.nn.split import count_classes

Piece = tuple[int, int, int]
"""First and last row of a part of a batch, and how many images to learn from after it."""


class BalancedReservoir(Memory):
    """Prediction-balanced reservoir sampling (PBRS).

    A full memory takes a sample of a class that is not among its largest in place of a random image of those; a sample
    of one of the largest replaces a random image of its own class with probability (images of the class in the
    memory) / (samples of the class ever seen).

    Args:
        capacity: Number of images that the memory holds.
        classes: Number of classes.
        like: As in :class:`~ttvd.methods.shared.memory.Memory`.
    """

    seen: Tensor

    def __init__(self, capacity: int, classes: int, like: Tensor) -> None:
        super().__init__(capacity, like)
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.int64, device=like.device))

    def place(self, label: Tensor, *facts: Tensor) -> Tensor:
        """Where a sample goes; ``facts`` are 1 + capacity uniform numbers."""
        chance, lots = facts[0][0], facts[0][1:]
        mine = torch.arange(len(self.seen), device=label.device) == label
        self.seen += mine
        own, sizes, free = self.labels == label, self.class_sizes(), self.first_free()
        largest = sizes == sizes.max()
        # The largest classes are equally large: a random image of a random one is a random one of all their images.
        among_largest = (own & largest).any()
        rivals = torch.where(among_largest, own, largest)
        victim = torch.where(rivals, lots, -1.0).argmax()
        enters = ~among_largest | (chance * (self.seen * mine).sum() <= own.sum())
        chosen = (torch.arange(self.capacity, device=label.device) == victim) & enters
        return torch.where(free.any(), free, chosen)


@register(
    "note",
    summary="Instance-aware norms; learns every 64 samples from a memory balanced by predictions.",
    paper="Gong et al., NeurIPS 2022",
    updates="norm affine and statistics",
    forwards=2,
    backwards=1,
    needs=frozenset({"instance-aware norm"}),
)
class NOTE(MemoryAdapter):
    """Non-i.i.d. test-time adaptation: made for streams whose classes come in runs.

    Every sample is predicted with the running statistics, corrected by its own (see
    :class:`~ttvd.nn.instance_norm.InstanceAwareBatchNorm2d`), so that samples do not see each other, and is offered
    to a memory under its predicted class (:class:`BalancedReservoir`). After every ``period`` samples the model takes a
    step on the entropy of the images in the memory, normalised by their statistics, which the running ones follow.

    How the stream is cut into batches makes no difference: a batch is cut where an update falls into it. The model
    must have been trained with instance-aware batch norm in place of every batch norm. As in the authors' code the
    entropy is -p log(p + 1e-6), averaged over samples and classes; unlike there, samples after the last full period of
    a stream are predicted too.

    Args:
        model: The classifier, with instance-aware norms.
        lr: Learning rate of Adam, 1e-4 in the paper.
        momentum: First beta of Adam.
        capacity: Size of the memory.
        period: Samples between two updates.
        alpha: Share of the memory in the running statistics at each update.
        seed: Seed of the random choices of the memory.

    Example:
        >>> net = nn.Sequential(InstanceAwareBatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> NOTE(net, period=4)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    memory: BalancedReservoir

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-4,
        momentum: float = 0.9,
        capacity: int = 64,
        period: int = 64,
        alpha: float = 0.01,
        seed: int = 0,
    ) -> None:
        layers = list(model.modules())
        aware = [layer for layer in layers if isinstance(layer, InstanceAwareBatchNorm2d)]
        if not aware or any(isinstance(layer, _BatchNorm) for layer in layers):
            raise ValueError(
                "note needs a model that was trained with instance-aware batch norm in place of every batch norm: "
                "build it with norm='instance-aware' or from ttvd.nn.instance_norm.InstanceAwareBatchNorm2d"
            )
        # A momentum makes the running statistics of the adapter its own.
        statistics = Statistics(momentum=alpha)
        super().__init__(model, lr=lr, optimizer="adam", momentum=momentum, statistics=statistics)
        for layer in self.model.modules():
            if isinstance(layer, InstanceAwareBatchNorm2d):
                layer.momentum = alpha
        self.memory = BalancedReservoir(capacity, count_classes(model), self.probe)
        self.clock = Clock(period)
        self.random_state = RandomState(seed)

    def branch(self, x: Tensor) -> tuple[Piece, ...]:
        """Cut the batch where updates fall into it."""
        self.memory.make_room(tuple(x.shape[1:]))  # another size is refused before anything has changed
        pieces = []
        for part, due in self.clock.pieces(len(x)):
            held = min(int(self.clock.count), self.memory.capacity)  # places fill in order
            pieces.append((part.start, part.stop, held if due else 0))
        return tuple(pieces)

    def random_inputs(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The uniform numbers with which the memory decides about each image."""
        return (torch.rand(len(x), 1 + self.memory.capacity, generator=generator),)

    def adapt(self, x: Tensor, pieces: tuple[Piece, ...], lots: Tensor) -> Tensor:
        """Predict, remember, and learn from the memory when it is time."""
        outputs, kept = [], torch.zeros_like(self.kept)
        for start, stop, held in pieces:
            with torch.no_grad():
                outputs.append(self.output(x[start:stop]))
            entered = self.memory.offer(x[start:stop], outputs[-1].argmax(1), lots[start:stop])
            kept += entered * ((stop - start) / len(x))
            if held:
                with _following(self.model):
                    super().adapt(self.memory.images[self._choose(held)])
        self.kept.copy_(kept)
        return torch.cat(outputs)

    def _choose(self, count: int) -> Tensor:
        """Places to learn from: the first ones; some twice if there are fewer images, as after a batch of no use."""
        places = torch.arange(count, device=self.memory.labels.device)
        return places % (self.memory.labels >= 0).sum().clamp_min(1)

    def loss(self, x: Tensor) -> Step:
        """Entropy of the images in the memory, averaged over samples and classes."""
        logits = self.output(x)
        probs = logits.softmax(1)
        return Step(logits, -(probs * torch.log(probs + 1e-6)).mean(), torch.ones_like(self.kept))


def _following(model: nn.Module) -> Temporarily[nn.Module]:
    """Let instance-aware norms use the statistics of the batch and follow them."""
    norms = [layer for layer in model.modules() if isinstance(layer, InstanceAwareBatchNorm2d)]
    return Temporarily(norms, "training", True)
