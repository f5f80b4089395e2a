"""Floors and rivals compute what they say: rivals predict what we do, floors have the gradients of the network."""

from typing import Any

import pytest
import torch
from benchmarks.floors import Floor, Pass, list_passes
from benchmarks.rivals import PLAIN, PUBLIC
from benchmarks.worlds import Mode, Network, World

import ttvd
from ttvd.adapters import GradientAdapter

CPU = torch.device("cpu")
DIFFERENT = {"ttvd", "ttvd-reference"}
"""Of these the public code computes something else: its filter is none."""


def make_world(network: Network, name: str) -> World:
    return World(network, ttvd.methods()[name], CPU)


def follow(world: World, rival: Any, **parameters: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What both say of a stream; the batches change, so that what was learned shows."""
    adapter, other = world.adapter(Mode(), **parameters), rival(world.net, **world.gather())
    stream = [world.batch(12, seed).pow(1 + seed) for seed in range(5)]
    return [(adapter(x).softmax(1), other(x).softmax(1)) for x in stream]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_steps_compute_what_ours_do(name: str, tiny: Network) -> None:
    for ours, theirs in follow(make_world(tiny, name), PLAIN[name]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in DIFFERENT])
def test_public_steps_compute_what_ours_do(name: str, tiny: Network) -> None:
    for ours, theirs in follow(make_world(tiny, name), PUBLIC[name]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["tent", "shot", "eta", "sar", "ttvd", "ttvd-reference"])
def test_plain_steps_learn(name: str, tiny: Network) -> None:
    world = make_world(tiny, name)
    rival = PLAIN[name](world.net, **world.gather())
    before = [p.detach().clone() for p in rival.parameters]
    for seed in range(3):
        rival(world.batch(12, seed))
    assert any(not torch.equal(old, new) for old, new in zip(before, rival.parameters, strict=True))


def test_the_public_rotation_is_the_batched_one(tiny: Network) -> None:
    world = make_world(tiny, "ttvd")
    public, plain = (kind["ttvd"](world.net, **world.gather()) for kind in (PUBLIC, PLAIN))
    x = world.batch(3)
    assert torch.equal(public.rotate(x), plain.rotate(x))  # type: ignore[attr-defined]
    assert public(x).shape == (3, 3)


@pytest.mark.parametrize("name", ["tent", "ttvd", "shot", "sar", "t3a", "vd"])
def test_floors_have_the_passes_of_the_registry(name: str, tiny: Network) -> None:
    method, world = ttvd.methods()[name], make_world(tiny, name)
    passes = list_passes(method, world.adapter(Mode()))
    assert sum(one.images for one in passes) == method.forwards
    assert sum(one.images for one in passes if one.backward) == method.backwards
    if name == "ttvd":
        assert passes == [Pass(4, True)]


@pytest.mark.parametrize("name", ["tent", "ttvd", "shot"])
def test_floors_differentiate_what_adapts(name: str, tiny: Network) -> None:
    world = make_world(tiny, name)
    adapter = world.adapter(Mode())
    assert isinstance(adapter, GradientAdapter)
    floor = Floor(adapter, list_passes(world.method, adapter), world.batch(4))
    found = floor()
    assert [g.shape for g in found] == [p.shape for p in adapter.adapting()]
    (inputs,) = floor.inputs.values()
    assert len(inputs) == 4 * world.views
    wanted = torch.autograd.grad(adapter.model(inputs).sum(), adapter.adapting())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_floors_of_methods_without_gradients_only_look(tiny: Network) -> None:
    world = make_world(tiny, "bn")
    adapter = world.adapter(Mode())
    assert Floor(adapter, list_passes(world.method, adapter), world.batch(4))() == []


def test_worlds_refuse_what_a_network_lacks(tiny: Network) -> None:
    with pytest.raises(ValueError, match="note needs instance-aware norm"):
        make_world(tiny, "note")


@pytest.mark.parametrize("name", ["sar", "eta", "ttvd", "ttvd-reference"])
def test_filters_have_something_to_do(name: str, tiny: Network) -> None:
    world = make_world(tiny, name)
    adapter = world.adapter(Mode())
    shares = []
    for seed in range(4):
        adapter(world.batch(32, seed))
        shares.append(float(adapter.kept))
    assert min(shares) > 0.0
