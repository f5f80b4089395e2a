"""How sure the source is of the images, as evidence of a shift, against a loop over batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ttvd
from ttvd.methods.ttvd.answer_drift import MEMORY, AnswerDrift
from ttvd.nn.norms import following_stream, settled_stream
from ttvd.testing import make_world

QUANTILES = torch.linspace(0.0, 1.0, 65)  # entropies on source images are uniform here
ONE = torch.tensor(1.0)


def scores_of(ranks: Tensor) -> Tensor:
    """Scores of four classes whose entropies have these ranks, found by bisection."""
    low, high = torch.zeros_like(ranks), torch.full_like(ranks, 20.0)
    for _ in range(60):
        middle = (low + high) / 2
        probs = torch.stack([middle, *[torch.zeros_like(middle)] * 3], 1).softmax(1)
        above = torch.special.entr(probs).sum(1) > ranks
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.stack([low, *[torch.zeros_like(low)] * 3], 1)


def test_the_mean_rank_is_what_the_loop_says() -> None:
    generator = torch.Generator().manual_seed(0)
    drift = AnswerDrift(QUANTILES, ONE)
    mean, images = 0.5, 0.0
    for size in (64, 1, 30, 64, 64, 200, 3):
        ranks = 0.2 + 0.6 * torch.rand(size, generator=generator)
        weight = float(torch.rand((), generator=generator))
        drift.observe(scores_of(ranks), torch.tensor(weight))
        kept = min(images, MEMORY)
        mean += (float(ranks.mean()) - mean) * size * weight / max(kept + size * weight, 1.0)
        images = kept + size * weight
        # A rank is known to 1 / 128, half of the distance of two quantiles.
        assert float(drift.rank) == pytest.approx(mean, abs=0.01)
        assert float(drift.images) == pytest.approx(images, rel=1e-5)


@pytest.mark.parametrize(("rank", "found"), [(0.5, 0.0), (0.65, 0.0), (0.9, 1.0), (0.1, 0.0)])
def test_only_a_source_that_is_less_sure_is_evidence(rank: float, found: float) -> None:
    drift = AnswerDrift(QUANTILES, ONE)
    drift.observe(scores_of(torch.full((64,), rank)), ONE)
    assert drift.evidence().item() == found


def test_few_images_are_no_evidence() -> None:
    drift = AnswerDrift(QUANTILES, ONE)
    drift.observe(scores_of(torch.ones(2)), ONE)
    assert drift.evidence().item() == 0.0
    drift.observe(scores_of(torch.ones(14)), ONE)
    assert drift.evidence().item() == 1.0


def test_it_learns_from_the_stream_alone() -> None:
    drift = AnswerDrift(QUANTILES, ONE)
    unsure = torch.zeros(64, 4)
    drift.update(unsure, ONE)
    with following_stream(drift), settled_stream(drift):
        drift.update(unsure, ONE)
    assert drift.evidence().item() == 0.0
    with following_stream(drift):
        drift.update(unsure, ONE)
    assert drift.evidence().item() == 1.0


def test_a_turn_is_known_once_and_a_change_of_the_images_forgets() -> None:
    drift = AnswerDrift(QUANTILES, ONE)
    drift.observe(torch.zeros(64, 4), ONE)
    assert drift.turned()
    drift.begin(torch.tensor(False))
    assert not drift.turned()
    assert drift.evidence().item() == 1.0
    drift.begin(torch.tensor(True))
    assert not drift.turned()
    assert (drift.evidence().item(), drift.images.item(), drift.rank.item()) == (0.0, 0.0, 0.5)


def test_evidence_does_not_come_and_go_by_chance() -> None:
    drift = AnswerDrift(QUANTILES, ONE)
    found = []
    for rank in (0.9, 0.72, 0.74, 0.72, 0.5, 0.5, 0.5):
        drift.observe(scores_of(torch.full((256,), rank)), ONE)
        drift.begin(torch.tensor(False))
        found.append(drift.evidence().item())
    assert found == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_values_that_are_not_finite_change_nothing() -> None:
    drift = AnswerDrift(QUANTILES, ONE)
    drift.observe(torch.zeros(64, 4), ONE)
    before = {name: value.clone() for name, value in drift.state_dict().items()}
    drift.observe(torch.full((8, 4), torch.nan), ONE)
    assert all(torch.equal(value, before[name]) for name, value in drift.state_dict().items())


def test_a_shift_that_only_the_answers_show_is_adapted_to() -> None:
    """The images are those of the source, but the network is said to be much less sure of them."""
    model, _ = make_world("ttvd", rotations=False)
    images = torch.rand(128, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = model(images).argmax(1)
    labels[:3] = torch.arange(3)  # no class is missing
    sites = ttvd.estimate_sites(model, (images, labels), views=1)
    sites = ttvd.calibrate(model, sites, (images, labels), structures=("vd", "pd"), trained_on=False)
    answers = []
    for rank in (0.5, 1.0):
        adapter = ttvd.TTVD(model, sites, prior=None, output_temperature=1.0)
        assert adapter.answer_drift is not None
        adapter.answer_drift.rank.fill_(rank)
        adapter.answer_drift.images.fill_(64.0)
        answers.append(adapter(images[:32]))
        source = adapter.source_output(images[:32])
    torch.testing.assert_close(answers[0], source)
    assert (answers[1] - source).abs().max() > 0.1
