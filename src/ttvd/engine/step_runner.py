"""Steps at the speed of the hardware: the whole step of an adapter as one CUDA graph.

The eager step is the reference, and the only one on a CPU. On a CUDA device a step waits mostly for Python to launch
its kernels; recorded as a graph for a shape of batches, all of them are launched at once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ttvd.engine.acceleration import eager_networks, is_of_compiler
from ttvd.engine.cuda_graphs import capturing, refusing_to_wait
from ttvd.engine.graph_guard import GraphGuard, has_hooks
from ttvd.engine.state import lay_out
from ttvd.engine.step_inputs import Plan, send

if TYPE_CHECKING:
    from ttvd.methods.adapter import Adapter

Key = tuple[torch.Size, torch.dtype, Hashable]
R = TypeVar("R")

SHAPES, WAYS = 4, 16
"""How many shapes of batches are remembered, and ways of a step of each; what was not seen for longest goes."""
_WARM_UPS = 2  # libraries and compilers choose their kernels in the first, the second is watched


class Steps:
    """Runs the steps of an adapter: the first one of each shape as it is written, later ones as CUDA graphs.

    So a short last batch never costs a recording. A graph is dropped when anything that the step depends on has
    changed (:class:`~ttvd.engine.graph_guard.GraphGuard`), and is not copied or saved with the adapter. A step that cannot
    be recorded runs as it is written, after one warning that says why; so does one at which the compiler fails.

    Attributes:
        obstacle: Why steps are not recorded; None as long as nothing stands against it.
        uncompiled: Whether the compiler has failed, so that networks run as they are written.
    """

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self.uncompiled = False
        self._short = False
        self.forget()

    def retry(self) -> None:
        """Try again to record what could not be recorded for lack of memory alone."""
        if self._short:
            self.obstacle, self._short = None, False

    def forget(self) -> None:
        """Drop all graphs."""
        self._guard: GraphGuard | None = None
        self._compiled: set[Key] = set()
        self._shapes: OrderedDict[Key, Recording | None] = OrderedDict()

    def run(self, adapter: Adapter, x: Tensor, checked: bool) -> Tensor:
        """Take one step on a batch; ``checked`` tells whether its values have been looked at."""
        plan = adapter.plan(x)
        key, wanted = (
            (x.shape, x.dtype, plan.way),
            x.is_cuda and adapter.capture == "auto" and self.obstacle is None,
        )
        if not (wanted or adapter.compiled):
            return _take(adapter, x, plan, checked)
        self._check_guard(adapter, x.device.type)
        if key not in self._shapes:
            with eager_networks(adapter.compiled):
                out = _take(adapter, x, plan, checked)
            self._check_guard(adapter, x.device.type)  # a first step may settle things
            self._remember(key, None)
            return out
        if (recording := self._shapes[key]) is None:
            if adapter.compiled and lay_out(adapter):
                self.forget()  # of other shapes: their graphs know the old places
                self._check_guard(adapter, x.device.type)

            def go() -> tuple[Recording | None, Tensor]:
                new = self._record(adapter, x, plan) if wanted else None
                return new, _take(adapter, x, plan, checked) if new is None else new.play(x, plan)

            recording, out = self._compile(adapter, key, go)
        else:
            out = recording.play(x, plan)
        self._remember(key, recording)
        return out

    def _check_guard(self, adapter: Adapter, device_type: str) -> None:
        """Forget everything if the adapter is not what it was."""
        if self._guard is None or not self._guard.is_valid():
            self.forget()
            self._guard = GraphGuard(adapter, device_type)

    def _remember(self, key: Key, recording: Recording | None) -> None:
        self._shapes[key] = recording
        self._shapes.move_to_end(key)
        alike = [other for other in self._shapes if other[:2] == key[:2]]
        kinds = list(dict.fromkeys(other[:2] for other in reversed(self._shapes)))
        for other in list(self._shapes):
            if other in alike[:-WAYS] or other[:2] in kinds[SHAPES:]:
                del self._shapes[other]

    def _compile(self, adapter: Adapter, key: Key, go: Callable[[], R]) -> R:
        """Do what is to be done for a shape, and where the compiler fails, do it without."""
        if not adapter.compiled or self.uncompiled or key in self._compiled:
            with eager_networks(adapter.compiled and self.uncompiled):
                return go()
        before = adapter.snapshot()
        try:
            done = go()
        except RuntimeError as error:
            if not is_of_compiler(error):
                raise
            reason = " ".join(str(error).split("\n\n")[0].split())
        else:
            if adapter.eager is None:  # else another step may have other sizes inside, to be compiled anew
                self._compiled.add(key)
            return done
        adapter.restore(before)
        self.uncompiled = True
        warnings.warn(
            f"{type(adapter).__name__} runs as it is written, not compiled: torch.compile failed: {reason}",
            stacklevel=2,
        )
        with eager_networks(True):
            return go()

    def _record(self, adapter: Adapter, x: Tensor, plan: Plan) -> Recording | None:
        self.obstacle = find_obstacle(adapter, x.device)
        if self.obstacle is None:
            before = adapter.snapshot()
            try:
                return Recording(adapter, x, plan)
            except RuntimeError as error:
                if is_of_compiler(error):
                    raise  # nothing against a recording
                self.obstacle = str(error).splitlines()[0]
                self._short = isinstance(error, torch.OutOfMemoryError)
                adapter.restore(before)
        warnings.warn(
            f"{type(adapter).__name__} runs its steps one kernel at a time, not as CUDA graphs: {self.obstacle}. "
            "adapter.capture = 'never' says that this is meant.",
            stacklevel=2,
        )
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Steps:
        return Steps()

    def __reduce__(self) -> tuple[type[Steps], tuple[()]]:
        return Steps, ()


class Recording:
    """One step of an adapter on batches of one shape, as a CUDA graph.

    Making it leaves the adapter as it was.

    Args:
        adapter: Whose step it is.
        x: A batch of the shape.
        plan: Of a step that goes the same way.

    Raises:
        RuntimeError: The step cannot be recorded.
    """

    def __init__(self, adapter: Adapter, x: Tensor, plan: Plan) -> None:
        self._x, self._plan, self._draws = x.clone(), plan, send(plan.draws, x.device)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(x.device)
        self._warm_up(adapter, stream)
        # Copies of weights that autocast keeps would be read where they lie now, by every replay.
        torch.clear_autocast_cache()
        with capturing(self._graph, stream):
            self._out = self._take(adapter)
        torch.clear_autocast_cache()

    def play(self, x: Tensor, plan: Plan) -> Tensor:
        """The step on a batch; returns logits of their own memory."""
        self._x.copy_(x)
        for place, draw in zip(self._draws, plan.draws, strict=True):
            place.copy_(draw.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._out.clone()

    def _take(self, adapter: Adapter) -> Tensor:
        adapter.agenda.begin(self._plan, self._draws)
        return adapter._take(self._x, checked=False)

    def _warm_up(self, adapter: Adapter, stream: torch.cuda.Stream) -> None:
        """Take steps that are undone: what is set up at a first step must be there before the recording."""
        before, kept, guard = adapter.snapshot(), adapter.kept.clone(), GraphGuard(adapter, "cuda")
        attributes = [(vars(module), dict(vars(module))) for module in adapter.modules()]
        stream.wait_stream(torch.cuda.current_stream(self._x.device))
        try:
            with torch.cuda.stream(stream):
                for step in range(_WARM_UPS):
                    with refusing_to_wait() if step == _WARM_UPS - 1 else contextlib.nullcontext():
                        self._take(adapter)
        finally:
            torch.cuda.current_stream(self._x.device).wait_stream(stream)
            adapter.restore(before)
            adapter.kept.copy_(kept)
            changed = not guard.is_valid()
            for own, old in attributes:
                own.update(old)
        if changed:
            raise RuntimeError("its step changes attributes that are not tensors")


def _take(adapter: Adapter, x: Tensor, plan: Plan, checked: bool) -> Tensor:
    """A step as it is written."""
    adapter.agenda.begin(plan, send(plan.draws, x.device))
    return adapter._take(x, checked)


def is_compiled(adapter: Adapter) -> bool:
    """Whether the steps of an adapter, or of one inside, are compiled: asked for, and not given up."""
    return any(part.compiled and not part._steps.uncompiled for part in adapter._adapters())


def find_obstacle(adapter: Adapter, device: torch.device) -> str | None:
    """Why the steps of an adapter cannot be recorded, as far as can be told without trying."""
    if adapter.eager is not None:
        return adapter.eager
    elsewhere = [
        name
        for name, tensor in adapter._changing().items()
        if tensor.device != device and name.split(".")[0] not in adapter.planned
    ]
    if elsewhere:
        return f"a part of its state is kept on the host ({', '.join(elsewhere[:3])})"
    if has_hooks(adapter):
        return "hooks are registered on its modules, and a graph would not run them"
    return None
