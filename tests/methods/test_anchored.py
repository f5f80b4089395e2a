"""Adapters that begin with anchored norms, of upright images or of all views together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ttvd
from tests.helpers import nn as chains
from tests.helpers.methods import Naive, assert_same_state, build_net, build_sites, build_stream
from tests.helpers.nn import assert_close, channel_moments, draw_anchors, kinds_of, norms_of, read_state
from tests.helpers.zoo import CARD, save_toy
from ttvd.data.digits import split_digits
from ttvd.methods.adapter import Adapter
from ttvd.nn.anchors import Anchors, anchor_norms
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.norms import StreamNorm, apply_statistics
from ttvd.nn.resnet import ResNet
from ttvd.zoo import catalog as zoo

PRESETS = ["vd", "civd", "pd", "cipd", "ttvd-paper", "ttvd-reference"]


@dataclass(frozen=True)
class World:
    """A net, its sites with and without anchors, and a stream."""

    net: ResNet
    anchored: ttvd.Sites
    bare: ttvd.Sites
    stream: list[Tensor]

    @property
    def joint(self) -> Anchors:
        """Those of all views together."""
        return self.anchored.anchors[4]


def anchor_near(net: nn.Module, seed: int) -> Anchors:
    """Statistics around those that the norms store."""
    generator = torch.Generator().manual_seed(seed)
    means, variances = (
        torch.cat([norm.get_buffer(name) for norm in norms_of(net)])
        for name in ("running_mean", "running_var")
    )
    shift, stretch = torch.randn(2, len(means), generator=generator, dtype=torch.float64)
    return Anchors(means + 0.5 * shift * variances.sqrt(), variances * (0.5 * stretch).exp(), kinds_of(net))


def build_world() -> World:
    net = build_net(12)
    bare = build_sites(net)
    anchors = {1: anchor_near(net, 8), 4: anchor_near(net, 7)}
    return World(net, replace(bare, anchors=anchors), bare, build_stream(8, 1, 24, 12, seed=6))


@pytest.fixture
def world() -> World:
    return build_world()


def policies(adapter: Adapter, network: nn.Module | None = None) -> set[str]:
    """What the adapter says, and what the norms of all its networks do, or of one."""
    layers = [layer for layer in (network or adapter).modules() if isinstance(layer, StreamNorm)]
    return {str(adapter.statistics), *(str(layer.statistics) for layer in layers)}


def anchor_by_hand(net: ResNet, anchors: Anchors) -> ResNet:
    """A copy in which each channel stores its anchor, with the slope and offset of its line a * x + b."""
    net, channel = copy.deepcopy(net), 0
    for norm in norms_of(net):
        weight, bias, mean, var = (
            norm.state_dict()[n] for n in ("weight", "bias", "running_mean", "running_var")
        )
        for c in range(norm.num_features):
            slope = float(weight[c]) / (float(var[c]) + norm.eps) ** 0.5
            offset = float(bias[c]) - slope * float(mean[c])
            mean[c], var[c] = anchors.means[channel], anchors.variances[channel]
            weight[c] = slope * (float(var[c]) + norm.eps) ** 0.5
            bias[c] = offset + slope * float(mean[c])
            channel += 1
    assert channel == len(anchors.means)
    return net


@torch.no_grad()
def measure_by_hand(net: nn.Module, x: Tensor, views: int) -> Anchors:
    """What images show to the norms, each of which is used once, in so many rotations together."""
    net, entered = copy.deepcopy(net), dict[nn.Module, Tensor]()
    for norm in norms_of(net):
        norm.register_forward_hook(lambda layer, inputs, _: entered.update({layer: inputs[0]}))
    net(torch.cat([torch.rot90(x, turn, (2, 3)) for turn in range(views)]))
    means, variances = zip(*(channel_moments(entered[norm]) for norm in norms_of(net)), strict=True)
    return Anchors(torch.cat(means), torch.cat(variances), kinds_of(net))


def test_the_default_is_anchored_where_the_sites_know_how(world: World) -> None:
    assert policies(ttvd.TTVD(world.net, world.anchored)) == {"track:64:2048:renorm:anchored"}
    assert policies(ttvd.TTVD(world.net, world.bare)) == {"track:64:2048:renorm"}
    assert policies(ttvd.TTVD(world.net, world.anchored, structure="pd")) == {"track:16:512:renorm:anchored"}
    asked = ttvd.Statistics.parse("count:16")
    assert policies(ttvd.TTVD(world.net, world.anchored, statistics=asked)) == {"count:16"}


def test_the_anchored_default_is_what_the_loops_say_of_a_net_that_was_anchored_by_hand(world: World) -> None:
    by_hand = anchor_by_hand(world.net, world.joint)
    (x,) = world.stream[:1]
    assert_close(by_hand(x), world.net(x))
    adapter = ttvd.TTVD(world.net, world.anchored)
    naive = Naive(by_hand, world.anchored.means, 3.0, "sgd", 0.05)
    assert_same_state(adapter, naive)
    for x in world.stream[:3]:
        wanted, _ = naive.adapt(x, 1, after=False)
        torch.testing.assert_close(adapter(x).softmax(1), wanted, rtol=1e-8, atol=1e-8)
        assert_same_state(adapter, naive)


@pytest.mark.parametrize(
    "text", ["track:64:2048:renorm", "batch", "source", "count:16", "momentum:0.1:renorm"]
)
def test_every_policy_can_be_anchored(world: World, text: str) -> None:
    """Which is the same as the policy on a net whose norms store the anchors."""
    net = anchor_by_hand(world.net, world.joint)
    sites = replace(world.bare, fingerprint=fingerprint(net))
    adapter = ttvd.TTVD(world.net, world.anchored, statistics=ttvd.Statistics.parse(f"{text}:anchored"))
    other = ttvd.TTVD(net, sites, statistics=ttvd.Statistics.parse(text))
    for x in world.stream:
        torch.testing.assert_close(adapter(x), other(x), rtol=1e-7, atol=1e-7)


def test_anchored_to_a_batch_the_first_answers_to_it_are_those_of_the_source(world: World) -> None:
    x = world.stream[2]
    sites = replace(world.bare, anchors={4: measure_by_hand(world.net, x, 4)})
    source = ttvd.TTVD(world.net, world.bare, statistics=ttvd.Statistics.source()).predict(x)
    torch.testing.assert_close(ttvd.TTVD(world.net, sites).predict(x), source, rtol=1e-7, atol=1e-7)
    assert not torch.allclose(ttvd.TTVD(world.net, world.bare).predict(x), source, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", [None, "batch:anchored", "source:renorm:anchored"])
def test_model_and_sites_of_the_user_are_never_touched(world: World, text: str | None) -> None:
    asked = None if text is None else ttvd.Statistics.parse(text)
    before, anchors = read_state(world.net), copy.deepcopy(dict(world.anchored.anchors))
    flags = [parameter.requires_grad for parameter in world.net.parameters()]
    tensors = [id(tensor) for tensor in (*world.net.parameters(), *world.net.buffers())]
    adapter = ttvd.TTVD(world.net, world.anchored, statistics=asked)
    for x in world.stream:
        adapter(x)
    chains.assert_same_state(world.net, before)
    assert [parameter.requires_grad for parameter in world.net.parameters()] == flags
    assert [id(tensor) for tensor in (*world.net.parameters(), *world.net.buffers())] == tensors
    for views, kept in anchors.items():
        assert torch.equal(world.anchored.anchors[views].means, kept.means)
        assert torch.equal(world.anchored.anchors[views].variances, kept.variances)
    mine = {p.data_ptr() for p in world.net.parameters()}
    assert all(p.data_ptr() not in mine for p in adapter.parameters() if p.requires_grad)


def test_reset_comes_back_to_the_anchored_start(world: World) -> None:
    adapter, x = ttvd.TTVD(world.net, world.anchored), world.stream[0]
    start, first = adapter.snapshot(), adapter.predict(x)
    stored = torch.cat([start[name] for name in start if name.endswith("running_mean")])
    assert torch.equal(stored, world.joint.means)
    for batch in world.stream:
        adapter(batch)
    assert not torch.equal(adapter.predict(x), first)
    adapter.reset()
    found = adapter.snapshot()
    assert [name for name in start if not torch.equal(found[name], start[name])] == []
    assert torch.equal(adapter.predict(x), first)


@pytest.mark.parametrize("twin", ["anchored", "bare"])
def test_a_saved_state_is_all_that_a_twin_needs(world: World, twin: str) -> None:
    """Even one without anchors: what follows the stream is in the state."""
    adapter = ttvd.TTVD(world.net, world.anchored)
    for x in world.stream[:2]:
        adapter(x)
    other = ttvd.TTVD(world.net, getattr(world, twin))
    other.load_state_dict(adapter.state_dict())
    for x in world.stream[2:]:
        assert torch.equal(other(x), adapter(x))


def test_the_anchored_default_keeps_the_promises_of_an_adapter(world: World) -> None:
    batches = [x for x in world.stream if len(x) > 1]
    ttvd.check_adapter(lambda: ttvd.TTVD(world.net, world.anchored), world.net, batches)


@pytest.mark.parametrize("name", ["ttvd", *PRESETS])
def test_presets_do_not_care_for_anchors_and_the_default_does(world: World, name: str) -> None:
    one, other = (ttvd.create(name, world.net, sites=sites) for sites in (world.anchored, world.bare))
    assert policies(other) == {"track:64:2048:renorm" if name == "ttvd" else "batch"}
    for x in world.stream:
        assert torch.equal(one(x), other(x)) == (name != "ttvd")


def test_anchored_statistics_need_anchors(world: World) -> None:
    asked: Any = ttvd.Statistics.parse("batch:anchored")
    with pytest.raises(ValueError, match=r"ttvd.calibrate .*'NAME\+anchored', .*ttvd.anchor_norms on a copy"):
        ttvd.TTVD(world.net, world.bare, statistics=asked)
    for name in ("tent", "cotta", "roid"):
        with pytest.raises(ValueError, match=r"anchored statistics need .*'NAME\+anchored'.*anchor_norms"):
            ttvd.create(name, world.net, statistics=asked)
    few = Anchors(torch.ones(2).double(), torch.ones(2).double(), (("bn1", 2),))
    with pytest.raises(ValueError, match="the anchors are of 1 norms with 2 channels"):
        ttvd.TTVD(world.net, replace(world.bare, anchors={4: few}))


@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("policy", ["source", "track:8:64:renorm"])
def test_norms_of_every_kind_can_be_anchored(kind: str, policy: str) -> None:
    """By adapters, and where they follow a policy already; unless they have been taken to pieces for that."""
    net, x = chains.make_net(kind), chains.draw(kind, 12)
    anchors, source, plain = draw_anchors(net), net(x), ttvd.Statistics.parse(policy)
    adapter = Adapter(net, statistics=ttvd.Statistics.parse(f"{policy}:anchored"), anchors=anchors)
    late = apply_statistics(copy.deepcopy(net), plain)
    if kind == "norm and activation":
        with pytest.raises(ValueError, match="not the 2 norms of this model, by name and size"):
            anchor_norms(late, anchors)
    else:
        anchor_norms(late, anchors)
    anchor_norms(net, anchors)
    wanted = apply_statistics(net, plain)(x)
    for found in (adapter.model, late)[: 1 if kind == "norm and activation" else 2]:
        assert_close(found(x), wanted)
    if policy == "source":
        assert_close(wanted, source)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "split": ttvd.split,
    "sequence": nn.Sequential,
    "parallel": nn.DataParallel,
    "both": lambda net: nn.Sequential(nn.DataParallel(net)),
}


@pytest.mark.parametrize("kind", chains.KINDS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_changes_no_anchors(kind: str, wrapper: str) -> None:
    if wrapper == "split" and kind != "deep":
        return  # which has a head
    x = chains.draw(kind, 12)
    nets = [chains.make_net(kind), WRAPPERS[wrapper](chains.make_net(kind))]
    bare, wrapped = (chains.watch(net, x)[1] for net in nets)
    assert bare.norms == wrapped.norms
    assert_close((bare.means, bare.variances), (wrapped.means, wrapped.variances))
    for net, anchors in zip(nets, (wrapped, bare), strict=True):
        anchor_norms(net, anchors)
    assert_close([*nets[0].state_dict().values()], [*nets[1].state_dict().values()])
    assert torch.equal(norms_of(nets[1])[0].get_buffer("running_mean"), bare.means[: bare.norms[0][1]])


@pytest.mark.parametrize("kind", [kind for kind in chains.KINDS if kind != "one norm twice"])
@chains.BOUNDED
@given(seed=chains.SEEDS)
def test_by_statistics_of_clean_data_an_anchored_net_is_the_net_as_trained(kind: str, seed: int) -> None:
    """The claim that anchors are made for; a net that is not anchored says something else of the very same data."""
    net, x = chains.make_net(kind, seed), chains.draw(kind, 12, seed)
    trained, bare = net(x), chains.use_batch_statistics(net)(x)
    anchor_norms(net, chains.watch(net, x)[1])
    torch.testing.assert_close(chains.use_batch_statistics(net)(x), trained, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        apply_statistics(net, ttvd.Statistics.batch())(x), trained, rtol=1e-7, atol=1e-7
    )
    assert float((bare - trained).detach().abs().max()) > 1e-4


@pytest.mark.parametrize("policy", ["batch", "batch:renorm", "track:0:100", "count:0"])
@chains.BOUNDED
@given(seed=chains.SEEDS, scale=st.floats(0.3, 4.0), shift=st.floats(-5.0, 5.0))
def test_drifted_data_come_out_as_clean_data_did(policy: str, seed: int, scale: float, shift: float) -> None:
    """With their mean and variance; those of a norm that is not anchored are others."""
    norm, clean = chains.make_net("norm alone", seed), chains.draw("norm alone", 30, seed)
    bare, drifted = copy.deepcopy(norm), scale * chains.draw("norm alone", 30, seed + 1) + shift
    mean, var = channel_moments(norm(clean))
    anchor_norms(norm, Anchors(*channel_moments(clean), (("", 4),)))
    found, other = (
        channel_moments(apply_statistics(layer, ttvd.Statistics.parse(policy))(drifted))
        for layer in (norm, bare)
    )
    assert_close(found[0], mean)
    torch.testing.assert_close(found[1], var, rtol=1e-3, atol=0.0)
    assert_close(other[0], bare.get_parameter("bias").detach())
    assert float((other[0] - mean).abs().max()) > 1e-3


DIGITS = ["digits-plain", "digits-sla"]
SHIPPED = [*DIGITS, "resnet26-cifar10-sla", "resnet26-cifar100-sla"]
STRUCTURES = {"vd": 1, "pd": 1, "civd": 4, "cipd": 4}
"""How many views they look at."""
KINDS = {"+anchored": 4, "+anchored-upright": 1}


def run(net: nn.Module, sites: ttvd.Sites, stream: list[Tensor], **options: Any) -> Tensor:
    """All answers to a stream."""
    adapter = ttvd.TTVD(net, sites, **options)
    return torch.cat([adapter(x) for x in stream])


def stored_means(model: nn.Module) -> Tensor:
    return torch.cat([norm.get_buffer("running_mean") for norm in norms_of(model)])


def assert_close_anchors(found: Anchors, wanted: Anchors, rtol: float, atol: float) -> None:
    torch.testing.assert_close(found.means, wanted.means, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.variances, wanted.variances, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("structure", "views"), STRUCTURES.items())
def test_a_structure_uses_the_anchors_of_the_views_it_looks_at(
    world: World, structure: Any, views: int
) -> None:
    """By default and where anchored statistics are asked for; those of other views change nothing."""
    mine = world.anchored.anchors[views]
    net = anchor_by_hand(world.net, mine)
    sites = replace(world.bare, fingerprint=fingerprint(net))
    alone = replace(world.bare, anchors={views: mine})
    other = replace(world.bare, anchors={views: anchor_near(world.net, 9), 5 - views: mine})
    for text in (f"track:{16 * views}:{512 * views}:renorm", "count:16"):
        plain, asked = ttvd.Statistics.parse(text), ttvd.Statistics.parse(f"{text}:anchored")
        options: dict[str, Any] = {"structure": structure}
        wanted = run(net, sites, world.stream, statistics=plain, **options)
        if text.startswith("count"):
            options["statistics"] = asked
        found = run(world.net, world.anchored, world.stream, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)
        assert torch.equal(run(world.net, alone, world.stream, **options), found)
        assert not torch.allclose(run(world.net, other, world.stream, **options), found, rtol=1e-3, atol=1e-3)
    assert torch.equal(stored_means(ttvd.TTVD(world.net, world.anchored, structure=structure)), mine.means)


@pytest.mark.parametrize(("structure", "views"), STRUCTURES.items())
def test_anchors_of_other_views_are_none(world: World, structure: Any, views: int) -> None:
    lacking = replace(world.anchored, anchors={5 - views: world.anchored.anchors[5 - views]})
    default = f"track:{16 * views}:{512 * views}:renorm"
    assert policies(ttvd.TTVD(world.net, lacking, structure=structure)) == {default}
    assert policies(ttvd.TTVD(world.net, world.anchored, structure=structure)) == {f"{default}:anchored"}
    found = run(world.net, lacking, world.stream, structure=structure)
    assert torch.equal(found, run(world.net, world.bare, world.stream, structure=structure))
    with pytest.raises(ValueError, match="anchored statistics need the anchors of the norms"):
        ttvd.TTVD(world.net, lacking, structure=structure, statistics=ttvd.Statistics.parse("batch:anchored"))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_calibrated_on_a_batch_the_first_answers_to_it_are_those_of_the_source(
    world: World, structure: Any
) -> None:
    """Whichever views are looked at; with the anchors of the others they are not."""
    x = world.stream[2]
    sites = ttvd.calibrate(world.net, world.bare, (x, torch.arange(len(x)) % 3), structures=())
    for views in (1, 4):
        assert_close_anchors(sites.anchors[views], measure_by_hand(world.net, x, views), 1e-9, 1e-9)
    swapped = replace(sites, anchors={1: sites.anchors[4], 4: sites.anchors[1]})
    source, found, wrong = (
        ttvd.TTVD(world.net, known, structure=structure, statistics=how, detect_changes=False).predict(x)
        for known, how in ((world.bare, ttvd.Statistics.source()), (sites, None), (swapped, None))
    )
    torch.testing.assert_close(found, source, rtol=1e-7, atol=1e-7)
    assert not torch.allclose(wrong, source, rtol=1e-4, atol=1e-4)


def test_sites_of_one_view_have_one_kind_of_anchors(world: World) -> None:
    bare = replace(world.bare, means=world.bare.means[:, :1], counts=world.bare.counts[:, :1])
    net = build_world().net
    net.fc = nn.Linear(net.fc.in_features, 3).double()
    bare, x = replace(bare, fingerprint=fingerprint(net)), world.stream[2]
    sites = ttvd.calibrate(net, bare, (x, torch.arange(len(x)) % 3), structures=())
    assert set(sites.anchors) == {1}
    assert_close_anchors(sites.anchors[1], measure_by_hand(net, x, 1), 1e-9, 1e-9)
    for structure in STRUCTURES:
        chosen: Any = structure
        adapter = ttvd.TTVD(net, sites, structure=chosen, mirror=False)
        assert policies(adapter, adapter.model) == {"track:16:512:renorm:anchored"}
        assert adapter.source is not None
        assert policies(adapter, adapter.source) == {"track:16:512:renorm:anchored", "source"}


def save_source(folder: Path, anchored: bool, sites: bool = True) -> nn.Module:
    """A checkpoint called toy."""
    model = save_toy(folder, card=replace(CARD, arguments={**CARD.arguments, "norm": "batch"}))
    if sites:
        means, counts = torch.rand(2, 4, 16, dtype=torch.float64), torch.ones(2, 4).long()
        anchors = {1: draw_anchors(model, 1), 4: draw_anchors(model, 4)} if anchored else {}
        ttvd.Sites(means, counts, fingerprint(model), anchors=anchors).save(folder / "toy.sites.safetensors")
    return model.eval()


@pytest.mark.parametrize(("kind", "views"), KINDS.items())
def test_a_checkpoint_can_be_had_anchored(tmp_path: Path, kind: str, views: int) -> None:
    model, x = save_source(tmp_path, anchored=True), torch.rand(4, 1, 8, 8)
    source, plain = zoo.load(f"toy{kind}", tmp_path), zoo.load("toy", tmp_path)
    torch.testing.assert_close(source.model(x), model(x), rtol=1e-3, atol=1e-3)
    assert source.sites is not None
    assert plain.sites is not None
    assert torch.equal(stored_means(source.model), draw_anchors(model, views).means.float())
    assert set(source.sites.anchors) == {1, 4}
    for count, anchors in source.sites.anchors.items():
        assert_close_anchors(anchors, plain.sites.anchors[count], 0.0, 0.0)
    source.sites.check(source.model)
    with pytest.raises(ValueError, match="its weights differ"):
        source.sites.check(model)
    assert source.card == plain.card
    assert zoo.available(tmp_path) == ["toy"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sites", [True, False])
def test_a_checkpoint_without_anchors_cannot_be_had_anchored(tmp_path: Path, kind: str, sites: bool) -> None:
    save_source(tmp_path, anchored=False, sites=sites)
    with pytest.raises(ValueError, match=rf"'toy\{kind}': .* no sites with anchors; ttvd.calibrate"):
        zoo.load(f"toy{kind}", tmp_path)
    with pytest.raises(ValueError, match="no checkpoint is called 'tory'; did you mean 'toy'"):
        zoo.load(f"tory{kind}", tmp_path)


@pytest.mark.parametrize("end", ["+anchored-sideways", "+anchoredupright", "+anchored+anchored", "-upright"])
def test_anchored_in_no_way_that_is_known(tmp_path: Path, end: str) -> None:
    save_source(tmp_path, anchored=True)
    with pytest.raises(ValueError, match=rf"no checkpoint is called 'toy{end}'".replace("+", r"\+")):
        zoo.load(f"toy{end}", tmp_path)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_checkpoint_predicts_the_same_anchored(name: str) -> None:
    x = torch.rand(2, 3, 32, 32) if "cifar" in name else split_digits()[2][:200]
    plain = ttvd.load(name)
    assert plain.sites is not None
    with torch.no_grad():
        wanted = plain.model(x)
    for kind, views in KINDS.items():
        anchored = ttvd.load(f"{name}{kind}")
        assert anchored.sites is not None
        anchored.sites.check(ttvd.split(anchored.model))
        with torch.no_grad():
            found = anchored.model(x)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        assert torch.equal(found.argmax(1), wanted.argmax(1))
        assert torch.equal(stored_means(anchored.model), plain.sites.anchors[views].means.float())
    for fraction in (0.1, 0.05, 0.01) if "cifar" in name else ():
        few = ttvd.load(name, fraction=fraction).sites
        assert few is not None
        assert set(few.anchors) == {1, 4}
        for views, anchors in few.anchors.items():
            assert_close_anchors(anchors, plain.sites.anchors[views], 0.0, 0.0)


@pytest.mark.parametrize("name", DIGITS)
def test_shipped_anchors_are_what_held_out_digits_show(name: str) -> None:
    """Every tenth digit of the source, upright and in all four rotations."""
    source, images = ttvd.load(name), split_digits()[0][::10]
    assert source.sites is not None
    assert set(source.sites.anchors) == {1, 4}
    for views, anchors in source.sites.anchors.items():
        assert_close_anchors(anchors, measure_by_hand(source.model, images, views), 1e-4, 1e-5)
    upright, joint = source.sites.anchors[1], source.sites.anchors[4]
    assert not torch.allclose(upright.variances, joint.variances, rtol=0.05)


@pytest.mark.parametrize("name", DIGITS)
def test_by_statistics_of_upright_digits_those_anchored_to_them_alone_are_the_source(name: str) -> None:
    x = split_digits()[0][::10]
    with torch.no_grad():
        wanted = ttvd.load(name).model(x)
    found, other, bare = (
        ttvd.create("bn", ttvd.load(name + end).model)(x) for end in ("+anchored-upright", "+anchored", "")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert float((other - wanted).abs().max()) > 0.1
    assert float((bare - wanted).abs().max()) > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DIGITS)
def test_methods_that_know_no_sites_start_from_an_anchored_checkpoint(name: str, kind: str) -> None:
    source, x = ttvd.load(f"{name}{kind}"), split_digits()[2][:64]
    before, adapter = read_state(source.model), ttvd.create("tent", source.model)
    first, second = adapter(x), adapter(x)
    chains.assert_same_state(source.model, before)
    wanted = chains.use_batch_statistics(source.model.double())(x.double()).float().detach()
    torch.testing.assert_close(first, wanted, rtol=1e-3, atol=1e-3)
    assert bool(second.isfinite().all())
    assert not torch.equal(second, first)


@pytest.mark.parametrize(("structure", "views"), [("pd", 1), ("cipd", 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_with_sites_finds_its_own_way_on_an_anchored_checkpoint(
    kind: str, structure: Any, views: int
) -> None:
    """However its norms are anchored already."""
    plain, anchored = ttvd.load("digits-sla"), ttvd.load(f"digits-sla{kind}")
    x, answers = split_digits()[2][:64], []
    for source in (plain, anchored):
        assert source.sites is not None
        adapter = ttvd.TTVD(source.model, source.sites, structure=structure)
        assert torch.equal(stored_means(adapter), source.sites.anchors[views].means.float())
        answers.append(adapter(x))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-3, atol=1e-3)


class Pair(nn.Module):
    """Two norms, registered in any order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, chains.make_net("norm alone", ord(name)))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("b")(self.get_submodule("a")(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mine", "its"), [("ab", "ba"), ("ba", "ab")])
def test_anchors_find_their_norms_by_name(mine: str, its: str) -> None:
    """A twin with the same state knows which are meant, in whatever order its norms were registered."""
    x, (net, twin, wrong) = chains.draw("norm alone", 12), map(Pair, (mine, its, its))
    trained, anchors = net(x), chains.watch(net, x)[1]
    first, second = anchors.means.split(4), anchors.variances.split(4)
    anchor_norms(twin, anchors)
    for name, mean, var in zip(mine, first, second, strict=True):
        assert torch.equal(twin.get_buffer(f"{name}.running_mean"), mean)
        assert torch.equal(twin.get_buffer(f"{name}.running_var"), var)
    anchor_norms(wrong, Anchors(torch.cat(first[::-1]), torch.cat(second[::-1]), anchors.norms))
    for found, right in ((twin, True), (wrong, False)):
        assert_close(found(x), trained)
        assert torch.allclose(chains.use_batch_statistics(found)(x), trained, rtol=1e-7, atol=1e-7) == right


def test_anchors_of_another_model_are_refused_before_anything_changes() -> None:
    net = chains.make_net("deep")
    before = read_state(net)
    known, ones = kinds_of(net), torch.ones(99).double()
    swapped, named, split = (("4", 5), ("1", 3)), (*known[:2], ("8", 6)), (*known[:2], ("7", 2), ("8", 4))
    for kinds in ((), known[:2], (*known, ("8", 1)), (*swapped, known[2]), named, split):
        count = sum(size for _, size in kinds)
        reason = f"of {len(kinds)} norms with {count} channels that are not the 3 norms .*ttvd.calibrate"
        with pytest.raises(ValueError, match=reason):
            anchor_norms(net, Anchors(ones[:count], ones[:count], kinds))
    chains.assert_same_state(net, before)
