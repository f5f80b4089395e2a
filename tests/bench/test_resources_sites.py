"""Sites of a share of the source data: those beside a checkpoint, else estimated from training images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.bench import copy_checkpoint, digits_resources
from ttvd.bench.job import execute
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Spec
from ttvd.methods import find_method
from ttvd.zoo.catalog import load, sites_path
from ttvd.zoo.sites import Sites

TEXT = """
data = {set = "digits", corruptions = ["fog"], limit = 60}
checkpoints = {sites = "digits-sla"}
sites = [1.0, 0.05]
methods = [{name = "civd"}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with sites of all source data and, shifted, with some that claim to be of a twentieth."""
    copy_checkpoint("digits-sla", tmp_path)
    sites = Sites.load(sites_path(tmp_path, "digits-sla"))
    replace(sites, means=sites.means + 1.0).save(sites_path(tmp_path, "digits-sla", 0.05))
    return tmp_path


def make_specs(resources: Resources) -> list[Spec]:
    return [planned.spec for planned in plan(parse_recipe(TEXT, "test"), resources)]


def test_sites_beside_the_checkpoint_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = digits_resources(checkpoints=folder)
    monkeypatch.setattr(resources, "_training", lambda _: pytest.fail("they are there"))
    whole, few = make_specs(resources)
    assert (whole.sites, few.sites) == (1.0, 0.05)
    civd, means = find_method("civd"), {}
    for spec in (whole, few):
        means[spec.sites] = resources.source_statistics(civd, spec.checkpoint, spec.data, spec.sites)[
            "sites"
        ].means
    assert torch.equal(means[0.05], means[1.0] + 1.0)
    answers = [execute(spec, resources).totals["nll"] for spec in (whole, few)]
    assert answers[0] != answers[1], "the run itself uses them, and asks for no training images"


def test_other_such_sites_make_other_runs(folder: Path) -> None:
    before = make_specs(digits_resources(checkpoints=folder))
    home = sites_path(folder, "digits-sla", 0.05)
    sites = Sites.load(home)
    replace(sites, means=sites.means + 1.0).save(home)
    after = make_specs(digits_resources(checkpoints=folder))
    assert before[0].key == after[0].key
    assert before[1].key != after[1].key
    home.unlink()
    assert make_specs(digits_resources(checkpoints=folder))[1].key not in (before[1].key, after[1].key)


def test_a_model_with_anchored_norms_has_sites_of_its_own(folder: Path) -> None:
    text = TEXT.replace('"digits-sla"', '"digits-sla+anchored"')
    resources = digits_resources(checkpoints=folder)
    few = plan(parse_recipe(text, "test"), resources)[1].spec
    assert few.sites == 0.05
    assert execute(few, resources).totals["error"] < 0.6


def test_a_function_is_called_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def build() -> nn.Module:
        calls.append(1)
        return load("digits-sla").model

    monkeypatch.setattr("ttvd.testing.net", build, raising=False)
    resources = digits_resources(checkpoints=folder, allow_code=True)
    resources.weights("ttvd.testing:net", find_method("civd"), 0.05, {})
    assert len(calls) == 1


def test_sites_of_another_model_are_refused(folder: Path) -> None:
    home = sites_path(folder, "digits-sla", 0.05)
    replace(Sites.load(home), fingerprint="0" * 16).save(home)
    with pytest.raises(ValueError, match="fingerprint"):
        make_specs(digits_resources(checkpoints=folder))
