"""The part of torch.distributed that training and site estimation need.

Gradients are summed explicitly, in one buffer. So the same code runs in one process and under torchrun, and the model
stays the user's own object without a wrapper.
"""

import atexit
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Group:
    """Rank of this process and number of processes. In a single process, every exchange does nothing."""

    rank: int = 0
    world: int = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: int, device: torch.device) -> list[int]:
        """Return the values of all processes in the order of their ranks."""
        values = torch.zeros(self.world, dtype=torch.int64, device=device)
        values[self.rank] = value
        return [int(found) for found in self.sum_(values).tolist()]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients over the processes, in one message."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.world > 1 and gradients:
            _exchange(gradients, self.sum_)

    def broadcast(self, model: nn.Module) -> None:
        """Copy the weights and buffers of rank 0 to every process."""
        if self.world > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                _exchange([tensor], lambda flat: dist.broadcast(flat, 0))

    def average_buffers(self, model: nn.Module) -> None:
        """Average the floating-point buffers (running statistics), which each process updated with its own share."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.world > 1 and buffers:
            _exchange(buffers, lambda flat: self.sum_(flat).div_(self.world))


def _exchange(tensors: list[Tensor], operation: Callable[[Tensor], object]) -> None:
    with torch.no_grad():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        operation(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def current_group() -> Group:
    """Return the group of an initialised torch.distributed, else this process alone.

    Example:
        >>> current_group()
        Group(rank=0, world=1)
    """
    if dist.is_available() and dist.is_initialized():
        return Group(dist.get_rank(), dist.get_world_size())
    return Group()


def join_group(device: torch.device) -> Group:
    """Join the group that torchrun announces, with gloo on the CPU and NCCL on GPUs.

    The process leaves the group when it ends and not before, because the rendezvous of one launch works only once. A
    group that the caller has initialised is used as it is.
    """
    if _announced() > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave_group)
    return current_group()


def _announced() -> int:
    """Return the number of processes that the launcher announces."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(model: nn.Module) -> torch.device:
    """Return the device of this process: the model's device, or its own GPU if torchrun started several processes."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda" and _announced() > 1 and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device
