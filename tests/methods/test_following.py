"""Averages that follow the stream learn from each batch once, whatever a method does with it."""

from typing import Any

import pytest
import torch
from torch import nn

import ttvd
from ttvd.bench.run import choose_step
from ttvd.nn.norms import StreamNorm, following_stream, follows_stream, settled_stream
from ttvd.testing import make_world

POLICY = ttvd.Statistics(count=16, memory=4096, renorm=True)
TAKING = [
    name
    for name in ("tent", "shot", "conjugate", "sar", "eta", "deyo", "rdumb", "roid", "ttvd", "civd", "vd")
    if name in ttvd.list_methods()
]


def count_rows(adapter: nn.Module) -> set[int]:
    norms = [layer for layer in adapter.modules() if isinstance(layer, StreamNorm)]
    assert norms
    return {int(n) for layer in norms for n in layer.rows_followed.unique()}


def make_images(count: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", TAKING)
@pytest.mark.parametrize("more", [{}, {"steps": 3}, {"prediction": "after"}])
def test_a_batch_counts_once(name: str, more: dict[str, Any]) -> None:
    try:
        adapter = make_world(name, statistics=POLICY, **more)[1]()
    except TypeError:
        pytest.skip("has no such choice")
    views = 4 if name in ("ttvd", "civd") else 1
    for number in (1, 2):
        adapter(make_images(seed=number))
        inside = getattr(adapter, "adapter", adapter)
        followed = {rows for rows in count_rows(inside) if rows}  # a copy of the source stays where it is
        assert followed == {number * 8 * views}


@pytest.mark.parametrize(
    "policy", [POLICY, ttvd.Statistics(momentum=0.3), ttvd.Statistics(momentum=0.3, renorm=True)]
)
def test_after_a_step_of_no_length_the_prediction_is_the_same(policy: ttvd.Statistics) -> None:
    before, after = (
        make_world("tent", statistics=policy, lr=0.0, prediction=when)[1]() for when in ("before", "after")
    )
    for seed in range(3):
        x = make_images(seed=seed)
        torch.testing.assert_close(after(x), before(x), rtol=1e-4, atol=1e-5)


def test_the_oracle_counts_a_batch_once() -> None:
    adapter = make_world("tent", statistics=POLICY)[1]()
    for number in (1, 2):
        choose_step(adapter, make_images(seed=number), torch.zeros(8, dtype=torch.int64), 5)
        assert count_rows(adapter) == {8 * number}


def test_flags_are_put_back_as_they_were() -> None:
    adapter = make_world("tent", statistics=POLICY)[1]()
    layer = next(part for part in adapter.modules() if isinstance(part, StreamNorm))
    with settled_stream(adapter), following_stream(adapter):
        with following_stream(adapter, False), settled_stream(adapter):
            assert (layer.following, layer.settled) == (False, True)
        assert (layer.following, layer.settled) == (True, True)
    assert (layer.following, layer.settled) == (False, False)
    assert follows_stream(adapter)
    assert not follows_stream(make_world("tent")[1]())


def test_cotta_refuses_what_its_teacher_cannot_follow() -> None:
    with pytest.raises(ValueError, match="three networks"):
        make_world("cotta", statistics=POLICY)[1]()
