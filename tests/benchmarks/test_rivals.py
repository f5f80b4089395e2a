"""Floors and rivals compute what they say: rivals predict what we do, floors have the gradients of the network."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.floors import Floor, Pass, list_passes
from benchmarks.plain_ttvd import PlainTTVD
from benchmarks.rivals import PLAIN, PUBLIC
from benchmarks.setups import Mode, Network, Setup

import ttvd
from benchmarks import setups
from ttvd.methods import TTVD, GradientAdapter
from ttvd.methods.ttvd.online_temperature import OnlineTemperature

CPU = torch.device("cpu")
DIFFERENT = {"ttvd", "ttvd-reference"}
"""Of these the public code computes something else: its filter is none."""


def make_setup(network: Network, name: str) -> Setup:
    return Setup(network, ttvd.list_methods()[name], CPU)


def follow(setup: Setup, rival: Any, **parameters: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What both say of a stream; the batches change, so that what was learned shows."""
    adapter, other = setup.adapter(Mode(), **parameters), rival(setup.net, **setup.gather())
    stream = [setup.batch(12, seed).pow(1 + seed) for seed in range(5)]
    return [(adapter(x).softmax(1), other(x).softmax(1)) for x in stream]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_steps_compute_what_ours_do(name: str, tiny: Network) -> None:
    for ours, theirs in follow(make_setup(tiny, name), PLAIN[name]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def make_mixed(*sizes: int) -> Callable[[Setup], list[torch.Tensor]]:
    return lambda setup: [setup.batch(size, seed).pow(1 + seed % 3) for seed, size in enumerate(sizes)]


def make_alike(*sizes: int) -> Callable[[Setup], list[torch.Tensor]]:
    """Batches of images that are nearly one, as in a stream that is sorted by class."""
    return lambda setup: [
        torch.lerp(setup.batch(1, seed % 3), setup.batch(size, 100 + seed), 0.2)
        for seed, size in enumerate(sizes)
    ]


STREAMS = {
    "single images": make_mixed(1, 1, 2, 1, 3, 1),
    "below a full step": make_mixed(5, 12, 30, 63),
    "full steps": make_mixed(64, 65, 130, 70),
    "longer than the memories": make_mixed(300, 600, 600, 40),
    "alike": make_alike(20, 20, 20, 20, 100, 100, 100),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("usual", [1.0, 3.6], ids=["full steps", "by need"])
def test_plain_ttvd_follows_the_stream_as_ours_does(
    stream: str, usual: float, tiny: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In double precision, where what differs is no rounding that steps have made larger."""
    monkeypatch.setattr(setups, "ROTATION_LOSS", usual)
    setup = make_setup(tiny, "ttvd")
    setup.net.double()
    adapter, other = setup.adapter(Mode()), PlainTTVD(setup.net, **setup.gather())
    assert isinstance(adapter, TTVD)
    assert adapter.label_shift is not None
    assert isinstance(adapter.online_temperature, OnlineTemperature)
    assert adapter.step_scale is not None
    needs = set()
    for x in STREAMS[stream](setup):
        ours, theirs = adapter(x.double()).softmax(1), other(x.double()).softmax(1)
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
        assert other.excess == pytest.approx(adapter.label_shift.excess.item(), rel=1e-8, abs=1e-10)
        assert other.sharpness == pytest.approx(adapter.online_temperature.sharpness.item(), rel=1e-8)
        assert other.level == pytest.approx(adapter.step_scale.level.item(), rel=1e-8)
        needs.add(other.watch_need(other.level, 0))
    assert other.sharpness < 0.9, "else it would not matter"
    if usual > 1 and stream == "below a full step":
        assert any(0 < need < 1 for need in needs), "a part of a step was taken"
    if stream == "alike":
        assert other.excess > 0.15, "the shares of a batch are far from equal ones"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in DIFFERENT])
def test_public_steps_compute_what_ours_do(name: str, tiny: Network) -> None:
    for ours, theirs in follow(make_setup(tiny, name), PUBLIC[name]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["tent", "shot", "eta", "sar", "ttvd", "ttvd-reference"])
def test_plain_steps_learn(name: str, tiny: Network) -> None:
    setup = make_setup(tiny, name)
    rival = PLAIN[name](setup.net, **setup.gather())
    before = [p.detach().clone() for p in rival.parameters]
    for seed in range(3):
        rival(setup.batch(12, seed))
    assert any(not torch.equal(old, new) for old, new in zip(before, rival.parameters, strict=True))


def test_the_public_rotation_is_the_batched_one(tiny: Network) -> None:
    setup = make_setup(tiny, "ttvd")
    public, plain = (kind["ttvd"](setup.net, **setup.gather()) for kind in (PUBLIC, PLAIN))
    x = setup.batch(3)
    assert torch.equal(public.rotate(x), plain.rotate(x))  # type: ignore[attr-defined]
    assert public(x).shape == (3, 3)


@pytest.mark.parametrize("name", ["tent", "ttvd", "shot", "sar", "t3a", "vd"])
def test_floors_have_the_passes_of_the_registry(name: str, tiny: Network) -> None:
    method, setup = ttvd.list_methods()[name], make_setup(tiny, name)
    passes = list_passes(method, setup.adapter(Mode()))
    assert sum(one.images for one in passes) == method.forwards
    assert sum(one.images for one in passes if one.backward) == method.backwards
    if name == "ttvd":
        assert passes == [Pass(4, True)]


@pytest.mark.parametrize("name", ["tent", "ttvd", "shot"])
def test_floors_differentiate_what_adapts(name: str, tiny: Network) -> None:
    setup = make_setup(tiny, name)
    adapter = setup.adapter(Mode())
    assert isinstance(adapter, GradientAdapter)
    floor = Floor(adapter, list_passes(setup.method, adapter), setup.batch(4))
    found = floor()
    assert [g.shape for g in found] == [p.shape for p in adapter.adapting()]
    (inputs,) = floor.inputs.values()
    assert len(inputs) == 4 * setup.views
    wanted = torch.autograd.grad(adapter.model(inputs).sum(), adapter.adapting())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_floors_of_methods_without_gradients_only_look(tiny: Network) -> None:
    setup = make_setup(tiny, "bn")
    adapter = setup.adapter(Mode())
    assert Floor(adapter, list_passes(setup.method, adapter), setup.batch(4))() == []


def test_setups_refuse_what_a_network_lacks(tiny: Network) -> None:
    with pytest.raises(ValueError, match="note needs instance-aware norm"):
        make_setup(tiny, "note")


@pytest.mark.parametrize("name", ["sar", "eta", "ttvd-reference"])
def test_filters_have_something_to_do(name: str, tiny: Network) -> None:
    setup = make_setup(tiny, name)
    adapter = setup.adapter(Mode())
    shares = []
    for seed in range(4):
        adapter(setup.batch(32, seed))
        shares.append(float(adapter.kept))
    assert min(shares) > 0.0
