import math

import pytest
import torch
from torch import nn

from ttvd.nn.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize
from ttvd.nn.resnet import BasicBlock, PaddedShortcut, ResNet, resnet20, resnet26
from ttvd.nn.resnet_imagenet import resnet18, resnet50
from ttvd.nn.rotation import RotationHead, RotationNet
from ttvd.nn.split import split


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("classes", "parameters"), [(10, 369_680), (100, 375_440), (40, 371_600), (400, 394_640)]
)
def test_resnet26_has_the_parameters_of_ttab(classes: int, parameters: int) -> None:
    model = resnet26(classes)
    assert count(model) == parameters
    assert sum(count(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)) == 2_016


def test_resnet26_layout() -> None:
    model = resnet26(10)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert sum(conv.kernel_size == (3, 3) for conv in convs) == 25
    assert sum(conv.kernel_size == (1, 1) for conv in convs) == 2
    strides = [block.conv1.stride[0] for block in model.modules() if isinstance(block, BasicBlock)]
    assert strides == [1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1]
    assert "fc.bias" not in model.state_dict()
    assert model.num_features == 64
    assert torch.equal(model.normalize.mean.flatten(), torch.tensor(CIFAR10_MEAN))
    assert torch.equal(model.normalize.std.flatten(), torch.tensor(CIFAR10_STD))


def test_initial_weights_follow_ttab() -> None:
    model = resnet26(1000, generator=torch.Generator().manual_seed(0))
    last = [block for block in model.modules() if isinstance(block, BasicBlock)][-1]
    assert last.conv2.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.05)
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.05)
    again = resnet26(1000, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28), (4, 17)])
def test_features_and_head_make_the_model(channels: int, size: int) -> None:
    model = resnet26(6, channels).eval()
    x = torch.rand(2, channels, size, size)
    z = model.forward_features(x)
    assert z.shape == (2, 64)
    assert torch.equal(model.forward_head(z), model(x))
    assert model.forward_head(z, pre_logits=True) is z
    assert split(model).linear is model.fc


def test_group_norm_and_bias() -> None:
    model = resnet26(10, norm="group", bias=True)
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {8}
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert count(model) == 369_680 + 10


def test_bottleneck_gives_features_in_the_plane_that_train() -> None:
    generator = torch.Generator().manual_seed(0)
    model = ResNet(10, in_channels=1, widths=(8, 16, 32), blocks=(1, 1, 1), bottleneck=2, generator=generator)
    z = model.forward_features(torch.rand(16, 1, 28, 28, generator=generator))
    assert z.shape == (16, 2)
    assert model.fc.in_features == model.num_features == 2
    assert z.std().item() > 0.01  # the signal passes the extra layer at the start


def test_normalize() -> None:
    x = torch.rand(2, 3, 4, 4)
    expected = (x - torch.tensor(CIFAR10_MEAN).view(3, 1, 1)) / torch.tensor(CIFAR10_STD).view(3, 1, 1)
    torch.testing.assert_close(Normalize(3, CIFAR10_MEAN, CIFAR10_STD)(x), expected)
    assert Normalize(3, (0.5,), (0.5,)).mean.shape == (1, 3, 1, 1)
    with pytest.raises(ValueError, match="mean must have 1 or 1 values, one per channel, got 3"):
        Normalize(1, CIFAR10_MEAN, (0.5,))
    with pytest.raises(ValueError, match="std must be positive"):
        Normalize(1, (0.5,), (0.0,))


def test_errors() -> None:
    with pytest.raises(ValueError, match="norm must be 'batch', 'group' or 'instance-aware', got 'layer'"):
        ResNet(10, norm="layer")
    with pytest.raises(ValueError, match="widths and blocks must be positive and equally many"):
        ResNet(10, widths=(8, 16), blocks=(1, 1, 1))
    with pytest.raises(ValueError, match="widths and blocks"):
        ResNet(10, widths=(8, 16), blocks=(1, 0))


def test_imagenet_networks_have_torchvisions_sizes_and_names() -> None:
    with torch.device("meta"):
        small, large = resnet18(), resnet50()
    assert (count(small), count(large)) == (11_689_512, 25_557_032)
    names = set(large.state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.downsample.1.bias", "layer4.2.conv3.weight"} <= names
    assert {"layer2.0.bn3.num_batches_tracked", "fc.weight", "fc.bias"} <= names
    assert len(names) == 320  # torchvision's resnet50: 161 parameters and 159 buffers
    assert len(small.state_dict()) == 122
    assert large.get_submodule("layer2.0.conv2").stride == (2, 2)
    assert large.get_submodule("layer2.0.conv1").stride == (1, 1)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_imagenet_networks_compute_what_torchvisions_do(name: str) -> None:
    theirs = pytest.importorskip("torchvision.models").get_model(name, num_classes=8).eval()
    ours = {"resnet18": resnet18, "resnet50": resnet50}[name](8).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(ours.normalize(x)))


def test_imagenet_network_runs() -> None:
    model = resnet18(8).eval()
    x = torch.rand(2, 3, 64, 64)
    z = model.forward_features(x)
    assert z.shape == (2, 512)
    assert torch.equal(model.forward_head(z), model(x))
    assert split(model).linear is model.fc


def test_rotation_head_forks_before_the_last_stage() -> None:
    model = resnet26(10)
    head = RotationHead(model)
    assert head.fc.weight.shape == (4, 64)
    assert "fc.bias" not in head.state_dict()
    assert count(head.stage) == count(model.stages[-1])
    assert head.stage is not model.stages[-1]
    x = torch.rand(2, 3, 32, 32)
    assert model.forward_trunk(x).shape == (2, 32, 16, 16)


def test_rotation_net_shares_the_trunk_alone() -> None:
    net = RotationNet(ResNet(3, widths=(8, 16), blocks=(1, 1)))
    x = torch.rand(4, 3, 8, 8)
    net.forward_rotation(x).sum().backward()
    assert all(p.grad is None for p in net.model.stages[-1].parameters())
    assert all(p.grad is not None for p in net.rotation.parameters())
    assert all(p.grad is not None for p in net.model.stages[0].parameters())
    net.eval()
    assert torch.equal(net(x), net.model(x))
    assert split(net).linear is net.model.fc


def test_resnet20_has_shortcuts_without_weights() -> None:
    model = resnet20(10)
    assert count(model) == 269_722
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 19
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert split(model).linear is model.fc
    x = torch.rand(2, 3, 5, 5)
    padded = PaddedShortcut(3, 6)(x)
    assert torch.equal(padded[:, 1:4], x[:, :, ::2, ::2])
    assert padded[:, [0, 4, 5]].abs().max() == 0


def test_stride_and_eps_of_resnet50() -> None:
    torch.manual_seed(0)
    usual, first = resnet50(2), resnet50(2, stride_first=True, eps=1e-3)
    assert {name: value.shape for name, value in usual.state_dict().items()} == {
        name: value.shape for name, value in first.state_dict().items()
    }
    for model, strides in ((usual, (1, 2)), (first, (2, 1))):
        for stage in (2, 3, 4):
            convs = [model.get_submodule(f"layer{stage}.0.conv{i}") for i in (1, 2)]
            assert tuple(m.stride[0] for m in convs if isinstance(m, nn.Conv2d)) == strides
    assert {m.eps for m in usual.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-5}
    assert {m.eps for m in first.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
    assert first(torch.rand(1, 3, 40, 40)).shape == (1, 2)
