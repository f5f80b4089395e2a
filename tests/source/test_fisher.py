"""Fisher information against a plain loop: training mode, backward, squares, mean over batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from ttvd.nn.resnet import ResNet
from ttvd.source.fisher import estimate_fisher, load_fisher, save_fisher


def make_net(norm: str = "batch") -> ResNet:
    generator = torch.Generator().manual_seed(0)
    net = ResNet(3, in_channels=1, widths=(8, 8), blocks=(1, 1), norm=norm, bias=True, generator=generator)
    with torch.no_grad():
        net.fc.weight.mul_(100)
    return net.double().eval()


def make_images(count: int) -> Tensor:
    return torch.rand(count, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def square_gradients(net: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """The oracle: torch's own training mode normalises by the batch."""
    twin = copy.deepcopy(net).train()
    norms = [(n, m) for n, m in twin.named_modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
    squares: dict[str, list[Tensor]] = {}
    for batch in batches:
        twin.zero_grad()
        logits = twin(batch)
        F.cross_entropy(logits, logits.argmax(1)).backward()
        for name, layer in norms:
            for leaf, parameter in layer.named_parameters():
                assert parameter.grad is not None
                squares.setdefault(f"{name}.{leaf}", []).append(parameter.grad**2)
    return {name: sum(found, torch.zeros(())) / len(found) for name, found in squares.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    assert max(float(value.max()) for value in found.values()) > 1e-4, "all but zero: this shows nothing"


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_batches_of_an_iterable_are_used_as_they_come(norm: str) -> None:
    net, batches = make_net(norm), list(make_images(20).split(8))
    assert_same(estimate_fisher(net, batches), square_gradients(net, batches))


def test_an_iterable_is_cut_at_the_number_of_samples() -> None:
    net, batches = make_net(), list(make_images(24).split(8))
    assert_same(
        estimate_fisher(net, batches, samples=11), square_gradients(net, [batches[0], batches[1][:3]])
    )
    assert_same(estimate_fisher(net, batches, samples=8), square_gradients(net, batches[:1]))


def test_a_tensor_is_sampled_by_seed() -> None:
    net, images = make_net(), make_images(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(4))[:14]
    wanted = square_gradients(net, [images[rows] for rows in order.split(6)])
    assert_same(estimate_fisher(net, images, samples=14, batch_size=6, seed=4), wanted)
    other = estimate_fisher(net, images, samples=14, batch_size=6, seed=5)
    assert not torch.allclose(other["norm1.weight"], wanted["norm1.weight"])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from make_images(12).split(5)


def test_every_form_of_data_gives_the_same() -> None:
    net, images = make_net(), make_images(12)
    labels = torch.arange(12) % 3
    wanted = estimate_fisher(net, images, batch_size=5)
    assert_same(estimate_fisher(net, (images, labels), batch_size=5), wanted)
    assert_same(estimate_fisher(net, TensorDataset(images, labels), batch_size=5), wanted)
    streamed = estimate_fisher(net, Stream())
    assert_same(estimate_fisher(net, [(x, x[:, 0]) for x in images.split(5)]), streamed)


def test_bytes_are_scaled() -> None:
    net = make_net().float()
    pixels = (make_images(12) * 255).to(torch.uint8)
    found = estimate_fisher(net, pixels, batch_size=6)
    assert_same(found, estimate_fisher(net, pixels.float() / 255, batch_size=6))


def test_the_model_stays_as_it_is() -> None:
    net = make_net().train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    estimate_fisher(net, make_images(8))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert all(module.training for module in net.modules())


def test_it_works_inside_no_grad_and_gives_plain_tensors() -> None:
    net, images = make_net(), make_images(8)
    with torch.no_grad():
        found = estimate_fisher(net, images)
    assert_same(found, estimate_fisher(net, images))
    assert not any(value.requires_grad for value in found.values())


def test_it_survives_a_file(tmp_path: Path) -> None:
    found = estimate_fisher(make_net(), make_images(8))
    save_fisher(tmp_path / "fisher.safetensors", found)
    loaded = load_fisher(tmp_path / "fisher.safetensors")
    assert set(loaded) == set(found)
    assert all(torch.equal(loaded[name], value) for name, value in found.items())


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fisher.safetensors").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_fisher(tmp_path / "fisher.safetensors")


def test_what_cannot_be_meant_is_refused() -> None:
    net = make_net()
    with pytest.raises(ValueError, match="at least 1, got 0 and 64"):
        estimate_fisher(net, make_images(4), samples=0)
    with pytest.raises(ValueError, match="no images"):
        estimate_fisher(net, [])
    with pytest.raises(ValueError, match="images / 255"):
        estimate_fisher(net, make_images(4) * 255)
    with pytest.raises(ValueError, match="no normalisation layer"):
        estimate_fisher(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), make_images(4))


def test_a_tuple_of_batches_is_a_stream_of_batches() -> None:
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
    images = torch.rand(12, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    found, expected = (estimate_fisher(net, images.split(6)), estimate_fisher(net, list(images.split(6))))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    first = estimate_fisher(net, [images[:6]])
    assert not torch.equal(found["0.weight"], first["0.weight"])
