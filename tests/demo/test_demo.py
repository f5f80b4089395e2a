"""The demo: its models, its recipes, its page."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ttvd
from ttvd.cli.main import app
from ttvd.data.digits import split_digits
from ttvd.demo import compare_rivals, demo_table, read_demo_recipe, run_demo
from ttvd.demo.sources import MODELS, SourceModel, train_source
from ttvd.source import Epoch, evaluate
from ttvd.zoo.catalog import available

FEW = ("source", "bn", "SLA + bn", "ttvd")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_shipped_models_reach_the_accuracy_of_their_cards(model: SourceModel) -> None:
    source = ttvd.load(model.name)
    assert source.card is not None
    _, _, images, labels = split_digits(classes=model.classes)
    one = evaluate(source.model, images, labels, head_views=model.head_views)
    assert one == pytest.approx(source.card.accuracy_one_view, abs=2e-3)
    if model.head_views == 4:
        four = evaluate(source.model, images, labels, views=4, head_views=4)
        assert four == pytest.approx(source.card.accuracy_four_views, abs=2e-3)


def test_shipped_models_are_those_of_the_demo() -> None:
    assert {model.name for model in MODELS} <= set(available())


def test_recipes_name_what_is_shipped() -> None:
    full, every = read_demo_recipe(), read_demo_recipe("every-method")
    used = {*full.checkpoints.values(), *every.checkpoints.values()}
    used |= {part.checkpoint for part in full.methods if part.checkpoint}
    assert used <= {model.name for model in MODELS}
    assert read_demo_recipe(quick=True, seed=3).seeds == (3,)
    assert (
        read_demo_recipe(quick=True).data.limit,
        read_demo_recipe("every-method", quick=True).data.limit,
    ) == (
        500,
        250,
    )


def test_four_lines_give_a_page_a_table_and_comparisons(tmp_path: Path) -> None:
    """The demo with fewer lines: adaptation helps, the page stands alone, and nothing is done twice."""
    full = read_demo_recipe(quick=True)
    labels = [part for part in full.methods if (part.label or part.name[0]) in FEW]
    recipe = replace(
        full,
        methods=tuple(labels),
        data=replace(full.data, corruptions=("gaussian_noise",), severities={}, limit=1000),
        figures=(),
    )
    made = run_demo(recipe, tmp_path / "demo", jobs=1)
    table = demo_table(made.results)
    errors = {row[0].text: float(row[2].value) for row in table.rows}
    assert list(errors) == ["source", "bn", "SLA + bn", "ttvd"]
    assert errors["ttvd"] < errors["SLA + bn"] < errors["bn"] < errors["source"]
    sentences = compare_rivals(made.results)
    assert [sentence.split(":")[0] for sentence in sentences] == [
        f"ttvd against {rival}" for rival in ("source", "bn", "SLA + bn")
    ]
    assert all(sentence.endswith("fewer errors.") for sentence in sentences)
    html = made.page.read_text(encoding="utf-8")
    assert recipe.title in html
    assert 'src="http' not in html
    again = run_demo(recipe, tmp_path / "demo", jobs=1)
    started = [{run.facts.started for run in demo.results.all_runs()} for demo in (made, again)]
    assert started[0] == started[1]


def test_the_command_prints_a_table_and_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = read_demo_recipe(quick=True)
    small = replace(
        full,
        methods=full.methods[:1],
        reference=None,
        data=replace(full.data, corruptions=("contrast",), limit=64),
        figures=(),
    )
    monkeypatch.setattr("ttvd.demo.read_demo_recipe", lambda *_, **__: small)
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "index.html" in result.output
    assert "source" in result.output
    with (tmp_path / "table.csv").open(newline="") as file:
        assert [row[0] for row in csv.reader(file)][1:] == ["source", "bn"]
    assert {"index.html", "table.csv", "demo.db", "tables"} <= {path.name for path in tmp_path.iterdir()}


def test_a_failure_is_raised_with_its_traceback(tmp_path: Path) -> None:
    full = read_demo_recipe(quick=True)
    part = replace(full.figures[0], options={**full.figures[0].options, "checkpoint": "digits-sla"})
    recipe = replace(full, methods=full.methods[:1], reference=None, figures=(part,))
    with pytest.raises((RuntimeError, ValueError), match="2 features"):
        run_demo(
            replace(recipe, data=replace(full.data, corruptions=("contrast",), limit=64)), tmp_path, jobs=1
        )


def test_training_continues_after_a_kill(tmp_path: Path) -> None:
    model = SourceModel("tiny", (0, 1), "sla", epochs=2)

    def stop(epoch: Epoch) -> None:
        if epoch.number == 0:
            raise KeyboardInterrupt

    train_source(model, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_source(model, tmp_path / "cut", progress=stop)
    seen: list[int] = []
    train_source(model, tmp_path / "cut", progress=lambda epoch: seen.append(epoch.number))
    assert seen == [1]
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
    train_source(model, tmp_path / "cut", progress=lambda epoch: seen.append(epoch.number))
    assert seen == [1]
