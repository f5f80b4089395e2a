"""Instance-aware batch norm against the formula in plain loops, and in its two surroundings: training, adapters."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.norms import Statistics, apply_statistics, select_parameters
from ttvd.nn.resnet import ResNet
from ttvd.source.config import TrainingConfig
from ttvd.source.produce import evaluate
from ttvd.source.train import train
from ttvd.zoo.checkpoint import Card, load_checkpoint, save_checkpoint


def shrink(value: float, by: float) -> float:
    return math.copysign(max(abs(value) - by, 0.0), value)


def moments(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def normalise_by_loops(
    x: Tensor, norm: InstanceAwareBatchNorm2d, mean: list[float], var: list[float]
) -> Tensor:
    out, pixels = torch.empty_like(x), x.shape[2] * x.shape[3]
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            m, v = mean[c], var[c]
            if pixels > 1:
                own_mean, own_var = moments(x[i, c].flatten().tolist())
                spread = v + norm.eps
                m, v = (
                    m + shrink(own_mean - m, norm.k * math.sqrt(spread / pixels)),
                    max(v + shrink(own_var - v, norm.k * spread * math.sqrt(2 / (pixels - 1))), 0.0),
                )
            out[i, c] = (x[i, c] - m) / math.sqrt(v + norm.eps) * norm.weight[c].item() + norm.bias[c].item()
    return out


def make_norm(channels: int, k: float, seed: int = 0) -> InstanceAwareBatchNorm2d:
    generator = torch.Generator().manual_seed(seed)
    norm = InstanceAwareBatchNorm2d(channels, k).double()
    with torch.no_grad():
        norm.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        norm.bias.copy_(torch.randn(channels, generator=generator))
        norm.running_mean.copy_(torch.randn(channels, generator=generator))
        norm.running_var.copy_(torch.rand(channels, generator=generator) + 0.5)
    return norm


def make_images(*shape: int, seed: int = 1) -> Tensor:
    """Images whose brightness and contrast differ widely, so that some are corrected and some are not."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    contrast = torch.logspace(-1.5, 1.0, shape[0], dtype=torch.float64).view(-1, 1, 1, 1)
    return noise * contrast + torch.randn(shape[0], 1, 1, 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (5, 2, 1, 1), (1, 2, 3, 3), (4, 1, 1, 2)])
@pytest.mark.parametrize("k", [0.0, 1.0, 4.0])
def test_evaluation_follows_the_formula(shape: tuple[int, ...], k: float) -> None:
    norm, x = make_norm(shape[1], k).eval(), make_images(*shape)
    before = copy.deepcopy(norm.state_dict())
    expected = normalise_by_loops(x, norm, norm.running_mean.tolist(), norm.running_var.tolist())
    torch.testing.assert_close(norm(x), expected)
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (5, 2, 1, 1), (1, 2, 3, 3)])
@pytest.mark.parametrize("k", [0.5, 4.0])
def test_training_uses_the_batch_and_averages_it(shape: tuple[int, ...], k: float) -> None:
    norm, x = make_norm(shape[1], k), make_images(*shape)
    batch = [moments(x[:, c].flatten().tolist()) for c in range(shape[1])]
    means, variances = [m for m, _ in batch], [v for _, v in batch]
    old_mean, old_var = norm.running_mean.clone(), norm.running_var.clone()
    torch.testing.assert_close(norm(x), normalise_by_loops(x, norm, means, variances))
    torch.testing.assert_close(norm.running_mean, 0.9 * old_mean + 0.1 * torch.tensor(means).double())
    torch.testing.assert_close(norm.running_var, 0.9 * old_var + 0.1 * torch.tensor(variances).double())


def test_both_corrections_act_on_these_images() -> None:
    norm, x = make_norm(3, 1.0).eval(), make_images(6, 3, 4, 5)
    plain = nn.BatchNorm2d(3).double().eval()
    plain.load_state_dict({**norm.state_dict(), "num_batches_tracked": torch.tensor(0)})
    gaps = (norm(x) - plain(x)).abs().amax((1, 2, 3))
    assert gaps.max() > 0.1


def test_a_large_k_is_batch_norm_and_zero_is_instance_norm() -> None:
    x = make_images(6, 3, 4, 5)
    large = make_norm(3, 1e9).eval()
    plain = nn.BatchNorm2d(3).double().eval()
    plain.load_state_dict({**large.state_dict(), "num_batches_tracked": torch.tensor(0)})
    torch.testing.assert_close(large(x), plain(x))
    zero = make_norm(3, 0.0).eval()
    var, mean = torch.var_mean(x, (2, 3), keepdim=True)
    expected = (x - mean) / (var + zero.eps).sqrt() * zero.weight.view(-1, 1, 1) + zero.bias.view(-1, 1, 1)
    torch.testing.assert_close(zero(x), expected)


def test_one_value_a_channel_and_constant_images_stay_finite() -> None:
    norm = make_norm(2, 4.0)
    single = norm(torch.ones(1, 2, 1, 1, dtype=torch.float64))
    assert single.isfinite().all()
    x = torch.full((4, 2, 3, 3), 0.5, dtype=torch.float64, requires_grad=True)
    out = norm(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_gradients_are_those_of_the_formula() -> None:
    norm = make_norm(2, 1.0)
    x = make_images(3, 2, 2, 3).requires_grad_()

    def run(value: Tensor) -> Tensor:
        out: Tensor = copy.deepcopy(norm)(value)
        return out

    assert torch.autograd.gradcheck(run, (x,))


def test_low_precision_is_computed_in_float32() -> None:
    norm, x = make_norm(3, 4.0).float().eval(), make_images(6, 3, 4, 5).float()
    low = norm(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), norm(x.bfloat16().float()), rtol=1e-2, atol=1e-2)


def test_errors() -> None:
    with pytest.raises(ValueError, match="k is a number of standard errors"):
        InstanceAwareBatchNorm2d(3, k=-1.0)
    with pytest.raises(ValueError, match=r"expected images \(b, 3, h, w\), got shape \(2, 4, 5, 5\)"):
        InstanceAwareBatchNorm2d(3)(torch.rand(2, 4, 5, 5))
    with pytest.raises(ValueError, match="'batch', 'group' or 'instance-aware', got 'layer'"):
        ResNet(10, norm="layer")


def make_net(seed: int = 0) -> ResNet:
    generator = torch.Generator().manual_seed(seed)
    return ResNet(3, in_channels=1, widths=(8, 16), blocks=(1, 1), norm="instance-aware", generator=generator)


def test_it_replaces_every_batch_norm_and_survives_a_change_of_statistics() -> None:
    net = make_net().eval()
    norms = [name for name, m in net.named_modules() if isinstance(m, InstanceAwareBatchNorm2d)]
    assert len(norms) == 6
    assert not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    x = torch.rand(4, 1, 8, 8)
    before = net(x)
    changed = apply_statistics(copy.deepcopy(net), Statistics.batch())
    assert torch.equal(changed(x), before)
    assert select_parameters(net, "norm") == {
        f"{name}.{leaf}" for name in norms for leaf in ("weight", "bias")
    }


def make_data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = torch.rand(count, 1, 8, 8, generator=generator) * 0.4
    images[labels == 0, :, :3, 1:7] += 0.5
    images[labels == 1, :, 1:4, 1:4] += 0.5
    images[labels == 2, :, 5:, 3:] += 0.5
    return images, labels


def test_a_source_model_trains_with_it_and_can_be_stored(tmp_path: Path) -> None:
    net = make_net()
    config = TrainingConfig(
        epochs=1, batch_size=32, lr=0.02, optimizer="adamw", schedule="cosine", padding=1, flip=False
    )
    train(net, *make_data(192, 0), replace(config, objective="plain", epochs=6))
    assert evaluate(net, *make_data(96, 1)) > 0.95
    arguments = {
        "num_classes": 3,
        "in_channels": 1,
        "widths": [8, 16],
        "blocks": [1, 1],
        "norm": "instance-aware",
    }
    path = tmp_path / "net.safetensors"
    save_checkpoint(path, net, Card("resnet", arguments))
    loaded, _ = load_checkpoint(path)
    x = make_data(8, 2)[0]
    assert torch.equal(loaded(x), net(x))
