"""Steps as transactions: errors, interrupts, readers and writers in threads, states that are refused."""

import copy
import multiprocessing
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ttvd
from tests.helpers.engine import compiling_by, make_batches
from ttvd.engine import transaction
from ttvd.engine.transaction import Transaction
from ttvd.methods import Adapter
from ttvd.methods.policies import Episodic, ResetEvery
from ttvd.testing import _interrupting as interrupting
from ttvd.testing import make_world

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def large_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of memories are noted, as those of large ones are. The conformance suite has small ones."""
    monkeypatch.setattr(transaction, "LARGE", 0)


def make(name: str) -> Adapter:
    return make_world(name)[1]()


def read_all(adapter: Adapter) -> State:
    return {**adapter.snapshot(), "kept": adapter.kept.clone()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class FailAt(TorchDispatchMode):
    """Raises an error in place of an operation of torch, by its number."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.number, self.count = number, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and what keeps the compiler away would be called before every operation."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        if self.count - 1 == self.number:
            raise torch.OutOfMemoryError("no memory for this operation")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    ["ttvd", "roid", "rotta", "cotta", "deyo", "sar", "note", "t3a", "tast", "tast-bn", "adanpc", "rdumb"],
)
def test_an_error_of_any_operation_changes_nothing(name: str) -> None:
    """Sixty operations of a step, forward, backward and in the optimizer, run out of memory in turn."""
    adapter, twin = make(name), make(name)
    first, second, third = make_batches()
    for one in (adapter, twin):
        one(first)
    with FailAt() as trace:
        twin(second)
    before = read_all(adapter)
    # How many views the last copies take depends on where tensors lie in memory: a few more or less.
    last = trace.count - 20
    for number in range(0, last, max(1, last // 60)):
        with pytest.raises(torch.OutOfMemoryError), FailAt(number):
            adapter(second)
        assert same(read_all(adapter), before), number
    assert torch.is_grad_enabled()
    adapter(second)
    assert torch.equal(adapter(third), twin(third))
    assert same(read_all(adapter), read_all(twin))


def measure(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in this thread when the time is over."""

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("name", ["ttvd", "cotta", "rotta", "t3a"])
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # interrupts in callbacks of weak references
def test_a_hundred_interrupts_leave_a_hundred_whole_states(name: str) -> None:
    adapter, twin = make(name), make(name)
    first, second, third = make_batches()
    for one in (adapter, twin):
        one(first)
    before = read_all(adapter)
    twin(second)
    after = read_all(twin)
    length, draw = min(measure(lambda: adapter(second)) for _ in range(3)), random.Random(0)
    whole = interrupted = 0
    for _ in range(100):
        adapter.restore(before)
        adapter.kept.copy_(before["kept"])
        try:
            with interrupt_after(draw.uniform(0.05, 1.0) * length):
                adapter(second)
        except KeyboardInterrupt:
            interrupted += 1
        state = read_all(adapter)
        whole += same(state, before) or same(state, after)
    assert whole == 100
    assert interrupted > 20
    adapter.restore(before)
    adapter(second)
    assert torch.equal(adapter(third), twin(third))


def test_a_roll_back_that_is_interrupted_is_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, twin = make("ttvd"), make("ttvd")
    first, second, _ = make_batches()
    for one in (adapter, twin):
        one(first)
    before, prediction = adapter.snapshot(), adapter.predict(second)
    original, calls = Transaction.roll_back, []

    def interrupted(opened: Transaction) -> None:
        calls.append(opened)
        if len(calls) == 1:
            raise KeyboardInterrupt
        original(opened)

    monkeypatch.setattr(Transaction, "roll_back", interrupted)
    with pytest.raises(KeyboardInterrupt), FailAt(200):
        adapter(second)
    assert same(adapter.snapshot(), before)
    assert torch.equal(adapter.predict(second), prediction)
    assert len(calls) == 1
    assert torch.equal(adapter(second), twin(second))
    assert len(calls) == 2
    assert same(adapter.snapshot(), twin.snapshot())


class Pause:
    """Stops a thread at the head of a model until it may go on. A copy of the adapter is never stopped."""

    def __init__(self, adapter: Adapter | None = None) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        if adapter is not None:
            layers = [part for part in adapter.modules() if isinstance(part, nn.Linear)]
            layers[-1].register_forward_hook(self._wait)

    def _wait(self, *_: object) -> None:
        if threading.current_thread() is self.thread and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(20)

    def __reduce__(self) -> Any:
        return Pause, ()

    def run(self, step: Callable[[], object], beside: Callable[[], None]) -> None:
        """Run a step in a thread of its own, and something else while it is stopped."""
        self.thread = threading.Thread(target=step)
        self.thread.start()
        try:
            assert self.reached.wait(20)
            beside()
        finally:
            self.go_on.set()
            self.thread.join()


@pytest.mark.parametrize("name", ["ttvd", "tent", "t3a", "rotta", "note", "rdumb"])
def test_readers_do_not_wait_for_a_step_and_see_the_state_before_it(name: str) -> None:
    adapter, twin = make(name), make(name)
    first, second, third = make_batches()
    for one in (adapter, twin):
        one(first)
    expected, before = adapter.predict(third), adapter.snapshot()
    found: list[Any] = []

    def read() -> None:
        found.extend((adapter.predict(third), adapter.state_dict(), copy.deepcopy(adapter)))
        found.append(pickle.loads(pickle.dumps(adapter)))  # noqa: S301

    Pause(adapter).run(lambda: adapter(second), read)
    prediction, state, *copies = found
    assert torch.equal(prediction, expected)
    assert same(state, before)
    twin(second)
    assert same(adapter.snapshot(), twin.snapshot())
    for one in copies:
        assert same(one.snapshot(), before)
        one(second)
        assert same(one.snapshot(), twin.snapshot())
        assert torch.equal(one(third), copy.deepcopy(twin)(third))


def test_a_step_waits_for_a_reader_and_a_second_step_for_the_first() -> None:
    adapter, twin = make("tent"), make("tent")
    first, second, third = make_batches()
    order: list[str] = []

    def step() -> None:
        adapter(first)
        order.append("step")

    def read() -> None:
        adapter.predict(third)
        order.append("read")

    other = threading.Thread(target=step)

    def beside() -> None:
        other.start()
        other.join(0.05)
        assert other.is_alive()

    Pause(adapter).run(read, beside)
    other.join()
    assert sorted(order) == ["read", "step"]
    twin(first)
    assert same(adapter.snapshot(), twin.snapshot())
    other = threading.Thread(target=step)
    Pause(adapter).run(lambda: adapter(second), beside)
    other.join()
    twin(second)
    twin(first)
    assert same(adapter.snapshot(), twin.snapshot())


def test_a_step_inside_of_a_step_is_refused_and_a_prediction_is_that_of_before() -> None:
    adapter = make("tent")
    first, second, _ = make_batches()
    adapter(first)
    before, expected = adapter.snapshot(), adapter.predict(second)
    found: list[Tensor] = []

    def predict(*_: object) -> None:
        if not found:  # the model that predicts has the same hook
            found.append(torch.empty(0))
            found.append(adapter.predict(second))

    handle = adapter.model.register_forward_hook(predict)
    adapter(second)
    assert torch.equal(found[1], expected)
    handle.remove()
    handle = adapter.model.register_forward_hook(lambda *_: adapter(second) and None)
    before = adapter.snapshot()
    with pytest.raises(RuntimeError, match="inside of its own step"):
        adapter(second)
    handle.remove()
    assert same(adapter.snapshot(), before)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_adapters_in_other_threads_are_not_disturbed() -> None:
    """One compiles, one fails, one learns."""
    batches = make_batches(6)
    quiet, compiled, failing = make("ttvd"), make("tent").accelerate(compile=True), make("roid")
    failing.model.register_forward_hook(lambda *_: 1 / 0)
    expected = make("ttvd")
    alone = [expected(x) for x in batches]

    def fail() -> None:
        for x in batches:
            with suppress(ZeroDivisionError):
                failing(x)

    found: list[Tensor] = []
    with compiling_by("aot_eager"):
        threads = [
            threading.Thread(target=fail),
            threading.Thread(target=lambda: [compiled(x) for x in batches]),
            threading.Thread(target=lambda: found.extend(quiet(x) for x in batches)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(alone, found, strict=True))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("policy", [Episodic, lambda adapter: ResetEvery(adapter, batches=2)])
def test_a_policy_and_its_adapter_change_together(policy: Callable[[Adapter], Adapter]) -> None:
    adapter = policy(make("tent"))
    first, second, _ = make_batches()
    adapter(first)
    before = adapter.snapshot()
    assert any("adapter." not in name for name in before) or policy is Episodic
    for number in (0, 30, 100):
        with pytest.raises(torch.OutOfMemoryError), FailAt(number):
            adapter(second)
        assert same(adapter.snapshot(), before)


def trace_lines(run: Callable[[], object], moment: int | None) -> int:
    """Run something, and raise KeyboardInterrupt before one of its lines; returns the number of lines."""
    with suppress(KeyboardInterrupt), interrupting(moment) as lines:
        run()
    return lines[0]


def read_modes() -> tuple[object, ...]:
    torch.autocast_increment_nesting()
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.autocast_decrement_nesting()


@pytest.mark.parametrize("call", ["step", "predict", "reset", "load_state_dict", "deepcopy"])
def test_an_interrupted_call_gives_back_the_modes_of_the_thread(call: str) -> None:
    """Gradients and autocast; a nesting of autocast that does not end would keep outdated weights for good."""
    adapter = make("ttvd").accelerate(precision="bfloat16")
    first, second, _ = make_batches()
    adapter(first)
    state, modes = adapter.state_dict(), read_modes()
    run: Callable[[], object] = {
        "step": lambda: adapter(second),
        "predict": lambda: adapter.predict(second),
        "reset": adapter.reset,
        "load_state_dict": lambda: adapter.load_state_dict(state),
        "deepcopy": lambda: copy.deepcopy(adapter),
    }[call]
    count = trace_lines(run, None)
    for moment in range(0, count, max(1, count // 150)):
        trace_lines(run, moment)
        assert read_modes() == modes, moment


@pytest.mark.parametrize("name", ["rotta", "ttvd", "t3a", "tast-bn", "sar", "note"])
def test_an_interrupted_prediction_leaves_nothing_behind(name: str) -> None:
    """Neither other statistics of norms nor hooks, which would keep the input of every later pass."""
    adapter, twin = make(name), make(name)
    first, second, _ = make_batches()
    for one in (adapter, twin):
        one(first)
    expected = twin.predict(second)
    count = trace_lines(lambda: adapter.predict(second), None)
    for moment in range(0, count, max(1, count // 80)):
        trace_lines(lambda: adapter.predict(second), moment)
        assert not any(part._forward_pre_hooks for part in adapter.modules()), moment
    assert torch.equal(adapter.predict(second), expected)
    assert torch.equal(adapter(second), twin(second))
    assert same(adapter.snapshot(), twin.snapshot())


class TwoNames(nn.Module):
    """Its norm has two names."""

    def __init__(self, alias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.fc = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        if alias:
            self.again = self.bn

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.bn(self.bn(self.conv(x)).relu()).mean((2, 3)))
        return out


@pytest.mark.parametrize(
    ("name", "parameters"), [("memo", {"views": 2}), ("sar", {"margin": 9.0}), ("deyo", {"margin": 9.0})]
)
def test_a_module_with_two_names_is_like_one_with_a_single_name(
    name: str, parameters: dict[str, Any]
) -> None:
    one, other = (ttvd.create(name, TwoNames(alias).eval(), **parameters) for alias in (True, False))
    start = one.predict(make_batches()[0])
    for x in make_batches():
        assert torch.equal(one(x), other(x))
    assert isinstance(one.model.get_parameter("bn.weight"), nn.Parameter)
    one.reset()
    assert torch.equal(one.predict(make_batches()[0]), start)
    copy.deepcopy(one)(x)


def test_readers_beside_steps_that_fail_see_no_part_of_them() -> None:
    """A roll back writes back what a memory held; a reader that copies it meanwhile must not see the step."""
    adapter, batch = make("tast-bn"), make_batches()[1]
    adapter(make_batches()[0])
    before, dirty, done = adapter.snapshot(), list[int](), threading.Event()

    def read() -> None:
        while not done.is_set():
            dirty.append(not same(adapter.snapshot(), before))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with FailAt() as trace:
        copy.deepcopy(adapter)(batch)
    for _ in range(60):
        with pytest.raises(torch.OutOfMemoryError), FailAt(trace.count // 2):
            adapter(batch)
    done.set()
    for reader in readers:
        reader.join()
    assert len(dirty) > 10
    assert not any(dirty)


def test_compiled_models_are_used_as_they_were_or_refused() -> None:
    net, x = make_world("tent")[0], make_batches()[0]
    compiled = ttvd.create("tent", torch.compile(net, backend="eager"))  # type: ignore[arg-type]
    assert torch.equal(compiled(x), ttvd.create("tent", net)(x))
    layers: list[Any] = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)]
    layers[0] = torch.compile(layers[0], backend="eager")
    part = nn.Sequential(*layers)
    with pytest.raises(ValueError, match=r"0 was compiled.*accelerate"):
        ttvd.create("tent", part)


def test_states_inside_of_a_larger_module_are_checked_and_loaded_as_a_whole() -> None:
    whole = nn.ModuleDict({"a": make("tent"), "b": make("rotta"), "c": nn.Linear(2, 2)})
    other = nn.ModuleDict({"a": make("tent"), "b": make("rotta"), "c": nn.Linear(2, 2)})
    for x in make_batches():
        whole["a"](x)
        whole["b"](x)
    state = {key: tensor.clone() for key, tensor in whole.state_dict().items()}
    other.load_state_dict(state)
    assert same(other.state_dict(), state)
    name = next(key for key in state if key.startswith("a.") and state[key].is_floating_point())
    for wrong in (
        {**state, name: state[name] * torch.nan},
        {**state, name: state[name].double()},
        {**state, name: state[name][:1].repeat(77)},
        {key: tensor for key, tensor in state.items() if key != name},
        {**state, "a.more": torch.ones(1)},
    ):
        changed = {
            key: tensor.clone() + 1 if key.startswith("a.") else tensor for key, tensor in wrong.items()
        }
        with pytest.raises(RuntimeError, match="this state"):
            other.load_state_dict(changed)
        assert same(other.state_dict(), state)
    other.load_state_dict({key: state[key] for key in state if key.startswith("c.")}, strict=False)


@pytest.mark.parametrize("name", ["note", "rotta", "tast-bn"])
def test_a_first_step_that_fails_leaves_no_room_for_its_images(name: str) -> None:
    adapter, batch = make(name), make_batches()[0]
    adapter.predict(batch)
    before = adapter.snapshot()
    with FailAt() as trace:
        copy.deepcopy(adapter)(batch)
    with pytest.raises(torch.OutOfMemoryError), FailAt(trace.count // 2):
        adapter(batch)
    assert same(adapter.snapshot(), before)
    adapter(torch.rand(6, 1, 12, 12))


def test_readers_of_a_policy_beside_a_step_of_its_adapter() -> None:
    adapter = make("tent")
    policy = ResetEvery(adapter, batches=9)
    first, second, third = make_batches()
    policy(first)
    before, expected, found = policy.snapshot(), policy.predict(third), list[Any]()

    def read() -> None:
        found.extend((policy.snapshot(), policy.predict(third), copy.deepcopy(policy)))

    Pause(adapter).run(lambda: adapter(second), read)
    assert same(found[0], before)
    assert torch.equal(found[1], expected)
    assert same(found[2].snapshot(), before)
    assert found[2].lock is found[2].adapter.lock


def test_a_model_whose_copy_calls_the_original_is_refused() -> None:
    net = make_world("tent")[0]
    net.forward = lambda x: type(net).forward(net, x)
    adapter = ttvd.create("tent", net)
    with pytest.raises(ValueError, match="no parameter that adapts"):
        adapter(make_batches()[0])


def run_in_child(adapter: Adapter, x: Tensor, results: Any) -> None:
    results.put(adapter(x).sum().item())


def test_an_adapter_goes_to_a_process_that_is_spawned() -> None:
    adapter, (first, second, _) = make("tent"), make_batches()
    adapter(first)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    child = context.Process(target=run_in_child, args=(adapter, second, results))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get() == pytest.approx(adapter(second).sum().item(), rel=1e-4)


@pytest.mark.parametrize("name", list(ttvd.list_methods()))
def test_states_are_copies_and_checked_whole(name: str) -> None:
    adapter = make(name)
    for x in make_batches():
        adapter(x)
    state = {key: tensor.clone() for key, tensor in adapter.state_dict().items()}
    for tensor in adapter.state_dict().values():
        tensor.zero_()
    assert same(adapter.snapshot(), state)
    fresh = make(name)
    untouched = fresh.snapshot()
    for key, tensor in state.items():
        wrong: list[tuple[Any, str]] = [(tensor[None], "shape"), (tensor.tolist(), "no tensor")]
        wrong.append((tensor.to(torch.float16), "type"))
        if tensor.is_floating_point():
            assert tensor.isfinite().all(), key
            broken = tensor.clone()
            broken.view(-1)[-1] = torch.nan
            wrong.append((broken, "NaN"))
        for value, word in wrong:
            with pytest.raises(ValueError, match=word):
                fresh.load_state_dict({**state, key: value})
    with pytest.raises(ValueError, match="is unknown"):
        fresh.load_state_dict({**state, "more": torch.ones(1)})
    assert same(fresh.snapshot(), untouched)
    fresh.load_state_dict(state)
    assert same(fresh.snapshot(), state)


@pytest.mark.parametrize("name", ["t3a", "adanpc", "tast", "ttvd", "rotta"])
@pytest.mark.parametrize("change", ["reset", "restore", "load", "policy"])
def test_a_reset_that_fails_changes_nothing(name: str, change: str) -> None:
    adapter = make(name)
    first, second, third = make_batches()
    adapter(first)
    state = adapter.snapshot()
    one: Adapter = ResetEvery(adapter, batches=2) if change == "policy" else adapter
    one(second)
    before = one.snapshot()
    run = {
        "reset": adapter.reset,
        "restore": lambda: adapter.restore(state),
        "load": lambda: adapter.load_state_dict(state),
        "policy": lambda: one(third),
    }[change]
    with FailAt() as trace:
        run()
    assert not same(one.snapshot(), before)
    one.restore(before)
    for number in range(0, trace.count, max(1, trace.count // 40)):
        with pytest.raises(torch.OutOfMemoryError), FailAt(number):
            run()
        assert same(one.snapshot(), before), number


@pytest.mark.parametrize("large", [0, 2**20])
def test_a_large_memory_is_not_copied_before_a_step(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "LARGE", large)
    adapter = make("t3a")
    opened = Transaction(adapter)
    opened.save()
    copied = sum(tensor.numel() for tensor in opened.changed_tensors(torch.device("cpu")))
    assert (copied > 1000) == (large > 0)


def test_states_without_values_or_with_a_broken_generator_are_refused() -> None:
    adapter = make("rotta")
    adapter(make_batches()[0])
    state = adapter.state_dict()
    name = "random_state.state"
    with pytest.raises(ValueError, match="no random generator"):
        adapter.load_state_dict({**state, name: torch.zeros_like(state[name])})
    with pytest.raises(ValueError, match="'meta'"):
        adapter.load_state_dict({**state, name: state[name].to("meta")})
    assert same(adapter.snapshot(), state)


def test_an_adapter_that_learns_refuses_half_precision() -> None:
    adapter = make("tent")
    before = adapter.snapshot()
    with pytest.raises(ValueError, match="half precision"):
        adapter.half()
    assert same(adapter.snapshot(), before)
    assert adapter.double().probe.dtype == torch.float64
