from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.source import make_data, make_net
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet
from ttvd.nn.split import split
from ttvd.source.features import collect_features
from ttvd.zoo.source_features import SourceFeatures
from ttvd.zoo.tensorfile import write_tensors


@torch.no_grad()
def loop_features(net: ResNet, images: Tensor) -> Tensor:
    rows = [net.eval().forward_features(image[None])[0] for image in images]
    return torch.stack([row / row.norm() for row in rows])


def find_rows(found: Tensor, everything: Tensor) -> list[int]:
    """Which row of ``everything`` each found one is."""
    distances = torch.cdist(found.double(), everything.double())
    assert float(distances.amin(1).max()) < 1e-5
    return distances.argmin(1).tolist()


def test_features_match_a_loop_and_leave_the_model_alone() -> None:
    net, (images, labels) = make_net(3).train(), make_data()
    before = fingerprint(net)
    memory = collect_features(net, (images, labels), batch_size=7)
    assert net.training
    assert fingerprint(net) == before == memory.fingerprint
    torch.testing.assert_close(memory.features, loop_features(net, images), rtol=1e-5, atol=1e-6)
    assert torch.equal(memory.labels, labels)
    assert memory.features.dtype == torch.float32
    memory.check(net)
    memory.check(split(net))


def test_all_forms_of_data_give_the_same_features() -> None:
    net, (images, labels) = make_net(3), make_data()
    expected = collect_features(net, (images, labels), batch_size=8)

    def generate() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(images.split(8), labels.split(8), strict=True)

    pairs = TensorDataset(images, labels)
    for data in (pairs, DataLoader(pairs, batch_size=8), generate(), list(generate())):
        memory = collect_features(net, data, batch_size=8)
        assert torch.equal(memory.features, expected.features)
        assert torch.equal(memory.labels, expected.labels)


def test_models_of_double_precision_and_uint8_images() -> None:
    net, (images, labels) = make_net(3), make_data()
    whole = (images * 255).round()
    memory = collect_features(net, (whole.to(torch.uint8), labels))
    torch.testing.assert_close(memory.features, loop_features(net, whole / 255), rtol=1e-5, atol=1e-6)
    double = collect_features(net.double(), (images.double(), labels))
    assert double.features.dtype == torch.float32


def test_a_fraction_is_a_seeded_share_of_every_class() -> None:
    net, (images, labels) = make_net(3), make_data(60)
    everything = loop_features(net, images)
    memory = collect_features(net, (images, labels), fraction=0.25, seed=3)
    rows = find_rows(memory.features, everything)
    assert rows == sorted(set(rows))
    assert torch.equal(memory.labels, labels[rows])
    assert memory.labels.bincount().tolist() == [round(0.25 * int(n)) for n in labels.bincount()]
    again = collect_features(net, (images, labels), fraction=0.25, seed=3, batch_size=4)
    assert find_rows(again.features, everything) == rows
    other = collect_features(net, (images, labels), fraction=0.25, seed=4)
    assert find_rows(other.features, everything) != rows


@pytest.mark.parametrize("limit", [1, 2, 10, 31, 60, 1000])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_limit_is_kept_and_shared_by_the_classes(limit: int, fraction: float) -> None:
    net, (images, labels) = make_net(3), make_data(60)
    everything = loop_features(net, images)
    memory = collect_features(net, (images, labels), fraction=fraction, limit=limit, batch_size=16)
    whole = collect_features(net, (images, labels), fraction=fraction)
    rows = find_rows(memory.features, everything)
    assert torch.equal(memory.labels, labels[rows])
    assert set(rows) <= set(find_rows(whole.features, everything))
    assert min(limit, len(whole)) - 2 <= len(memory) <= limit
    if limit == 10:
        shares = labels.bincount() / len(labels)
        assert (memory.labels.bincount(minlength=3) - 10 * shares).abs().max() <= 1.5


def test_of_an_iterable_the_limit_takes_the_first_and_reads_no_further() -> None:
    net, (images, labels) = make_net(3), make_data()
    read = []

    def generate() -> Iterator[tuple[Tensor, Tensor]]:
        for i, batch in enumerate(zip(images.split(8), labels.split(8), strict=True)):
            read.append(i)
            yield batch

    memory = collect_features(net, generate(), limit=16)
    assert read == [0, 1]
    torch.testing.assert_close(memory.features, loop_features(net, images[:16]), rtol=1e-5, atol=1e-6)
    assert len(collect_features(net, generate(), limit=13)) == 13
    with pytest.raises(ValueError, match="fraction=1"):
        collect_features(net, generate(), fraction=0.5)


def test_what_cannot_be_meant_is_refused() -> None:
    net, (images, labels) = make_net(3), make_data()
    with pytest.raises(ValueError, match="limit must be at least 1"):
        collect_features(net, (images, labels), limit=0)
    with pytest.raises(ValueError, match="fraction must be"):
        collect_features(net, (images, labels), fraction=0.0)
    with pytest.raises(ValueError, match="labels must run from 0 to 2"):
        collect_features(net, (images, labels + 1))
    with pytest.raises(ValueError, match="no images"):
        collect_features(net, [])


def test_files_hold_everything(tmp_path: Path) -> None:
    memory = collect_features(make_net(3), make_data())
    memory.save(tmp_path / "memory.safetensors")
    read = SourceFeatures.load(tmp_path / "memory.safetensors")
    assert torch.equal(read.features, memory.features)
    assert torch.equal(read.labels, memory.labels)
    assert read.fingerprint == memory.fingerprint


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    write_tensors(path, {"features": torch.eye(2)}, kind="ttvd.sites", version=1)
    with pytest.raises(ValueError, match=r"not a ttvd\.source_features file"):
        SourceFeatures.load(path)
    write_tensors(path, {"features": torch.eye(2)}, kind="ttvd.source_features", version=2)
    with pytest.raises(ValueError, match="not a valid"):
        SourceFeatures.load(path)
    with pytest.raises(FileNotFoundError):
        SourceFeatures.load(tmp_path / "none")


def test_a_model_that_did_not_make_them_is_refused() -> None:
    net = make_net(3)
    memory = collect_features(net, make_data())
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="its weights differ"):
        memory.check(net)
    with pytest.raises(ValueError, match="16 dimensions, the model's 4"):
        memory.check(split(nn.Sequential(nn.Flatten(), nn.Linear(4, 3))))
    with pytest.raises(ValueError, match="labels up to 2, the model's head has 2"):
        memory.check(split(nn.Linear(16, 2)))


@pytest.mark.parametrize(
    ("features", "labels", "reason"),
    [
        (torch.eye(2).double(), torch.tensor([0, 1]), "float32"),
        (torch.ones(2), torch.tensor([0, 1]), r"\(n, d\)"),
        (torch.zeros(0, 3), torch.zeros(0).long(), r"\(n, d\)"),
        (2 * torch.eye(2), torch.tensor([0, 1]), "norm 1"),
        (torch.full((2, 2), float("nan")), torch.tensor([0, 1]), "norm 1"),
        (torch.eye(2), torch.tensor([0]), r"int64 \(2,\)"),
        (torch.eye(2), torch.tensor([0.0, 1.0]), "int64"),
        (torch.eye(2), torch.tensor([0, -1]), "from 0"),
    ],
)
def test_broken_features_are_refused(features: Tensor, labels: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SourceFeatures(features, labels, "abc")


def test_a_sample_without_active_features_is_allowed() -> None:
    memory = SourceFeatures(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]), "abc")
    assert len(memory) == 2
