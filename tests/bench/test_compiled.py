"""Runs whose steps are compiled: where that is asked for, and what they say of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch._dynamo.config

from tests.bench.test_job import make_spec
from ttvd.bench.job import build_adapter, execute
from ttvd.bench.setting import Setting
from ttvd.bench.supply import Supply
from ttvd.engine.acceleration import Precision


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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Tent runs as it is written")
def test_a_compiled_run_says_so_and_one_at_which_the_compiler_failed_does_not(
    supply: Supply, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, fails = torch.compile, False

    def give_back(module: Any, _: Any) -> Any:  # compiling takes long
        if fails:
            raise RuntimeError("PassManager::run failed")
        return module.forward

    monkeypatch.setattr(torch, "compile", lambda code, **options: whole(code, backend=give_back, **options))
    spec = make_spec(supply, "tent")
    assert "compiled" not in execute(spec, supply).facts.versions
    assert execute(spec, Supply(Setting(compiled=True))).facts.versions["compiled"] == "inductor"
    fails = True
    torch._dynamo.reset()
    assert "compiled" not in execute(spec, Supply(Setting(compiled=True))).facts.versions
