"""Two numbers of a step: the operations that its matrix products and convolutions take, and the bytes that it moves.

    python -m benchmarks.counts                      # on this machine's processor
    python -m benchmarks.counts --device cuda --precision bfloat16

Nothing is run to count: the operations are those that a forward and backward pass of the images of one step dispatches,
on tensors without storage. Bytes are what each operation reads and writes if every tensor comes from memory once; a
norm by the statistics of the batch reads its input twice on the way forth, input and gradient twice on the way back.
*Fused* leaves out activations and sums, as if they were done where the norm writes; a sum still reads its other term.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmarks.clock import find_device
from benchmarks.setups import NETWORKS, Network
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ttvd.nn.norms import Statistics, apply_statistics, select_parameters

PEAKS = {"H200, bfloat16": (989e12, 4.8e12), "H200, float32 (TF32)": (494e12, 4.8e12)}
"""Operations and bytes a second, from the data sheet, without sparsity."""
KINDS = ("matrix", "norm", "pointwise")


@dataclass
class Count:
    """What was counted.

    Attributes:
        operations: Number of operations in matrix products and convolutions; a multiplication and an addition are two.
        bytes: Bytes that are read and written, by kind of operation.
        fused: Bytes, if activations cost nothing and a sum costs its other term only.
    """

    operations: float = 0.0
    bytes: Counter[str] = field(default_factory=Counter)
    fused: float = 0.0

    @property
    def moved(self) -> float:
        """All bytes."""
        return float(self.bytes.total())


class Tally(TorchDispatchMode):
    """Counts the operations that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Count()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            self._add(func, args, kwargs or {}, out)
        return out

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet, name = func._overloadpacket, func.name()
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if name.startswith("aten::convolution_backward") and not args[-1][1]:
            read.pop(1)  # the input is read for the gradient of the weights, which is not computed
        size = sum(map(_bytes, read + written))
        if packet in flop_registry:
            kind = "matrix"
            self.count.operations += flop_registry[packet](*args, **kwargs, out_val=out)
        elif "norm" in name:
            kind = "norm"
            size += sum(_bytes(tensor) for tensor in read if tensor.ndim > 1)
        else:
            kind = "pointwise"
        self.count.bytes[kind] += size
        if kind != "pointwise":
            self.count.fused += size
        elif name.startswith("aten::add"):
            self.count.fused += _bytes(written[0])


def _bytes(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def count_step(network: Network, images: int, dtype: torch.dtype, views: int = 4) -> Count:
    """Count one forward pass with the gradients of the norms' affine parameters.

    Args:
        network: A kind of networks.
        images: Number of images in the forward pass, views included.
        dtype: Type of all tensors.
        views: Number of rotations that the head tells apart.
    """
    with torch.device("meta"):
        net = network.make(network.classes * views)
        x = torch.empty(images, 3, network.side, network.side)
    net = apply_statistics(net.eval().requires_grad_(False), Statistics.batch()).to("meta", dtype)
    norms = select_parameters(net, "norm")
    trained = [p.requires_grad_() for name, p in net.named_parameters() if name in norms]
    with Tally() as tally:
        torch.autograd.grad(net(x.to(dtype)).sum(), trained)
    count: Count = tally.count
    return count


def count_forward(net: nn.Module, x: Tensor) -> float:
    """Operations of a forward pass."""
    with torch.no_grad(), Tally() as tally:
        net(x)
    return float(tally.count.operations)


def measure_rates(device: torch.device, dtype: torch.dtype, side: int, size: int) -> tuple[float, float]:
    """Operations and bytes a second that this machine reaches: a large product, and a copy of what no cache holds.

    Args:
        device: Device to measure.
        dtype: Type of the matrices.
        side: Number of rows and columns of the matrices.
        size: Number of float32 values that are copied.
    """
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(size, device=device)
    target = torch.empty_like(source)
    product = _best(lambda: torch.mm(a, b), device)
    copy = _best(lambda: target.copy_(source), device)
    return 2 * side**3 / product, 2 * source.nbytes / copy


def _best(run: Any, device: torch.device, rounds: int = 5) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    args = parse_arguments()
    device, dtype = find_device(args.device), getattr(torch, args.precision)
    sizes = (2048, 2**26) if device.type == "cpu" else (8192, 2**30)
    operations, moved = measure_rates(device, dtype, *sizes)
    machines = {f"this {device.type}, {args.precision}": (operations, moved), **PEAKS}
    for name, (speed, bandwidth) in machines.items():
        print(f"{name:26} {speed / 1e12:8.2f} TFLOP/s {bandwidth / 1e9:8.0f} GB/s")
    print(
        f"\n{'step, four views':22}{'TFLOP':>8}",
        *(f"{kind + ' GB':>13}" for kind in KINDS),
        f"{'fused GB':>9}",
    )
    for name in args.networks:
        count = count_step(NETWORKS[name], args.batch * 4, dtype)
        parts = "".join(f"{count.bytes[kind] / 1e9:14.2f}" for kind in KINDS)
        print(
            f"{name + f', {args.batch} images':22}{count.operations / 1e12:8.3f}{parts}{count.fused / 1e9:10.2f}"
        )
        for machine, (speed, bandwidth) in machines.items():
            times = (count.operations / speed, count.moved / bandwidth, count.fused / bandwidth)
            print(f"  {machine:26} arithmetic {times[0] * 1e3:9.2f} ms, bytes {times[1] * 1e3:9.2f} ms, "
                  f"fused {times[2] * 1e3:9.2f} ms")  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--networks", nargs="*", default=["resnet26", "resnet50"], choices=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
