"""Which anchors: those of upright images or of all views together, for adapters and for checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers import nn as chains
from tests.helpers.nn import assert_close, draw_anchors, kinds_of, norms_of, read_state
from tests.helpers.zoo import CARD, save_toy
from tests.methods.test_anchored import (
    World,
    anchor_by_hand,
    anchor_near,
    build_world,
    measure_by_hand,
    policies,
)
from ttvd.data.digits import split_digits
from ttvd.nn.anchors import Anchors, anchor_norms
from ttvd.nn.fingerprint import fingerprint
from ttvd.zoo import catalog as zoo

DIGITS = ["digits-plain", "digits-sla"]
SHIPPED = [*DIGITS, "resnet26-cifar10-sla", "resnet26-cifar100-sla"]
STRUCTURES = {"vd": 1, "pd": 1, "civd": 4, "cipd": 4}
"""How many views they look at."""
KINDS = {"+anchored": 4, "+anchored-upright": 1}


@pytest.fixture
def world() -> World:
    return build_world()


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
        ttvd.TTVD(world.net, known, structure=structure, statistics=how).predict(x)
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
        assert policies(ttvd.TTVD(net, sites, structure=chosen)) == {"track:16:512:renorm:anchored"}


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
