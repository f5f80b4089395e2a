"""On an accelerator: the same predictions as on a CPU, and steps that do not wait for the device."""

from typing import Any

import pytest
import torch
from torch import nn

import ttvd
from ttvd.models.fingerprint import fingerprint
from ttvd.models.resnet import ResNet
from ttvd.models.rotation import RotationNet
from ttvd.source import collect_features, estimate_fisher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WAITING = {"cotta", "memo", "note", "rdumb", "rotta", "tast-bn", "ttt"}
"""Methods whose documents say that they read from the device in a step."""
LIGHT: dict[str, dict[str, Any]] = {"cotta": {"views": 3}, "memo": {"views": 3}, "ttt": {"copies": 4}}
TEMPERATURES = {"vd": 1.0, "pd": 1.0, "civd@-0.8": 0.05, "cipd@-0.8": 0.05, "civd@1": 1.0, "cipd@1": 4.0}


def make_adapter(name: str, device: str) -> ttvd.Adapter:
    needs = ttvd.methods()[name].needs
    generator = torch.Generator().manual_seed(0)
    norm = "instance-aware" if "instance-aware norm" in needs else "batch"
    outputs = 12 if "sites" in needs else 3
    net: nn.Module = ResNet(outputs, widths=(8, 16), blocks=(1, 1), norm=norm, bias=True, generator=generator)
    if "rotation head" in needs:
        assert isinstance(net, ResNet)
        net = RotationNet(net)
    net = net.to(device)
    images = torch.rand(12, 3, 16, 16, generator=generator).to(device)
    made: dict[str, Any] = {}
    if "sites" in needs:
        means = torch.randn(3, 4, 16, generator=generator).double()
        made["sites"] = ttvd.Sites(
            means, torch.ones(3, 4).long(), fingerprint(net), temperatures=TEMPERATURES
        )
    if "features" in needs:
        made["features"] = collect_features(net, (images, (torch.arange(12) % 3).to(device)))
    if "fisher" in needs:
        made["fisher"] = estimate_fisher(net, images)
    return ttvd.create(name, net, **made, **LIGHT.get(name, {}))


def make_stream(device: str) -> list[torch.Tensor]:
    return [b.to(device) for b in torch.rand(4, 8, 3, 16, 16, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("name", list(ttvd.methods()))
def test_predictions_follow_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    there, here = make_adapter(name, "cuda"), make_adapter(name, "cpu")
    for x, y in zip(make_stream("cuda"), make_stream("cpu"), strict=True):
        found, expected = there(x).softmax(1).cpu(), here(y).softmax(1)
        # Augmentations draw pixel noise on the device: those methods agree roughly.
        assert torch.allclose(found, expected, atol=0.05 if name in ("cotta", "roid", "rotta") else 2e-3)


@pytest.mark.parametrize("name", [name for name in ttvd.methods() if name not in WAITING])
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
