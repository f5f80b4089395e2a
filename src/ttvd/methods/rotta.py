"""RoTTA: a balanced memory of recent certain samples, robust statistics and a slow teacher."""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.gradient import Step
from ttvd.methods.registry import register
from ttvd.methods.shared.augmentations import augment
from ttvd.methods.shared.losses import entropy
from ttvd.methods.shared.memory import Clock, Memory, MemoryAdapter
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.norms import (
    Statistics,
    StreamNorm,
    Temporarily,
    apply_statistics,
    following_stream,
    select_parameters,
)
from ttvd.nn.split import shared_copy


class BalancedMemory(Memory):
    """Category-balanced sampling with timeliness and uncertainty (CSTU).

    A sample scores sigmoid(age / capacity) + uncertainty, each weighted; the worst has the highest score. A sample of
    a class below its quota of capacity / k enters, in place of the worst of the largest classes when the memory is
    full; a sample of another class can only replace the worst of its own. Who scores no better than the newcomer stays.

    Args:
        capacity: Number of images that the memory holds.
        like: As in :class:`~ttvd.methods.shared.memory.Memory`.
        timeliness: Weight of the age in the score.
        uncertainty: Weight of the uncertainty in the score.
    """

    ages: Tensor
    doubts: Tensor

    def __init__(
        self, capacity: int, like: Tensor, timeliness: float = 1.0, uncertainty: float = 1.0
    ) -> None:
        super().__init__(capacity, like)
        self.timeliness, self.uncertainty = timeliness, uncertainty
        self.register_buffer("ages", like.detach().new_zeros(capacity))
        self.register_buffer("doubts", like.detach().new_zeros(capacity))

    def place(self, label: Tensor, *facts: Tensor) -> Tensor:
        """Where a sample goes; ``facts`` are its uncertainty in [0, 1] and the quota of a class. All others age."""
        doubt, quota = facts
        own, sizes, free = self.labels == label, self.class_sizes(), self.first_free()
        below, full = own.sum() < quota, (self.labels >= 0).all()
        rivals = torch.where(below, sizes == sizes.max(), own)
        scores = self.timeliness * torch.sigmoid(self.ages / self.capacity) + self.uncertainty * self.doubts
        scores = torch.where(rivals, scores, float("-inf"))
        worst = torch.arange(self.capacity, device=scores.device) == scores.argmax()
        beaten = scores.max() > 0.5 * self.timeliness + self.uncertainty * doubt
        mask = torch.where(below & ~full, free, worst & beaten)
        self.doubts.copy_(torch.where(mask, doubt, self.doubts))
        self.ages.copy_(torch.where(mask, 0.0, self.ages) + 1.0)
        return mask


@register(
    "rotta",
    summary="Learns from a class-balanced memory by a slow teacher; norm statistics follow the stream.",
    paper="Yuan et al., CVPR 2023",
    updates="norm affine and statistics",
    forwards=3,
    backwards=1,
)
class RoTTA(MemoryAdapter):
    """Robust test-time adaptation in dynamic scenarios: made for streams whose classes come in runs.

    A teacher, the running average of the student, predicts every batch and its predictions decide which images
    enter a memory (:class:`BalancedMemory`). After every ``period`` samples the student takes a step on the
    cross-entropy between the teacher on the images of the memory and itself on strong augmentations of them, each
    weighted by 1 / (1 + e^a), a = age / capacity. Batch norms normalise by averages that follow the memory, each
    network's its own. The output is the teacher's prediction of the batch, before the update.

    Works with batch, group and layer norm, and with any batch size. Deviations from the authors' code: every image is
    augmented by its own draws; the entropy is exact (theirs adds 1e-6 to p). An update waits once for the device, to
    learn how many images the memory holds.

    Args:
        model: The classifier.
        lr: Learning rate of Adam, 1e-3 in the paper.
        momentum: First beta of Adam.
        capacity: Size of the memory.
        period: Samples between two updates.
        alpha: Share of a batch in the averages of the batch norms.
        nu: Share of the student in the teacher at each update.
        timeliness: Weight of the age in the score of the memory.
        uncertainty: Weight of the entropy in it.
        seed: Seed of the augmentations.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> RoTTA(net, period=4)(torch.rand(8, 1, 2, 2)).shape
        torch.Size([8, 2])
    """

    networks: ClassVar[tuple[str, ...]] = ("model", "teacher")
    dynamic = "it learns from as many images as its memory holds, and draws its augmentations in the step"
    memory: BalancedMemory

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        momentum: float = 0.9,
        capacity: int = 64,
        period: int = 64,
        alpha: float = 0.05,
        nu: float = 0.001,
        timeliness: float = 1.0,
        uncertainty: float = 1.0,
        seed: int = 0,
    ) -> None:
        statistics = Statistics(momentum=alpha)
        super().__init__(model, lr=lr, optimizer="adam", momentum=momentum, statistics=statistics)
        if not 0.0 <= nu <= 1.0:
            raise ValueError(f"nu is the share of the student in the teacher, in [0, 1]; got {nu}")
        self.nu = nu
        averages = {name.removeprefix("model.") for name in self._running_averages}
        owned = select_parameters(model, "norm") | averages
        self.teacher = apply_statistics(shared_copy(model, owned), statistics).eval()
        self._running_averages |= {f"teacher.{name}" for name in averages}
        self.memory = BalancedMemory(capacity, self.probe, timeliness, uncertainty)
        self.clock = Clock(period)
        self.random_state = RandomState(seed)

    def output(self, x: Tensor) -> Tensor:
        """Logits of the teacher, normalised by its averages alone."""
        with averages_alone(self.teacher):
            return upcast(self.call_model(x, self.teacher))

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, remember, and learn from the memory when it is time."""
        self.memory.make_room(tuple(x.shape[1:]))  # another size is refused before anything has changed
        with torch.no_grad():
            out = self.output(x)
        self.learn_along(x, out)
        return out

    def learn_along(self, x: Tensor, out: Tensor, see: Callable[[slice], None] | None = None) -> None:
        """Remember a batch with its predictions, and learn from the memory when it is time.

        Args:
            x: The batch.
            out: Logits of the teacher.
            see: Called with each part of the batch before it is remembered.
        """
        labels, classes = out.argmax(1), out.shape[1]
        doubts = entropy(out) / math.log(max(classes, 2))
        quotas = torch.full_like(doubts, self.memory.capacity / classes)
        kept = torch.zeros_like(self.kept)
        for part, due in self.clock.pieces(len(x)):
            if see is not None:
                see(part)
            entered = self.memory.offer(x[part], labels[part], doubts[part], quotas[part])
            kept += entered * (len(labels[part]) / len(x))
            if due:
                self.learn()
        self.kept.copy_(kept)

    def loss(self, x: Tensor) -> Step:
        """Cross-entropy between the teacher on images of the memory and the student on augmentations of them."""
        with torch.no_grad(), self.random_state.generator() as generator:
            target = upcast(self.call_model(x, self.teacher)).softmax(1)
            strong = augment(x, generator)
        logits = upcast(self.call_model(strong))
        ages = self.memory.ages[self.memory.labels >= 0] / self.memory.capacity
        each = -(target * logits.log_softmax(1)).sum(1) * torch.sigmoid(-ages)
        return Step(logits, each.mean(), torch.ones_like(self.kept))

    def learn(self) -> None:
        """One step on the memory; the averages of both networks follow it, and the teacher the student."""
        with following_stream(self.teacher):
            super().adapt(self.memory.images[self.memory.labels >= 0])
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                if slow.requires_grad:
                    slow.lerp_(fast, self.teacher_share())

    def teacher_share(self) -> float | Tensor:
        """Share of the student in the teacher at an update."""
        return self.nu


def averages_alone(network: nn.Module) -> Temporarily[StreamNorm]:
    """Let batch norms use their averages without the batch at hand."""
    norms = [layer for layer in network.modules() if isinstance(layer, StreamNorm)]
    return Temporarily(norms, "statistics", Statistics.source())
