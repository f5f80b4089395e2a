"""Mistakes with ImageNet's files and models, and what is said about them; files that look wrong and are not."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tools.imagenet_rehearsal import CLASSES as MANY
from tools.imagenet_rehearsal import plant
from typer.testing import CliRunner

from ttvd.bench.job import execute
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.cli.main import app
from ttvd.data.digits import split_digits
from ttvd.data.sets import ClassMap, ImageFolder, find_classes, load_set, read_image
from ttvd.nn.resnet_imagenet import resnet18
from ttvd.source import estimate_sites
from ttvd.zoo.catalog import load_source
from ttvd.zoo.checkpoint import Card, build_model, save_checkpoint

CLASSES = MANY[:6]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and two models with random weights: one for these classes, one for fewer."""
    root = plant(tmp_path_factory.mktemp("imagenet"), CLASSES, train=2, val=1, corruptions=("fog",))
    (root / "models").mkdir()
    for name, classes in (("net", len(CLASSES)), ("small", 5)):
        card = Card("resnet18", {"num_classes": classes})
        save_checkpoint(root / "models" / f"{name}.safetensors", build_model(card), card)
    return root


def open_training(root: Path) -> ImageFolder:
    found = load_set("imagenet", root, "train")
    assert isinstance(found, ImageFolder)
    return found


def test_folders_that_show_a_part_of_the_classes_are_no_source_data(world: Path, tmp_path: Path) -> None:
    for name in CLASSES[:4]:
        shutil.copytree(world / "train" / name, tmp_path / "train" / name)
    net = resnet18(len(CLASSES))
    with pytest.raises(ValueError, match="labels show 4 classes and the model's head has 6 outputs"):
        estimate_sites(net, open_training(tmp_path))
    with pytest.raises(ValueError, match=r"no samples of class 4, 5 \(2 of 6 classes\)"):
        estimate_sites(net, open_training(tmp_path), num_classes=len(CLASSES), batch_size=5, views=1)
    with pytest.raises(ValueError, match=f"class folder .*{CLASSES[4]} has no pictures"):
        ImageFolder(tmp_path / "train", classes=CLASSES)


def test_the_outputs_of_imagenet_r_are_found_by_name(world: Path, tmp_path: Path) -> None:
    shown = load_set("imagenet-r", world).classes
    assert shown == (CLASSES[1], CLASSES[5])
    columns = ClassMap.match(shown, find_classes(world)).columns
    assert columns == (1, 5)
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG").touch()
    with pytest.raises(
        FileNotFoundError, match=r"neither as folders of train or val, nor in a file classes\.txt"
    ):
        find_classes(tmp_path)
    lines = [f"{name} something, anything" for name in CLASSES]
    for file in ("LOC_synset_mapping.txt", "classes.txt"):
        (tmp_path / file).write_text("\n".join(lines))
        assert ClassMap.match(shown, find_classes(tmp_path)).columns == columns


def test_missing_parts_of_imagenet_are_named(world: Path, tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"has a folder val, .* there is no .*train with a folder for"
    ):
        load_set("imagenet", tmp_path, "train")
    with pytest.raises(FileNotFoundError, match=r"there is no .*imagenet-r with a folder for each class"):
        load_set("imagenet-r", tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "val" / "flat.JPEG")
    with pytest.raises(ValueError, match="has no class folders"):
        load_set("imagenet", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no folder .*fog"):
        load_set("imagenet-c", tmp_path, corruption="fog")
    shutil.copytree(world / "ImageNet-C" / "fog", tmp_path / "ImageNet-C" / "weather" / "fog")
    assert len(load_set("imagenet-c", tmp_path, corruption="fog")) == len(CLASSES)
    assert load_set("imagenet", world / "train", "train").classes == CLASSES  # the folder itself will do


def make_spec_error(root: Path, text: str, models: Path | None = None) -> str:
    with pytest.raises(ValueError, match="recipe test") as error:
        plan(parse_recipe(text, "test"), Resources(WorkerConfig(root, (models or root) / "models")))
    return str(error.value)


def test_models_for_other_classes_are_refused_before_anything_runs(world: Path) -> None:
    text = 'data.set = "imagenet-c"\ndata.corruptions = ["fog"]\ncheckpoints.plain = "small"\n[[methods]]\nname = "bn"'
    assert "small tells 5 classes apart, imagenet-c needs 6" in make_spec_error(world, text)
    wider = text.replace("imagenet-c", "imagenet-r").replace('"fog"', '"none"')
    assert "small tells 5 classes apart, imagenet-r needs 6" in make_spec_error(world, wider)


@pytest.mark.parametrize("mode", ["L", "CMYK", "YCbCr", "RGB"])
def test_jpegs_of_all_colours_become_rgb(mode: str, world: Path, tmp_path: Path) -> None:
    picture = Image.open(world / "train" / CLASSES[2] / f"{CLASSES[2]}_0.JPEG").convert(mode)
    picture.save(tmp_path / "a.JPEG", quality=95)
    expected = np.array(Image.open(tmp_path / "a.JPEG").convert("RGB")).transpose(2, 0, 1)
    assert torch.equal(read_image(tmp_path / "a.JPEG", None, None), torch.from_numpy(expected) / 255)
    picture.convert("RGB").save(tmp_path / "png.JPEG", format="PNG")  # ImageNet has one under a wrong name
    assert read_image(tmp_path / "png.JPEG").shape == (3, 224, 224)


def damage(root: Path, part: str) -> str:
    path = root / part / CLASSES[3] / f"{CLASSES[3]}_{1000 if part != 'train' else 1}.JPEG"
    path.write_bytes(path.read_bytes()[:900])
    return path.name


def test_a_damaged_jpeg_is_named_or_left_out(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "train", tmp_path / "train")
    shutil.copytree(world / "ImageNet-C", tmp_path / "ImageNet-C")
    with pytest.raises(ValueError, match=f"{damage(tmp_path, 'train')} cannot be used as a picture"):
        estimate_sites(resnet18(len(CLASSES)), open_training(tmp_path), batch_size=16, views=1)
    name = damage(tmp_path, "ImageNet-C/fog/5")
    model = ["--model", str(world / "models" / "net.safetensors"), "--method", "bn", "--crop", "224"]
    arguments = ["adapt", str(tmp_path / "ImageNet-C"), *model, "--out", str(tmp_path / "a.csv")]
    with pytest.raises(ValueError, match=name):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    done = CliRunner().invoke(app, [*arguments, "--unreadable", "skip"], catch_exceptions=False)
    assert "5 predictions in" in done.output
    assert name not in (tmp_path / "a.csv").read_text()


def test_arrays_can_be_measured_by_a_recipe(tmp_path: Path) -> None:
    _, _, images, labels = split_digits()
    np.save(tmp_path / "images.npy", (images[:64] * 255).round().byte().numpy())
    np.save(tmp_path / "labels.npy", labels[:64].numpy())
    text = 'data.set = "arrays"\ndata.corruptions = ["none"]\ncheckpoints.plain = "digits-plain"\n'
    text += '[[methods]]\nname = "source"'
    resources = Resources(WorkerConfig(tmp_path))
    (member,) = plan(parse_recipe(text, "own"), resources)
    assert execute(member.spec, resources).totals["n"] == 64
    (tmp_path / "images.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither images\.npz"):
        load_set("arrays", tmp_path)


RENDERED = 'data.set = "imagenet-r"\ndata.corruptions = ["none"]\ncheckpoints.plain = "net"\n[[methods]]\nname = "bn"'


def test_a_list_of_classes_serves_where_imagenet_itself_is_not(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "imagenet-r", tmp_path / "imagenet-r")
    resources = Resources(WorkerConfig(tmp_path, world / "models"))
    assert "class folders, which tell the outputs" in make_spec_error(tmp_path, RENDERED, world)
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    found = resources.restriction("imagenet-r")
    assert found is not None
    assert (found.columns, found.outputs) == ((1, 5), 6)
    assert len(plan(parse_recipe(RENDERED, "test"), resources)) == 1


def test_a_part_of_the_class_folders_is_refused_by_the_plan(world: Path, tmp_path: Path) -> None:
    for name in CLASSES[:4]:
        shutil.copytree(world / "val" / name, tmp_path / "val" / name)
    text = RENDERED.replace("imagenet-r", "imagenet")
    assert "net tells 6 classes apart, imagenet needs 4" in make_spec_error(tmp_path, text, world)


def test_instance_aware_checkpoints_can_be_made() -> None:
    card = Card("resnet18", {"num_classes": 3, "norm": "instance-aware"})
    kinds = {type(layer).__name__ for layer in build_model(card).modules() if hasattr(layer, "running_mean")}
    assert kinds == {"InstanceAwareBatchNorm2d"}


def test_a_functions_model_finds_the_sites_called_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_models.py").write_text(
        "import torch\nfrom torch import nn\n\ndef tiny():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = load_source("own_models:tiny", folder=tmp_path).model
    sites = estimate_sites(model, (torch.rand(9, 3, 2, 2), torch.arange(9) % 3))
    sites.save(tmp_path / "tiny.sites.safetensors")
    found = load_source("own_models:tiny", folder=tmp_path).sites
    assert found is not None
    assert torch.equal(found.means, sites.means)
