"""Runs whose steps are compiled: where that is asked for, and what they say of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch._dynamo.config

from tests.bench.test_job import make_spec
from ttvd.bench.job import build_adapter, do_run
from ttvd.bench.resources import Resources
from ttvd.bench.spec import WorkerConfig
from ttvd.engine.acceleration import Precision


@pytest.fixture(scope="module")
def resources() -> Resources:
    return Resources(WorkerConfig())


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_runs_are_compiled_where_that_is_asked_for(precision: Precision, resources: Resources) -> None:
    spec = replace(make_spec(resources, "ttvd"), precision=precision)
    for compiled in (False, True):
        adapter = build_adapter(spec, Resources(WorkerConfig(compiled=compiled)))
        assert adapter.compiled == compiled
    assert torch._dynamo.config.recompile_limit >= 100, "a table has more settings than the eight of torch"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Tent runs as it is written")
def test_a_compiled_run_says_so_and_one_at_which_the_compiler_failed_does_not(
    resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, fails = torch.compile, False

    def give_back(module: Any, _: Any) -> Any:  # compiling takes long
        if fails:
            raise RuntimeError("PassManager::run failed")
        return module.forward

    monkeypatch.setattr(torch, "compile", lambda code, **options: whole(code, backend=give_back, **options))
    spec = make_spec(resources, "tent")
    assert "compiled" not in do_run(spec, resources).facts.versions
    assert do_run(spec, Resources(WorkerConfig(compiled=True))).facts.versions["compiled"] == "inductor"
    fails = True
    torch._dynamo.reset()
    assert "compiled" not in do_run(spec, Resources(WorkerConfig(compiled=True))).facts.versions
