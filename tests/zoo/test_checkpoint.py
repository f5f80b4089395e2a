import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.helpers.zoo import CARD, SMALL, save_toy
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.rotation import RotationNet
from ttvd.zoo import catalog as zoo
from ttvd.zoo.checkpoint import Card, build_model, card_path, load_checkpoint, save_checkpoint
from ttvd.zoo.sites import Sites
from ttvd.zoo.tensorfile import write_bytes


def edit_card(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


@pytest.mark.parametrize(
    "card",
    [
        CARD,
        replace(CARD, rotation_head=True, head_views=1),
        Card("resnet26", {"num_classes": 10, "bottleneck": 2, "mean": [0.1, 0.2, 0.3]}),
    ],
)
def test_round_trip(tmp_path: Path, card: Card) -> None:
    model = save_toy(tmp_path, card=card).eval()
    loaded, found = load_checkpoint(tmp_path / "toy.safetensors")
    assert asdict(found) == asdict(card)
    assert isinstance(loaded, RotationNet) == card.rotation_head
    assert not loaded.training
    x = torch.rand(2, 1 if card.architecture == "resnet" else 3, 8, 8)
    assert torch.equal(loaded(x), model(x))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.json", "toy.safetensors"]


def test_card_is_readable(tmp_path: Path) -> None:
    model = save_toy(tmp_path)
    text = (tmp_path / "toy.json").read_text()
    document = json.loads(text)
    assert text.count("\n") > 10
    assert document["format"] == 2
    assert document["fingerprint"] == fingerprint(model)
    assert document["accuracy_four_views"] == 0.93


def test_building_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    build_model(replace(CARD, rotation_head=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_save_refuses_a_card_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="the weights do not fit the card's 'resnet'"):
        save_checkpoint(path, nn.Linear(2, 2), CARD)
    with pytest.raises(ValueError, match="unknown architecture 'vgg'; this ttvd can build: resnet, resnet18"):
        save_checkpoint(path, nn.Linear(2, 2), replace(CARD, architecture="vgg"))
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save_checkpoint(tmp_path / "a.pt", build_model(CARD), CARD)
    with pytest.raises(ValueError, match="rotation head needs a ResNet for small images, not 'resnet18'"):
        build_model(Card("resnet18", {"num_classes": 2}, rotation_head=True))
    assert list(tmp_path.iterdir()) == []


def test_load_refuses_damaged_weights(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no ttvd.checkpoint file"):
        load_checkpoint(path)
    save_toy(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated"):
        load_checkpoint(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"not a ttvd.checkpoint file"):
        load_checkpoint(path)
    changed = bytearray(whole)
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ValueError, match="checksum"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "recipe"}, "not the card of a ttvd.checkpoint"),
        ({"format": 3}, "format 3.*upgrade"),
        ({"format": None}, "no format number.*0.1.0.*save_checkpoint"),
        ({"architecture": "vgg"}, "unknown architecture 'vgg'"),
        ({"arguments": {"num_classes": 8, "depth": 3}}, "cannot build 'resnet' from the card.*depth"),
        ({"arguments": {**SMALL, "num_classes": 9}}, "the weights do not fit"),
        ({"fingerprint": "0"}, "do not belong together"),
    ],
)
def test_load_refuses_a_wrong_card(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    save_toy(tmp_path)
    edit_card(tmp_path / "toy.json", **changes)
    with pytest.raises(ValueError, match=reason):
        load_checkpoint(tmp_path / "toy.safetensors")


def test_load_refuses_an_unreadable_card(tmp_path: Path) -> None:
    save_toy(tmp_path)
    path = card_path(tmp_path / "toy.safetensors")
    path.write_text('{"kind": "ttvd.checkpoint", "format": 2}')
    with pytest.raises(ValueError, match="not a complete card"):
        load_checkpoint(tmp_path / "toy.safetensors")
    path.write_text('{"kind": ')
    with pytest.raises(ValueError, match="not readable JSON"):
        load_checkpoint(tmp_path / "toy.safetensors")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no card"):
        load_checkpoint(tmp_path / "toy.safetensors")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "a.bin"
    write_bytes(path, b"old")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in path.parent.iterdir()] == ["a.bin"]


def test_zoo_lists_and_loads(tmp_path: Path) -> None:
    assert zoo.available(tmp_path / "none") == []
    model = save_toy(tmp_path, "digits_sla")
    save_toy(tmp_path, "digits_plain")
    means = torch.rand(2, 4, 16, dtype=torch.float64)
    sites = Sites(means, torch.ones(2, 4).long(), fingerprint(model))
    sites.save(tmp_path / "digits_sla.sites.safetensors")
    assert zoo.available(tmp_path) == ["digits_plain", "digits_sla"]
    source = zoo.load("digits_sla", tmp_path)
    assert source.card is not None
    assert source.card.seed == 3
    assert source.sites is not None
    assert torch.equal(source.sites.means, means)
    assert fingerprint(source.model) == fingerprint(model)
    assert zoo.load("digits_plain", tmp_path).sites is None


def test_zoo_refuses_unknown_names_and_foreign_sites(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint is called 'digits'; there are: none"):
        zoo.load("digits", tmp_path)
    save_toy(tmp_path, "digits_sla")
    with pytest.raises(ValueError, match="'digit_sla'; did you mean 'digits_sla'"):
        zoo.load("digit_sla", tmp_path)
    with pytest.raises(ValueError, match=r"no checkpoint is called '\.\./x'; there are"):
        zoo.load("../x", tmp_path)
    sites = Sites(torch.rand(2, 4, 16, dtype=torch.float64), torch.ones(2, 4).long(), "0" * 16)
    sites.save(tmp_path / "digits_sla.sites.safetensors")
    with pytest.raises(ValueError, match="its weights differ"):
        zoo.load("digits_sla", tmp_path)
