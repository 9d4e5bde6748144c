"""Fleets whose machines somebody pays for until they are deleted: intent first, undo after a failure, nothing left.

A `Provider` is an account at one place (a region, a namespace) that lists and deletes what runs have there. Everything
that a run creates carries its label, so it is found and deleted from any machine, whoever created it.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, NotFinished, PacktrainError
from packtrain.fleet.fleet import Check, Fleet, FleetBuilder, HasQueue, HasShell, LaunchPlan, Say, silent
from packtrain.fleet.host import StartedNode
from packtrain.node.deadline import seconds_left
from packtrain.run.liveness import LEASE_LOST_SECONDS
from packtrain.run.run import Run
from packtrain.store import Store, StoreAway
from packtrain.system import this_client

LABEL_TAG = "packtrain-label"
STORE_TAG = "packtrain-store"
_RUN_TAG, _OWNER_TAG = "packtrain-run", "packtrain-owner"
_EXPIRES_TAG = "packtrain-expires"
_NEVER = "never"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_MAX_SECONDS = 1e9  # 30 years: providers count in 32 bits
_DOWN_SECONDS = 900.0  # a provider may take minutes to end a machine, and keeps its network until then
_STUCK_ROUNDS = 5  # in a row with an error and nothing gone, to give up: a missing permission does not come back


class StillInUse(PacktrainError):
    """Something else has to be gone before this can be deleted; `down` tries again."""


@dataclass(frozen=True)
class Resource:
    """A thing that a provider keeps until somebody deletes it, in the provider's words.

    `name` is what it is deleted by, `label` that of its run (see `label_of`); `store`, `owner` and `expires` are what
    its tags say, for a person who finds it; empty if they say nothing.
    """

    kind: str
    name: str
    place: str
    label: str
    run: str = ""
    store: str = ""
    owner: str = ""
    expires: str = ""

    @classmethod
    def tagged(cls, kind: str, name: str, place: str, tags: Mapping[str, str]) -> Resource:
        words = (tags.get(tag, "") for tag in (LABEL_TAG, _RUN_TAG, STORE_TAG, _OWNER_TAG, _EXPIRES_TAG))
        return cls(kind, name, place, *words)

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} in {self.place}"

    def has_expired(self, moment: datetime) -> bool:
        """True if the run's budget has ended by then; what has no expiry, or none that can be read, has not."""
        with suppress(ValueError):
            return datetime.strptime(self.expires, _TIME).replace(tzinfo=UTC) < moment
        return False


class Provider(ABC):
    """`settle_seconds` is how long something new may be missing in lists.

    `idle_kinds` are kinds of resources that may be left when the machines have ended, and cost nothing.
    """

    place: str
    settle_seconds = 0.0
    idle_kinds: frozenset[str] = frozenset()

    @abstractmethod
    def resources(self, label: str | None) -> list[Resource]:
        """Return what the run of this label has here, or with None what all runs have, in the order of deletion.

        What is meant to outlive its run, such as a volume with a pack, is not among them.
        """

    @abstractmethod
    def delete(self, resource: Resource) -> None:
        """Ask for the deletion, and do not wait for it. What is gone already is no error."""


class CloudBuilder(FleetBuilder):
    """The settings of a fleet whose machines somebody pays for."""

    @classmethod
    @abstractmethod
    def providers(cls, places: Sequence[str]) -> Sequence[Provider]:
        """Return a `Provider` for each of the places, or for the default ones.

        Raises Mistake if they cannot be asked from here: the SDK or the credentials are missing.
        """


class CloudFleet(Fleet, HasQueue, HasShell):
    no_foreground = "machines of a cloud cannot be tied to this command; omit --foreground, and use `packtrain down`"

    @abstractmethod
    def provider(self) -> Provider: ...

    @abstractmethod
    def create(self, run: Run, plans: Sequence[LaunchPlan], say: Say) -> None:
        """Create the machines. Called again for the same run, it creates nothing twice."""

    @abstractmethod
    def checks(self, store: Store | None) -> Iterator[Check]:
        """Check what a start would need, without starting anything. `store` is None if it cannot be reached."""

    def start(self, run: Run, plans: Sequence[LaunchPlan], tied: bool, say: Say = silent) -> list[StartedNode]:
        if tied:
            raise Mistake(self.no_foreground)
        provider = self.provider()
        existed = any(resource.kind not in provider.idle_kinds for resource in provider.resources(label_of(run)))
        try:
            self.create(run, plans, say)
        except BaseException as error:  # also Ctrl-C: half of a fleet costs money and trains nothing
            if existed:  # machines of an earlier start may be about to join
                say(f"{run.name} has machines of an earlier start; `{_down_command(run)}` ends them")
            else:
                _undo(run, provider, error, say)
            raise
        # `packtrain down` may have listed the machines while they were created here.
        if run.stop_request() is not None:
            self.down(run, say)
            raise NotFinished(f"{run.name} was asked to stop while its machines were created; they are deleted")
        return []  # nothing to watch from here: what the machines do is in the store

    def end(self, run: Run) -> None:
        provider = self.provider()
        if faults := _delete_each(provider.resources(label_of(run)), provider):
            raise faults[0]

    def down(self, run: Run, say: Say = silent) -> list[str]:
        return [resource.title for resource in remove_all_of(run, self.provider(), say)]

    def give_back(self, run: Run, say: Say) -> None:
        """Delete what a run that has ended left here, until somebody resumes it: what is new then is needed."""
        provider, label = self.provider(), label_of(run)
        remove(lambda: [] if run.result() is None else provider.resources(label), provider, say)


def field(document: Mapping[str, Any], *names: str) -> Any:
    """Return a field of a provider's answer, or of an object in it; None if one of them is not there, or null."""
    value: Any = document
    for name in names:
        value = (value or {}).get(name)
    return value


def label_of(run: Run) -> str:
    """Return the name of everything that the run has at a provider: 63 characters that all of them accept.

    It tells the run apart from one of the same name in another store.
    """
    # A directory is mounted at different paths, but has an id of its own.
    store = run.store.identity or f"{run.store.url}\n{run.store.endpoint or ''}"
    digest = hashlib.sha256(f"{store}\n{run.name}".encode()).hexdigest()
    return f"packtrain-{run.name[:40].rstrip('-')}-{digest[:8]}"


def tags_of(run: Run, limit_seconds: float | None = None) -> dict[str, str]:
    """Return the tags of everything that the run has at a provider, by their names there.

    `limit_seconds` is how long a run without a budget may last.
    """
    seconds = budget_seconds(run)
    seconds = limit_seconds if seconds is None else seconds
    return {
        LABEL_TAG: label_of(run),
        _RUN_TAG: run.name,
        STORE_TAG: run.store.url,
        _OWNER_TAG: this_client(),
        _EXPIRES_TAG: _NEVER if seconds is None else expiry(seconds),
    }


def expiry(seconds: float) -> str:
    """Return the time after so many seconds, as `Resource.expires` has it."""
    return time.strftime(_TIME, time.gmtime(time.time() + seconds))


def budget_seconds(run: Run, machines: int | None = None) -> float | None:
    """Return how long so many of the run's machines, by default all, may run from now; None without a budget."""
    if run.job.budget.hours is None and run.job.budget.dollars is None:
        return None
    try:
        leases = run.leases()
    except StoreAway as away:
        if away.was_there:
            raise
        leases = []  # the store of a dry run is yet to be created
    used = max((lease.used_seconds for lease in leases), default=0.0)
    count = machines or run.job.fleet.kind.machines.most
    seconds = seconds_left(run.job.budget, run.job.fleet, leases, used, count)
    return None if seconds is None else min(seconds, _MAX_SECONDS)


def wait_until_left(run: Run) -> None:
    """Wait for the nodes of a run that has ended: the last log lines and the report come after the result."""
    backoff = Backoff(0.2, 2.0, limit_seconds=LEASE_LOST_SECONDS)
    while not all(lease.left for lease in run.leases()) and backoff.wait():
        pass


def remove_all_of(run: Run, provider: Provider, say: Say = silent) -> list[Resource]:
    label = label_of(run)
    return remove(lambda: provider.resources(label), provider, say)


def remove(
    listed: Callable[[], Sequence[Resource]],
    provider: Provider,
    say: Say = silent,
    backoff: Backoff | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Resource]:
    """Delete what is listed until the provider lists nothing; return what that was. Raise with what is left."""
    backoff = backoff or Backoff(0.2, 10.0, limit_seconds=_DOWN_SECONDS)
    deleted: dict[Resource, None] = {}
    before: set[Resource] = set()
    stuck, settled = 0, False
    while True:
        remaining = listed()
        if not remaining:
            if settled or provider.settle_seconds == 0:
                return list(deleted)
            settled = True  # what was created a moment ago may be in no list yet: look once more
            sleep(provider.settle_seconds)
            continue
        for resource in remaining:
            if resource not in deleted:
                deleted[resource] = None
                say(f"deleting {resource.title}")
        faults = _delete_each(remaining, provider)
        stuck = stuck + 1 if faults and set(remaining) == before else 0
        before = set(remaining)
        if stuck >= _STUCK_ROUNDS or not backoff.wait():
            why = f" ({faults[0]})" if faults else ""
            raise PacktrainError(
                f"still there in {provider.place}: {_names(remaining)}{why}; run `packtrain down` again"
            )


def _delete_each(resources: Sequence[Resource], provider: Provider) -> list[PacktrainError]:
    """Ask for every deletion, whatever becomes of the others, and return the errors."""
    faults: list[PacktrainError] = []
    for resource in resources:
        try:
            provider.delete(resource)
        except StillInUse:
            continue  # it goes with the last of what uses it
        except PacktrainError as error:
            faults.append(error)
    return faults


def _undo(run: Run, provider: Provider, error: BaseException, say: Say) -> None:
    """Delete what a failed start has created; if that fails, raise with what is left and the command to delete it."""
    try:
        remove_all_of(run, provider, say)
    except BaseException as fault:
        remaining = "what was created"
        with suppress(Exception):  # asking again may fail as well
            remaining = _names(provider.resources(label_of(run)))
        raise PacktrainError(
            f"{_in_words(error)}; then {remaining} in {provider.place} could not be deleted ({_in_words(fault)}),"
            f" and may cost money: run `{_down_command(run)}`"
        ) from error


def _down_command(run: Run) -> str:
    return shlex.join(["packtrain", "down", run.name, "--store", run.store.url])


def _names(resources: Sequence[Resource]) -> str:
    return ", ".join(f"{resource.kind} {resource.name}" for resource in resources)


def _in_words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, PacktrainError) else f"{type(error).__name__}: {error}"
