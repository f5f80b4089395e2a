"""Rehearse on a miniature ImageNet of drawn pictures what docs/imagenet.md says.

    python tools/imagenet_rehearsal.py FOLDER [--device cuda] [--full]

Makes pictures in the layouts of ImageNet, ImageNet-C and ImageNet-R, a ResNet-50 (plain, with label augmentation, with
instance-aware norms) and two models of timm whose heads are fitted to them, and their sites; runs the recipes of
Table 1 by `ttvd bench`, the first one killed on the way and continued; predicts a folder by `ttvd adapt`; and watches
the memory of every method along a stream. Exit code 1 if a command fails or memory grows.
"""

import argparse
import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from ttvd.bench.job import build_adapter, identify_adapter, make_order
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.data.corruptions import CORRUPTIONS, corrupt
from ttvd.data.sets import ImageFolder, load_set
from ttvd.nn.split import split
from ttvd.nn.views import join_labels, rotate
from ttvd.source import calibrate, estimate_sites
from ttvd.zoo.catalog import sites_path
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

RECIPES = Path(__file__).parents[1] / "recipes"
CLASSES = tuple(f"n{1000 + 7 * number:08}" for number in range(20))
MODELS = '''"""Source models of the rehearsal that are no checkpoints of ttvd."""
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from ttvd.nn.instance_norm import InstanceAwareBatchNorm2d
from ttvd.nn.normalize import Normalize
from ttvd.nn.resnet_imagenet import resnet50

CLASSES = {classes}


def instance_aware(weights=True):
    model = resnet50(CLASSES)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            model.set_submodule(name, InstanceAwareBatchNorm2d(layer.num_features))
    return _load(model, "instance_aware") if weights else model


def make_timm(name, weights=True):
    import timm

    model = timm.create_model(name, num_classes=CLASSES)
    config = timm.data.resolve_model_data_config(model)
    model = nn.Sequential(Normalize(3, config["mean"], config["std"]), model)
    return _load(model, name) if weights else model


def efficientnet_lite0():
    return make_timm("efficientnet_lite0")


def vit_tiny():
    return make_timm("vit_tiny_patch16_224")


def _load(model, name):
    model.load_state_dict(load_file(Path(__file__).parent / "models" / f"{{name}}.weights"))
    return model
'''
TIMM = {"efficientnet_lite0": "efficientnet_lite0", "vit_tiny": "vit_tiny_patch16_224"}


def draw(label: int, number: int, size: tuple[int, int] = (280, 260)) -> Image.Image:
    """A picture of a class: stripes of its width, direction and colours, with noise of its own."""
    random, traits = np.random.default_rng([label, number]), np.random.default_rng(label)
    colours = traits.uniform(0.1, 0.9, (2, 3))
    angle, length, phase = traits.uniform(0, np.pi), traits.uniform(12, 60), random.uniform(0, 2 * np.pi)
    y, x = np.mgrid[: size[1], : size[0]]
    wave = 0.5 + 0.5 * np.sin((x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / length + phase)
    pixels = wave[..., None] * colours[0] + (1 - wave[..., None]) * colours[1]
    noisy = pixels * random.uniform(0.9, 1.05) + random.normal(0, 0.08, pixels.shape)
    return Image.fromarray((255 * noisy.clip(0, 1)).astype(np.uint8))


def plant(
    root: Path,
    classes: tuple[str, ...] = CLASSES,
    train: int = 10,
    val: int = 2,
    corruptions: tuple[str, ...] = CORRUPTIONS,
) -> Path:
    """Write train, val, ImageNet-C at severity 5 and imagenet-r, which shows every fourth class, below a folder."""
    parts = (
        ("train", classes, train, 0),
        ("val", classes, val, 1000),
        ("imagenet-r", classes[1::4], 2 * val, 2000),
    )
    for part, shown, count, start in parts:
        for name in shown:
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for number in range(start, start + count):
                # A fifth of the pictures show another class: a model that is always right has no temperature.
                label = classes.index(name)
                picture = draw((label + ((label + number) % 5 == 1)) % len(classes), number)
                picture.save(root / part / name / f"{name}_{number}.JPEG")
    clean = ImageFolder(root / "val")
    for corruption in corruptions:
        pictures = corrupt(clean.floats(), corruption, 5, constants="imagenet", seed=0)
        for place, pixels in enumerate(pictures.mul(255).round().byte().permute(0, 2, 3, 1).numpy()):
            path = root / "ImageNet-C" / corruption / "5" / clean.path(place)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=85)
    return root


@torch.no_grad()
def fit(model: nn.Module, data: ImageFolder, views: int = 1, count: int = 60) -> nn.Module:
    """Give random weights a meaning: norms get the statistics of pictures, the head is fitted by least squares."""
    rows = torch.linspace(0, len(data) - 1, min(count, len(data))).long()
    images, labels = rotate(data.floats(rows), views), join_labels(data.labels[rows], views)
    norms: list[Any] = [layer for layer in model.modules() if hasattr(layer, "running_mean")]
    for norm in norms:
        norm.momentum = 1.0  # one batch decides
    model.train()(images[torch.randperm(len(images))[:16]])
    for norm in norms:
        norm.momentum = 0.1
    parts = split(model.eval())
    z = torch.cat([parts.features(part) for part in images.split(24)]).double()
    mean, scale = z.mean(0), z.std(0).clamp_min(1e-6)
    x = F.pad((z - mean) / scale, (0, 1), value=1.0)
    target = F.one_hot(labels, parts.linear.out_features).double()
    gram = x @ x.T + 0.1 * len(x) * torch.eye(len(x), dtype=torch.float64)
    solved = 12 * x.T @ torch.linalg.solve(gram, target)
    weight = (solved[:-1] / scale[:, None]).T
    parts.linear.weight.copy_(weight)
    parts.linear.bias.copy_(solved[-1] - weight @ mean)
    return model


def save_sites(root: Path, name: str, model: nn.Module, data: ImageFolder, held_out: ImageFolder) -> None:
    """Sites from a tenth of the training pictures, with temperatures."""
    sites = estimate_sites(model, data, fraction=0.1, batch_size=16)
    calibrate(model, sites, held_out, batch_size=16).save(sites_path(root / "models", name))


def make_models(root: Path) -> list[str]:
    """Write all source models and their sites; returns the names of those of timm, where timm can be imported."""
    from safetensors.torch import save_file

    (root / "models").mkdir(exist_ok=True)
    (root / "rehearsal_models.py").write_text(MODELS.format(classes=len(CLASSES)))
    sys.path.insert(0, str(root))
    import rehearsal_models as own  # type: ignore[import-not-found]  # written a moment ago

    data, held_out = (load_set("imagenet", root, split) for split in ("train", "test"))
    assert isinstance(data, ImageFolder)
    assert isinstance(held_out, ImageFolder)
    for name, views in (("resnet50-imagenet", 1), ("resnet50-imagenet-sla", 4)):
        card = Card("resnet50", {"num_classes": len(CLASSES) * views}, views, data="drawn pictures")
        model = fit(build_model(card), data, views, 80 // views)
        save_checkpoint(root / "models" / f"{name}.safetensors", model, card)
        save_sites(root, name, model, data, held_out)
    save_file(fit(own.instance_aware(False), data).state_dict(), root / "models" / "instance_aware.weights")
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError) as error:
        print(f"  timm is left out: {error}")
        return []
    for architecture in TIMM.values():
        model = fit(own.make_timm(architecture, False), data)
        save_file(model.state_dict(), root / "models" / f"{architecture}.weights")
    return list(TIMM)


def write_recipe(root: Path, name: str, full: bool) -> Path:
    """A recipe of Table 1 with the rehearsal's model for NOTE and, unless it is full, two columns and one rate."""
    text = (RECIPES / f"{name}.toml").read_text()
    text = text.replace('"resnet50-imagenet-instance-aware"', '"rehearsal_models:instance_aware"')
    if not full:
        text = re.sub(r"\nlr = .*", "\nlr = [0.001]", text)
        text = text.replace('set = "imagenet-c"', 'set = "imagenet-c"\ncorruptions = ["fog", "contrast"]')
        text = text.replace("[data]", "[stream]\nbatch_size = 8\n\n[data]", 1)
    path = root / f"{name}.toml"
    path.write_text(text)
    return path


def run_ttvd(root: Path, *arguments: str, kill_at: str | None = None) -> bool:
    """Run a command; with a beginning of a line, it is killed as soon as it says that."""
    print("$ ttvd", *arguments, "" if kill_at is None else "(to be killed)", flush=True)
    command = [sys.executable, "-u", "-c", "from ttvd.cli import main; main()", *arguments]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(" ", line, end="", flush=True)
            if kill_at is not None and line.startswith(kill_at):
                process.kill()
                break
    return process.returncode == 0


def measure(device: torch.device) -> tuple[float, float]:
    """Megabytes in living tensors, and of the process or, on CUDA, of the allocator."""
    gc.collect()
    living = sum(o.nbytes for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    if device.type == "cuda":
        return living / 1e6, torch.cuda.memory_allocated(device) / 1e6
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return living / 1e6, pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def watch(recipe: str, name: str, setting: WorkerConfig, batches: int) -> bool:
    """Stream pictures through every method of a recipe and print a line for each; true if memory stays flat."""
    resources, seen, flat = Resources(setting), set(), True
    for member in plan(parse_recipe(recipe, name), resources):
        spec = member.spec
        if (kind := identify_adapter(spec)) in seen:
            continue
        seen.add(kind)
        adapter = build_adapter(spec, resources)
        labels, restriction = resources.labels(spec), resources.restriction(spec.data)
        order = torch.from_numpy(np.resize(make_order(spec, resources)[:, 1], batches * spec.batch_size))
        wrong, start, started = 0, (0.0, 0.0), time.perf_counter()
        for number, rows in enumerate(order.split(spec.batch_size)):
            if number == 1 + 64 // spec.batch_size:  # NOTE has learned once, allocators have what they need
                start = measure(resources.device)
            logits = adapter(resources.batch(spec, spec.domains[0], rows)).detach()
            logits = logits if restriction is None else restriction.restrict(logits)
            wrong += int((logits.argmax(1).cpu() != labels[rows]).sum())
            del logits
        seconds = (time.perf_counter() - started) / batches
        end = measure(resources.device)
        grown = end[0] - start[0] > 0.5 or end[1] - start[1] > 60
        flat &= not grown
        print(
            f"  {member.label:15} {spec.checkpoint:34} error {100 * wrong / len(order):5.1f} %  {seconds:6.2f} s/batch"
            f"  tensors {start[0]:7.1f} -> {end[0]:7.1f} MB  process {start[1]:5.0f} -> {end[1]:5.0f} MB"
            f"{'  GROWS' if grown else ''}",
            flush=True,
        )
    return flat


def rehearse(root: Path, options: argparse.Namespace) -> bool:
    root.mkdir(parents=True, exist_ok=True)
    print("Making pictures and models", flush=True)
    timm_models = make_models(plant(root))
    setting = WorkerConfig(root, root / "models", options.device)
    passed: list[bool] = []
    where = ["--data", str(root), "--checkpoints", str(root / "models"), "--device", options.device]
    limit = [] if options.full else ["--limit", str(options.limit)]
    for number, name in enumerate(("table1-imagenet-c", "table1-imagenet-r")):
        recipe, store = write_recipe(root, name, options.full), root / f"{name}.db"
        command = ["bench", str(recipe), "--store", str(store), *where, *limit]
        if number == 0:
            run_ttvd(root, *command, kill_at="[2/")
        passed.append(run_ttvd(root, *command))
        passed.append(run_ttvd(root, "report", str(store), "--out", str(root / name)))
    line = "adapt ImageNet-C/fog/5 --model models/resnet50-imagenet.safetensors --out fog.csv --batch-size 8"
    passed.append(run_ttvd(root, *line.split(), "--device", options.device))
    print(f"Memory along {options.batches} batches", flush=True)
    text = write_recipe(root, "table1-imagenet-c", False).read_text()
    passed.append(watch(text, "table1", setting, options.batches))
    for name in timm_models:
        text = f"""data.set = "imagenet-c"\ndata.corruptions = ["fog"]\nstream.batch_size = 8
sites = 0.5\ncheckpoints.plain = "rehearsal_models:{name}"
[[methods]]\nname = ["source", "t3a", "tast", "bn", "shot", "tent", "conjugate", "sar", "ttvd"]"""
        passed.append(watch(text, name, setting, options.batches))
    return all(passed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full", action="store_true", help="all fifteen corruptions and learning rates")
    parser.add_argument("--limit", type=int, default=16, help="pictures of a run")
    parser.add_argument("--batches", type=int, default=18, help="of the stream whose memory is watched")
    torch.manual_seed(0)
    options = parser.parse_args()
    sys.exit(0 if rehearse(options.folder.resolve(), options) else 1)


if __name__ == "__main__":
    main()
