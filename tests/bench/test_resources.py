"""What is kept of the images of domains, the order of runs that follows from it, and how batches are put together."""

from dataclasses import replace

import pytest
import torch

from ttvd.bench import resources as module
from ttvd.bench.job import cut_order, identify_adapter, load_batches, make_order
from ttvd.bench.plan import plan
from ttvd.bench.recipe import parse_recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Domain, Spec, WorkerConfig

TEXT = """
data = {set = "digits", corruptions = ["fog", "snow", "contrast"], limit = 30}
checkpoints = {plain = "digits-plain"}
methods = [{name = ["bn", "tent"]}]
stream.batch_size = [8, 16]
"""
DOMAINS = tuple(Domain(name) for name in ("fog", "snow", "contrast", "none"))


@pytest.fixture(scope="module")
def resources() -> Resources:
    return Resources(WorkerConfig())


def make_spec(resources: Resources) -> Spec:
    return plan(parse_recipe(TEXT, "test"), resources)[0].spec


def show(resources: Resources, spec: Spec, *domains: Domain) -> None:
    for domain in domains:
        resources.batch(spec, domain, torch.tensor([0]))


def kept(resources: Resources) -> list[Domain]:
    return [key[1] for key in resources._domains]


def test_domains_are_kept_as_long_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch, resources: Resources
) -> None:
    resources = Resources(WorkerConfig(), resources.shared())
    spec = replace(make_spec(resources), domains=DOMAINS[:1])
    pixels = resources.base("digits").images[0].nbytes  # type: ignore[union-attr]
    monkeypatch.setattr(module, "_IMAGE_BYTES", 3 * 30 * (pixels + 8))
    show(resources, spec, *DOMAINS[:3], DOMAINS[0], DOMAINS[3])
    assert kept(resources) == [DOMAINS[2], DOMAINS[0], DOMAINS[3]]
    monkeypatch.setattr(module, "_IMAGE_BYTES", 0)
    assert resources.prepare(replace(spec, domains=DOMAINS)) == resources.device
    assert set(kept(resources)) == set(DOMAINS)  # those of one run all stay
    show(resources, replace(spec, domains=(Domain("fog", 1),)), Domain("fog", 1))
    assert kept(resources) == [Domain("fog", 1)]


def test_runs_are_ordered_by_adapter_if_all_images_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, resources: Resources
) -> None:
    recipe = parse_recipe(TEXT, "test")
    by_adapter = plan(recipe, resources)
    monkeypatch.setattr(module, "_IMAGE_BYTES", 1000)
    by_domain = plan(recipe, resources)
    assert len(by_adapter) == 12
    assert {member.spec.key for member in by_adapter} == {member.spec.key for member in by_domain}
    adapters = [identify_adapter(member.spec) for member in by_adapter]
    assert [adapters.index(adapter) for adapter in adapters] == [0] * 6 + [6] * 6
    names = [member.spec.domains[0].corruption for member in by_adapter]
    assert names == 4 * ["fog", "snow", "contrast"]
    assert [member.spec.batch_size for member in by_adapter] == 2 * ([8] * 3 + [16] * 3)
    names = [member.spec.domains[0].corruption for member in by_domain]
    assert names == ["fog"] * 4 + ["snow"] * 4 + ["contrast"] * 4


@pytest.mark.parametrize("join", ["continual", "mixed"])
@pytest.mark.parametrize("count", [1, 3])
def test_batches_show_the_rows_of_the_order(resources: Resources, join: str, count: int) -> None:
    spec = replace(make_spec(resources), domains=DOMAINS[:count], join=join, batch_size=7)  # type: ignore[arg-type]
    batches, labels = cut_order(spec, make_order(spec, resources)), resources.labels(spec)
    found = list(load_batches(spec, resources, batches, labels, resources.prepare(spec)))
    assert len(found) == len(batches)
    for rows, (images, truth) in zip(batches, found, strict=True):
        assert torch.equal(truth, labels[torch.from_numpy(rows[:, 1])])
        for image, (domain, number) in zip(images, rows.tolist(), strict=True):
            expected = resources.batch(spec, DOMAINS[domain], torch.tensor([number]))[0]
            assert torch.equal(image, expected)
