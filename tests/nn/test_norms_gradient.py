"""Mixed statistics and renormalised gradients, against formulas written out in double precision."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.engine import MIXED, compiling_by, make_input, make_norm, write_out
from ttvd.nn.norms import Statistics, StreamNorm, following_stream


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("text", MIXED)
def test_values_and_gradients_as_on_paper(text: str, shape: tuple[int, ...], affine: bool) -> None:
    norm = make_norm(text, affine=affine)
    x = make_input(*shape).requires_grad_()
    inputs = [x, *norm.parameters()]
    # At the start a tracked average is worth its count.
    expected = write_out(x, norm, 1.0 - norm.statistics.source_share(len(x)))
    found = norm(x)
    torch.testing.assert_close(found, expected)
    direction = make_input(*shape, seed=2)
    for one, other in zip(
        torch.autograd.grad(found, inputs, direction),
        torch.autograd.grad(expected, inputs, direction),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_finite_differences(layout: torch.memory_format) -> None:
    x = make_input(4, 3, 2, 2).to(memory_format=layout).requires_grad_()
    for text in ("prior:0.4", "count:3", "track:6:10", "momentum:0.3"):
        norm = make_norm(text)

        def call(x: Tensor, weight: Tensor, bias: Tensor, norm: StreamNorm = norm) -> Tensor:
            return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))  # type: ignore[no-any-return]

        assert torch.autograd.gradcheck(call, (x, norm.weight, norm.bias))
        # Renormalised, the gradient of the input is not one of the values; those of the weights are.
        norm.statistics = Statistics.parse(f"{text}:renorm")
        assert torch.autograd.gradcheck(call, (x.detach(), norm.weight, norm.bias))


def test_renormalised_gradient_is_that_of_batch_norm_where_both_statistics_agree() -> None:
    x = make_input(6, 3, 2, 2).requires_grad_()
    norm, plain = make_norm("source:renorm"), make_norm("batch")
    var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
    norm.running_mean, norm.running_var = mean, var
    direction = make_input(6, 3, 2, 2, seed=2)
    (one,) = torch.autograd.grad(norm(x), x, direction)
    (other,) = torch.autograd.grad(plain(x), x, direction)
    torch.testing.assert_close(one, other)


def test_no_loss_moves_or_scales_a_renormalised_channel() -> None:
    """The gradient is orthogonal to shifts and, but for eps, to stretches of a channel; not so without."""
    direction = make_input(6, 3, 2, 2, seed=2)
    for text, still in (("prior:0.2:renorm", True), ("track:12:100:renorm", True), ("prior:0.2", False)):
        x = make_input(6, 3, 2, 2).requires_grad_()
        (gradient,) = torch.autograd.grad(make_norm(text)(x), x, direction)
        centred = x.detach() - x.detach().mean((0, 2, 3), keepdim=True)
        for change in (gradient.sum((0, 2, 3)), (gradient * centred).sum((0, 2, 3))):
            assert (change.abs() < 1e-3).all() == still


@pytest.mark.parametrize("text", MIXED)
def test_a_channel_without_variance_stays_finite(text: str) -> None:
    norm = make_norm(text, dtype=torch.float32)
    x = make_input(4, 3, 2, 2).float()
    x[:, 1] = 3.0
    x.requires_grad_()
    with following_stream(norm):
        out = norm(x)
    gradients = torch.autograd.grad(out.square().sum(), [x, *norm.parameters()])
    assert all(tensor.isfinite().all() for tensor in (out, *gradients, *norm.buffers()))


@pytest.mark.parametrize("text", MIXED)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_beside_float32_weights(text: str, half: torch.dtype) -> None:
    norm, exact = make_norm(text, dtype=torch.float32), make_norm(text)
    x = make_input(16, 3, 4, 4).to(half)
    one, other = x.clone().requires_grad_(), x.double().requires_grad_()
    direction = make_input(16, 3, 4, 4, seed=2).to(half)
    with following_stream(norm), following_stream(exact):
        found, expected = norm(one), exact(other)
    assert found.dtype == half
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    ours = torch.autograd.grad(found, [one, *norm.parameters()], direction)
    theirs = torch.autograd.grad(expected, [other, *exact.parameters()], direction.double())
    assert [tensor.dtype for tensor in ours] == [half, torch.float32, torch.float32]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.02, atol=0.02)
    if norm.statistics.follows:  # averages are not rounded
        torch.testing.assert_close(norm.running_var, exact.running_var.float())  # type: ignore[union-attr]
    before = found if not norm.statistics.follows else norm(x)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), before, rtol=0.02, atol=0.02)


def test_a_norm_all_in_half_precision() -> None:
    norm = make_norm("track:12:100:renorm", dtype=torch.bfloat16)
    x = make_input(16, 3, 4, 4).bfloat16()
    with following_stream(norm):
        assert norm(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert norm(x).dtype == torch.bfloat16
    assert norm.rows_followed.tolist() == [16, 16, 16]


def test_second_derivatives_are_refused_and_not_wrong() -> None:
    x = make_input(4, 3, 2, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(make_norm("prior:0.2")(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("text", ["prior:0.2", "track:12:100:renorm"])
def test_as_the_compiler_sees_it(text: str) -> None:
    torch.compiler.reset()
    norm, twin = make_norm(text), make_norm(text)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    x = make_input(4, 3, 2, 2).requires_grad_()
    with following_stream(norm), following_stream(twin):
        found, expected = compiled(x), twin(x)
    torch.testing.assert_close(found, expected)
    (one,) = torch.autograd.grad(found.square().sum(), x)
    (other,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(one, other)
    assert all(torch.allclose(a, b) for a, b in zip(norm.buffers(), twin.buffers(), strict=True))


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize(
    ("text", "backend"),
    [("momentum:0.5", "aot_eager_decomp_partition"), ("track:12:100:renorm", "inductor")],
)
def test_gradients_of_a_compiled_network_know_the_averages_of_before(text: str, backend: str) -> None:
    """What a graph keeps for its backward pass must not be what the forward pass has written meanwhile."""
    with compiling_by(backend):
        torch.compiler.reset()
        torch.manual_seed(0)
        net = nn.Sequential(
            make_norm(text), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1).double(), make_norm(text)
        )
        twin, x = copy.deepcopy(net), make_input(8, 3, 5, 5)
        compiled = torch.compile(net, dynamic=False)
        for _ in range(2):
            gradients = []
            for one, of in ((compiled, net), (twin, twin)):
                adapting = [p for name, p in of.named_parameters() if not name.startswith("2.")]
                with following_stream(of):
                    out = one(x)
                    gradients.append(torch.autograd.grad(out.square().mean() + out.pow(3).mean(), adapting))
            torch.testing.assert_close(*gradients)
            for found, wanted in zip(net.buffers(), twin.buffers(), strict=True):
                torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_on_a_gpu(dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = make_input(16, 3, 4, 4).to("cuda", dtype).contiguous(memory_format=layout)
    norm, exact = make_norm("momentum:1:renorm", dtype=torch.float32).cuda(), make_norm("momentum:1:renorm")
    with following_stream(norm), following_stream(exact), torch.no_grad():
        norm(x)
        exact(x.cpu().double())
    torch.testing.assert_close(norm.running_mean, exact.running_mean.float().cuda())  # type: ignore[union-attr]
    torch.testing.assert_close(norm.running_var, exact.running_var.float().cuda())  # type: ignore[union-attr]
