"""The steps of training: as they are written, or on a GPU as one CUDA graph that is played once a step."""

import warnings

import torch
from torch import Tensor, nn

from ttvd.engine.cuda_graphs import capturing, refusing_to_wait
from ttvd.engine.graph_guard import GraphGuard, has_hooks
from ttvd.nn.augment import crop_and_flip
from ttvd.source.config import Recipe
from ttvd.source.distributed import Group
from ttvd.source.images import to_unit
from ttvd.source.objectives import LOSSES
from ttvd.source.state import Training

_WARM_UPS = 3  # steps before the recording: libraries choose their kernels, the optimizer makes its slots


def make_optimizer(model: nn.Module, recipe: Recipe, recorded: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a recipe over the parameters that require gradients; ``recorded`` for one in a CUDA graph."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that requires gradients")
    # A graph would repeat a number for ever; a tensor is read anew by every step.
    lr = torch.tensor(recipe.lr, device=parameters[0].device) if recorded else recipe.lr
    fused, decay = recorded or None, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr, weight_decay=decay, fused=fused, capturable=recorded)
    return torch.optim.SGD(
        parameters, lr, recipe.momentum, weight_decay=decay, nesterov=recipe.nesterov, fused=fused
    )


def can_record(device: torch.device, group: Group) -> bool:
    """Whether steps may be recorded: on a GPU, in one process."""
    return device.type == "cuda" and group.world == 1


class Steps:
    """Takes the steps of an epoch.

    Args:
        training: What is trained; its optimizer is one for a graph if ``record``.
        data: All images and labels, on the device.
        group: The processes that share a batch.
        compile: Let ``torch.compile`` make kernels of the forward and backward pass.
        record: Record a step where that can be done.

    Attributes:
        device: Where the steps are taken.
        images: How many there are.
    """

    def __init__(
        self, training: Training, data: tuple[Tensor, Tensor], group: Group, compile: bool, record: bool
    ) -> None:
        self._training, self._group = training, group
        self._images, self._labels = data
        self.device, self.images = self._images.device, len(self._images)
        loss = LOSSES[training.recipe.objective]
        self._loss = torch.compile(loss, dynamic=False) if compile else loss
        self._parameters = [p for p in training.model.parameters() if p.requires_grad]
        self._recorder = _Recorder(self, training.model) if record else None

    def run(self, order: Tensor, draws: Tensor, rates: list[float]) -> Tensor:
        """Take the steps of an epoch.

        Args:
            order: Image numbers (steps, share), on the device.
            draws: Their crops (steps, share, 3), on the device.
            rates: Learning rate of each step.

        Returns:
            Sums of loss and accuracy over the steps, (2,).
        """
        if self._recorder is not None:
            return self._recorder.run(order, draws, rates)
        totals = torch.zeros(2, device=order.device)
        for step, rate in enumerate(rates):
            for options in self._training.optimizer.param_groups:
                options["lr"] = rate
            totals += self.take(order[step], draws[step])
        return totals

    def take(self, rows: Tensor, draws: Tensor) -> Tensor:
        """One update of the weights; returns loss and accuracy of this process's share, (2,)."""
        recipe, optimizer = self._training.recipe, self._training.optimizer
        x = crop_and_flip(to_unit(self._images[rows]), draws, recipe.padding)
        if recipe.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss, accuracy = self._loss(self._training.model, x, self._labels[rows])
        # Shares are equally large, so that the mean over processes is the mean over the batch. Gradients are asked
        # for, not accumulated: what accumulates belongs to one CUDA stream and cannot be recorded on another.
        gradients = torch.autograd.grad(loss / self._group.world, self._parameters, allow_unused=True)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None and gradient.stride() != parameter.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)  # kernels that fuse want one layout
            parameter.grad = gradient
        self._group.sum_gradients(self._parameters)
        optimizer.step()
        return torch.stack([loss.detach(), accuracy])


class _Recorder:
    """Plays a recorded step. What changes from step to step lies in tensors that the graph reads by a counter.

    A recording is made anew when the model has changed other than by training. Where none can be made, steps run as
    they are written, after a warning that says why.
    """

    def __init__(self, steps: Steps, model: nn.Module) -> None:
        self._steps, self._model = steps, model
        self._graph: torch.cuda.CUDAGraph | None = None
        self._obstacle = "hooks are registered on its modules" if has_hooks(model) else None
        self._guard: GraphGuard | None = None

    def run(self, order: Tensor, draws: Tensor, rates: list[float]) -> Tensor:
        if self._graph is not None and (self._guard is None or not self._guard.is_valid()):
            self._graph = None
        plan = (order, draws, torch.tensor(rates, device=order.device))
        if self._graph is None:
            self._plan, self._totals = plan, torch.zeros(2, device=order.device)
            self._at = torch.zeros(1, dtype=torch.int64, device=order.device)
            self._stream = torch.cuda.Stream(order.device)
        else:
            for own, new in zip(self._plan, plan, strict=True):
                own.copy_(new)
            self._at.zero_()
            self._totals.zero_()
        for step in range(len(rates)):
            self._advance(step)
        return self._totals.clone()

    def _advance(self, step: int) -> None:
        """Take the next step: the first ones as they are written, then by the graph."""
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
                self._take()
        here.wait_stream(self._stream)

    def _rehearse(self) -> None:
        """A step that must not wait for the device: a recording that this breaks off cannot be mended."""
        try:
            with refusing_to_wait():
                self._take()
        except RuntimeError as error:
            self._give_up(error)
            self._take()

    def _record(self) -> None:
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._stream):
                self._take()
        except RuntimeError as error:
            self._give_up(error)
            return
        self._graph, self._guard = graph, GraphGuard(self._model, "cuda")

    def _give_up(self, error: RuntimeError) -> None:
        self._obstacle = str(error).splitlines()[0]
        warnings.warn(
            f"training runs one kernel at a time, not as a CUDA graph: {self._obstacle}. "
            "capture='never' says that this is meant.",
            stacklevel=2,
        )

    def _take(self) -> None:
        order, draws, rates = (values.index_select(0, self._at)[0] for values in self._plan)
        for options in self._steps._training.optimizer.param_groups:
            options["lr"].copy_(rates)
        self._totals += self._steps.take(order, draws)
        self._at += 1
