"""The conformance suite: checks the contract of adapters on any method and model.

Each check takes a factory that builds a fresh adapter and a list of batches. A failed promise raises
:class:`ConformanceError`, which names the promise.
"""

import gc
import math
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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
    source = _Source(make)
    for check in CHECKS:
        check(source, model, batches)
    return [check.__name__.removeprefix("check_") for check in CHECKS]


def _demand(holds: bool, promise: str) -> None:
    if not holds:
        raise ConformanceError(promise)


def _run(adapter: Adapter, batches: Sequence[Tensor]) -> list[Tensor]:
    return [adapter(batch) for batch in batches]


class _Source:
    """Builds adapters, and keeps the outputs of the first one, which several checks compare with."""

    def __init__(self, make: Make) -> None:
        self._make, self._fresh = make, list[Tensor]()

    def __call__(self) -> Adapter:
        return self._make()

    def run_fresh(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of a new adapter on the stream, computed at the first call."""
        self._fresh = self._fresh or [out.clone() for out in _run(self(), batches)]
        return self._fresh


def _run_fresh(make: Make, batches: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a new adapter on the stream, computed once for all checks of a method."""
    return make.run_fresh(batches) if isinstance(make, _Source) else _run(make(), batches)


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
        _same(first, _run_fresh(make, batches)),
        "a new adapter must give identical outputs on the same stream",
    )


def check_state(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """State saved in mid-stream and loaded into a new adapter: the stream goes on identically, and can be reset."""
    adapter, other = make(), make()
    fresh = _run_fresh(make, batches)
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
    expected = _run_fresh(make, batches)
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
    expected = _run_fresh(make, batches)
    _demand(_same(expected, _run(make().train(), batches)), "train() must not change what the adapter does")


def check_memory(make: Make, model: nn.Module, batches: Sequence[Tensor], repeats: int = 100) -> None:
    """The state keeps its shapes, and the number of living tensors does not grow with the stream."""
    adapter = make()
    small = [batch[:2] for batch in batches]
    _run(adapter, small)
    shapes = {name: tuple(t.shape) for name, t in adapter.snapshot().items()}
    few = small[0].numel() * 4
    with _counting_new_elements() as count:
        for step in range(repeats):
            adapter(small[step % len(small)])
            if step == repeats // 2 and count() <= few // 2:
                break  # what grows too much in all steps grows by more than this in half of them
        grown = count()
    now = {name: tuple(tensor.shape) for name, tensor in adapter.snapshot().items()}
    _demand(shapes == now, "state must keep its shapes")
    _demand(grown <= few, f"memory must not grow with the stream; it grew by {grown} elements")


@contextmanager
def _counting_new_elements() -> Iterator[Callable[[], int]]:
    """Count by how many elements living tensors have grown since the block began; yields what counts them."""
    old = [(weakref.ref(tensor), tensor.numel()) for tensor in _find_tensors()]
    gc.freeze()  # objects that exist now need not be searched again

    def count() -> int:
        gc.collect()
        gone = sum(size for known, size in old if known() is None)
        return sum(tensor.numel() for tensor in _find_tensors()) - gone

    try:
        yield count
    finally:
        gc.unfreeze()


def _find_tensors() -> list[Tensor]:
    objects = gc.get_objects()
    kinds = {id(kind): kind for kind in map(type, objects)}  # a class of somebody else may have no hash
    wanted = {number for number, kind in kinds.items() if issubclass(kind, Tensor)}
    return [found for found in objects if id(type(found)) in wanted]


def check_failed_steps(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """An error in any module, in the forward or the backward pass, leaves the state as it was."""
    adapter, twin = make(), make()
    for one in (adapter, twin):
        one(batches[0])
    for backward in (False, True):
        _fail_everywhere(adapter, batches[1][:2], backward)
    _demand(
        _same(_run(adapter, batches[1:]), _run(twin, batches[1:])),
        "after steps that failed the stream must go on as if they had not been tried",
    )


def _fail_everywhere(adapter: Adapter, batch: Tensor, backward: bool) -> None:
    """Let every call of a module raise an error, one after the other.

    An error in the backward pass is raised where the gradient of an output is known: once for each tensor, also where
    a container has the output of its last part, and nowhere for outputs without gradients.
    """
    before, outputs = adapter.snapshot(), list[Any]()
    with _hooked(adapter, lambda module, inputs, output: outputs.append(output)):
        adapter(batch)
    adapter.restore(before)
    for number in _find_differentiable_calls(outputs) if backward else range(len(outputs)):
        with _act_at(adapter, number, partial(_fail, backward=backward)):
            try:
                adapter(batch)
            except _InjectedError:
                failed = True
            else:
                failed = False
        _demand(
            not failed or _same(_values(before), _values(adapter.snapshot())),
            f"a step that fails must not change the state; call {number} of a module "
            f"({'backward' if backward else 'forward'}) failed",
        )
        if not failed:
            adapter.restore(before)


class _InjectedError(Exception):
    """The error that the suite raises inside of a step."""


def _fail(output: Any, backward: bool) -> Any:
    if not backward:
        raise _InjectedError
    for tensor in _find_differentiable(output):
        tensor.register_hook(_raise)
    return output


def _find_differentiable(output: Any) -> list[Tensor]:
    """The tensors in the output of a module that gradients flow through."""
    found = output if isinstance(output, tuple) else (output,)
    return [tensor for tensor in found if isinstance(tensor, Tensor) and tensor.requires_grad]


def _find_differentiable_calls(outputs: Sequence[Any]) -> list[int]:
    """The calls of modules that have differentiable tensors in their outputs which no earlier output has."""
    numbers, known = list[int](), set[int]()
    for number, output in enumerate(outputs):
        tensors = set(map(id, _find_differentiable(output)))
        if tensors - known:
            numbers.append(number)
        known |= tensors
    return numbers


def _raise(_: Tensor) -> Tensor:
    raise _InjectedError


@contextmanager
def _act_at(adapter: Adapter, number: int, act: Callable[[Any], Any]) -> Iterator[list[int]]:
    """Change the output of one call of a module inside of an adapter.

    Args:
        adapter: The adapter; hooks are on its parts while the block runs.
        number: Which call of a module.
        act: Gets the output and returns another one, or raises an error.

    Yields:
        A list with the number of calls so far.
    """
    calls = [0]

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        calls[0] += 1
        return act(output) if calls[0] == number + 1 else output

    with _hooked(adapter, hook):
        yield calls


@contextmanager
def _hooked(adapter: Adapter, hook: Callable[[nn.Module, Any, Any], Any]) -> Iterator[None]:
    """A hook on the forward pass of all parts of an adapter."""
    own = {adapter, getattr(adapter, "adapter", adapter)}
    handles = [part.register_forward_hook(hook) for part in adapter.modules() if part not in own]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_values_inside(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """NaN at the output of any module leaves the state as it was, unless the step does not use that output."""
    adapter, small = make(), batches[1][:2]
    adapter.validation = (
        "always"  # wait for the end of a step, so that the host learns of it on an accelerator too
    )
    adapter(batches[0])
    before = adapter.snapshot()
    out, after = adapter(small), adapter.snapshot()
    number, calls = 0, [1]
    while number < calls[0]:
        adapter.restore(before)
        with _act_at(adapter, number, _spoil) as calls:
            unused = torch.equal(adapter(small), out)
        state = _values(adapter.snapshot())
        _demand(
            _same(state, _values(before)) or (unused and _same(state, _values(after))),
            f"a step with NaN inside must not change the state; the output of call {number} of a module was NaN",
        )
        number += 1
    finite = bool(adapter(batches[2]).isfinite().all())
    _demand(finite, "after a step with NaN inside the output must be finite")


def _spoil(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(map(_spoil, output))
    return output * math.nan if isinstance(output, Tensor) and output.is_floating_point() else output


def check_interrupts(make: Make, model: nn.Module, batches: Sequence[Tensor], moments: int = 8) -> None:
    """KeyboardInterrupt at any line of a step: the step has happened as a whole, or not at all."""
    adapter, twin = make(), make()
    for one in (adapter, twin):
        one(batches[0])
    before = twin.snapshot()
    twin(batches[1])
    after = twin.snapshot()
    with _interrupting(None) as lines:
        adapter(batches[1])
    draw, modes = random.Random(0), _read_modes()
    for moment in sorted(draw.sample(range(lines[0]), min(moments, lines[0]))):
        adapter.restore(before)
        with suppress(KeyboardInterrupt), _interrupting(moment):
            adapter(batches[1])
        state = _values(adapter.snapshot())
        _demand(
            _same(state, _values(before)) or _same(state, _values(after)),
            f"an interrupted step must have happened as a whole or not at all; line {moment} was interrupted",
        )
        _demand(
            _read_modes() == modes, "an interrupted step must give back the modes of gradients and autocast"
        )
    adapter.restore(before)
    twin.restore(before)
    _demand(
        _same(_run(adapter, batches[1:]), _run(twin, batches[1:])),
        "after interrupts the stream must go on as without them",
    )


def _read_modes() -> tuple[object, ...]:
    torch.autocast_increment_nesting()
    nesting = torch.autocast_decrement_nesting()
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        nesting,
    )


_CALLBACKS = ("_dynamo", "weak")
"""Parts of the names of files with callbacks of weak references, in which Python ignores interrupts."""


@contextmanager
def _interrupting(moment: int | None) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before a line of Python, by its number; yields a list with the number of lines so far."""
    lines, before = [0], sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return None if any(part in frame.f_code.co_filename for part in _CALLBACKS) else follow

    def follow(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if moment is not None and lines[0] > moment:
                sys.settrace(before)
                raise KeyboardInterrupt
        return follow

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def check_threads(make: Make, model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Other threads may predict during a step: they see the state before it or after it. Steps take turns."""
    adapter, twin = make(), make()
    stream = [batches[0], *batches, *batches]
    expected = [twin.predict(batches[2])]
    for batch in stream:
        twin(batch)
        expected.append(twin.predict(batches[2]))
    seen = _read_beside(adapter, lambda: [adapter(batch) for batch in stream], batches[2])
    _demand(_same(_values(twin.snapshot()), _values(adapter.snapshot())), "readers must not change the state")
    for prediction in seen:
        found = any(torch.allclose(prediction, known, atol=1e-4, equal_nan=True) for known in expected)
        _demand(found, "a prediction during a step must be that of a state between two steps")
    threads = [threading.Thread(target=_run, args=(adapter, [batches[1]] * 2)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _run(twin, [batches[1]] * 4)
    same = _same(_values(twin.snapshot()), _values(adapter.snapshot()))
    _demand(same, "steps in several threads must take turns")


def _read_beside(adapter: Adapter, write: Callable[[], object], batch: Tensor) -> list[Tensor]:
    """Predictions of another thread while this one works."""
    seen, errors, done = list[Tensor](), list[BaseException](), threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                seen.append(adapter.predict(batch))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        write()
    finally:
        done.set()
        thread.join()
    _demand(not errors, f"predict() must work beside a step; it raised {errors[:1]}")
    return seen


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
    check_failed_steps,
    check_values_inside,
    check_interrupts,
    check_threads,
)


CLASSES = 3
_DIM = 8
_TEMPERATURES = {"vd": 1.0, "pd": 1.0, "civd@-0.8": 0.05, "cipd@-0.8": 0.05, "civd@1": 1.0, "cipd@1": 4.0}
_ROTATION_LOSS = 1.4
_QUICK: dict[str, dict[str, Any]] = {
    "cotta": {"views": 2},
    "eata-come": {"margin": 1.0},
    "memo": {"views": 2},
    "note": {"period": 4, "capacity": 8},
    "petta": {"update_every": 4, "memory_size": 8},
    "poem": {"delay": 0},
    "rdumb": {"batches": 2},
    "rotta": {"period": 4, "capacity": 8},
    "sar-come": {"margin": 1.0},
    "ttt": {"copies": 4},
}
"""Fewer copies, shorter periods and wider margins than in the papers, so that small batches exercise everything."""


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
            means,
            counts,
            fingerprint(net),
            temperatures=_TEMPERATURES,
            rotation_loss=_ROTATION_LOSS,
            entropies={"pd": torch.linspace(0.0, 1.0, 65, dtype=torch.float64)},
        )
    if "features" in needs:
        made["features"] = collect_features(net, (images, labels))
    if "fisher" in needs:
        made["fisher"] = estimate_fisher(net, images)
    return made
