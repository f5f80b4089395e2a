"""TTVD and how alike the images of a batch are: when it is counted, where it is kept, what is answered with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ttvd
from tests.helpers.methods import WAITING, Watch, draw_images, make_default
from ttvd.methods.ttvd.label_shift import LabelShiftEstimator
from ttvd.nn.resnet import ResNet


def state_of(adapter: ttvd.Adapter) -> dict[str, Tensor]:
    state = adapter.state_dict()
    return {name: state[f"label_shift.{name}"].clone() for name in ("excess", "images", "mean")}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_the_state_comes_and_goes_with_the_adapter() -> None:
    adapter, other = make_default(), make_default()
    fresh = state_of(adapter)
    assert fresh["excess"] == fresh["images"] == 0
    first = [adapter(draw_images(seed=seed)) for seed in range(2)]
    early, snapshot = state_of(adapter), adapter.snapshot()
    assert early["images"] == 16
    assert early["excess"] != 0
    saved = {name: value.clone() for name, value in adapter.state_dict().items()}
    adapter(draw_images(seed=2))
    late = state_of(adapter)
    adapter.restore(snapshot)
    assert_same(state_of(adapter), early)
    other.load_state_dict(saved)
    for one in (adapter, other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):  # noqa: S301
        one(draw_images(seed=2))
        assert_same(state_of(one), late)
    for back in (adapter.reset, adapter.renew):
        back()
        assert_same(state_of(adapter), fresh)
        assert all(torch.equal(adapter(draw_images(seed=seed)), first[seed]) for seed in range(2))
        assert_same(state_of(adapter), early)


def test_what_is_asked_and_not_learnt_changes_nothing() -> None:
    adapter = make_default()
    adapter(draw_images())
    before = state_of(adapter)
    adapter.predict(draw_images(seed=1))
    adapter.output(draw_images(seed=1))
    adapter.loss(draw_images(seed=1))
    assert_same(state_of(adapter), before)


def test_a_batch_that_is_not_finite_changes_nothing() -> None:
    adapter = make_default()
    adapter(draw_images())
    before, adapter.validation = state_of(adapter), "never"
    broken = draw_images(seed=1)
    broken[2, 0, 3, 3] = torch.nan
    adapter(broken)
    assert_same(state_of(adapter), before)


def test_nothing_waits_for_the_device() -> None:
    adapter, x = make_default(), draw_images()
    adapter(x)
    with Watch() as watch:
        adapter.adapt(x)
    assert "logsumexp" in watch.names
    assert not watch.names & WAITING
    assert int(state_of(adapter)["images"]) == 16, "the batch was taken in while we watched"


@pytest.mark.parametrize(
    "options",
    [{"steps": 2}, {"steps": 3, "prediction": "after"}, {"prediction": "after"}, {"optimizer": "adam"}],
)
@pytest.mark.parametrize("rotations", [True, False])
def test_a_batch_counts_once(options: dict[str, Any], rotations: bool) -> None:
    """And as it was seen first: the first batch is the same to all."""
    plain, other = make_default(rotations), make_default(rotations, **options)
    plain(draw_images())
    other(draw_images())
    assert_same(state_of(other), state_of(plain))
    other(draw_images(5, seed=1))
    other(draw_images(1, seed=2))
    assert int(state_of(other)["images"]) == 14


def test_the_answer_is_that_of_the_number_found_so_far() -> None:
    """The number given by hand answers as the stream does: before a batch counts, and after it where that is asked."""
    for prediction, at in (("before", 0), ("after", 1)):
        adapter = make_default(prediction=prediction, lr=0.0, guard=False)
        state = adapter.state_dict() | {
            "label_shift.excess": torch.tensor(0.5),
            "label_shift.images": torch.tensor(99),
        }
        adapter.load_state_dict(state)  # as after batches that were sorted
        for seed in range(3):
            numbers = [float(LabelShiftEstimator.concentration(adapter.label_shift))]  # type: ignore[arg-type]
            saved, found = adapter.snapshot(), adapter(draw_images(seed=seed))
            numbers.append(float(LabelShiftEstimator.concentration(adapter.label_shift)))  # type: ignore[arg-type]
            by_hand = make_default(prediction=prediction, lr=0.0, guard=False, prior=numbers[at])
            by_hand.load_state_dict({n: v for n, v in saved.items() if not n.startswith("label_shift.")})
            torch.testing.assert_close(by_hand(draw_images(seed=seed)), found)
            assert numbers[0] != numbers[1]


@pytest.mark.parametrize("prior", [None, 2.0])
def test_without_the_stream_there_is_no_state(prior: float | None) -> None:
    assert not any("label_shift" in name for name in make_default(prior=prior).state_dict())


def test_a_double_adapter_has_a_double_state(make_net: Callable[..., ResNet], make_sites: Any) -> None:
    net = make_net()
    assert ttvd.TTVD(net, make_sites(net)).state_dict()["label_shift.excess"].dtype == torch.float64
    adapter = make_default()
    adapter(draw_images())
    before = state_of(adapter)
    adapter.double()
    assert state_of(adapter)["excess"].dtype == torch.float64
    assert float(state_of(adapter)["excess"]) == float(before["excess"])
    assert adapter(draw_images().double()).dtype == torch.float64


def test_one_class_has_no_shares(make_net: Callable[..., ResNet], make_sites: Any) -> None:
    """So there is nothing to count; what is left without the correction is sure, and learns."""
    net = make_net(4)
    sites = make_sites(net, classes=1)
    adapter, without = ttvd.TTVD(net, sites, guard=False), ttvd.TTVD(net, sites, prior=None, guard=False)
    assert adapter.label_shift is None
    before = adapter.snapshot()
    assert before.keys() == without.snapshot().keys()
    x = draw_images(8).double()
    assert torch.equal(adapter(x).softmax(1), torch.ones(8, 1, dtype=torch.float64))
    assert any(not torch.equal(v, before[n]) for n, v in adapter.snapshot().items() if n.endswith("weight"))
    without(x)
    assert_same(without.snapshot(), adapter.snapshot())


@pytest.mark.parametrize(("outputs", "ratio"), [(1, 0.0), (4, 0.3)])
def test_a_single_cell_has_no_ratio(outputs: int, ratio: float, make_net: Any, make_sites: Any) -> None:
    net = make_net(outputs)
    assert ttvd.TTVD(net, make_sites(net, classes=1)).slr_weight == ratio


def test_full_steps_with_adam_and_part_of_one_with_sgd() -> None:
    """Adam's steps do not depend on the size of a loss, so that full ones are all that it has."""
    assert make_default().reference_batch_size == 64
    assert make_default(optimizer="adam").reference_batch_size == 1
    with pytest.raises(ValueError, match="do not depend on its scale: use optimizer='sgd'"):
        make_default(optimizer="adam", reference_batch_size=64)
    for optimizer, given in (("adam", 1), ("sgd", 64)):
        options: dict[str, Any] = {"optimizer": optimizer, "lr": 1e-3}
        silent, said = make_default(**options), make_default(**options, reference_batch_size=given)
        start = silent.snapshot()
        for seed in range(2):
            assert torch.equal(silent(draw_images(seed=seed)), said(draw_images(seed=seed)))
        assert_same(said.snapshot(), silent.snapshot())
        assert any(not torch.equal(v, start[n]) for n, v in said.snapshot().items() if n.endswith("weight"))
    part, full = make_default(lr=0.05), make_default(lr=0.05 / 8, reference_batch_size=1)
    part(draw_images())
    full(draw_images())
    for name, value in part.snapshot().items():
        if name.endswith((".weight", ".bias")):
            torch.testing.assert_close(value, full.snapshot()[name])
