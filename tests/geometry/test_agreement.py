"""Where diagrams agree: against a loop over rows, and on diagrams that must agree everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttvd.geometry import Diagram, agreement, assign, kept_fraction

BOUNDED = settings(deadline=None, derandomize=True, max_examples=40)
SEEDS = st.integers(0, 2**16)


@BOUNDED
@given(seed=SEEDS, voters=st.integers(1, 4), batch=st.integers(1, 8), classes=st.integers(1, 3))
def test_agreement_equals_loop(seed: int, voters: int, batch: int, classes: int) -> None:
    labels = torch.randint(classes, (voters, batch), generator=torch.Generator().manual_seed(seed))
    mask = agreement(*labels)
    assert mask.shape == (batch,)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [len(set(column)) == 1 for column in labels.T.tolist()]
    assert torch.equal(mask, agreement(*labels.flip(0)))
    share = kept_fraction(mask)
    assert share.shape == ()
    assert share.dtype == torch.float32
    assert float(share) == pytest.approx(sum(mask.tolist()) / batch)


def test_agreement_with_itself_keeps_everything() -> None:
    labels = torch.tensor([3, 1, 4, 1, 5])
    for mask in (agreement(labels), agreement(labels, labels), agreement(labels, labels, labels)):
        assert torch.equal(labels[mask], labels)
        assert float(kept_fraction(mask)) == 1
    assert float(kept_fraction(agreement(labels, labels + 1))) == 0


def test_one_dissenter_is_enough() -> None:
    first, third = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])
    assert agreement(first, first, third).tolist() == [True, True, False]
    assert agreement(first, third, first).tolist() == [True, True, False]


def test_voronoi_and_weightless_power_clusters_agree_everywhere() -> None:
    generator = torch.Generator().manual_seed(0)
    means, z = torch.randn(5, 4, 6, generator=generator), torch.randn(4, 100, 6, generator=generator)
    voronoi = Diagram.from_means(means.double())
    power = Diagram(voronoi.sites, torch.zeros(20, dtype=torch.float64), voronoi.groups)
    heavy = Diagram(voronoi.sites, torch.linspace(0, 40, 20, dtype=torch.float64), voronoi.groups)
    guess = assign(z.double(), voronoi, -1.6)
    assert float(kept_fraction(agreement(guess, assign(z.double(), power, -0.8)))) == 1
    assert 0 < float(kept_fraction(agreement(guess, assign(z.double(), heavy, -0.8)))) < 1


WRONG: dict[str, Callable[[], object]] = {
    "nobody votes": lambda: agreement(),
    "other lengths": lambda: agreement(torch.zeros(3).long(), torch.zeros(2).long()),
    "length one does not spread": lambda: agreement(torch.zeros(3).long(), torch.zeros(1).long()),
    "scores for labels": lambda: agreement(torch.zeros(3).long(), torch.zeros(3, 2).long()),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(case: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"(?i)label|shape|length|at least"):
        WRONG[case]()
