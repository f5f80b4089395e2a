"""Every registered method runs through the conformance suite by itself; and the suite can fail."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttvd
from ttvd import testing
from ttvd.methods import Adapter, GradientAdapter, Step
from ttvd.nn.norms import Statistics
from ttvd.nn.views import AggregatedViews
from ttvd.testing import CHECKS, ConformanceError, make_world


def make_batches() -> list[Tensor]:
    return list(torch.rand(3, 6, 1, 8, 8, generator=torch.Generator().manual_seed(2)))


IDLE = {"source", "bn", "lame"}
"""Methods that learn nothing from one batch to the next."""


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", list(ttvd.list_methods()))
def test_registered_methods_keep_every_promise(name: str, norm: str) -> None:
    net, make = make_world(name, norm=norm)
    assert len(ttvd.check_adapter(make, net, make_batches())) == len(CHECKS)


@pytest.mark.parametrize("name", [name for name in ttvd.list_methods() if name not in IDLE])
def test_the_promises_are_not_empty(name: str) -> None:
    _, make = make_world(name)
    adapter = make()
    before = adapter.snapshot()
    for batch in make_batches():
        adapter(batch)
    after = adapter.snapshot()
    assert any(
        before[key].shape != after[key].shape or not torch.equal(before[key], after[key]) for key in after
    )


@pytest.mark.parametrize(
    "name", [name for name, method in ttvd.list_methods().items() if "sites" in method.needs]
)
def test_geometric_methods_on_a_head_without_rotations(name: str) -> None:
    net, make = make_world(name, rotations=False)
    ttvd.check_adapter(make, net, make_batches())


@pytest.mark.parametrize(
    "statistics", [Statistics(momentum=0.1), Statistics(prior=0.5), Statistics(count=4), Statistics.source()]
)
def test_norm_policies_keep_every_promise(statistics: Statistics) -> None:
    net, make = make_world("tent", statistics=statistics)
    ttvd.check_adapter(make, net, make_batches())


@pytest.mark.parametrize("name", ["bn", "tent", "eta", "roid", "rdumb"])
def test_methods_around_aggregated_views(name: str) -> None:
    net = AggregatedViews(make_world("ttvd")[0])
    ttvd.check_adapter(lambda: ttvd.create(name, net), net, make_batches())


ANY_NORM = [
    "tent",
    "t3a",
    "tast",
    "shot",
    "conjugate",
    "sar",
    "eta",
    "rdumb",
    "cotta",
    "lame",
    "roid",
    "deyo",
]


@pytest.mark.parametrize("name", ANY_NORM)
def test_methods_with_layer_norm(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    parameters: dict[str, Any] = {"views": 2} if name == "cotta" else {}
    ttvd.check_adapter(lambda: ttvd.create(name, net, **parameters), net, make_batches())


def test_running_averages_of_norms_with_an_activation_inside() -> None:
    timm_layers = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), timm_layers.BatchNormAct2d(4), nn.Flatten(), nn.Linear(144, 3))
    statistics = Statistics(momentum=0.1)
    ttvd.check_adapter(lambda: ttvd.create("tent", net, statistics=statistics), net, make_batches())


class Sound(GradientAdapter):
    """Nothing wrong with it: the base of the broken ones below."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, lr=0.01)
        self.calls = 0

    def loss(self, x: Tensor) -> Step:
        logits = self.output(x)
        return Step(logits, logits.square().mean(), torch.ones_like(self.kept))


class Forgetful(Sound):
    """Keeps a count outside of its state."""

    def loss(self, x: Tensor) -> Step:
        self.calls += 1
        step = super().loss(x)
        return step._replace(out=step.out + self.calls)


class Careless(Sound):
    """Learns while predicting."""

    def output(self, x: Tensor) -> Tensor:
        for p in self.model.parameters():
            p.data.add_(0.01)
        return super().output(x)


class Intrusive(Sound):
    """Changes the model that it was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.theirs = [model]

    def loss(self, x: Tensor) -> Step:
        with torch.no_grad():
            next(self.theirs[0].parameters()).add_(0.1)
        return super().loss(x)


class Random(Sound):
    """Draws from the global generator."""

    def loss(self, x: Tensor) -> Step:
        step = super().loss(x)
        return step._replace(out=step.out + torch.rand(()))


class Hoarding(Sound):
    """Keeps every batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.hoard: list[Tensor] = []

    def loss(self, x: Tensor) -> Step:
        self.hoard.append(x.clone())
        return super().loss(x)


class Scribbling(Sound):
    """Writes into its input."""

    def loss(self, x: Tensor) -> Step:
        x.mul_(0.5)
        return super().loss(x)


class Fragile(Sound):
    """Divides by the spread of the batch."""

    def loss(self, x: Tensor) -> Step:
        step = super().loss(x)
        return step._replace(out=step.out / x.std((1, 2, 3))[:, None])


def test_a_sound_method_passes() -> None:
    net = make_world("tent")[0]
    ttvd.check_adapter(lambda: Sound(net), net, make_batches())


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (Forgetful, "after reset"),
        (Careless, r"reset|predict"),
        (Intrusive, r"user's model|identical"),
        (Random, r"reset|random generator"),
        (Hoarding, "memory must not grow"),
        (Scribbling, "input must not be modified"),
        (Fragile, "all 0.0 must be survived"),
    ],
)
def test_a_broken_promise_is_named(broken: Callable[[nn.Module], Adapter], promise: str) -> None:
    net = make_world("tent")[0]
    with pytest.raises(ConformanceError, match=promise):
        ttvd.check_adapter(lambda: broken(net), net, make_batches())


def test_steps_fail_at_every_call_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    net, calls, tried = make_world("tent")[0], list[nn.Module](), Counter[bool]()
    handles = [part.register_forward_hook(lambda part, *_: calls.append(part)) for part in net.modules()]
    net(make_batches()[0])
    for handle in handles:
        handle.remove()
    fail = testing._fail

    def count(output: Any, backward: bool) -> Any:
        tried[backward] += 1
        return fail(output, backward)

    monkeypatch.setattr(testing, "_fail", count)
    testing.check_failed_steps(lambda: Sound(net), net, make_batches())
    assert tried[False] == len(calls)
    norms = sum(isinstance(part, nn.BatchNorm2d) for part in calls)
    assert norms < tried[True] < len(calls), "once for each tensor that has a gradient"


def test_too_few_batches_are_refused() -> None:
    net = make_world("tent")[0]
    with pytest.raises(ValueError, match="three batches"):
        ttvd.check_adapter(lambda: Sound(net), net, make_batches()[:2])
