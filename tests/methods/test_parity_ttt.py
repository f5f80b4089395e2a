"""TTT against torch's own training mode, one image after the other; its copies against all that there can be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, read_defaults
from ttvd.methods.ttt import TTT
from ttvd.nn.resnet import ResNet
from ttvd.nn.rotation import RotationNet

NetMaker = Callable[..., ResNet]
StreamMaker = Callable[..., list[Tensor]]
Options = dict[str, Any]


def make_optimizer(parameters: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    momentum = options.get("momentum", 0.0)
    if options.get("optimizer") == "adam":
        return torch.optim.Adam(parameters, lr=options["lr"], betas=(momentum, 0.999))
    return torch.optim.SGD(parameters, lr=options["lr"], momentum=momentum, nesterov=momentum > 0)


def build_rotation_net(net: ResNet) -> RotationNet:
    model = RotationNet(net, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        model.rotation.fc.weight.mul_(50)
    return model.eval()


def fixed_copies(x: Tensor) -> tuple[Tensor, Tensor]:
    """Six copies of each image, turned by 0, 90, 180, 270, 0 and 90 degrees."""
    copies = [(x.roll(n, -1) ** (1 + 0.1 * n)).rot90(n % 4, (-2, -1)) for n in range(6)]
    return torch.stack(copies, 1), torch.tensor([0, 1, 2, 3, 0, 1]).expand(len(x), 6)


TTTS: dict[str, Options] = {
    "online": {},
    "online, two steps, momentum": {"steps": 2, "momentum": 0.9},
    "online, adam, small chunks": {"optimizer": "adam", "lr": 0.01, "chunk": 3},
    "episodic": {"mode": "episodic"},
    "episodic, three steps, momentum": {"mode": "episodic", "steps": 3, "momentum": 0.5},
}


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("options", TTTS.values(), ids=TTTS)
def test_ttt(
    options: Options, norm: str, make_net: NetMaker, make_stream: StreamMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are forwarded one after the other, in torch's own training mode; their gradients are averaged."""
    options = Options(lr=0.02) | options
    episodic = options.get("mode") == "episodic"
    net = build_rotation_net(make_net(3, norm=norm))
    monkeypatch.setattr(TTT, "make_copies", lambda _, x, *__: fixed_copies(x))
    adapter = TTT(net, copies=6, **options)
    names = {n for n, _ in net.named_parameters() if not n.startswith(("model.stages.1", "model.fc"))}
    for number, x in enumerate(make_stream(5, 4, 1, 8, 3, 6)):
        if number == 0 or episodic:
            twin = copy.deepcopy(net)
            learning = [p for n, p in twin.named_parameters() if n in names]
            optimizer = make_optimizer(learning, options)
        for _ in range(options.get("steps", 10 if episodic else 1)):
            optimizer.zero_grad()
            for images, angles in zip(*fixed_copies(x), strict=True):
                loss = nn.functional.cross_entropy(twin.train().forward_rotation(images), angles)
                (loss / len(x)).backward()
            optimizer.step()
        logits = twin.eval()(x)
        assert_near(adapter(x), logits)
        assert (logits - net(x)).abs().max() > 1e-3
    state, start, wanted = adapter.state_dict(), net.state_dict(), twin.state_dict()
    found = {name[6:]: t for name, t in state.items() if name.startswith("model.")}
    for name, value in found.items():
        assert_near(value, wanted[name])
    assert {n for n in names if not torch.equal(found[n], start[n])} == names


def draw_copies(adapter: TTT, x: Tensor) -> tuple[Tensor, ...]:
    with adapter.random_state.generator() as generator:
        return adapter.random_inputs(x, generator)


def test_copies_are_turned_crops_and_mirror_images(make_net: NetMaker, make_stream: StreamMaker) -> None:
    """Turned back by its label, each copy is one of the 50 that there are with padding 2; all kinds occur."""
    adapter, (x,) = TTT(build_rotation_net(make_net(3)), copies=300, padding=2), make_stream(2)
    copies, angles = adapter.make_copies(x, *draw_copies(adapter, x))
    kinds = torch.zeros(50)
    for image, own_copies, own_angles in zip(x, copies, angles.tolist(), strict=True):
        wide = nn.functional.pad(image, (2, 2, 2, 2))
        crops = [wide[:, a : a + 12, b : b + 12] for a in range(5) for b in range(5)]
        known = torch.stack([*crops, *(crop.flip(-1) for crop in crops)])
        for turned, angle in zip(own_copies, own_angles, strict=True):
            same = (known == turned.rot90(-angle, (-2, -1))).flatten(1).all(1)
            assert int(same.sum()) == 1
            kinds += same
    assert kinds.min() >= 1
    assert float(kinds[25:].sum()) / 600 == pytest.approx(0.5, abs=0.1)
    assert (angles.flatten().bincount(minlength=4) / 600 - 0.25).abs().max() < 0.08
    assert not torch.equal(adapter.make_copies(x, *draw_copies(adapter, x))[0], copies)


def test_defaults_are_the_paper_s() -> None:
    usual = read_defaults(TTT)
    wanted = {"lr": 1e-3, "mode": "online", "copies": 32, "optimizer": "sgd", "momentum": 0.0}
    assert wanted.items() <= usual.items()
