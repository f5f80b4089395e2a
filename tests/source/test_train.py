from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.source import make_net, make_stripes, same_weights
from ttvd.nn.rotation import RotationNet
from ttvd.nn.split import split
from ttvd.source.config import Epoch, TrainingConfig
from ttvd.source.produce import evaluate
from ttvd.source.steps import plain_loss, rotation_loss, sla_loss
from ttvd.source.train import train
from ttvd.zoo.tensorfile import write_tensors

QUICK = TrainingConfig(
    epochs=4, batch_size=32, lr=0.02, optimizer="adamw", schedule="cosine", padding=1, flip=False
)


def test_sla_learns_classes_and_rotations() -> None:
    model = make_net()
    history = train(model, *make_stripes(), replace(QUICK, epochs=8))
    test = make_stripes(96, seed=1)
    assert evaluate(model, *test, views=1, head_views=4) > 0.95
    assert evaluate(model, *test, views=4, head_views=4) > 0.95
    assert history.epochs[-1].loss < 0.5 * history.epochs[0].loss
    assert history.epochs[-1].accuracy > 0.8  # of the twelve joint labels
    assert [epoch.number for epoch in history.epochs] == list(range(8))
    assert not model.training


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "lr": 0.1, "schedule": "onecycle"}])
def test_plain_training_learns(changes: dict[str, object]) -> None:
    model = make_net(3)
    config = replace(QUICK, objective="plain", epochs=8, **changes)  # type: ignore[arg-type]
    train(model, *make_stripes(), config)
    assert evaluate(model, *make_stripes(96, seed=1)) > 0.95


def test_joint_training_teaches_both_heads() -> None:
    net = RotationNet(make_net(3), generator=torch.Generator().manual_seed(0))
    train(net, *make_stripes(), replace(QUICK, objective="rotation", epochs=10))
    images, labels = make_stripes(96, seed=1)
    assert evaluate(net, images, labels) > 0.95
    turned = torch.rot90(images.float() / 255, 1, (-2, -1))
    assert (net.forward_rotation(turned).argmax(1) == 1).float().mean() > 0.8


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"channels_last": True}])
def test_precision_and_memory_layout_options(changes: dict[str, str | bool]) -> None:
    model, config = make_net(3), replace(QUICK, objective="plain", **changes)  # type: ignore[arg-type]
    train(model, *make_stripes(), config)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert evaluate(model, *make_stripes(96, seed=1)) > 0.9


class Table(nn.Module):
    """Logits by the brightness of the pixel in the corner, so that losses can be worked out by hand."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0, :1, 0] * self.weight

    def forward_rotation(self, x: Tensor) -> Tensor:
        return x[:, 0, 0, :1] * self.weight[:4]


def test_losses_match_independent_loops() -> None:
    x, y = torch.rand(5, 1, 3, 3), torch.tensor([0, 1, 2, 0, 1])
    model = Table(12)
    joint = torch.tensor(0.0)
    rotation = torch.tensor(0.0)
    for image, label in zip(x, y.tolist(), strict=True):
        for turn in range(4):
            turned = torch.rot90(image, turn, (-2, -1))[None]
            joint = joint + F.cross_entropy(model(turned), torch.tensor([label * 4 + turn])) / 20
            rotation = rotation + F.cross_entropy(model.forward_rotation(turned), torch.tensor([turn])) / 20
    plain = F.cross_entropy(model(x), y)
    torch.testing.assert_close(sla_loss(model, x, y)[0], joint)
    torch.testing.assert_close(plain_loss(model, x, y)[0], plain)
    torch.testing.assert_close(rotation_loss(model, x, y)[0], plain + rotation)


class StopError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_interrupted_training_gives_the_same_weights(tmp_path: Path, optimizer: str) -> None:
    config = replace(QUICK, optimizer=optimizer, flip=True)
    images, labels = make_stripes(96)

    def dropping_model() -> nn.Module:
        return nn.Sequential(make_net(12), nn.Dropout(0.1))

    whole = dropping_model()
    expected = train(whole, images, labels, config)
    path = tmp_path / "state.safetensors"

    def interrupt(epoch: Epoch) -> None:
        if epoch.number == 1:
            raise StopError

    torch.manual_seed(123)
    with pytest.raises(StopError):
        train(dropping_model(), images, labels, config, checkpoint=path, progress=interrupt)
    torch.manual_seed(456)
    resumed = nn.Sequential(make_net(12, seed=9), nn.Dropout(0.1))
    seen: list[Epoch] = []
    history = train(resumed, images, labels, config, checkpoint=path, progress=seen.append)
    assert same_weights(whole, resumed)
    assert [epoch.number for epoch in seen] == [2, 3]
    assert [(e.loss, e.lr) for e in history.epochs] == [(e.loss, e.lr) for e in expected.epochs]
    finished = dropping_model()
    assert len(train(finished, images, labels, config, checkpoint=path).epochs) == 4
    assert same_weights(whole, finished)


def test_training_depends_on_the_seed_alone_and_leaves_the_global_generator() -> None:
    data, models = make_stripes(64), []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        models.append(nn.Sequential(make_net(), nn.Dropout(0.1)))
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        train(models[-1], *data, replace(QUICK, epochs=1, seed=seed))
        assert torch.equal(torch.get_rng_state(), state)
    assert same_weights(models[0], models[1])
    assert not same_weights(models[0], models[2])


def test_resume_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path, data = tmp_path / "state.safetensors", make_stripes(64)
    config = replace(QUICK, epochs=1)
    train(make_net(), *data, config, checkpoint=path)
    other = replace(config, lr=0.5, milestones=(3,))
    with pytest.raises(ValueError, match=r"another configuration: lr \(stored 0.02, now 0.5\); milestones"):
        train(make_net(), *data, other, checkpoint=path)
    with pytest.raises(ValueError, match="other data: stored 64x1x8x8"):
        train(make_net(), *make_stripes(96), config, checkpoint=path)
    with pytest.raises(ValueError, match="other data"):
        train(make_net(), data[0], data[1].flip(0), config, checkpoint=path)
    with pytest.raises(ValueError, match="another model"):
        train(make_net(norm="group"), *data, config, checkpoint=path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="truncated"):
        train(make_net(), *data, config, checkpoint=path)
    write_tensors(path, {}, kind="ttvd.training", version=2, metadata={"data": "x"})
    with pytest.raises(ValueError, match=r"not a valid ttvd\.training file"):
        train(make_net(), *data, config, checkpoint=path)


def test_train_refuses_wrong_input() -> None:
    images, labels = make_stripes(8)
    cases: list[tuple[nn.Module, Tensor, Tensor, TrainingConfig, str]] = [
        (make_net(), images, labels[:5], QUICK, "8 images and 5 labels"),
        (make_net(), images.float(), labels, QUICK, r"in \[0, 1\], got values from .*images / 255"),
        (make_net(), images.int(), labels, QUICK, "uint8 or floating point, got torch.int32"),
        (make_net(), images[0], labels, QUICK, r"\(b, c, h, w\)"),
        (make_net(), images, labels - 1, QUICK, "labels must run from 0, got values from -1"),
        (make_net(), images, labels.float(), QUICK, "labels must be integers"),
        (make_net(3), images, labels, QUICK, r"at least 12 outputs \(classes x 4\), the model has 3"),
        (make_net(2), images, labels, replace(QUICK, objective="plain"), "at least 3 outputs"),
        (make_net(3), images, labels, replace(QUICK, objective="rotation"), "needs a second head"),
        (make_net().requires_grad_(False), images, labels, QUICK, "no parameter that requires gradients"),
    ]
    for model, x, y, config, reason in cases:
        with pytest.raises(ValueError, match=reason):
            train(model, x, y, config)


def test_a_plain_classifier_learns_rotations_by_a_short_fine_tuning() -> None:
    plain = make_net(3)
    train(plain, *make_stripes(), replace(QUICK, objective="plain", epochs=8))
    wide = split(plain).augmented(4)
    test = make_stripes(96, seed=1)
    before = evaluate(wide, *test, views=4, head_views=4)
    train(wide, *make_stripes(), replace(QUICK, epochs=4))
    assert evaluate(wide, *test, views=4, head_views=4) > max(0.95, before)
    assert evaluate(plain, *test) > 0.95  # it was left alone


def test_evaluate_counts_and_restores_flags() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Flatten())
    images = torch.eye(4)[:, :, None, None]
    assert evaluate(model, images, torch.tensor([0, 1, 2, 0]), batch_size=3) == 0.75
    assert model.training
    with pytest.raises(ValueError, match="trained on 1 views cannot judge 4"):
        evaluate(model, images, torch.arange(4), views=4)
    with pytest.raises(ValueError, match="4 images and 3 labels"):
        evaluate(model, images, torch.arange(3))
