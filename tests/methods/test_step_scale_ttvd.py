"""TTVD and steps by need: when they are, where what they follow is kept, and that they are nothing but shorter."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import ttvd
from tests.helpers.methods import WAITING, Watch, build_net, build_sites, build_stream
from tests.helpers.methods import bound_factor as bound
from tests.helpers.methods import loop_level as loop
from ttvd.data.corruptions import corrupt
from ttvd.data.digits import split_digits
from ttvd.methods.ttvd.step_scale import StepScale
from ttvd.nn.resnet import ResNet

PRESETS = ["vd", "civd", "pd", "cipd", "ttvd-paper", "ttvd-reference"]
BARE: dict[str, Any] = {"rotation_weight": 0.0, "output_temperature": 1.0}
"""Nothing else looks at the rotations."""
USUAL = 1.58
"""Where the factors of the stream are no bounds."""
HIGH = 1e3
"""Where no stream needs anything."""


@cache
def make_world(outputs: int = 12, views: int = 4) -> tuple[ResNet, ttvd.Sites]:
    net = build_net(outputs)
    return net, build_sites(net, means=build_sites(net).means[:, :views])


def make_adapter(
    usual: float | None = USUAL, name: str = "ttvd", outputs: int = 12, views: int = 4, **options: Any
) -> ttvd.TTVD:
    net, sites = make_world(outputs, views)
    adapter = ttvd.create(name, net, sites=replace(sites, rotation_loss=usual), guard=False, **options)
    assert isinstance(adapter, ttvd.TTVD)
    return adapter


@cache
def stream() -> list[Tensor]:
    return build_stream(8, 12, 5)


def read(adapter: ttvd.Adapter) -> tuple[float, int]:
    state = adapter.state_dict()
    return float(state["step_scale.level"]), int(state["step_scale.images"])


@torch.no_grad()
def see_rotations(adapter: ttvd.TTVD, x: Tensor, views: int = 4) -> Tensor:
    """Logarithms of the rotations' probabilities (v, b, v): joint probabilities summed over the classes."""
    turned = [torch.rot90(x, a * 4 // views, (2, 3)) for a in range(views)]
    joint: Tensor = adapter.model(torch.cat(turned)).softmax(1)
    return joint.reshape(views, len(x), 3, views).sum(2).log()


def drop_need(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.startswith("step_scale.")}


def affine(adapter: ttvd.Adapter) -> dict[str, Tensor]:
    """What the gradient steps change."""
    found = {n: v for n, v in adapter.snapshot().items() if n.endswith((".weight", ".bias"))}
    assert found
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


POSSIBLE: list[dict[str, Any]] = [{}, BARE, {"adaptive_step": True}, {"usual": 0.0}, {"structure": "civd"}]
POSSIBLE += [{"objective": "joint", "gamma": -0.8}, {"momentum": 0.9}, {"views": 2, "outputs": 6}]
POSSIBLE += [{"name": "civd", "adaptive_step": True}]
IMPOSSIBLE: list[dict[str, Any]] = [{"optimizer": "adam"}, {"structure": "pd"}, {"structure": "vd"}]
IMPOSSIBLE += [{"outputs": 3}, {"outputs": 3, "views": 1}, {"usual": None}, {"name": "vd"}]


@pytest.mark.parametrize("options", POSSIBLE, ids=str)
def test_steps_go_by_need_where_that_is_known(options: dict[str, Any]) -> None:
    adapter = make_adapter(**options)
    assert isinstance(adapter.step_scale, StepScale)
    assert adapter.step_scale.source_loss == options.get("usual", USUAL)
    assert adapter.state_dict()["step_scale.level"].dtype == torch.float64


@pytest.mark.parametrize("options", [*IMPOSSIBLE, {"adaptive_step": False}], ids=str)
def test_else_steps_are_full(options: dict[str, Any]) -> None:
    """And the loss on source data changes nothing."""
    adapter, without = (
        make_adapter(**options),
        make_adapter(**options | {"adaptive_step": False, "usual": None}),
    )
    assert adapter.step_scale is None
    for x in stream():
        assert torch.equal(adapter(x), without(x))
    assert_same(adapter.snapshot(), without.snapshot())


@pytest.mark.parametrize("options", IMPOSSIBLE, ids=str)
def test_what_is_impossible_is_refused_with_what_to_do(options: dict[str, Any]) -> None:
    reason = (
        "adaptive_step=True needs SGD, .*several views.*tells rotations apart.*rotation_loss: ttvd.calibrate"
    )
    with pytest.raises(ValueError, match=reason):
        make_adapter(**options, adaptive_step=True)


@pytest.mark.parametrize("name", PRESETS)
def test_the_stages_of_the_paper_take_full_steps(name: str) -> None:
    assert ttvd.list_methods()[name].parameters()["adaptive_step"] is False
    assert ttvd.list_methods()["ttvd"].parameters()["adaptive_step"] is None
    adapter, before = make_adapter(HIGH, name, lr=0.05), make_adapter(None, name, lr=0.05)
    assert adapter.step_scale is None
    start = affine(adapter)
    for x in stream():
        assert torch.equal(adapter(x), before(x))
    assert_same(adapter.snapshot(), before.snapshot())
    assert any(not torch.equal(value, start[n]) for n, value in affine(adapter).items())


@pytest.mark.parametrize("views", [2, 4])
@pytest.mark.parametrize("options", [{}, BARE, {"structure": "civd"}], ids=["all", "bare", "civd"])
def test_the_adapter_hands_over_the_rotations_of_its_views(views: int, options: dict[str, Any]) -> None:
    adapter, seen = make_adapter(outputs=3 * views, views=views, **options), []
    for x in stream():
        seen.append(see_rotations(adapter, x, views))
        adapter(x)
        assert read(adapter) == pytest.approx(loop(seen, USUAL), rel=1e-9)


KINDS: list[dict[str, Any]] = [{}, BARE, {"prior": None, "diversity_weight": 0.0}, {"prediction": "after"}]
KINDS += [
    {"structure": "civd", "agreement_filter": True},
    {"objective": "entropy", "reference_batch_size": 1},
]


@pytest.mark.parametrize("options", [*KINDS, {"objective": "joint"}], ids=str)
def test_a_step_is_the_factor_times_a_full_one(options: dict[str, Any]) -> None:
    """Of the batches so far, with this one; all else is as it was."""
    adapter, full, seen = make_adapter(**options), make_adapter(adaptive_step=False, **options), []
    for x in stream():
        full.restore(drop_need(adapter.snapshot()))
        seen.append(see_rotations(adapter, x))
        factor, start = bound(loop(seen, USUAL)[0], USUAL), affine(adapter)
        assert 0.05 < factor < 0.95, f"{factor} shows nothing"
        found, wanted = adapter(x), full(x)
        if options.get("prediction") != "after":
            assert torch.equal(found, wanted)
        moved, goal = affine(adapter), affine(full)
        for name, value in start.items():
            part = factor * (goal[name] - value)
            torch.testing.assert_close(moved[name] - value, part, rtol=1e-7, atol=1e-12)
        assert max(float((goal[name] - value).abs().max()) for name, value in start.items()) > 1e-4
        for name, value in drop_need(adapter.snapshot()).items():
            if name not in start and "velocity" not in name:
                assert torch.equal(value, full.snapshot()[name]), name
        assert adapter.kept == full.kept


@pytest.mark.parametrize("options", [{"steps": 2}, {"steps": 3, "prediction": "after"}, BARE | {"steps": 2}])
def test_several_steps_count_a_batch_once_and_share_its_factor(options: dict[str, Any]) -> None:
    """As it was seen first; steps by a factor are steps with that much of the learning rate."""
    adapter, plain, x = make_adapter(**options), make_adapter(), stream()[0]
    factor = bound(loop([see_rotations(adapter, x)], USUAL)[0], USUAL)
    assert 0.05 < factor < 0.95
    slow = make_adapter(adaptive_step=False, lr=0.05 * factor, **options)
    torch.testing.assert_close(adapter(x), slow(x))
    plain(x)
    assert read(adapter) == read(plain)
    assert read(adapter)[1] == 8
    for name, value in affine(slow).items():
        torch.testing.assert_close(affine(adapter)[name], value, rtol=1e-9, atol=1e-12)
    adapter(stream()[1])
    assert read(adapter)[1] == 20


@pytest.mark.parametrize("options", [{}, BARE, {"momentum": 0.9}, {"steps": 2}, {"structure": "civd"}])
def test_without_need_parameters_stay_and_statistics_follow(options: dict[str, Any]) -> None:
    adapter, frozen = make_adapter(HIGH, **options), make_adapter(lr=0.0, adaptive_step=False, **options)
    before = adapter.snapshot()
    for x in stream():
        assert torch.equal(adapter(x), frozen(x))
    after = adapter.snapshot()
    for name, value in affine(adapter).items():
        assert torch.equal(value, before[name]), name
    for end in ("running_mean", "running_var", "rows_followed"):
        names = [name for name in after if name.endswith(end)]
        assert names
        assert all(not torch.equal(after[name], before[name]) for name in names)
        assert all(torch.equal(after[name], frozen.snapshot()[name]) for name in names)
    assert int(after["label_shift.images"]) == int(after["step_scale.images"]) == 25
    assert adapter.step_scale is not None
    assert float(adapter.step_scale.factor()) == 0.0


def test_far_from_the_source_steps_are_full() -> None:
    adapter, full = make_adapter(0.0), make_adapter(adaptive_step=False)
    for x in stream():
        assert torch.equal(adapter(x), full(x))
    assert_same(drop_need(adapter.snapshot()), full.snapshot())


def test_the_state_comes_and_goes_with_the_adapter() -> None:
    adapter, other = make_adapter(), make_adapter()
    fresh = read(adapter)
    assert fresh == (USUAL + 0.1, 0)
    batches = stream()
    first = [adapter(x) for x in batches[:2]]
    early, snapshot, saved = read(adapter), adapter.snapshot(), copy.deepcopy(adapter.state_dict())
    assert early[1] == 20
    assert early[0] != fresh[0]
    adapter(batches[2])
    late, ended = read(adapter), affine(adapter)
    assert late != early
    adapter.restore(snapshot)
    assert read(adapter) == early
    other.load_state_dict(saved)
    for one in (adapter, other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):  # noqa: S301
        one(batches[2])
        assert read(one) == late
        assert_same(affine(one), ended)
    for back in (adapter.reset, adapter.renew):
        back()
        assert read(adapter) == fresh
        assert all(torch.equal(adapter(x), y) for x, y in zip(batches, first, strict=False))
        assert read(adapter) == early
    with pytest.raises(ValueError, match=r"'step_scale.images' is missing, 2 entries"):
        other.load_state_dict(make_adapter(adaptive_step=False).state_dict())


def test_the_state_has_the_type_of_the_adapter() -> None:
    net = build_net(12).float()
    sites = replace(build_sites(net), rotation_loss=USUAL)
    adapter, x = ttvd.TTVD(net, sites), stream()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        adapter(x)
    level, images = read(adapter)
    assert images == 8
    assert adapter.state_dict()["step_scale.level"].dtype == torch.float32
    assert adapter.double().state_dict()["step_scale.level"].dtype == torch.float64
    assert adapter.state_dict()["step_scale.images"].dtype == torch.int64
    assert read(adapter) == (level, images)
    assert adapter(x.double()).dtype == torch.float64


def test_what_is_asked_and_what_is_not_finite_change_nothing() -> None:
    adapter, (first, second, _) = make_adapter(), stream()
    adapter(first)
    before, adapter.validation = read(adapter), "never"
    for ask in (adapter.predict, adapter.output, adapter.loss):
        ask(second)
    broken = second.clone()
    broken[2, 0, 3, 3] = torch.nan
    adapter(broken)
    assert read(adapter) == before


def test_the_loss_has_the_factor_of_what_is_known_so_far() -> None:
    adapter, full, (first, second, _) = make_adapter(), make_adapter(adaptive_step=False), stream()
    seen = see_rotations(adapter, first)
    adapter(first)
    full.restore(drop_need(adapter.snapshot()))
    factor = bound(loop([seen], USUAL)[0], USUAL)
    torch.testing.assert_close(adapter.loss(second).loss, factor * full.loss(second).loss)


@pytest.mark.parametrize("options", [{}, BARE], ids=["all", "bare"])
def test_nothing_waits_for_the_device(options: dict[str, Any]) -> None:
    adapter, (first, second, _) = make_adapter(**options), stream()
    adapter(first)
    with Watch() as watch:
        adapter.adapt(second)
    assert {"lerp", "clamp"} <= watch.names
    assert not watch.names & WAITING
    assert read(adapter)[1] == 20, "the batch was taken in while we watched"


def test_clean_digits_need_less_than_corrupted_ones() -> None:
    source, (_, _, images, _) = ttvd.load("digits-sla"), split_digits()
    index, factors = torch.arange(256), []
    for x in (images[:256], corrupt(images[:256], "fog", 5, seed=0, index=index)):
        adapter = ttvd.create("ttvd", source.model, sites=source.sites)
        assert isinstance(adapter, ttvd.TTVD)
        assert adapter.step_scale is not None
        for batch in x.split(64):
            adapter(batch)
        factors.append(float(adapter.step_scale.factor()))
    assert factors[0] < 0.5
    assert factors[1] == 1.0
