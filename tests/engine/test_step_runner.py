"""Recorded steps on a CPU, with a recorder that repeats a step by running it again."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Hashable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ttvd
from tests.helpers.engine import DYNAMIC, RerunRecorder, make_batches
from ttvd.engine import step_runner
from ttvd.engine.step_runner import SHAPES, StepInputs, StepRunner, find_obstacle
from ttvd.methods import Adapter, GradientAdapter, Step
from ttvd.methods.shared.random_state import RandomState
from ttvd.nn.norms import Statistics
from ttvd.testing import make_world


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RerunRecorder:
    found = RerunRecorder()
    monkeypatch.setattr(StepRunner, "recorder", found)
    monkeypatch.setattr(step_runner, "_WARNED", set())
    return found


def feed(adapter: Adapter, recorder: RerunRecorder, *sizes: int) -> list[str]:
    """What happens with batches of these sizes."""
    recorder.log.clear()
    for size in sizes:
        adapter(make_batches(1)[0][:size])
    return list(recorder.log)


def assert_same_state(one: Adapter, other: Adapter) -> None:
    theirs = other.snapshot()
    for name, tensor in one.snapshot().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", list(ttvd.list_methods()))
@pytest.mark.filterwarnings("ignore:.*not as CUDA graphs")
def test_recorded_steps_are_the_eager_ones(
    name: str, recorder: RerunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with batches that are not finite; the recorder refuses steps that wait or do other work."""
    monkeypatch.setattr(step_runner, "can_wait", lambda _: False)  # as on an accelerator
    make = make_world(name)[1]
    recorded, eager = make(), make()
    eager.capture, recorded.validation, eager.validation = "never", "never", "never"
    stream = make_batches(6, 8, 16)
    stream[1][0, 0, 0, 0] = stream[4][2, 0, 3, 3] = float("nan")
    for x in stream:
        assert torch.equal(recorded(x), eager(x))
        assert torch.equal(recorded.kept, eager.kept)
    assert_same_state(recorded, eager)
    assert any(entry.startswith("replay") for entry in recorder.log) == (name not in DYNAMIC)


def test_a_shape_is_recorded_when_it_comes_again(recorder: RerunRecorder) -> None:
    tent = make_world("tent")[1]()
    assert feed(tent, recorder, 6, 6, 6, 3, 6) == ["record 6", *["replay 6"] * 3]
    assert feed(tent, recorder, 3, 6) == ["record 3", "replay 3", "replay 6"]
    assert feed(tent, recorder, 1, 2, 4, 6, 3) == ["replay 6"]  # three was the least recently used
    tent.optimizer.lr = 0.5  # type: ignore[union-attr]
    assert feed(tent, recorder, 3, 3, 3) == ["record 3", "replay 3", "replay 3"]
    tent.float()
    assert feed(tent, recorder, 3, 3) == ["record 3", "replay 3"]
    tent.release()
    assert feed(tent, recorder, 3, 3) == ["record 3", "replay 3"]
    tent.renew()
    assert feed(tent, recorder, 3) == ["replay 3"]
    tent.capture = "never"
    assert feed(tent, recorder, 3, 3) == []


def test_few_shapes_are_remembered(recorder: RerunRecorder) -> None:
    tent = make_world("tent")[1]()
    feed(tent, recorder, *(size for size in range(1, 7) for _ in range(2)))
    assert len(tent.runner.captured_steps()) == SHAPES


def test_each_branch_of_a_step_is_recorded(recorder: RerunRecorder) -> None:
    """Every second batch of 4 completes a period of 8, after which the memory is learnt from."""
    note = make_world("note", period=8, capacity=4)[1]()
    assert feed(note, recorder, *[4] * 8) == ["record 4", "replay 4"] * 2 + ["replay 4"] * 4
    # A period of 10 falls into another place of each batch: five branches, in turn.
    note = make_world("note", period=10, capacity=4)[1]()
    feed(note, recorder, *[4] * 10)
    assert feed(note, recorder, *[4] * 10) == ["replay 4"] * 10


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_failed_recording_leaves_everything_as_it_was(
    recorder: RerunRecorder, error: type[RuntimeError]
) -> None:
    make = make_world("tent")[1]
    tent, eager = make(), make()
    eager.capture = "never"
    recorder.fail_at, recorder.error = 5, error
    x = make_batches(1)[0][:5]
    assert torch.equal(tent(x), eager(x))
    with pytest.warns(UserWarning, match="too much"):
        found = tent(x)
    assert torch.equal(found, eager(x))
    assert torch.equal(tent(x), eager(x))
    assert recorder.log == ["record 5"]
    assert tent.runner.captured_steps() == []
    assert_same_state(tent, eager)
    assert feed(tent, recorder, 6, 6) == [], "after one failure nothing is recorded"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another adapter of the method says nothing any more
        feed(make(), recorder, 5, 5)
    tent.renew()
    assert bool(feed(tent, recorder, 6, 6)) == (error is torch.OutOfMemoryError), "memory may be free again"


class Waiting(GradientAdapter):
    """Reads a number from the device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, lr=0.01)
        self.calls = 0
        self.random_state = RandomState(0)

    def loss(self, x: Tensor) -> Step:
        logits = self.output(x)
        factor = 1.0 if logits.sum().item() > 0 else 2.0
        return Step(logits, factor * logits.square().mean(), torch.ones_like(self.kept))


class Counting(Waiting):
    """Keeps a count outside of its state."""

    def loss(self, x: Tensor) -> Step:
        self.calls += 1
        logits = self.output(x)
        return Step(logits, logits.square().mean() * self.calls, torch.ones_like(self.kept))


class Drawing(Waiting):
    """Draws inside of its step."""

    def loss(self, x: Tensor) -> Step:
        logits = self.output(x)
        with self.random_state.generator() as generator:
            noise = torch.rand(len(x), generator=generator)
        return Step(logits, (noise[:, None] * logits).square().mean(), torch.ones_like(self.kept))


@pytest.mark.parametrize(
    ("broken", "why"),
    [(Waiting, "synchroniz"), (Counting, "not tensors"), (Drawing, "kept on the host")],
)
def test_steps_that_cannot_be_recorded_run_eagerly(
    broken: type[Waiting], why: str, recorder: RerunRecorder
) -> None:
    net = make_world("tent")[0]
    adapter, eager = broken(net), broken(net)
    eager.capture = "never"
    first, second, *rest = make_batches(4)
    assert torch.equal(adapter(first), eager(first))
    with pytest.warns(UserWarning, match=why):
        found = adapter(second)
    assert torch.equal(found, eager(second))
    for x in rest:
        assert torch.equal(adapter(x), eager(x))
    assert_same_state(adapter, eager)
    assert adapter.calls == eager.calls


@pytest.mark.parametrize("name", list(ttvd.list_methods()))
def test_methods_say_whether_they_can_be_recorded(name: str) -> None:
    adapter = make_world(name)[1]()
    inside: Adapter = getattr(adapter, "adapter", adapter)
    assert (find_obstacle(inside, torch.device("cpu")) is not None) == (name in DYNAMIC)
    if name not in DYNAMIC:
        assert "host" in str(find_obstacle(inside, torch.device("meta"))) or not inside.snapshot()


def test_hooks_stand_against_a_recording() -> None:
    adapter = make_world("tent")[1]()
    adapter.model.register_forward_hook(lambda *_: None)
    assert "hooks" in str(find_obstacle(adapter, torch.device("cpu")))


def test_outputs_have_memory_of_their_own(recorder: RerunRecorder) -> None:
    adapter = make_world("ttvd")[1]()
    outputs = [adapter(x) for x in make_batches(4)]
    copies = [out.clone() for out in outputs]
    adapter(make_batches()[0])
    assert all(torch.equal(out, kept) for out, kept in zip(outputs, copies, strict=True))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_leave_recordings_behind(how: str, recorder: RerunRecorder) -> None:
    adapter = make_world("ttvd")[1]()
    for x in make_batches():
        adapter(x)
    twin = copy.deepcopy(adapter) if how == "deepcopy" else pickle.loads(pickle.dumps(adapter))  # noqa: S301
    assert adapter.runner.captured_steps()
    assert not twin.runner.captured_steps()
    for x in make_batches(5)[3:]:
        assert torch.equal(twin(x), adapter(x))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.filterwarnings("ignore:.*not as CUDA graphs")
@pytest.mark.parametrize("name", list(ttvd.list_methods()))
def test_dropping_an_adapter_frees_it_at_once(name: str, recorder: RerunRecorder) -> None:
    """Without the garbage collector: the adapter, its model, its recordings and its state."""
    adapter = make_world(name)[1]()
    state = adapter.snapshot()
    for x in make_batches(4):
        adapter(x)
    adapter.predict(x)
    adapter.load_state_dict(adapter.state_dict())
    adapter.reset()
    inside: Adapter = getattr(adapter, "adapter", adapter)
    parts = [
        weakref.ref(part) for part in (adapter, inside.model, inside.runner, *inside.runner.captured_steps())
    ]
    del adapter, inside, state
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.usefixtures("no_collector")
def test_a_failed_recording_and_a_failed_step_keep_nothing(recorder: RerunRecorder) -> None:
    recorder.fail_at = 5
    adapter = make_world("tent")[1]()
    with pytest.warns(UserWarning, match="too much"):
        feed(adapter, recorder, 5, 5)
    with pytest.raises(ValueError, match="NaN"):
        adapter(make_batches()[0] * float("nan"))
    known = weakref.ref(adapter)
    del adapter
    assert known() is None


class Shaky(Adapter):
    """Adds its random numbers to the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, statistics=Statistics.source())
        self.random_state, self.batches = RandomState(0), 0

    def branch(self, x: Tensor) -> Hashable:
        self.batches += 1
        return self.batches % 2 or None

    def random_inputs(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        return torch.rand(2, generator=generator), torch.tensor([0.0, 0.5])

    def adapt(self, x: Tensor, *inputs: Tensor) -> Tensor:
        if len(inputs) == 3:
            assert inputs[0] == 1
        return self.output(x) + inputs[-2] + inputs[-1]


def test_a_step_gets_its_branch_and_its_random_inputs() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    shaky, x, generator = Shaky(net), torch.rand(3, 1, 2, 2), torch.Generator().manual_seed(0)
    with torch.no_grad():
        plain = net(x)
    for _ in range(3):
        wanted = plain + torch.rand(2, generator=generator) + torch.tensor([0.0, 0.5])
        torch.testing.assert_close(shaky(x), wanted)
    torch.testing.assert_close(shaky.predict(x), plain)  # predicting draws nothing
    assert shaky.batches == 3


def test_random_inputs_are_drawn_for_each_gradient_step() -> None:
    one, two = (make_world("deyo", steps=steps)[1]() for steps in (1, 2))
    x = make_batches()[0]
    first = [StepInputs.draw(one, x).random[0] for _ in range(2)]
    both = StepInputs.draw(two, x)
    assert all(torch.equal(a, b) for a, b in zip(first, both.random, strict=True))
    assert both.arguments() == both.random
    assert both.key == (x.shape, x.dtype, None)
    assert StepInputs(x, "left", both.random).arguments()[0] == "left"


@pytest.mark.parametrize("name", ["deyo", "note", "roid", "ttt"])
def test_a_step_leaves_the_state_of_the_host_alone(name: str) -> None:
    """Random numbers and counters move before the step: a recorded one cannot move them."""
    adapter = make_world(name)[1]()
    x = make_batches(1, 8, 16)[0]
    adapter(x)
    inputs = StepInputs.draw(adapter, x)
    hosted = {name for name, part in adapter.named_children() if getattr(part, "on_host", False)}
    kept = {key: t.clone() for key, t in adapter.snapshot().items() if key.split(".")[0] in hosted}
    adapter.adapt(x, *inputs.arguments())
    assert kept
    assert all(torch.equal(adapter.snapshot()[key], value) for key, value in kept.items())


def test_note_never_learns_from_places_that_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, a batch that is not finite counts, but leaves nothing in the memory."""
    monkeypatch.setattr(step_runner, "can_wait", lambda _: False)
    note = make_world("note", period=24, capacity=64)[1]()
    note.validation = "never"
    seen: list[Tensor] = []
    note.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    stream = [x + 0.1 for x in make_batches(3, 8, 16)]
    stream[0][0, 0, 0, 0] = float("nan")
    for x in stream:
        note(x)
    assert len(seen[-1]) == 24
    assert all(image.abs().sum() > 0 for image in seen[-1])
