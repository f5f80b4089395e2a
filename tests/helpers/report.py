"""Invented studies for reports: real recipes and specs, rows computed from a formula. Fast and deterministic."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ttvd.bench.recipe import Entry, Recipe, list_entries, parse_recipe
from ttvd.bench.run import Record, Row
from ttvd.bench.spec import Domain, Facts, Member, Run, Spec
from ttvd.bench.store import Failure, Figure, Store
from ttvd.bench.study import Line, Study, study
from ttvd.report.results import Results

BINS = 15
NOON = 1_790_000_000.0
BASIC = """
title = "Digits under noise and blur"
note = "Invented numbers, for tests."
reference = "ttvd"
seeds = [0, 1]
checkpoints = { plain = "digits-plain", sites = "digits-sla" }
rules = ["grid-best", "validation"]
[data]
set = "digits"
corruptions = ["fog", "gaussian_noise", "contrast"]
[grid]
lr = [0.001, 0.0005]
[[methods]]
name = ["source", "bn", "tent", "ttvd"]
"""
FIXED = BASIC.replace('rules = ["grid-best", "validation"]', "").replace("[grid]\nlr = [0.001, 0.0005]", "")
"""Without a grid: one fixed setting for each method."""

CONDITIONS = BASIC.replace('rules = ["grid-best", "validation"]', "").replace(
    "[grid]\nlr = [0.001, 0.0005]", "[stream]\nbatch_size = [16, 8]"
)
"""Two conditions: batches of 16 and of 8."""


class FakeStore:
    """The part of a store that reports use, in memory."""

    def __init__(self, *texts: tuple[str, str], batches: int = 8, shift: float = 0.0) -> None:
        self.path = Path("/somewhere/runs.db")
        self.texts = dict(texts)
        self.enrolled = {name: list_members(parse_recipe(text, name)) for name, text in texts}
        self.runs: dict[str, Run] = {}
        self.broken: list[Failure] = []
        self.pictures: list[Figure] = []
        for member in itertools.chain.from_iterable(self.enrolled.values()):
            if member.spec.key not in self.runs:
                self.runs[member.spec.key] = fake_run(member.spec, batches, shift)

    def recipes(self) -> dict[str, str]:
        return self.texts

    def members(self, recipe: str) -> list[Member]:
        return self.enrolled[recipe]

    def done(self) -> set[str]:
        return set(self.runs)

    def load(self, keys: Iterable[str]) -> dict[str, Run]:
        return {key: self.runs[key] for key in keys if key in self.runs}

    def failures(self) -> list[Failure]:
        return self.broken

    def figures(self, recipe: str) -> list[Figure]:
        return [picture for picture in self.pictures if picture.recipe == recipe]

    def lose(self, *keys: str) -> None:
        for key in keys:
            del self.runs[key]

    def break_run(self, key: str, text: str) -> None:
        self.broken.append(Failure(key, self.runs.pop(key).spec, text, NOON))

    def study(self, name: str) -> Study:
        return study(cast(Store, self), name)


def fake_study(text: str = BASIC, name: str = "basic", **options: Any) -> Study:
    return FakeStore((name, text), **options).study(name)


def list_members(recipe: Recipe) -> list[Member]:
    return [member for entry in list_entries(recipe) for member in _spread(recipe, entry)]


def _spread(recipe: Recipe, entry: Entry) -> Iterator[Member]:
    stream = recipe.stream
    axes = {"order": stream.order, "batch_size": stream.batch_size, **stream.options, "sites": recipe.sites}
    lists = {name: values for name, values in axes.items() if len(values) > 1}
    roles = [("test", name) for name in recipe.data.corruptions]
    if "validation" in entry.rules:
        roles += [("validation", name) for name in recipe.data.validation]
    for values in itertools.product(*lists.values()):
        condition = dict(zip(lists, values, strict=True))
        for cell in itertools.product(*entry.grid.values()):
            varies = dict(zip(entry.grid, cell, strict=True))
            for (role, corruption), seed in itertools.product(roles, recipe.seeds):
                spec = _make_spec(
                    recipe, entry, condition, varies, Domain(corruption, recipe.data.severity), seed
                )
                yield Member(recipe.name, entry.label, role, spec, varies, condition)  # type: ignore[arg-type]
                if role == "test" and "oracle" in entry.rules:
                    oracle = replace(spec, selection="oracle", steps=recipe.oracle.steps)
                    yield Member(recipe.name, entry.label, "test", oracle, varies, condition)


def _make_spec(
    recipe: Recipe,
    entry: Entry,
    condition: Mapping[str, Any],
    varies: Mapping[str, Any],
    domain: Domain,
    seed: int,
) -> Spec:
    return Spec(
        checkpoint=entry.checkpoint,
        weights="7f3a9c1d2b4e6f80",
        data=recipe.data.set,
        content="13579bdf02468ace",
        domains=(domain,),
        method=entry.method.name,
        parameters={**entry.fixed, **varies},
        constants=recipe.data.constants,
        stream=condition.get("order", recipe.stream.order[0]),
        options={name: condition.get(name, values[0]) for name, values in recipe.stream.options.items()},
        batch_size=condition.get("batch_size", recipe.stream.batch_size[0]),
        views=entry.part.views,
        sites=condition.get("sites", 1.0),
        seed=seed,
    )


def fake_run(spec: Spec, batches: int, shift: float = 0.0) -> Run:
    """Make a run: errors fall along the stream for methods that learn, the rest follows from hashes of names."""
    rng = np.random.default_rng(int(spec.key, 16))
    learning = spec.method not in ("source", "bn", "t3a", "lame")
    level = _level(spec) + shift * learning
    times = np.arange(batches) / max(1, batches - 1)
    errors = np.clip(
        level * (1 + 0.35 * learning * (1 - times)) - 0.1 * learning * (1 - times) * level, 0.02, 0.95
    )
    n = spec.batch_size
    correct = rng.random((batches, n)) > errors[:, None]
    centre = 0.95 - errors[:, None] + 0.25 * _share("bold", spec.method)
    confidence = np.clip(centre + 0.18 * rng.standard_normal((batches, n)), 0.11, 0.999)
    pace = 0.00005 + 0.002 * _share("pace", spec.method) ** 2 * spec.views
    picky = learning and _share("picky", spec.method) > 0.4
    kept = 1 - picky * (0.1 + 0.5 * _share("kept", spec.method)) * (1 - 0.6 * times)
    rows = tuple(
        Row(_state(confidence[t], correct[t]), float(kept[t]), n * pace * (1 + 0.1 * rng.random()))
        for t in range(batches)
    )
    return Run(spec, Record(rows), _facts(spec, learning, rng))


def _level(spec: Spec) -> float:
    corruption = 0.25 + 0.5 * _share("hard", spec.domains[0].corruption)
    skill = {"source": 1.5, "bn": 0.85, "ttvd": 0.5}.get(
        spec.method, 0.6 + 0.3 * _share("skill", spec.method)
    )
    lr = float(spec.parameters.get("lr") or 0.001)
    small = 1 + 1.2 / spec.batch_size if spec.method != "source" else 1
    return float(
        corruption
        * skill
        * (1 + 0.03 * abs(np.log10(lr / 0.001)))
        * small
        * (0.9 if spec.selection == "oracle" else 1)
    )


def _facts(spec: Spec, learning: bool, rng: np.random.Generator) -> Facts:
    stream = f"{spec.data}-{spec.domains[0].corruption}-{spec.batch_size}-{spec.options}-{spec.seed}"
    return Facts(
        order=hashlib.sha256(stream.encode()).hexdigest()[:16],
        device="AMD EPYC 9V74 80-Core Processor",
        threads=1,
        versions={"ttvd": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "python": "3.11.7"},
        started=NOON + 60 * int(spec.key[:2], 16),
        seconds=2.0 + float(rng.random()),
        peak=int(2e7 * (1 + learning)),
        forwards=1.0 * spec.views,
        backwards=float(learning) * spec.views,
    )


def _state(confidence: np.ndarray[Any, Any], correct: np.ndarray[Any, Any]) -> dict[str, float | list[float]]:
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    count, sums, right = (np.bincount(index, weight, BINS) for weight in (None, confidence, correct))
    chance = np.where(correct, confidence, (1 - confidence) / 9)
    return {
        "n": len(index),
        "correct": int(correct.sum()),
        "nll_sum": float(-np.log(chance).sum()),
        "brier_sum": float(((1 - chance) ** 2).sum()),
        "batch_ece_sum": float(np.abs(sums - right).sum()),
        "bin_count": count.astype(float).tolist(),
        "bin_confidence": sums.tolist(),
        "bin_correct": right.tolist(),
    }


def _share(*words: str) -> float:
    """Return a number in [0, 1) that depends on some words only."""
    return int(hashlib.sha256("/".join(words).encode()).hexdigest()[:8], 16) / 2**32


def pick(results: Results, label: str, rule: str) -> Line:
    """Return the line of a label and a rule."""
    return next(line for line in results.lines if (line.label, line.rule) == (label, rule))
