"""TTAB's oracle against its description: re-evaluate after each step, keep the best, go on from there."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttvd
from ttvd.bench.run import choose_step, run_stream
from ttvd.testing import make_world


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(16, 1, 2, 2, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (16,), generator=generator)


def test_the_best_of_the_steps_is_kept_and_its_state_continues() -> None:
    steps, seen = 5, []
    chosen = ttvd.create("tent", make_net(), lr=0.02)
    twin = ttvd.create("tent", make_net(), lr=0.02)
    for seed in range(12):
        x, y = make_batch(seed)
        logits = choose_step(chosen, x, y, steps)
        tried = []
        for _ in range(steps):
            twin(x)
            out = twin.predict(x)
            accuracy = int((out.argmax(1) == y).sum())
            tried.append((accuracy, -float(F.cross_entropy(out, y)), twin.snapshot(), out))
        number = max(range(steps), key=lambda n: tried[n][:2])
        seen.append(number)
        assert torch.allclose(logits, tried[number][3])
        twin.restore(tried[number][2])
        assert all(torch.equal(value, twin.snapshot()[name]) for name, value in chosen.snapshot().items())
    assert len(set(seen)) > 1  # else any fixed step would pass


def test_the_oracle_scores_what_it_chose() -> None:
    batches = [make_batch(seed) for seed in range(4)]
    best = run_stream(ttvd.create("tent", make_net(), lr=0.02), batches, oracle=5)
    adapter = ttvd.create("tent", make_net(), lr=0.02)
    wrong = [int((choose_step(adapter, x, y, 5).argmax(1) != y).sum()) for x, y in batches]
    assert best.wrong().tolist() == wrong


def test_steps_are_judged_by_the_outputs_that_are_scored() -> None:
    """A set that shows the model's classes 2 and 0, as its own classes 0 and 1."""
    columns, differ = torch.tensor([2, 0]), 0
    for seed in range(12):
        x, y = make_batch(seed)
        y = y % 2
        chosen = choose_step(
            ttvd.create("tent", make_net(), lr=0.3), x, y, 5, lambda logits: logits[:, columns]
        )
        twin, correct = ttvd.create("tent", make_net(), lr=0.3), []
        for _ in range(5):
            twin(x)
            correct.append(int((twin.predict(x)[:, columns].argmax(1) == y).sum()))
        assert int((chosen.argmax(1) == y).sum()) == max(correct)
        differ += len(set(correct)) > 1
    assert differ > 1  # else any step would pass


def test_the_share_that_was_kept_is_that_of_the_chosen_step() -> None:
    adapter, (x, y) = ttvd.create("eta", make_net(), lr=0.5, margin=0.9, similarity=0.9), make_batch(0)
    choose_step(adapter, x, y, 6)
    twin, tried = ttvd.create("eta", make_net(), lr=0.5, margin=0.9, similarity=0.9), []
    for _ in range(6):
        twin(x)
        out = twin.predict(x)
        tried.append((int((out.argmax(1) == y).sum()), -float(F.cross_entropy(out, y)), float(twin.kept)))
    assert len({kept for *_, kept in tried}) > 1
    assert float(adapter.kept) == max(tried)[2]


def read_stream(adapter: ttvd.Adapter) -> dict[str, Tensor]:
    """What follows the stream: averages and counts, and not the weights that steps change."""
    parts = ("rows_followed", "running_mean", "running_var", "label_shift", "online_temperature")
    state = {name: value for name, value in adapter.snapshot().items() if any(part in name for part in parts)}
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("rotations", [True, False])
@pytest.mark.parametrize("prediction", ["before", "after"])
def test_a_batch_counts_once_however_many_steps_are_tried(prediction: str, rotations: bool) -> None:
    """And as the first step saw it: what follows the stream is what one plain call makes of it."""
    make = make_world(
        "ttvd", rotations=rotations, prediction=prediction, agreement_filter=False, structure="cipd"
    )[1]
    x = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y, tried, once, asked = torch.arange(9) % 3, make(), make(), []

    def flatter(logits: Tensor) -> Tensor:
        """The truth, and the surer the later: the last step is the best."""
        asked.append(1)
        return len(asked) * F.one_hot(y, 3).to(logits)

    choose_step(tried, x, y, 4, flatter)
    once(x)
    weights = [n for n in once.snapshot() if n.endswith("weight")]
    assert any(not torch.equal(tried.snapshot()[n], once.snapshot()[n]) for n in weights), "one step is kept"
    found, wanted = read_stream(tried), read_stream(once)
    assert int(found["label_shift.images"]) == 9
    counts = [value for name, value in found.items() if name.endswith("rows_followed")]
    assert counts
    assert all(bool((count == 4 * 9).all()) for count in counts), "each image is forwarded in four views"
    assert ("online_temperature.sharpness" in found) == rotations
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    tried(x)
    assert int(read_stream(tried)["label_shift.images"]) == 18, "the next one counts again"
