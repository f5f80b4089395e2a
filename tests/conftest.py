"""Shared by all tests."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# No deadline: how long a case takes says more about the machine than about the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """What the collection of thousands of tests leaves behind lives to the end: it need not be searched for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """What was frozen is frozen again if a test has thawed it, as the check of memory in ``ttvd.testing`` does."""
    yield
    if not gc.get_freeze_count():
        gc.collect(1)
        gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """What a test draws must not depend on which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(0)
