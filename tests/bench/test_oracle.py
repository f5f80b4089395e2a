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
