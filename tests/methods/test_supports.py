"""Supports against lists that are sorted anew for every batch: ties, crowds, long streams."""

from collections.abc import Callable

import pytest
import torch
from benchmarks.clock import StorageCounter
from torch import Tensor, nn

import ttvd
from ttvd.engine.module import Validation
from ttvd.methods.shared.losses import entropy
from ttvd.methods.shared.supports import FeatureSupports, Supports
from ttvd.methods.t3a import T3A
from ttvd.methods.tast import TAST


def draw_logits(count: int, classes: int, generator: torch.Generator) -> Tensor:
    """Few different rows, so that many entropies are equal; some are not numbers, whose entropy is none."""
    kinds = torch.randn(5, classes, generator=generator, dtype=torch.float64)
    kinds[4, 1:] = float("nan")
    return kinds[torch.randint(5, (count,), generator=generator)]


class Lists:
    """(entropy, item) of each class in the order of their coming; a stable sort leaves the older in front."""

    def __init__(self, classes: int, slots: int) -> None:
        self.slots = slots
        self.kept: list[list[tuple[float, float]]] = [[] for _ in range(classes)]

    def offer(self, items: Tensor, logits: Tensor) -> None:
        for item, label, value in zip(items, logits.argmax(1).tolist(), entropy(logits), strict=True):
            if value.isfinite():
                self.kept[label].append((float(value), float(item[0])))
        self.kept = [sorted(pairs, key=lambda pair: pair[0])[: self.slots] for pairs in self.kept]

    def items(self) -> list[list[float]]:
        return [sorted(item for _, item in pairs) for pairs in self.kept]


def read(memory: Supports) -> list[list[float]]:
    return [
        sorted(items[here][:, 0].tolist()) for items, here in zip(memory.items, memory.present, strict=True)
    ]


@pytest.mark.parametrize(("classes", "slots"), [(4, 1), (4, 3), (3, 8), (2, 40), (1, 5)])
def test_the_most_certain_stay_and_of_equals_the_older(classes: int, slots: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    memory, lists = (
        Supports(classes, slots, (2,), torch.zeros((), dtype=torch.float64)),
        Lists(classes, slots),
    )
    sizes = [1, 7, 20, 3, 3, 11, 1, 30, 6, 6, 6]
    names = torch.arange(1.0, 1 + 2 * sum(sizes)).double().view(-1, 2)  # every item is another
    for items in names.split(sizes):
        logits = draw_logits(len(items), classes, generator)
        memory.offer(items, logits)
        lists.offer(items, logits)
        assert read(memory) == lists.items()
    assert torch.equal(memory.present, memory.items[..., 0] != 0)
    filled = memory.present.sum(1, keepdim=True)
    assert torch.equal(memory.present, torch.arange(slots) < filled), "empty slots are the last ones"


def test_many_at_once_are_as_many_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    items, logits = torch.rand(1200, 2, generator=generator), torch.randn(1200, 3, generator=generator)
    whole, single = (FeatureSupports(3, 9, 2, torch.zeros(())) for _ in range(2))
    whole.offer(items, logits)
    for part in range(0, 1200, 100):
        single.offer(items[part : part + 100], logits[part : part + 100])
    assert read(whole) == read(single)
    torch.testing.assert_close(whole.sums, single.sums)


def test_sums_and_lengths_stay_exact_over_a_long_stream() -> None:
    """Every batch is a little more certain than the last, so that all of it enters."""
    generator = torch.Generator().manual_seed(1)
    memory = FeatureSupports(2, 4, 16, torch.zeros(()))
    for step in range(2000):
        z = torch.randn(8, 16, generator=generator)
        logits = torch.randn(8, 2, generator=generator).sign() * (1 + step / 1000)
        memory.offer(z, logits)
    assert int(memory.seen) == 16_000
    assert int(memory.ages.min()) > 15_000
    torch.testing.assert_close(memory.sums, memory.items.double().sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(memory.means, memory.items.mean(1))
    torch.testing.assert_close(memory.lengths, memory.items.norm(dim=2))


def make_head(classes: int = 3, dim: int = 6) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, dim), nn.ReLU(), nn.Linear(dim, classes)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


METHODS: dict[str, Callable[[nn.Module], ttvd.Adapter]] = {
    "t3a": lambda net: T3A(net, supports=4),
    "t3a, all": lambda net: T3A(net, supports=-1),
    "tast": lambda net: TAST(net, supports=4, lr=0.1),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_that_is_not_finite_changes_nothing_though_nobody_looked(name: str) -> None:
    blind, seeing = (METHODS[name](make_head()) for _ in range(2))
    blind.validation = "never"
    good, bad, *rest = torch.rand(5, 8, 1, 2, 2, generator=torch.Generator().manual_seed(1))
    bad[3] = float("nan")
    assert torch.equal(blind(good), seeing(good))
    before = blind.snapshot()
    assert blind(bad).isfinite().all()
    assert blind.kept == 0
    assert all(torch.equal(before[key], value) for key, value in blind.snapshot().items())
    for x in rest:
        assert torch.equal(blind(x), seeing(x))
    assert blind.kept == 1


@pytest.mark.parametrize("name", ["t3a", "tast"])
@pytest.mark.parametrize("validation", ["always", "never"])
def test_a_step_never_copies_what_is_stored(name: str, validation: Validation) -> None:
    adapter = (T3A if name == "t3a" else TAST)(make_head(50, 64), supports=400)
    adapter.validation = validation
    x = torch.rand(4, 1, 2, 2)
    adapter(x)
    with StorageCounter() as counter:
        adapter(x)
    assert counter.peak < 0.5 * adapter.memory.items.nbytes
