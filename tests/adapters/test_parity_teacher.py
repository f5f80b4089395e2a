"""CoTTA, MEMO and TTT against plain twins: copies of the network, hand-written batch norm, torch's optimizers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttvd.adapters.cotta import CoTTA
from ttvd.adapters.memo import MEMO
from ttvd.adapters.ttt import TTT
from ttvd.models.resnet import ResNet
from ttvd.models.rotation import RotationNet

NetMaker = Callable[..., ResNet]
TwinMaker = Callable[..., Any]
StreamMaker = Callable[..., list[Tensor]]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-8, atol=1e-8)


def read_network(adapter: nn.Module, name: str) -> dict[str, Tensor]:
    state = adapter.state_dict()
    return {key.removeprefix(f"{name}."): t for key, t in state.items() if key.startswith(f"{name}.")}


def assert_weights(adapter: nn.Module, name: str, twin: nn.Module, start: nn.Module) -> None:
    """All weights of a network are the twin's, and they moved."""
    found, wanted = read_network(adapter, name), dict(twin.named_parameters())
    assert set(found) == set(wanted)
    for key, parameter in wanted.items():
        assert_near(found[key], parameter)
    moved = max(float((found[key] - p).abs().max().detach()) for key, p in start.named_parameters())
    assert moved > 1e-3, f"nothing moved by more than {moved:.1e}: this shows nothing"


def make_optimizer(parameters: Any, options: dict[str, Any], usual: str) -> torch.optim.Optimizer:
    momentum = options.get("momentum", 0.9 if usual == "adam" else 0.0)
    if options.get("optimizer", usual) == "adam":
        return torch.optim.Adam(parameters, lr=options["lr"], betas=(momentum, 0.999))
    return torch.optim.SGD(parameters, lr=options["lr"], momentum=momentum, nesterov=momentum > 0)


def change(x: Tensor, number: int) -> Tensor:
    """Stands for a random augmentation: the ``number``-th view."""
    return x.roll(number, -1) ** (1 + 0.1 * number)


def fixed_views(x: Tensor, count: int, _: Any) -> Tensor:
    return torch.stack([change(image, n) for image in x for n in range(count)])


def mean_cross_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    rows = []
    for target, row in zip(targets, logits, strict=True):
        p = torch.exp(target) / torch.exp(target).sum()
        rows.append(-(p * (row - torch.log(torch.exp(row).sum()))).sum())
    return torch.stack(rows).mean()


class NaiveCoTTA:
    """Three copies of a network on the statistics of the batch; all weights of the student learn."""

    def __init__(self, twin: nn.Module, options: dict[str, Any]) -> None:
        self.anchor, self.teacher = (copy.deepcopy(twin).requires_grad_(False) for _ in range(2))
        self.student, self.options = copy.deepcopy(twin).requires_grad_(True), options
        self.optimizer = make_optimizer(self.student.parameters(), options, "adam")
        self.unsure = 0

    def ask_teacher(self, x: Tensor) -> Tensor:
        confidence = [max(row.softmax(0).tolist()) for row in self.anchor(x)]
        if sum(confidence) / len(confidence) >= self.options["threshold"]:
            return self.teacher(x)  # type: ignore[no-any-return]
        self.unsure += 1
        return torch.stack([self.teacher(change(x, n)) for n in range(3)]).sum(0) / 3

    def take_step(self, x: Tensor) -> Tensor:
        target, logits = self.ask_teacher(x), self.student(x)
        loss = mean_cross_entropy(target, logits)
        if self.options.get("agreement") == "symmetric":
            loss = 0.5 * loss + 0.5 * mean_cross_entropy(logits, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        share = self.options.get("alpha", 0.999)
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.data = share * old.data + (1 - share) * new.data
        return target

    def forget(self, found: dict[str, Tensor]) -> tuple[int, int]:
        """Follow the adapter in which weights went back; every weight must be the old one or the new one."""
        source, back, total = dict(self.anchor.named_parameters()), 0, 0
        for name, new in self.student.named_parameters():
            went = (found[name] == source[name]) & (new != source[name])
            new.data = torch.where(went, source[name], new.data)
            back, total = back + int(went.sum()), total + int((new != source[name]).sum() + went.sum())
        return back, total


COTTAS: dict[str, dict[str, Any]] = {
    "never forgets": {"restore": 0.0},
    "forgets everything": {"restore": 1.0},
    "forgets some": {"restore": 0.3},
    "symmetric, fast teacher": {"restore": 0.0, "agreement": "symmetric", "alpha": 0.6},
    "sgd, fast teacher, forgets": {"restore": 0.1, "alpha": 0.8, "optimizer": "sgd", "lr": 0.05},
    "two steps, after": {"restore": 0.0, "steps": 2, "prediction": "after"},
    "always sure": {"restore": 0.0, "threshold": 0.0, "agreement": "symmetric"},
    "never sure": {"restore": 0.0, "threshold": 1.1},
}


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("options", COTTAS.values(), ids=COTTAS)
def test_cotta(
    options: dict[str, Any],
    norm: str,
    make_net: NetMaker,
    make_twin: TwinMaker,
    make_stream: StreamMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some batches are above the threshold and some below; without forgetting nobody goes back."""
    net, stream = make_net(3, norm=norm), make_stream(8, 5, 8, 1, 6, 8)
    twin = make_twin(net)
    sure = sorted(float(twin(x).softmax(1).amax(1).mean().detach()) for x in stream)
    options = {"lr": 0.01, "views": 3, "threshold": sum(sure[2:4]) / 2, "alpha": 0.9} | options
    calls = iter(range(1000))
    monkeypatch.setattr("ttvd.adapters.cotta.augment", lambda x, *_, **__: change(x, next(calls) % 3))
    adapter, naive = CoTTA(net, **options), NaiveCoTTA(twin, options)
    back = total = 0
    for x in stream:
        found = adapter(x)
        for _ in range(options.get("steps", 1)):
            wanted = naive.take_step(x)
            counts = naive.forget(read_network(adapter, "model")) if options["restore"] else (0, 1)
            back, total = back + counts[0], total + counts[1]
        assert_near(found, naive.teacher(x) if options.get("prediction") == "after" else wanted)
        assert_near(adapter.predict(x), naive.teacher(x))
    assert naive.unsure == {0.0: 0, 1.1: 6}.get(options["threshold"], 3) * options.get("steps", 1)
    assert back / total == pytest.approx(options["restore"], abs=0.03)
    assert_weights(adapter, "teacher", naive.teacher, net)
    assert_weights(adapter, "model", naive.student, net if options["restore"] < 1 else naive.teacher)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("steps", "views", "prior"), [(1, 5, 16 / 17), (3, 2, 0.5), (1, 4, 1.0)])
def test_memo(
    steps: int,
    views: int,
    prior: float,
    norm: str,
    make_net: NetMaker,
    make_twin: TwinMaker,
    make_stream: StreamMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every image starts from the source, whatever came before it."""
    monkeypatch.setattr("ttvd.adapters.memo.augmix", fixed_views)
    net = make_net(3, norm=norm)
    adapter, twin = MEMO(net, lr=0.05, steps=steps, views=views, prior=prior), make_twin(net, prior=prior)
    for x in make_stream(4, 1, 3, 2, 5):
        rows = []
        for image in x:
            own = copy.deepcopy(twin).requires_grad_(True)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
            for _ in range(steps):
                logits = own(fixed_views(image[None], views, None))
                p = torch.stack([torch.exp(row) / torch.exp(row).sum() for row in logits]).mean(0)
                optimizer.zero_grad()
                (-(p * torch.log(p)).sum()).backward()
                optimizer.step()
            rows.append(own(image[None])[0].detach())
        assert_near(adapter(x), torch.stack(rows))
        source = torch.cat([twin(image[None]) for image in x])
        assert_near(adapter.predict(x), source)
        assert (torch.stack(rows) - source).abs().max() > 1e-3


def build_rotation_net(net: ResNet) -> RotationNet:
    model = RotationNet(net, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        model.rotation.fc.weight.mul_(50)
    return model.eval()


def fixed_copies(x: Tensor) -> tuple[Tensor, Tensor]:
    """Six copies of each image, turned by 0, 90, 180, 270, 0 and 90 degrees."""
    copies = [change(x, n).rot90(n % 4, (-2, -1)) for n in range(6)]
    return torch.stack(copies, 1), torch.tensor([0, 1, 2, 3, 0, 1]).expand(len(x), 6)


TTTS: dict[str, dict[str, Any]] = {
    "online": {},
    "online, two steps, momentum": {"steps": 2, "momentum": 0.9},
    "online, adam, small chunks": {"optimizer": "adam", "lr": 0.01, "chunk": 3},
    "episodic": {"mode": "episodic"},
    "episodic, three steps, momentum": {"mode": "episodic", "steps": 3, "momentum": 0.5},
}


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("options", TTTS.values(), ids=TTTS)
def test_ttt(
    options: dict[str, Any],
    norm: str,
    make_net: NetMaker,
    make_stream: StreamMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images are forwarded one after the other, in torch's own training mode; their gradients are averaged."""
    options = {"lr": 0.02} | options
    episodic = options.get("mode") == "episodic"
    net = build_rotation_net(make_net(3, norm=norm))
    monkeypatch.setattr(TTT, "make_copies", lambda _, x: fixed_copies(x))
    adapter = TTT(net, copies=6, **options)
    names = {n for n, _ in net.named_parameters() if not n.startswith(("model.stages.1", "model.fc"))}
    for number, x in enumerate(make_stream(5, 4, 1, 8, 3, 6)):
        if number == 0 or episodic:
            twin = copy.deepcopy(net)
            learning = [p for n, p in twin.named_parameters() if n in names]
            optimizer = make_optimizer(learning, options, "sgd")
        for _ in range(options.get("steps", 10 if episodic else 1)):
            optimizer.zero_grad()
            for images, angles in zip(*fixed_copies(x), strict=True):
                loss = nn.functional.cross_entropy(twin.train().forward_rotation(images), angles)
                (loss / len(x)).backward()
            optimizer.step()
        logits = twin.eval()(x)
        assert_near(adapter(x), logits)
        assert (logits - net(x)).abs().max() > 1e-3
    found, start, wanted = read_network(adapter, "model"), net.state_dict(), twin.state_dict()
    for name, value in found.items():
        assert_near(value, wanted[name])
    assert {n for n in names if not torch.equal(found[n], start[n])} == names


def test_copies_are_turned_crops_and_mirror_images(make_net: NetMaker, make_stream: StreamMaker) -> None:
    """Turned back by its label, each copy is one of the 50 that there are with padding 2; all kinds occur."""
    adapter, (x,) = TTT(build_rotation_net(make_net(3)), copies=300, padding=2), make_stream(2)
    copies, angles = adapter.make_copies(x)
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
    assert not torch.equal(adapter.make_copies(x)[0], copies)


CONSTANTS: dict[type[nn.Module], dict[str, Any]] = {
    CoTTA: {"lr": 1e-3, "optimizer": "adam", "views": 32, "threshold": 0.92, "alpha": 0.999, "restore": 0.01},
    MEMO: {"lr": 0.005, "steps": 1, "views": 32, "prior": 16 / 17},
    TTT: {"lr": 1e-3, "mode": "online", "copies": 32, "optimizer": "sgd", "momentum": 0.0},
}


@pytest.mark.parametrize("method", CONSTANTS)
def test_defaults_are_those_of_the_papers(method: type[nn.Module]) -> None:
    usual = {name: p.default for name, p in inspect.signature(method).parameters.items()}
    assert CONSTANTS[method].items() <= usual.items()
