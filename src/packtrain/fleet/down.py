"""End the machines of a run, wherever it has been, or those that any run has at the providers that can be asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pydantic import ValidationError

from packtrain.errors import FieldMistake, Mistake, PacktrainError, nearest
from packtrain.fleet import fleet_of
from packtrain.fleet.cloud import CloudBuilder, CloudFleet, Provider, Resource, label_of, remove
from packtrain.fleet.fleet import Say, silent
from packtrain.job.job import FleetSettings
from packtrain.job.kinds import FLEETS, FleetKind, kind_class, word_of
from packtrain.run.liveness import LEASE_LOST_SECONDS, finish_unattended, state_now
from packtrain.run.run import Run
from packtrain.run.trust import trusts_fleet
from packtrain.store import StoreError
from packtrain.store.records import DamagedRecord, damaged
from packtrain.system import this_client

_LEAVE_SECONDS = 4 * LEASE_LOST_SECONDS  # for nodes that this client cannot end, but that see the stop request
_POLL_SECONDS = 1.0
_START_SECONDS = 120.0  # in which a machine that was started may join: a busy one takes its time
_SHOWN = 3  # resources in one error
_NAMED = 20  # machines in one event
_PROVIDERS = 16  # threads: each waits for its provider

AcceptFleets = Callable[[Sequence[FleetKind]], None]
"""Raises Mistake unless these fleets, which the store names, may be contacted."""


def launched_fleets(run: Run) -> list[FleetKind]:
    """Return the fleets that clients have started the run on, or were about to, each once and the newest first."""
    try:
        fleets = [FleetSettings.model_validate(launch.fleet) for launch in reversed(run.launches())]
    except ValidationError as error:
        raise damaged(f"a launch of run {run.name} in {run.store.url}", error) from error
    kinds = [fleet.kind for fleet in fleets or [run.job.fleet]]
    return [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]


def take_down(run: Run, accept: AcceptFleets, say: Say = silent) -> list[str]:
    """End the machines of a run on every fleet that it was started on; return their names. None is left after this."""
    try:
        kinds = launched_fleets(run)
    except DamagedRecord as error:
        raise DamagedRecord(f"{error}; `packtrain down --all` finds machines without it") from error
    unknown = [kind for kind in kinds if not fleet_of(kind).trains_here and not trusts_fleet(run, kind)]
    if unknown:
        accept(unknown)
    try:
        # Nodes that are still starting, or that this client cannot reach, see this and leave.
        if run.result() is None:
            run.request_stop("stopped by user (packtrain down)")
    except StoreError as error:  # a store that cannot be written must not keep machines running
        say(f"could not ask {run.name} to stop: {error}")
    ended: list[str] = []
    faults: list[PacktrainError] = []
    for kind in kinds:
        try:
            ended += fleet_of(kind).down(run, say)
        except PacktrainError as error:  # the other fleets cost money, too
            faults.append(error)
    others = f" and {len(ended) - _NAMED} more" if len(ended) > _NAMED else ""
    with suppress(StoreError):
        if ended:
            run.record_event("machine", f"{this_client()} ended: {', '.join(ended[:_NAMED])}{others}")
    if faults:
        raise faults[0] if len(faults) == 1 else PacktrainError("; ".join(map(str, faults)))
    deadline = time.monotonic() + _LEAVE_SECONDS  # a machine that was just ended looks alive for some seconds
    while run.result() is None and not finish_unattended(run):
        if time.monotonic() > deadline:
            alive = ", ".join(sorted({lease.hostname for lease in run.leases() if not lease.left}))
            raise PacktrainError(
                f"{run.name} is still running on {alive}, which cannot be reached from here;"
                f" run `packtrain down {run.name}` there"
            )
        time.sleep(_POLL_SECONDS)
    return ended


def check_has_no_machines(run: Run, force: bool = False) -> None:
    """Refuse a run that machines work on, or may come to; `force` does not ask fleets that cannot be asked."""
    state, stop = state_now(run), f"`{run.command('stop')}`"
    if state == "running":
        raise Mistake(f"{run.name} is running; stop it first: {stop}")
    launches = run.launches()
    if state == "waiting" and launches and time.time() - launches[-1].time < _START_SECONDS:
        raise Mistake(f"{run.name} is starting; stop it first: {stop}")
    for kind in () if force else launched_fleets(run):
        fleet, word, down = fleet_of(kind), word_of(FLEETS, kind), f"`{run.command('down')}`"
        if fleet.trains_here:  # leases say everything about nodes of this kind
            continue
        if state in ("waiting", "interrupted"):
            raise Mistake(f"{run.name} is {state}, and machines of {word} may come back to it; end them first: {down}")
        if isinstance(fleet, CloudFleet):
            # Without the run's folder, only `down --all` would find what it has there.
            advice = f"run {down}, then this with --force"
            if not trusts_fleet(run, kind):
                raise Mistake(f"{run.name} was not started on {word} from here, and may still rent machines; {advice}")
            try:
                resources = fleet.provider().resources(label_of(run))
            except PacktrainError as error:
                raise Mistake(f"{run.name} may still rent machines ({error}); {advice}") from None
            if resources:
                titles = ", ".join(resource.title for resource in resources[:_SHOWN])
                raise Mistake(f"{run.name} still has {titles}; delete it first: {down}")


# All runs.


@dataclass(frozen=True)
class Inventory:
    """The resources of runs, by provider. `answered` are the places that were asked; `unanswered` are kinds and places
    without an answer, each with the reason. `failed`: one of them may have machines.
    """

    providers: Sequence[tuple[Provider, Sequence[Resource]]]
    answered: Sequence[str]
    unanswered: Sequence[tuple[str, str]]
    failed: bool

    @property
    def resources(self) -> list[Resource]:
        return [resource for _, resources in self.providers for resource in resources]

    def expired(self) -> Inventory:
        """Return what has outlived the budget of its run."""
        today = datetime.now(UTC)
        expired = [
            (provider, [resource for resource in resources if resource.has_expired(today)])
            for provider, resources in self.providers
        ]
        return replace(self, providers=[(provider, resources) for provider, resources in expired if resources])


def take_inventory(fleets: Sequence[str]) -> Inventory:
    """Ask the fleets, such as `aws:us-east-1,eu-west-1` or `ibm`, or else every kind that can be asked from here."""
    providers: list[tuple[str, Provider]] = []
    unanswered: list[tuple[str, str]] = []
    for fleet in fleets or FLEETS:
        word, _, places = fleet.partition(":")
        if word not in FLEETS:
            raise Mistake(f"--fleet {fleet}: no such fleet; {nearest(word, FLEETS)}")
        kind = kind_class(FLEETS, word)
        if not issubclass(kind, CloudBuilder):
            if fleets:
                raise Mistake(f"--fleet {fleet}: {word} rents no machines; use `packtrain down RUN`")
            continue
        try:
            providers += [(word, provider) for provider in kind.providers(tuple(filter(None, places.split(","))))]
        except Mistake as mistake:
            if fleets:
                fault = mistake.fault if isinstance(mistake, FieldMistake) else mistake
                raise Mistake(f"--fleet {fleet}: {fault}") from None
            unanswered.append((word, str(mistake)))

    def ask(provider: Provider) -> list[Resource] | PacktrainError:
        try:
            return provider.resources(None)
        except PacktrainError as error:  # one region that is not enabled must not hide the others
            return error

    with ThreadPoolExecutor(_PROVIDERS) as threads:
        answers = list(threads.map(ask, [provider for _, provider in providers]))
    owning, answered, failed = [], [], False
    for (word, provider), answer in zip(providers, answers, strict=True):
        place = f"{word} {provider.place}"
        if isinstance(answer, PacktrainError):
            # Who has no credentials has no machines there, unless the place was named.
            failed = failed or bool(fleets) or not isinstance(answer, Mistake)
            unanswered.append((place, str(answer)))
            continue
        answered.append(place)
        if answer:
            owning.append((provider, answer))
    return Inventory(owning, answered, unanswered, failed)


def remove_found(inventory: Inventory, say: Say = silent) -> list[Resource]:
    """Delete what an inventory lists, and what the same runs have created since; return what that was."""

    def remove_at(provider: Provider, resources: Sequence[Resource]) -> list[Resource] | PacktrainError:
        labels = {resource.label for resource in resources}
        try:
            return remove(
                lambda: [resource for resource in provider.resources(None) if resource.label in labels], provider, say
            )
        except PacktrainError as error:
            return error

    with ThreadPoolExecutor(_PROVIDERS) as threads:
        answers = list(threads.map(lambda entry: remove_at(*entry), inventory.providers))
    faults = [answer for answer in answers if isinstance(answer, PacktrainError)]
    if faults:
        raise PacktrainError("; ".join(map(str, faults)))
    return [resource for answer in answers if not isinstance(answer, PacktrainError) for resource in answer]
