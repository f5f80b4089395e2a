"""Networks with random weights, and random source data for methods, for benchmarks of cost.

Predictions differ from image to image, and most are certain enough for the filters of EATA and SAR: the cost of a
method that selects samples is measured with samples selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ttvd
from ttvd.engine.acceleration import Precision
from ttvd.methods import Adapter, Method
from ttvd.methods.shared.losses import entropy
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import resnet26
from ttvd.nn.resnet_imagenet import resnet50
from ttvd.nn.rotation import RotationNet
from ttvd.nn.split import split
from ttvd.zoo.sites import Sites
from ttvd.zoo.source_features import SourceFeatures

TEMPERATURES = {"vd": 1.0, "pd": 1.0, "civd@-0.8": 0.05, "cipd@-0.8": 0.05, "civd@1": 1.0, "cipd@1": 4.0}
ROTATION_LOSS = 1.0  # of source data: random weights are worse, so that steps are full ones
MEMORY = 10_000  # source features that AdaNPC remembers
_MARGIN = 0.4  # of ln k: what EATA and SAR take for certain


@dataclass(frozen=True)
class Network:
    """A kind of network.

    Attributes:
        side: Height and width of the images.
        classes: Number of classes, label augmentation not counted.
        make: Function that builds a network with a given number of outputs.
        parts: Special parts that it can be built with: ``"instance-aware norm"``, ``"rotation head"``.
    """

    side: int
    classes: int
    make: Callable[[int], nn.Module]
    parts: frozenset[str] = frozenset()


def _make_vit(outputs: int) -> nn.Module:
    import timm

    net: nn.Module = timm.create_model("vit_base_patch16_224", num_classes=outputs)
    return net


NETWORKS = {
    "resnet26": Network(32, 10, resnet26, frozenset({"rotation head", "instance-aware norm"})),
    "resnet50": Network(224, 1000, resnet50),
    "vit-b16": Network(224, 1000, _make_vit),
}


@dataclass(frozen=True)
class Mode:
    """How a step is computed.

    Attributes:
        precision: ``"float32"`` or ``"bfloat16"``.
        channels_last: Layout of images.
        compile: Whether networks are compiled.
        capture: Whether steps are recorded as CUDA graphs, where there is such a device.
    """

    precision: Precision = "float32"
    channels_last: bool = False
    compile: bool = False
    capture: bool = True

    @property
    def label(self) -> str:
        """For captions."""
        words = [
            self.precision,
            "channels last" if self.channels_last else "",
            "compiled" if self.compile else "",
            "" if self.capture else "no graphs",
        ]
        return ", ".join(word for word in words if word)


class Setup:
    """A network for a kind of methods, on a device, and batches of noise for it.

    Args:
        network: One of :data:`NETWORKS`, or another kind.
        method: The method. It decides which head and norms the network has.
        device: Device of the network and the batches.

    Raises:
        ValueError: The method needs a part that this kind of network is not built with here.
    """

    def __init__(self, network: Network, method: Method, device: torch.device) -> None:
        lacking = method.needs - {"sites", "features", "fisher"} - network.parts
        if lacking:
            raise ValueError(f"{method.name} needs {', '.join(sorted(lacking))}")
        self.network, self.method, self.device = network, method, device
        self.views = 4 if "sites" in method.needs else 1
        torch.manual_seed(0)
        self.net = self._make_net().eval().to(device)
        self.centre = settle(self.net, self.batch(16, seed=9))

    def _make_net(self) -> nn.Module:
        outputs = self.network.classes * self.views
        if "instance-aware norm" in self.method.needs:
            return resnet26(outputs, norm="instance-aware")
        net = self.network.make(outputs)
        return RotationNet(net) if "rotation head" in self.method.needs else net  # type: ignore[arg-type]

    def batch(self, size: int, seed: int = 0) -> Tensor:
        """Smooth random images in [0, 1]."""
        coarse = torch.rand(size, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        sides = (self.network.side, self.network.side)
        return F.interpolate(coarse, sides, mode="bilinear").to(self.device)

    def adapter(self, mode: Mode, **parameters: Any) -> Adapter:
        """The method around the network; the network itself stays as it is."""
        adapter = ttvd.create(self.method.name, self.net, **self.gather(), **parameters)
        if mode != Mode():
            adapter.accelerate(
                precision=mode.precision, channels_last=mode.channels_last, compile=mode.compile
            )
        adapter.capture = "auto" if mode.capture else "never"
        return adapter

    def gather(self) -> dict[str, Any]:
        """Source data that the method needs, made of random numbers."""
        head, classes = split(self.net).linear, self.network.classes
        made: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(1)
        if "sites" in self.method.needs:
            # In the directions of the head, so that the diagrams mostly agree.
            means = (self.centre + 0.01 * F.normalize(head.weight.detach(), dim=1)).cpu().double()
            means = means.unflatten(0, (classes, self.views))
            counts = torch.ones(means.shape[:2], dtype=torch.int64)
            made["sites"] = Sites(
                means,
                counts,
                fingerprint(self.net),
                temperatures=TEMPERATURES,
                rotation_loss=ROTATION_LOSS,
                entropies={"pd": torch.linspace(0.0, 1.0, 65, dtype=torch.float64)},
            )
        if "features" in self.method.needs:
            known = F.normalize(torch.randn(MEMORY, head.in_features, generator=generator), dim=1)
            labels = torch.arange(MEMORY) % classes
            made["features"] = SourceFeatures(known, labels, fingerprint(self.net))
        if "fisher" in self.method.needs:
            trained = ttvd.create("eta", self.net).model.named_parameters()
            made["fisher"] = {name: 1e-3 * torch.rand_like(p) for name, p in trained if p.requires_grad}
        return made


@torch.no_grad()
def settle(net: nn.Module, x: Tensor) -> Tensor:
    """Make an untrained network behave like a trained one, in place; returns the mean of its features.

    Batch norms take the statistics of the batch for those of the source. The head loses what all features have in
    common, and is scaled until four predictions of five have an entropy below 0.4 ln k.
    """
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.momentum = 1.0
    net.train()
    net(x)
    net.eval()
    for layer in norms:
        layer.momentum = 0.1
    parts = split(net)
    z, head = parts.features(x), parts.linear
    centre = z.mean(0)
    head.weight.sub_((head.weight @ centre)[:, None] * centre / centre.square().sum())
    if head.bias is not None:
        head.bias.zero_()
    logits, low, high = head(z).double(), 1e-3, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        doubt = entropy(logits * middle).quantile(0.8)
        low, high = (middle, high) if float(doubt) > _MARGIN * math.log(len(head.weight)) else (low, middle)
    head.weight.mul_(middle)
    return centre
