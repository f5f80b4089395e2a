"""The adapter: a classifier that learns from what it is asked.

An :class:`Adapter` is an ``nn.Module``; calling it predicts *and* adapts, and the softmax of what it returns is the
prediction. It owns copies of the tensors that may change and shares all others with the model that it was given,
which it never changes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ttvd.engine.acceleration import Precision, choose_dtype, eager_networks, prepare_network
from ttvd.engine.flat import all_finite, copy_all, keep_where
from ttvd.engine.state import add_frozen, check_state, drop_frozen, find_changing
from ttvd.engine.step_inputs import Agenda, Plan
from ttvd.engine.step_runner import Steps
from ttvd.engine.validation import check_inputs, check_logits, looks_at_values
from ttvd.geometry.precision import upcast
from ttvd.nn.anchors import Anchors, anchor_norms, need_anchors
from ttvd.nn.norms import (
    Statistics,
    Which,
    apply_statistics,
    following_stream,
    running_buffers,
    select_parameters,
)
from ttvd.nn.split import shared_copy, unwrap

State = dict[str, Tensor]
Timing = Literal["before", "after"]
Validation = Literal["auto", "always", "never"]
Capture = Literal["auto", "never"]


class Adapter(nn.Module):
    """Base of all methods.

    A subclass implements :meth:`output` (what it predicts) and, where it learns, :meth:`adapt`. Everything that
    changes must be a parameter or a persistent buffer of fixed shape: saving, resetting and moving follow from that.

    Args:
        model: The classifier; it is left as it is.
        statistics: Where its batch norms take their statistics from; kept as an attribute of this name.
        parameters: Which of its parameters adapt; None for none.
        anchors: Of its norms, for statistics that are anchored.

    Attributes:
        prediction: Whether what a call returns precedes or follows the update by the same batch.
        kept: Share of the last batch that was used to adapt, a scalar tensor.
        networks: Names of the submodules that are copies of the model: of these only parameters that require
            gradients belong to the state; the rest is shared with the model that was given.
        validation: ``"auto"`` checks the values of every batch on a CPU and of the first one on an accelerator
            (where looking at them would stall it), ``"always"`` and ``"never"`` say what they mean.
        capture: ``"auto"`` records the step of each shape of batches as a CUDA graph where there is such a device, from
            the second batch of that shape on; with the same results, several times faster where batches are small.
            ``"never"`` runs every step as it is written.
        eager: Why a method cannot be recorded; None where it can. To be told by a method whose work changes from step
            to step: what is recorded is repeated to the letter.
        planned: Names of submodules whose state is kept on the host and changes in :meth:`plan` alone.
        exact: Those of ``networks`` whose frozen weights are used as numbers too, and not only forwarded.
    """

    prediction: Timing = "before"
    networks: ClassVar[tuple[str, ...]] = ("model",)
    exact: ClassVar[tuple[str, ...]] = ()
    eager: ClassVar[str | None] = None
    planned: ClassVar[tuple[str, ...]] = ()
    validation: Validation
    capture: Capture
    compiled: bool = False
    _precision: torch.dtype | None = None
    model: nn.Module
    kept: Tensor

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
        adapting = select_parameters(model, parameters) if parameters else set()
        follows = statistics.follows
        owned = adapting | (running_buffers(model) if follows else set())
        own = shared_copy(model, owned)
        if statistics.anchored:
            anchor_norms(own, need_anchors(anchors))
        self.statistics, self.model = statistics, apply_statistics(own, statistics).eval()
        # Looked up again, for a norm that is wrapped has another name now.
        self._averages = {f"model.{name}" for name in running_buffers(self.model)} if follows else set()
        self.register_buffer("kept", torch.ones((), device=self.probe.device), persistent=False)
        self.validation = self.capture = "auto"
        self._seen_batch = self._fits = False
        self._begin()

    def _begin(self) -> None:
        """Nothing has changed yet, and the saved state is what may."""
        self._initial: State | None = None
        self._steps = Steps()
        self.agenda = Agenda()
        self.register_state_dict_post_hook(drop_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(add_frozen)  # type: ignore[no-untyped-call]

    @property
    def probe(self) -> Tensor:
        """A weight of the model: it tells on which device and in which type it computes."""
        weights = (p for p in self.model.parameters() if p.is_floating_point())
        if (weight := next(weights, None)) is None:
            raise ValueError(f"{type(self.model).__name__} has no floating-point parameter")
        if weight.dtype != self._precision:
            return weight
        return next((p for p in weights if p.dtype != self._precision), weight)

    def accelerate(
        self, *, precision: Precision = "float32", channels_last: bool = False, compile: bool = False
    ) -> Self:
        """Trade a little precision, or some seconds at the start, for speed. What is on already stays on.

        Args:
            precision: ``"bfloat16"`` lets convolutions and linear layers compute in bfloat16, by autocast; frozen
                weights are cast once. Norms, the last layer, distances, influences, softmax, entropies and losses
                stay in float32, and so do the weights that adapt.
            channels_last: Store images with their channels together, which GPUs want together with bfloat16.
            compile: Let ``torch.compile`` fuse norms, activations and sums, which takes a minute at the second batch of
                a shape. A C++ compiler is needed, and Triton on a GPU; if it fails, a warning says so.

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
            for name in self.networks:
                network, exact = self.get_submodule(name), name in self.exact
                prepare_network(network, self._precision, channels_last, exact=exact, compile=compile)
        return self

    def output(self, x: Tensor) -> Tensor:
        """Logits (b, k) of the present state; changes nothing."""
        return upcast(self.model(x))

    def plan(self, x: Tensor) -> Plan:
        """Draw and decide on the host what the step on a batch needs; it finds that in ``self.agenda``.

        What it changes stays changed, even if the step finds its batch to be not finite.
        """
        return Plan()

    def adapt(self, x: Tensor) -> Tensor:
        """Learn from a batch and return its logits (b, k), from before or after as :attr:`prediction` says."""
        with torch.no_grad(), following_stream(self.model):
            return self.output(x)

    def forward(self, x: Tensor) -> Tensor:
        """Predict and adapt.

        Args:
            x: Images (b, c, h, w) in [0, 1], or whatever floating-point input the model takes.

        Returns:
            Logits (b, k), detached; their softmax is the prediction.
        """
        self._remember()
        with torch.inference_mode(False), self._computing():
            return self._steps.run(self, *self._admit(x))

    def _take(self, x: Tensor, checked: bool) -> Tensor:
        """One step as it is written. A batch that was not ``checked`` and is not finite changes nothing.

        Without waiting for the device: what is not finite counts as 0, and the state is put back by a mask.
        """
        if checked:
            return self.adapt(x).detach()
        fine = all_finite(x)
        before = copy_all(list(self._changing().values()))
        out = self.adapt(x.nan_to_num(0.0, 0.0, 0.0)).detach()
        keep_where(fine, list(self._changing().values()), before)
        self.kept.mul_(fine)
        return out

    def predict(self, x: Tensor) -> Tensor:
        """Predict without adapting: nothing changes."""
        with torch.inference_mode(False), torch.no_grad(), self._computing(), eager_networks(self.compiled):
            return self.output(self._admit(x)[0])

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """In the precision that was asked for, else in the caller's."""
        # What autocast remembers may be of old weights, or made where no gradient was wanted.
        torch.clear_autocast_cache()
        own = self._precision is not None
        with torch.autocast(self.kept.device.type, self._precision) if own else nullcontext():
            yield

    def snapshot(self) -> State:
        """A copy of everything that may change."""
        return {name: tensor.detach().clone() for name, tensor in self._changing().items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a :meth:`snapshot`."""
        self._remember()
        with torch.inference_mode(False):
            for name, tensor in self._changing().items():
                tensor.copy_(state[name])

    def reset(self) -> None:
        """Go back to the state at construction: weights, optimizer, memories, averages."""
        if self._initial is not None:
            self.restore(self._initial)

    def renew(self) -> None:
        """Be as if just built, for another stream: :meth:`reset`, and the first batch is looked at again.

        What was recorded for the speed of the steps is still there.
        """
        self.reset()
        self.kept.fill_(1.0)
        for part in self._adapters():
            part._seen_batch = False
            part._steps.retry()

    def release(self) -> None:
        """Give back the memory of recorded steps; they are recorded again when they are needed."""
        for part in self._adapters():
            part._steps.forget()

    def _adapters(self) -> Iterator["Adapter"]:
        """This one, and those inside."""
        return (part for part in self.modules() if isinstance(part, Adapter))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over the state of another adapter of the same method and model; always strict, always a copy."""
        check_state(self, state_dict)
        self.restore(state_dict)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Nothing: which parameters adapt was decided at construction."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the flag of the adapter alone: its model stays in evaluation mode, so that dropout stays off."""
        self.training = mode
        return self

    def _changing(self) -> State:
        return find_changing(self)

    def _remember(self) -> None:
        """Keep the initial state, the first time that it is about to change."""
        if self._initial is None:
            with torch.inference_mode(False):
                self._initial = self.snapshot()

    def _admit(self, x: Tensor) -> tuple[Tensor, bool]:
        """The batch, fit for autograd, and whether its values were looked at."""
        weight = self.probe
        cheap = weight.device.type == "cpu" or not self._seen_batch
        values = looks_at_values(self.validation, cheap)
        check_inputs(x, device=weight.device, dtype=weight.dtype, values=values)
        x = x.clone() if x.is_inference() else x
        if not self._fits:
            self._check_model(x[:2])
        self._seen_batch = self._fits = True
        return x, values

    @torch.no_grad()
    def _check_model(self, x: Tensor) -> None:
        """A model that returns no logits must be refused before anything is made of them."""
        with eager_networks(self.compiled):
            check_logits(self.model(x), len(x))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._initial is not None:
            self._initial = {name: fn(tensor) for name, tensor in self._initial.items()}
        self._steps = Steps()
        return self
