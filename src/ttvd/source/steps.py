"""Training steps: the losses of the objectives, and the steps themselves, eager or recorded as a CUDA graph."""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ttvd.engine.cuda_graphs import capturing, refusing_to_wait
from ttvd.engine.graph_guard import GraphGuard, has_hooks
from ttvd.nn.augment import crop_and_flip
from ttvd.nn.split import unwrap_output
from ttvd.nn.views import join_labels, rotate
from ttvd.source.config import TrainingConfig, TrainingState
from ttvd.source.distributed import Group
from ttvd.source.features import to_unit

VIEWS = 4
"""SLA and the rotation head learn the four quarter turns, as in the paper and in TTAB."""

_WARM_UPS = (
    3  # eager steps before the recording: libraries choose their kernels, the optimizer makes its slots
)


def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and accuracy of the class."""
    return _cross_entropy(unwrap_output(model(x)), y)


def sla_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and accuracy of the joint label of class and rotation, over four rotations of every image."""
    return _cross_entropy(unwrap_output(model(rotate(x, VIEWS))), join_labels(y, VIEWS))


def rotation_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of the class plus that of the rotation head (weight 1, as in TTAB), and the accuracy."""
    loss, accuracy = _cross_entropy(unwrap_output(model(x)), y)
    forward_rotation: Callable[[Tensor], Tensor] = getattr(model, "forward_rotation")  # noqa: B009 (mypy)
    turns = torch.arange(VIEWS, device=x.device).repeat_interleave(len(x))
    return loss + F.cross_entropy(forward_rotation(rotate(x, VIEWS)).float(), turns), accuracy


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    accuracy = (logits.detach().argmax(1) == labels).float().mean()
    return F.cross_entropy(logits.float(), labels), accuracy


Objective = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
LOSSES: dict[str, Objective] = {"plain": plain_loss, "sla": sla_loss, "rotation": rotation_loss}


@torch.no_grad()
def check_model(model: nn.Module, objective: str, example: Tensor, num_classes: int) -> None:
    """Raise a ValueError if the outputs of a model in evaluation mode do not fit the objective."""
    if objective == "rotation" and not callable(getattr(model, "forward_rotation", None)):
        raise ValueError(
            "objective 'rotation' needs a second head: train ttvd.nn.rotation.RotationNet(model)"
        )
    outputs = unwrap_output(model(example)).shape[1]
    views = VIEWS if objective == "sla" else 1
    if outputs % views or outputs < num_classes * views:
        raise ValueError(
            f"objective {objective!r} with {num_classes} classes needs at least {num_classes * views} outputs "
            f"(classes x {views}), the model has {outputs}"
        )


def make_optimizer(model: nn.Module, config: TrainingConfig, recorded: bool = False) -> torch.optim.Optimizer:
    """Make the optimizer of the parameters that require gradients.

    Args:
        model: The model to train.
        config: The settings of the training.
        recorded: Whether steps will be recorded as a CUDA graph.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that requires gradients")
    # A graph repeats a Python number for ever, but reads a tensor anew in every step.
    lr = torch.tensor(config.lr, device=parameters[0].device) if recorded else config.lr
    fused, decay = recorded or None, config.weight_decay
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=decay, fused=fused, capturable=recorded)
    return torch.optim.SGD(
        parameters, lr, config.momentum, weight_decay=decay, nesterov=config.nesterov, fused=fused
    )


def can_record(device: torch.device, group: Group) -> bool:
    """Return whether steps can be recorded: on a GPU, in one process."""
    return device.type == "cuda" and group.world == 1


class TrainingSteps:
    """Runs the steps of an epoch.

    Args:
        state: The training; its optimizer must be made with ``recorded=record``.
        data: All images and labels, on the device.
        group: The processes that share a batch.
        compile: Whether ``torch.compile`` compiles the forward and backward pass.
        record: Whether to record a step as a CUDA graph, if that is possible.

    Attributes:
        device: Device of the steps.
        images: Number of images.
    """

    def __init__(
        self, state: TrainingState, data: tuple[Tensor, Tensor], group: Group, compile: bool, record: bool
    ) -> None:
        self._state, self._group = state, group
        self._images, self._labels = data
        self.device, self.images = self._images.device, len(self._images)
        loss = LOSSES[state.config.objective]
        self._loss = torch.compile(loss, dynamic=False) if compile else loss
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        self._recorder = _StepRecorder(self, state) if record else None

    def run(self, order: Tensor, draws: Tensor, rates: list[float]) -> Tensor:
        """Run the steps of an epoch.

        Args:
            order: Indices of the images (steps, share), on the device.
            draws: Draws of the crops (steps, share, 3), on the device.
            rates: Learning rate of each step.

        Returns:
            Sums of loss and accuracy over the steps, (2,).
        """
        if self._recorder is not None:
            return self._recorder.run(order, draws, rates)
        totals = torch.zeros(2, device=order.device)
        for step, rate in enumerate(rates):
            for options in self._state.optimizer.param_groups:
                options["lr"] = rate
            totals += self.step(order[step], draws[step])
        return totals

    def step(self, rows: Tensor, draws: Tensor) -> Tensor:
        """Update the weights once; return loss and accuracy of this process's share of the batch, (2,)."""
        config = self._state.config
        x = crop_and_flip(to_unit(self._images[rows]), draws, config.padding)
        if config.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss, accuracy = self._loss(self._state.model, x, self._labels[rows])
        # Shares are equally large, so the mean over processes is the mean over the batch. torch.autograd.grad is used
        # because accumulated gradients belong to one CUDA stream and cannot be recorded on another.
        gradients = torch.autograd.grad(loss / self._group.world, self._parameters, allow_unused=True)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)  # fused kernels require one layout
            parameter.grad = gradient
        self._group.sum_gradients(self._parameters)
        self._state.optimizer.step()
        return torch.stack([loss.detach(), accuracy])


class _StepRecorder:
    """Replays a step that was recorded as a CUDA graph.

    What changes from step to step lies in tensors, which the graph reads at a counter. The step is recorded again if
    the model has changed other than by training. If it cannot be recorded, steps run eagerly after a warning.
    """

    def __init__(self, steps: TrainingSteps, state: TrainingState) -> None:
        self._steps, self._state = steps, state
        self._graph: torch.cuda.CUDAGraph | None = None
        self._obstacle = "hooks are registered on its modules" if has_hooks(state.model) else None
        self._guard: GraphGuard | None = None

    def run(self, order: Tensor, draws: Tensor, rates: list[float]) -> Tensor:
        if self._graph is not None and (self._guard is None or not self._guard.is_valid()):
            self._graph = None
        inputs = (order, draws, torch.tensor(rates, device=order.device))
        if self._graph is None:
            self._inputs, self._totals = inputs, torch.zeros(2, device=order.device)
            self._at = torch.zeros(1, dtype=torch.int64, device=order.device)
            self._stream = torch.cuda.Stream(order.device)
        else:
            for own, new in zip(self._inputs, inputs, strict=True):
                own.copy_(new)
            self._at.zero_()
            self._totals.zero_()
        for step in range(len(rates)):
            self._advance(step)
        return self._totals.clone()

    def _advance(self, step: int) -> None:
        """Run the next step: the first ones eagerly, the others by the graph."""
        if self._graph is None and self._obstacle is None and step >= _WARM_UPS:
            self._record()
        if self._graph is not None:
            self._graph.replay()
            return
        here = torch.cuda.current_stream(self._at.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            if step == _WARM_UPS - 1 and self._obstacle is None:
                self._rehearse()
            else:
                self._step()
        here.wait_stream(self._stream)

    def _rehearse(self) -> None:
        """Run a step that must not wait for the device, because waiting during a recording cannot be recovered."""
        try:
            with refusing_to_wait():
                self._step()
        except RuntimeError as error:
            self._give_up(error)
            self._step()

    def _record(self) -> None:
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._stream):
                self._step()
        except RuntimeError as error:
            self._give_up(error)
            return
        self._graph, self._guard = graph, GraphGuard(self._state.model, "cuda")

    def _give_up(self, error: RuntimeError) -> None:
        self._obstacle = str(error).splitlines()[0]
        warnings.warn(
            f"training runs one kernel at a time, not as a CUDA graph: {self._obstacle}. "
            "Pass capture='never' if this is intended.",
            stacklevel=2,
        )

    def _step(self) -> None:
        order, draws, rates = (values.index_select(0, self._at)[0] for values in self._inputs)
        for options in self._state.optimizer.param_groups:
            options["lr"].copy_(rates)
        self._totals += self._steps.step(order, draws)
        self._at += 1
