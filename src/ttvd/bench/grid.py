"""The driver: finds what is missing in the store, has it done by an engine, and writes what comes back."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ttvd.bench.engines.events import Broken, Engine, Event, Finished, Noted, Passed, Shared
from ttvd.bench.figures import check_figures
from ttvd.bench.interrupt import Interrupt, postpone_interrupts
from ttvd.bench.plan import plan
from ttvd.bench.recipe import Recipe
from ttvd.bench.resources import Resources
from ttvd.bench.spec import Member, Spec, WorkerConfig
from ttvd.bench.store import Owner, Store

Plan = tuple[Recipe, Sequence[Member]]
_RENEW_EVERY = 10.0  # seconds; a claim lives for 120 s without it


@dataclass(frozen=True)
class Outcome:
    """What became of the runs of some recipes.

    Attributes:
        done: Runs that were done now, here.
        skipped: Runs that the store had before.
        failed: Text of each run that failed, by key.
        elsewhere: Runs that another process did meanwhile.
    """

    done: int
    skipped: int
    failed: Mapping[str, str]
    elsewhere: int


class Interrupted(KeyboardInterrupt):
    """The user has stopped a grid; all that was finished is stored.

    Attributes:
        outcome: What was done until then.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("stopped by the user; what was finished is stored")
        self.outcome = outcome


class Watcher(Protocol):
    """Shows what happens."""

    def begin(self, missing: Sequence[Spec], skipped: int) -> None:
        """The work is known: what is missing, and how many runs the store has already."""

    def see(self, event: Event) -> None:
        """Something has happened; called at least a few times a second."""


def run_grid(
    recipe: Recipe | Sequence[Recipe],
    store: Store,
    engine: Engine,
    setting: WorkerConfig,
    *,
    watch: Watcher | None = None,
) -> Outcome:
    """Do all runs of a recipe, or of several, that the store does not have.

    Every finished run is written at once and in one transaction. Killed at any moment and started again, this does
    what is missing, and the store ends as if nothing had happened. Several processes, also on several machines, can
    work on one store at once: each run is done by one of them.

    Args:
        recipe: What to do.
        store: Where runs are kept; the recipe is enrolled there.
        engine: Who does it.
        setting: Where models and data are, and on what device runs are done.
        watch: Shows what happens.

    Raises:
        Interrupted: By Ctrl-C or SIGTERM; a `KeyboardInterrupt`.
        ValueError: The recipe cannot be run; nothing has been changed.
        OSError: The store cannot be written, or workers cannot be started.
    """
    plans, shared = make_plans([recipe] if isinstance(recipe, Recipe) else recipe, setting)
    return run_plans(plans, store, engine, setting, shared=shared, watch=watch)


def make_plans(recipes: Iterable[Recipe], setting: WorkerConfig) -> tuple[list[Plan], Shared]:
    """The runs of recipes, all checked, and the test sets that were loaded for it, which workers can share."""
    resources = Resources(replace(setting, device="cpu"))  # to plan, no other is needed
    plans: list[Plan] = []
    for recipe in recipes:
        plans.append((recipe, plan(recipe, resources)))
        check_figures(recipe, resources)
    return plans, resources.shared()


def run_plans(
    plans: Iterable[Plan],
    store: Store,
    engine: Engine,
    setting: WorkerConfig,
    *,
    shared: Shared | None = None,
    watch: Watcher | None = None,
) -> Outcome:
    """The same as :func:`run_grid` for recipes that are planned already.

    Args:
        plans: Recipes, each with its runs.
        store: Where runs are kept.
        engine: Who does them.
        setting: For the workers.
        shared: Test sets that the plan has loaded; workers do not load them again.
        watch: Shows what happens.
    """
    specs: dict[str, Spec] = {}
    for recipe, members in plans:
        store.enroll(recipe.name, recipe.text, members)
        specs |= {member.spec.key: member.spec for member in members}
    return _Driver(specs, store, watch).drive(engine, setting, shared or {})


class _Driver:
    def __init__(self, specs: Mapping[str, Spec], store: Store, watch: Watcher | None) -> None:
        self._store, self._watch, self._owner = store, watch, Owner.current()
        done = store.done()
        self._missing = {key: spec for key, spec in specs.items() if key not in done}
        self._skipped = len(specs) - len(self._missing)
        self._done, self._elsewhere, self._failed = 0, 0, dict[str, str]()
        self._started, self._renew_at = time.time(), 0.0
        self._said = False

    def drive(self, engine: Engine, setting: WorkerConfig, shared: Shared) -> Outcome:
        if self._watch is not None:
            self._watch.begin(list(self._missing.values()), self._skipped)
        if not self._missing:
            engine.close()
            return self._sum_up()
        with postpone_interrupts() as interrupt:
            try:
                self._follow(engine, setting, shared, interrupt)
            finally:
                with suppress(OSError):  # a full disk; the claims of a process that has ended are free anyway
                    self._store.release(self._owner)
        if interrupt.asked:
            raise Interrupted(self._sum_up())
        return self._sum_up()

    def _follow(self, engine: Engine, setting: WorkerConfig, shared: Shared, interrupt: Interrupt) -> None:
        events = engine.run(self._offer(), setting, shared)
        with closing(events):
            for event in events:
                self._act(event)
                if interrupt.asked:
                    return
                if time.monotonic() >= self._renew_at:
                    self._renew_at = time.monotonic() + _RENEW_EVERY
                    self._store.renew(self._owner)

    def _act(self, event: Event) -> None:
        if isinstance(event, Finished):
            if self._store.add(event.run):
                self._done += 1
            else:
                self._elsewhere += 1
        elif isinstance(event, Broken):
            self._store.fail(self._missing[event.key], event.text)
            self._store.release(self._owner, [event.key])
            self._failed[event.key] = event.text
        self._show(event)

    def _offer(self) -> Iterator[Spec | None]:
        """The missing runs, each claimed when a worker is free, so that several processes can share the work."""
        queue = deque(self._missing.values())
        while queue:
            for _ in range(len(queue)):
                spec = queue.popleft()
                if self._is_settled(spec.key):
                    self._show(Passed(spec.key))
                elif self._store.claim([spec.key], self._owner):
                    yield spec
                else:
                    queue.append(spec)
            if queue:  # others are at them; they may finish, or die and leave their runs to us
                self._say_once(f"Waiting for another process, which is doing {len(queue)} of the runs.")
                yield None

    def _is_settled(self, key: str) -> bool:
        """Whether another process has done a run since the start, or has tried in vain."""
        if key in self._store.done():
            self._elsewhere += 1
            return True
        for failure in self._store.failures():
            if failure.key == key and failure.when >= self._started:
                self._failed[key] = failure.text
                return True
        return False

    def _say_once(self, text: str) -> None:
        if not self._said:
            self._said = True
            self._show(Noted(text))

    def _show(self, event: Event) -> None:
        if self._watch is not None:
            self._watch.see(event)

    def _sum_up(self) -> Outcome:
        return Outcome(self._done, self._skipped, self._failed, self._elsewhere)
