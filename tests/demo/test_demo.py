"""The demo: its models, its numbers, its page."""

import csv
from pathlib import Path

import pytest
import torch
from ttvd.demo.everything import measure_method
from ttvd.demo.job import DOMAINS, ENTRIES, Domain, Entry, measure
from typer.testing import CliRunner

import ttvd
from ttvd.cli.main import app
from ttvd.data.digits import split_digits
from ttvd.demo.sources import SPECIAL_PLANS, train_source
from ttvd.source import Epoch, evaluate
from ttvd.zoo.catalog import available


@pytest.mark.parametrize("plan", [*PLANS, *SPECIAL_PLANS], ids=lambda plan: plan.name)
def test_shipped_models_reach_the_accuracy_of_their_cards(plan: Plan) -> None:
    source = ttvd.load(plan.name)
    assert source.card is not None
    _, _, images, labels = split_digits(classes=plan.classes)
    one = evaluate(source.model, images, labels, head_views=plan.head_views)
    assert one == pytest.approx(source.card.accuracy_one_view, abs=2e-3)
    if plan.head_views == 4:
        four = evaluate(source.model, images, labels, views=4, head_views=4)
        assert four == pytest.approx(source.card.accuracy_four_views, abs=2e-3)


def test_shipped_models_are_those_of_the_plans() -> None:
    assert {plan.name for plan in (*PLANS, *SPECIAL_PLANS)} <= set(available())


def test_same_seed_same_numbers_and_every_method_sees_the_same_stream() -> None:
    chosen = [entry for entry in ENTRIES if entry.label in ("bn", "ttvd")]
    runs = [measure(chosen, DOMAINS[:1], limit=192, seed=3) for _ in range(2)]
    for entry in chosen:
        first, second = (run.of(entry.label)[0] for run in runs)
        assert [row.metrics for row in first.rows] == [row.metrics for row in second.rows]
    other = measure(chosen, DOMAINS[:1], limit=192, seed=4)
    assert other.of("bn")[0].rows[0].metrics != runs[0].of("bn")[0].rows[0].metrics


def test_adaptation_helps_on_noisy_digits() -> None:
    chosen = [entry for entry in ENTRIES if entry.label in ("source", "bn", "SLA + bn", "ttvd")]
    results = measure(chosen, (Domain("gaussian_noise", 5),), limit=1000)
    for rival in ("source", "bn", "SLA + bn"):
        assert results.compare("ttvd", rival).verdict == "better"


def test_command_writes_a_table_and_a_page_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [entry for entry in ENTRIES if entry.label in ("source", "bn", "tent", "SLA + bn", "ttvd")]
    monkeypatch.setattr("ttvd.demo.job.ENTRIES", few)
    monkeypatch.setattr("ttvd.demo.job.DOMAINS", DOMAINS[:1])
    result = CliRunner().invoke(
        app, ["demo", "--quick", "--out", str(tmp_path / "demo")], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert "ttvd against SLA + bn" in result.output
    with (tmp_path / "demo" / "table.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows[1:]] == [entry.label for entry in few]
    page = (tmp_path / "demo" / "index.html").read_text()
    assert all(entry.label in page for entry in few)
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == ["index.html", "table.csv"]


def test_training_goes_on_after_a_kill(tmp_path: Path) -> None:
    plan = Plan("tiny", (0, 1, 2), "sla", epochs=3)

    def stop(epoch: Epoch) -> None:
        if epoch.number == 1:
            raise KeyboardInterrupt

    train_source(plan, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_source(plan, tmp_path / "cut", progress=stop)
    seen: list[int] = []
    train_source(plan, tmp_path / "cut", progress=lambda epoch: seen.append(epoch.number))
    assert seen == [2]
    whole, cut = (ttvd.load("tiny", tmp_path / name) for name in ("whole", "cut"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, cut.model.state_dict()[name])
    assert whole.sites is not None
    assert cut.sites is not None
    assert torch.equal(whole.sites.means, cut.sites.means)
    assert whole.sites.temperatures == cut.sites.temperatures
    assert not list((tmp_path / "cut").glob("*.training"))
    assert whole.card is not None
    assert whole.card == cut.card
    for accuracy in (whole.card.held_out_one_view, whole.card.held_out_four_views):
        assert accuracy is not None
        assert accuracy > 0.5
    train_source(plan, tmp_path / "cut", progress=lambda epoch: seen.append(epoch.number))
    assert seen == [2]


@pytest.mark.parametrize("name", ["tent", "ttt", "note", "adanpc", "eata", "ttvd"])
def test_every_method_finds_what_it_needs(name: str) -> None:
    outcome = measure_method(name, limit=64, seed=0)
    assert outcome.record.metrics().compute()["n"] == 64
    assert outcome.peak is None or outcome.peak >= 0


def test_entries_name_registered_methods_and_valid_parameters() -> None:
    for entry in ENTRIES:
        method = ttvd.list_methods()[entry.method]
        assert set(entry.parameters) <= set(method.parameters())
    labels = [entry.label for entry in ENTRIES]
    assert len(labels) == len(set(labels))
    assert Entry("x", "bn", "digits-plain").build(ttvd.load("digits-plain"))(
        torch.rand(2, 1, 28, 28)
    ).shape == (2, 10)
