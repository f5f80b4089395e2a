"""Shared by all tests."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import settings

_stubs: list[torch.library.Library] = []


def _mend_torchvision() -> None:
    """Declare torchvision's operators where its binary does not fit a CPU-only torch.

    Importing torchvision, and with it timm and torchmetrics, fails there although nothing of the binary is used.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(next(Path(spec.origin).parent.glob("_C*.so")))
    except (OSError, StopIteration):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _stubs.append(library)


_mend_torchvision()
torch.set_num_threads(1)
settings.register_profile(
    "patient", deadline=None
)  # how long a case takes says more of the machine than of the code
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """What a test draws must not depend on which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(0)
