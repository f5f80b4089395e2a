"""TTVD: test-time adaptation guided by Voronoi diagrams, in all its stages."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.engine.compiling import compile_once
from ttvd.geometry import Diagram, agreement, distances, kept_fraction, view_scores
from ttvd.geometry.prior import shift_weights
from ttvd.methods.adapter import Timing
from ttvd.methods.gradient import GradientAdapter, Step
from ttvd.methods.registry import register
from ttvd.methods.shared.losses import (
    entropy,
    imbalance,
    log_posteriors,
    log_rotations,
    mean_over,
    soft_ratio,
)
from ttvd.methods.ttvd.label_shift import LabelShiftEstimator
from ttvd.methods.ttvd.online_temperature import OnlineTemperature
from ttvd.methods.ttvd.options import (
    check_answer,
    check_choice,
    check_reference_batch_size,
    check_terms,
    choose_step_scale,
)
from ttvd.methods.ttvd.presets import PRESETS
from ttvd.methods.ttvd.step_scale import StepScale
from ttvd.nn.norms import Statistics
from ttvd.nn.split import SplitModel, split
from ttvd.nn.views import rotate
from ttvd.zoo.sites import Sites

Structure = Literal["vd", "civd", "pd", "cipd"]
Objective = Literal["entropy", "joint", "consensus"]


class TTVD(GradientAdapter):
    """Moves features into the cells of diagrams whose sites are fixed before deployment.

    The four quarter turns of an image are its views; a class owns a cluster of sites, one for each view. Voronoi
    sites are the class means of the source features, power sites come from the head by the Lemma (site W / 2,
    weight b + |W|^2 / 4). A view is compared with the sites of its own rotation only, and the influence
    F_k = -sign(gamma) * sum_a q_ka^gamma (q: distance, or power distance) gives the class scores F / tau.

    With ``gamma=1`` the cluster-induced power diagram gives the sum of the matching logits of the views: it *is* the
    aggregation of self-supervised label augmentation. The defaults use no other diagram on such a head: its Voronoi
    sites serve the filter, ``"civd"`` and the paper's stages.

    Objectives, each averaged over the samples that the filter keeps:

    - ``"consensus"`` (default): the class that is answered is joined with the rotation that each view is known to
      have; each view's cross-entropy against that cell of the joint power diagram.
    - ``"entropy"`` (the paper's): entropy of softmax(F / tau).
    - ``"joint"`` (the authors' code): entropies of each view over all k * v sites, of the power diagram and of the
      Voronoi diagram, with tau 1.

    A model whose head knows the classes only (no label augmentation) works too, with sites of each rotation: its power
    diagram judges the upright view alone, and the rotated ones speak through the Voronoi diagram and the filter. What
    is lost is the joint label, the strongest signal.

    Args:
        model: The classifier; its head has k * v outputs (label augmentation, class-major) or k.
        sites: Its class means, made by ``ttvd.estimate_sites``.
        structure: The diagram that predicts: ``"vd"`` and ``"pd"`` look at the upright view alone.
        objective: What is minimised: ``"consensus"``, ``"entropy"`` or ``"joint"``, see above.
        gamma: Exponent of the influence; the paper uses -0.8.
        tau: Temperature; unless given, the one that was fitted on held-out source data.
        shift: Constant added to power distances before the exponent; by default the smallest that makes them
            non-negative everywhere (see ``ttvd.geometry.view_influence``).
        agreement_filter: Use only samples to which the Voronoi and the power diagram give the same class. By default where the
            head knows the classes alone: the known rotations of all samples do more than leaving some of them out.
        diversity_weight: Weight of the term that keeps the mean prediction of a batch from collapsing to few classes.
        rotation_weight: Weight of -log p(rotation a) of the views a, over all samples: this label is true whatever the filter
            says, so that all of a batch is used. The head must tell rotations apart; unless given, 1 where it does and
            more than the upright view is looked at.
        slr_weight: Weight of the soft likelihood ratio over the cells of each view, of the kept samples.
        prior: Number of imagined images, spread evenly over the classes, with which the shares of the classes in a
            batch are estimated; answers are corrected for these shares (``ttvd.geometry.prior``). ``"stream"`` finds
            the number along the stream (:class:`~ttvd.methods.ttvd.label_shift.LabelShiftEstimator`). None for no correction, which is
            also what a large number comes to.
        output_temperature: Factor on the temperature of answers, and of them alone: above 1 they are less confident. ``"stream"``
            measures it on the known rotations (:class:`~ttvd.methods.ttvd.online_temperature.OnlineTemperature`). Unless given, that where
            several rotations are looked at and told apart, else 1. With a prior it also decides how sure shares are.
        reference_batch_size: Number of images from which on a step is full; a batch of fewer, b, takes b / reference_batch_size of one.
            With SGD only, and 64 there unless given; 1 for full steps always.
        adaptive_step: Multiply steps by how far known rotations are from what they are on source data
            (:class:`~ttvd.methods.ttvd.step_scale.StepScale`). With SGD only, and by default there if the sites know that and
            several rotations are looked at and told apart.
        lr: Learning rate; the default is one for SGD without momentum, Adam wants about 0.001.
        optimizer: ``"sgd"`` or ``"adam"``.
        momentum: Momentum of SGD (Nesterov), 0 unless given; first beta of Adam, 0.9 unless given.
        steps: Gradient steps for each batch.
        statistics: Where batch norms take their statistics from; by default they follow the stream from the source on,
            which is worth 16 images, with a memory of 512, and where the sites know them from the anchors on.
        prediction: Whether the returned logits precede or follow the update.
    """

    model: SplitModel

    def __init__(
        self,
        model: nn.Module,
        sites: Sites,
        *,
        structure: Structure = "cipd",
        objective: Objective = "consensus",
        gamma: float = 1.0,
        tau: float | None = None,
        shift: float | None = None,
        agreement_filter: bool | None = None,
        diversity_weight: float = 1.0,
        rotation_weight: float | None = None,
        slr_weight: float = 0.3,
        prior: float | Literal["stream"] | None = "stream",
        output_temperature: float | Literal["stream"] | None = None,
        reference_batch_size: int | None = None,
        adaptive_step: bool | None = None,
        lr: float = 0.05,
        optimizer: str = "sgd",
        momentum: float | None = None,
        steps: int = 1,
        statistics: Statistics | None = None,
        prediction: Timing = "before",
    ) -> None:
        check_choice("structure", structure, get_args(Structure))
        check_choice("objective", objective, get_args(Objective))
        parts = split(model)
        sites.check(parts)
        views = sites.views if structure in ("civd", "cipd") else 1
        super().__init__(
            parts,
            lr=lr,
            optimizer=optimizer,
            momentum=(0.0 if optimizer == "sgd" else 0.9) if momentum is None else momentum,
            steps=steps,
            statistics=statistics or _follow_stream(views, anchored=views in sites.anchors),
            prediction=prediction,
            anchors=sites.anchors.get(views),
        )
        self.structure, self.objective = structure, objective
        self.gamma = 1.0 if structure in ("vd", "pd") else gamma
        if tau is None and shift is not None and self.gamma != 1.0:
            raise ValueError("temperatures are fitted for the default shift: give tau together with a shift")
        self.tau = sites.temperature(structure, self.gamma) if tau is None else tau
        if not self.tau > 0.0:
            raise ValueError(f"tau must be positive, got {self.tau}")
        self.shift = shift
        self.views = views
        self.head_views = self.model.linear.out_features // sites.num_classes
        self.agreement_filter = (
            structure == "cipd" and self.head_views == 1 if agreement_filter is None else agreement_filter
        )
        several = min(self.views, self.head_views) > 1  # of one rotation nothing can be learnt
        self.rotation_weight = float(several) if rotation_weight is None else rotation_weight
        self.slr_weight = slr_weight if self.model.linear.out_features > 1 else 0.0  # one cell has no others
        self.diversity_weight = diversity_weight
        check_terms(self.rotation_weight, slr_weight, diversity_weight, self.head_views)
        output_temperature = (
            ("stream" if several else 1.0) if output_temperature is None else output_temperature
        )
        check_answer(prior, output_temperature, self.head_views)
        check_reference_batch_size(reference_batch_size, optimizer)
        self.prior = prior if prior is None or isinstance(prior, str) else float(prior)
        self.output_temperature = output_temperature
        self.reference_batch_size = reference_batch_size or (64 if optimizer == "sgd" else 1)
        shares = prior == "stream" and sites.num_classes > 1  # one class has no shares
        self.label_shift = (
            LabelShiftEstimator(sites.num_classes, self.model.linear.weight) if shares else None
        )
        self.online_temperature = (
            OnlineTemperature(self.model.linear.weight) if output_temperature == "stream" else None
        )
        usual = choose_step_scale(adaptive_step, sites.rotation_loss if several else None, optimizer)
        self.step_scale = None if usual is None else StepScale(usual, self.model.linear.weight)
        self._place_diagrams(sites)

    def _place_diagrams(self, sites: Sites) -> None:
        head, device = self.model.linear, self.model.linear.weight.device
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        if self.views < self.head_views:
            weight = weight[:: self.head_views]
            bias = None if bias is None else bias[:: self.head_views]
        self.voronoi = sites.diagram(self.views).to(device=device)
        # The joint objective measures against all sites, however many views predict.
        self.joint_voronoi = sites.diagram().to(device=device) if self.objective == "joint" else self.voronoi
        self.power = Diagram.from_linear(weight, bias, views=min(self.views, self.head_views))

    @classmethod
    def site_parts(cls, sites: Sites, parameters: Mapping[str, Any]) -> frozenset[str]:
        """Name the parts of the sites, beside means and temperatures, on which results depend.

        Benchmarks fingerprint these parts of the sites, so that a run on other sites is another run.

        Args:
            sites: Sites of the model.
            parameters: Parameters as plain JSON values, defaults included.
        """
        statistics, views = (
            parameters["statistics"],
            1 if parameters["structure"] in ("vd", "pd") else sites.views,
        )
        anchored = statistics is None or (
            isinstance(statistics, str) and Statistics.parse(statistics).anchored
        )
        parts = {f"anchors/{views}"} if anchored else set()
        return frozenset(parts | ({"rotation_loss"} if parameters["adaptive_step"] is not False else set()))

    def output(self, x: Tensor) -> Tensor:
        """Class scores F / tau of the structure, softened and corrected for the shares of the classes."""
        return self._answer(self._temper(self._scores(*self._look(x), self.structure) / self.tau))

    def stream_parts(self) -> nn.Module:
        """The norms of the network, and what is known of the batches."""
        return self

    def loss(self, x: Tensor) -> Step:
        """Answer, objective over the kept samples, known rotations of all, and balance of the batch."""
        judge, follow = type(self)._judge, type(self)._follow
        if self.compiled:  # apart: what one writes in place is no part of the other's gradients
            judge = compile_once(judge)
            # On a CPU, compiled writes to single numbers get lost.
            follow = compile_once(follow) if x.is_cuda else follow
        answer, loss, share, soft, rotations = judge(self, *self._look(x))
        return Step(answer, loss * follow(self, soft, rotations), share)

    def _judge(self, z: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Answer, loss, share kept, softened scores and rotations, of features (v, b, d) and logits (v, b, outputs)."""
        out = self._scores(z, logits, self.structure) / self.tau
        judged = logits[: self.power.views]  # a head without rotations judges the upright view alone
        logs = log_posteriors(judged)  # once, for all terms that look at the joint cells
        asked = self.rotation_weight or self.online_temperature is not None or self.step_scale is not None
        rotations = log_rotations(logs, self.head_views) if asked else None
        soft = self._temper(out.detach())
        answer = self._answer(soft)
        kept = self._keep(z, logits, out)
        each, share = self._objective(z, logs, out, answer.argmax(1)), kept_fraction(kept)
        if self.slr_weight:
            each = each + self.slr_weight * soft_ratio(logs).mean(0)
        loss = mean_over(each, kept)
        if self.rotation_weight and rotations is not None:
            loss = loss - self.rotation_weight * rotations.diagonal(dim1=0, dim2=2).mean()
            share = torch.ones_like(share)  # what the filter drops has a true label still: all take part
        if self.diversity_weight:
            loss = loss + self.diversity_weight * imbalance(out)
        return answer, loss * min(1.0, len(out) / self.reference_batch_size), share, soft, rotations

    @torch.no_grad()
    def _follow(self, soft: Tensor, rotations: Tensor | None) -> Tensor | float:
        """Let all that is known of the stream take the batch in; returns how much of a step it needs."""
        if self.label_shift is not None:
            self.label_shift.follow(soft)
        if self.online_temperature is not None and rotations is not None:
            self.online_temperature.follow(rotations)
        if self.step_scale is None or rotations is None:
            return 1.0
        self.step_scale.follow(rotations)
        return self.step_scale.factor()

    def _temper(self, out: Tensor) -> Tensor:
        return out / (
            float(self.output_temperature)
            if self.online_temperature is None
            else self.online_temperature.factor()
        )

    @torch.no_grad()
    def _answer(self, soft: Tensor) -> Tensor:
        """What is returned for softened scores: they, corrected for the shares of the classes."""
        if self.label_shift is not None:
            return soft + shift_weights(soft, self.label_shift.concentration())
        return soft + shift_weights(soft, self.prior) if isinstance(self.prior, float) else soft

    def _look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (v, b, d) and logits (v, b, outputs) of the views."""
        turn = compile_once(rotate) if self.compiled else rotate
        z, logits = self.model.features_and_logits(x if self.views == 1 else turn(x, self.views))
        return z.unflatten(0, (self.views, len(x))), logits.unflatten(0, (self.views, len(x)))

    def _scores(self, z: Tensor, logits: Tensor, structure: Structure) -> Tensor:
        """Class scores (b, k), up to a number that all classes of an image share."""
        if structure in ("vd", "civd"):
            return view_scores(z, self.voronoi, self.gamma)
        views = self.power.views
        if self.gamma == 1.0 and self.shift is None:
            # By the Lemma the logit is minus the power distance, and costs nothing more.
            cells = logits[:views].unflatten(2, (-1, self.head_views))
            found: Tensor = cells.diagonal(dim1=0, dim2=3).sum(-1)
            return found
        return view_scores(z[:views], self.power, self.gamma, self.shift)

    @torch.no_grad()
    def _keep(self, z: Tensor, logits: Tensor, out: Tensor) -> Tensor:
        """Which samples both diagrams give to the same class; ``out`` are the scores of the structure."""
        if not self.agreement_filter:
            return torch.ones(z.shape[1], dtype=torch.bool, device=z.device)
        known = {"civd" if self.structure in ("vd", "civd") else "cipd": out}
        both = (known[kind] if kind in known else self._scores(z, logits, kind) for kind in ("civd", "cipd"))
        return agreement(*(scores.argmax(1) for scores in both))

    def _objective(self, z: Tensor, logs: Tensor, out: Tensor, said: Tensor) -> Tensor:
        """Per-sample loss (b,) of features (v, b, d), log posteriors of the judged views, scores and answers."""
        if self.objective == "entropy":
            return entropy(out)
        if self.objective == "joint":
            apart = distances(z.flatten(0, 1), self.joint_voronoi).unflatten(0, z.shape[:2])
            return entropy(logs).mean(0) + entropy(-apart).mean(0)
        turn = torch.arange(len(logs), device=z.device)[:, None]
        cell = said * self.head_views + turn
        return F.nll_loss(logs.flatten(0, 1), cell.flatten(), reduction="none").view_as(cell).mean(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        device = self.model.linear.weight.device
        self.voronoi = self.voronoi.to(device=device)
        self.joint_voronoi = self.joint_voronoi.to(device=device)
        self.power = self.power.to(device=device)
        return self


def _follow_stream(views: int, anchored: bool) -> Statistics:
    """The default: the source is worth 16 images, the memory 512."""
    return Statistics(count=16 * views, memory=512 * views, renorm=True, anchored=anchored)


for _name, _summary, _defaults, _revision in PRESETS:
    _looks = 1 if _defaults.get("structure") in ("vd", "pd") else 4
    register(
        _name,
        summary=_summary,
        paper="Lei et al., TTVD",
        updates="norm affine",
        forwards=_looks,
        backwards=_looks,
        needs=frozenset({"sites"}),
        defaults=_defaults,
        revision=_revision,
    )(TTVD)
