"""TTAB's oracle against its description: re-evaluate after each step, keep the best, go on from there."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttvd
from ttvd.bench.run import choose_step, run


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
    best = run(ttvd.create("tent", make_net(), lr=0.02), batches, oracle=5)
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
