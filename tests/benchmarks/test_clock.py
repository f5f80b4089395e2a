"""Turns, medians and peak memory."""

import pytest
import torch
from benchmarks.clock import StorageCounter, Times, peak_memory, take_turns

CPU = torch.device("cpu")


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    times = take_turns({name: (lambda name=name: calls.append(name)) for name in "ab"}, CPU, 0.0, least=4)  # type: ignore[misc]
    assert {name: len(rounds) for name, rounds in times.rounds.items()} == {"a": 4, "b": 4}
    order = [name for name, before in zip(calls, ["", *calls], strict=False) if name != before]
    assert "".join(order) == "ab" + "abab"[:3] + "ba", "warm-ups, then ab, ba, ab, ba"


def test_ratios_are_of_the_same_round() -> None:
    times = Times({"a": [2.0, 20.0, 200.0], "b": [1.0, 10.0, 400.0]})
    assert times.median("a") == 20.0
    assert times.ratio("a", "b") == 2.0
    assert times.ratio("b", "a") == 0.5


def test_peak_is_what_lives_at_once() -> None:
    x = torch.ones(1000)

    def three_at_once() -> torch.Tensor:
        a = x + 1  # 4,000 bytes
        b = a + 1  # 8,000
        c = b * a  # 12,000
        del a, b
        return (c + 1).view(10, 100)  # 8,000

    assert peak_memory(three_at_once, CPU) == 12_000


def test_what_backward_needs_counts() -> None:
    w, x = torch.ones(1000, requires_grad=True), torch.ones(1000)

    def step() -> object:
        return torch.autograd.grad((w * x).exp().sum(), w)

    with StorageCounter() as counter:
        step()
    assert counter.now == 0
    assert 8_000 <= counter.peak <= 16_100


@pytest.mark.parametrize("size", [1, 7])
def test_storages_of_inputs_do_not_count(size: int) -> None:
    x = torch.ones(size)
    assert peak_memory(lambda: x.add_(1), CPU) == 0
    assert peak_memory(lambda: x.view(-1), CPU) == 0
