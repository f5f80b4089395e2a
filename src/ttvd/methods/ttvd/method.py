"""TTVD: test-time adaptation guided by Voronoi diagrams, in all its stages."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttvd.geometry import Diagram, agreement, kept_fraction, view_scores
from ttvd.methods.gradient import GradientAdapter, Step, fusible
from ttvd.methods.registry import register
from ttvd.methods.shared.guard import Guard, GuardMonitor, choose_guard
from ttvd.methods.shared.losses import (
    entropy,
    imbalance,
    log_posteriors,
    mean_over,
    soft_likelihood_ratio,
)
from ttvd.methods.ttvd.agreement_temperature import FACTORS, AgreementTemperature
from ttvd.methods.ttvd.answer import correct_shares, soften
from ttvd.methods.ttvd.answer_drift import AnswerDrift
from ttvd.methods.ttvd.class_shares import ClassShares
from ttvd.methods.ttvd.input_drift import InputDrift, Windows
from ttvd.methods.ttvd.label_shift import LabelShiftEstimator
from ttvd.methods.ttvd.loss import consensus, joint_entropy
from ttvd.methods.ttvd.online_temperature import OnlineTemperature
from ttvd.methods.ttvd.options import (
    DEFAULTS,
    Structure,
    TTVDOptions,
    check_answer,
    check_choices,
    check_weights,
    choose_agreement_ratio,
    choose_lr,
    choose_mirror,
    choose_reference_batch_size,
    choose_source_loss,
    choose_tau,
    takes_large_steps,
)
from ttvd.methods.ttvd.presets import PRESETS
from ttvd.methods.ttvd.source_check import SourceAverages, SourceCheck
from ttvd.methods.ttvd.step_scale import StepScale
from ttvd.nn.norms import Statistics, StreamNorm, Temporarily, apply_statistics
from ttvd.nn.split import SplitModel, shared_copy, split
from ttvd.nn.views import log_rotations, rotate, rotation_nll
from ttvd.zoo.sites import MIRROR_KEY, Sites, temperature_key

_rotate = fusible()(rotate)
KEPT = ("label_shift.excess", "answer_drift")
"""What a change of the stream does not end: how the classes follow each other, and what the answers have shown."""
UNEQUAL = 0.1
"""Excess of equal classes in a batch from which on diversity is not asked for."""
PULL = 0.02
"""Share of the way back to the source that the parameters of a plain head go after each full step."""
UNEQUAL_STEP = 0.4
"""What remains of the steps of a plain head there, if batch norms hold the features."""


class TTVD(GradientAdapter):
    """Moves features into the cells of diagrams whose sites are fixed before deployment.

    The views of an image are its four quarter turns; a class owns a cluster of sites, one for each view. Voronoi
    sites are the class means of the source features, power sites come from the head by the Lemma (site W / 2,
    weight b + |W|^2 / 4). A view is compared with the sites of its own rotation only, and the influence
    F_k = -sign(gamma) * sum_a q_ka^gamma (q: distance, or power distance) gives the class scores F / tau.

    With ``gamma=1`` the cluster-induced power diagram gives the sum of the matching logits of the views: it *is* the
    aggregation of self-supervised label augmentation. The defaults use the power diagram alone; Voronoi sites serve
    the filter, ``"civd"`` and the paper's stages.

    Objectives, each averaged over the samples that the filter keeps:

    - ``"consensus"`` (default): the cross-entropy of each view against one cell of the joint power diagram, that of
      the answered class and of the known rotation of the view.
    - ``"entropy"`` (the paper's): entropy of softmax(F / tau).
    - ``"joint"`` (the authors' code): entropies of each view over all k * v sites, of the power diagram and of the
      Voronoi diagram, with tau 1.

    A *plain* head knows the classes only (no label augmentation). It has never seen rotated images, so by default none
    are forwarded. Where calibration found the mirrored image harmless, it is the second view: the mean logits of the
    upright and the mirrored image answer, and teach both. Images count less in the statistics of norms where the last
    predictions are of few classes, and steps end there; without batch norm they end where batches hold few classes
    each. With batch norm, parameters are pulled back to the source a little after each step, and the source is
    forwarded too. It answers where the statistics of the stream have removed what tells the classes apart
    (:class:`~ttvd.methods.ttvd.source_check.SourceCheck`). What is missing is the joint label, the strongest signal.

    The images themselves are watched too (:class:`~ttvd.methods.ttvd.input_drift.InputDrift`). Where the stream
    changes, the adapter starts again. Where the stream does not differ from the source, norms keep the statistics of
    the source, and a plain head takes no steps. How sure the source is of the images counts too
    (:class:`~ttvd.methods.ttvd.answer_drift.AnswerDrift`).

    Args:
        model: The classifier; its head has k * v outputs (label augmentation, class-major) or k.
        sites: Its class means, made by ``ttvd.estimate_sites``.
        structure: The diagram that predicts. None: ``"cipd"`` for a head that tells rotations apart, ``"pd"`` for a
            plain one. ``"vd"`` uses the upright view alone, ``"pd"`` the upright view and, with ``mirror``, the
            mirrored one.
        mirror: Whether the image that is flipped left to right is a second view, with ``structure="pd"``. None: on a
            plain head whose sites say that it does no harm (``mirror_gain`` of -0.002 or more).
        objective: What is minimised: ``"consensus"``, ``"entropy"`` or ``"joint"``, see above.
        gamma: Exponent of the influence; the paper uses -0.8.
        tau: Temperature of the scores; unless given, the one that was fitted on held-out source data.
        shift: Constant added to power distances before the exponent; by default the smallest that makes them
            non-negative everywhere (see ``ttvd.geometry.view_influence``).
        agreement_filter: Use only samples to which the Voronoi and the power diagram give the same class. None: on for
            ``structure="cipd"`` on a plain head, off otherwise, which includes all defaults.
        diversity_weight: Weight of the term that keeps the mean prediction of a batch from collapsing to few classes.
            Without adaptive steps it fades where batches hold few classes each.
        rotation_weight: Weight of the mean of -log p(rotation a) over the views a of all samples. This label is true
            whatever the filter decides, so all of a batch is used. The head must tell rotations apart; unless given,
            the weight is 1 where it does and several views are used.
        slr_weight: Weight of the soft likelihood ratio over the cells of each view, for the kept samples. None: 0.3 for
            a head that tells rotations apart, and for a network with batch norm; otherwise 0. On a plain head it fades
            with diversity.
        prior: Number of pseudo-images, spread evenly over the classes, with which the shares of the classes in a
            batch are estimated; answers are corrected for these shares (``ttvd.geometry.prior``). ``"stream"``
            estimates the number along the stream
            (:class:`~ttvd.methods.ttvd.label_shift.LabelShiftEstimator`). None, like a large number, corrects nothing.
        output_temperature: Factor on the temperature of the answers alone; above 1 they are less confident.
            ``"stream"`` measures it along the stream: on the known rotations
            (:class:`~ttvd.methods.ttvd.online_temperature.OnlineTemperature`), or on how often the upright and the
            mirrored image get the same class
            (:class:`~ttvd.methods.ttvd.agreement_temperature.AgreementTemperature`). None: ``"stream"`` where one of
            the two is there, else 1. With a prior it also decides how sure the shares are.
        reference_batch_size: Batches of fewer images, b, take the fraction b / reference_batch_size of a step. With
            SGD only, and 64 there unless given; 1 for full steps always.
        adaptive_step: Multiply steps by how far the rotation loss lies above that on source data
            (:class:`~ttvd.methods.ttvd.step_scale.StepScale`). With SGD only; on by default if the sites hold that
            loss and several rotations are used and told apart.
        detect_changes: Watch the images, if the sites know those of the source (``inputs``). The adapter starts again
            where the stream changes, and moves away from the source by the evidence of a shift. False: norms and
            steps follow every stream in the same way.
        lr: Learning rate. None: 0.05 for a head that tells rotations apart, and for a plain one on a network with batch
            norm (0.1 from 50 classes on); 0.01 for a plain one without batch norm. This suits SGD without momentum,
            Adam needs about 0.001. Where batches hold few classes each, the steps of a plain head are 0.4 times as
            large, and 0 without batch norm.
        momentum: Momentum of SGD (Nesterov), 0 unless given; first beta of Adam, 0.9 unless given.
        statistics: Where batch norms take their statistics from. None: they follow the stream, starting at the source
            (at the anchors, where the sites hold them), which is worth 16 images, with a memory of 512. With
            ``detect_changes``, these averages are used as far as there is evidence of a shift.
    """

    networks = ("model", "source")
    guard_by_default: ClassVar[bool] = True
    defaults: ClassVar[TTVDOptions] = DEFAULTS
    model: SplitModel

    def __init__(self, model: nn.Module, sites: Sites, **options: Unpack[TTVDOptions]) -> None:
        self.check_options(options)
        chosen: TTVDOptions = {**DEFAULTS, **options}
        optimizer = chosen["optimizer"]
        parts = split(model)
        sites.check(parts)
        plain = parts.linear.out_features == sites.num_classes
        structure = chosen["structure"] = chosen["structure"] or ("pd" if plain else "cipd")
        check_choices(structure, chosen["objective"])
        views = sites.views if structure in ("civd", "cipd") else 1
        self.mirror = choose_mirror(chosen["mirror"], sites.mirror_gain if plain else None, structure)
        momentum = chosen["momentum"]
        batch_norm = any(isinstance(module, _BatchNorm) for module in parts.modules())
        kind = (1 if plain else sites.views, batch_norm)
        if chosen["slr_weight"] is None:
            chosen["slr_weight"] = 0.3 if takes_large_steps(*kind) else 0.0
        super().__init__(
            parts,
            anchors=sites.anchors.get(views),
            lr=choose_lr(chosen["lr"], *kind, sites.num_classes),
            optimizer=optimizer,
            momentum=(0.0 if optimizer == "sgd" else 0.9) if momentum is None else momentum,
            steps=chosen["steps"],
            statistics=chosen["statistics"]
            or _follow_stream(2 if self.mirror else views, anchored=views in sites.anchors),
            prediction=chosen["prediction"],
        )
        head = self.model.linear
        self.views, self.head_views = views, head.out_features // sites.num_classes
        self.batch_norm = batch_norm
        self._set_diagrams(sites, chosen)
        several = min(views, self.head_views) > 1  # nothing can be learnt from one rotation
        self._set_loss(chosen, several)
        self._set_answer(chosen, several, sites)
        self.reference_batch_size = choose_reference_batch_size(chosen["reference_batch_size"], optimizer)
        source_loss = sites.rotation_loss if several else None
        source_loss = choose_source_loss(chosen["adaptive_step"], source_loss, optimizer)
        self.step_scale = None if source_loss is None else StepScale(source_loss, head.weight)
        watched = sites.inputs if chosen["detect_changes"] else None
        self.source_accuracy = 1.0 if sites.accuracy is None else sites.accuracy
        self.drift = None if watched is None else InputDrift(watched, head.weight, self.source_accuracy)
        self.by_evidence = plain and chosen["adaptive_step"] is not False
        self.class_shares = ClassShares(sites.num_classes, head.weight) if self.drift else None
        self.answer_drift = None
        if self.drift is not None and self.source_entropies is not None:
            self.answer_drift = AnswerDrift(self.source_entropies, head.weight)
        self.source: SplitModel | None = None
        self.source_check: SourceCheck | None = None
        if self.drift is not None and plain and batch_norm and sites.num_classes > 1:
            self.source = shared_copy(parts, set()).eval()
            apply_statistics(self.source, Statistics.source())
            self.source_check = SourceCheck(sites.means[:, 0], head.weight)
            fitted = sites.temperatures.get(temperature_key("pd", 1.0))
            self.source_tau = self.tau if fitted is None else fitted

    def put_guard(self, guard: Guard | bool | None) -> None:
        """Watch the steps from now on; the guard learns of the entropies and the accuracy on source images."""
        settings = choose_guard(guard, self.guard_by_default)
        if settings is not None and settings.entropy_quantiles is None and self.source_entropies is not None:
            settings = replace(
                settings, entropy_quantiles=self.source_entropies, source_accuracy=self.source_accuracy
            )
        super().put_guard(False if settings is None else settings)

    def _set_diagrams(self, sites: Sites, options: TTVDOptions) -> None:
        self.structure: Structure = options["structure"] or "cipd"
        self.shift, tau = options["shift"], options["tau"]
        self.gamma = 1.0 if self.structure in ("vd", "pd") else options["gamma"]
        if tau is None and self.shift is not None and self.gamma != 1.0:
            raise ValueError("temperatures are fitted for the default shift: give tau together with a shift")
        key = temperature_key(self.structure, self.gamma)
        if self.mirror and MIRROR_KEY in sites.temperatures:
            key = MIRROR_KEY
        fitted = sites.temperatures.get(key)
        if tau is None and fitted is None:
            fitted = sites.temperature(self.structure, self.gamma)
        self.tau = choose_tau(tau, fitted)
        self.source_entropies = sites.entropies.get(key) if self.tau == fitted else None
        head = self.model.linear
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        if self.views < self.head_views:
            weight = weight[:: self.head_views]
            bias = None if bias is None else bias[:: self.head_views]
        self.voronoi = sites.diagram(self.views).to(device=weight.device)
        # The joint objective uses all sites, however many views predict.
        joint = options["objective"] == "joint"
        self.joint_voronoi = sites.diagram().to(device=weight.device) if joint else self.voronoi
        self.power = Diagram.from_linear(weight, bias, views=min(self.views, self.head_views))

    def _set_loss(self, options: TTVDOptions, several: bool) -> None:
        self.objective, self.diversity_weight = options["objective"], options["diversity_weight"]
        rotation, slr, filtered = (
            options["rotation_weight"],
            options["slr_weight"],
            options["agreement_filter"],
        )
        self.rotation_weight = float(several) if rotation is None else rotation
        cells = self.model.linear.out_features
        self.slr_weight = slr if slr is not None and cells > 1 else 0.0  # the ratio needs two cells
        self.agreement_filter = (
            self.structure == "cipd" and self.head_views == 1 if filtered is None else filtered
        )
        check_weights(self.rotation_weight, self.slr_weight, self.diversity_weight, self.head_views)

    def _set_answer(self, options: TTVDOptions, several: bool, sites: Sites) -> None:
        prior, temperature, like = options["prior"], options["output_temperature"], self.model.linear.weight
        pairs = several or self.mirror
        self.output_temperature = ("stream" if pairs else 1.0) if temperature is None else temperature
        check_answer(prior, self.output_temperature, known=self.mirror or self.head_views > 1)
        self.prior = prior if prior is None or isinstance(prior, str) else float(prior)
        classes = sites.num_classes
        shares = prior == "stream" and classes > 1  # one class has no shares
        self.label_shift = LabelShiftEstimator(classes, like) if shares else None
        self.online_temperature: OnlineTemperature | AgreementTemperature | None = None
        if self.output_temperature == "stream":
            self.online_temperature = (
                AgreementTemperature(
                    sites.agreement_exponent or 1.0,
                    like,
                    choose_agreement_ratio(sites),
                    least=FACTORS[0] if self.batch_norm else 1.0,
                )
                if self.mirror
                else OnlineTemperature(like)
            )

    @classmethod
    def site_parts(cls, sites: Sites, parameters: Mapping[str, Any]) -> frozenset[str]:
        """Name the parts of the sites, beside means and temperatures, on which results depend.

        Benchmarks fingerprint these parts, so that a run on other sites is another run.

        Args:
            sites: Sites of the model.
            parameters: Parameters as plain JSON values, defaults included.
        """
        # By default the structure depends on the head, and with it the views: both count then.
        views = {1, sites.views} if parameters["structure"] is None else set()
        views |= {1 if parameters["structure"] in ("vd", "pd") else sites.views}
        given = parameters["statistics"]
        anchored = given is None or (isinstance(given, str) and Statistics.parse(given).anchored)
        parts = {f"anchors/{count}" for count in views} if anchored else set()
        parts |= {"rotation_loss"} if parameters["adaptive_step"] is not False else set()
        parts |= {"inputs"} if parameters["detect_changes"] else set()
        parts |= {"accuracy", "entropies"}  # the guard reads both
        return frozenset(
            parts | ({"mirror_gain", "agreement_exponent"} if parameters["mirror"] is not False else set())
        )

    def output(self, x: Tensor) -> Tensor:
        """Class scores F / tau of the structure, softened and corrected for the shares of the classes."""
        scores = self._score(*self.forward_views(x, self._evidence(x)), self.structure) / self.tau
        return self._answer(self._soften(self._check(scores, self._forward_source(x))[0]))

    @torch.no_grad()
    def _forward_source(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features (b, d) and scores (b, k) of the source for the upright images; None where they are not needed."""
        if self.source is None:
            return None
        z, logits = self.source.features_and_logits(x)
        return z, logits / self.source_tau

    @torch.no_grad()
    def _check(
        self, scores: Tensor, source: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, SourceAverages | None]:
        """Scores of the source in place of those of the adapter, as far as these have lost what the source sees."""
        if self.source_check is None or source is None:
            return scores, None
        found = self.source_check.look(scores, source[1], source[0])
        return torch.lerp(
            scores, source[1].to(scores.dtype), self.source_check.hold(found).to(scores.dtype)
        ), found

    def source_output(self, x: Tensor) -> Tensor:
        """Class scores of the source: no batch moves the statistics of its norms."""
        evidence = None if self.drift is None else torch.zeros((), device=x.device)
        return self._soften(self._score(*self.forward_views(x, evidence), self.structure) / self.tau)

    def observe_source(self, logits: Tensor) -> None:
        """Learn how sure the source is of the images that the guard looks at."""
        if self.answer_drift is not None and self.class_shares is not None:
            self.answer_drift.observe(logits, self.class_shares.step_factor())

    def predictor(self, x: Tensor) -> "TTVD":
        """A copy at the start if the stream changes with this batch, as a step would start again."""
        if self.drift is None:
            return self
        windows, changed = self.drift.look(x, self._tolerance(), self._class_scale())
        if not bool(changed | self._has_turned(windows)):
            return self
        twin = self.copy_at_start(KEPT)
        assert twin.drift is not None
        twin.drift.write(windows)
        if twin.answer_drift is not None:
            twin.answer_drift.begin(changed)
        twin.drift.settled = True  # the batch has been looked at
        return twin

    def _evidence(self, x: Tensor) -> Tensor | None:
        """The evidence of a shift, with this batch; None where the source is not known."""
        if self.drift is None:
            return None
        windows = self.drift.windows() if self.drift.settled else self.drift.look(x)[0]
        return self._join(self.drift.evidence(windows, self._class_scale()))

    def _join(self, evidence: Tensor) -> Tensor:
        """The evidence of images and answers, or 0 where the guard has stopped the adapter at the source."""
        if self.answer_drift is not None:
            evidence = torch.maximum(evidence, self.answer_drift.evidence())
        return evidence * ~self.guard.is_at_source() if isinstance(self.guard, GuardMonitor) else evidence

    def _has_turned(self, windows: Windows) -> Tensor:
        """Whether the answers alone show that a shift has come or gone, since the images do not."""
        assert self.drift is not None
        if self.answer_drift is None:
            return torch.zeros((), dtype=torch.bool, device=windows.mean.device)
        return self.answer_drift.turned() & (self.drift.evidence(windows, self._class_scale()) < 1.0)

    def _class_scale(self) -> Tensor | float:
        """Factor on the radii of the classes: below 1 where the last images were of many classes."""
        return 1.0 if self.class_shares is None else self.class_shares.class_scale(self.source_accuracy)

    def _tolerance(self) -> Tensor | float:
        """How many radii a stream may jump: twice as many if its batches hold few classes each."""
        return 1.0 if self.label_shift is None else 1.0 + (self.label_shift.excess / UNEQUAL).clamp(0.0, 1.0)

    def _watch(self, x: Tensor) -> Tensor | None:
        """Start again if the stream has changed with this batch; the evidence of a shift."""
        if self.drift is None:
            return None
        if self.drift.following and not self.drift.settled:
            windows, changed = self.drift.look(x, self._tolerance(), self._class_scale())
            turned = changed | self._has_turned(windows)
            self.reset_where(turned, KEPT)
            if self.answer_drift is not None:
                self.answer_drift.begin(changed)
            if isinstance(self.guard, GuardMonitor):
                self.guard.contrast.forget(turned)  # the source changes its answers here for another reason
            self.drift.write(windows)
        return self._join(self.drift.evidence(self.drift.windows(), self._class_scale()))

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Pull the parameters of a plain head with batch norm a little back to the source."""
        if self.source_check is None or not self.by_evidence:
            return
        own, initial = self.unguarded()
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        share = PULL * min(1.0, len(step.out) / self.reference_batch_size)
        torch._foreach_lerp_([own[name] for name in names], [initial[name] for name in names], share)

    def count_outputs(self) -> int:
        """Number of classes, whether the head tells rotations apart or not."""
        return self.model.linear.out_features // self.head_views

    def stream_parts(self) -> nn.Module:
        """The norms of the network, and what else is estimated along the stream."""
        return self

    def loss(self, x: Tensor) -> Step:
        """Answer, objective over the kept samples, rotation loss of all, and balance of the batch."""
        # Two functions: what the second one writes in place must not enter the gradients of the first.
        evidence = self._watch(x)
        source = self._forward_source(x)
        z, logits = self.forward_views(x, evidence)
        answer, loss, share, soft, scores, rotations, checked = self._compute_loss(z, logits, source)
        scale = self._track_stream(soft, scores, logits.detach(), rotations, evidence, checked)
        if self.by_evidence and evidence is not None and self.class_shares is not None:
            least = UNEQUAL_STEP if self.batch_norm else 0.0
            scale = (
                scale * evidence * self.class_shares.step_factor() * (least + (1.0 - least) * self._balance())
            )
        return Step(answer, loss * scale, share)

    @fusible()
    def _compute_loss(
        self, z: Tensor, logits: Tensor, source: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, SourceAverages | None]:
        """Answer, loss, kept share, softened scores, scores, rotations, and what the check found.

        Args:
            z: Features (v, b, d).
            logits: Logits (v, b, outputs).
            source: Features and scores of the source, where they are known.
        """
        scores = self._score(z, logits, self.structure) / self.tau
        # Shared by all terms over the joint cells. A head without rotations classifies the upright view alone.
        log_probs = log_posteriors(logits if self.mirror else logits[: self.power.views])
        needed = self.rotation_weight or self.online_temperature is not None or self.step_scale is not None
        rotations = log_rotations(log_probs, self.head_views) if needed else None
        soft = self._soften(scores.detach())
        answered, checked = self._check(scores.detach(), source)
        answer = self._answer(self._soften(answered))
        kept = self._filter(z, logits, scores)
        # Without batch norm, labels that follow the shares would make frequent classes more frequent still.
        labels = (answer if self.batch_norm else soft).argmax(1)
        each, share = self._objective(z, log_probs, scores, labels), kept_fraction(kept)
        if self.slr_weight:
            each = each + self.slr_weight * self._balance() * soft_likelihood_ratio(log_probs).mean(0)
        loss = mean_over(each, kept)
        if self.rotation_weight and rotations is not None:
            loss = loss + self.rotation_weight * rotation_nll(rotations).mean()
            share = torch.ones_like(share)  # the rotations of all samples are known: all take part
        if self.diversity_weight:
            loss = loss + self.diversity_weight * self._balance() * imbalance(scores)
        loss = loss * min(1.0, len(scores) / self.reference_batch_size)
        return answer, loss, share, soft, scores.detach(), rotations, checked

    @fusible(writes_scalars=True)
    @torch.no_grad()
    def _track_stream(
        self,
        soft: Tensor,
        scores: Tensor,
        views: Tensor,
        rotations: Tensor | None,
        evidence: Tensor | None,
        checked: SourceAverages | None,
    ) -> Tensor | float:
        """Update everything that is estimated along the stream; returns the factor on the step."""
        if self.source_check is not None and checked is not None:
            self.source_check.update(checked)
        if self.drift is not None:
            self.drift.explain(soft, self._tolerance(), self._class_scale())
        if self.class_shares is not None:
            self.class_shares.update(soft)
        if self.answer_drift is not None and self.class_shares is not None and evidence is not None:
            # Without evidence these are answers of the source. One class alone may be harder than all are together.
            self.answer_drift.update(scores, self.class_shares.step_factor() * (evidence == 0))
        if self.label_shift is not None:
            self.label_shift.update(soft)
        if isinstance(self.online_temperature, AgreementTemperature):
            self.online_temperature.update(views, scores)
        elif self.online_temperature is not None and rotations is not None:
            self.online_temperature.update(rotations)
        if self.source_check is not None and checked is not None:
            return 1.0 - self.source_check.hold(checked)
        if self.step_scale is None or rotations is None:
            return 1.0
        self.step_scale.update(rotations)
        return self.step_scale.factor()

    def _soften(self, scores: Tensor) -> Tensor:
        if self.online_temperature is not None:
            return soften(scores, self.online_temperature)
        return soften(scores, float(self.output_temperature))

    @torch.no_grad()
    def _answer(self, soft: Tensor) -> Tensor:
        fixed = self.prior if isinstance(self.prior, float) else None
        return correct_shares(soft, fixed if self.label_shift is None else self.label_shift)

    def _balance(self) -> Tensor | float:
        """Weight of diversity: 1 where batches hold all classes alike, 0 where they do not."""
        if self.label_shift is None or self.head_views > 1:
            return 1.0
        return 1.0 - (self.label_shift.excess / UNEQUAL).clamp(0.0, 1.0)

    def forward_views(self, x: Tensor, evidence: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Features (v, b, d) and logits (v, b, outputs) of the views."""
        views = 2 if self.mirror else self.views
        x = torch.cat([x, x.flip(-1)]) if self.mirror else x if views == 1 else _rotate(x, views)
        norms = [part for part in self.model.modules() if isinstance(part, StreamNorm)]
        rows = None
        if self.class_shares is not None and self.head_views == 1:
            rows = (len(x) * self.class_shares.weight()).round().clamp_min(1.0).long()
        with Temporarily(norms, "evidence", evidence), Temporarily(norms, "counted_rows", rows):
            z, logits = self.model.features_and_logits(x)
        return z.unflatten(0, (views, -1)), logits.unflatten(0, (views, -1))

    def _score(self, z: Tensor, logits: Tensor, structure: Structure) -> Tensor:
        """Class scores (b, k), up to a number that all classes of an image share."""
        if structure in ("vd", "civd"):
            return view_scores(z, self.voronoi, self.gamma)
        views = self.power.views
        if self.mirror:
            return logits.mean(0)
        if self.gamma == 1.0 and self.shift is None:
            # By the Lemma the logit is minus the power distance, and it is there already.
            cells = logits[:views].unflatten(2, (-1, self.head_views))
            found: Tensor = cells.diagonal(dim1=0, dim2=3).sum(-1)
            return found
        return view_scores(z[:views], self.power, self.gamma, self.shift)

    @torch.no_grad()
    def _filter(self, z: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
        """Which samples both diagrams give to the same class; ``scores`` are those of the structure."""
        if not self.agreement_filter:
            return torch.ones(z.shape[1], dtype=torch.bool, device=z.device)
        voronoi = self.structure in ("vd", "civd")
        civd = scores if voronoi else self._score(z, logits, "civd")
        cipd = self._score(z, logits, "cipd") if voronoi else scores
        return agreement(civd.argmax(1), cipd.argmax(1))

    def _objective(self, z: Tensor, log_probs: Tensor, scores: Tensor, classes: Tensor) -> Tensor:
        """The objective of each sample, (b,)."""
        if self.objective == "entropy":
            return entropy(scores)
        if self.objective == "joint":
            return joint_entropy(log_probs, z, self.joint_voronoi)
        return consensus(log_probs, classes, self.head_views)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        device = self.model.linear.weight.device
        self.voronoi = self.voronoi.to(device=device)
        self.joint_voronoi = self.joint_voronoi.to(device=device)
        self.power = self.power.to(device=device)
        return self


def _follow_stream(views: int, anchored: bool) -> Statistics:
    """The default statistics: the source is worth 16 images, the memory 512."""
    return Statistics(count=16 * views, memory=512 * views, renorm=True, anchored=anchored)


for _preset in PRESETS:
    _views = 1 if _preset.defaults.get("structure") in ("vd", "pd") else 4
    register(
        _preset.name,
        summary=_preset.summary,
        paper="Lei et al., TTVD",
        updates="norm affine",
        forwards=_views,
        backwards=_views,
        needs=frozenset({"sites"}),
        defaults=_preset.defaults,
        revision=_preset.revision,
    )(TTVD)
