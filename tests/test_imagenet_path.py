"""ImageNet's path from published weights to a table, on a miniature: the commands of docs/imagenet.md, and mistakes."""

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tools.imagenet_rehearsal import CLASSES as MANY
from tools.imagenet_rehearsal import fit, plant
from torch import Tensor, nn
from typer.testing import CliRunner

import ttvd
from ttvd.bench.job import execute
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.bench.store import Store
from ttvd.cli.main import app
from ttvd.data.sets import ImageFolder, Preparation, load_set, read_image
from ttvd.nn.resnet_imagenet import resnet18
from ttvd.source import calibrate, estimate_sites
from ttvd.source.features import choose_fraction
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

ROOT = Path(ttvd.__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "imagenet.md").read_text()
CLASSES = MANY[:6]
CARD = Card("resnet18", {"num_classes": len(CLASSES)})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and the weights that somebody has published."""
    root = plant(tmp_path_factory.mktemp("imagenet"), CLASSES, train=4, val=1, corruptions=("fog",))
    torch.manual_seed(0)
    model = fit(build_model(CARD), ImageFolder(root / "train"), count=24)
    torch.save(model.state_dict(), root / "resnet50.pth")
    (root / "models").mkdir()
    save_checkpoint(root / "models" / "net.safetensors", model, CARD)
    return root


def open_folder(root: Path, split: Any) -> ImageFolder:
    found = load_set("imagenet", root, split)
    assert isinstance(found, ImageFolder)
    return found


def read_blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", DOCUMENT, re.DOTALL)


def write_scripts(place: Path) -> None:
    for block in read_blocks("py"):
        name = re.match(r"# (\w+\.py): ", block)
        assert name is not None
        small = 'Card("resnet18", {"num_classes": 6}'
        (place / name[1]).write_text(block.replace('Card("resnet50", {"num_classes": 1000}', small))


def write_recipes(place: Path) -> None:
    """The recipes with one corruption, one rate, and a few methods."""
    (place / "recipes").mkdir()
    for path in (ROOT / "recipes").glob("pretrained-imagenet-*.toml"):
        text = re.sub(r"\nlr = .*", "\nlr = [0.001]", path.read_text())
        text = text.replace("[data]", "[stream]\nbatch_size = 3\n\n[data]")
        text = text.replace('set = "imagenet-c"', 'set = "imagenet-c"\ncorruptions = ["fog"]')
        text = re.sub(r'name = \["source".*', 'name = "source"', text)
        text = re.sub(r"grid = .*", "params = { lr = 0.05 }", text)
        (place / "recipes" / path.name).write_text(text)


def run_command(line: str, root: Path, place: Path) -> str:
    """One line of the document, in this process, with the miniature for the data and few pictures."""
    words = shlex.split(line.replace("/data/imagenet", str(root)).replace("--limit 256", "--limit 6"))
    words = [name for word in words for name in (sorted(glob(word)) if "*" in word else [word])]
    if words[0] == "mkdir":
        (place / words[1]).mkdir()
        return ""
    if words[0] == "python":
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")
        return ""
    assert words[0] == "ttvd"
    words += ["--jobs", "1"] if words[1] == "bench" else []  # every worker has to import torch
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def desk(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the document's scripts; what they import is forgotten afterwards."""
    shutil.copy(world / "resnet50.pth", tmp_path)
    write_scripts(tmp_path)
    write_recipes(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    sys.modules.pop("mymodels", None)


def test_the_commands_of_the_document_run(world: Path, desk: Path) -> None:
    lines = [line for block in read_blocks("sh")[:3] for line in block.splitlines()]
    outputs = {line: run_command(line, world, desk) for line in lines}
    assert len(lines) >= 7
    rows = (desk / "fog.csv").read_text().splitlines()
    assert len(rows) == 1 + len(CLASSES)
    sites = ttvd.Sites.load(desk / "models" / "resnet50-imagenet.sites.safetensors")
    assert sites.counts.tolist() == [[1] * 4] * len(CLASSES)  # a tenth of four pictures, and at least one
    assert (sites.num_classes, sites.dim, sites.fraction) == (len(CLASSES), 512, 0.1)
    assert any("2 of 2 runs to do; nothing was written" in text for text in outputs.values())
    with Store(desk / "imagenet.db") as store:
        specs = [run.spec for run in store.load(store.done()).values()]
    assert Counter((spec.data, spec.method) for spec in specs) == Counter(
        (data, method) for data in ("imagenet-c", "imagenet-r") for method in ("source", "ttvd")
    )
    assert {spec.limit for spec in specs} == {6}
    assert (desk / "imagenet" / "index.html").is_file()


def test_a_model_of_timm_is_prepared_as_timm_says(
    world: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = pytest.importorskip("timm")
    create, data = timm.create_model, ImageFolder(world / "train")

    @cache
    def create_trained(name: str, pretrained: bool) -> nn.Module:
        assert pretrained
        return fit(create(name, num_classes=len(CLASSES)), data, count=24)

    monkeypatch.setattr(timm, "create_model", create_trained)
    for line in read_blocks("sh")[3].splitlines():
        run_command(line, world, desk)
    assert len((desk / "vit.csv").read_text().splitlines()) == 1 + len(CLASSES)
    recipe = 'data.set = "imagenet-c"\ndata.corruptions = ["fog"]\nstream.batch_size = 3\n'
    recipe += 'checkpoints.plain = "mymodels:vit_tiny"\n[[methods]]\nname = ["source", "bn", "tent"]'
    resources = Resources(WorkerConfig(world, allow_code=True))
    runs = [execute(member.spec, resources) for member in plan(parse_recipe(recipe, "vit"), resources)]
    assert (
        runs[0].totals["error"] == runs[1].totals["error"]
    )  # without batch norms there is nothing to exchange
    assert runs[2].record.kept() == 1.0


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "efficientnet_lite0", "convnext_atto"])
def test_preparation_is_timms(name: str, world: Path) -> None:
    timm = pytest.importorskip("timm")
    config = timm.data.resolve_model_data_config(timm.create_model(name))
    theirs = timm.data.create_transform(**{**config, "mean": (0.0,) * 3, "std": (1.0,) * 3})
    path = world / "train" / CLASSES[0] / f"{CLASSES[0]}_0.JPEG"
    how = Preparation.from_timm(config)
    assert torch.equal(read_image(path, *how), theirs(Image.open(path).convert("RGB")))
    folder = ImageFolder(world / "train")
    assert folder.prepared(**how._asdict()).fingerprint() != folder.fingerprint()
    assert folder.prepared(256, 224).fingerprint() == folder.fingerprint()


def test_preparations_that_cannot_be_followed_are_refused() -> None:
    config = {"input_size": (3, 224, 224), "crop_pct": 1.0, "interpolation": "bilinear"}
    assert Preparation.from_timm(config) == (224, 224, "bilinear")
    for wrong in ({"input_size": (3, 224, 256)}, {"crop_mode": "squash"}, {"interpolation": "nearest"}):
        with pytest.raises(ValueError, match="only a centred square"):
            Preparation.from_timm({**config, **wrong})


@pytest.mark.parametrize("fraction", [0.5, 0.1, 0.01])
def test_sites_decode_their_share_once(fraction: float, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, decoded = open_folder(world, "train"), Counter[int]()
    pixels = ImageFolder.pixels

    def count(self: ImageFolder, position: int) -> Tensor:
        decoded[position] += 1
        return pixels(self, position)

    monkeypatch.setattr(ImageFolder, "pixels", count)
    net = resnet18(len(CLASSES)).eval()
    sites = estimate_sites(net, folder, fraction=fraction, views=2, batch_size=7)
    chosen = choose_fraction(folder.labels, fraction, 0)
    assert decoded == Counter(chosen.tolist())
    assert len(chosen) == (12 if fraction == 0.5 else 6)
    mine = chosen[folder.labels[chosen] == 3]
    with torch.no_grad():
        z = net.forward_features(torch.rot90(folder.floats(mine), 2, (-2, -1))).double().mean(0)
    torch.testing.assert_close(sites.means[3, 1], z, rtol=1e-4, atol=1e-4)


def test_calibration_looks_at_no_more_pictures_than_its_limit(world: Path) -> None:
    source = ttvd.load("net", world / "models")
    folder = open_folder(world, "train")
    sites = estimate_sites(source.model, folder, fraction=0.25, views=1)
    rows = torch.arange(0, len(folder), 4)
    part, seen = folder.subset(rows), list[int]()
    hook = source.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    how: dict[str, Any] = {"structures": ("vd",), "batch_size": 8}
    limited = calibrate(source.model, sites, folder, limit=16, **how)
    assert sum(seen) == 2 * 16  # upright and mirrored
    hook.remove()
    assert limited.temperatures.keys() == {"vd"}
    same = calibrate(source.model, sites, part, limit=len(part), **how)
    assert same.temperatures == calibrate(source.model, sites, part, limit=None, **how).temperatures
    with pytest.raises(ValueError, match="limit must be at least 1"):
        calibrate(source.model, sites, part, limit=0)


def test_a_killed_grid_over_pictures_goes_on(world: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "killed.toml"
    recipe.write_text(
        'data.set = "imagenet-c"\ndata.corruptions = ["fog"]\nstream.batch_size = 3\ncheckpoints.plain = "net"\n'
        'seeds = [0, 1]\n[[methods]]\nname = ["bn", "tent"]'
    )
    command = [sys.executable, "-c", "from ttvd.cli import main; main()", "bench", str(recipe), "--jobs", "1"]
    command += [
        "--data",
        str(world),
        "--checkpoints",
        str(world / "models"),
        "--store",
        str(tmp_path / "a.db"),
    ]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert first.stdout is not None
    with first.stdout as lines:
        assert any(line.startswith("[1/4]") for line in lines)
        first.send_signal(signal.SIGKILL)
    first.wait()
    done = CliRunner().invoke(app, command[3:], catch_exceptions=False).output
    before = re.search(r"(\d) runs? done, (\d) were there before", done)
    assert before is not None, done
    assert int(before[1]) + int(before[2]) == 4
    assert int(before[2]) >= 1
