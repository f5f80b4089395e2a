"""Compiled steps on a CPU: quick backends of torch.compile stand for its compiler."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor
from torch._functorch._aot_autograd.utils import make_boxed_func

import ttvd
from tests.helpers.engine import make_batches
from ttvd.engine.compiling import compile_once, fusible, fusing
from ttvd.engine.flat import find_runs
from ttvd.engine.module import is_compiled
from ttvd.engine.state import lay_out
from ttvd.methods import Adapter
from ttvd.testing import make_world

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
Compile = Callable[..., None]


@pytest.fixture(autouse=True)
def compile_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compile]:
    """Compile by a backend, by default one that runs graphs as they are."""
    whole, names = torch.compile, list[str]()

    def choose(backend: Any) -> None:
        def watch(code: Any, **options: Any) -> Any:
            names.append(code.__name__)
            return whole(code, backend=backend, **options)

        monkeypatch.setattr(torch, "compile", watch)
        compile_once.cache_clear()

    choose.names = names  # type: ignore[attr-defined]
    choose("eager")
    yield choose
    compile_once.cache_clear()


@pytest.mark.parametrize("name", ["tent", "ttvd", "sar"])
def test_compiled_networks_give_the_same_from_the_second_batch_on(name: str, compile_by: Compile) -> None:
    graphs: list[int] = []

    def count(module: Any, _: Any) -> Any:
        graphs.append(1)
        return module.forward

    compile_by(count)
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
    names = compile_by.names  # type: ignore[attr-defined]
    assert names.count("_compute_loss") == (name == "ttvd"), "once for all, and where there is one"
    assert names.count("_apply_gate") == 1


def check_copies(adapter: ttvd.Adapter, plain: ttvd.Adapter, x: Tensor) -> None:
    """A compiled adapter is copied and saved as any other, and the copies go on as it does."""
    copies = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]  # noqa: S301
    wanted = [plain(x).softmax(1) for _ in range(3)]
    for one in (adapter, *copies):
        assert one.compiled
        for answer in wanted:
            assert torch.allclose(one(x).softmax(1), answer, atol=1e-3)


@pytest.mark.parametrize(("name", "when"), [("tent", "forward"), ("ttvd", "backward")])
def test_where_the_compiler_fails_steps_run_as_they_are_written(
    name: str, when: str, compile_by: Compile
) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.exc import InductorError

    def refuse(module: Any, _: Any) -> Any:
        raise InductorError(RuntimeError("PassManager::run failed"), None)

    def accept(module: Any, _: Any) -> Any:
        return make_boxed_func(module.forward)

    parts = {"fw_compiler": refuse if when == "forward" else accept, "bw_compiler": refuse}
    compile_by(aot_autograd(**parts))
    adapter, plain = make_world(name)[1]().accelerate(compile=True), make_world(name)[1]()
    first, *rest = make_batches(4)
    assert torch.equal(adapter(first), plain(first))
    # A step that the guard looks at is compiled by itself, so the second step may be the first one of its kind.
    with pytest.warns(UserWarning, match=r"not compiled.*PassManager::run failed"):
        found = [adapter(x) for x in rest[:2]]
    assert not is_compiled(adapter)
    assert all(torch.equal(one, plain(x)) for one, x in zip(found, rest[:2], strict=True))
    assert torch.equal(adapter(rest[2]), plain(rest[2]))
    for key, value in plain.snapshot().items():
        assert torch.equal(adapter.snapshot()[key], value), key


def test_errors_that_are_not_the_compilers_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    adapt, broken = ttvd.Adapter.adapt, False

    def fail_if_broken(adapter: ttvd.Adapter, x: Tensor) -> Tensor:
        if broken:
            raise RuntimeError("out of order")
        return adapt(adapter, x)

    monkeypatch.setattr(ttvd.Adapter, "adapt", fail_if_broken)
    adapter = make_world("bn")[1]().accelerate(compile=True)
    x = make_batches()[0]
    adapter(x)
    broken = True
    with pytest.raises(RuntimeError, match="out of order"):
        adapter(x)
    assert not adapter.runner.uncompiled
    assert list(adapter.runner._steps) == [(x.shape, x.dtype, None)], "it was the second batch of its shape"


@pytest.mark.filterwarnings("ignore:RoTTA runs as it is written")
def test_the_compiler_may_fail_at_a_later_step_too(compile_by: Compile) -> None:
    """RoTTA's memory grows, and with it what is compiled."""
    calls = [0]

    def fail_later(module: Any, _: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            raise RuntimeError("PassManager::run failed")
        return module.forward

    compile_by(fail_later)
    _, make = make_world("rotta", capacity=64, period=6)
    adapter, plain = make().accelerate(compile=True), make()
    for x in make_batches(6):
        torch.testing.assert_close(adapter(x), plain(x))
    assert adapter.runner.uncompiled
    for key, value in plain.snapshot().items():
        torch.testing.assert_close(adapter.snapshot()[key], value, msg=key)


def find_parameters(adapter: Adapter) -> list[Tensor]:
    return [p for p in adapter.parameters() if p.requires_grad]


def test_steps_that_are_compiled_have_their_state_in_one_piece() -> None:
    _, make = make_world("ttvd")
    adapter = make().accelerate(compile=True)
    first, second, third = make_batches(3)
    adapter(first)
    assert len(find_runs(find_parameters(adapter))) > 1, "the first batch is not compiled"
    adapter(second)  # the guard looks at it, which is a step of its own
    adapter(third)
    assert len(find_runs(find_parameters(adapter))) == 1
    places = [p.data_ptr() for p in find_parameters(adapter)]
    assert not lay_out(adapter)
    assert [p.data_ptr() for p in find_parameters(adapter)] == places
    plain = make()
    for batch in (first, second, third):
        plain(batch)
    assert len(find_runs(find_parameters(plain))) > 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "to"])
def test_copies_are_laid_out_again(how: str) -> None:
    _, make = make_world("tent")
    adapter = make().accelerate(compile=True)
    first, second, third, fourth = make_batches(4)
    adapter(first)
    adapter(second)
    ways = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda own: pickle.loads(pickle.dumps(own)),  # noqa: S301
        "to": Adapter.float,
    }
    other = ways[how](copy.deepcopy(adapter))
    for batch in (third, fourth):
        torch.testing.assert_close(other(batch), adapter(batch))
    assert len(find_runs(find_parameters(other))) == 1


def test_a_saved_state_has_memory_of_its_own() -> None:
    """Else each of its tensors is pickled with all neighbours, and safetensors refuses the whole."""
    _, make = make_world("ttvd")
    adapter = make().accelerate(compile=True)
    for batch in make_batches(3):
        adapter(batch)
    state = adapter.state_dict()
    numbers = sum(tensor.nbytes for tensor in state.values())
    assert len(pickle.dumps(state)) < numbers + 1000 * len(state)
    assert len(save(state)) > numbers
    before = {name: tensor.clone() for name, tensor in state.items()}
    adapter(make_batches(1)[0])
    laid = [name for name, tensor in state.items() if tensor.ndim == 1 and tensor.numel() % 4 == 0]
    assert laid
    assert all(torch.equal(state[name], before[name]) for name in laid)


def test_autograd_sees_every_parameter_change() -> None:
    _, make = make_world("tent")
    adapter = make().accelerate(compile=True)
    for batch in make_batches(2):
        adapter(batch)
    parameters = find_parameters(adapter)
    before = [p._version for p in parameters]
    adapter(make_batches(3)[2])
    assert all(p._version > old for p, old in zip(parameters, before, strict=True))


def test_in_double_precision_no_memory_is_lost(compile_by: Compile) -> None:
    """The gradients' half of the compiler is what loses things."""
    compile_by("aot_eager")
    _, make = make_world("ttvd")
    adapter, plain = make().accelerate(compile=True).double(), make().double()
    for batch in make_batches(4):
        batch = batch.double()
        torch.testing.assert_close(adapter(batch), plain(batch))
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(adapter.state_dict()[name], wanted, msg=name)


def test_what_was_accelerated_in_inference_mode_adapts() -> None:
    _, make = make_world("ttvd")
    plain = make().accelerate(precision="bfloat16", compile=True)
    adapter = make()
    with torch.inference_mode():
        adapter.accelerate(precision="bfloat16", compile=True)
    for batch in make_batches(3):
        torch.testing.assert_close(adapter(batch), plain(batch))


def test_a_compiled_model_is_in_no_reference_cycle() -> None:
    adapter = make_world("bn")[1]().accelerate(compile=True)
    for batch in make_batches():
        adapter(batch)
    gc.collect()  # what tracing leaves behind
    gc.disable()
    try:
        parts: list[weakref.ref[Any]] = [weakref.ref(adapter), weakref.ref(adapter.model)]
        del adapter
        assert [part() for part in parts] == [None, None]
    finally:
        gc.enable()


def test_functions_are_fused_inside_of_compiled_steps_alone(compile_by: Compile) -> None:
    @fusible()
    def double(x: Tensor) -> Tensor:
        return x + x

    @fusible(writes_scalars=True)
    def count(x: Tensor) -> Tensor:
        return x.add_(1)

    names, x = compile_by.names, torch.zeros(())  # type: ignore[attr-defined]
    double(count(x))
    assert names == []
    with fusing("cpu"):
        double(count(x))
        with fusing(None):
            double(x)
    assert names == ["double"], "code compiled for a CPU loses writes to single numbers"
    with fusing("cuda"):
        count(x)
    assert names == ["double", "count"]
    assert x == 3
