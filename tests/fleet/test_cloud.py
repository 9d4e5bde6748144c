"""Fleets of rented machines: what a start that fails leaves behind, and how everything is found and deleted."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, NotFinished, PacktrainError
from packtrain.fleet.cloud import (
    Provider,
    Resource,
    StillInUse,
    budget_seconds,
    label_of,
    remove,
    tags_of,
)
from packtrain.fleet.fleet import silent
from packtrain.run.records import Result
from packtrain.run.run import Run, next_run
from packtrain.store import Store, open_store
from parts.rental import RentalFleet, RentalProvider, RentalSettings, register
from parts.runs import a_lease, new_run, program_job

CALLS = [f"{when} create {kind}" for kind in ("network", "machine") for when in ("before", "after")]


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    register(monkeypatch)
    path = tmp_path / "account"
    path.mkdir()
    yield path
    monkeypatch.undo()
    remove(RentalProvider(path).everything, RentalProvider(path))


@pytest.fixture
def run(directory_store: Store, account: Path) -> Run:
    fleet = {"rental": {"account": str(account), "machines": 2, "idle": True}}
    return new_run(directory_store, program_job(fleet=fleet))


def fleet_of(run: Run) -> RentalFleet:
    assert isinstance(run.job.fleet.kind, RentalSettings)
    return run.job.fleet.kind.build()


def start(run: Run, told: list[str] | None = None) -> None:
    fleet = fleet_of(run)
    assert fleet.start(run, fleet.plan(run), False, (told if told is not None else []).append) == []


def listed(run: Run) -> list[str]:
    return [resource.kind for resource in fleet_of(run).provider().resources(label_of(run))]


def at(monkeypatch: pytest.MonkeyPatch, moment: str, act: Callable[[], None], times: float = 1) -> list[str]:
    """Act when a call of this name is made for the first time, or that often; return the calls so far."""
    calls: list[str] = []

    def on_call(name: str) -> None:
        calls.append(name)
        if name == moment and calls.count(moment) <= times:
            act()

    monkeypatch.setattr(RentalProvider, "on_call", staticmethod(on_call))
    return calls


def refuse(text: str = "the quota is used up") -> Callable[[], None]:
    def act() -> None:
        raise PacktrainError(text)

    return act


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("processes")
def test_machines_are_created_once_and_down_leaves_nothing(run: Run) -> None:
    start(run)
    start(run)
    assert listed(run) == ["machine", "machine", "network"]
    told: list[str] = []
    label = label_of(run)
    ended = fleet_of(run).down(run, told.append)
    assert sorted(ended) == [
        f"machine {label}-0 in account",
        f"machine {label}-1 in account",
        f"network {label} in account",
    ]
    assert told == [f"deleting {one}" for one in ended]
    assert listed(run) == []
    assert fleet_of(run).down(run) == []


def test_machines_cannot_be_tied_to_a_command(run: Run) -> None:
    with pytest.raises(Mistake, match="omit --foreground"):
        fleet_of(run).start(run, [], True)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("moment", CALLS)
def test_a_create_that_fails_half_way_is_undone(run: Run, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, moment, refuse())
    with pytest.raises(PacktrainError, match=r"^the quota is used up$"):
        start(run)
    assert listed(run) == []


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("moment", CALLS)
def test_ctrl_c_undoes_what_was_created(run: Run, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(run)
    assert listed(run) == []


@pytest.mark.parametrize(
    ("act", "why"), [(refuse("not allowed to delete"), "not allowed to delete"), (interrupt, "interrupted")]
)
def test_an_undo_that_fails_names_what_is_left_and_the_command_to_delete_it(
    run: Run, act: Callable[[], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_call(name: str) -> None:
        if name == "after create network":
            raise PacktrainError("the quota is used up")
        if name == "before delete network":
            act()

    monkeypatch.setattr(RentalProvider, "on_call", staticmethod(on_call))
    monkeypatch.setattr("packtrain.backoff.time.sleep", lambda _: None)
    monkeypatch.setattr(Backoff, "wait", lambda _: True)
    with pytest.raises(PacktrainError) as failed:
        start(run)
    text = str(failed.value)
    assert text.startswith(f"the quota is used up; then network {label_of(run)} in account could not be deleted (")
    assert why in text
    assert text.endswith(f"run `packtrain down {run.name} --store {run.store.url}`")
    assert listed(run) == ["network"]


@pytest.mark.usefixtures("processes")
def test_what_was_there_before_a_failed_start_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    start(run)
    at(monkeypatch, "before create machine", refuse())
    told: list[str] = []
    with pytest.raises(PacktrainError, match="quota"):
        start(run, told)
    assert told == [f"job-1 has machines of an earlier start; `packtrain down job-1 --store {run.store.url}` ends them"]
    assert listed(run) == ["machine", "machine", "network"]


@pytest.mark.usefixtures("processes")
def test_machines_that_are_created_while_somebody_ends_the_run_are_deleted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, "after create network", lambda: run.request_stop("down"))
    with pytest.raises(NotFinished, match="asked to stop while its machines were created"):
        start(run)
    assert listed(run) == []


# Removal.


class ListedProvider(Provider):
    """Answers with given lists, one after the other, and then with the last one."""

    place = "nowhere"

    def __init__(self, *lists: Sequence[Resource], faults: dict[str, PacktrainError] | None = None) -> None:
        self.lists, self.faults = list(lists), faults or {}
        self.deleted: list[str] = []

    def resources(self, label: str | None) -> list[Resource]:  # noqa: ARG002
        return list(self.lists.pop(0) if len(self.lists) > 1 else self.lists[0])

    def delete(self, resource: Resource) -> None:
        if resource.name in self.faults:
            raise self.faults[resource.name]
        self.deleted.append(resource.name)


def named(name: str) -> Resource:
    return Resource("machine", name, "nowhere", "label")


def quick(limit_seconds: float = math.inf) -> Backoff:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return Backoff(1.0, 1.0, jitter=0.0, limit_seconds=limit_seconds, clock=lambda: now[0], sleep=sleep)


def test_what_appears_late_is_deleted_too() -> None:
    provider = ListedProvider([], [named("late")], [])
    provider.settle_seconds = 5.0
    slept: list[float] = []
    assert remove(lambda: provider.resources(None), provider, backoff=quick(), sleep=slept.append) == [named("late")]
    assert slept == [5.0]
    assert provider.deleted == ["late"]


def test_what_a_resumed_run_creates_is_not_given_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.finish(Result("stopped", "stopped by user", 1, 1.0))

    class ResumedProvider(ListedProvider):
        def delete(self, resource: Resource) -> None:
            super().delete(resource)
            run.clear_end()  # whoever resumes a run does that before anything is created

    provider, fleet = ResumedProvider([named("old")], [named("new")], []), fleet_of(run)
    monkeypatch.setattr(fleet, "provider", lambda: provider)
    fleet.give_back(run, silent)
    assert provider.deleted == ["old"]


def test_one_that_cannot_be_deleted_does_not_keep_the_others_and_is_named_with_the_reason() -> None:
    kept, gone = named("kept"), named("gone")
    provider = ListedProvider([kept, gone], [kept], faults={"kept": PacktrainError("TerminateInstances is forbidden")})
    with pytest.raises(PacktrainError) as failed:
        remove(lambda: provider.resources(None), provider, backoff=quick())
    assert provider.deleted == ["gone"]
    assert str(failed.value) == (
        "still there in nowhere: machine kept (TerminateInstances is forbidden); run `packtrain down` again"
    )


def test_an_end_that_takes_too_long_is_an_error() -> None:
    provider = ListedProvider([named("slow")], faults={"slow": StillInUse("it is used")})
    with pytest.raises(PacktrainError, match=r"^still there in nowhere: machine slow; run `packtrain down` again$"):
        remove(lambda: provider.resources(None), provider, backoff=quick(60.0))


# Labels and tags.


def test_a_label_fits_every_provider_and_tells_runs_apart(tmp_path: Path) -> None:
    stores = [open_store(str(tmp_path / name), create=True) for name in ("one", "two")]
    labels = [label_of(new_run(store, program_job("x" * 63))) for store in stores]
    assert len(set(labels)) == 2
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", label) for label in labels)


def test_a_store_has_the_same_labels_wherever_it_is_mounted(tmp_path: Path) -> None:
    run = new_run(open_store(str(tmp_path / "store"), create=True))
    (tmp_path / "mount").symlink_to(tmp_path / "store")
    other = Run(open_store(str(tmp_path / "mount")), run.name)
    assert other.job == run.job
    assert label_of(other) == label_of(run)


def test_tags_tell_a_person_whose_a_resource_is(run: Run) -> None:
    found = Resource.tagged("machine", "i-1", "here", tags_of(run))
    assert (found.label, found.run, found.store) == (label_of(run), run.name, run.store.url)
    assert "@" in found.owner
    assert found.expires == "never"
    assert not found.has_expired(datetime.now(UTC))
    assert Resource.tagged("machine", "i-1", "here", {"packtrain-label": "a"}).run == ""


def test_what_a_budget_pays_for_expires_with_it(directory_store: Store, account: Path) -> None:
    fleet = {"rental": {"account": str(account), "machines": 2}}
    run = new_run(directory_store, program_job(fleet=fleet, budget={"dollars": 2.0}))
    # Two machines of 0.5 dollars per hour; one more was there for an hour.
    assert budget_seconds(run) == 2 * 3600
    run.renew(a_lease("a", machine_seconds=3600.0, dollars_per_hour=0.5, left=True))
    assert budget_seconds(run) == 1.5 * 3600
    found = Resource.tagged("machine", "i-1", "here", tags_of(run))
    at_end = datetime.fromtimestamp(time.time() + 1.5 * 3600 + 60, UTC)
    assert found.has_expired(at_end)
    assert not found.has_expired(datetime.now(UTC))
    assert not Resource("machine", "i-1", "here", "a", expires="soon").has_expired(at_end)


def test_a_dry_run_has_tags_before_its_store_exists(tmp_path: Path, account: Path) -> None:
    job = program_job(fleet={"rental": {"account": str(account)}}, budget={"hours": 2})
    run = next_run(open_store(str(tmp_path / "none")), job, b"")
    assert budget_seconds(run) == 7200


def test_secrets_are_in_no_launch_plan_and_no_tag(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-rental")
    assert isinstance(run.job.fleet.kind, RentalSettings)
    assert "canary" not in f"{fleet_of(run).plan(run)} {tags_of(run)}"
