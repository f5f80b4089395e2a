"""Runs that share an adapter give the rows of runs that have one of their own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ttvd
from tests.helpers.bench import digits_resources, list_rows, make_spec
from ttvd.bench import resources as module
from ttvd.bench.job import execute, identify_adapter
from ttvd.bench.resources import AdapterCache, CachedAdapter, Resources
from ttvd.bench.spec import Domain, Spec

OTHER: dict[str, Any] = {
    "domains": (Domain("gaussian_noise"), Domain("contrast")),
    "stream": "class_sorted",
    "options": {},
    "batch_size": 20,
    "limit": 33,
    "seed": 3,
}
"""A run on other images in another order, with batches of other sizes."""
SLOW = {"cotta", "memo", "ttt"}


@pytest.fixture(scope="module")
def resources() -> Resources:
    return digits_resources()


@pytest.fixture(autouse=True)
def nothing_kept(resources: Resources) -> None:
    resources.adapters.clear()


def make_small(resources: Resources, method: str, extra: str = "") -> Spec:
    return replace(make_spec(resources, method, extra), limit=66, batch_size=32)


def kept(resources: Resources) -> list[ttvd.Adapter]:
    return [cached.adapter for cached in resources.adapters._kept.values()]


@pytest.mark.parametrize("method", sorted(ttvd.list_methods()))
def test_a_run_after_others_has_the_rows_of_a_run_alone(resources: Resources, method: str) -> None:
    spec = make_small(resources, method)
    if method in SLOW:
        spec = replace(spec, limit=12, batch_size=5)
    alone = list_rows(execute(spec, resources))
    resources.adapters.clear()
    execute(replace(spec, **OTHER | ({"limit": 9} if method in SLOW else {})), resources)
    (adapter,) = kept(resources)
    assert list_rows(execute(spec, resources)) == alone
    assert kept(resources) == [adapter]  # it was the same all the time


def test_the_rows_would_tell_if_an_adapter_went_on(
    resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_small(resources, "tent", "params = { lr = 0.1 }")
    alone = list_rows(execute(spec, resources))
    monkeypatch.setattr(ttvd.Adapter, "renew", lambda _: None)
    assert list_rows(execute(spec, resources)) != alone


@pytest.mark.parametrize("method", ["tent", "eata", "rdumb", "rotta", "sar"])
@pytest.mark.parametrize("extra", ["episodic = true", 'rules = ["oracle"]'])
def test_so_has_one_whose_batches_start_again_or_choose(
    resources: Resources, method: str, extra: str
) -> None:
    spec = replace(make_small(resources, method, extra), steps=2)
    assert spec.episodic or spec.selection == "oracle"
    alone = list_rows(execute(spec, resources))
    execute(replace(spec, **OTHER), resources)
    assert list_rows(execute(spec, resources)) == alone
    assert len(kept(resources)) == 1


def test_half_precision_is_shared_too(resources: Resources) -> None:
    spec = replace(make_small(resources, "ttvd"), precision="bfloat16")
    alone = list_rows(execute(spec, resources))
    execute(replace(spec, **OTHER), resources)
    assert list_rows(execute(spec, resources)) == alone
    assert len(kept(resources)) == 1


CHANGES: dict[str, Any] = {
    "checkpoint": "digits-plane",
    "weights": "0" * 16,
    "method": "pd",
    "revision": 99,
    "parameters": {"lr": 0.5},
    "views": 2,
    "sites": 0.5,
    "precision": "bfloat16",
    "data": "mnist",
    "selection": "oracle",
    "episodic": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_decides_the_adapter_is_told_apart(resources: Resources, name: str) -> None:
    spec = make_small(resources, "ttvd")
    assert identify_adapter(spec) == identify_adapter(replace(spec, **OTHER, steps=7))
    assert identify_adapter(spec) != identify_adapter(replace(spec, **{name: CHANGES[name]}))


def test_every_entry_of_a_spec_decides_the_adapter_or_the_stream() -> None:
    stream = {*OTHER, "content", "constants", "join", "steps"}
    assert stream | set(CHANGES) == set(Spec.__dataclass_fields__)
    assert not stream & set(CHANGES)


def build() -> ttvd.Adapter:
    return ttvd.create("bn", nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)))


def borrow(adapters: AdapterCache, key: str) -> ttvd.Adapter:
    with adapters.use(key, build) as cached:
        return cached.adapter


def test_a_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    adapters = AdapterCache(torch.device("cpu"))
    a, b = borrow(adapters, "a"), borrow(adapters, "b")
    assert borrow(adapters, "a") is a
    borrow(adapters, "c")
    assert borrow(adapters, "a") is a
    assert borrow(adapters, "b") is not b


def test_that_of_a_failed_run_is_not_used_again() -> None:
    adapters = AdapterCache(torch.device("cpu"))
    first = borrow(adapters, "a")
    with pytest.raises(ValueError, match="expected a batch"), adapters.use("a", build) as cached:
        cached.adapter(torch.rand(0, 4))
    assert borrow(adapters, "a") is not first


def test_two_runs_at_once_never_share() -> None:
    adapters = AdapterCache(torch.device("cpu"))
    with adapters.use("a", build) as one, adapters.use("a", build) as other:
        assert one.adapter is not other.adapter


def test_on_a_crowded_device_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 6.0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 10.0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2.0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1.0)
    adapters = AdapterCache(torch.device("cuda"))
    first = borrow(adapters, "a")
    assert borrow(adapters, "a") is first
    free = 3.0
    assert borrow(adapters, "a") is first
    assert borrow(adapters, "a") is not first


def test_the_first_batch_of_each_run_is_looked_at() -> None:
    adapters = AdapterCache(torch.device("cpu"))
    borrow(adapters, "a")(torch.rand(5, 1, 2, 2))
    with adapters.use("a", build) as cached:
        assert not cached.adapter._seen_batch
        with pytest.raises(ValueError, match="expected images in"):
            cached.adapter(2 + torch.rand(5, 1, 2, 2))


class OnDevice(torch.Tensor):
    """Says that it is where steps are recorded."""

    is_cuda = True


def test_without_recordings_each_run_has_its_own_peak() -> None:
    cached = CachedAdapter(build())
    assert [cached.correct_peak(64, taken) for taken in (700, 20, None)] == [700, 20, None]


def test_memory_that_is_kept_between_runs_counts_for_each() -> None:
    cached = CachedAdapter(build())
    cached.adapter.kept = cached.adapter.kept.as_subclass(OnDevice)
    assert cached.correct_peak(64, None) is None
    assert [cached.correct_peak(64, taken) for taken in (700, 20, None)] == [700, 700, 700]
    assert cached.correct_peak(8, 90) == 90
    assert cached.correct_peak(64, 800) == 800
