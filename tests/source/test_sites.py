from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.helpers.source import make_data, make_net
from ttvd.nn.fingerprint import fingerprint
from ttvd.nn.resnet import ResNet
from ttvd.nn.split import split
from ttvd.source import calibrate, collect_features, estimate_fisher, evaluate
from ttvd.source.features import choose_fraction
from ttvd.source.sites import SiteAccumulator, estimate_sites


def loop_means(net: ResNet, images: Tensor, labels: Tensor, views: int) -> tuple[Tensor, Tensor]:
    net = net.eval()
    sums = torch.zeros(3, views, 16, dtype=torch.float64)
    counts = torch.zeros(3, views, dtype=torch.int64)
    with torch.no_grad():
        for image, label in zip(images, labels.tolist(), strict=True):
            for a in range(views):
                turned = torch.rot90(image, a * 4 // views, (-2, -1))
                sums[label, a] += net.forward_features(turned[None])[0].double()
                counts[label, a] += 1
    return sums / counts[..., None], counts


class Pairs(Dataset[tuple[Tensor, int]]):
    """A dataset that counts how often it is read."""

    def __init__(self, images: Tensor, classes: Tensor) -> None:
        self.images, self.classes, self.reads = images, classes.tolist(), 0

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self.images[index], self.classes[index]


@pytest.mark.parametrize("views", [1, 2, 4])
def test_sites_match_a_double_loop(views: int) -> None:
    net, (images, labels) = make_net(), make_data()
    sites = estimate_sites(split(net), (images, labels), views=views, batch_size=7)
    means, counts = loop_means(net, images, labels, views)
    torch.testing.assert_close(sites.means, means, rtol=1e-5, atol=1e-6)  # float32 features, other batches
    assert torch.equal(sites.counts, counts)
    assert sites.fraction == 1.0
    assert sites.fingerprint == fingerprint(net)
    sites.check(net)


def test_all_forms_of_data_give_the_same_sites() -> None:
    net, (images, labels) = make_net(), make_data()
    expected = estimate_sites(net, (images, labels), batch_size=8).means
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)

    def generate() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(images.split(8), labels.split(8), strict=True)

    forms = [TensorDataset(images, labels), Pairs(images, labels), loader, generate(), list(generate())]
    for data in forms:
        sites = estimate_sites(net, data, num_classes=3, batch_size=8)  # type: ignore[arg-type]
        torch.testing.assert_close(sites.means, expected, rtol=0, atol=1e-12)
    assert torch.equal(estimate_sites(net, Pairs(images, labels), batch_size=8).means, expected)


def test_uint8_images_are_scaled() -> None:
    net, (images, labels) = make_net(), make_data()
    small = (images * 255).round().to(torch.uint8)
    sites = estimate_sites(net, (small, labels))
    torch.testing.assert_close(sites.means, estimate_sites(net, (small / 255, labels)).means)


def test_flags_gradients_and_progress() -> None:
    net, seen = make_net(), list[int]()
    net.train()
    net.conv1.eval()
    before = fingerprint(net)
    estimate_sites(net, make_data(), batch_size=20, progress=seen.append)
    assert net.training
    assert net.norm1.training
    assert not net.conv1.training
    assert fingerprint(net) == before
    assert all(p.grad is None for p in net.parameters())
    assert seen == [20, 40, 50]


def test_fraction_is_stratified_and_seeded() -> None:
    labels = torch.cat([torch.zeros(100), torch.ones(50), torch.full((3,), 2)]).long()
    chosen = choose_fraction(labels, 0.1, seed=0)
    assert torch.bincount(labels[chosen]).tolist() == [10, 5, 1]
    assert torch.equal(chosen, choose_fraction(labels, 0.1, seed=0))
    assert not torch.equal(chosen, choose_fraction(labels, 0.1, seed=1))
    assert torch.equal(choose_fraction(labels, 1.0, seed=5), torch.arange(153))
    net, data = make_net(), make_data()
    sites = estimate_sites(net, data, fraction=0.5, seed=3)
    kept = choose_fraction(data[1], 0.5, 3)
    means, counts = loop_means(net, data[0][kept], data[1][kept], 4)
    torch.testing.assert_close(sites.means, means, rtol=1e-5, atol=1e-6)
    assert torch.equal(sites.counts, counts)
    assert sites.fraction == 0.5


@pytest.mark.parametrize("name", ["targets", "labels"])
def test_a_dataset_with_a_list_of_labels_is_not_read_for_them(name: str) -> None:
    images, labels = make_data()
    data = Pairs(images, labels)
    setattr(data, name, labels.tolist())
    sites = estimate_sites(make_net(), data, fraction=0.2)
    assert data.reads == int(sites.counts[:, 0].sum()) < len(images) // 3


def test_errors_name_what_is_wrong() -> None:
    net, (x, y) = make_net(), make_data()
    with pytest.raises(ValueError, match=r"labels must run from 0 to 1, got values from 0 to 2"):
        estimate_sites(net, (x, y), num_classes=2)
    with pytest.raises(ValueError, match=r"labels must run from 0, got values from -1"):
        estimate_sites(net, (x, y - 1))
    with pytest.raises(ValueError, match=r"no samples of class 3, 4 \(2 of 5 classes\)"):
        estimate_sites(net, (x, y), num_classes=5)
    for fraction in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="fraction must be in"):
            estimate_sites(net, (x, y), fraction=fraction)
    for bad in (x * 2, x - 1, x.where(x < 0.9, torch.nan), x.where(x < 0.9, torch.inf)):
        with pytest.raises(ValueError, match=r"finite and in \[0, 1\]"):
            estimate_sites(net, (bad, y))
    with pytest.raises(ValueError, match="50 images and 49 labels"):
        estimate_sites(net, (x, y[:49]))
    with pytest.raises(ValueError, match="views must be 1, 2 or 4"):
        estimate_sites(net, (x, y), views=3)
    with pytest.raises(ValueError, match="labels must be integers"):
        estimate_sites(net, (x, y.float()))


def test_streams_are_used_completely() -> None:
    net, batch = make_net(), make_data()
    with pytest.raises(ValueError, match="fraction=1"):
        estimate_sites(net, [batch], num_classes=3, fraction=0.5)
    with pytest.raises(ValueError, match="no images to estimate sites from"):
        estimate_sites(net, [], num_classes=3)


@pytest.mark.parametrize("outputs", [3, 6, 12])
def test_a_stream_needs_no_number_of_classes(outputs: int) -> None:
    """The labels say whether a head of n outputs has n classes, or fewer with rotations."""
    net, (images, labels) = make_net(outputs), make_data()
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    found = estimate_sites(net, loader)
    expected = estimate_sites(net, (images, labels), num_classes=3, batch_size=8)
    assert torch.equal(found.means, expected.means)
    assert torch.equal(found.counts, expected.counts)


@pytest.mark.parametrize("form", [list, tuple])
def test_labels_that_do_not_fit_the_head_are_refused_with_the_line_to_write(form: type) -> None:
    data: Any = make_data() if form is tuple else [make_data()]
    with pytest.raises(
        ValueError, match=r"3 classes .* 9 outputs.*estimate_sites\(model, data, num_classes=3\)"
    ):
        estimate_sites(make_net(9), data)
    assert estimate_sites(make_net(9), data, num_classes=3).num_classes == 3
    plain: Any = make_net(12)
    plain.head_views = 1  # what the card of a checkpoint says
    with pytest.raises(ValueError, match=r"3 classes .* 12 outputs"):
        estimate_sites(plain, data)


def test_images_of_another_size_than_the_card_says_are_refused() -> None:
    net: Any = make_net()
    images, labels = make_data()
    net.trained_input_shape = (1, 32, 32)
    for use in (estimate_sites, collect_features):
        with pytest.raises(ValueError, match=r"\(1, 32, 32\), got \(1, 6, 6\).*Resize"):
            use(net, (images, labels))
    with pytest.raises(ValueError, match="Resize"):
        evaluate(split(net), images, labels)
    with pytest.raises(ValueError, match="Resize"):
        estimate_fisher(net, images)
    net.trained_input_shape = tuple(images.shape[1:])
    sites = estimate_sites(net, (images, labels))
    with pytest.raises(ValueError, match="Resize"):
        calibrate(net, sites, (images[..., 1:, 1:], labels))


class Between(nn.Module):
    """Does something between its method ``features`` and its head."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.fc = nn.Linear(64, 3)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x) * self.scale)  # type: ignore[no-any-return]


def test_features_must_be_finite() -> None:
    with pytest.raises(ValueError, match="features must be finite and of shape"):
        estimate_sites(Between(float("inf")), (torch.ones(6, 1, 8, 8), torch.arange(6) % 3))


def test_sites_are_means_of_what_enters_the_head() -> None:
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    plain, scaled = (estimate_sites(Between(scale), (images, labels)).means for scale in (1.0, 5.0))
    assert torch.allclose(scaled, 5 * plain)


def test_a_layer_called_features_is_not_taken_for_the_method() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(1, 4, 3)
            self.classifier = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.classifier(self.features(x).mean((-2, -1)))
            return logits

    assert estimate_sites(Old(), make_data()).dim == 4


def test_bf16_features_are_summed_in_float64() -> None:
    z = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    sums = SiteAccumulator(1, 1, 1)
    sums.update(z, torch.zeros(4096, dtype=torch.int64))
    assert sums.sums.item() == 4096.0
    assert sums.sums.dtype == torch.float64


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_merged_halves_are_the_whole(cut: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, 41, 3, generator=generator)
    labels = torch.cat([torch.arange(4), torch.randint(0, 4, (37,), generator=generator)])
    whole, left, right = (SiteAccumulator(4, 2, 3) for _ in range(3))
    whole.update(z, labels)
    left.update(z[:, :cut], labels[:cut])
    right.update(z[:, cut:], labels[cut:])
    left.merge(right)
    torch.testing.assert_close(left.means(), whole.means(), rtol=0, atol=1e-12)
    assert torch.equal(left.counts, whole.counts)
    with pytest.raises(ValueError, match="cannot merge sums of shape"):
        left.merge(SiteAccumulator(3, 2, 3))
