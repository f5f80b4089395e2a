"""The adapter: a classifier that learns from what it is asked.

An :class:`Adapter` is an ``nn.Module``; calling it predicts *and* adapts, and the softmax of what it returns is the
prediction. It owns copies of the tensors that may change and shares all others with the model that it was given,
which it never changes.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ttvd.adapters.inputs import check_inputs
from ttvd.models.norms import Statistics, Which, apply_statistics, following_stream, select_parameters
from ttvd.models.split import shared_copy, unwrap

State = dict[str, Tensor]
Timing = Literal["before", "after"]
Validation = Literal["auto", "always", "never"]


class Adapter(nn.Module):
    """Base of all methods.

    A subclass implements :meth:`output` (what it predicts) and, where it learns, :meth:`adapt`. Everything that
    changes must be a parameter or a persistent buffer of fixed shape: saving, resetting and moving follow from that.

    Args:
        model: The classifier; it is left as it is.
        statistics: Where its batch norms take their statistics from.
        parameters: Which of its parameters adapt; None for none.

    Attributes:
        prediction: Whether what a call returns precedes or follows the update by the same batch.
        kept: Share of the last batch that was used to adapt, a scalar tensor.
        networks: Names of the submodules that are copies of the model: of these only parameters that require
            gradients belong to the state; the rest is shared with the model that was given.
        validation: ``"auto"`` checks the values of every batch on a CPU and of the first one on an accelerator
            (where looking at them would stall it), ``"always"`` and ``"never"`` say what they mean.
    """

    prediction: Timing = "before"
    networks: ClassVar[tuple[str, ...]] = ("model",)
    validation: Validation
    model: nn.Module
    kept: Tensor

    def __init__(self, model: nn.Module, *, statistics: Statistics, parameters: Which | None = None) -> None:
        super().__init__()
        if torch.is_inference_mode_enabled():
            raise RuntimeError("build the adapter outside torch.inference_mode(); it may be called inside")
        if not isinstance(statistics, Statistics):
            raise TypeError(f"statistics must be a ttvd.Statistics, got {statistics!r}; see Statistics.parse")
        model = unwrap(model)
        adapting = select_parameters(model, parameters) if parameters else set()
        follows = statistics.momentum is not None
        owned = adapting | (_running_buffers(model) if follows else set())
        self.model = apply_statistics(shared_copy(model, owned), statistics).eval()
        # Looked up again, for a norm that is wrapped has another name now.
        self._averages = {f"model.{name}" for name in _running_buffers(self.model)} if follows else set()
        self.register_buffer("kept", torch.ones((), device=self.anchor.device), persistent=False)
        self.validation = "auto"
        self._seen_batch = False
        self._begin()

    def _begin(self) -> None:
        """Nothing has changed yet, and the saved state is what may."""
        self._initial: State | None = None
        self.register_state_dict_post_hook(_drop_frozen)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_frozen)  # type: ignore[no-untyped-call]

    @property
    def anchor(self) -> Tensor:
        """A weight of the model: it tells on which device and in which type it computes."""
        weight = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        if weight is None:
            raise ValueError(f"{type(self.model).__name__} has no floating-point parameter")
        return weight

    def output(self, x: Tensor) -> Tensor:
        """Logits (b, k) of the present state; changes nothing."""
        return self.model(x)  # type: ignore[no-any-return]

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
        with torch.inference_mode(False):
            x, checked = self._admit(x)
            return (self.adapt(x) if checked else self._adapt_guarded(x)).detach()

    def _adapt_guarded(self, x: Tensor) -> Tensor:
        """Adapt to a batch whose values nobody has looked at: if one is not finite, nothing changes.

        Without waiting for the device: what is not finite counts as 0, and the state is put back by a mask.
        """
        fine = x.isfinite().all()
        before = self.snapshot()
        out = self.adapt(x.nan_to_num(0.0, 0.0, 0.0))
        with torch.no_grad():
            for name, tensor in self._changing().items():
                if tensor.device == fine.device:
                    tensor.copy_(torch.where(fine, tensor, before[name]))
            self.kept.mul_(fine)
        return out

    def predict(self, x: Tensor) -> Tensor:
        """Predict without adapting: nothing changes."""
        with torch.inference_mode(False), torch.no_grad():
            return self.output(self._admit(x)[0])

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

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over the state of another adapter of the same method and model; always strict, always a copy."""
        own = self._changing()
        wrong = sorted(set(own) ^ set(state_dict)) + [
            name for name, t in own.items() if name in state_dict and state_dict[name].shape != t.shape
        ]
        if wrong:
            raise ValueError(
                f"this state is not one of a {type(self).__name__} on this model: {len(wrong)} entries are missing, "
                f"unknown or of another shape, the first is {wrong[0]!r}. Build the adapter with the same model, "
                "method and parameters as the one that was saved."
            )
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
        parameters = {name: p.data for name, p in self.named_parameters() if p.requires_grad}
        passing = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.named_modules()
            for name in module._non_persistent_buffers_set
        }
        buffers = {
            name: buffer
            for name, buffer in self.named_buffers()
            if name in self._averages or not (name in passing or name.split(".")[0] in self.networks)
        }
        return parameters | buffers

    def _remember(self) -> None:
        """Keep the initial state, the first time that it is about to change."""
        if self._initial is None:
            with torch.inference_mode(False):
                self._initial = self.snapshot()

    def _admit(self, x: Tensor) -> tuple[Tensor, bool]:
        """The batch, fit for autograd, and whether its values were looked at."""
        weight = self.anchor
        cheap = weight.device.type == "cpu" or not self._seen_batch
        values = self.validation == "always" or (self.validation == "auto" and cheap)
        check_inputs(x, device=weight.device, dtype=weight.dtype, values=values)
        x = x.clone() if x.is_inference() else x
        if not self._seen_batch:
            self._check_model(x[:2])
        self._seen_batch = True
        return x, values

    @torch.no_grad()
    def _check_model(self, x: Tensor) -> None:
        """A model that returns no logits must be refused before anything is made of them."""
        logits = self.model(x)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"the model must return logits of shape (b, k), got {got}; wrap it so that it does"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._initial is not None:
            self._initial = {name: fn(tensor) for name, tensor in self._initial.items()}
        return self


def _drop_frozen(adapter: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The saved state is what may change; frozen weights are the model's own."""
    assert isinstance(adapter, Adapter)
    for key in set(state) - {prefix + name for name in adapter._changing()}:
        if key.startswith(prefix):
            del state[key]


def _add_frozen(adapter: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A saved state that is loaded as a part of a larger module lacks the frozen weights: they are there already."""
    assert isinstance(adapter, Adapter)
    adapter._remember()
    for module_prefix, module in adapter.named_modules(prefix=prefix.removesuffix(".")):
        own: dict[str, Tensor] = {}
        module._save_to_state_dict(own, f"{module_prefix}." if module_prefix else "", keep_vars=True)
        for name, tensor in own.items():
            state.setdefault(name, tensor)


def _running_buffers(model: nn.Module) -> set[str]:
    return {
        name
        for name, _ in model.named_buffers()
        if name.rpartition(".")[2] in ("running_mean", "running_var")
    }
