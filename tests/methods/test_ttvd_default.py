"""TTVD as it is without any option, against loops over images, views, cells and pairs that follow the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ttvd
from tests.helpers.methods import CLASSES, Naive, assert_same_state
from ttvd.nn.resnet import ResNet

TOLERANCE = 1e-8


def plant(adapter: ttvd.TTVD, naive: Naive) -> None:
    """Put both far along a stream of like images: the most that averages are worth is all but reached."""
    state = {name: value.clone() for name, value in adapter.state_dict().items()}
    for name, value in state.items():
        if name.endswith("rows_followed"):
            value.fill_(4 * (512 - 16) - 40)
    state["label_shift.excess"].fill_(0.995)
    state["label_shift.images"].fill_(1024 - 64 - 4)
    if naive.rotations > 1:
        naive.sharpness, naive.information = 0.6, 7.0
        state["online_temperature.sharpness"].fill_(0.6)
        state["online_temperature.information"].fill_(7.0)
    adapter.load_state_dict(state)
    naive.excess, naive.images = 0.995, 1024 - 64 - 4
    naive.earlier = [naive.images / CLASSES] * CLASSES
    for norm in naive.norms.values():
        norm.rows = 4 * (512 - 16) - 40


PLAIN: dict[str, Any] = {"structure": "cipd", "agreement_filter": True, "slr_weight": 0.3, "lr": 0.05}
"""On a plain head: what the loops compute, with four rotations and the filter."""
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "two steps": {"steps": 2},
    "after": {"prediction": "after"},
    "adam": {"optimizer": "adam", "lr": 0.001},
}


@pytest.mark.parametrize("late", [False, True], ids=["from the source on", "late in a stream"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("outputs", [12, 3], ids=["joint head", "plain head"])
def test_the_default_is_what_the_loops_say(
    outputs: int,
    options: dict[str, Any],
    late: bool,
    make_net: Callable[..., ResNet],
    make_sites: Callable[..., ttvd.Sites],
    make_stream: Callable[..., list[Tensor]],
) -> None:
    """Batches of 1, of fewer images than a full step has, and of more."""
    net = make_net(outputs)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    sites = make_sites(net)
    if outputs == CLASSES:
        options = {**PLAIN, **options}
    adapter = ttvd.TTVD(net, sites, **options)
    naive = Naive(net, sites.means, 3.0, options.get("optimizer", "sgd"), options.get("lr", 0.05))
    if late:
        plant(adapter, naive)
    for x in make_stream(8, 1, 66, 24, seed=6):
        quiet = naive.answer(naive.look(x, "look")[2])
        torch.testing.assert_close(adapter.predict(x).softmax(1), quiet, rtol=TOLERANCE, atol=TOLERANCE)
        assert_same_state(adapter, naive)
        wanted, share = naive.adapt(x, options.get("steps", 1), options.get("prediction") == "after")
        torch.testing.assert_close(adapter(x).softmax(1), wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert float(adapter.kept) == pytest.approx(share)
        assert_same_state(adapter, naive)
    moved = max(
        float((n.weight.detach() - start[f"{name}.weight"]).abs().max()) for name, n in naive.norms.items()
    )
    assert moved > 1e-3, f"nothing moved by more than {moved:.1e}: this shows nothing"
    assert (naive.dropped > 0) == (outputs == 3), (
        "a filter where the head knows the classes alone, and there only"
    )
    start_at = 0.6 if late and outputs == 12 else 1.0
    assert (abs(naive.sharpness - start_at) > 0.02) == (outputs == 12), (
        "the rotations were weighed where known"
    )
    if late:
        assert naive.corrected, "no answer was another for the shares: this shows nothing"
    assert all(torch.equal(value, start[name]) for name, value in net.state_dict().items())
