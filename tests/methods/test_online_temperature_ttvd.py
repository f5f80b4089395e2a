"""TTVD and the temperature of its rotations: when it is measured, where it is kept, what is answered with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ttvd
from tests.helpers.methods import WAITING, Watch, draw_images, make_default
from tests.helpers.methods import loop_temperature as loop
from ttvd.nn.resnet import ResNet

START = (1.0, 64.0)


def read(adapter: ttvd.Adapter) -> tuple[float, float]:
    state = adapter.state_dict()
    return float(state["online_temperature.sharpness"]), float(state["online_temperature.information"])


def test_nothing_waits_for_the_device() -> None:
    adapter = make_default()
    adapter(draw_images())
    before = read(adapter)
    with Watch() as watch:
        adapter.adapt(draw_images(seed=1))
    assert "logsumexp" in watch.names
    assert not watch.names & WAITING
    assert read(adapter) != before, "the batch was taken in while we watched"


def test_the_state_comes_and_goes_with_the_adapter() -> None:
    adapter, other = make_default(), make_default()
    assert read(adapter) == START
    first = [adapter(draw_images(seed=seed)) for seed in range(2)]
    early, snapshot, saved = read(adapter), adapter.snapshot(), copy.deepcopy(adapter.state_dict())
    assert abs(early[0] - 1) > 1e-3
    adapter(draw_images(seed=2))
    late = read(adapter)
    assert late != early
    adapter.restore(snapshot)
    assert read(adapter) == early
    other.load_state_dict(saved)
    for one in (adapter, other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):  # noqa: S301
        one(draw_images(seed=2))
        assert read(one) == late
    for back in (adapter.reset, adapter.renew):
        back()
        assert read(adapter) == START
        assert all(torch.equal(adapter(draw_images(seed=seed)), first[seed]) for seed in range(2))
    assert adapter.double().state_dict()["online_temperature.sharpness"].dtype == torch.float64


@pytest.mark.parametrize(
    "options", [{"steps": 2}, {"steps": 3, "prediction": "after"}, {"prediction": "after"}, {"lr": 0.0}]
)
def test_a_batch_counts_once_as_it_was_seen_before_the_step(options: dict[str, Any]) -> None:
    plain, other = make_default(), make_default(**options)
    plain(draw_images())
    other(draw_images())
    assert read(other) == read(plain) != START


def test_what_is_asked_and_what_is_not_finite_change_nothing() -> None:
    adapter = make_default()
    adapter(draw_images())
    before, adapter.validation = read(adapter), "never"
    for ask in (adapter.predict, adapter.output, adapter.loss):
        ask(draw_images(seed=1))
    broken = draw_images(seed=1)
    broken[2, 0, 3, 3] = torch.nan
    adapter(broken)
    assert read(adapter) == before


def test_answers_have_the_factor_of_the_batches_before_and_teach_nothing_else() -> None:
    """The factor given by hand answers alike: before a batch counts, or after it where that is asked."""
    for prediction, at in (("before", 0), ("after", 1)):
        options: dict[str, Any] = {"prediction": prediction, "prior": None, "guard": False}
        adapter = make_default(**options)
        for seed in range(3):
            factors, saved = [read(adapter)[0] ** -0.7], adapter.snapshot()
            found = adapter(draw_images(seed=seed))
            factors.append(read(adapter)[0] ** -0.7)
            assert abs(factors[0] - factors[1]) > 1e-3
            by_hand = make_default(**options, output_temperature=factors[at])
            by_hand.load_state_dict(
                {n: v for n, v in saved.items() if not n.startswith("online_temperature.")}
            )
            torch.testing.assert_close(by_hand(draw_images(seed=seed)), found)
            for name, value in by_hand.snapshot().items():
                assert torch.equal(value, adapter.snapshot()[name]), name


def test_a_head_that_is_too_sure_answers_with_less_confidence() -> None:
    """At four times the temperature of the rotations, answers have 4^0.7 of theirs."""
    adapter, x = make_default(prior=None), draw_images()
    fresh, state = adapter.predict(x), adapter.snapshot()
    state["online_temperature.sharpness"].fill_(0.25)
    adapter.restore(state)
    torch.testing.assert_close(adapter.predict(x), fresh / 4**0.7)
    torch.testing.assert_close(adapter(x), fresh / 4**0.7)


@pytest.mark.parametrize("structure", ["cipd", "pd", "vd"])
@pytest.mark.parametrize("views", [2, 4])
def test_the_adapter_hands_over_the_rotations_of_its_views(
    views: int, structure: Any, make_net: Callable[..., ResNet], make_sites: Any
) -> None:
    """Joint probabilities summed over the classes; a single diagram knows the upright view alone."""
    net = make_net(3 * views)
    sites = make_sites(net, means=make_sites(net).means[:, :views])
    adapter, x = (
        ttvd.TTVD(net, sites, structure=structure, rotation_weight=1.0, output_temperature="stream"),
        draw_images(5).double(),
    )
    turned = [torch.rot90(x, a * 4 // views, (2, 3)) for a in range(views if structure == "cipd" else 1)]
    with torch.no_grad():
        logits = adapter.model(torch.cat(turned))
    p = logits.softmax(1).reshape(len(turned), 5, 3, views).sum(2)
    adapter(x)
    assert read(adapter) == pytest.approx(loop([p.log()]), rel=1e-9)
    assert adapter(x[:1]).isfinite().all()


def test_without_rotations_there_is_nothing_to_measure() -> None:
    adapter = make_default(rotations=False)
    assert adapter.output_temperature == 1.0
    assert adapter.online_temperature is None
    for one in (adapter, make_default(output_temperature=1.2)):
        assert not any("online_temperature" in name for name in one.state_dict())
    with pytest.raises(
        ValueError, match=r"output_temperature='stream' needs several views.*rotations.*mirror.*number"
    ):
        make_default(rotations=False, output_temperature="stream")
    assert make_default(output_temperature="stream").state_dict().keys() == make_default().state_dict().keys()
