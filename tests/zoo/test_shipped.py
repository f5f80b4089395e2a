"""The checkpoints that come with the package: whole, with sites and temperatures that belong to them, and trained."""

import hashlib
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ttvd.data.digits import split_digits
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.split import split
from ttvd.zoo.catalog import available, load, sites_path
from ttvd.zoo.sites import Sites

CIFAR = [name for name in available() if "-cifar" in name]
FRACTIONS = (1.0, 0.1, 0.05, 0.01)


# Hashes of names, shapes, dtypes and bytes of all tensors in the files of version 0.1.0.
TENSORS = {
    "digits-instance-aware": "bf3e5e9a4b4d9303",
    "digits-plain": "b3c4990ee15fae6e",
    "digits-plain.sites": "6b299ab261797d4a",
    "digits-plane": "be1daec6908179b3",
    "digits-plane.sites": "c1208b71e1546be6",
    "digits-rotation": "1e0c031c4647f138",
    "digits-sla": "77d508faaf70c455",
    "digits-sla.sites": "b9211e9b8d43bc19",
    "resnet26-cifar10-instance-aware": "0eac9cd5c1041c6c",
    "resnet26-cifar10-instance-aware.sites": "f5452f72242086c8",
    "resnet26-cifar10-rotation": "1dfffec9b79a25b1",
    "resnet26-cifar10-rotation.sites": "54e28570194505da",
    "resnet26-cifar10-sla.10pct.sites": "4778e27bd9656105",
    "resnet26-cifar10-sla.1pct.sites": "086fb71bba63a92c",
    "resnet26-cifar10-sla.5pct.sites": "51f0920be1aac873",
    "resnet26-cifar10-sla": "3723cc51deae64c1",
    "resnet26-cifar10-sla.sites": "5c308ef2020df87e",
    "resnet26-cifar100-instance-aware": "5feb0ec8e161b6c8",
    "resnet26-cifar100-instance-aware.sites": "00d2de497ffb3554",
    "resnet26-cifar100-rotation": "ec81e0286924049f",
    "resnet26-cifar100-rotation.sites": "25a337d9304cbc8d",
    "resnet26-cifar100-sla.10pct.sites": "9422b171b54617a1",
    "resnet26-cifar100-sla.1pct.sites": "09d82593f06d90d5",
    "resnet26-cifar100-sla.5pct.sites": "db29921a27ec5e7d",
    "resnet26-cifar100-sla": "f8a22ee48b85063d",
    "resnet26-cifar100-sla.sites": "402509a272bc5787",
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_those_of_the_first_release_to_the_bit(name: str) -> None:
    tensors = load_file(Path(str(files("ttvd.zoo"))) / "checkpoints" / f"{name}.safetensors")
    digest = hashlib.sha256()
    added = {key for key in tensors if key.startswith(("inputs", "input_classes", "entropies."))}
    assert ({"inputs", "input_classes"} < added) == (len(added) > 2) == name.endswith(".sites"), "added since"
    for key in sorted(tensors.keys() - added):
        digest.update(f"{key} {tuple(tensors[key].shape)} {tensors[key].dtype}\n".encode())
        digest.update(tensors[key].reshape(-1).view(torch.uint8).numpy().data)
    assert digest.hexdigest().startswith(TENSORS[name])


def test_every_file_is_known_and_every_model_has_its_fingerprint() -> None:
    folder = Path(str(files("ttvd.zoo"))) / "checkpoints"
    assert set(TENSORS) == {path.name.removesuffix(".safetensors") for path in folder.glob("*.safetensors")}
    for name in available():
        source = load(name)
        assert fingerprint(source.model) == TENSORS[name]
        assert source.card is not None
        assert source.card.input_shape == ((1, 28, 28) if name.startswith("digits") else (3, 32, 32))
        assert source.model.trained_input_shape == source.card.input_shape


def test_the_cifar_models_are_there() -> None:
    kinds = ("sla", "rotation", "instance-aware")
    assert {f"resnet26-{data}-{kind}" for data in ("cifar10", "cifar100") for kind in kinds} == set(CIFAR)


@pytest.mark.parametrize("name", CIFAR)
def test_a_card_says_what_the_model_is(name: str) -> None:
    source = load(name)
    card = source.card
    assert card is not None
    classes = 100 if "cifar100" in name else 10
    assert source.model(torch.rand(2, 3, 32, 32)).shape == (2, classes * card.head_views)
    assert "45,000 of the 50,000" in card.data
    kind = name.split("26-")[1].split("-", 1)[1]
    assert card.training["objective"] in {"instance-aware": ("plain", "rotation")}.get(kind, (kind,))
    assert card.rotation_head == (card.training["objective"] == "rotation")
    for accuracy in (card.accuracy_one_view, card.held_out_one_view):
        assert accuracy is not None
        assert accuracy > (0.66 if classes == 100 else 0.92)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", [name for name in CIFAR if name.endswith("sla")])
def test_class_means_lie_in_the_cells_of_their_classes(name: str, fraction: float) -> None:
    """By the model's own head: without a picture, this tells that weights and sites belong together."""
    source = load(name, fraction=fraction)
    assert source.sites is not None
    assert source.sites.fraction == fraction
    parts = split(source.model)
    source.sites.check(parts)
    with torch.no_grad():
        cells = parts.head(source.sites.means.float().flatten(0, 1)).argmax(1)
    assert (cells == torch.arange(len(cells))).float().mean() > (0.9 if fraction == 0.01 else 0.99)
    for structure in ("vd", "civd", "pd", "cipd"):
        for gamma in (1.0, -0.8) if structure.startswith("ci") else (1.0,):
            assert source.sites.temperature(structure, gamma) > 0


def test_sites_of_label_augmentation_know_the_loss_of_rotations_and_no_others_do() -> None:
    """It is one of the model and of held-out data, whatever share of the source the sites were estimated from."""
    folder, found = str(files("ttvd.zoo") / "checkpoints"), {}
    for name in available():
        paths = [path for share in FRACTIONS if (path := sites_path(folder, name, share)).is_file()]
        found[name] = [Sites.load(path).rotation_loss for path in paths]
    assert {len(found[name]) for name in CIFAR if name.endswith("sla")} == {4}
    assert {name for name in found if name.endswith("sla")} > {"digits-sla"}
    for name, losses in found.items():
        loss = losses[0] if losses else None
        assert losses == [loss] * len(losses)
        if name.endswith("sla"):
            assert loss is not None, name
            assert 0.05 < loss < 0.7, name  # half as good as a guess is 0.7
        else:
            assert loss is None, name
    assert found["resnet26-cifar10-sla"] < found["resnet26-cifar100-sla"]


def test_the_loss_of_rotations_is_that_of_digits_which_the_model_has_not_seen() -> None:
    source, (_, _, images, _) = load("digits-sla"), split_digits()
    assert source.sites is not None
    assert source.sites.rotation_loss is not None
    losses = []
    for turn in range(4):
        with torch.no_grad():
            joint = source.model(torch.rot90(images[:500], turn, (2, 3))).softmax(1)
        losses.append(-joint.view(500, 10, 4)[:, :, turn].sum(1).log().mean().item())
    assert sum(losses) / 4 == pytest.approx(source.sites.rotation_loss, abs=0.05)
