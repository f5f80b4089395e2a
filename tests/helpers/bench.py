"""Runs on digits, and a small set of coloured pictures with a label-augmented model of random weights."""

from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor, nn

from ttvd.bench.plan import plan
from ttvd.bench.recipe import Recipe, parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Run, Spec, WorkerConfig
from ttvd.data.sets import ImageSet, load_set
from ttvd.nn.resnet import init_weights
from ttvd.nn.split import split
from ttvd.nn.views import rotate
from ttvd.source import estimate_sites
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

DIGITS = """
data = {set = "digits", corruptions = ["fog"], limit = 150}
[checkpoints]
plain = "digits-plain"
sites = "digits-sla"
"rotation head" = "digits-rotation"
"instance-aware norm" = "digits-instance-aware"
"""
NAMES = ("airplane", "bird", "cat", "dog", "frog")


@cache
def shared_resources() -> Resources:
    """Resources of the package's own files, for tests that change nothing in them."""
    return Resources(WorkerConfig())


def digits_resources(
    training: int = 600, checkpoints: Path | None = None, *, allow_code: bool = False
) -> Resources:
    """New resources with the digits, and with few of their training images: to go through all of them takes long."""
    resources = Resources(WorkerConfig(checkpoints=checkpoints, allow_code=allow_code), _load_digits("test"))
    images = _load_digits("train")["digits"]
    resources._cache["training", "digits"] = images.subset(torch.arange(training))
    return resources


@cache
def _load_digits(split: str) -> dict[str, ImageSet]:
    images = load_set("digits", split=split)  # type: ignore[arg-type]
    assert isinstance(images, ImageSet)
    return {"digits": images}


def make_spec(resources: Resources, method: str, extra: str = "", text: str = DIGITS) -> Spec:
    """The first run of a recipe with one method."""
    return plan(parse_recipe(f'{text}\n[[methods]]\nname = "{method}"\n{extra}', "test"), resources)[0].spec


def list_rows(run: Run) -> list[object]:
    """The rows of a run without their times."""
    return [(row.metrics, row.kept, row.domain) for row in run.record.rows]


def copy_checkpoint(name: str, folder: Path) -> Path:
    """Copy a checkpoint of the package, with its sites; returns the folder."""
    for file in (Path(str(files("ttvd.zoo"))) / "checkpoints").glob(f"{name}*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def make_pictures(count: int, classes: int, seed: int = 0) -> ImageSet:
    """Pictures (16 x 16) whose classes are blurred patterns, each with noise of its own."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    large = nn.functional.interpolate(patterns, 16, mode="bilinear")
    labels = torch.arange(count) % classes
    noisy = large[labels] + 0.12 * torch.randn(count, 3, 16, 16, generator=draw)
    pixels = (255 * noisy.clamp(0, 1)).round().to(torch.uint8)
    names = NAMES if classes == len(NAMES) else tuple(f"class {k}" for k in range(classes))
    return ImageSet(pixels, labels, names, "cifar10")


def _set_head(model: nn.Module, sites: Tensor, generator: torch.Generator) -> None:
    """Give a head weights whose power diagram is nearly the Voronoi diagram of the sites (k, v, d)."""
    flat, linear = sites.flatten(0, 1).float(), split(model).linear
    near = flat + 0.02 * torch.randn(flat.shape, generator=generator)
    with torch.no_grad():
        linear.weight.copy_(2 * near)
        linear.bias.copy_(-near.square().sum(1))


def _settle(model: nn.Module, images: Tensor) -> None:
    """Give its batch norms the statistics of images in all rotations."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(rotate(images, 4))
    model.eval()


def make_resources(folder: Path, classes: int = 5, count: int = 320) -> Resources:
    """Resources with the pictures as ``cifar10`` and the model as ``tiny``."""
    arguments = {
        "num_classes": 4 * classes,
        "in_channels": 3,
        "widths": [4, 6],
        "blocks": [1, 1],
        "bias": True,
    }
    card = Card("resnet", arguments, head_views=4, data="coloured patterns")
    model, generator = build_model(card), torch.Generator().manual_seed(0)
    init_weights(model, generator)
    images = make_pictures(40 * classes, classes, seed=5)
    _settle(model, images.floats())
    _set_head(model, estimate_sites(model, images).means, generator)
    temperatures = {"vd": 0.05, "civd@-0.8": 1.0, "cipd@1": 0.1}
    estimate_sites(model, images).with_temperatures(temperatures).save(folder / "tiny.sites.safetensors")
    save_checkpoint(folder / "tiny.safetensors", model, card)
    return Resources(WorkerConfig(checkpoints=folder), {"cifar10": make_pictures(count, classes)})


def make_recipe(figures: str, extra: str = "") -> Recipe:
    """A recipe with these figures, on noisy pictures."""
    head = 'data.set = "cifar10"\ndata.corruptions = ["gaussian_noise"]\ncheckpoints.sites = "tiny"\n'
    return parse_recipe(head + extra + '[[methods]]\nname = "civd"\n' + figures, "colours")
