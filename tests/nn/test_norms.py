from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttvd.nn.norms import Statistics, apply_statistics, following_stream, select_parameters


def trained_norm(channels: int = 3) -> nn.BatchNorm2d:
    """A layer whose statistics and affine parameters are all different."""
    layer = nn.BatchNorm2d(channels).eval()
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2.0)
        layer.bias.uniform_(-1.0, 1.0)
        layer.running_mean.uniform_(-1.0, 1.0)  # type: ignore[union-attr]
        layer.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    return layer


def normalise(x: Tensor, layer: nn.BatchNorm2d, share: float) -> Tensor:
    """Batch norm with mixed statistics, channel by channel."""
    out = torch.empty_like(x)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = share * layer.running_mean[c] + (1 - share) * values.mean()
        var = share * layer.running_var[c] + (1 - share) * values.var(correction=0)
        out[:, c] = (values - mean) / (var + layer.eps).sqrt() * layer.weight[c] + layer.bias[c]
    return out


@pytest.mark.parametrize(
    ("statistics", "share"),
    [
        (Statistics.batch(), 0.0),
        (Statistics.source(), 1.0),
        (Statistics(prior=0.3), 0.3),
        (Statistics(count=16), 16 / 24),
        (Statistics(count=0), 0.0),
        (Statistics(momentum=0.2), 0.8),
    ],
)
def test_policies_against_a_loop_over_channels(statistics: Statistics, share: float) -> None:
    torch.manual_seed(0)
    layer, x = trained_norm(), torch.randn(8, 3, 4, 4)
    expected = normalise(x, layer, share)
    out = apply_statistics(nn.Sequential(layer), statistics)(x)
    assert torch.allclose(out, expected, atol=1e-5)


def test_gradient_flows_through_the_batch_statistics() -> None:
    torch.manual_seed(0)
    layer = trained_norm().double()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    for statistics in (Statistics.batch(), Statistics(prior=0.4)):
        net = apply_statistics(nn.Sequential(trained_norm().double()), statistics)
        assert torch.autograd.gradcheck(net, (x,))
    assert layer.weight.grad is None


def test_running_average_follows_the_stream_only_when_told() -> None:
    torch.manual_seed(0)
    layer, x = trained_norm(), torch.randn(8, 3, 4, 4)
    start = layer.running_mean.clone()  # type: ignore[union-attr]
    net = apply_statistics(nn.Sequential(layer), Statistics(momentum=0.25))
    net(x)
    assert torch.equal(net[0].running_mean, start)  # type: ignore[index]
    with following_stream(net):
        net(x)
    expected = 0.75 * start + 0.25 * x.mean((0, 2, 3))
    assert torch.allclose(net[0].running_mean, expected, atol=1e-6)  # type: ignore[index]


def test_single_value_a_channel_falls_back_on_the_source() -> None:
    layer = trained_norm()
    x = torch.randn(1, 3, 1, 1)
    expected = layer(x)
    assert torch.equal(apply_statistics(nn.Sequential(layer), Statistics.batch())(x), expected)
    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    out = apply_statistics(nn.Sequential(untracked), Statistics.batch())(torch.randn(1, 2))
    assert torch.equal(out, torch.zeros(1, 2))


def test_source_statistics_that_do_not_exist_are_missed_by_name() -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match="'1' has no source statistics"):
        apply_statistics(net, Statistics.source())


def test_a_model_that_is_a_norm_itself() -> None:
    x = torch.randn(4, 3, 2, 2)
    out = apply_statistics(trained_norm(), Statistics.batch())(x)
    assert out.shape == x.shape


@pytest.mark.parametrize("statistics", [Statistics.batch(), Statistics.source(), Statistics(prior=0.5)])
def test_norm_and_activation_in_one_keeps_its_activation(statistics: Statistics) -> None:
    timm_layers = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    plain = trained_norm()
    fused = timm_layers.BatchNormAct2d(3, act_layer=nn.ReLU6).eval()
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(8, 3, 4, 4)
    expected = nn.functional.relu6(apply_statistics(nn.Sequential(plain), statistics)(x))
    out = apply_statistics(nn.Sequential(fused), statistics)(x)
    assert torch.allclose(out, expected, atol=1e-5)


def test_other_norms_stay_as_they_are() -> None:
    net = nn.Sequential(nn.GroupNorm(1, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4))
    before = [type(m) for m in net.modules()]
    assert [type(m) for m in apply_statistics(net, Statistics.batch()).modules()] == before


def test_selection_of_parameters() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 1),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 3),
    )
    norm = {f"{i}.{leaf}" for i in (1, 2, 4) for leaf in ("weight", "bias")}
    everything = {name for name, _ in net.named_parameters()}
    assert select_parameters(net, "norm") == norm
    assert select_parameters(net, "all") == everything
    assert select_parameters(net, "features") == everything - {"5.weight", "5.bias"}


def test_nothing_to_adapt_is_said_before_the_first_batch() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="no normalisation layer"):
        select_parameters(net, "norm")
    with pytest.raises(ValueError, match="'norm', 'features' or 'all'"):
        select_parameters(net, "head")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [{"prior": 1.5}, {"prior": -0.1}, {"count": -1.0}, {"momentum": 0.0}, {"count": 1.0, "momentum": 0.1}],
)
def test_impossible_policies_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"prior|count|momentum"):
        Statistics(**arguments)


def test_a_norm_with_two_names_is_exchanged_in_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn1 = trained_norm()
            self.stem = nn.Sequential(self.bn1, nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x)  # type: ignore[no-any-return]

    net, x = Twice(), torch.randn(8, 3, 4, 4)
    expected = normalise(x, net.bn1, 0.0).relu()
    assert torch.allclose(apply_statistics(net, Statistics.batch())(x), expected, atol=1e-5)


@pytest.mark.parametrize("text", ["sometimes", "count", "count:many", "prior:2"])
def test_words_that_name_no_statistics(text: str) -> None:
    with pytest.raises(ValueError, match=r"statistics|prior"):
        Statistics.parse(text)
