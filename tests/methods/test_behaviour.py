"""What adapters must do and must not do: no-ops, identities, edges of the domain, and a world where they help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
SitesMaker = Callable[..., ttvd.Sites]
StreamMaker = Callable[..., list[Tensor]]
Reader = Callable[[nn.Module], dict[str, Tensor]]

FAMILY = ["ttvd", "vd", "civd", "pd", "cipd", "ttvd-paper", "ttvd-reference"]


def copy_state(adapter: ttvd.Adapter) -> dict[str, Tensor]:
    """All but what the guard keeps, which counts batches whatever they teach."""
    state = adapter.state_dict()
    return {name: value.clone() for name, value in state.items() if not name.startswith("guard.")}


def assert_states_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def assert_finite_step(adapter: ttvd.Adapter, x: Tensor) -> None:
    """Nothing needs to be caught: output, loss and gradients are numbers before the step is taken, and state after."""
    assert isinstance(adapter, ttvd.TTVD)
    step = adapter.loss(x)
    gradients = torch.autograd.grad(step.loss, adapter.adapting())
    assert all(value.isfinite().all() for value in (step.out, step.loss, *gradients))
    assert adapter(x).isfinite().all()
    assert all(value.isfinite().all() for value in adapter.state_dict().values())


def assert_same_prediction(first: Tensor, second: Tensor) -> None:
    torch.testing.assert_close(first.softmax(-1), second.softmax(-1).detach(), rtol=1e-8, atol=1e-8)


def disagree(net: ResNet, make_sites: SitesMaker) -> tuple[ResNet, ttvd.Sites]:
    """Voronoi cells give class 0 everywhere, power cells class 1: the filter keeps nothing."""
    with torch.no_grad():
        net.fc.bias.view(3, -1)[1] += 100.0
    means = make_sites(net).means.clone()
    means[1:] += 100.0
    return net, make_sites(net, means=means)


def plant(adapter: ttvd.Adapter) -> dict[str, Tensor]:
    """Give the optimizer a past; returns the state."""
    planted = {n: t + 1 if n.startswith("optimizer.") else t for n, t in copy_state(adapter).items()}
    adapter.load_state_dict({**adapter.state_dict(), **planted})
    return planted


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("objective", ["entropy", "joint", "consensus"])
@pytest.mark.parametrize("outputs", [12, 3])
def test_empty_selection_changes_neither_parameters_nor_momentum(
    outputs: int,
    objective: Any,
    optimizer: str,
    make_net: NetMaker,
    make_sites: SitesMaker,
    make_stream: StreamMaker,
) -> None:
    """The optimizer remembers an earlier stream."""
    net, sites = disagree(make_net(outputs), make_sites)
    terms: dict[str, Any] = {
        "agreement_filter": True,
        "rotation_weight": 0.0,
        "diversity_weight": 1.0,
        "momentum": 0.9,
    }
    alone: dict[str, Any] = {"prior": None, "output_temperature": 1.0, "statistics": ttvd.Statistics.batch()}
    adapter = ttvd.TTVD(
        net, sites, objective=objective, optimizer=optimizer, lr=0.1, steps=2, **terms, **alone
    )
    planted = plant(adapter)
    for x in make_stream(8, 5, 1):
        assert adapter(x).argmax(-1).eq(1).all()
        assert float(adapter.kept) == 0.0
    assert_states_equal(copy_state(adapter), planted)


def test_what_follows_the_stream_needs_no_selection(
    make_net: NetMaker, make_sites: SitesMaker, make_stream: StreamMaker
) -> None:
    """By default, with a head that knows the classes alone: weights and slots stand still, and nothing else does."""
    adapter = ttvd.TTVD(*disagree(make_net(3), make_sites), structure="cipd")
    planted = plant(adapter)
    for x in make_stream(8, 5, 1):
        adapter(x)
        assert float(adapter.kept) == 0.0
    for name, value in copy_state(adapter).items():
        still = name.startswith("optimizer.") or name.endswith((".weight", ".bias"))
        assert torch.equal(value, planted[name]) == still, name


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["tent", *FAMILY])
def test_a_loss_that_is_not_a_number_changes_nothing(
    name: str, optimizer: str, make_net: NetMaker, make_sites: SitesMaker, make_stream: StreamMaker
) -> None:
    net, stream = make_net(), make_stream(8, 8, 8, 8)
    sites = None if name == "tent" else make_sites(net)
    options = {} if name == "tent" else {"agreement_filter": False}
    adapter, clean = (
        ttvd.create(name, net, sites=sites, optimizer=optimizer, lr=0.1, **options) for _ in range(2)
    )
    adapter.validation = "never"
    for x in stream[:2]:
        adapter(x)
        clean(x)
    reached = copy_state(adapter)
    broken = stream[2].clone()
    broken[3, 0, 5, 5] = torch.nan
    adapter(broken)
    adapter(torch.full_like(broken, torch.nan))
    assert_states_equal(copy_state(adapter), reached)
    assert torch.equal(adapter(stream[3]), clean(stream[3]))
    assert_states_equal(copy_state(adapter), copy_state(clean))
    assert any(not torch.equal(value, reached[key]) for key, value in copy_state(adapter).items())


@pytest.mark.parametrize("shift", [None, 50.0])
def test_cipd_with_gamma_one_is_label_augmentation_s_aggregation(
    shift: float | None,
    make_net: NetMaker,
    make_sites: SitesMaker,
    make_stream: StreamMaker,
    make_twin: Callable[..., Any],
    parameters_of: Reader,
) -> None:
    """At temperature 4 the softmax is that of the mean over views of the logits of the view's own rotation."""
    net = make_net()
    plain: dict[str, Any] = {"prior": None, "output_temperature": 1.0, "statistics": ttvd.Statistics.batch()}
    adapter = ttvd.create("ttvd", net, sites=make_sites(net), gamma=1.0, tau=4.0, shift=shift, **plain)
    twin = make_twin(net)
    for x in make_stream(8, 5, 8, 1, 8):
        assert not twin.load_state_dict(parameters_of(adapter), strict=False).unexpected_keys
        views = twin(torch.cat([torch.rot90(x, a, (-2, -1)) for a in range(4)])).reshape(4, len(x), 3, 4)
        assert_same_prediction(adapter(x), sum(views[a, :, :, a] for a in range(4)) / 4)


def test_reference_s_power_entropy_is_tent_on_the_joint_head(
    make_net: NetMaker, make_sites: SitesMaker, make_stream: StreamMaker, parameters_of: Reader
) -> None:
    """One site holds all features and the others are far away: the Voronoi entropy and its gradient are zero."""
    net = make_net()
    means = make_sites(net).means + 1e4
    means[0, 0] -= 1e4
    options: dict[str, Any] = {"lr": 0.05, "optimizer": "sgd"}
    adapter = ttvd.create(
        "ttvd-reference", net, sites=make_sites(net, means=means), agreement_filter=False, **options
    )
    tent = ttvd.create("tent", net, **options)
    for x in make_stream(8, 5, 8, 1, 8):
        adapter(x)
        tent(torch.cat([torch.rot90(x, a, (-2, -1)) for a in range(4)]))
        found, wanted = parameters_of(adapter), parameters_of(tent)
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-8, atol=1e-8)
    assert (found["norm1.bias"] - net.state_dict()["norm1.bias"]).abs().max() > 1e-3


@pytest.mark.parametrize("outputs", [12, 3])
def test_pd_that_learns_nothing_is_the_upright_softmax(
    outputs: int,
    make_net: NetMaker,
    make_sites: SitesMaker,
    make_stream: StreamMaker,
    make_twin: Callable[..., Any],
) -> None:
    net = make_net(outputs)
    adapter, twin = ttvd.create("pd", net, sites=make_sites(net), lr=0.0, tau=1.0), make_twin(net)
    start = copy_state(adapter)
    for x in make_stream(8, 5, 8, 1, 8):
        assert_same_prediction(adapter(x), twin(x)[:, :: outputs // 3])
    for name, value in copy_state(adapter).items():
        assert name.startswith("optimizer.") or torch.equal(value, start[name])


@pytest.mark.parametrize("outputs", [4, 1])
@pytest.mark.parametrize("name", FAMILY)
def test_one_class_is_certain_and_finite(
    name: str, outputs: int, make_net: NetMaker, make_sites: SitesMaker, make_stream: StreamMaker
) -> None:
    """Shares of one class are nothing to be estimated, nor is there a ratio of one cell to the others."""
    net = make_net(outputs)
    adapter = ttvd.create(name, net, sites=make_sites(net, classes=1), lr=0.1)
    for x in make_stream(8, 1, 5):
        assert torch.equal(adapter(x).softmax(-1), torch.ones(len(x), 1, dtype=torch.float64))
        assert float(adapter.kept) == 1.0
        assert_finite_step(adapter, x)


@pytest.mark.parametrize("objective", ["entropy", "joint", "consensus"])
@pytest.mark.parametrize("gamma", [-0.8, 0.5, 0.0])
@pytest.mark.parametrize("shift", [None, 0.0, -5.0])
def test_negative_power_distances_never_give_nan(
    shift: float | None,
    gamma: float,
    objective: Any,
    make_net: NetMaker,
    make_sites: SitesMaker,
    make_stream: StreamMaker,
) -> None:
    net = make_net().float()
    stream = [x.float() for x in make_stream(8, 5, 1, 8)]
    z = net.forward_features(stream[0])
    share = float((z.square().sum(1, keepdim=True) < net.fc(z)).double().mean())
    assert 0.1 < share < 0.9, "negative and positive power distances must both occur"
    adapter = ttvd.TTVD(
        net,
        make_sites(net),
        objective=objective,
        gamma=gamma,
        shift=shift,
        tau=0.05,
        agreement_filter=False,
        lr=0.1,
    )
    for x in stream:
        assert_finite_step(adapter, x)


@pytest.mark.parametrize("name", ["vd", "civd", "ttvd-reference"])
def test_features_on_a_site_are_no_singularity(
    name: str, make_net: NetMaker, make_sites: SitesMaker, make_stream: StreamMaker
) -> None:
    """Source statistics make features independent of the batch, so that a site can be put on one of them."""
    net, x = make_net().float(), make_stream(6)[0].float()
    means = make_sites(net).means.clone()
    with torch.no_grad():
        for a in range(4):
            means[1, a] = net.forward_features(torch.rot90(x, a, (-2, -1)))[2].double()
    options: dict[str, Any] = {"lr": 0.01, "agreement_filter": False, "statistics": ttvd.Statistics.source()}
    adapter = ttvd.create(name, net, sites=make_sites(net, means=means), **options)
    assert name == "ttvd-reference" or int(adapter.predict(x)[2].argmax()) == 1
    for _ in range(3):
        assert_finite_step(adapter, x)


def blobs(centres: Tensor, per_class: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Gaussian blobs in random order: points (n, 8) and labels."""
    labels = torch.arange(len(centres)).repeat(per_class)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return centres[labels] + torch.randn(len(labels), centres.shape[1], generator=generator), labels


@pytest.fixture(scope="module")
def world() -> tuple[nn.Module, Tensor, Tensor]:
    """A classifier of six blobs, and a stream of them seen through a sensor whose gains and offsets have drifted."""
    generator = torch.Generator().manual_seed(0)
    centres = 2.5 * torch.randn(6, 8, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 6))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(300):
        x, y = blobs(centres, 20, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    x, y = blobs(centres, 400, generator)
    assert (net.eval()(x).argmax(1) != y).double().mean() < 0.03, "the classifier knows its own world"
    gains, offsets = 0.6 + torch.rand(8, generator=generator), 3 * torch.randn(8, generator=generator)
    return net, x * gains + offsets, y


def stream_error(name: str, world: tuple[nn.Module, Tensor, Tensor], **parameters: Any) -> float:
    net, x, y = world
    adapter = ttvd.create(name, net, **parameters)
    labels = torch.cat([adapter(batch).argmax(1) for batch in x.split(64)])
    return float((labels != y).double().mean())


def test_batch_statistics_and_entropy_undo_a_drifted_sensor(world: tuple[nn.Module, Tensor, Tensor]) -> None:
    source, bn, tent = (stream_error(name, world) for name in ("source", "bn", "tent"))
    assert source > 0.3
    assert bn < source - 0.2
    assert tent < source - 0.2
