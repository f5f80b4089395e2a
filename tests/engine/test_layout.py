"""What a compiled step may change lies side by side in memory, and is otherwise as it was."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from ttvd.engine.compiling import compile_once
from ttvd.engine.flat import find_runs
from ttvd.engine.state import lay_out
from ttvd.methods import Adapter
from ttvd.testing import make_world

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def make_batches(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    numbers = torch.rand(count, 6, 1, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return list(numbers.to(dtype))


def find_parameters(adapter: Adapter) -> list[Tensor]:
    return [p for p in adapter.parameters() if p.requires_grad]


@pytest.fixture(autouse=True)
def quick_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are enough here, but where it is the gradients' half of the compiler that loses things."""
    backend = "aot_eager" if "double" in request.node.name else "eager"
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda code, **options: whole(code, backend=backend, **options))
    compile_once.cache_clear()
    yield
    compile_once.cache_clear()


def test_steps_that_are_compiled_have_their_state_in_one_piece() -> None:
    _, make = make_world("ttvd")
    adapter = make().accelerate(compile=True)
    first, second, *_ = make_batches(2)
    adapter(first)
    assert len(find_runs(find_parameters(adapter))) > 1, "the first batch is not compiled"
    adapter(second)
    assert len(find_runs(find_parameters(adapter))) == 1
    places = [p.data_ptr() for p in find_parameters(adapter)]
    assert not lay_out(adapter)
    assert [p.data_ptr() for p in find_parameters(adapter)] == places
    plain = make()
    plain(first)
    plain(second)
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


def test_in_double_precision_no_memory_is_lost() -> None:
    _, make = make_world("ttvd")
    adapter, plain = make().accelerate(compile=True).double(), make().double()
    for batch in make_batches(5, torch.float64):
        torch.testing.assert_close(adapter(batch), plain(batch))
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(adapter.state_dict()[name], wanted, msg=name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_was_accelerated_in_inference_mode_adapts(precision: str) -> None:
    _, make = make_world("ttvd")
    plain = make().accelerate(precision=precision, compile=True)  # type: ignore[arg-type]
    adapter = make()
    with torch.inference_mode():
        adapter.accelerate(precision=precision, compile=True)  # type: ignore[arg-type]
    for batch in make_batches(3):
        torch.testing.assert_close(adapter(batch), plain(batch))
