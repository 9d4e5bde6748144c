"""Create a run: its folder in the store, with everything that its nodes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from packtrain.errors import PacktrainError
from packtrain.housekeeping.removal import remove_run
from packtrain.housekeeping.uses import Uses, require_uses
from packtrain.job.job import Job
from packtrain.launch.parent import fetched
from packtrain.pack.manifest import Manifest
from packtrain.recipes import Recipe
from packtrain.run.inputs import given_keys
from packtrain.run.records import JobSource
from packtrain.run.run import Run, add_run
from packtrain.run.trust import remember
from packtrain.store import Store

Tell = Callable[[str, str], None]
"""Tells the person who starts a run something: a word that says what it is about, and a line."""


@dataclass(frozen=True)
class NewRun:
    """Everything that the folder of a run starts with, before there is one.

    A job with a recipe has a `pack`. `parent` is the run whose checkpoint it starts from, as `job.parent` says.
    `notes` are what `create` tells the person.
    """

    store: Store
    job: Job
    code: bytes
    pack: Manifest | None
    source: JobSource
    recipe: type[Recipe] | None = None
    parent: Run | None = None
    notes: Sequence[tuple[str, str]] = ()

    @property
    def pack_name(self) -> str | None:
        return None if self.pack is None else self.pack.name

    @property
    def uses(self) -> Uses:
        packs = frozenset() if self.pack is None else frozenset({self.pack.name})
        return Uses(packs, frozenset(given_keys(self.job, self.store)))


def create(new_run: NewRun, tell: Tell = lambda _label, _line: None) -> Run:
    """Create the run; `tell` gets its notes, and another if the weights of another run do not fit as a whole."""
    for label, line in new_run.notes:
        tell(label, line)
    run = create_with(new_run, lambda: add_run(new_run.store, new_run.job, new_run.code, new_run.pack_name), tell)
    try:
        require_uses(new_run.store, new_run.uses)
    except PacktrainError:
        remove_run(run, lambda _: None)
        raise
    if new_run.pack is not None:
        from packtrain.plan.known import expected

        with suppress(PacktrainError):  # a run does not need it: whatever is wrong shows when it starts
            if (forecast := expected(run, new_run.pack)) is not None:
                run.put_forecast(forecast)  # the report says later how far that was off
    return run


def create_with(new_run: NewRun, make: Callable[[], Run], tell: Tell = lambda _label, _line: None) -> Run:
    """Let `make` put the run into the store, and give it everything else that it starts with."""
    with ExitStack() as stack:
        give = None
        if new_run.parent is not None:  # fetched first: what cannot be read leaves no run behind
            give = stack.enter_context(fetched(new_run, new_run.parent, partial(tell, "from")))
        run = make()
        try:
            if give is not None:
                give(run)
        except BaseException:
            new_run.store.delete(run.key("job.json"))  # without its beginning it must not be resumed
            raise
    if run.source() is None:  # a run of a sweep may have been left half made
        run.put_source(new_run.source)
    # What was accepted of it before still counts: its driver may have given it another part of the fleet.
    remember(run, instead=False)
    return run
