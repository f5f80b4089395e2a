import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools import train_networks

from ttvd.nn.split import split
from ttvd.nn.timm_network import Resize, timm_network
from ttvd.zoo.checkpoint import Card, build_model, card_path, load_checkpoint, save_checkpoint

timm = pytest.importorskip("timm")
SMALL: dict[str, Any] = {"model": "resnet10t", "mean": (0.4, 0.5, 0.6), "std": (0.25,), "num_classes": 4}


def make(**changes: Any) -> torch.nn.Module:
    return timm_network(**{**SMALL, **changes})


def test_images_are_resized_and_normalised_before_the_network() -> None:
    torch.manual_seed(0)
    model = make(size=48).eval()
    x = torch.rand(2, 3, 32, 32)
    large = F.interpolate(x, (48, 48), mode="bilinear", align_corners=False)
    mean = torch.tensor((0.4, 0.5, 0.6)).view(3, 1, 1)
    torch.testing.assert_close(model(x), model.get_submodule("2")((large - mean) / 0.25))
    assert torch.equal(Resize(32)(x), x)  # nothing happens at the size itself
    assert not any(isinstance(module, Resize) for module in make().modules())


def test_options_and_channels_reach_the_network() -> None:
    options = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 24}
    model = make(
        model="vit_tiny_patch16_224", mean=(0.5,), in_channels=1, num_classes=7, options=options
    ).eval()
    assert model(torch.rand(2, 1, 16, 16)).shape == (2, 7)
    assert split(model).linear.in_features == 24


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet9999"}, "no network 'resnet9999'"),
        ({"model": "hf-hub:somebody/model"}, "no network"),
        ({"model": 3}, "no network 3"),
        ({"options": {"pretrained": True}}, "'pretrained' would load other weights"),
        ({"options": {"checkpoint_path": "a.pth"}}, "'checkpoint_path' would load other weights"),
        ({"options": {"nonsense": 1}}, "does not take these options.*nonsense"),
        ({"options": {"act_layer": "nonsense"}}, "does not take these options"),
        ({"options": {"layers": [1]}}, "does not take these options"),
        ({"options": {"num_classes": 3}}, "does not take these options"),
        ({"mean": (0.1, 0.2)}, "mean must have 1 or 3 values"),
        ({"std": (0.0,)}, "std must be positive"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**changes)


def test_a_missing_timm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="needs timm"):
        make()


def test_checkpoints_of_timm_networks_come_back(tmp_path: Path) -> None:
    card = Card("timm", {**SMALL, "options": {"block_args": {}}}, input_shape=(3, 32, 32))
    model = build_model(card, seed=0).eval()
    path = tmp_path / "net.safetensors"
    save_checkpoint(path, model, card)
    found, _ = load_checkpoint(path)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(found(x), model(x))


@pytest.mark.parametrize("options", [{"depth": 10**6}, {"embed_dim": 10**9}])
def test_a_card_of_a_huge_network_is_refused_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    small = {"img_size": 16, "patch_size": 4, "depth": 1, "embed_dim": 24}
    card = Card("timm", {**SMALL, "model": "vit_tiny_patch16_224", "options": small})
    path = tmp_path / "net.safetensors"
    save_checkpoint(path, build_model(card), card)
    document = json.loads(card_path(path).read_text())
    document["arguments"]["options"] |= options
    card_path(path).write_text(json.dumps(document))
    with pytest.raises(ValueError, match="more than the weights have"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", list(train_networks.NETWORKS))
def test_networks_of_the_tool_take_images_of_cifar10(name: str) -> None:
    network = train_networks.NETWORKS[name]
    model = build_model(Card(network.architecture, network.arguments)).eval()
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert split(model).linear.out_features == 10
    assert train_networks.make_config(network.training, None).epochs == network.training["epochs"]
    assert train_networks.make_config(network.training, 3).epochs == 3
