"""All runs that a store knows of: done, failed, being done, or asked for by a recipe and missing."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ttvd.bench.spec import Spec
from ttvd.bench.store.reader import Reader
from ttvd.bench.store.values import Failure, Summary

Status = Literal["done", "failed", "running", "missing"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class KnownRun:
    """A run in the list.

    Attributes:
        key: Of the spec.
        spec: The run.
        status: ``"running"`` means that a living process has claimed it.
        asked: Recipes that ask for it, and the label that each gives it.
        summary: If it is done.
        failure: How it failed last, unless it is done.
    """

    key: str
    spec: Spec
    status: Status
    asked: tuple[tuple[str, str], ...] = ()
    summary: Summary | None = None
    failure: Failure | None = None

    @property
    def label(self) -> str:
        """Its labels in words."""
        return ", ".join(dict.fromkeys(label for _, label in self.asked))

    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        asked = [{"recipe": recipe, "label": label} for recipe, label in self.asked]
        document: dict[str, Any] = {"key": self.key, "status": self.status, "asked": asked}
        document["spec"] = self.spec.document()
        if (run := self.summary) is not None:
            kept = run.kept if run.kept == run.kept else None  # JSON has no NaN
            document |= {
                "metrics": run.metrics,
                "batches": run.batches,
                "kept": kept,
                "facts": asdict(run.facts),
            }
        if self.failure is not None:
            document |= {"failure": {"text": self.failure.text, "when": self.failure.when or None}}
        return document


def list_known(store: Reader) -> list[KnownRun]:
    """The finished runs in the order in which they were added, then the others in the order of their recipes."""
    members = [member for recipe in store.recipes() for member in store.members(recipe)]
    asked: dict[str, dict[tuple[str, str], None]] = {}
    specs: dict[str, Spec] = {}
    for member in members:
        key = member.spec.key
        specs[key] = member.spec
        asked.setdefault(key, {})[member.recipe, member.label] = None
    claimed = store.claimed()
    failures = {failure.key: failure for failure in store.failures()}
    done = {summary.key: summary for summary in store.summaries()}
    specs = {key: summary.spec for key, summary in done.items()} | specs
    specs |= {key: failure.spec for key, failure in failures.items()}

    def describe(key: str) -> KnownRun:
        status: Status = (
            "done"
            if key in done
            else "running"
            if key in claimed
            else "failed"
            if key in failures
            else "missing"
        )
        failure = None if key in done else failures.get(key)
        return KnownRun(key, specs[key], status, tuple(asked.get(key, ())), done.get(key), failure)

    return [describe(key) for key in specs]


def select_known(
    entries: Sequence[KnownRun],
    *,
    key: str | None = None,
    method: str | None = None,
    domain: str | None = None,
    recipe: str | None = None,
    seed: int | None = None,
    status: str | None = None,
) -> list[KnownRun]:
    """Those that have all that is given.

    Raises:
        ValueError: No run in the list has this method, domain or recipe; or there is no such status.
    """
    words = None if domain is None else domain.replace("_", " ").lower()
    _check("method", method, (entry.spec.method for entry in entries))
    _check("domain", words, (name for entry in entries for name in _name_domain(entry.spec)))
    _check("recipe", recipe, (name for entry in entries for name, _ in entry.asked))
    _check("status", status, STATUSES)
    return [
        entry
        for entry in entries
        if key in (None, entry.key)
        and method in (None, entry.spec.method)
        and words in (None, *_name_domain(entry.spec))
        and recipe in (None, *(name for name, _ in entry.asked))
        and seed in (None, entry.spec.seed)
        and status in (None, entry.status)
    ]


def _name_domain(spec: Spec) -> tuple[str, ...]:
    """What a domain may be called: "fog 5", or "fog" for every severity; "clean"; "continual (15)", or "continual"."""
    label = spec.domain_label
    short = spec.join if len(spec.domains) > 1 else spec.domains[0].corruption.replace("_", " ")
    return label, short


def _check(what: str, value: str | None, known: Iterable[str]) -> None:
    names = sorted(set(known))
    if value is not None and value not in names:
        near = difflib.get_close_matches(value, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise ValueError(f"no run has the {what} {value!r}; {hint}")
