"""Heads that are sure of every rotation, or of none: there is little to learn, and little must move."""

import pytest
import torch

from ttvd.methods.ttvd.online_temperature import OnlineTemperature
from ttvd.nn.norms import following_stream


@pytest.mark.parametrize("gap", [8.0, 12.0])
def test_one_wrong_view_among_thousands_of_sure_ones_moves_little(gap: float) -> None:
    right = (gap * torch.eye(4)[:, None]).expand(4, 64, 4).log_softmax(-1)
    wrong = right.clone()
    wrong[0, 0] = right[1, 0]
    online_temperature = OnlineTemperature(torch.zeros(()))
    with following_stream(online_temperature):
        for _ in range(50):
            online_temperature.update(right)
        before = float(online_temperature.sharpness)
        online_temperature.update(wrong)
    assert abs(float(online_temperature.sharpness) - before) < 0.2


@pytest.mark.parametrize("size", [64, 512])
def test_a_head_without_an_idea_says_nothing(size: int) -> None:
    generator, online_temperature = torch.Generator().manual_seed(0), OnlineTemperature(torch.zeros(()))
    with following_stream(online_temperature):
        for _ in range(200):
            online_temperature.update((1e-3 * torch.randn(4, size, 4, generator=generator)).log_softmax(-1))
            assert online_temperature.information >= 0
    assert float(online_temperature.sharpness) == pytest.approx(1.0, abs=0.2)
