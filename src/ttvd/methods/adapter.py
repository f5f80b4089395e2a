"""The adapter: a classifier that learns from the batches it predicts.

An :class:`Adapter` is an ``nn.Module``. Calling it predicts *and* adapts; the softmax of its output is the prediction.
It owns copies of the tensors that may change and shares all others with the user's model, which it never changes.
"""

from abc import ABCMeta
from collections.abc import Hashable
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ttvd.engine.acceleration import Precision, choose_dtype, keeping_modes, prepare_network
from ttvd.engine.compiling import fusing
from ttvd.engine.module import SteppedModule
from ttvd.engine.state import copy_module
from ttvd.engine.transaction import LoggedBuffers as LoggedBuffers
from ttvd.engine.transaction import Transaction
from ttvd.geometry.precision import upcast
from ttvd.methods.shared.guard import Guard, GuardMonitor, GuardStatus, choose_guard
from ttvd.nn.anchors import Anchors, anchor_norms, need_anchors
from ttvd.nn.norms import (
    Statistics,
    TracksStream,
    Which,
    apply_statistics,
    following_stream,
    running_buffers,
    select_parameters,
)
from ttvd.nn.split import SplitModel, count_classes, exchanged, shared_copy, split, unwrap, unwrap_output

Timing = Literal["before", "after"]


def _predict(adapter: "Adapter", x: Tensor) -> Tensor:
    x = adapter.validate(x)[0]
    return adapter.predictor(x).output(x)


def _describe_guard(adapter: "Adapter") -> GuardStatus | None:
    return adapter.guard.describe() if isinstance(adapter.guard, GuardMonitor) else None


class _Guarded(ABCMeta):
    """Gives every adapter the option ``guard``, whatever the signature of its class.

    The guard keeps copies of the state, so it is built after everything else. Abstract base classes may be mixed in.
    """

    def __call__(cls, *args: Any, guard: Guard | bool | None = None, **kwargs: Any) -> Any:
        adapter = super().__call__(*args, **kwargs)
        adapter.put_guard(guard)
        return adapter


class Adapter(SteppedModule, metaclass=_Guarded):
    """Base class of all methods.

    A subclass implements :meth:`output` (what it predicts) and, where it learns, :meth:`adapt`. Everything that
    changes must be a parameter or a persistent buffer of fixed shape: saving, resetting and moving follow from that,
    and so do transactions: a call that fails, for whatever reason, changes nothing (docs/using.md).

    Args:
        model: The classifier; it stays as it is.
        statistics: Where its batch norms take their statistics from; kept as an attribute of this name.
        parameters: Which of its parameters adapt; None for none.
        anchors: The anchors of its norms, for anchored statistics.
        guard: True for a guard (:class:`ttvd.methods.Guard`) that notices harm, stops it, and tells :attr:`status`;
            False for none; None for what the method does by default. Every subclass takes this option; none needs to
            pass it on.

    Attributes:
        guard_by_default: Whether the method has a guard unless it is told otherwise.
        guard_period: Batches between two looks of the guard, unless its settings say it.
        prediction: Whether the output of a call precedes or follows the update by the same batch.
        kept: Share of the last batch that was used to adapt, a scalar tensor.
        finite: Whether all values of the last step were finite, a scalar tensor. If not, it has changed nothing.
        validation: ``"auto"`` checks the values of every batch on a CPU and of the first batch on an accelerator,
            where checking waits for the device; ``"always"`` and ``"never"`` do what they say. ``"always"`` also waits
            for the end of each step, and takes back what a step with values that are not finite changed on the host.
        capture: ``"auto"`` records the step for each batch shape as a CUDA graph where there is such a device, from
            the second batch of that shape on. The results are the same, several times faster for small batches.
            ``"never"`` runs every step as it is written.
        networks: Names of the submodules that are copies of the model. Of these, only parameters that require
            gradients belong to the state; the rest is shared with the user's model.
        exact: Those of ``networks`` whose frozen weights are read as numbers too, and not only used to forward.
        dynamic: Why the work of a step differs from batch to batch; None where equal shapes mean equal work.
    """

    guard_by_default: ClassVar[bool] = False
    guard_period: ClassVar[int] = 40
    prediction: Timing = "before"
    exact: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: nn.Module,
        *,
        statistics: Statistics,
        parameters: Which | None = None,
        anchors: Anchors | None = None,
    ) -> None:
        super().__init__()
        if torch.is_inference_mode_enabled():
            raise RuntimeError("build the adapter outside torch.inference_mode(); it may be called inside")
        if not isinstance(statistics, Statistics):
            raise TypeError(f"statistics must be a ttvd.Statistics, got {statistics!r}; see Statistics.parse")
        model = unwrap(model)
        owned = select_parameters(model, parameters) if parameters else set()
        copied = shared_copy(model, owned | (running_buffers(model) if statistics.follows else set()))
        if statistics.anchored:
            anchor_norms(copied, need_anchors(anchors))
        self.statistics, self.model = statistics, apply_statistics(copied, statistics).eval()
        if statistics.follows:  # looked up again: a norm that is wrapped has another name now
            self._running_averages = {f"model.{name}" for name in running_buffers(self.model)}
        self.start(self.probe.device)

    def call_model(self, x: Tensor, network: nn.Module | None = None) -> Tensor:
        """Logits of the model, or of another network; a tuple, dictionary or object is unwrapped."""
        return unwrap_output((self.model if network is None else network)(x))

    def predictor(self, x: Tensor) -> "Adapter":
        """The adapter whose output :meth:`predict` returns for a batch: this one, or a copy that suits it better."""
        return self

    def output(self, x: Tensor) -> Tensor:
        """Logits (b, k) of the present state; changes nothing."""
        return upcast(self.call_model(x))

    def put_guard(self, guard: Guard | bool | None) -> None:
        """Watch the steps from now on, before the first of them."""
        settings = choose_guard(guard, self.guard_by_default)
        if settings is None:
            return
        parts = {*self.networks, "optimizer"}
        parts |= {name for name, part in self.named_children() if isinstance(part, TracksStream)}
        own, _ = self.unguarded()
        self._initial = None  # the state of the guard belongs to it
        kept = {name: tensor for name, tensor in own.items() if name.split(".")[0] in parts}
        period = settings.period or self.guard_period
        self.guard = GuardMonitor(settings, self.count_outputs(), period, kept).to(self.device)

    def count_outputs(self) -> int:
        """Number of logits that the adapter returns for an image."""
        return count_classes(self.model)

    @property
    def status(self) -> GuardStatus | None:
        """What the guard sees and does; None without a guard. Reading it waits for the device."""
        return self.lock.read(self, _describe_guard)

    def initial_output(self, x: Tensor) -> Tensor:
        """Logits (b, k) of the initial state; changes nothing."""
        with torch.no_grad(), fusing(None), exchanged(self, self.unguarded()[1]):
            return self.source_output(x)

    def source_output(self, x: Tensor) -> Tensor:
        """Logits (b, k) of the source; called in the initial state."""
        return self.output(x)

    def branch(self, x: Tensor) -> Hashable:
        """Called first for each batch, on the host: choose what the step does, as far as its tensors do not show it.

        There should be few different values. Unless it is None, :meth:`adapt` gets it as its second argument. Counters
        on the host may move here. On an accelerator they keep what they counted even if a value turns out not to be
        finite, since nobody waits to learn of it.
        """
        return None

    def random_inputs(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the random numbers of a step, before it begins; :meth:`adapt` gets them as further arguments.

        The generator is that of ``self.random_state``, a :class:`~ttvd.methods.shared.random_state.RandomState`.
        """
        return ()

    def adapt(self, x: Tensor, *inputs: Any, **_: Any) -> Tensor:
        """Learn from a batch and return its logits (b, k), from before or after as :attr:`prediction` says."""
        with torch.no_grad(), following_stream(self.model):
            return self.output(x)

    @keeping_modes
    def forward(self, x: Tensor) -> Tensor:
        """Predict and adapt.

        Args:
            x: Images (b, c, h, w) in [0, 1], or whatever floating-point input the model takes.

        Returns:
            Logits (b, k), detached; their softmax is the prediction.
        """
        with torch.inference_mode(False), self.autocasting():
            return self.runner.run(self, x)

    def advance(self, x: Tensor, transaction: Transaction) -> Tensor:
        """Predict and adapt as a part of a larger transaction, such as that of a policy."""
        with self.autocasting():
            return self.runner.run_within(self, x, transaction)

    @keeping_modes
    def predict(self, x: Tensor) -> Tensor:
        """Predict without adapting: nothing changes.

        Another thread may adapt at the same time. The prediction is that of the state before its step.
        """
        with torch.inference_mode(False), torch.no_grad(), self.autocasting(), fusing(None):
            return self.lock.read(self, partial(_predict, x=x))

    def copy_at_start(self, keep: tuple[str, ...] = ()) -> Self:
        """A copy in the state at construction, which shares all frozen weights.

        Args:
            keep: Starts of the names of what the copy takes from the present state.
        """
        self.keep_initial()
        twin = copy_module(self)
        twin.reset_where(torch.ones((), dtype=torch.bool, device=self.device), keep)
        return twin

    def accelerate(
        self, *, precision: Precision = "float32", channels_last: bool = False, compile: bool = False
    ) -> Self:
        """Trade a little precision, or some seconds at the start, for speed. What is on already stays on.

        Args:
            precision: ``"bfloat16"`` lets convolutions and linear layers compute in bfloat16 by autocast; frozen
                weights are cast once. Norms, the last layer, distances, influences, softmax, entropies and losses
                stay in float32, and so do the weights that adapt.
            channels_last: Store the channels of a pixel next to each other, which suits GPUs together with bfloat16.
            compile: Let ``torch.compile`` fuse norms, activations and sums, which takes a minute at the second batch
                of a shape. It needs a C++ compiler, and Triton on a GPU; if it fails, a warning says so.

        Returns:
            The adapter itself.

        Example:
            >>> import ttvd
            >>> net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
            >>> tent = ttvd.create("tent", net).accelerate(precision="bfloat16", channels_last=True)
            >>> tent(torch.rand(8, 1, 4, 4)).dtype
            torch.float32
        """
        self._precision = choose_dtype(precision, self.probe.dtype) or self._precision
        self.compiled = self.compiled or compile
        with torch.inference_mode(False):
            for name, network in self.named_children():
                if name not in self.networks:
                    continue
                has_linear = any(isinstance(layer, nn.Linear) for layer in network.modules())
                prepare_network(
                    network.model if isinstance(network, SplitModel) else network,
                    split(network).linear if has_linear else None,
                    dtype=self._precision,
                    channels_last=channels_last,
                    exact=name in self.exact,
                    compile=compile,
                )
        return self
