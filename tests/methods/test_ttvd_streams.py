"""Streams through TTVD with its further terms, against an image-by-image twin in float64 that follows the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import OFF, WAITING, Watch, draw_images, make_ttvd
from ttvd.methods.shared.losses import log_posteriors
from ttvd.nn.resnet import ResNet
from ttvd.nn.views import log_rotations
from ttvd.testing import make_world


@dataclass
class Naive:
    """TTVD with gamma 1 and all terms; the class that is answered is the one that is learnt."""

    twin: Any
    means: Tensor
    structure: str
    agreement_filter: bool
    tau: float = 1.5
    rotation_weight: float = 0.0
    slr_weight: float = 0.0
    prior: float | None = None
    output_temperature: float = 1.0
    reference_batch_size: int | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, int, Tensor]:
        """Predicted probabilities, how many images take part in the step, and the loss."""
        turns = 1 if self.structure in ("vd", "pd") else 4
        rotations = self.twin.fc.out_features // len(self.means)
        z = self.twin.forward_features(torch.cat([torch.rot90(x, a, (2, 3)) for a in range(turns)]))
        z = z.reshape(turns, len(x), -1)
        p = self.twin.fc(z[: min(turns, rotations)]).softmax(-1).unflatten(-1, (-1, rotations))
        power = sum((p[a, :, :, a].log() for a in range(len(p))), torch.zeros(()))
        voronoi = -torch.stack([torch.cdist(z[a], self.means[:, a]) for a in range(turns)]).sum(0)
        scores = (power if self.structure in ("pd", "cipd") else voronoi) / self.tau
        answer = self.predict(scores.detach())
        chosen = (power.argmax(1) == voronoi.argmax(1)).tolist() if self.agreement_filter else [True] * len(x)
        loss = torch.zeros(())
        for i, kept in enumerate(chosen):
            turned = torch.stack([p[a, i, :, a].sum() for a in range(len(p))])
            loss = loss - self.rotation_weight * turned.log().mean() / len(x)
            if kept:
                loss = loss + self.cost(p[:, i], int(answer[i].argmax())) / sum(chosen)
        mean = scores.softmax(1).mean(0)
        loss = loss + (len(x) - 1) / len(x) * (mean * mean.log()).sum()
        if self.reference_batch_size is not None and len(x) < self.reference_batch_size:
            loss = loss * len(x) / self.reference_batch_size
        return answer, len(x) if self.rotation_weight else sum(chosen), loss

    def cost(self, p: Tensor, label: int) -> Tensor:
        """Consensus and likelihood ratio of one image, from the probabilities (v, k, rotations) of its views."""
        total = torch.zeros(())
        for a in range(len(p)):
            total = total - p[a, label, a].log() - self.slr_weight * (p[a] * (p[a] / (1 - p[a])).log()).sum()
        return total / len(p)

    def predict(self, scores: Tensor) -> Tensor:
        p = (scores / self.output_temperature).softmax(1)
        if self.prior is None:
            return p
        shares = torch.full_like(p[0], 1 / p.shape[1])
        for _ in range(3):
            posteriors = p * shares / (p * shares).sum(1, keepdim=True)
            shares = (self.prior / p.shape[1] + posteriors.sum(0)) / (self.prior + len(p))
        return p * shares / (p * shares).sum(1, keepdim=True)


@dataclass(frozen=True)
class Bench:
    """What the suite has, in one place."""

    make_net: Callable[..., ResNet]
    make_sites: Callable[..., ttvd.Sites]
    make_stream: Callable[..., list[Tensor]]
    make_twin: Callable[..., nn.Module]
    make_optimizer: Callable[..., torch.optim.Optimizer]
    assert_parameters: Callable[[nn.Module, nn.Module, nn.Module], None]

    def run(self, outputs: int, **options: Any) -> None:
        """Predictions, shares kept and parameters are the twin's."""
        net = self.make_net(outputs)
        sites, twin = self.make_sites(net), self.make_twin(net)
        naive, descent = Naive(twin, sites.means, **options), self.make_optimizer(twin, "sgd", 0.03)
        chosen = {**OFF, "diversity_weight": 1.0, **options}
        adapter = ttvd.TTVD(net, sites, lr=0.03, tau=naive.tau, gamma=1.0, **chosen)
        for x in self.make_stream(8, 5, 1, 6):
            quiet = adapter.predict(x)
            found, (wanted, used, loss) = adapter(x), naive(x)
            torch.testing.assert_close(found.softmax(1), wanted, rtol=1e-7, atol=1e-8)
            torch.testing.assert_close(quiet, found)
            assert float(adapter.kept) == pytest.approx(used / len(x))
            if used:
                descent.zero_grad()
                loss.backward()
                descent.step()
        self.assert_parameters(adapter, twin, net)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(**{name: request.getfixturevalue(name) for name in Bench.__dataclass_fields__})


ALL: dict[str, Any] = {
    "rotation_weight": 0.7,
    "slr_weight": 0.3,
    "prior": 2.0,
    "output_temperature": 1.3,
    "reference_batch_size": 6,
}


@pytest.mark.parametrize("name", ALL)
def test_each_option_alone(name: str, bench: Bench) -> None:
    bench.run(12, structure="cipd", agreement_filter=True, **{name: ALL[name]})


@pytest.mark.parametrize("filtered", [True, False], ids=["filtered", "all kept"])
@pytest.mark.parametrize("structure", ["vd", "civd", "pd", "cipd"])
@pytest.mark.parametrize("outputs", [12, 3], ids=["joint head", "plain head"])
def test_all_options_together(outputs: int, structure: str, filtered: bool, bench: Bench) -> None:
    options = ALL if outputs == 12 else {**ALL, "rotation_weight": 0.0}
    bench.run(outputs, structure=structure, agreement_filter=filtered, **options)


def differing(one: ttvd.TTVD, other: ttvd.TTVD) -> float:
    theirs = other.state_dict()
    return max(float((value - theirs[name]).abs().max()) for name, value in one.state_dict().items())


UNTAUGHT: list[tuple[str, dict[str, Any]]] = [
    *((objective, {"output_temperature": 2.0}) for objective in ("consensus", "entropy", "joint")),
    *((objective, {"prior": 3.0}) for objective in ("entropy", "joint")),
]


@pytest.mark.parametrize(("objective", "options"), UNTAUGHT)
def test_what_is_done_to_answers_teaches_nothing_but_their_class(
    objective: str, options: dict[str, Any]
) -> None:
    """A factor leaves the class as it is, and objectives without a class see nothing of the answer."""
    plain = make_ttvd(objective=objective, diversity_weight=1.0)
    treated = make_ttvd(objective=objective, diversity_weight=1.0, **options)
    for seed in range(3):
        before, after = plain(draw_images(seed=seed)), treated(draw_images(seed=seed))
        assert (before.softmax(1) - after.softmax(1)).abs().max() > 1e-4
        if "output_temperature" in options:
            torch.testing.assert_close(after, before / 2)
            assert after.softmax(1).amax(1).mean() < before.softmax(1).amax(1).mean()
    assert differing(plain, treated) == 0.0


def test_the_class_that_is_answered_is_learnt() -> None:
    """Where shares change an answer, they change the step; it is that of the answer given as the label."""
    plain, treated, x = (
        make_ttvd(agreement_filter=False),
        make_ttvd(agreement_filter=False, prior=0.1),
        draw_images(24),
    )
    label = treated.predict(x).argmax(1)
    assert (plain.predict(x).argmax(1) != label).any(), "no answer was corrected: this shows nothing"
    step = treated.loss(x)
    _, logits = treated.forward_views(x)
    wanted = torch.stack(
        [-logits[a].log_softmax(1)[i, 4 * int(label[i]) + a] for a in range(4) for i in range(24)]
    ).mean()
    torch.testing.assert_close(step.loss, wanted)
    assert plain.loss(x).loss < step.loss
    plain(x)
    treated(x)
    assert differing(plain, treated) > 0.0


def test_a_smaller_batch_takes_a_smaller_step() -> None:
    """While the size stays, it is the learning rate that is divided; from the full size on nothing changes."""
    for size, share in ((4, 0.5), (1, 0.125), (8, 1.0), (12, 1.0)):
        scaled = make_ttvd(reference_batch_size=8, lr=0.01, diversity_weight=1.0)
        slow = make_ttvd(lr=0.01 * share, diversity_weight=1.0)
        for seed in range(3):
            scaled(draw_images(size, seed))
            slow(draw_images(size, seed))
        theirs = slow.state_dict()
        for name, value in scaled.state_dict().items():
            if name.startswith("model."):
                torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-7)


def test_known_rotations_teach_where_the_filter_keeps_nothing() -> None:
    options: dict[str, Any] = {"diversity_weight": 0.0, "adaptive_step": False, "guard": False}
    silent, taught = make_ttvd(**options), make_ttvd(**options, rotation_weight=1.0)
    for adapter in (silent, taught):
        adapter._filter = lambda z, logits, scores: torch.zeros(len(scores), dtype=torch.bool)  # type: ignore[method-assign]
    fresh = make_ttvd(adaptive_step=False, guard=False)
    silent(draw_images())
    taught(draw_images())
    assert float(silent.kept) == 0.0
    assert float(taught.kept) == 1.0
    assert differing(silent, fresh) == 0.0
    assert differing(taught, fresh) > 0.0


def test_known_rotations_become_better_known() -> None:
    adapter = make_ttvd(agreement_filter=True, diversity_weight=0.0, rotation_weight=3.0, lr=0.02)
    x = draw_images(16)

    def miss() -> float:
        _, logits = adapter.forward_views(x)
        return -float(log_rotations(log_posteriors(logits), 4).diagonal(dim1=0, dim2=2).mean())

    with torch.no_grad():
        before = miss()
        for _ in range(10):
            adapter(x)
        assert miss() < 0.7 * before


@pytest.mark.parametrize(
    ("name", "rotations"), [("ttvd", True), ("ttvd", False), ("pd", True), ("ttvd-reference", True)]
)
def test_the_contract_is_kept_with_all_terms(name: str, rotations: bool) -> None:
    model, make = make_world(
        name, rotations=rotations, **(ALL if rotations else {**ALL, "rotation_weight": 0.0})
    )
    ttvd.check_adapter(make, model, [draw_images(seed=seed) for seed in range(4)])


@pytest.mark.parametrize("options", [{"agreement_filter": False, **ALL}, {}], ids=["all terms", "default"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_single_images_and_heads_of_any_size_stay_finite(
    scale: float,
    options: dict[str, Any],
    make_net: Callable[..., ResNet],
    make_sites: Callable[..., ttvd.Sites],
    make_stream: Callable[..., list[Tensor]],
) -> None:
    net = make_net().float()
    with torch.no_grad():
        net.fc.weight.mul_(scale)
        net.fc.bias.mul_(scale)
    adapter = ttvd.TTVD(net, make_sites(net), **options)
    for x in make_stream(1, 1, 5, 1):
        step = adapter.loss(x.float())
        gradients = torch.autograd.grad(step.loss, adapter.adapting())
        assert all(value.isfinite().all() for value in (step.out, step.loss, *gradients))
        assert adapter(x.float()).isfinite().all()


def test_under_autocast_the_terms_are_in_float32() -> None:
    adapter = make_ttvd(**ALL)
    with torch.autocast("cpu", torch.bfloat16):
        step = adapter.loss(draw_images())
    assert step.loss.dtype == step.out.dtype == torch.float32
    assert adapter.accelerate(precision="bfloat16")(draw_images()).dtype == torch.float32


def test_nothing_waits_for_the_device() -> None:
    adapter = make_ttvd(**ALL)
    adapter(draw_images())
    with Watch() as watch:
        adapter.adapt(draw_images())
    assert "logsumexp" in watch.names
    assert not watch.names & WAITING


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_with_all_terms_are_recorded() -> None:
    recorded, written = (make_ttvd(device="cuda", **ALL) for _ in range(2))
    written.capture = "never"
    for seed in range(4):
        x = draw_images(seed=seed).cuda()
        torch.testing.assert_close(recorded(x).softmax(1), written(x).softmax(1), rtol=0.0, atol=1e-5)
    assert recorded.runner.obstacle is None
    assert recorded.runner.captured_steps()
