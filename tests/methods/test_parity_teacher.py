"""CoTTA and MEMO against plain twins: copies of the network, hand-written batch norm, torch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.methods import assert_near, read_defaults
from ttvd.methods.cotta import CoTTA
from ttvd.methods.memo import MEMO
from ttvd.nn.resnet import ResNet

NetMaker = Callable[..., ResNet]
TwinMaker = Callable[..., Any]
StreamMaker = Callable[..., list[Tensor]]
Options = dict[str, Any]


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


def make_optimizer(parameters: Any, options: Options) -> torch.optim.Optimizer:
    if options.get("optimizer", "adam") == "adam":
        return torch.optim.Adam(parameters, lr=options["lr"])
    return torch.optim.SGD(parameters, lr=options["lr"], momentum=0.9, nesterov=True)


def change(x: Tensor, number: int) -> Tensor:
    """Stands for a random augmentation: the ``number``-th view."""
    return x.roll(number, -1) ** (1 + 0.1 * number)


def fixed_views(x: Tensor, count: int, *_: Any) -> Tensor:
    return torch.stack([change(image, n) for image in x for n in range(count)])


@pytest.fixture(autouse=True)
def fixed_augmentations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three views in turn for CoTTA, which asks for them one by one; as many as it wants for MEMO."""
    numbers = cycle(range(3))
    monkeypatch.setattr("ttvd.methods.cotta.augment", lambda x, *_: change(x, next(numbers)))
    monkeypatch.setattr("ttvd.methods.memo.augmix", fixed_views)


def mean_cross_entropy(targets: Tensor, logits: Tensor) -> Tensor:
    rows = []
    for target, row in zip(targets, logits, strict=True):
        p = torch.exp(target) / torch.exp(target).sum()
        rows.append(-(p * (row - torch.log(torch.exp(row).sum()))).sum())
    return torch.stack(rows).mean()


class NaiveCoTTA:
    """Three copies of a network on the statistics of the batch; all weights of the student learn."""

    def __init__(self, twin: nn.Module, options: Options) -> None:
        self.anchor, self.teacher = (copy.deepcopy(twin).requires_grad_(False) for _ in range(2))
        self.student, self.options = copy.deepcopy(twin).requires_grad_(True), options
        self.optimizer = make_optimizer(self.student.parameters(), options)
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


COTTAS: dict[str, Options] = {
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
    options: Options, norm: str, make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker
) -> None:
    """Some batches are above the threshold and some below; without forgetting nobody goes back."""
    net, stream = make_net(3, norm=norm), make_stream(8, 5, 8, 1, 6, 8)
    twin = make_twin(net)
    sure = sorted(float(twin(x).softmax(1).amax(1).mean().detach()) for x in stream)
    options = Options(lr=0.01, views=3, threshold=sum(sure[2:4]) / 2, alpha=0.9) | options
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
@pytest.mark.parametrize(
    "options",
    [{"views": 5, "prior": 16 / 17}, {"steps": 3, "views": 2, "prior": 0.5}, {"views": 4, "prior": 1.0}],
)
def test_memo(
    options: Options, norm: str, make_net: NetMaker, make_twin: TwinMaker, make_stream: StreamMaker
) -> None:
    """Every image starts from the source, whatever came before it."""
    net = make_net(3, norm=norm)
    adapter, twin = MEMO(net, lr=0.05, **options), make_twin(net, prior=options["prior"])
    for x in make_stream(4, 1, 3, 2, 5):
        rows = []
        for image in x:
            own = copy.deepcopy(twin).requires_grad_(True)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
            for _ in range(options.get("steps", 1)):
                logits = own(fixed_views(image[None], options["views"]))
                p = torch.stack([torch.exp(row) / torch.exp(row).sum() for row in logits]).mean(0)
                optimizer.zero_grad()
                (-(p * torch.log(p)).sum()).backward()
                optimizer.step()
            rows.append(own(image[None])[0].detach())
        assert_near(adapter(x), torch.stack(rows))
        source = torch.cat([twin(image[None]) for image in x])
        assert_near(adapter.predict(x), source)
        assert (torch.stack(rows) - source).abs().max() > 1e-3


CONSTANTS: dict[type[nn.Module], Options] = {
    CoTTA: {"lr": 1e-3, "optimizer": "adam", "views": 32, "threshold": 0.92, "alpha": 0.999, "restore": 0.01},
    MEMO: {"lr": 0.005, "steps": 1, "views": 32, "prior": 16 / 17},
}


@pytest.mark.parametrize("method", CONSTANTS)
def test_defaults_are_those_of_the_papers(method: type[nn.Module]) -> None:
    usual = read_defaults(method)
    assert CONSTANTS[method].items() <= usual.items()
