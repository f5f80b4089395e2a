"""Optimizers whose step can be switched off by a tensor.

A gate of 0 leaves parameters and slots exactly as they were, and the host never reads the gate: an empty selection
changes nothing even with momentum, and a step can be recorded as a CUDA graph. All slots are buffers over the
concatenated parameters, so they are saved, moved and reset with the adapter.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ttvd.engine.compiling import fusible
from ttvd.engine.flat import find_largest, find_runs, flatten, note_change, unflatten


class GatedOptimizer(nn.Module):
    """Base class: gathers the gradients, computes a :meth:`direction`, and applies it where the gate is open."""

    def __init__(self, size: int, lr: float, like: Tensor) -> None:
        super().__init__()
        if not 0.0 <= lr < math.inf:
            raise ValueError(f"lr must be a finite number, at least 0, got {lr}")
        self.lr = lr
        self.size = size
        # Half-precision slots would forget small gradients and turn Adam's first correction into 0 / 0.
        self._like = like.detach().new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))

    def _add_slot(self, name: str, *shape: int) -> None:
        self.register_buffer(name, self._like.new_zeros(shape))

    def direction(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The step to subtract (before the learning rate) and the new value of every slot."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], gate: Tensor) -> Tensor:
        """Move the parameters in place if ``gate``, a scalar, is above 0 and every gradient is finite.

        Returns:
            The largest absolute value of the gradients, a scalar; NaN if one is NaN.
        """
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        gradient = flatten(pieces).to(next(self.buffers()).dtype)
        move, largest = self._apply_gate(gradient, gate)
        # One kernel for all parameters; a loop would launch one for each.
        runs = find_runs(parameters)
        torch._foreach_sub_(runs, unflatten(move, runs), alpha=self.lr)
        note_change(parameters, runs)
        # Autocast keeps half-precision copies of weights until its block ends; these are outdated now.
        torch.clear_autocast_cache()
        return largest

    @fusible()
    def _apply_gate(self, gradient: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """The step to subtract, before the learning rate, and the largest absolute value of the gradient.

        The step is zero where the gate is closed; slots move with it.
        """
        largest = find_largest([gradient])
        open_ = (gate > 0) & (largest < torch.inf)
        step, slots = self.direction(gradient)
        for name, new in slots.items():
            slot = self.get_buffer(name)
            slot.copy_(torch.where(open_, new, slot))
        return torch.where(open_, step, 0.0), largest


class GatedSGD(GatedOptimizer):
    """SGD with momentum, Nesterov's by default, as in ``torch.optim.SGD``."""

    def __init__(
        self, size: int, lr: float, like: Tensor, *, momentum: float = 0.9, nesterov: bool = True
    ) -> None:
        super().__init__(size, lr, like)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        self.momentum = momentum
        self.nesterov = nesterov and momentum > 0.0
        self._add_slot("velocity", size)

    def direction(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradient plus momentum."""
        velocity = torch.add(gradient, self.get_buffer("velocity"), alpha=self.momentum)
        step = torch.add(gradient, velocity, alpha=self.momentum) if self.nesterov else velocity
        return step, {"velocity": velocity}


class GatedAdam(GatedOptimizer):
    """Adam without weight decay, as in ``torch.optim.Adam``."""

    def __init__(
        self,
        size: int,
        lr: float,
        like: Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(size, lr, like)
        self.betas = betas
        self.eps = eps
        self._add_slot("first", size)
        self._add_slot("second", size)
        self._add_slot("count", 1)

    def direction(self, gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Bias-corrected first moment over the root of the second."""
        beta1, beta2 = self.betas
        count = self.get_buffer("count") + 1.0
        first = torch.lerp(self.get_buffer("first"), gradient, 1.0 - beta1)
        second = torch.lerp(self.get_buffer("second"), gradient * gradient, 1.0 - beta2)
        spread = (second / (1.0 - beta2**count)).sqrt() + self.eps
        return first / (1.0 - beta1**count) / spread, {"first": first, "second": second, "count": count}


def build_optimizer(
    name: str, parameters: Sequence[Tensor], lr: float, momentum: float, *, nesterov: bool = True
) -> GatedOptimizer:
    """The optimizer called ``name`` for these parameters; ``nesterov`` matters to SGD alone."""
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1:
        raise ValueError(f"parameters that adapt must share one dtype, got {sorted(map(str, dtypes))}")
    size = sum(p.numel() for p in parameters)
    if name == "sgd":
        return GatedSGD(size, lr, parameters[0], momentum=momentum, nesterov=nesterov)
    if name == "adam":
        return GatedAdam(size, lr, parameters[0], betas=(momentum, 0.999))
    raise ValueError(f"optimizer must be 'sgd' or 'adam', got {name!r}")
