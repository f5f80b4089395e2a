"""The grid: finds the runs that a store does not have, has an engine do them, and stores what comes back."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ttvd.bench.engines import EndedElsewhere, Engine, Event, Failed, Finished, Message, Shared
from ttvd.bench.figures import check_figures
from ttvd.bench.plan import plan
from ttvd.bench.recipe import Recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Member, Spec, WorkerConfig
from ttvd.bench.store import Owner, Store
from ttvd.interrupts import defer_interrupts

Plan = tuple[Recipe, Sequence[Member]]
"""A recipe and the runs that it asks for."""
_RENEW_EVERY = 10.0  # seconds; a claim lives for 120 s without it


@dataclass(frozen=True)
class Outcome:
    """What became of the runs of some recipes.

    Attributes:
        done: Number of runs that were done now, here.
        skipped: Number of runs that the store had before.
        failed: Text of each run that failed, by key.
        elsewhere: Number of runs that another process did meanwhile.
    """

    done: int
    skipped: int
    failed: Mapping[str, str]
    elsewhere: int


class Interrupted(KeyboardInterrupt):
    """The user has stopped a grid. All runs that were finished are stored.

    Attributes:
        outcome: What was done until then.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("stopped by the user; what was finished is stored")
        self.outcome = outcome


class Watcher(Protocol):
    """Shows what happens."""

    def begin(self, missing: Sequence[Spec], skipped: int) -> None:
        """Take the runs that are missing, and the number of runs that the store has already."""

    def see(self, event: Event) -> None:
        """Take an event. This is called at least a few times a second."""


def run_grid(
    recipe: Recipe | Sequence[Recipe],
    store: Store,
    engine: Engine,
    config: WorkerConfig,
    *,
    watch: Watcher | None = None,
) -> Outcome:
    """Do all runs of a recipe, or of several, that the store does not have.

    Every finished run is written at once and in one transaction. Killed at any moment and started again, the grid does
    what is missing, and the store ends as if nothing had happened. Several processes, also on several machines, can
    work on one store at once: each run is done by one of them.

    Args:
        recipe: The recipe or recipes.
        store: Store of the runs; it also keeps the recipe.
        engine: Engine that does the runs.
        config: Where models and data are, and on what device runs are done.
        watch: Shows what happens.

    Raises:
        Interrupted: Ctrl-C or SIGTERM has come; this is a `KeyboardInterrupt`.
        ValueError: The recipe cannot be run; nothing has been changed.
        OSError: The store cannot be written, or workers cannot be started.
    """
    plans, shared = make_plans([recipe] if isinstance(recipe, Recipe) else recipe, config)
    return run_plans(plans, store, engine, config, shared=shared, watch=watch)


def make_plans(recipes: Iterable[Recipe], config: WorkerConfig) -> tuple[list[Plan], Shared]:
    """Check recipes and plan their runs.

    Returns:
        The plans, and the test sets that were loaded for them, which workers can share.
    """
    resources = Resources(replace(config, device="cpu"))  # a plan needs no other device
    plans: list[Plan] = []
    for recipe in recipes:
        plans.append((recipe, plan(recipe, resources)))
        check_figures(recipe, resources)
    return plans, resources.shared()


def run_plans(
    plans: Iterable[Plan],
    store: Store,
    engine: Engine,
    config: WorkerConfig,
    *,
    shared: Shared | None = None,
    watch: Watcher | None = None,
) -> Outcome:
    """Do the same as :func:`run_grid` for recipes that are planned already.

    Args:
        plans: Recipes, each with its runs.
        store: Store of the runs.
        engine: Engine that does the runs.
        config: Configuration of the workers.
        shared: Test sets that the plan has loaded; workers do not load them again.
        watch: Shows what happens.
    """
    specs: dict[str, Spec] = {}
    for recipe, members in plans:
        store.save_recipe(recipe.name, recipe.text, members)
        specs |= {member.spec.key: member.spec for member in members}
    grid = _Grid(specs, store, watch)
    if not grid.missing:
        engine.close()
    elif grid.run(engine, config, shared or {}):
        raise Interrupted(grid.outcome())
    return grid.outcome()


class _Grid:
    def __init__(self, specs: Mapping[str, Spec], store: Store, watch: Watcher | None) -> None:
        self._store, self._watch, self._owner = store, watch, Owner.current()
        done = store.done()
        self.missing = {key: spec for key, spec in specs.items() if key not in done}
        self._skipped = len(specs) - len(self.missing)
        self._done, self._elsewhere, self._failed = 0, 0, dict[str, str]()
        self._started = time.time()
        if watch is not None:
            watch.begin(list(self.missing.values()), self._skipped)

    def outcome(self) -> Outcome:
        """Return what has become of the runs so far."""
        return Outcome(self._done, self._skipped, self._failed, self._elsewhere)

    def run(self, engine: Engine, config: WorkerConfig, shared: Shared) -> bool:
        """Have the missing runs done. Returns whether the user has interrupted that."""
        renew_at = 0.0
        with defer_interrupts() as interrupt:
            try:
                with closing(engine.run(self._claim_runs(), config, shared)) as events:
                    for event in events:
                        self._handle(event)
                        if interrupt.requested:
                            break
                        if time.monotonic() >= renew_at:
                            renew_at = time.monotonic() + _RENEW_EVERY
                            self._store.renew(self._owner)
            finally:
                with suppress(OSError):  # a full disk; the claims of a process that has ended are free anyway
                    self._store.release(self._owner)
        return interrupt.requested

    def _handle(self, event: Event) -> None:
        if isinstance(event, Finished):
            if self._store.add(event.run):
                self._done += 1
            else:
                self._elsewhere += 1
        elif isinstance(event, Failed):
            self._store.fail(self.missing[event.key], event.text)
            self._store.release(self._owner, [event.key])
            self._failed[event.key] = event.text
        self._show(event)

    def _claim_runs(self) -> Iterator[Spec | None]:
        """Yield the missing runs, each claimed when a worker is free, so that several processes can share the work."""
        queue = deque(self.missing.values())
        told = False
        while queue:
            for _ in range(len(queue)):
                spec = queue.popleft()
                if self._has_ended_elsewhere(spec.key):
                    self._show(EndedElsewhere(spec.key))
                elif self._store.claim([spec.key], self._owner):
                    yield spec
                else:
                    queue.append(spec)
            if queue:  # others are at them; they may finish, or die and leave their runs to us
                if not told:
                    told = True
                    self._show(
                        Message(f"Waiting for another process, which is doing {len(queue)} of the runs.")
                    )
                yield None

    def _has_ended_elsewhere(self, key: str) -> bool:
        """Return whether another process has done a run since the start, or has failed in it."""
        if key in self._store.done():
            self._elsewhere += 1
            return True
        for failure in self._store.failures():
            if failure.key == key and failure.when >= self._started:
                self._failed[key] = failure.text
                return True
        return False

    def _show(self, event: Event) -> None:
        if self._watch is not None:
            self._watch.see(event)
