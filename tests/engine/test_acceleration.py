"""Recordings and compiled networks, as far as they can be seen on a CPU."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from ttvd.engine.step_inputs import Plan

import ttvd
from ttvd.engine.compiling import compile_once
from ttvd.engine.flat import all_finite, keep_where
from ttvd.engine.graph_guard import GraphGuard
from ttvd.engine.step_runner import find_obstacle
from ttvd.nn.resnet import ResNet
from ttvd.testing import make_world

EAGER = {"cotta", "memo", "roid", "rotta", "tast-bn"}


def make_batches(count: int = 3) -> list[Tensor]:
    return list(torch.rand(count, 6, 1, 8, 8, generator=torch.Generator().manual_seed(2)))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What is compiled once for a process is not what another test has compiled."""
    compile_once.cache_clear()
    yield
    compile_once.cache_clear()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["tent", "ttvd", "sar"])
def test_compiled_networks_give_the_same_from_the_second_batch_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[int] = []
    judges: list[str] = []
    whole = torch.compile

    def count(module: Any, _: Any) -> Any:
        graphs.append(1)
        return module.forward

    def watch(code: Any, **options: Any) -> Any:
        judges.extend([code.__name__] if code.__name__ == "_judge" else [])
        return whole(code, backend=count, **options)

    monkeypatch.setattr(torch, "compile", watch)
    _, make = make_world(name)
    adapter, plain = make().accelerate(compile=True), make()
    first, *rest = make_batches(4)
    assert torch.equal(adapter(first), plain(first))
    assert not graphs
    for x in rest:
        assert torch.allclose(adapter(x).softmax(1), plain(x).softmax(1), atol=1e-4)
    known = len(graphs)
    assert known >= 1
    for key, value in plain.snapshot().items():
        assert torch.allclose(adapter.snapshot()[key], value, atol=1e-3), key
    assert torch.allclose(adapter(first[:3]).softmax(1), plain(first[:3]).softmax(1), atol=1e-4)
    assert torch.allclose(adapter.predict(first).softmax(1), plain.predict(first).softmax(1), atol=1e-4)
    assert len(graphs) == known
    check_copies(adapter, plain, first)
    assert judges == (["_judge"] if name == "ttvd" else []), "once for all, and where there is one"


def check_copies(adapter: ttvd.Adapter, plain: ttvd.Adapter, x: Tensor) -> None:
    """A compiled adapter is copied and saved as any other, and the copies go on as it does."""
    copies = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]  # noqa: S301
    wanted = [plain(x).softmax(1) for _ in range(3)]
    for one in (adapter, *copies):
        assert one.compiled
        for answer in wanted:
            assert torch.allclose(one(x).softmax(1), answer, atol=1e-3)


@pytest.mark.parametrize("name", list(ttvd.list_methods()))
def test_methods_say_whether_they_can_be_recorded(name: str) -> None:
    adapter = make_world(name)[1]()
    inside = getattr(adapter, "adapter", adapter)
    assert (find_obstacle(inside, torch.device("cpu")) is not None) == (name in EAGER)
    if name not in EAGER:
        assert "host" in str(find_obstacle(inside, torch.device("meta"))) or not inside.snapshot()


def test_hooks_stand_against_a_recording() -> None:
    adapter = make_world("tent")[1]()
    adapter.model.register_forward_hook(lambda *_: None)
    assert "hooks" in str(find_obstacle(adapter, torch.device("cpu")))


CHANGES: dict[str, Callable[[Any], object]] = {
    "learning rate": lambda tent: setattr(tent.optimizer, "lr", 0.5),
    "attribute": lambda tent: setattr(tent, "note", "new"),
    "validation": lambda tent: setattr(tent, "validation", "never"),
    "method": lambda tent: setattr(tent, "loss", lambda x: None),
    "requires_grad": lambda tent: tent.adapting()[0].requires_grad_(False),
    "storage": lambda tent: setattr(tent.adapting()[0], "data", tent.adapting()[0].data.clone()),
    "parameter": lambda tent: setattr(tent.model.norm1, "weight", nn.Parameter(torch.ones(8))),
    "layer": lambda tent: setattr(tent.model, "norm1", nn.Identity()),
    "hook": lambda tent: tent.model.register_forward_hook(lambda *_: None),
    "double": lambda tent: tent.double(),
}


@pytest.mark.parametrize("what", [None, *CHANGES])
def test_traits_see_what_a_step_depends_on(what: str | None) -> None:
    adapter, (x, *_) = make_world("tent")[1](), make_batches()
    adapter(x)
    before = GraphGuard(adapter, "cpu")
    adapter(x)
    adapter.reset()
    adapter.load_state_dict(adapter.state_dict())
    if what is not None:
        CHANGES[what](adapter)
    assert before.is_valid() == (what is None)


@pytest.mark.parametrize("autocast", [False, True])
def test_traits_see_autocast(autocast: bool) -> None:
    adapter = make_world("tent")[1]()
    before = GraphGuard(adapter, "cpu")
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        assert before.is_valid() != autocast


class OnDevice(Tensor):
    """Says that it is where steps are recorded."""

    is_cuda = True


class Tape:
    """Stands for a recording: notes what is recorded and played."""

    def __init__(self, adapter: ttvd.Adapter, x: Tensor, plan: Plan) -> None:
        self.adapter, self.way = adapter, plan.way
        LOG.append(f"record {len(x)}")
        if len(x) == 5:
            raise RuntimeError("five is too much\nand more")

    def play(self, x: Tensor, plan: Plan) -> Tensor:
        LOG.append(f"play {len(x)}")
        assert plan.way == self.way
        self.adapter.agenda.begin(plan, plan.draws)
        return self.adapter._take(x, checked=False)


LOG: list[str] = []


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.setattr("ttvd.engine.step_runner.Recording", Tape)

    def feed(adapter: ttvd.Adapter, *sizes: int) -> list[str]:
        LOG.clear()
        for size in sizes:
            adapter(make_batches(1)[0][:size].as_subclass(OnDevice))
        return list(LOG)

    return feed


def test_a_shape_is_recorded_when_it_comes_again(feed: Callable[..., list[str]]) -> None:
    tent = make_world("tent")[1]()
    assert feed(tent, 6, 6, 6, 3, 6) == ["record 6", "play 6", "play 6", "play 6"]
    assert feed(tent, 3, 6) == ["record 3", "play 3", "play 6"]
    assert feed(tent, 1, 2, 4, 6, 3) == ["play 6"]  # three was not seen for longest
    tent.optimizer.lr = 0.5  # type: ignore[union-attr]
    assert feed(tent, 3, 3, 3) == ["record 3", "play 3", "play 3"]
    tent.float()
    assert feed(tent, 3, 3) == ["record 3", "play 3"]
    tent.capture = "never"
    assert feed(tent, 3, 3) == []


def test_each_way_of_a_step_is_recorded(feed: Callable[..., list[str]]) -> None:
    """Every second batch of 4 completes a period of 8, after which the memory is learnt from."""
    note = make_world("note", period=8, capacity=4)[1]()
    log = feed(note, *[4] * 8)
    assert log == ["record 4", "play 4", "record 4", "play 4", *["play 4"] * 4]


def test_many_ways_of_one_shape_are_remembered(feed: Callable[..., list[str]]) -> None:
    """Of batches of 4, the period of 10 falls into another place each time: five ways, in turn."""
    note = make_world("note", period=10, capacity=4)[1]()
    feed(note, *[4] * 10)
    assert feed(note, *[4] * 10) == ["play 4"] * 10


def test_what_cannot_be_recorded_is_said_once(feed: Callable[..., list[str]]) -> None:
    tent = make_world("tent")[1]()
    with pytest.warns(UserWarning, match="five is too much") as caught:
        assert feed(tent, 5, 5, 5, 6, 6) == ["record 5"]
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="on the host"):
        assert feed(make_world("roid")[1](), 6, 6, 6) == []


def test_the_guard_spreads_and_leaves_other_devices_alone() -> None:
    image, count, far = torch.ones(2, 3), torch.tensor([5]), torch.ones(2, device="meta")
    keep_where(torch.tensor(False), [image, count, far], [torch.zeros(2, 1), torch.tensor([4]), far])
    assert image.sum() == 0
    assert count.item() == 4
    assert not all_finite(torch.tensor([float("-inf"), 0.0]))


def test_skipped_layers_share_their_weights_with_the_model() -> None:
    net = ResNet(3, in_channels=1, widths=(8, 8), blocks=(1, 1))
    sar = ttvd.create("sar", net, skip=("stages.1",))
    assert isinstance(sar, ttvd.GradientAdapter)
    assert len(sar.adapting()) == 6
    assert sar.optimizer.size == 48


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "when"), [("tent", "forward"), ("ttvd", "backward")])
def test_where_the_compiler_fails_steps_run_as_they_are_written(
    name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.exc import InductorError

    def refuse(module: Any, _: Any) -> Any:
        raise InductorError(RuntimeError("PassManager::run failed"), None)

    def accept(module: Any, _: Any) -> Any:
        return make_boxed_func(module.forward)

    parts = {"fw_compiler": refuse if when == "forward" else accept, "bw_compiler": refuse}
    backend = aot_autograd(**parts)
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda code, **options: whole(code, backend=backend, **options))
    adapter, plain = make_world(name)[1]().accelerate(compile=True), make_world(name)[1]()
    first, *rest = make_batches(4)
    assert torch.equal(adapter(first), plain(first))
    with pytest.warns(UserWarning, match=r"not compiled: torch.compile failed: .*PassManager::run failed"):
        assert torch.equal(adapter(rest[0]), plain(rest[0]))
    for x in rest[1:]:
        assert torch.equal(adapter(x), plain(x))
    for key, value in plain.snapshot().items():
        assert torch.equal(adapter.snapshot()[key], value), key


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("fresh_compiler")
def test_errors_that_are_not_the_compilers_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, adapt, broken = torch.compile, ttvd.Adapter.adapt, False

    def fail_if_broken(adapter: ttvd.Adapter, x: Tensor) -> Tensor:
        if broken:
            raise RuntimeError("out of order")
        return adapt(adapter, x)

    monkeypatch.setattr(torch, "compile", lambda code, **options: whole(code, backend="eager", **options))
    monkeypatch.setattr(ttvd.Adapter, "adapt", fail_if_broken)
    adapter = make_world("bn")[1]().accelerate(compile=True)
    x = make_batches()[0]
    adapter(x)
    broken = True
    with pytest.raises(RuntimeError, match="out of order"):
        adapter(x)
    assert not adapter._steps.uncompiled
    assert list(adapter._steps._shapes) == [(x.shape, x.dtype, None)], "it was the second batch of its shape"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:RoTTA runs as it is written")
@pytest.mark.parametrize("right", [1, 3])
def test_the_compiler_may_fail_at_a_later_step_too(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoTTA's memory grows, and with it what is compiled."""
    whole, calls = torch.compile, [0]

    def fail_later(module: Any, _: Any) -> Any:
        calls[0] += 1
        if calls[0] > right:
            raise RuntimeError("PassManager::run failed")
        return module.forward

    monkeypatch.setattr(torch, "compile", lambda code, **options: whole(code, backend=fail_later, **options))
    _, make = make_world("rotta", capacity=64, period=6)
    adapter, plain = make().accelerate(compile=True), make()
    for x in make_batches(8):
        torch.testing.assert_close(adapter(x), plain(x))
    assert adapter._steps.uncompiled
    for key, value in plain.snapshot().items():
        torch.testing.assert_close(adapter.snapshot()[key], value, msg=key)
