"""Operations and bytes against hand-made sums."""

import torch
from benchmarks.counts import Tally, count_forward, count_step, measure_rates
from benchmarks.setups import NETWORKS, Network
from torch import nn


def test_a_convolution() -> None:
    net, x = nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.zeros(2, 3, 5, 5)
    with torch.no_grad(), Tally() as tally:
        net(x)
    assert tally.count.operations == 2 * (2 * 8 * 5 * 5) * (3 * 3 * 3)
    assert tally.count.bytes["matrix"] == 4 * (2 * 3 * 25 + 8 * 3 * 9 + 2 * 8 * 25)
    assert tally.count.fused == tally.count.moved


def test_activations_cost_nothing_when_fused_and_sums_one_term() -> None:
    x = torch.zeros(100)
    with Tally() as tally:
        torch.relu(x) + x
    assert tally.count.bytes == {"pointwise": 4 * (200 + 300)}
    assert tally.count.fused == 4 * 100
    assert tally.count.operations == 0


class Small(nn.Sequential):
    """A norm between two convolutions."""

    def __init__(self, outputs: int) -> None:
        convolutions = (nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, outputs, 1, bias=False))
        super().__init__(convolutions[0], nn.BatchNorm2d(4), convolutions[1])


def test_a_step_differentiates_by_norms_alone() -> None:
    """Behind the norm the gradient passes one convolution, before it none; none needs the gradient of its weights."""
    count = count_step(Network(2, 5, Small), images=6, dtype=torch.float32, views=1)
    pixels = 6 * 2 * 2
    first, second = 2 * pixels * 3 * 4, 2 * pixels * 4 * 5
    assert count.operations == first + 2 * second
    forth, back = 4 * pixels * 4 * 3, 4 * pixels * 4 * 5
    assert abs(count.bytes["norm"] - forth - back) < 4 * 4 * 20, (
        "two reads and a write; four reads and a write"
    )


def test_known_networks() -> None:
    """ResNet-50 is known to take 4.1 billion multiplications for an image of 224 x 224 (He et al. 2016 say 3.8)."""
    with torch.device("meta"):
        net, x = NETWORKS["resnet50"].make(1000), torch.empty(1, 3, 224, 224)
    assert 8.0e9 < count_forward(net, x) < 8.4e9
    half, whole = (count_step(NETWORKS["resnet26"], 8, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert half.operations == whole.operations
    assert 0.49 < half.moved / whole.moved < 0.51
    assert whole.fused < whole.moved


def test_rates_are_positive() -> None:
    operations, moved = measure_rates(torch.device("cpu"), torch.float32, side=64, size=1024)
    assert operations > 0
    assert moved > 0
