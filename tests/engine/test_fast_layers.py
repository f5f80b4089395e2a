"""Layers in a quicker form: the same numbers, gradients and names."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ttvd.engine.fast_layers import (
    FoldedConv,
    FrozenConv,
    PoolTwice,
    _Frozen,
    exchange_layers,
    fold_conv,
    pool_twice,
)
from ttvd.nn.norms import Statistics, apply_statistics
from ttvd.nn.resnet_imagenet import resnet50

NUMBERS = torch.Generator().manual_seed(4)


@settings(max_examples=60, deadline=None)
@given(
    channels=st.integers(1, 5),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    side=st.tuples(st.integers(4, 8), st.integers(4, 8)),
    biased=st.booleans(),
)
def test_a_folded_convolution_is_the_convolution(
    channels: int, kernel: tuple[int, int], padding: tuple[int, int], side: tuple[int, int], biased: bool
) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=NUMBERS)

    x, weight = draw(2, channels, 2 * side[0], 2 * side[1]), draw(3, channels, *kernel)
    bias = draw(3) if biased else None
    wanted = F.conv2d(x, weight, bias, stride=2, padding=padding)
    torch.testing.assert_close(fold_conv(x, weight, bias, padding), wanted, rtol=1e-10, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.integers(2, 4), stride=st.integers(1, 3), padding=st.integers(0, 1), values=st.integers(1, 5)
)
def test_pooling_in_two_passes_gives_the_gradient_to_the_same_one_among_equal_values(
    kernel: int, stride: int, padding: int, values: int
) -> None:
    x = torch.randint(values, (2, 3, 9, 8), generator=NUMBERS).double().requires_grad_()
    wanted, found = F.max_pool2d(x, kernel, stride, padding), pool_twice(x, kernel, stride, padding)
    assert torch.equal(found, wanted)
    weights = torch.rand(wanted.shape, dtype=torch.float64, generator=NUMBERS)
    gradients = [torch.autograd.grad(out, x, weights)[0] for out in (wanted, found)]
    torch.testing.assert_close(*gradients)
    assert torch.equal(gradients[0] == 0, gradients[1] == 0)


def test_the_first_layers_of_a_resnet_are_exchanged_and_it_stays_what_it_was() -> None:
    net = resnet50(4, generator=torch.Generator().manual_seed(0)).eval()
    fast = copy.deepcopy(net)
    exchange_layers(fast)
    assert isinstance(fast.conv1, FoldedConv)
    assert isinstance(fast.maxpool, PoolTwice)
    kinds = [type(layer) for layer in fast.modules()]
    assert [kinds.count(kind) for kind in (FoldedConv, FrozenConv, PoolTwice)] == [1, 52, 1]
    assert list(fast.state_dict()) == list(net.state_dict())
    x = torch.rand(2, 3, 32, 32, generator=NUMBERS)
    assert torch.equal(fast(x), net(x)), "on a CPU nothing changes"


OTHERS = {
    "of stride 1": nn.Conv2d(3, 4, 3),
    "of stride 2 along rows": nn.Conv2d(3, 4, 3, stride=(1, 2)),
    "dilated": nn.Conv2d(3, 4, 3, stride=2, dilation=2),
    "in groups": nn.Conv2d(4, 4, 3, stride=2, groups=2),
    "with a border that repeats": nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"),
    "on many channels": nn.Conv2d(8, 4, 3, stride=2),
    "transposed": nn.ConvTranspose2d(3, 4, 3, stride=2),
    "oblong windows": nn.MaxPool2d((3, 2), 2),
    "windows apart": nn.MaxPool2d(2, 2),
    "dilated windows": nn.MaxPool2d(3, 2, dilation=2),
    "places": nn.MaxPool2d(3, 2, return_indices=True),
    "rounded up": nn.MaxPool2d(3, 2, ceil_mode=True),
    "averages": nn.AvgPool2d(3, 2),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_layers_compute_as_they_did(name: str) -> None:
    layer = copy.deepcopy(OTHERS[name])
    exchange_layers(nn.Sequential(layer))
    # Whatever has zeros around it may forget its input.
    plain = isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros"
    assert type(layer) is (FrozenConv if plain else type(OTHERS[name]))


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    side=st.tuples(st.integers(7, 12), st.integers(7, 12)),
)
def test_the_gradient_of_a_frozen_convolution_needs_no_input(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: int,
    groups: int,
    side: tuple[int, int],
) -> None:
    x = torch.randn(2, 4, *side, dtype=torch.float64, generator=NUMBERS).requires_grad_()
    weight = torch.randn(6, 4 // groups, *kernel, dtype=torch.float64, generator=NUMBERS)
    wanted = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    found = _Frozen.apply(x, weight, None, stride, padding, (dilation, dilation), groups)
    assert torch.equal(found, wanted)
    assert [tensor.shape for tensor in found.grad_fn.saved_tensors] == [weight.shape]
    slope = torch.randn(wanted.shape, dtype=torch.float64, generator=NUMBERS)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, slope)[0] for out in (found, wanted)))


@pytest.mark.parametrize("adapts", [False, True])
def test_compiled_an_activation_is_kept_only_for_gradients_of_weights(adapts: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3))
    apply_statistics(net.eval(), Statistics.parse("track:8:32:renorm"))
    net.requires_grad_(adapts)[1].requires_grad_()
    twin, x = copy.deepcopy(net), torch.rand(2, 3, 8, 8, generator=NUMBERS).requires_grad_()
    exchange_layers(net)
    out, wanted = torch.compile(net, backend="aot_eager_decomp_partition", fullgraph=True)(x), twin(x)
    torch.testing.assert_close(out, wanted)
    active = twin[:3](x)
    alike = [tensor for tensor in out.grad_fn.saved_tensors if tensor.shape == active.shape]
    assert any(torch.allclose(tensor.to(active), active, atol=1e-5) for tensor in alike) == adapts
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), x) for each in (out, wanted)))


CASES = {
    "bias": (nn.Conv2d(3, 4, 3), True, torch.float32, (2, 3, 6, 6)),
    "same size": (nn.Conv2d(3, 4, 3, padding="same"), False, torch.float32, (2, 3, 6, 6)),
    "one image": (nn.Conv2d(3, 4, 3), False, torch.float32, (3, 6, 6)),
    "autocast": (nn.Conv2d(3, 4, 3), False, torch.bfloat16, (2, 3, 6, 6)),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_a_frozen_convolution_does_not_take_is_computed_as_ever(case: str) -> None:
    torch.compiler.reset()
    layer, biased, autocast, shape = CASES[case]
    layer = copy.deepcopy(layer).requires_grad_(False)
    assert layer.bias is not None
    layer.bias.requires_grad_(biased)
    net, x = nn.Sequential(copy.deepcopy(layer)), torch.rand(shape, generator=NUMBERS).requires_grad_()
    exchange_layers(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast == torch.bfloat16):
        found, wanted = compiled(x), layer(x)
    assert found.dtype == wanted.dtype == autocast
    torch.testing.assert_close(found, wanted)
    pairs: list[Any] = [(found, net[0]), (wanted, layer)]
    gradients = [torch.autograd.grad(out.square().sum(), [x, *[own.bias] * biased]) for out, own in pairs]
    torch.testing.assert_close(*gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("side", [64, 63])
def test_on_a_gpu_they_compute_the_same(side: int) -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)).cuda().bfloat16()
    fast, x = copy.deepcopy(net), torch.rand(4, 3, side, side, device="cuda", dtype=torch.bfloat16)
    exchange_layers(fast)
    torch.testing.assert_close(fast(x), net(x), rtol=2e-2, atol=2e-2)
