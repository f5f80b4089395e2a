"""Norms in norm_batch: whatever is forwarded in one block, each does what it does in a block for every forward."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ttvd.engine import fused_norm as renorm
from ttvd.engine.fused_norm import NormStats, RenormFactors, SharedFactors
from ttvd.nn.norms import Statistics, StreamNorm, apply_statistics, following_stream

TEXTS = ["track:16:512:renorm", "track:16:512", "momentum:0.1:renorm"]
Call = Callable[[nn.Module, Tensor], Tensor]
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


class Net(nn.Module):
    """Three parts with norms of different eps, one of them without affine parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.Tanh())
        self.block = nn.Sequential(
            *(nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5, eps=0.1), nn.Tanh()),
            *(nn.BatchNorm2d(5, affine=False), nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4)),
        )
        self.head = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6, eps=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))  # type: ignore[no-any-return]


def make_net(text: str) -> Net:
    generator = torch.Generator().manual_seed(0)
    net = Net().double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(generator=generator)
        for name, buffer in net.named_buffers():
            if name.endswith("mean"):
                buffer.normal_(generator=generator)
            elif name.endswith("var"):
                buffer.uniform_(0.5, 2.0, generator=generator)
    made = apply_statistics(net, Statistics.parse(text))
    assert isinstance(made, Net)
    return made


def draw(size: int, seed: int = 0, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + size)
    return 1 + 2 * torch.randn(size, channels, 2, 2, generator=generator, dtype=torch.float64)


def weigh(*outs: Tensor) -> Tensor:
    """A loss that cares for every number."""
    loss = outs[0].new_zeros(())
    for out in outs:
        weights = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).view_as(out)
        loss = loss + (weights * out).sum() + out.square().mean()
    return loss


def forward_alone(part: nn.Module, x: Tensor) -> Tensor:
    """The oracle: one block for each forward."""
    with following_stream(part):
        return part(x)  # type: ignore[no-any-return]


def forward_in_company(part: nn.Module, x: Tensor) -> Tensor:
    """In the block that is open."""
    return part(x)  # type: ignore[no-any-return]


def read_gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def assert_alike(net: nn.Module, wanted: nn.Module, *pairs: tuple[Tensor, Tensor]) -> None:
    """Outputs, gradients, running averages and how much they have seen."""
    for found, other in pairs:
        assert_close(found, other)
    assert_close(dict(net.named_buffers()), dict(wanted.named_buffers()))
    mine, its = read_gradients(net), read_gradients(wanted)
    missing = [name for name, gradient in mine.items() if gradient is None]
    assert missing == [name for name, gradient in its.items() if gradient is None]
    assert len(missing) < len(mine)
    for name in mine.keys() - set(missing):
        assert_close(mine[name], its[name], msg=name)


def compare(text: str, drive: Callable[[Net, Call], list[Tensor]]) -> None:
    """Drive a net in one block, and its twin in a block for every call."""
    net, twin = make_net(text), make_net(text)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with following_stream(net):
        found = drive(net, forward_in_company)
        weigh(*found).backward()
    wanted = drive(twin, forward_alone)
    weigh(*wanted).backward()
    assert_alike(net, twin, *zip(found, wanted, strict=True))
    assert any(not torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
    assert all(not part.pending and part.norm_batch is None for part in norms_of(net))


def norms_of(net: nn.Module) -> Iterator[StreamNorm]:
    return (part for part in net.modules() if isinstance(part, StreamNorm))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("sizes", [(8, 16), (16, 8, 8, 16, 5), (600, 8, 600)])
def test_batches_of_several_sizes_in_one_block(text: str, sizes: tuple[int, ...]) -> None:
    compare(text, lambda net, call: [call(net, draw(size, seed)) for seed, size in enumerate(sizes)])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("order", ["L8 L16 M8 M16", "L8 M8 L16 M16", "L8 L16 L8 M16 M8", "L8 L8 M16 L16 M8"])
def test_layers_that_are_called_one_by_one(text: str, order: str) -> None:
    def drive(net: Net, call: Call) -> list[Tensor]:
        parts, channels = {"L": net.stem[1], "M": net.block[1]}, 5
        calls = [(parts[word[0]], int(word[1:])) for word in order.split()]
        return [call(part, draw(size, seed, channels)) for seed, (part, size) in enumerate(calls)]

    compare(text, drive)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("part", ["stem", "block", "head", "block.1"])
@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("all_pending", [True, False])
def test_an_inner_block_over_a_part_while_other_norms_are_pending(
    text: str, part: str, follow: bool, all_pending: bool
) -> None:
    def drive(net: Net, call: Call) -> list[Tensor]:
        inner, inside = net.get_submodule(part), call is forward_in_company
        first = [call(net, draw(16))] if all_pending else []
        h = call(net.stem, draw(8, 1))
        x = {"stem": draw(8, 2), "head": draw(8, 2, 4)}.get(part, draw(8, 2, 5))
        with following_stream(inner, follow) if inside else nullcontext():
            looks = [call(inner, y) if follow or inside else inner(y) for y in (x, x[:4], x + 1)]
        last = call(net.head, call(net.block, h))
        return [*first, *looks, last, call(net, draw(8, 3)), call(net, draw(16, 4))]

    compare(text, drive)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["block", "all", "each"])
def test_what_is_forwarded_again_for_its_gradient_is_not_heard_again(
    text: str, reentrant: bool, where: str
) -> None:
    def forward(part: nn.Module, x: Tensor, wrapped: bool) -> Tensor:
        return checkpoint(part, x, use_reentrant=reentrant) if wrapped else part(x)  # type: ignore[no-any-return]

    net, twin = make_net(text), make_net(text)
    for seed, size in enumerate((8, 16, 8)):
        ends: list[tuple[Tensor, Tensor]] = []
        for model, wrapped in ((net, True), (twin, False)):
            x = draw(size, seed).requires_grad_()
            model.zero_grad()
            with following_stream(model):
                if where == "all":
                    out = forward(model, x, wrapped)
                else:
                    h = forward(model.stem, x, wrapped and where == "each")
                    out = model.head(forward(model.block, h, wrapped))
                weigh(out).backward()
            assert x.grad is not None
            ends.append((out.detach(), x.grad))
        assert_alike(net, twin, *zip(*ends, strict=True))
    if "track" in text:
        assert all(set(norm.rows_followed.tolist()) == {32} for norm in norms_of(net))


@pytest.mark.parametrize("text", TEXTS)
def test_gradients_that_are_asked_for_twice(text: str) -> None:
    net, twin = make_net(text), make_net(text)
    with following_stream(net):
        out = net(draw(8))
        weigh(out).backward(retain_graph=True)
        more = net(draw(16))
        net.zero_grad()
        weigh(out).backward(retain_graph=True)
        first = read_gradients(net)
        weigh(more).backward()
    net.zero_grad()
    weigh(out).backward()  # the block has ended: nothing that the gradient needs has gone
    wanted = forward_alone(twin, draw(8))
    weigh(wanted).backward()
    assert_close(first, read_gradients(twin))
    forward_alone(twin, draw(16))
    assert_alike(net, twin, (out, wanted))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("idle", ["stem", "head", "block.1"])
def test_gradients_of_some_norms_alone(text: str, idle: str) -> None:
    """Others are forwarded without gradients, or nothing is made of what comes out of them."""

    def drive(net: Net, call: Call) -> list[Tensor]:
        with torch.set_grad_enabled(idle != "stem"):
            h = call(net.stem, draw(8))
        if idle == "block.1":
            call(net.block[1], h)
        out = call(net.block, h)
        unused = call(net.head, out)
        return [out] if idle == "head" else [out, unused]

    compare(text, drive)


@pytest.mark.parametrize("text", TEXTS)
def test_norms_of_different_eps_are_those_of_a_block_for_each(text: str) -> None:
    def drive(net: Net, call: Call) -> list[Tensor]:
        x = draw(8)
        for layer in (*net.stem, *net.block, *net.head):
            x = call(layer, x)
        return [x]

    compare(text, drive)


def break_once(monkeypatch: pytest.MonkeyPatch, when: int) -> list[int]:
    """Let the computation of factors fail at its n-th call; returns a list of how many norms were in each."""
    right, calls = renorm._compute_factors, list[int]()

    def compute(norms: list[NormStats]) -> list[RenormFactors]:
        calls.append(len(norms))
        if len(calls) == when:
            raise RuntimeError("out of memory")
        return right(norms)

    monkeypatch.setattr(renorm, "_compute_factors", compute)
    return calls


@pytest.mark.parametrize("when", [1, 2, 3])
def test_scales_are_found_after_a_failure(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    torch.manual_seed(0)
    kinds = [(3, 0.1, True), (2, 1e-5, True), (4, 0.1, True), (2, 0.1, False), (1, 1e-5, True)]
    known = [
        NormStats(
            torch.randn(c) if w else None,
            None,
            torch.rand(c),
            torch.rand(c),
            torch.rand(c),
            torch.rand(c),
            eps,
        )
        for c, eps, w in kinds
    ]
    factors, alone = SharedFactors(), [renorm._compute_factors([one])[0] for one in known]
    numbers = [factors.add(one) for one in known[:4]]
    calls = break_once(monkeypatch, when)
    with pytest.raises(RuntimeError, match="out of memory"):
        factors.find(numbers[-1])
    numbers.append(factors.add(known[-1]))
    for number, wanted in zip(reversed(numbers), reversed(alone), strict=True):
        torch.testing.assert_close(factors.find(number), wanted)
    assert sum(calls[when:]) == len(known)
    late = factors.add(known[0])
    torch.testing.assert_close(factors.find(late), alone[0])
    assert calls[-1] == 1


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_gradients_are_found_after_a_failure(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    net, twin = make_net(TEXTS[0]), make_net(TEXTS[0])
    wanted = forward_alone(twin, draw(8))
    weigh(wanted).backward()
    break_once(monkeypatch, when)
    with following_stream(net):
        out = net(draw(8))
        with pytest.raises(RuntimeError, match="out of memory"):
            weigh(out).backward(retain_graph=True)
        net.zero_grad()
        weigh(out).backward()
    assert_alike(net, twin, (out, wanted))
