"""TTVD: test-time adaptation guided by Voronoi diagrams, in all its stages."""

from collections.abc import Callable
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.adapters.base import Timing
from ttvd.adapters.gradient import GradientAdapter, Step
from ttvd.adapters.objectives import entropy, imbalance, mean_over, miss_rotation, soft_ratio
from ttvd.adapters.registry import register
from ttvd.adapters.ttvd_options import check_answer, check_choice, check_full_step, check_terms
from ttvd.geometry import Diagram, agreement, distances, kept_fraction, view_scores
from ttvd.geometry.prior import shift_weights
from ttvd.models.norms import Statistics
from ttvd.models.sites import Sites
from ttvd.models.split import SplitModel, split
from ttvd.models.views import rotate

Structure = Literal["vd", "civd", "pd", "cipd"]
Objective = Literal["entropy", "joint", "consensus"]


class TTVD(GradientAdapter):
    """Moves features into the cells of diagrams whose sites are fixed before deployment.

    The four quarter turns of an image are its views; a class owns a cluster of sites, one for each view. Voronoi
    sites are the class means of the source features, power sites come from the head by the Lemma (site W / 2,
    weight b + |W|^2 / 4). A view is compared with the sites of its own rotation only, and the influence
    F_k = -sign(gamma) * sum_a q_ka^gamma (q: distance, or power distance) gives the class scores F / tau.

    With ``gamma=1`` the cluster-induced power diagram gives the sum of the matching logits of the views: it *is* the
    aggregation of self-supervised label augmentation.

    Objectives, each averaged over the samples that the filter keeps:

    - ``"consensus"`` (default): the class with the largest influence is joined with the rotation that each view is
      known to have; each view's cross-entropy against that cell of the joint power diagram.
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
        objective: What is minimised, see above.
        gamma: Exponent of the influence; the paper uses -0.8.
        tau: Temperature; unless given, the one that was fitted on held-out source data.
        shift: Constant added to power distances before the exponent; by default the smallest that makes them
            non-negative everywhere (see ``ttvd.geometry.view_influence``).
        filter: Use only samples to which the Voronoi and the power diagram give the same class; by default only with
            ``structure="cipd"``, as in the paper.
        diversity: Weight of the term that keeps the mean prediction of a batch from collapsing to few classes.
        known: Weight of -log p(rotation a) of the views a, over all samples: this label is true whatever the filter
            says, so that all of a batch is used. The head must tell rotations apart.
        ratio: Weight of the soft likelihood ratio over the cells of each view, of the kept samples.
        prior: Number of imagined images, spread evenly over the classes, with which the shares of the classes in a
            batch are estimated; predictions, and they alone, are corrected for these shares
            (``ttvd.geometry.prior``). None for no correction, which is also what a large number comes to.
        soften: Factor on the temperature of predictions, and of them alone: above 1 they are less confident.
        full_step: Number of images from which on a step is full; a batch of fewer, b, takes b / full_step of one.
            None for full steps always. With SGD only.
        lr: Learning rate.
        optimizer: ``"sgd"`` or ``"adam"``.
        momentum: Momentum of SGD (Nesterov), first beta of Adam.
        steps: Gradient steps for each batch.
        statistics: Where batch norms take their statistics from; the batch by default.
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
        filter: bool | None = None,
        diversity: float = 1.0,
        known: float = 0.0,
        ratio: float = 0.0,
        prior: float | None = None,
        soften: float = 1.0,
        full_step: int | None = None,
        lr: float = 5e-3,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        steps: int = 1,
        statistics: Statistics | None = None,
        prediction: Timing = "before",
    ) -> None:
        parts = split(model)
        sites.check(parts)
        super().__init__(
            parts,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            steps=steps,
            statistics=statistics,
            prediction=prediction,
        )
        check_choice("structure", structure, get_args(Structure))
        check_choice("objective", objective, get_args(Objective))
        self.structure, self.objective = structure, objective
        self.gamma = 1.0 if structure in ("vd", "pd") else gamma
        if tau is None and shift is not None and self.gamma != 1.0:
            raise ValueError("temperatures are fitted for the default shift: give tau together with a shift")
        self.tau = sites.temperature(structure, self.gamma) if tau is None else tau
        if not self.tau > 0.0:
            raise ValueError(f"tau must be positive, got {self.tau}")
        self.shift = shift
        self.filter = structure == "cipd" if filter is None else filter
        self.diversity = diversity
        self.views = sites.views if structure in ("civd", "cipd") else 1
        self.head_views = self.model.linear.out_features // sites.num_classes
        check_terms(known, ratio, self.head_views)
        check_answer(prior, soften)
        check_full_step(full_step, optimizer)
        self.known, self.ratio = known, ratio
        self.prior, self.soften, self.full_step = prior, soften, full_step
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

    def output(self, x: Tensor) -> Tensor:
        """Class scores F / tau of the structure, softened and corrected for the shares of the classes."""
        return self._answer(self._scores(*self._look(x), self.structure) / self.tau)

    def loss(self, x: Tensor) -> Step:
        """Scores, objective over the kept samples, known rotations of all, and balance of the batch."""
        z, logits = self._look(x)
        out = self._scores(z, logits, self.structure) / self.tau
        judged = logits[: self.power.views]  # a head without rotations judges the upright view alone
        kept = self._keep(z, logits, out)
        each, share = self._objective(z, judged, out), kept_fraction(kept)
        if self.ratio:
            each = each + self.ratio * soft_ratio(judged).mean(0)
        loss = mean_over(each, kept)
        if self.known:
            loss = loss + self.known * miss_rotation(judged, self.head_views).mean()
            share = torch.ones_like(share)  # what the filter drops has a true label still: all take part
        if self.diversity:
            loss = loss + self.diversity * imbalance(out)
        if self.full_step is not None:
            loss = loss * min(1.0, len(x) / self.full_step)
        return Step(self._answer(out), loss, share)

    @torch.no_grad()
    def _answer(self, out: Tensor) -> Tensor:
        """What is returned for the scores that the losses are made of."""
        out = out / self.soften
        return out if self.prior is None else out + shift_weights(out, self.prior)

    def _look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (v, b, d) and logits (v, b, outputs) of the views."""
        if self.views == 1:
            z, logits = self.model.features_and_logits(x)
            return z[None], logits[None]
        z, logits = self.model.features_and_logits(rotate(x, self.views))
        return z.unflatten(0, (self.views, -1)), logits.unflatten(0, (self.views, -1))

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
        if not self.filter:
            return torch.ones(z.shape[1], dtype=torch.bool, device=z.device)
        known = {"civd" if self.structure in ("vd", "civd") else "cipd": out}
        both = (known[kind] if kind in known else self._scores(z, logits, kind) for kind in ("civd", "cipd"))
        return agreement(*(scores.argmax(1) for scores in both))

    def _objective(self, z: Tensor, judged: Tensor, out: Tensor) -> Tensor:
        """Per-sample loss (b,) of features (v, b, d), logits of the views that the head judges, and scores."""
        if self.objective == "entropy":
            return entropy(out)
        if self.objective == "joint":
            apart = distances(z.flatten(0, 1), self.joint_voronoi).unflatten(0, z.shape[:2])
            return entropy(judged).mean(0) + entropy(-apart).mean(0)
        turn = torch.arange(len(judged), device=z.device)[:, None]
        cell = out.detach().argmax(1) * self.head_views + turn
        return F.cross_entropy(judged.flatten(0, 1), cell.flatten(), reduction="none").view_as(cell).mean(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        device = self.model.linear.weight.device
        self.voronoi, self.joint_voronoi = (
            self.voronoi.to(device=device),
            self.joint_voronoi.to(device=device),
        )
        self.power = self.power.to(device=device)
        return self


_PAPER = {"objective": "entropy", "gamma": -0.8, "diversity": 0.0, "lr": 1e-3}
_CODE = {"objective": "joint", "gamma": 1.0, "diversity": 0.0, "lr": 1e-3}
_ENTRIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ttvd", "Views agree on a class; each learns the cell of that class and its own rotation.", {}),
    (
        "vd",
        "First stage: entropy of the Voronoi diagram's soft labels, upright view.",
        {"structure": "vd"} | _PAPER,
    ),
    (
        "civd",
        "Second stage: entropy of the cluster-induced Voronoi diagram's.",
        {"structure": "civd"} | _PAPER,
    ),
    ("pd", "Entropy of the head's power diagram's soft labels, upright view.", {"structure": "pd"} | _PAPER),
    ("cipd", "Third stage: cluster-induced power diagram with the filter.", {"structure": "cipd"} | _PAPER),
    ("ttvd-paper", "The third stage with the paper's constants to the letter: tau 1.", {"tau": 1.0} | _PAPER),
    ("ttvd-reference", "The loss of the authors' code, joint entropies, with a filter that filters.", _CODE),
)
for _name, _summary, _defaults in _ENTRIES:
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
    )(TTVD)
