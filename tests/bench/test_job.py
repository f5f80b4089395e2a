"""A run against a loop written by hand, from the data files to the numbers."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.config

import ttvd
from tests.helpers.bench import copy_checkpoint, digits_resources, list_rows, make_spec
from ttvd.bench.job import build_adapter, execute, make_order
from ttvd.bench.resources import Resources
from ttvd.bench.run import choose_step
from ttvd.bench.spec import Domain, Spec, WorkerConfig
from ttvd.data.corruptions import corrupt
from ttvd.data.digits import split_digits
from ttvd.data.sets import load_set
from ttvd.engine.acceleration import Precision
from ttvd.methods import find_method
from ttvd.zoo.catalog import sites_path
from ttvd.zoo.sites import Sites


@pytest.fixture(scope="module")
def resources() -> Resources:
    return digits_resources()


def test_a_run_equals_a_loop_written_by_hand(resources: Resources) -> None:
    spec = make_spec(resources, "tent", "params = { lr = 0.01 }")
    done = execute(spec, resources)
    _, _, images, labels = split_digits()
    chosen = np.sort(np.random.default_rng(0).permutation(2000)[:150])
    pictures = corrupt((images[chosen] * 255).round() / 255, "fog", 5, seed=0, index=torch.from_numpy(chosen))
    order = np.random.default_rng(0).permutation(150)
    adapter = ttvd.create("tent", ttvd.load("digits-plain").model, lr=0.01)
    wrong = 0
    for start in range(0, 150, 64):
        rows = order[start : start + 64]
        wrong += int((adapter(pictures[rows]).argmax(1) != labels[chosen][rows]).sum())
    assert done.totals["n"] == 150
    assert done.totals["error"] == wrong / 150
    assert [int(row.metrics["n"]) for row in done.record.rows] == [64, 64, 22]  # type: ignore[arg-type]


def test_a_run_is_repeatable_and_independent_of_what_ran_before(resources: Resources) -> None:
    spec = make_spec(resources, "ttvd")
    first = execute(spec, resources)
    execute(make_spec(resources, "shot"), resources)
    assert list_rows(execute(spec, resources)) == list_rows(first)
    assert list_rows(execute(spec, Resources(WorkerConfig()))) == list_rows(first)


def test_facts(resources: Resources) -> None:
    spec = make_spec(resources, "ttvd")
    facts = execute(spec, resources).facts
    assert (facts.forwards, facts.backwards) == (4.0, 4.0)
    assert facts.versions["torch"] == torch.__version__
    assert facts.order == execute(make_spec(resources, "bn"), resources).facts.order
    assert facts.order != execute(replace(spec, seed=1), resources).facts.order
    assert facts.seconds > 0


def test_progress_counts_batches(resources: Resources) -> None:
    seen: list[tuple[int, int]] = []
    execute(make_spec(resources, "bn"), resources, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_views_are_aggregated_around_a_method(resources: Resources) -> None:
    spec = make_spec(resources, "bn", 'checkpoint = "digits-sla"\nviews = 4')
    one = make_spec(resources, "bn", 'checkpoint = "digits-sla"')
    assert execute(spec, resources).totals["error"] < execute(one, resources).totals["error"]
    assert execute(spec, resources).facts.forwards == 4.0


def test_episodic_runs_start_again_at_each_batch(resources: Resources) -> None:
    spec = make_spec(resources, "tent", "params = { lr = 0.1 }\nepisodic = true")
    run = execute(spec, resources)
    alone = build_adapter(replace(spec, episodic=False), resources)
    order = make_order(spec, resources)
    rows = torch.from_numpy(order[64:128, 1])
    logits = alone(resources.batch(spec, spec.domains[0], rows))
    correct = int((logits.argmax(1) == resources.labels(spec)[rows]).sum())
    assert run.record.rows[1].metrics["correct"] == correct


def test_continual_rows_name_their_domain_and_state_is_carried_over(resources: Resources) -> None:
    spec = make_spec(resources, "tent", "params = { lr = 0.1 }")
    both = replace(spec, domains=(Domain("fog"), Domain("snow")), batch_size=50)
    run = execute(both, resources)
    assert [row.domain for row in run.record.rows] == [0, 0, 0, 1, 1, 1]
    assert run.totals["n"] == 300
    alone = execute(replace(spec, batch_size=50), resources)
    assert list_rows(alone) == list_rows(run)[:3]
    fresh = execute(replace(spec, domains=(Domain("snow"),), batch_size=50), resources)
    assert [row.metrics for row in fresh.record.rows] != [row.metrics for row in run.record.rows[3:]]


def test_no_batch_of_a_continual_stream_has_images_of_two_domains(resources: Resources) -> None:
    spec = replace(
        make_spec(resources, "source"), domains=(Domain("fog"), Domain("snow"), Domain()), limit=20
    )
    run = execute(spec, resources)
    assert [(row.metrics["n"], row.domain) for row in run.record.rows] == [(20, 0), (20, 1), (20, 2)]
    each = [execute(replace(spec, domains=(domain,)), resources).record.rows[0] for domain in spec.domains]
    assert [row.metrics["correct"] for row in run.record.rows] == [row.metrics["correct"] for row in each]


def test_mixed_domains_show_every_image_once_in_each(resources: Resources) -> None:
    spec = replace(make_spec(resources, "bn"), domains=(Domain("fog"), Domain("snow")), join="mixed")
    order = make_order(spec, resources)
    assert sorted(map(tuple, order.tolist())) == [(d, i) for d in range(2) for i in range(150)]
    assert len(set(order[:64, 0].tolist())) == 2
    run = execute(spec, resources)
    assert {row.domain for row in run.record.rows} == {0}
    # What an image looks like does not depend on its neighbours in the batch.
    source = replace(spec, method="source", parameters={})
    whole = execute(source, resources).totals["error"]
    each = [execute(replace(source, domains=(d,)), resources).totals["error"] for d in spec.domains]
    assert whole == pytest.approx(sum(each) / 2)


def test_clean_images_are_left_as_they_are(resources: Resources) -> None:
    spec = replace(make_spec(resources, "source"), domains=(Domain(),), limit=None)
    base = load_set("digits")
    index = torch.arange(20)
    assert torch.equal(resources.batch(spec, Domain(), index), base.floats(index))
    assert execute(spec, resources).totals["error"] < 0.05


def test_an_image_is_corrupted_alike_whatever_the_limit(resources: Resources) -> None:
    spec = make_spec(resources, "bn")
    whole, rows = replace(spec, limit=None), resources.rows(spec)
    index = torch.arange(10)
    assert torch.equal(
        resources.batch(spec, Domain("snow"), index), resources.batch(whole, Domain("snow"), rows[index])
    )


def test_sites_from_a_share_of_the_source_data(resources: Resources) -> None:
    spec = make_spec(resources, "civd")
    few = replace(spec, sites=0.05, weights=resources.weights(spec.checkpoint, find_method("civd"), 0.05, {}))
    a, b = build_adapter(spec, resources), build_adapter(few, resources)
    x = resources.batch(spec, spec.domains[0], torch.arange(32))
    assert not torch.equal(a(x), b(x))
    assert execute(few, resources).totals["error"] < 0.6


def test_the_oracle_keeps_the_best_step(resources: Resources) -> None:
    spec = make_spec(resources, "tent", "params = { lr = 0.05 }")
    last = execute(replace(spec, parameters={**spec.parameters, "prediction": "after"}), resources)
    best = execute(replace(spec, selection="oracle", steps=6), resources)
    assert best.record.rows[0].metrics["correct"] >= last.record.rows[0].metrics["correct"]  # type: ignore[operator]
    assert best.facts.backwards == 6.0


def test_an_episodic_oracle_takes_all_its_steps_on_each_batch_and_forgets_them(resources: Resources) -> None:
    spec = replace(
        make_spec(resources, "tent", "params = { lr = 0.05 }"), selection="oracle", steps=6, episodic=True
    )
    run = execute(spec, resources)
    adapter = build_adapter(spec, resources)
    order = make_order(spec, resources)
    labels = resources.labels(spec)
    for number, row in enumerate(run.record.rows):
        index = torch.from_numpy(order[64 * number : 64 * (number + 1), 1])
        adapter.reset()
        logits = choose_step(adapter, resources.batch(spec, spec.domains[0], index), labels[index], 6)
        assert row.metrics["correct"] == int((logits.argmax(1) == labels[index]).sum())
    one_step = execute(replace(spec, steps=1), resources)
    assert run.totals["error"] < one_step.totals["error"]


@pytest.mark.parametrize("method", ["eata", "adanpc"])
@pytest.mark.parametrize("views", [1, 4])
def test_what_methods_need_of_the_source_is_that_of_the_model_as_they_see_it(
    resources: Resources, method: str, views: int
) -> None:
    more = f'checkpoint = "digits-sla"\nviews = {views}'
    if (method, views) == ("adanpc", 4):
        with pytest.raises(ValueError, match="features of one view"):
            make_spec(resources, method, more)
    else:
        assert execute(make_spec(resources, method, more), resources).totals["n"] == 150


def test_other_weights_or_images_than_those_of_the_plan_are_refused(resources: Resources) -> None:
    spec = make_spec(resources, "bn")
    with pytest.raises(ValueError, match="must make the same one each time"):
        execute(replace(spec, weights="0" * 16), resources)
    with pytest.raises(ValueError, match="if they were changed meanwhile"):
        execute(replace(spec, content="0" * 16), resources)


def test_other_sites_of_the_same_model_make_other_runs(tmp_path: Path) -> None:
    home = sites_path("", "digits-sla").name
    copy_checkpoint("digits-sla", tmp_path)
    setting = WorkerConfig(checkpoints=tmp_path)
    before = {
        name: make_spec(Resources(setting), name, 'checkpoint = "digits-sla"') for name in ("ttvd", "bn")
    }
    sites = Sites.load(tmp_path / home)
    warm = {name: 2 * tau for name, tau in sites.temperatures.items()}
    sites.with_temperatures(warm).save(tmp_path / home)
    after = {name: make_spec(Resources(setting), name, 'checkpoint = "digits-sla"') for name in before}
    assert before["ttvd"].key != after["ttvd"].key
    assert before["bn"].key == after["bn"].key


@pytest.mark.parametrize(("change", "views"), [("means", 4), ("variances", 1)])
def test_other_anchors_make_other_runs_of_those_alone_who_use_them(
    tmp_path: Path, change: str, views: int
) -> None:
    home, setting = tmp_path / sites_path("", "digits-sla").name, WorkerConfig(checkpoints=tmp_path)
    copy_checkpoint("digits-sla", tmp_path)
    bare = ["vd", "civd", "pd", "cipd", "ttvd-paper", "ttvd-reference", "bn", "ttvd statistics=batch"]
    bare += ["ttvd statistics=track:64:2048:renorm", "ttvd-paper statistics=count:16"]
    bare += ["ttvd structure=vd statistics=track:16:512:renorm"]
    using = {1: ["ttvd structure=vd", "ttvd structure=pd", "ttvd structure=pd statistics=batch:anchored"]}
    using[1] += ["vd statistics=batch:anchored", "pd statistics=count:16:anchored", "bn+anchored-upright"]
    using[4] = ["ttvd structure=cipd", "ttvd structure=cipd statistics=batch:anchored"]
    for anchors_in_use in using.values():
        anchors_in_use.append("ttvd")  # whose views depend on the head
    using[4] += ["ttvd-paper statistics=batch:anchored", "ttvd structure=civd", "bn+anchored"]
    runs = [*bare, *using[1], *using[4]]

    def list_specs(runs: Iterable[str]) -> dict[str, Spec]:
        resources, specs = Resources(setting), {}
        for run in runs:
            name, *options = run.split()
            name, anchored, end = name.partition("+")
            chosen = ", ".join('{} = "{}"'.format(*option.split("=")) for option in options)
            more = f'checkpoint = "digits-sla{anchored}{end}"\nparams = {{ {chosen} }}'
            specs[run] = make_spec(resources, name, more)
        return specs

    before, sites = list_specs(runs), Sites.load(home)
    anchors = sites.anchors[views]
    moved = replace(anchors, **{change: getattr(anchors, change) + 1})
    replace(sites, anchors={**sites.anchors, views: moved}).save(home)
    after = list_specs(runs)
    assert {run for run in after if before[run].key != after[run].key} == set(using[views])
    with pytest.raises(ValueError, match="all machines need the same files"):
        execute(before[using[views][0]], Resources(setting))
    replace(sites, anchors={5 - views: sites.anchors[5 - views]}).save(home)
    lost = list_specs(run for run in runs if "anchored" not in run)
    others = {run for run in lost if lost[run].key not in (before[run].key, after[run].key)}
    assert others == set(using[views]) & set(lost)


def test_another_loss_of_rotations_makes_other_runs_of_steps_by_need_alone(tmp_path: Path) -> None:
    home, setting = tmp_path / sites_path("", "digits-sla").name, WorkerConfig(checkpoints=tmp_path)
    copy_checkpoint("digits-sla", tmp_path)
    runs = [(name, "") for name in ("ttvd", "bn", "ttvd-paper", "ttvd-reference", "vd", "civd", "pd", "cipd")]
    runs += [
        ("ttvd", "adaptive_step = false"),
        ("ttvd", "adaptive_step = true"),
        ("civd", "adaptive_step = true"),
    ]

    def list_keys() -> list[str]:
        resources, more = Resources(setting), 'checkpoint = "digits-sla"\nparams = {{ {} }}'
        return [make_spec(resources, name, more.format(chosen)).key for name, chosen in runs]

    sites, keys = Sites.load(home), []
    for loss in (sites.rotation_loss, 0.5, sites.rotation_loss):
        replace(sites, rotation_loss=loss).save(home)
        keys.append(list_keys())
    assert keys[0] == keys[2]
    changed = [run for run, *both in zip(runs, *keys[:2], strict=True) if both[0] != both[1]]
    assert changed == [("ttvd", ""), ("ttvd", "adaptive_step = true"), ("civd", "adaptive_step = true")]


@pytest.mark.parametrize("method", ["eata", "adanpc"])
def test_what_methods_need_of_the_source_is_made_once(resources: Resources, method: str) -> None:
    spec = make_spec(resources, method)
    found = ttvd.list_methods()[method]
    first = resources.source_statistics(found, spec.checkpoint, spec.data, 1.0)
    again = resources.source_statistics(found, spec.checkpoint, spec.data, 1.0)
    assert all(again[name] is value for name, value in first.items())
    assert execute(spec, resources).totals["n"] == 150


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
    assert "compiled" not in execute(spec, resources).facts.versions
    assert execute(spec, Resources(WorkerConfig(compiled=True))).facts.versions["compiled"] == "inductor"
    fails = True
    torch._dynamo.reset()
    assert "compiled" not in execute(spec, Resources(WorkerConfig(compiled=True))).facts.versions
