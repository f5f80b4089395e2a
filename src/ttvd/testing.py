"""The conformance suite: checks the contract of adapters on any method and model.

Each check takes a factory that builds a fresh adapter and a list of batches. A failed promise raises
:class:`ConformanceError`, which names the promise.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ttvd.methods import create, list_methods
from ttvd.methods.adapter import Adapter
from ttvd.methods.gradient import GradientAdapter
from ttvd.methods.policies import Policy
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet
from ttvd.nn.rotation import RotationNet
from ttvd.source import collect_features, estimate_fisher
from ttvd.zoo.sites import Sites

Make = Callable[[], Adapter]
Check = Callable[[Make, nn.Module, Sequence[Tensor]], None]


class ConformanceError(AssertionError):
    """A promise of the adapter contract is broken."""


def check_adapter(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> list[str]:
    """Check a method against the contract of :class:`~ttvd.Adapter`.

    Args:
        make: Builds a new adapter around ``model`` at each call.
        model: The classifier that ``make`` uses, to see that it stays as it is.
        batches: At least three batches of inputs, of two samples or more each; they stay as they are.

    Returns:
        The names of the promises that were checked.

    Raises:
        ConformanceError: A promise is broken.

    Example:
        >>> import ttvd
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> images = list(torch.rand(3, 8, 1, 2, 2))
        >>> len(ttvd.check_adapter(lambda: ttvd.create("tent", net), net, images)) > 10
        True
    """
    if len(batches) < 3 or any(len(batch) < 2 for batch in batches):
        raise ValueError("check_adapter needs at least three batches of two samples or more")
    for check in CHECKS:
        check(make, model, batches)
    return [check.__name__.removeprefix("check_") for check in CHECKS]


def _demand(holds: bool, promise: str) -> None:
    if not holds:
        raise ConformanceError(promise)


def _run(adapter: Adapter, batches: Sequence[Tensor]) -> list[Tensor]:
    return [adapter(batch) for batch in batches]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _values(state: dict[str, Tensor]) -> list[Tensor]:
    return [state[name] for name in sorted(state)]


def check_output(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Logits (b, k): floating, finite, detached, on the device of the input; the input stays as it is."""
    before = [batch.clone() for batch in batches]
    for batch, out in zip(batches, _run(make(), batches), strict=True):
        _demand(
            out.ndim == 2 and len(out) == len(batch), f"the output must be (b, k), got {tuple(out.shape)}"
        )
        _demand(
            out.is_floating_point() and out.device == batch.device,
            "the output must be floating, on the same device",
        )
        _demand(not out.requires_grad, "the output must be detached")
        _demand(bool(out.isfinite().all()), "the output must be finite")
    _demand(_same(before, batches), "the input must not be modified")


def check_reset(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """After reset() the same stream gives the same output, to the last bit, and so does a new adapter."""
    adapter = make()
    first = _run(adapter, batches)
    adapter.reset()
    _demand(_same(first, _run(adapter, batches)), "after reset() the same stream must give identical outputs")
    _demand(
        _same(first, _run(make(), batches)), "a new adapter must give identical outputs on the same stream"
    )


def check_state(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """State saved in mid-stream and loaded into a new adapter: the stream goes on identically, and can be reset."""
    adapter, other = make(), make()
    fresh = _run(make(), batches)
    adapter(batches[0])
    saved = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
    other.load_state_dict(saved)
    _demand(
        _same(_run(adapter, batches[1:]), _run(other, batches[1:])),
        "a state saved mid-stream and loaded into a new adapter must go on identically",
    )
    other.reset()
    _demand(_same(fresh, _run(other, batches)), "reset() after load_state_dict() must go back to the source")


def check_snapshot(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """restore() undoes what happened since snapshot()."""
    adapter = make()
    adapter(batches[0])
    snapshot = adapter.snapshot()
    first = _run(adapter, batches[1:])
    adapter.restore(snapshot)
    _demand(_same(first, _run(adapter, batches[1:])), "restore() must undo what happened since snapshot()")


def check_predict(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """predict() changes nothing and repeats itself."""
    adapter = make()
    adapter(batches[0])
    before = adapter.snapshot()
    first, second = adapter.predict(batches[1]), adapter.predict(batches[1])
    _demand(torch.equal(first, second), "predict() must repeat itself")
    _demand(_same(_values(before), _values(adapter.snapshot())), "predict() must not change the state")
    _demand(not first.requires_grad, "predict() must return a detached tensor")


def check_model_untouched(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """The user's model: weights, buffers, .grad, requires_grad, train flags and hooks stay as they are."""
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    try:
        before = _describe(model)
        _run(make(), batches)
        after = _describe(model)
        left = all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    finally:
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
    for (promise, old), new in zip(before.items(), after.values(), strict=True):
        same = _same(old, new) if promise == "weights and buffers" else old == new
        _demand(same, f"the user's model must not change: its {promise} did")
    _demand(left, "gradients that the user's model held must stay")


def _describe(model: nn.Module) -> dict[str, list[Any]]:
    modules = list(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "weights and buffers": [tensor.detach().clone() for tensor in tensors],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "train flags": [m.training for m in modules],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules],
    }


def check_refused_batch(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """A batch with a value that is not finite changes nothing, even where values are not checked."""
    adapter = make()
    adapter(batches[0])
    adapter.validation = "never"
    bad = batches[1].clone()
    bad.view(-1)[0] = float("nan")
    before = adapter.snapshot()
    adapter(bad)
    if not isinstance(adapter, Policy):  # which may choose this moment to start again
        kept = {name: tensor for name, tensor in adapter.snapshot().items() if tensor.is_floating_point()}
        same = _same(_values(kept), _values({name: before[name] for name in kept}))
        _demand(same, "a batch that is not finite must not change the state")
    finite = bool(adapter(batches[2]).isfinite().all())
    _demand(finite, "after a batch that is not finite the output must be finite")


def check_empty_selection(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Where a gradient method keeps no sample, parameters and optimizer slots stay as they are."""
    adapter = make()
    shared = (GradientAdapter.adapt, GradientAdapter.after_step)
    if not isinstance(adapter, GradientAdapter) or (type(adapter).adapt, type(adapter).after_step) != shared:
        return  # its own step decides what an empty selection means, and its own tests check that
    adapter(batches[0])
    before, full = adapter.snapshot(), adapter.loss
    nothing = torch.zeros_like(adapter.kept)
    adapter.loss = lambda x, *random: full(x, *random)._replace(kept=nothing)  # type: ignore[method-assign]
    adapter(batches[1])
    parameters = {name for name, p in adapter.named_parameters() if p.requires_grad}
    watched = [name for name in before if name in parameters or name.startswith("optimizer.")]
    after = adapter.snapshot()
    same = _same([before[name] for name in watched], [after[name] for name in watched])
    _demand(same, "an empty selection must leave parameters and optimizer slots alone")


def check_grad_modes(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Inside no_grad and inference_mode the output is the same, and the mode is given back."""
    expected = _run(make(), batches)
    for mode in (torch.no_grad, torch.inference_mode):
        adapter = make()
        with mode():
            outputs = _run(adapter, [batch.clone() for batch in batches])
            _demand(not torch.is_grad_enabled(), f"{mode.__name__} must still hold after a call")
        _demand(_same(expected, outputs), f"inside {mode.__name__} the outputs must be the same")
    _demand(torch.is_grad_enabled(), "the grad mode must be given back")


def check_batch_sizes(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """A batch of one and a short last batch work; so does going on after them."""
    adapter = make()
    for batch in (batches[0], batches[1][:1], batches[2][:2], batches[0]):
        out = adapter(batch)
        _demand(len(out) == len(batch), "a batch of one and a short last batch must work")
        _demand(bool(out.isfinite().all()), "a small batch must not make the output infinite or NaN")


def check_constant_inputs(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Constant images leave the output finite, then and afterwards."""
    for value in (0.0, 0.5, 1.0):
        adapter = make()
        outputs = _run(adapter, [torch.full_like(batches[0], value)] * 2 + list(batches))
        _demand(
            all(bool(out.isfinite().all()) for out in outputs),
            f"images that are all {value} must be survived",
        )


def check_global_state(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Neither depends on the global random generator nor moves it."""
    torch.manual_seed(1)
    first = _run(make(), batches)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = _run(make(), batches)
    _demand(_same(first, second), "the output must not depend on the global random generator")
    torch.manual_seed(1)
    _demand(torch.equal(state, torch.get_rng_state()), "the global random generator must not be used")


def check_training_flag(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """train() and eval() make no difference: dropout stays off."""
    adapter = make()
    expected = _run(make(), batches)
    _demand(_same(expected, _run(adapter.train(), batches)), "train() must not change what the adapter does")


def check_memory(make: Make, model: nn.Module, batches: Sequence[Tensor], repeats: int = 100) -> None:
    """The state keeps its shapes, and the number of living tensors does not grow with the stream."""
    adapter = make()
    small = [batch[:2] for batch in batches]
    _run(adapter, small)
    shapes = {name: tuple(t.shape) for name, t in adapter.snapshot().items()}
    with _count_new_elements() as grown:
        for step in range(repeats):
            adapter(small[step % len(small)])
    now = {name: tuple(tensor.shape) for name, tensor in adapter.snapshot().items()}
    _demand(shapes == now, "state must keep its shapes")
    promise = f"memory must not grow with the stream; it grew by {grown[0]} elements"
    _demand(grown[0] <= small[0].numel() * 4, promise)


@contextmanager
def _count_new_elements() -> Iterator[list[int]]:
    """Count by how many elements living tensors grow inside; the list holds the number afterwards."""
    old = [(weakref.ref(tensor), tensor.numel()) for tensor in _find_tensors()]
    grown = [0]
    gc.freeze()  # objects that exist now need not be searched again
    try:
        yield grown
        gc.collect()
        gone = sum(size for known, size in old if known() is None)
        grown[0] = sum(tensor.numel() for tensor in _find_tensors()) - gone
    finally:
        gc.unfreeze()


def _find_tensors() -> Iterator[Tensor]:
    return (found for found in gc.get_objects() if issubclass(type(found), Tensor))


CHECKS: tuple[Check, ...] = (
    check_output,
    check_reset,
    check_state,
    check_snapshot,
    check_predict,
    check_model_untouched,
    check_refused_batch,
    check_empty_selection,
    check_grad_modes,
    check_batch_sizes,
    check_constant_inputs,
    check_global_state,
    check_training_flag,
    check_memory,
)


CLASSES = 3
_DIM = 8
_TEMPERATURES = {"vd": 1.0, "pd": 1.0, "civd@-0.8": 0.05, "cipd@-0.8": 0.05, "civd@1": 1.0, "cipd@1": 4.0}
_ROTATION_LOSS = 1.4
_QUICK: dict[str, dict[str, Any]] = {
    "cotta": {"views": 3},
    "memo": {"views": 2},
    "note": {"period": 4, "capacity": 8},
    "rdumb": {"batches": 2},
    "rotta": {"period": 4, "capacity": 8},
    "ttt": {"copies": 4},
}
"""Fewer copies and shorter periods than in the papers, so that a few small batches exercise everything."""


def make_world(
    name: str, *, norm: str = "batch", rotations: bool = True, device: str = "cpu", **parameters: Any
) -> tuple[nn.Module, Callable[[], Adapter]]:
    """A model of 3 classes for images (b, 1, h, w), and a function that builds a method around it.

    The model is untrained but confident, so that methods which keep confident samples keep some.

    Args:
        name: A registered method.
        norm: ``"batch"`` or ``"group"``; a method that needs instance-aware norms gets those.
        rotations: Whether the head of a model with sites tells rotations apart.
        device: Device of the model and its sites.
        **parameters: Parameters of the method.

    Example:
        >>> net, make = make_world("tent")
        >>> make()(torch.rand(4, 1, 8, 8)).shape
        torch.Size([4, 3])
    """
    needs = list_methods()[name].needs
    generator = torch.Generator().manual_seed(0)
    norm = "instance-aware" if "instance-aware norm" in needs else norm
    outputs = CLASSES * 4 if "sites" in needs and rotations else CLASSES
    sizes: dict[str, Any] = {"in_channels": 1, "widths": (8, _DIM), "blocks": (1, 1)}
    classifier = ResNet(outputs, **sizes, norm=norm, bias=True, generator=generator)
    with torch.no_grad():
        classifier.fc.weight.mul_(200.0)
    net: nn.Module = RotationNet(classifier, generator=generator) if "rotation head" in needs else classifier
    net = net.eval().to(device)
    made = _gather(needs, net, generator)
    chosen = {**_QUICK.get(name, {}), **parameters}
    return net, lambda: create(name, net, **made, **chosen)


def _gather(needs: frozenset[str], net: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """What the method needs from source data."""
    device = next(net.parameters()).device
    images = torch.rand(12, 1, 8, 8, generator=generator).to(device)
    labels = (torch.arange(12) % CLASSES).to(device)
    made: dict[str, Any] = {}
    if "sites" in needs:
        means = torch.randn(CLASSES, 4, _DIM, generator=generator).double()
        counts = torch.ones(CLASSES, 4, dtype=torch.int64)
        made["sites"] = Sites(
            means, counts, fingerprint(net), temperatures=_TEMPERATURES, rotation_loss=_ROTATION_LOSS
        )
    if "features" in needs:
        made["features"] = collect_features(net, (images, labels))
    if "fisher" in needs:
        made["fisher"] = estimate_fisher(net, images)
    return made
