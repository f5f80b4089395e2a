import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ttvd.nn.augment import crop_and_flip, draw_crops
from ttvd.source.config import TrainingConfig
from ttvd.source.distributed import Group
from ttvd.source.train import draw_epoch


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"objective": "magic"}, "objective must be one of sla, plain, rotation, got 'magic'"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"schedule": "linear"}, "schedule"),
        ({"precision": "fp16"}, "precision"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"padding": -1}, "padding must be 0 or more"),
    ],
)
def test_recipe_refuses(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainingConfig(**changes)  # type: ignore[arg-type]


def test_default_recipe_is_ttabs() -> None:
    config = TrainingConfig()
    rates = [config.learning_rate(epoch * 390, 390) for epoch in (0, 74, 75, 124, 125, 149)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert (config.epochs, config.batch_size, config.momentum, config.weight_decay) == (150, 128, 0.9, 5e-4)


@pytest.mark.parametrize("schedule", ["cosine", "onecycle"])
def test_schedules_match_torch(schedule: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs: torch.optim.lr_scheduler.LRScheduler
    if schedule == "cosine":
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    else:
        theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=60, cycle_momentum=False)
    config = TrainingConfig(schedule=schedule, lr=0.3, epochs=6)
    for step in range(60):
        assert config.learning_rate(step, 10) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        if step < 59:
            theirs.step()


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_short_onecycle_is_positive(steps: int) -> None:
    config = TrainingConfig(schedule="onecycle", epochs=1)
    assert all(0 < config.learning_rate(step, steps) <= config.lr for step in range(steps))


def test_crops_match_a_loop(generator: torch.Generator) -> None:
    images = torch.rand(16, 3, 6, 5, generator=generator)
    draws = draw_crops(16, 2, True, generator)
    assert draws[:, :2].amin() >= 0
    assert draws[:, :2].amax() <= 4
    assert draws[:, 2].unique().tolist() == [0, 1]
    cut = crop_and_flip(images, draws, 2)
    for image, (top, left, mirror), result in zip(images, draws.tolist(), cut, strict=True):
        expected = F.pad(image, (2, 2, 2, 2))[:, top : top + 6, left : left + 5]
        assert torch.equal(result, expected.flip(-1) if mirror else expected)
    still = draw_crops(16, 0, False, generator)
    assert torch.equal(crop_and_flip(images, still, 0), images)


def test_processes_share_every_batch() -> None:
    config = TrainingConfig(batch_size=32)
    order, draws = draw_epoch(config, 100, 2, Group())
    assert order.shape == (3, 32)
    assert draws.shape == (3, 32, 3)
    assert len(order.unique()) == 96
    shares = [draw_epoch(config, 100, 2, Group(rank, 4)) for rank in range(4)]
    for column in range(32):
        share_order, share_draws = shares[column % 4]
        assert torch.equal(share_order[:, column // 4], order[:, column])
        assert torch.equal(share_draws[:, column // 4], draws[:, column])
    assert not torch.equal(draw_epoch(config, 100, 3, Group())[0], order)
    assert draw_epoch(config, 20, 0, Group(0, 3))[0].shape == (1, 6)  # fewer images than a batch
    with pytest.raises(ValueError, match="batch of 32 images cannot be shared equally by 3 processes"):
        draw_epoch(config, 100, 0, Group(0, 3))
