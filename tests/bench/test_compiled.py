"""Runs whose steps are compiled: where that is asked for, and what they say of it."""

from dataclasses import replace

import pytest
import torch._dynamo.config

import ttvd
from tests.bench.test_job import make_spec
from ttvd.adapters.speed import Precision
from ttvd.bench.job import build_adapter, execute
from ttvd.bench.setting import Setting
from ttvd.bench.supply import Supply


@pytest.fixture(scope="module")
def supply() -> Supply:
    return Supply(Setting())


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_runs_are_compiled_where_that_is_asked_for(precision: Precision, supply: Supply) -> None:
    spec = replace(make_spec(supply, "ttvd"), precision=precision)
    for compiled in (False, True):
        adapter = build_adapter(spec, Supply(Setting(compiled=compiled)))
        assert adapter.compiled == compiled
    assert torch._dynamo.config.recompile_limit >= 100, "a table has more settings than the eight of torch"


def test_a_compiled_run_says_so(supply: Supply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttvd.Adapter, "accelerate", lambda self, **_: self)  # compiling takes long
    spec = make_spec(supply, "bn")
    assert "compiled" not in execute(spec, supply).facts.versions
    assert execute(spec, Supply(Setting(compiled=True))).facts.versions["compiled"] == "inductor"
