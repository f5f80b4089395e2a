"""On a GPU: the predictions of a CPU, steps that do not wait for the device, and steps recorded as CUDA graphs."""

import copy
import gc
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import ttvd
from tests.helpers.engine import DYNAMIC
from ttvd.engine import step_runner
from ttvd.engine.cuda_graphs import refusing_to_wait
from ttvd.engine.step_runner import SHAPES
from ttvd.methods import GradientAdapter, Step
from ttvd.testing import (
    _interrupting as interrupting,
)
from ttvd.testing import (
    check_failed_steps,
    check_interrupts,
    check_threads,
    check_values_inside,
    make_world,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CAPTURED = [name for name in ttvd.list_methods() if name not in DYNAMIC]
TOLERANCE = 1e-5
"""Of probabilities after seven steps: kernels may be chosen otherwise and sums taken in another order."""


def make_adapter(name: str, capture: str = "auto") -> ttvd.Adapter:
    adapter = make_world(name, device="cuda")[1]()
    adapter.capture = capture  # type: ignore[assignment]
    return adapter


def make_stream() -> list[Tensor]:
    """Eight batches, the fifth of which is not finite and the last of which is short."""
    stream = list(torch.rand(8, 8, 1, 16, 16, generator=torch.Generator().manual_seed(1)).cuda())
    stream[4][0, 0, 0, 0] = float("nan")
    stream[7] = stream[7][:3]
    return stream


def feed(adapter: ttvd.Adapter, stream: list[Tensor]) -> None:
    for x in stream:
        adapter(x)


def count_graphs(adapter: ttvd.Adapter) -> int:
    inside: ttvd.Adapter = getattr(adapter, "adapter", adapter)
    return len(inside.runner.captured_steps())


def list_recordings(adapter: ttvd.Adapter) -> list[object]:
    inside: ttvd.Adapter = getattr(adapter, "adapter", adapter)
    return list(inside.runner._steps.values())


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.softmax(1), expected.softmax(1), rtol=0.0, atol=TOLERANCE)


def assert_same_state(one: ttvd.Adapter, other: ttvd.Adapter) -> None:
    theirs = other.snapshot()
    for name, tensor in one.snapshot().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4, equal_nan=True, msg=name)
        else:
            assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 products, kernels that repeat themselves, and warnings that nobody has seen yet."""
    monkeypatch.setattr(step_runner, "_WARNED", set())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("name", CAPTURED)
def test_recorded_steps_give_the_results_of_written_ones(name: str) -> None:
    recorded, written = make_adapter(name), make_adapter(name, "never")
    for x in make_stream():
        assert_close(recorded(x), written(x))
        assert torch.allclose(recorded.kept, written.kept)
    assert_same_state(recorded, written)
    assert count_graphs(recorded) == 1
    assert count_graphs(written) == 0


@pytest.mark.parametrize("name", CAPTURED)
def test_a_recorded_step_never_waits_for_the_device(name: str) -> None:
    if name == "rdumb":
        pytest.skip("counts batches on the host")
    adapter, stream = make_adapter(name), make_stream()
    for x in stream[:3]:
        adapter(x)
    with refusing_to_wait():
        adapter(stream[3])


@pytest.mark.parametrize("name", ["ttvd", "sar", "eta", "t3a", "shot"])
def test_states_come_and_go_between_replays(name: str) -> None:
    stream = make_stream()[:4]
    adapter, other = make_adapter(name), make_adapter(name)
    first = [adapter(x) for x in stream]
    adapter.reset()
    for x, y in zip(stream, first, strict=True):
        assert_close(adapter(x), y)
    adapter.reset()
    middle = [adapter(x) for x in stream[:2]]
    saved = {key: value.clone() for key, value in adapter.state_dict().items()}
    other.load_state_dict(saved)
    snapshot = adapter.snapshot()
    for x, y in zip(stream[2:], first[2:], strict=True):
        assert_close(adapter(x), y)
        assert_close(other(x), y)
    adapter.restore(snapshot)
    assert_close(adapter(stream[2]), first[2])
    assert_close(middle[1], first[1])


@pytest.mark.parametrize("name", ["ttvd", "tent", "eata", "rdumb", "t3a", "note", "deyo", "ttt"])
def test_a_renewed_adapter_plays_what_it_has(name: str) -> None:
    adapter, stream = make_adapter(name), make_stream()[:4]
    first = [adapter(x) for x in stream]
    recordings = list_recordings(adapter)
    adapter.renew()
    assert float(adapter.kept) == 1.0
    for x, y in zip(stream, first, strict=True):
        assert_close(adapter(x), y)
    # Those that are there are played; a branch that had been taken once is recorded the second time.
    assert [now for now, then in zip(list_recordings(adapter), recordings, strict=True) if then] == [
        then for then in recordings if then
    ]
    adapter.release()
    assert count_graphs(adapter) == 0
    adapter.renew()
    for x, y in zip(stream, first, strict=True):
        assert_close(adapter(x), y)
    assert count_graphs(adapter) == sum(then is not None for then in recordings) == 1


def test_the_first_batch_after_a_renewal_is_looked_at() -> None:
    adapter, (x, *_) = make_adapter("tent"), make_stream()
    for _ in range(3):
        adapter(x)
    adapter(x + 5)  # nobody looks
    adapter.renew()
    with pytest.raises(ValueError, match="expected images in"):
        adapter(x + 5)


@pytest.mark.parametrize("free", [0, 2**60])
def test_room_for_a_graph_is_made_where_it_is_scarce(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    emptied: list[int] = []
    empty = torch.cuda.empty_cache
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**60))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(empty() or 1))
    adapter, stream = make_adapter("tent"), make_stream()
    feed(adapter, stream[:3])
    assert count_graphs(adapter) == 1
    assert len(emptied) == (free == 0)
    assert gc.isenabled()


def test_outputs_have_memory_of_their_own() -> None:
    adapter, stream = make_adapter("ttvd"), make_stream()[:4]
    outputs = [adapter(x) for x in stream]
    copies = [out.clone() for out in outputs]
    adapter(stream[0])
    assert all(torch.equal(out, kept) for out, kept in zip(outputs, copies, strict=True))


def test_what_a_step_depends_on_makes_a_new_recording() -> None:
    adapter, twin, (x, *_) = make_adapter("ttvd"), make_adapter("ttvd", "never"), make_stream()
    assert isinstance(adapter, GradientAdapter)
    assert isinstance(twin, GradientAdapter)
    for _ in range(3):
        assert_close(adapter(x), twin(x))
    adapter.optimizer.lr = twin.optimizer.lr = 0.0
    before = adapter.snapshot()
    for _ in range(3):
        assert_close(adapter(x), twin(x))
    # What follows the stream goes on following it.
    learnt = {k: v for k, v in adapter.snapshot().items() if k.endswith((".weight", ".bias"))}
    assert learnt
    assert all(torch.equal(before[k], v) for k, v in learnt.items())
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            found = adapter(x)
            assert_close(found, twin(x))
    assert count_graphs(adapter) == 1
    adapter.cpu()
    assert count_graphs(adapter) == 0
    assert adapter(x.cpu()).device.type == "cpu"
    adapter.cuda()
    for _ in range(3):
        assert adapter(x).is_cuda


def test_few_shapes_are_remembered() -> None:
    adapter, (x, *_) = make_adapter("tent"), make_stream()
    for size in range(2, 9):
        adapter(x[:size])
        adapter(x[:size])
    assert count_graphs(adapter) == SHAPES


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_leave_the_graphs_behind(how: str) -> None:
    adapter, stream = make_adapter("ttvd"), make_stream()
    for x in stream[:3]:
        adapter(x)
    twin = copy.deepcopy(adapter) if how == "deepcopy" else pickle.loads(pickle.dumps(adapter))  # noqa: S301
    assert count_graphs(twin) == 0
    for x in stream[3:]:
        assert_close(twin(x), adapter(x))


@pytest.mark.parametrize("name", sorted(DYNAMIC))
def test_methods_that_cannot_be_recorded_say_so_once(name: str) -> None:
    adapter, stream = make_adapter(name), make_stream()
    with pytest.warns(UserWarning, match="not as CUDA graphs") as caught:
        feed(adapter, stream[:4])
    assert len(caught) == 1
    assert count_graphs(adapter) == 0
    quiet = make_adapter(name, "never")
    feed(make_adapter(name), stream[:4])  # another adapter of the method does not warn again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(quiet, stream[:3])


class Waiting(GradientAdapter):
    """Asks the device for a number."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, lr=0.01)
        self.calls = 0

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


@pytest.mark.parametrize(("broken", "why"), [(Waiting, "synchroniz"), (Counting, "not tensors")])
def test_a_step_that_turns_out_not_to_fit_runs_as_written(broken: type[Waiting], why: str) -> None:
    net = make_world("tent", device="cuda")[0]
    adapter, twin, stream = broken(net), broken(net), make_stream()
    twin.capture = "never"
    with pytest.warns(UserWarning, match=why) as caught:
        feed(adapter, stream[:2])
    assert len(caught) == 1
    feed(twin, stream[:2])
    assert_same_state(adapter, twin)
    for x in stream[2:]:
        assert_close(adapter(x), twin(x))


def test_hooks_are_run() -> None:
    adapter, stream, seen = make_adapter("tent"), make_stream(), []
    adapter.model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match="hooks"):
        feed(adapter, stream[:4])
    assert len(seen) >= 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_are_recorded_too() -> None:
    fast, plain = make_adapter("ttvd").accelerate(compile=True), make_adapter("ttvd", "never")
    for x in make_stream():
        torch.testing.assert_close(fast(x).softmax(1), plain(x).softmax(1), rtol=0.0, atol=1e-3)
    assert_same_state(fast, plain)
    assert count_graphs(fast) == 1


def test_half_precision_and_layout_are_recorded_too() -> None:
    fast = make_adapter("ttvd").accelerate(precision="bfloat16", channels_last=True)
    plain = make_adapter("ttvd", "never").accelerate(precision="bfloat16", channels_last=True)
    for x in make_stream():
        torch.testing.assert_close(fast(x).softmax(1), plain(x).softmax(1), rtol=0.0, atol=0.02)
    assert count_graphs(fast) == 1


def test_each_branch_of_a_step_has_a_recording_of_its_own() -> None:
    """Of the batches of 8, some hold the twentieth image since the last update, which is learnt from in between."""
    recorded, written = (make_world("note", device="cuda", period=20, capacity=16)[1]() for _ in range(2))
    written.capture = "never"
    for x in torch.rand(24, 8, 1, 16, 16, generator=torch.Generator().manual_seed(3)).cuda():
        assert_close(recorded(x), written(x))
        assert torch.allclose(recorded.kept, written.kept)
    assert_same_state(recorded, written)
    assert count_graphs(recorded) > 1


@pytest.mark.parametrize("name", ["ttvd", "tent", "roid", "deyo", "t3a", "rotta", "rdumb"])
@pytest.mark.filterwarnings("ignore:.*not as CUDA graphs")
def test_steps_are_transactions(name: str) -> None:
    net, make = make_world(name, device="cuda")
    batches = [x[:, :, :8, :8].contiguous() for x in make_stream()[:3]]
    for check in (check_failed_steps, check_values_inside, check_interrupts, check_threads):
        check(make, net, batches)


@pytest.mark.parametrize("name", ["ttvd", "tent", "note", "t3a"])
def test_an_interrupted_replay_has_happened_or_not(name: str) -> None:
    adapter, twin, stream = make_adapter(name), make_adapter(name), make_stream()[:4]
    for one in (adapter, twin):
        for x in stream[:3] * 4:  # every branch is recorded
            one(x)
    before = adapter.snapshot()
    twin(stream[3])
    after = twin.snapshot()
    count = 0
    with interrupting(None) as lines:
        adapter(stream[3])
    for moment in range(0, lines[0], max(1, lines[0] // 40)):
        adapter.restore(before)
        try:
            with interrupting(moment):
                adapter(stream[3])
        except KeyboardInterrupt:
            count += 1
        state = adapter.snapshot()
        moved = {key for key, tensor in state.items() if not torch.equal(tensor, before[key])}
        for key in moved:
            torch.testing.assert_close(state[key], after[key], rtol=1e-3, atol=1e-4, msg=key)
        changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
        assert moved in (set(), changed)
    assert count > 20


@pytest.mark.parametrize("mode", ["recorded", "written", "half"])
def test_a_reader_on_another_stream_sees_whole_states(mode: str) -> None:
    """The reader runs beside the steps, on a CUDA stream of its own."""
    make = make_world("ttvd", device="cuda", lr=0.1)[1]
    adapter, twin = make(), make()
    adapter.capture = twin.capture = "never" if mode == "written" else "auto"
    if mode == "half":
        for one in (adapter, twin):
            one.accelerate(precision="bfloat16", channels_last=True)
    stream = [torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(i)).cuda() for i in range(40)]
    known = []
    for x in stream:
        twin(x)
        known.append(twin.predict(stream[0]))
    seen: list[Tensor] = []
    done = threading.Event()

    def read() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                seen.append(adapter.predict(stream[0]))
            torch.cuda.current_stream().synchronize()

    adapter(stream[0])
    thread = threading.Thread(target=read)
    thread.start()
    for x in stream[1:]:
        adapter(x)
    done.set()
    thread.join()
    assert_same_state(adapter, twin)
    states = torch.stack(known).softmax(2)
    gaps = torch.stack([(states - found.softmax(1)).abs().amax((1, 2)).min() for found in seen])
    assert float(gaps.max()) < (0.02 if mode == "half" else 1e-3)
    assert len(seen) > 3


WAITING = {"cotta", "memo", "note", "petta", "rdumb", "rotta", "tast-bn", "ttt"}
"""Methods whose documents say that they read from the device in a step."""


QUIET: dict[str, dict[str, Any]] = {"cotta": {"threshold": 0.0, "restore": 0.0, "agreement": "symmetric"}}
"""Without what a method draws on the device itself: other numbers than on a CPU."""


def move_adapter(name: str, device: str) -> ttvd.Adapter:
    return make_world(name, device=device, **QUIET.get(name, {}))[1]()


def move_stream(device: str) -> list[Tensor]:
    return [b.to(device) for b in torch.rand(4, 8, 1, 16, 16, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("name", list(ttvd.list_methods()))
@pytest.mark.filterwarnings("ignore:.*not as CUDA graphs")
def test_predictions_follow_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    there, here = move_adapter(name, "cuda"), move_adapter(name, "cpu")
    for x, y in zip(move_stream("cuda"), move_stream("cpu"), strict=True):
        found, expected = there(x).softmax(1).cpu(), here(y).softmax(1)
        # The augmentations of RoTTA and PeTTA draw pixel noise on the device, so they agree roughly.
        assert torch.allclose(found, expected, atol=0.05 if name in ("petta", "rotta") else 2e-3)


@pytest.mark.parametrize("name", [name for name in ttvd.list_methods() if name not in WAITING])
@pytest.mark.filterwarnings("ignore:.*not as CUDA graphs")
def test_an_eager_step_never_waits_for_the_device(name: str) -> None:
    adapter, stream = move_adapter(name, "cuda"), move_stream("cuda")
    adapter(stream[0])
    with refusing_to_wait():
        for x in stream[1:]:
            adapter(x)


@pytest.mark.parametrize("name", ["tent", "t3a", "ttvd", "sar"])
def test_moving_an_adapter_moves_all_of_it(name: str) -> None:
    adapter, stream = move_adapter(name, "cpu"), move_stream("cuda")
    adapter(stream[0].cpu())
    adapter.to("cuda")
    assert adapter(stream[1]).is_cuda
    adapter.reset()
    assert adapter(stream[0]).isfinite().all()


def test_dropped_adapters_leave_no_memory_behind() -> None:
    """Without the garbage collector: adapters and their graphs are in no reference cycle."""
    x = torch.rand(64, 1, 16, 16, device="cuda")
    allocated, reserved = [], []
    gc.disable()
    try:
        for _ in range(6):
            adapter = make_adapter("ttvd")
            for _ in range(4):
                adapter(x)
            del adapter
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pools of dropped graphs are cached until then
            allocated.append(torch.cuda.memory_allocated())
            reserved.append(torch.cuda.memory_reserved())
    finally:
        gc.enable()
    assert allocated[-1] <= allocated[1]
    assert reserved[-1] <= reserved[1]


def test_a_failed_recording_keeps_no_memory() -> None:
    net = make_world("tent", device="cuda")[0]
    adapter, (x, *_) = Waiting(net), make_stream()
    adapter(x)
    before = torch.cuda.memory_allocated()
    with pytest.warns(UserWarning, match="synchroniz"):
        adapter(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 4 * x.nbytes
