"""Precision, layout and gradients: what is computed in which type, and what is not computed at all."""

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ttvd
from ttvd.methods import Episodic
from ttvd.testing import make_world

NETWORK = (
    "convolution",
    "norm",
    "relu",
    "threshold",
    "add",
    "mean",
    "copy",
    "to.",
    "detach",
    "alias",
    "view",
)
"""What a small residual network is made of, forwards and backwards: parts of the names of torch's operations."""
SHAPELESS = (
    "permute",
    "transpose",
    "squeeze",
    "expand",
    "div",
    "slice",
    "cat",
    "empty",
    "zeros",
    "ones",
    "full",
    "clone",
    "select",
    "stack",
)
OWN = {
    "ttt": {"aten.mm.default", "aten.t.default"},
    "memo": {"aten.mul.Tensor"},
    "note": {"aten.mul.Tensor", "aten.sub.Tensor", "aten.var_mean.correction"},
    "petta": {"aten.mul.Tensor"},
    "rotta": {"aten.mul.Tensor"},
}


class Watch(TorchDispatchMode):
    """Calls a function with the name, arguments and result of every operation."""

    def __init__(self, see: Callable[[str, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.see(str(function), args)
        return function(*args, **(kwargs or {}))


def make_batches(count: int = 3) -> list[Tensor]:
    return list(torch.rand(count, 6, 1, 8, 8, generator=torch.Generator().manual_seed(2)))


def tensors_in(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(tuple(value))


def half_operations(adapter: ttvd.Adapter, x: Tensor) -> set[str]:
    """Names of the operations in a step that bfloat16 goes into."""
    found: set[str] = set()

    def see(name: str, args: tuple[Any, ...]) -> None:
        if any(tensor.dtype == torch.bfloat16 for tensor in tensors_in(args)):
            found.add(name)

    adapter(x)  # what is looked at once does not count
    with Watch(see):
        adapter(x)
    return found


@pytest.mark.parametrize("name", list(ttvd.list_methods()))
def test_only_the_network_computes_in_half_precision(name: str) -> None:
    net, make = make_world(name)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    adapter, plain = make().accelerate(precision="bfloat16"), make()
    for x in make_batches():
        used = half_operations(adapter, x)
        assert used
        strange = {op for op in used if not any(part in op for part in (*NETWORK, *SHAPELESS))}
        # The network of TTT has a second head, in the precision of the network; norms may mix statistics.
        assert strange - OWN.get(name, set()) == set()
    assert adapter(x).dtype == torch.float32
    assert all(tensor.dtype != torch.bfloat16 for tensor in adapter.state_dict().values())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    found, expected = make().accelerate(precision="bfloat16").predict(x), plain.predict(x)
    assert torch.allclose(found.softmax(1), expected.softmax(1), atol=0.05)


@pytest.mark.parametrize(
    "name", ["ttvd", "ttvd-paper", "ttvd-reference", "vd", "civd", "cipd", "t3a", "lame", "tast"]
)
def test_the_geometry_is_in_float32_inside_of_autocast(name: str) -> None:
    adapter, x = make_world(name)[1](), make_batches()[0]
    with torch.autocast("cpu", torch.bfloat16):
        used = half_operations(adapter, x)
        assert adapter(x).dtype == torch.float32
    # What the caller's autocast does with the last layer of the network is the caller's business.
    strange = {op for op in used if not any(part in op for part in (*NETWORK, *SHAPELESS))}
    assert strange - {"aten.mm.default", "aten.addmm.default", "aten.t.default"} == set()


def test_frozen_weights_are_not_cast_in_every_step() -> None:
    adapter, (x, *_) = make_world("tent")[1]().accelerate(precision="bfloat16"), make_batches()
    shapes = {tuple(p.shape) for p in adapter.model.parameters() if p.ndim == 4}
    cast: list[str] = []

    def see(name: str, args: tuple[Any, ...]) -> None:
        if "_to_copy" in name and any(tuple(tensor.shape) in shapes for tensor in tensors_in(args)):
            cast.append(name)

    adapter(x)
    with Watch(see):
        adapter(x)
    assert not cast


@pytest.mark.parametrize("name", ["tent", "ttvd", "shot", "cotta"])
def test_channels_last_changes_the_layout_and_nothing_else(name: str) -> None:
    net, make = make_world(name)
    adapter, plain = make().accelerate(channels_last=True), make()
    weights = [p for p in adapter.model.parameters() if p.ndim == 4 and p.shape[1] > 1]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    assert all(p.is_contiguous() for p in net.parameters())
    for x in make_batches():
        assert torch.allclose(adapter(x).softmax(1), plain(x).softmax(1), atol=1e-4)
    found, expected = adapter.state_dict(), plain.state_dict()
    assert all(torch.allclose(found[key].float(), expected[key].float(), atol=1e-3) for key in expected)


@pytest.mark.parametrize(
    ("name", "learns"), [("tent", False), ("ttvd", False), ("sar", False), ("shot", True)]
)
def test_weights_that_do_not_adapt_get_no_gradient(name: str, learns: bool) -> None:
    adapter, (x, *_) = make_world(name)[1](), make_batches()
    weight_gradients: list[bool] = []

    def see(function: str, args: tuple[Any, ...]) -> None:
        if "convolution_backward" in function:
            weight_gradients.append(args[-1][1])

    with Watch(see):
        adapter(x)
    assert weight_gradients
    assert all(wanted == learns for wanted in weight_gradients)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state"])
def test_an_accelerated_adapter_can_be_copied_and_saved(how: str) -> None:
    _, make = make_world("ttvd")
    adapter, batches = make().accelerate(precision="bfloat16", channels_last=True), make_batches(4)
    adapter(batches[0])
    if how == "state":
        twin = make().accelerate(precision="bfloat16", channels_last=True)
        twin.load_state_dict({key: value.clone() for key, value in adapter.state_dict().items()})
    else:
        twin = copy.deepcopy(adapter) if how == "deepcopy" else pickle.loads(pickle.dumps(adapter))  # noqa: S301
    assert all(torch.equal(adapter(x), twin(x)) for x in batches[1:])


def test_policies_pass_it_on() -> None:
    policy = Episodic(make_world("tent")[1]()).accelerate(precision="bfloat16")
    policy.capture = "never"
    assert policy.adapter.capture == policy.capture == "never"
    assert half_operations(policy, make_batches()[0])


def test_what_cannot_be_meant_is_refused() -> None:
    net, make = make_world("tent")
    with pytest.raises(ValueError, match="float32, bfloat16"):
        make().accelerate(precision="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="models in float32"):
        ttvd.create("tent", net.double()).accelerate(precision="bfloat16")


def test_a_model_of_one_linear_layer_and_one_without_any() -> None:
    for net in (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()),
    ):
        adapter = ttvd.create("source", net).accelerate(precision="bfloat16", channels_last=True)
        x = make_batches()[0]
        assert torch.allclose(adapter(x), net(x), atol=0.05)
        assert adapter(x).dtype == torch.float32
