"""Steps recorded as CUDA graphs: the same results as the steps as they are written, and what cannot be recorded."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from torch import Tensor

import ttvd
from ttvd.engine.step_runner import SHAPES
from ttvd.methods import GradientAdapter, Step
from ttvd.testing import make_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EAGER = {"cotta", "memo", "roid", "rotta", "tast-bn"}
CAPTURED = [name for name in ttvd.list_methods() if name not in EAGER]
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
    inside = getattr(adapter, "adapter", adapter)
    return sum(recording is not None for recording in inside._steps._shapes.values())


def list_recordings(adapter: ttvd.Adapter) -> list[object]:
    return list(getattr(adapter, "adapter", adapter)._steps._shapes.values())


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
    """Float32 products, and kernels that repeat themselves."""
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        adapter(stream[3])
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
    # Those that are there are played; a way that had been taken once is recorded the second time.
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


@pytest.mark.parametrize("name", sorted(EAGER))
def test_methods_that_cannot_be_recorded_say_so_once(name: str) -> None:
    adapter, stream = make_adapter(name), make_stream()
    with pytest.warns(UserWarning, match="not as CUDA graphs") as caught:
        feed(adapter, stream[:4])
    assert len(caught) == 1
    assert count_graphs(adapter) == 0
    quiet = make_adapter(name, "never")
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


def test_each_way_of_a_step_has_a_recording_of_its_own() -> None:
    """Of the batches of 8, some hold the twentieth image since the last update, which is learnt from in between."""
    recorded, written = (make_world("note", device="cuda", period=20, capacity=16)[1]() for _ in range(2))
    written.capture = "never"
    for x in torch.rand(24, 8, 1, 16, 16, generator=torch.Generator().manual_seed(3)).cuda():
        assert_close(recorded(x), written(x))
        assert torch.allclose(recorded.kept, written.kept)
    assert_same_state(recorded, written)
    assert count_graphs(recorded) > 1
