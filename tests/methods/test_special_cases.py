"""What is special about COME, NEO, CMF, PeTTA and POEM: what they refuse, where they stop, what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.methods import build_net, build_sites, build_stream
from ttvd.methods import CMF, NEO, POEM, ROID, PeTTA
from ttvd.methods.poem import EntropyMatcher
from ttvd.methods.shared.losses import entropy, opinion_entropy
from ttvd.testing import make_world

QUANTILES = torch.linspace(0.0, 1.0, 65, dtype=torch.float64)


def make_batches(count: int = 3, size: int = 6) -> list[Tensor]:
    return list(torch.rand(count, size, 1, 8, 8, generator=torch.Generator().manual_seed(2)))


def make_net(classes: int = 3, outputs: int | None = None, **more: Any) -> tuple[nn.Module, ttvd.Sites]:
    net = build_net(outputs or classes)
    return net, replace(build_sites(net, classes), entropies={"pd": QUANTILES}, **more)


def flat(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])


# COME


def test_logits_without_a_direction_get_no_gradient() -> None:
    still = torch.zeros(2, 5, requires_grad=True)
    assert not torch.autograd.grad(opinion_entropy(still).sum(), still)[0].any()


def test_samples_without_evidence_are_let_go() -> None:
    """Tent makes a sample sure of a class however low all logits are; the opinion is sure that it does not know."""
    low = torch.tensor([[-9.0, -9.5, -9.2]])
    assert opinion_entropy(low).item() < 0.01 < entropy(low).item()


@pytest.mark.parametrize(("name", "base"), [("come", "tent"), ("eata-come", "eata"), ("sar-come", "sar")])
def test_the_options_are_those_of_the_method_inside(name: str, base: str) -> None:
    methods = ttvd.list_methods()
    assert methods[name].parameters() == methods[base].parameters()
    assert methods[name].needs == methods[base].needs


# NEO


def test_a_vector_that_all_features_share_makes_no_difference() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    same, moved = (NEO(net, continual=False) for _ in range(2))
    for x in make_batches():
        torch.testing.assert_close(moved(x / 2 + 0.5), same(x / 2), rtol=1e-4, atol=1e-4)
    x = torch.cat(make_batches()).flatten(1) / 2
    torch.testing.assert_close(same.mean, x.mean(0), rtol=1e-4, atol=1e-5)


def test_the_first_image_alone_tells_nothing_in_the_plain_form_and_a_little_in_the_other() -> None:
    head, x = nn.Linear(64, 2), make_batches()[0][:1]
    net, bias = nn.Sequential(nn.Flatten(), head), head.bias.detach()
    torch.testing.assert_close(NEO(net, continual=False)(x)[0], bias, rtol=0, atol=1e-5)
    partly = NEO(net)
    torch.testing.assert_close(partly(x)[0], bias + 0.9 * (net(x)[0].detach() - bias), rtol=1e-4, atol=1e-5)
    partly.reset()
    torch.testing.assert_close(partly.predict(x), net(x).detach())
    with pytest.raises(ValueError, match="momentum"):
        NEO(net, momentum=0.0)


# CMF


@pytest.mark.parametrize("gamma", [0.97, 0.7])
def test_without_noise_the_hidden_model_is_the_source_and_this_is_roid(gamma: float) -> None:
    net = build_net(3)
    still, roid = CMF(net, q=0.0, gamma=gamma, lr=0.01), ROID(net, alpha=gamma, lr=0.01)
    moving = CMF(net, q=20.0, gamma=gamma, lr=0.01)
    for x in build_stream(8, 8, 1, 5):
        torch.testing.assert_close(still(x), roid(x))
        moving(x)
    torch.testing.assert_close(flat(still.model), flat(roid.model))
    assert not torch.allclose(flat(moving.model), flat(roid.model))
    assert not torch.allclose(flat(moving.hidden), flat(still.hidden))
    assert moving.variance > 0
    moving.reset()
    assert moving.variance == 0
    torch.testing.assert_close(flat(moving.hidden), flat(CMF(net).hidden))


def test_too_much_noise_is_refused_with_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"below \d+"):
        CMF(build_net(3), q=1e6)
    with pytest.raises(ValueError, match="gamma"):
        CMF(build_net(3), gamma=1.5)


# PeTTA


def test_the_drift_stops_the_teacher() -> None:
    net, sites = make_net()
    adapter = PeTTA(net, sites, memory_size=8, update_every=8, alpha_0=0.5, lr=0.01)
    first, second = build_stream(8, 8)
    start = flat(adapter.teacher)
    adapter(first)
    assert adapter.drift == 0, "class means start at the source"
    moved = flat(adapter.teacher)
    assert not torch.equal(moved, start)
    adapter.means.add_(100.0)
    adapter(second)
    assert adapter.drift == 1
    assert torch.equal(flat(adapter.teacher), moved)


def test_the_pull_to_the_source_grows_with_the_drift() -> None:
    net, sites = make_net()
    distances = []
    for lambda_0 in (0.0, 1000.0):
        adapter = PeTTA(net, sites, memory_size=8, update_every=8, lambda_0=lambda_0, lr=0.02)
        for x in build_stream(*[8] * 6):
            adapter.means.add_(10.0)
            adapter(x)
        cosine = nn.functional.cosine_similarity(flat(adapter.model), flat(PeTTA(net, sites).model), dim=0)
        distances.append(1 - float(cosine))
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("sizes", [(8, 8), (1,) * 16, (5, 11), (16,)])
def test_class_means_follow_the_stream_however_it_is_cut(sizes: tuple[int, ...]) -> None:
    """With a teacher that stays, batches of one give what one large batch gives."""
    net, sites = make_net()
    images = build_stream(16)[0]
    states = []
    for parts in ((8, 8), sizes):
        adapter = PeTTA(net, sites, memory_size=8, update_every=8, alpha_0=0.0, alpha=1e-12)
        for x in images.split(parts):
            adapter(x)
        states.append((adapter.means, adapter.drift))
    torch.testing.assert_close(states[1], states[0])
    assert states[0][1] > 0


def test_petta_refuses() -> None:
    net, sites = make_net()
    with pytest.raises(ValueError, match="two classes"):
        PeTTA(*make_net(classes=1))
    with pytest.raises(ValueError, match="shares"):
        PeTTA(net, sites, nu=2.0)
    with pytest.raises(ValueError, match="at least 0"):
        PeTTA(net, sites, lambda_0=-1.0)
    with pytest.raises(ValueError, match="fingerprint"):
        PeTTA(net, replace(sites, fingerprint="0" * 16))


@pytest.mark.parametrize("name", ["petta", "poem"])
def test_a_head_that_tells_rotations_apart_classifies_the_upright_view(name: str) -> None:
    net, sites = make_net(outputs=12)
    adapter = ttvd.create(name, net, sites=sites)
    x = build_stream(4)[0]
    upright = net(x)[:, ::4] / (sites.temperature("pd") if name == "poem" else 1.0)
    for source in (adapter, adapter.predict):
        if name == "petta":
            torch.testing.assert_close(source(x), upright.detach())
    assert adapter(x).shape == (4, 3)
    chosen = {"statistics": ttvd.Statistics.source()} if name == "poem" else {}
    torch.testing.assert_close(ttvd.create(name, net, sites=sites, **chosen).predict(x), upright.detach())


# POEM


def test_without_a_bet_entropies_are_their_own_targets() -> None:
    quantiles = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.9, 1.5, 1.5], dtype=torch.float64)
    matcher = EntropyMatcher(quantiles)
    values = torch.tensor([0.0, 0.1, 0.2, 0.7, 1.4, 1.5, 2.0], dtype=torch.float64)
    ranks = torch.tensor([1.0, 2.5, 3.0, 3 + 5 / 7, 4 + 5 / 6, 5.5, 6.0], dtype=torch.float64) / 6
    torch.testing.assert_close(matcher.rank(values), ranks)
    torch.testing.assert_close(matcher.invert(ranks), values.clamp(max=1.5))


def test_poem_waits_and_bets_meanwhile() -> None:
    net, sites = make_net()
    adapter, (first, second, third) = POEM(net, sites, delay=12, margin=2.0, lr=0.1), build_stream(6, 5, 1)
    start = flat(adapter.model)
    for x in (first, second):
        adapter(x)
        assert torch.equal(flat(adapter.model), start)
        assert adapter.matcher.bet != 0
    adapter(third)
    assert not torch.equal(flat(adapter.model), start)
    adapter.reset()
    assert adapter.matcher.bet == 0


def test_poem_refuses() -> None:
    net, sites = make_net()
    with pytest.raises(ValueError, match="entropies of the source"):
        POEM(net, replace(sites, entropies={}))
    with pytest.raises(ValueError, match="temperature"):
        POEM(net, replace(sites, temperatures={}))
    with pytest.raises(ValueError, match="sum below 2"):
        POEM(net, sites, gamma=0.5)
    with pytest.raises(ValueError, match="margin"):
        POEM(net, sites, margin=0.0)
    with pytest.raises(TypeError, match="steps"):
        POEM(net, sites, steps=3)


@pytest.mark.parametrize("name", ["come", "sar-come", "cmf", "neo", "petta", "poem"])
def test_two_classes_and_batches_of_one(name: str) -> None:
    net, sites = make_net(classes=2)
    needed = {"sites": sites} if "sites" in ttvd.list_methods()[name].needs else {}
    quick: dict[str, Any] = {"petta": {"update_every": 2, "memory_size": 4}, "poem": {"delay": 0}}.get(
        name, {}
    )
    adapter = ttvd.create(name, net, **needed, **quick)
    for x in build_stream(1, 1, 1, 3):
        assert adapter(x).shape == (len(x), 2)
        assert bool(adapter.finite)
        assert adapter(x).isfinite().all()


def test_runs_are_of_other_sites_only_where_the_method_reads_them() -> None:
    _, sites = make_net()
    assert PeTTA.site_parts(sites, {}) == frozenset()
    assert POEM.site_parts(sites, {}) == {"entropies"}


@pytest.mark.parametrize(("name", "part"), [("cmf", "hidden"), ("petta", "teacher")])
def test_a_guard_takes_back_what_follows_the_weights_too(name: str, part: str) -> None:
    guard: Any = make_world(name, guard=True)[1]().guard
    assert any(key.startswith(f"{part}.") for names in guard.kept for key in names)
