"""On an accelerator: the same predictions as on a CPU, and steps that do not wait for the device."""

from typing import Any

import pytest
import torch

import ttvd
from ttvd.testing import make_world

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*not as CUDA graphs"),
]

WAITING = {"cotta", "memo", "note", "rdumb", "rotta", "tast-bn", "ttt"}
"""Methods whose documents say that they read from the device in a step."""


QUIET: dict[str, dict[str, Any]] = {"cotta": {"threshold": 0.0, "restore": 0.0, "agreement": "symmetric"}}
"""Without what a method draws on the device itself: other numbers than on a CPU."""


def make_adapter(name: str, device: str) -> ttvd.Adapter:
    return make_world(name, device=device, **QUIET.get(name, {}))[1]()


def make_stream(device: str) -> list[torch.Tensor]:
    return [b.to(device) for b in torch.rand(4, 8, 1, 16, 16, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("name", list(ttvd.list_methods()))
def test_predictions_follow_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    there, here = make_adapter(name, "cuda"), make_adapter(name, "cpu")
    for x, y in zip(make_stream("cuda"), make_stream("cpu"), strict=True):
        found, expected = there(x).softmax(1).cpu(), here(y).softmax(1)
        # Augmentations draw pixel noise on the device: those methods agree roughly.
        assert torch.allclose(found, expected, atol=0.05 if name in ("roid", "rotta") else 2e-3)


@pytest.mark.parametrize("name", [name for name in ttvd.list_methods() if name not in WAITING])
def test_a_step_never_waits_for_the_device(name: str) -> None:
    adapter, stream = make_adapter(name, "cuda"), make_stream("cuda")
    adapter(stream[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in stream[1:]:
            adapter(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["tent", "t3a", "ttvd", "sar"])
def test_moving_an_adapter_moves_all_of_it(name: str) -> None:
    adapter, stream = make_adapter(name, "cpu"), make_stream("cuda")
    adapter(stream[0].cpu())
    adapter.to("cuda")
    assert adapter(stream[1]).is_cuda
    adapter.reset()
    assert adapter(stream[0]).isfinite().all()
