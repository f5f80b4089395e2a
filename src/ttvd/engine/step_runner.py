"""Runs the steps of an adapter: eagerly, compiled, or as recorded CUDA graphs.

The eager step is the reference, and on a CPU without compilation the only one. On a CUDA device a small step mostly
waits for Python to launch its kernels. Recorded as a graph for a batch shape, all kernels are launched at once.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ttvd.engine.compiling import fusing, is_compiler_error
from ttvd.engine.cuda_graphs import CudaRecorder
from ttvd.engine.flat import all_finite, find_largest
from ttvd.engine.graph_guard import GraphGuard, has_hooks
from ttvd.engine.state import lay_out
from ttvd.engine.transaction import Renewed, Transaction

if TYPE_CHECKING:
    from ttvd.engine.module import SteppedModule

Key = tuple[torch.Size, torch.dtype, Hashable]

SHAPES, BRANCHES = 4, 16
"""How many batch shapes are remembered, and how many branches of each; the least recently used are dropped."""
_WARM_UPS = 2  # libraries and compilers choose their kernels in the first


class StepInputs(NamedTuple):
    """All inputs of one step.

    Attributes:
        x: The batch.
        branch: What the step does that its tensors do not show; None for a method with one branch.
        random: The random inputs, drawn before the step, on the host or on the device of the batch.
        watched: Whether the guard looks at the step.
    """

    x: Tensor
    branch: Hashable = None
    random: tuple[Tensor, ...] = ()
    watched: bool = False

    @classmethod
    def draw(cls, adapter: SteppedModule, x: Tensor) -> StepInputs:
        """Let the method choose its branch and draw its random numbers."""
        branch, state = adapter.branch(x), getattr(adapter, "random_state", None)
        watched = adapter.guard is not None and adapter.guard.count_batch()
        if state is None:
            return cls(x, branch, watched=watched)
        with state.generator() as generator:
            drawn = [adapter.random_inputs(x, generator) for _ in range(adapter.draws)]
        return cls(x, branch, tuple(tensor for step in drawn for tensor in step), watched)

    @property
    def key(self) -> Key:
        """Steps with equal keys do the same work."""
        return self.x.shape, self.x.dtype, ("watched", self.branch) if self.watched else self.branch

    def to_device(self) -> StepInputs:
        """The same with all random inputs on the device of the batch; nothing waits for the copies."""
        return self._replace(random=tuple(_send(tensor, self.x.device) for tensor in self.random))

    def arguments(self) -> tuple[Any, ...]:
        """What ``adapt`` gets besides the batch: the branch, where there are several, and the random inputs."""
        return self.random if self.branch is None else (self.branch, *self.random)


class Recorder(Protocol):
    """Records steps, so that they can be repeated on other values; :class:`CudaRecorder` is the one in use."""

    def can_record(self, x: Tensor) -> bool:
        """Whether steps on such a batch can be recorded."""

    def rehearsing(self, device: torch.device) -> AbstractContextManager[None]:
        """Run a step before its recording."""

    def record(
        self, step: Callable[[SteppedModule], Tensor], adapter: SteppedModule, device: torch.device
    ) -> Callable[[Callable[[], None]], Tensor]:
        """A function that repeats the step and returns its output; it must hold no reference to the adapter.

        It gets a function, and calls that together with the step, so that no interrupt comes between the two.
        """


class StepRunner(Renewed):
    """Runs the steps of one adapter: the first step of each batch shape eagerly, later ones recorded.

    So a short last batch never costs a recording. Recordings are dropped when anything that the step depends on
    changes (:class:`~ttvd.engine.graph_guard.GraphGuard`), and are not copied or saved with the adapter. A step that
    cannot be recorded runs eagerly, after one warning that says why; so does one for which the compiler fails.

    The runner holds no reference to its adapter: dropping the adapter frees its recordings at once.

    Attributes:
        obstacle: Why steps are not recorded; None as long as nothing is known against it.
        uncompiled: Whether the compiler has failed, so that networks run as they are written.
        required: Values that must be finite, or the present step changes nothing.
    """

    recorder: ClassVar[Recorder] = CudaRecorder()

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self.uncompiled = False
        self.required: list[Tensor] = []
        self._out_of_memory = False
        self.forget()

    def retry(self) -> None:
        """Try again to record steps that could not be recorded for lack of memory."""
        if self._out_of_memory:
            self.obstacle, self._out_of_memory = None, False

    def forget(self) -> None:
        """Drop all recordings."""
        self._guard: GraphGuard | None = None
        self._steps: OrderedDict[Key, CapturedStep | None] = OrderedDict()

    def run(self, adapter: SteppedModule, x: Tensor) -> Tensor:
        """Run one step on a batch, as a transaction."""
        call = _Call(self, adapter, x)
        return adapter.lock.step(adapter, call.begin, call.finish)

    def run_within(self, adapter: SteppedModule, x: Tensor, transaction: Transaction) -> Tensor:
        """Run one step on a batch, as a part of a transaction."""
        call = _Call(self, adapter, x)
        out = call.begin(transaction, lambda: None)
        return call.execute(transaction) if out is None else out

    def captured_steps(self) -> list[CapturedStep]:
        """The recordings at hand."""
        return [step for step in self._steps.values() if step is not None]

    def _records(self, adapter: SteppedModule, x: Tensor) -> bool:
        return adapter.capture == "auto" and self.obstacle is None and self.recorder.can_record(x)

    def _check_guard(self, adapter: SteppedModule, device_type: str) -> None:
        """Forget everything if the adapter is not what it was."""
        if self._guard is None or not self._guard.is_valid():
            self.forget()
            self._guard = GraphGuard(adapter, device_type, ignore=("runner",))

    def _find_captured(self, adapter: SteppedModule, inputs: StepInputs) -> CapturedStep | None:
        """The recording of such a step, made now if there is none yet; None where steps are not recorded."""
        if (captured := self._steps[inputs.key]) is None:
            if adapter.compiled and lay_out(adapter):
                self.forget()  # recordings of other shapes use the old addresses
                self._check_guard(adapter, inputs.x.device.type)
            captured = self._record(adapter, inputs) if self._records(adapter, inputs.x) else None
        self._insert(inputs.key, captured)
        return captured

    def _insert(self, key: Key, captured: CapturedStep | None) -> None:
        self._steps[key] = captured
        self._steps.move_to_end(key)
        same_shape = [other for other in self._steps if other[:2] == key[:2]]
        shapes = list(dict.fromkeys(other[:2] for other in reversed(self._steps)))
        for other in list(self._steps):
            if other in same_shape[:-BRANCHES] or other[:2] in shapes[SHAPES:]:
                del self._steps[other]

    def _record(self, adapter: SteppedModule, inputs: StepInputs) -> CapturedStep | None:
        self.obstacle = find_obstacle(adapter, inputs.x.device)
        if self.obstacle is None:
            try:
                return CapturedStep(adapter, inputs, self.recorder)
            except RuntimeError as error:
                if is_compiler_error(error):
                    raise  # this says nothing about recordings
                self.obstacle = _explain(error)
                self._out_of_memory = isinstance(error, torch.OutOfMemoryError)
        _warn_once(
            f"{type(adapter).__name__} runs its steps one kernel at a time, not as CUDA graphs: {self.obstacle}. "
            "adapter.capture = 'never' says that this is meant."
        )
        return None


class _Call:
    """One step of an adapter on one batch, in the parts that :meth:`~ttvd.engine.transaction.StepLock.step` runs.

    Args:
        runner: Runs the steps of the adapter.
        adapter: The adapter.
        x: The batch.
    """

    inputs: StepInputs
    checked: bool
    tracked: bool

    def __init__(self, runner: StepRunner, adapter: SteppedModule, x: Tensor) -> None:
        self._runner, self._adapter, self._x = runner, adapter, x

    def begin(self, transaction: Transaction, commit: Callable[[], None]) -> Tensor | None:
        """Check the batch, draw the random numbers, and launch the step if it is recorded.

        Args:
            transaction: The transaction that the step is a part of.
            commit: Ends the transaction. A recorded step calls it in the same moment as it is launched.
        """
        adapter, runner = self._adapter, self._runner
        adapter.keep_initial()
        if not (adapter.is_known(self._x) and runner.captured_steps()):
            transaction.save()  # only a recorded step changes nothing before it is launched
        x, self.checked = adapter.validate(self._x)
        self.inputs = StepInputs.draw(adapter, x)
        self.tracked = adapter.compiled or runner._records(adapter, x)
        if self.tracked:
            runner._check_guard(adapter, x.device.type)
        captured = runner._steps.get(self.inputs.key) if self.tracked else None
        if captured is None or adapter.validation == "always":
            return None
        runner._insert(self.inputs.key, captured)
        return captured.replay(self.inputs, commit)

    def finish(self, transaction: Transaction) -> Tensor:
        """Run the step; if a value was not finite, it has changed nothing."""
        out = self.execute(transaction)
        undo_unless_finite(self._adapter, transaction, wait=can_wait(self._adapter))
        return out

    def execute(self, transaction: Transaction) -> Tensor:
        """Run the step, compiled if that is asked for and works."""
        adapter, runner, key = self._adapter, self._runner, self.inputs.key
        seen = self.tracked and key in runner._steps
        if seen and adapter.compiled and not runner.uncompiled:
            try:
                with fusing(adapter.device.type):
                    return self._execute_seen(transaction)
            except Exception as error:
                if not is_compiler_error(error):
                    raise
                self._give_up_compiling(error, transaction)
        with fusing(None):
            if seen:
                return self._execute_seen(transaction)
            out = self._execute_eager(transaction)
        if self.tracked:
            runner._check_guard(adapter, self.inputs.x.device.type)  # a first step may settle attributes
            runner._insert(key, None)
        return out

    def _execute_seen(self, transaction: Transaction) -> Tensor:
        captured = self._runner._find_captured(self._adapter, self.inputs)
        return (
            self._execute_eager(transaction)
            if captured is None
            else captured.replay(self.inputs, lambda: None)
        )

    def _execute_eager(self, transaction: Transaction) -> Tensor:
        return run_checked(self._adapter, transaction, self.inputs.to_device(), checked=self.checked)

    def _give_up_compiling(self, error: Exception, transaction: Transaction) -> None:
        """Go on without the compiler, from the state before the step."""
        transaction.roll_back()
        self.inputs = StepInputs.draw(self._adapter, self.inputs.x)  # the same numbers again
        self._runner.uncompiled = True
        reason = " ".join(str(error).split("\n\n")[0].split())
        warnings.warn(
            f"{type(self._adapter).__name__} runs as it is written, not compiled: torch.compile failed: {reason}",
            stacklevel=7,
        )


class CapturedStep:
    """A recorded step of an adapter on batches of one shape. Recording leaves the adapter as it was.

    Args:
        adapter: The adapter whose step is recorded; no reference to it is kept.
        inputs: Inputs of such a step.
        recorder: The recorder.

    Raises:
        RuntimeError: The step cannot be recorded.
    """

    def __init__(self, adapter: SteppedModule, inputs: StepInputs, recorder: Recorder) -> None:
        x = inputs.x
        random = tuple(tensor.clone() for tensor in inputs.to_device().random)
        self._inputs = static = inputs._replace(x=x.clone(), random=random)

        def step(module: SteppedModule) -> Tensor:
            transaction = Transaction(module)
            transaction.save()
            out = run_checked(module, transaction, static, checked=False)
            undo_unless_finite(module, transaction, wait=False)
            return out

        with _Rehearsal(adapter, x.device):
            for _ in range(_WARM_UPS):
                with recorder.rehearsing(x.device):
                    step(adapter)
        with _Rehearsal(adapter, x.device) as transaction:
            try:
                self._replay = recorder.record(step, adapter, x.device)
            finally:
                transaction.drop_logs()

    def replay(self, inputs: StepInputs, commit: Callable[[], None]) -> Tensor:
        """Run the step on other inputs; the output has memory of its own.

        Args:
            inputs: The inputs.
            commit: Called in the same moment as the step is launched.
        """
        self._inputs.x.copy_(inputs.x)
        for place, tensor in zip(self._inputs.random, inputs.random, strict=True):
            place.copy_(_pin(tensor, place.device), non_blocking=True)
        return self._replay(commit).clone()


class _Rehearsal:
    """Undoes the steps inside of a block, and refuses those that change attributes or tensors of the host."""

    def __init__(self, adapter: SteppedModule, device: torch.device) -> None:
        self._transaction = Transaction(adapter)
        self._transaction.save()
        self._guard = GraphGuard(adapter, device.type, ignore=("runner",))
        hosted = _find_hosted(adapter)
        own = adapter.changing().items()
        self._on_host = [
            (tensor, tensor.clone()) for name, tensor in own if name.rpartition(".")[0] in hosted
        ]

    def __enter__(self) -> Transaction:
        return self._transaction

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        moved = any(not torch.equal(tensor, old) for tensor, old in self._on_host)
        changed = not self._guard.is_valid()
        self._transaction.roll_back()
        if kind is None and changed:
            raise RuntimeError("its step changes attributes that are not tensors")
        if kind is None and moved:
            raise RuntimeError("its step changes a part of its state that is kept on the host")


def run_checked(
    adapter: SteppedModule, transaction: Transaction, inputs: StepInputs, *, checked: bool
) -> Tensor:
    """Run a step, and let ``adapter.finite`` tell whether all values were finite; nothing waits for the device.

    Args:
        adapter: The adapter.
        transaction: The transaction that the step is a part of.
        inputs: The inputs. Values of the batch that are not finite count as 0, so that the step does not depend on
            them.
        checked: Whether the values of the batch are known to be finite.
    """
    x, guard = inputs.x, adapter.guard
    adapter.kept.fill_(1.0)
    adapter.runner.required = []
    if checked:
        adapter.finite.fill_(True)
    else:
        adapter.finite.copy_(all_finite(x))
        x = x.nan_to_num(0.0, 0.0, 0.0)
    if guard is not None:
        guard.begin()
    out = adapter.adapt(x, *inputs.arguments()).detach()
    if guard is not None and inputs.watched:
        seen = x[: guard.sample]
        reference = adapter.initial_output(seen)
        adapter.require_finite(guard.look(seen, out[: guard.sample], reference))
        adapter.observe_source(reference)
    adapter.require_finite(out.amax(), *transaction.changed_tensors(out.device))
    adapter.finite.logical_and_(find_largest(adapter.runner.required) < torch.inf)
    adapter.runner.required = []
    return out


def undo_unless_finite(adapter: SteppedModule, transaction: Transaction, *, wait: bool) -> None:
    """Undo a step in which a value was not finite, and one that the guard does not let count.

    Args:
        adapter: The adapter, after :func:`run_checked`.
        transaction: The state before the step.
        wait: Wait for the device to learn whether all was finite. Otherwise the tensors on the device are put back by
            a mask, and what is on the host, such as a random generator, moves on.
    """
    # A recorded step has been settled already, as a part of the recording.
    guard = adapter.guard if adapter.guard is not None and adapter.guard.is_stepping() else None
    counts = adapter.finite if guard is None else adapter.finite & guard.is_open()
    if not wait:
        transaction.keep_where(counts)
    elif not bool(adapter.finite):
        transaction.roll_back()
    elif not bool(counts):
        transaction.keep_where(counts)
    adapter.kept.mul_(counts)
    if guard is not None:
        guard.settle(adapter.finite, adapter.unguarded)


def can_wait(adapter: SteppedModule) -> bool:
    """Whether a step may wait for its end: on a CPU that takes no time, and ``validation="always"`` asks for it."""
    return adapter.device.type == "cpu" or adapter.validation == "always"


def find_obstacle(adapter: SteppedModule, device: torch.device) -> str | None:
    """Why the steps of an adapter cannot be recorded, as far as that can be told without trying."""
    if adapter.dynamic is not None:
        return adapter.dynamic
    hosted = _find_hosted(adapter)
    elsewhere = [
        name
        for name, tensor in adapter.changing().items()
        if tensor.device != device and name.rpartition(".")[0] not in hosted
    ]
    if elsewhere:
        return f"a part of its state is kept on the host ({', '.join(elsewhere[:3])})"
    if has_hooks(adapter):
        return "hooks are registered on its modules, and a graph would not run them"
    return None


def _find_hosted(adapter: SteppedModule) -> set[str]:
    """Names of the submodules whose state stays on the host, such as random generators and counters."""
    return {name for name, part in adapter.named_modules() if getattr(part, "on_host", False)}


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return _pin(tensor, device).to(device, non_blocking=device.type == "cuda")


def _pin(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in memory from which a CUDA device can copy without anybody waiting."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


def _explain(error: RuntimeError) -> str:
    """Why a recording failed, in one line."""
    reason = str(error).splitlines()[0]
    return f"its step synchronizes with the device ({reason})" if "captur" in reason else reason


_WARNED: set[str] = set()


def _warn_once(message: str) -> None:
    """Warn, but once in a process for each message: many adapters of a method have the same obstacle."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=2)
