"""PeTTA: RoTTA's memory and norms, with a pull to the source that grows as the class means drift."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.geometry.precision import upcast
from ttvd.methods.gradient import Step
from ttvd.methods.registry import register
from ttvd.methods.rotta import RoTTA, averages_alone
from ttvd.methods.shared.augmentations import augment
from ttvd.nn.norms import apply_statistics, following_stream
from ttvd.nn.split import SplitModel, shared_copy
from ttvd.zoo.sites import Sites, find_upright

_SMALLEST = 1e-6  # added to variances, in the authors' code


@register(
    "petta",
    summary="RoTTA that senses its own drift from the source's class means, and slows down and turns back.",
    paper="Hoang et al., NeurIPS 2024",
    updates="norm affine and statistics",
    forwards=5,
    backwards=2,
    needs=frozenset({"sites"}),
)
class PeTTA(RoTTA):
    """Persistent test-time adaptation: made for long streams whose conditions come back.

    The memory, the robust batch norms and the teacher that predicts are those of
    :class:`~ttvd.methods.rotta.RoTTA`. Running means m_y of the teacher's features, for each predicted class y, start
    at the class means mu_y of the source. At each update, over the classes Y predicted since the last one and the
    dimensions j, the drift is

        gamma = 1 - exp(-mean over y in Y and j of (m_yj - mu_yj)^2 / (s_j + 1e-6)).

    Then m_y <- (1 - nu) m_y + nu * (mean of the features of y since the last update), for y in Y. The student takes one
    step on the images of the memory, on the sum of three terms:

    - self-training: the mean of the symmetric cross-entropies between the teacher and the student on the images, and
      between the teacher and the student on strong augmentations of them, each averaged over both directions;
    - gamma * lambda_0 times the mean, over the parameters that adapt, of minus the cosine between each of them and the
      source's;
    - al_weight times the cross-entropy between the source's predictions of the images and the student's of the
      augmentations.

    The teacher follows with the share alpha_0 * (1 - gamma). The output is the teacher's prediction of the batch,
    before the update.

    Works with batch, group and layer norm, and with any batch size. The source of the third term has the source's
    weights and batch norms that follow the memory, as in the authors' code. A head that tells rotations apart
    classifies the upright view. An update waits once for the device, to learn how many images the memory holds.

    Deviations from the authors' code: sites hold class means of labelled images and no variances within classes, so
    s_j, one for all classes, is the variance between the k class means of the source, over k - 1 (theirs is that of the
    features of each predicted class on source test images). On the two classifiers of digits in this package s_j is 6
    and 2.4 times the variance within classes, so gamma is smaller here for the same drift. An update comes after every
    ``update_every`` samples (theirs after every batch, of 64 images); what a batch adds to the class means is gathered
    until then, which is the same for batches of 64. Every image is augmented by its own draws. The entropy is exact
    (theirs adds 1e-6 to p). All norms adapt (theirs batch norms alone).

    Args:
        model: The classifier.
        sites: Its class means.
        lr: Learning rate of Adam, 1e-3 in the paper.
        momentum: First beta of Adam.
        memory_size: Size of the memory.
        update_every: Samples between two updates.
        alpha_0: Share of the student in the teacher at an update without drift.
        lambda_0: Weight of the pull to the source at full drift.
        al_weight: Weight of the third term, the anchor loss.
        symmetric: Whether the first term is symmetric; False for the cross-entropy between the teacher and the student
            on augmentations, which the authors use on ImageNet.
        nu: Share of new features in the running class means, 0.05 in the authors' code.
        alpha: Share of a batch in the averages of the batch norms.
        timeliness: Weight of the age in the score of the memory.
        uncertainty: Weight of the entropy in it.
        seed: Seed of the augmentations.

    Attributes:
        means: Running class means (k, d) of the teacher's features.
        drift: gamma of the last update, a scalar.

    Example:
        >>> import ttvd
        >>> source = ttvd.load("digits-plain")
        >>> PeTTA(source.model, source.sites, update_every=4)(torch.rand(8, 1, 28, 28)).shape
        torch.Size([8, 10])
    """

    networks = ("model", "teacher", "source")
    teacher: SplitModel
    means: Tensor
    source_means: Tensor
    variances: Tensor
    sums: Tensor
    counts: Tensor
    drift: Tensor

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        *,
        lr: float = 1e-3,
        momentum: float = 0.9,
        memory_size: int = 64,
        update_every: int = 64,
        alpha_0: float = 1e-3,
        lambda_0: float = 10.0,
        al_weight: float = 1.0,
        symmetric: bool = True,
        nu: float = 0.05,
        alpha: float = 0.05,
        timeliness: float = 1.0,
        uncertainty: float = 1.0,
        seed: int = 0,
    ) -> None:
        parts = find_upright(model, sites)
        _check(sites, alpha_0, nu, lambda_0, al_weight)
        super().__init__(
            parts,
            lr=lr,
            momentum=momentum,
            capacity=memory_size,
            period=update_every,
            alpha=alpha,
            nu=alpha_0,
            timeliness=timeliness,
            uncertainty=uncertainty,
            seed=seed,
        )
        self.lambda_0, self.al_weight, self.symmetric, self.means_share = lambda_0, al_weight, symmetric, nu
        averages = {
            name.removeprefix("model.") for name in self._running_averages if name.startswith("model.")
        }
        self.source = apply_statistics(shared_copy(parts, averages), self.statistics).eval()
        self._running_averages |= {f"source.{name}" for name in averages}
        means = sites.means[:, 0].to(upcast(self.probe))
        self.register_buffer("source_means", means, persistent=False)
        self.register_buffer("variances", means.var(0), persistent=False)
        self.register_buffer("means", means.clone())
        self.register_buffer("sums", torch.zeros_like(means))
        self.register_buffer("counts", means.new_zeros(len(means)))
        self.register_buffer("drift", means.new_zeros(()))

    @classmethod
    def site_parts(cls, sites: Sites, parameters: Mapping[str, Any]) -> frozenset[str]:
        """The parts of the sites, beside means and temperatures, on which results depend: none."""
        return frozenset()

    def adapt(self, x: Tensor) -> Tensor:
        """Predict, remember, and learn from the memory when it is time."""
        self.memory.make_room(tuple(x.shape[1:]))  # another size is refused before anything has changed
        with torch.no_grad(), averages_alone(self.teacher):
            z, out = self.teacher.features_and_logits(x)
        members = F.one_hot(out.argmax(1), out.shape[1]).to(self.sums.dtype)

        def gather(part: slice) -> None:
            self.sums.addmm_(members[part].T, z[part].to(self.sums.dtype))
            self.counts.add_(members[part].sum(0))

        self.learn_along(x, out, gather)
        return out

    def loss(self, x: Tensor) -> Step:
        """Self-training, pull to the source and anchor loss, on images of the memory."""
        with torch.no_grad(), self.random_state.generator() as generator:
            teacher, anchor = (upcast(self.call_model(x, net)) for net in (self.teacher, self.source))
            strong = augment(x, generator)
        logits, others = upcast(self.call_model(x)), upcast(self.call_model(strong))
        each = cross_entropy(teacher, others)
        if self.symmetric:
            pairs = ((teacher, logits), (logits, teacher), (teacher, others), (others, teacher))
            each = torch.stack([cross_entropy(target, found) for target, found in pairs]).mean(0)
        anchored = cross_entropy(anchor, others)
        loss = (each + self.al_weight * anchored).mean() + self.lambda_0 * self.drift * self._leave_source()
        return Step(others, loss, torch.ones_like(self.kept))

    def learn(self) -> None:
        """Measure the drift, then take a step; the statistics of all networks are updated with the memory."""
        self._measure_drift()
        with following_stream(self.source):
            super().learn()

    def teacher_share(self) -> Tensor:
        """Share of the student in the teacher at an update: the smaller, the larger the drift."""
        return self.nu * (1.0 - self.drift)

    @torch.no_grad()
    def _measure_drift(self) -> None:
        """Return how far the class means have drifted from the sites, then update them with the last samples."""
        present = (self.counts > 0).to(self.means.dtype)
        gaps = ((self.means - self.source_means).square() / (self.variances + _SMALLEST)).mean(1)
        self.drift.copy_(-torch.expm1(-(gaps * present).sum() / present.sum()))
        latest = self.sums / self.counts.clamp_min(1.0)[:, None]
        self.means.lerp_(latest, self.means_share * present[:, None])
        self.sums.zero_()
        self.counts.zero_()

    def _leave_source(self) -> Tensor:
        """Mean over the parameters that adapt of minus the cosine between each of them and the source's."""
        pairs = zip(self.model.parameters(), self.source.parameters(), strict=True)
        cosines = [
            F.cosine_similarity(own.flatten(), source.flatten(), dim=0)
            for own, source in pairs
            if own.requires_grad
        ]
        return -torch.stack(cosines).mean()


def cross_entropy(target: Tensor, found: Tensor) -> Tensor:
    """Cross-entropy (b,) of predictions under the predictions ``target``, both logits."""
    return -(target.softmax(1) * found.log_softmax(1)).sum(1)


def _check(sites: Sites, alpha_0: float, nu: float, lambda_0: float, al_weight: float) -> None:
    if sites.num_classes < 2:
        raise ValueError(
            "petta measures a drift by the distance of class means: it needs two classes or more"
        )
    if not (0.0 <= alpha_0 <= 1.0 and 0.0 <= nu <= 1.0):
        raise ValueError(f"alpha_0 and nu are shares, in [0, 1]; got {alpha_0} and {nu}")
    if not (lambda_0 >= 0.0 and al_weight >= 0.0):
        raise ValueError(f"lambda_0 and al_weight must be at least 0, got {lambda_0} and {al_weight}")
