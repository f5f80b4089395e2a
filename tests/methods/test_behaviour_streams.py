"""What the methods promise on streams: gains under shift and order, no-ops, restarts, draws, papers' constants."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import read_defaults
from ttvd.methods import deyo, roid
from ttvd.methods.deyo import DeYO
from ttvd.methods.eata import EATA, ETA, default_similarity
from ttvd.methods.rdumb import RDumb
from ttvd.methods.roid import ROID
from ttvd.methods.sar import SAR
from ttvd.methods.shared.augmentations import augment
from ttvd.source.fisher import estimate_fisher

NORMS = pytest.mark.parametrize("norm", ["batch", "group"])


class World(NamedTuple):
    """A classifier of six patterns, images as it knows them, the same through a worse camera, and labels."""

    net: nn.Module
    clean: Tensor
    shifted: Tensor
    labels: Tensor


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    return {norm: build_world(norm) for norm in ("batch", "group")}


def build_world(norm: str) -> World:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(6, 1, 4, 4, generator=generator).repeat_interleave(3, -1).repeat_interleave(3, -2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        norms = [nn.BatchNorm2d(16) if norm == "batch" else nn.GroupNorm(4, 16) for _ in range(2)]
        first, second, head = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Linear(144, 6)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten())
    net = nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), pool, head)

    def photograph(labels: Tensor) -> Tensor:
        noise = torch.randn(len(labels), 1, 12, 12, generator=generator)
        return (0.25 + 0.5 * patterns[labels] + 0.125 * noise).clamp(0, 1)

    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    for _ in range(250):
        labels = torch.randint(6, (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(photograph(labels)), labels).backward()
        optimizer.step()
    labels = torch.arange(6).repeat(400)[torch.randperm(2400, generator=generator)]
    clean = photograph(labels)
    noise = torch.randn(clean.shape, generator=generator)
    shifted = (0.6 * clean + 0.1 + 0.15 * torch.linspace(0, 1, 12) + 0.15 * noise).clamp(0, 1)
    return World(net.eval(), clean, shifted, labels)


def create(world: World, name: str, **parameters: Any) -> ttvd.Adapter:
    if name == "eata":
        parameters["fisher"] = estimate_fisher(world.net, world.clean[:512])
    return ttvd.create(name, world.net, **parameters)


def stream_error(world: World, name: str, ordered: Any = False, **parameters: Any) -> float:
    adapter = create(world, name, **parameters)
    order = world.labels.argsort(stable=True) if ordered else torch.arange(len(world.labels))
    found = torch.cat([adapter(x).argmax(1) for x in world.shifted[order].split(64)])
    return float((found != world.labels[order]).double().mean())


METHODS = [(name, {"lr": 0.01}) for name in ("sar", "eta", "eata", "rdumb")]
METHODS += [("shot", {"lr": 0.003}), ("conjugate", {"lr": 0.003}), ("roid", {"lr": 0.002})]
METHODS += [("conjugate", {"lr": 0.003, "epsilon": 6.0}), ("deyo", {"lr": 0.01, "drop": 0.2})]


@NORMS
@pytest.mark.parametrize(("name", "parameters"), METHODS)
def test_entropy_methods_gain_on_a_shuffled_stream(
    name: str, parameters: dict[str, float], norm: str, worlds: dict[str, World]
) -> None:
    """Better than the source, and than what batch statistics alone give."""
    source, bn = (stream_error(worlds[norm], other) for other in ("source", "bn"))
    assert source > 0.1
    assert stream_error(worlds[norm], name, **parameters) < 0.97 * min(source, bn)


def test_lame_gains_on_a_sorted_stream_where_tent_collapses(worlds: dict[str, World]) -> None:
    world, source = worlds["group"], stream_error(worlds["group"], "source")
    assert stream_error(world, "tent", lr=0.01) < 0.7 * source
    assert stream_error(world, "tent", lr=0.01, ordered=True) > 2 * source
    assert stream_error(world, "lame", affinity="knn", ordered=True) < 0.8 * source


def test_prior_correction_helps_on_a_sorted_stream(worlds: dict[str, World]) -> None:
    errors = [stream_error(worlds["batch"], name, ordered=True) for name in ("roid", "tent")]
    assert errors[0] < 0.85 * errors[1]


def copy_state(adapter: ttvd.Adapter) -> dict[str, Tensor]:
    """All but the random_state and the guard, which a batch may move whatever it makes of the outcome."""
    return {
        name: value.clone()
        for name, value in adapter.state_dict().items()
        if not name.startswith(("random_state.", "guard."))
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


NOTHING_SURE, NOTHING_NEW, NOTHING_FALLS_APART = {"margin": 1e-12}, {"similarity": 1e-12}, {"drop": 1.0}
EMPTY = [(name, NOTHING_SURE) for name in ("sar", "eta", "eata", "deyo")]
EMPTY += [("eta", NOTHING_NEW), ("eata", NOTHING_NEW), ("deyo", NOTHING_FALLS_APART)]


@NORMS
@pytest.mark.parametrize(("name", "parameters"), EMPTY)
def test_empty_selection_changes_neither_parameters_nor_momentum(
    name: str, parameters: dict[str, float], norm: str, worlds: dict[str, World]
) -> None:
    """The optimizer remembers an earlier stream, ETA a mean prediction."""
    adapter = create(worlds[norm], name, lr=0.1, **parameters)
    planted = copy_state(adapter)
    for key in {"optimizer.velocity"} | (planted.keys() & {"mean"}):
        planted[key] += 1
    adapter.load_state_dict(adapter.state_dict() | planted)
    for x in worlds[norm].shifted[:200].split(64):
        adapter(x)
        assert float(adapter.kept) == 0.0
    assert same(copy_state(adapter), planted)


def test_sar_starts_again_once(worlds: dict[str, World]) -> None:
    """Certain images look like a collapse; what follows is learnt from, not compared with the old mean."""
    net, clean, shifted, _ = worlds["group"]
    adapter = SAR(net, lr=0.01, collapse=0.1)
    fresh, images = copy_state(adapter), torch.cat([clean, shifted])
    logits = net(images).detach()
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1) / math.log(6)
    certain, fair = images[entropy < 0.01][:64], images[(entropy > 0.2) & (entropy < 0.35)]
    adapter(certain)
    assert same(copy_state(adapter), fresh)
    for x in fair[:128].split(32):
        reached = copy_state(adapter)
        adapter(x)
        assert not same(copy_state(adapter), fresh)
        assert not same(copy_state(adapter), reached)


def test_rdumb_is_eta_until_it_starts_again(worlds: dict[str, World]) -> None:
    net, _, shifted, _ = worlds["batch"]
    options: dict[str, Any] = {"lr": 0.05, "similarity": 0.6}
    rdumb, endless = RDumb(net, batches=4, **options), ETA(net, **options)
    for step, x in enumerate(shifted[:640].split(64)):
        if step % 4 == 0:
            eta = ETA(net, **options)
        found = rdumb(x)
        assert torch.equal(found, eta(x))
        assert torch.equal(found, endless(x)) == (step < 4)


class Named(nn.Module):
    """Layers under the names that SAR and DeYO leave alone, and under names that look like them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.layer3, self.layer4 = (nn.BatchNorm2d(1) for _ in range(3))
        self.blocks = nn.Sequential(*(nn.BatchNorm2d(1) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.layer4(self.layer3(self.norm1(x))))
        return torch.as_tensor(self.head(self.norm(x.flatten(1))))


@pytest.mark.parametrize("method", [SAR, DeYO])
def test_last_layers_are_left_alone(method: Callable[..., ttvd.Adapter]) -> None:
    state = copy_state(method(Named()))
    adapting = {name.removeprefix("model.").rpartition(".")[0] for name in state if name.startswith("model.")}
    assert adapting == {"norm1", "layer3", *(f"blocks.{i}" for i in range(9))}


def test_fisher_is_the_mean_of_squared_batch_gradients(worlds: dict[str, World]) -> None:
    net = copy.deepcopy(worlds["batch"].net).double()
    batches = list(worlds["batch"].clean[:150].double().split(64))
    found, squares = estimate_fisher(net, batches), list[tuple[Tensor, ...]]()
    norms = {name: p for name, p in net.train().named_parameters() if name.split(".")[0] in ("1", "4")}
    for x in batches:
        loss = sum(-row.log_softmax(0)[row.argmax()] for row in net(x)) / len(x)
        squares.append(tuple(g**2 for g in torch.autograd.grad(loss, list(norms.values()))))
    assert found.keys() == norms.keys()
    for name, values in zip(norms, zip(*squares, strict=True), strict=True):
        torch.testing.assert_close(found[name], sum(values) / len(values), rtol=1e-8, atol=1e-15)


def test_deyo_draws_every_order_alike(worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch) -> None:
    net, clean, _, _ = worlds["group"]
    monkeypatch.setattr(deyo, "shuffle_patches", spy := mock.Mock(wraps=deyo.shuffle_patches))
    for adapter in (DeYO(net), DeYO(net), DeYO(net, seed=1)):
        for x in clean[:2000].split(500):
            adapter(x)
    orders = [torch.cat([call.args[1] for call in spy.call_args_list[i : i + 4]]) for i in (0, 4, 8)]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert torch.equal(orders[0].sort(1).values, torch.arange(16).expand(2000, 16))
    counts = nn.functional.one_hot(orders[0], 16).double().mean(0)
    assert (counts - 1 / 16).abs().max() < 5 * math.sqrt(1 / 16 * 15 / 16 / 2000)


def test_roid_changes_every_image_by_its_own_draws(worlds: dict[str, World], monkeypatch: Any) -> None:
    (net, clean, _, _), made = worlds["group"], list[Tensor]()

    def record(*args: Any, **options: Any) -> Tensor:
        made.append(augment(*args, **options))
        return made[-1]

    monkeypatch.setattr(roid, "augment", record)
    adapter, x = ROID(net), clean[:1].expand(8, -1, -1, -1)
    adapter(x)
    adapter(x)
    adapter.reset()
    adapter(x)
    assert torch.equal(made[0], made[2])
    assert len(torch.cat(made[:2]).flatten(1).unique(dim=0)) == 16


CONSTANTS: dict[type[nn.Module], dict[str, float]] = {
    SAR: {"margin": 0.4, "rho": 0.05, "lr": 2.5e-4},
    EATA: {"margin": 0.4, "penalty": 2000, "lr": 2.5e-4},
    DeYO: {"margin": 0.5, "drop": 0.3, "pivot": 0.4, "patches": 4, "lr": 2.5e-4},
    RDumb: {"margin": 0.4, "batches": 1000, "lr": 2.5e-4},
}


def test_constants_are_the_papers() -> None:
    for method, constants in CONSTANTS.items():
        parameters = read_defaults(method)
        assert {name: parameters[name] for name in constants} == constants
    collapse = read_defaults(SAR)["collapse"]
    assert collapse * math.log(1000) == pytest.approx(0.2, rel=0.01)
    assert [default_similarity(k) for k in (10, 1000)] == pytest.approx([0.4, 0.05])
