"""The terms that TTVD can add: plain formulas in float64, extremes, and options that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttvd
from tests.helpers.methods import OFF, draw_images, make_ttvd
from ttvd.methods.shared import losses as objectives
from ttvd.nn import views

BOUNDED = settings(deadline=None, derandomize=True, max_examples=40)
SEEDS = st.integers(0, 2**16)


def soft_likelihood_ratio(logits: Tensor) -> Tensor:
    return objectives.soft_likelihood_ratio(objectives.log_posteriors(logits))


def log_rotations(logits: Tensor, rotations: int) -> Tensor:
    return views.log_rotations(objectives.log_posteriors(logits), rotations)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_ratio(row: Tensor) -> Tensor:
    """-sum p log(p / (1 - p)) of one row, as it is written."""
    p = row.exp() / row.exp().sum()
    return -sum((p[c] * torch.log(p[c] / (1 - p[c])) for c in range(len(p))), torch.zeros(()))


def plain_rotations(row: Tensor, rotations: int) -> Tensor:
    """Logarithms of the probabilities of the rotations, of one row of joint logits (k * rotations)."""
    p = row.exp() / row.exp().sum()
    each = [sum((p[c] for c in range(a, len(p), rotations)), torch.zeros(())) for a in range(rotations)]
    return torch.stack(each).log()


def assert_same_with_gradient(
    mine: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(mine(found), theirs(wanted), rtol=1e-9, atol=1e-10)
    weights = torch.arange(1.0, 1.0 + mine(x).numel(), dtype=x.dtype).view_as(mine(x))
    for leaf, function in ((found, mine), (wanted, theirs)):
        (weights * function(leaf)).sum().backward()
    assert found.grad is not None
    assert wanted.grad is not None
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-8, atol=1e-9)


@BOUNDED
@given(seed=SEEDS, rows=st.integers(1, 4), cells=st.integers(2, 9))
def test_ratio_is_the_plain_formula(seed: int, rows: int, cells: int) -> None:
    assert_same_with_gradient(
        soft_likelihood_ratio, lambda x: torch.stack([plain_ratio(row) for row in x]), draw(seed, rows, cells)
    )


@BOUNDED
@given(
    seed=SEEDS,
    views=st.integers(1, 4),
    images=st.integers(1, 3),
    classes=st.integers(1, 4),
    rotations=st.integers(1, 4),
)
def test_rotations_are_the_plain_formula(
    seed: int, views: int, images: int, classes: int, rotations: int
) -> None:
    """Fewer views than rotations too: a single diagram looks at the upright one alone."""
    logits = draw(seed, views, images, rotations * classes)
    assert_same_with_gradient(
        lambda x: log_rotations(x, rotations),
        lambda x: torch.stack([torch.stack([plain_rotations(row, rotations) for row in rows]) for rows in x]),
        logits,
    )
    assert log_rotations(logits, rotations).shape == (views, images, rotations)


@pytest.mark.parametrize(
    "function", [soft_likelihood_ratio, lambda x: log_rotations(x, 4)], ids=["ratio", "rotations"]
)
@BOUNDED
@given(seed=SEEDS, offset=st.floats(-50, 50))
def test_constants_of_rows_do_not_matter(
    function: Callable[[Tensor], Tensor], seed: int, offset: float
) -> None:
    logits = draw(seed, 4, 3, 12)
    torch.testing.assert_close(function(logits + offset), function(logits))


EXTREMES = torch.tensor(
    [[1e4, -1e4, 0, 0], [1e4, 1e4, -1e4, -1e4], [-1e4, -1e4, -1e4, -1e4], [1e4, 9999, 0, 1], [0, 0, 60, -60]]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function", [soft_likelihood_ratio, lambda x: log_rotations(x, 2)], ids=["ratio", "rotations"]
)
def test_extreme_logits_have_finite_losses_and_gradients(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    logits = EXTREMES.to(dtype).expand(2, -1, -1).clone().requires_grad_()
    loss = function(logits)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient.sum(-1).abs().max() < 1e-3, "adding a constant changes nothing, but for rounding"


def test_ratio_pulls_where_entropy_has_stopped() -> None:
    """In the limit the loss is the margin itself, and its slope by the winner's logit -1, in float32 too."""
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    loss = soft_likelihood_ratio(logits)
    assert loss.item() == pytest.approx(math.log(2) - 200)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0.5, 0.5]]))
    assert torch.autograd.grad(ttvd.methods.shared.losses.entropy(logits), logits)[0].abs().max() < 1e-30


def test_half_precision_is_left() -> None:
    logits = draw(0, 4, 3, 12).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = soft_likelihood_ratio(logits), log_rotations(logits, 4)
    for value, truth in zip(
        found, (soft_likelihood_ratio(logits.double()), log_rotations(logits.double(), 4)), strict=True
    ):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), truth, rtol=1e-4, atol=1e-5)


def test_the_registry_knows_the_parameters() -> None:
    for name, method in ttvd.list_methods().items():
        if method.adapter is ttvd.TTVD:
            assert OFF.keys() <= method.parameters().keys(), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotation_weight": -1.0}, "rotation_weight must be a finite weight of at least 0"),
        ({"rotation_weight": math.nan}, "rotation_weight must be a finite weight"),
        ({"slr_weight": math.inf}, "slr_weight must be a finite weight"),
        ({"prior": 0.0}, "prior must be a positive, finite number of pseudo-images"),
        ({"prior": math.inf}, "prior must be a positive"),
        ({"prior": "batch"}, "prior must be 'stream', a number of pseudo-images or None, got 'batch'"),
        ({"output_temperature": 0.0}, "output_temperature must be positive"),
        ({"output_temperature": math.inf}, "output_temperature must be positive and finite"),
        ({"output_temperature": math.nan}, "output_temperature must be positive and finite"),
        (
            {"output_temperature": "batch"},
            "output_temperature must be 'stream' or a positive number, got 'batch'",
        ),
        ({"reference_batch_size": 0}, "reference_batch_size must be at least 1 image"),
        ({"reference_batch_size": 0, "optimizer": "adam"}, "reference_batch_size must be at least 1 image"),
        (
            {"reference_batch_size": 64, "optimizer": "adam"},
            "do not depend on its scale: use optimizer='sgd'",
        ),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_ttvd(**options)


@pytest.mark.parametrize("name", ["ttvd", "vd", "civd", "pd"])
def test_known_rotations_need_a_head_that_knows_them(name: str) -> None:
    with pytest.raises(ValueError, match="rotation_weight needs a head"):
        make_ttvd(name, rotations=False, rotation_weight=0.1)
    assert make_ttvd(name, rotations=False, slr_weight=0.1)(draw_images()).isfinite().all()
