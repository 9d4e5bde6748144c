"""`packtrain down`: the machines of a run wherever it has been, and those that nobody remembers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from typer.testing import Result as Answer

import packtrain as pt
from fleet.jobs import packtrain, write_program
from packtrain.cli import app
from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.fleet import release
from packtrain.fleet.cloud import LABEL_TAG, label_of, remove
from packtrain.fleet.down import check_has_no_machines, launched_fleets, take_down, take_inventory
from packtrain.fleet.host import find_processes
from packtrain.job.kinds import FleetKind
from packtrain.launch.resume import reopen
from packtrain.launch.start import start
from packtrain.run.checkpoint import last_step
from packtrain.run.liveness import State, state_of
from packtrain.run.records import FleetLaunch, Result, Status
from packtrain.run.run import Run, open_run
from packtrain.run.trust import forget, refuse, remember, trusts_fleet
from packtrain.store import Store, StoreError, open_store
from parts.faulty import FaultyStore
from parts.rental import ACCOUNT, RentalFleet, RentalProvider, register
from parts.runs import a_lease, new_run, program_job
from parts.sandbox import wait_until
from parts.terminal import in_terminal

SSH = {"ssh": {"hosts": ["a.example"]}}

# Runs until it has been resumed from a checkpoint.
UNTIL_RESUMED = """
import os, time
from pathlib import Path

kept = Path(os.environ["PACKTRAIN_CHECKPOINTS"]) / "kept"
resumed = kept.exists()
while not resumed:
    kept.write_text("something")
    time.sleep(0.1)
"""


@pytest.fixture
def accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    register(monkeypatch)
    monkeypatch.delenv(ACCOUNT, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = {name: tmp_path / name for name in ("east", "west")}
    for path in found.values():
        path.mkdir()
    yield found
    monkeypatch.undo()
    for path in found.values():
        remove(RentalProvider(path).everything, RentalProvider(path))


def rented(account: Path, **settings: Any) -> dict[str, Any]:
    return {"rental": {"account": str(account), "idle": True, **settings}}


def started(store: Store, account: Path, **fields: Any) -> Run:
    """Start a run as its own person does."""
    run = new_run(store, program_job(fleet=rented(account), **fields))
    remember(run)
    assert start(run, tied=False, say=lambda _: None) == []
    return run


def kinds_in(account: Path) -> list[str]:
    return [resource.kind for resource in RentalProvider(account).everything()]


def never(kinds: Sequence[FleetKind]) -> None:
    raise Mistake(f"asked about {len(kinds)}")


def command(*words: str) -> Answer:
    return CliRunner().invoke(app, words)


# One run.


@pytest.mark.usefixtures("processes")
def test_a_run_that_moved_is_ended_everywhere(directory_store: Store, accounts: dict[str, Path]) -> None:
    run = started(directory_store, accounts["east"])
    moved = Run(run.store, run.name, program_job(fleet=rented(accounts["west"])).model_dump_json().encode(), run.code)
    remember(moved)
    for _ in range(2):
        start(moved, tied=False, say=lambda _: None)
    assert [kind.model_dump()["account"] for kind in launched_fleets(run)] == [
        str(accounts["west"]), str(accounts["east"])
    ]  # fmt: skip
    assert len(take_down(run, never)) == 4
    assert [kinds_in(account) for account in accounts.values()] == [[], []]
    assert state_of(run) == "stopped"
    told = [event.text for event in run.events().read() if event.kind == "machine"]
    assert len(told) == 4
    assert sum("on rental (machines: 1)" in text for text in told) == 3
    assert f"ended: machine {label_of(run)}-0 in west, network" in "".join(told)


@pytest.mark.usefixtures("processes")
def test_a_fleet_that_fails_does_not_save_the_others(
    directory_store: Store, accounts: dict[str, Path], tmp_path: Path
) -> None:
    run = started(directory_store, accounts["east"])
    gone = rented(tmp_path / "closed")
    run.record_launch(FleetLaunch(time.time(), "somebody", gone))
    with pytest.raises(PacktrainError, match="closed: no such account"):
        take_down(run, lambda _: None)
    assert kinds_in(accounts["east"]) == []


@pytest.mark.usefixtures("processes")
def test_a_run_is_removed_only_when_nothing_of_it_is_rented(directory_store: Store, accounts: dict[str, Path]) -> None:
    run = started(directory_store, accounts["east"])
    run.finish(Result("finished", "done", 1, 1.0))
    with pytest.raises(Mistake, match=r"job-1 still has machine .*; delete it first: `packtrain down job-1 --store "):
        check_has_no_machines(run)
    take_down(run, never)
    check_has_no_machines(run)
    accounts["east"].rename(accounts["east"].with_name("closed"))
    with pytest.raises(
        Mistake, match=r"may still rent machines \(.*no such account.*; run `packtrain down job-1 --store "
    ):
        check_has_no_machines(run)
    check_has_no_machines(run, force=True)
    accounts["east"].with_name("closed").rename(accounts["east"])
    forget(run)
    with pytest.raises(Mistake, match="was not started on rental from here, and may still rent machines"):
        check_has_no_machines(run)


def launched(store: Store, fleet: dict[str, Any], status: Status | None, age_seconds: float = 3600.0) -> Run:
    run = new_run(store, program_job(fleet=fleet))
    run.record_launch(FleetLaunch(time.time() - age_seconds, "you@there", run.job.fleet.model_dump(mode="json")))
    if status is not None:
        run.finish(Result(status, "done", 1, 1.0))
    return run


@pytest.mark.parametrize(
    ("fleet", "age_seconds", "words"),
    [
        ({"local": {}}, 10.0, "is starting; stop it first: `packtrain stop job-1 --store "),
        (
            SSH,
            3600.0,
            "is waiting, and machines of ssh may come back to it; end them first: `packtrain down job-1 --store ",
        ),
    ],
)
def test_a_run_that_machines_may_come_to_is_not_removed(
    directory_store: Store, fleet: dict[str, Any], age_seconds: float, words: str
) -> None:
    with pytest.raises(Mistake, match=words):
        check_has_no_machines(launched(directory_store, fleet, None, age_seconds))


@pytest.mark.parametrize(("fleet", "status"), [({"local": {}}, None), ({"local": {}}, "failed"), (SSH, "stopped")])
def test_a_run_without_machines_may_be_removed(
    directory_store: Store, fleet: dict[str, Any], status: Status | None
) -> None:
    check_has_no_machines(launched(directory_store, fleet, status))


def test_a_running_run_is_not_removed(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.fleet.down.state_now", lambda _: "running")
    with pytest.raises(Mistake, match="job-1 is running; stop it first: `packtrain stop job-1 --store "):
        check_has_no_machines(new_run(directory_store), force=True)


@pytest.mark.usefixtures("processes")
def test_a_store_that_cannot_be_written_saves_no_machine(directory_store: Store, accounts: dict[str, Path]) -> None:
    store = FaultyStore(directory_store)
    run = started(store, accounts["east"])
    store.refuse("put", "put_if_absent")
    told: list[str] = []
    with pytest.raises(StoreError, match="the store is away"):
        take_down(run, never, told.append)
    assert told[0] == "could not ask job-1 to stop: the store is away"
    assert kinds_in(accounts["east"]) == []


@pytest.mark.usefixtures("processes")
def test_no_secret_is_in_what_a_launch_leaves(
    directory_store: Store, accounts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-4711")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-4711")
    run = started(directory_store, accounts["east"], environment=["WANDB_API_KEY"])
    take_down(run, never)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if b"canary-4711" in path.read_bytes()]


def test_a_launch_that_was_only_intended_is_no_error(directory_store: Store, accounts: dict[str, Path]) -> None:
    run = new_run(directory_store, program_job(fleet=rented(accounts["east"])))
    run.record_launch(FleetLaunch(time.time(), "somebody", run.job.fleet.model_dump(mode="json")))
    assert take_down(run, lambda _: None) == []
    assert state_of(run) == "stopped"


@pytest.mark.usefixtures("processes")
def test_a_finished_run_stays_finished(directory_store: Store, accounts: dict[str, Path]) -> None:
    run = started(directory_store, accounts["east"])
    run.finish(Result("finished", "done", 1, 1.0))
    answer = command("down", run.name, "--store", run.store.url)
    assert answer.exit_code == 0, answer.output
    assert f"{run.name} has no machines left. It is finished." in answer.output
    assert "resume" not in answer.output
    assert run.stop_request() is None


@pytest.mark.usefixtures("processes")
def test_machines_that_the_store_names_are_not_contacted_unasked(
    directory_store: Store, accounts: dict[str, Path]
) -> None:
    run = started(directory_store, accounts["east"])
    evil = rented(accounts["west"])
    run.record_launch(FleetLaunch(time.time(), "somebody", evil))
    calls: list[str] = []
    RentalProvider.on_call = staticmethod(calls.append)
    try:
        refused = command("down", run.name, "--store", run.store.url)
    finally:
        RentalProvider.on_call = staticmethod(lambda _: None)
    assert isinstance(refused.exception, Mistake)
    assert "was not started from here" in str(refused.exception)
    assert "--yes" in str(refused.exception)
    assert calls == []
    assert kinds_in(accounts["east"]) == ["machine", "network"]
    accepted = command("down", run.name, "--store", run.store.url, "--yes", "--json")
    assert accepted.exit_code == 0, accepted.output
    shown = json.loads(accepted.stdout)
    assert (shown["run"], shown["state"], len(shown["ended"])) == (run.name, "stopped", 2)


@pytest.mark.usefixtures("processes")
def test_the_end_of_a_run_gives_back_all_machines_of_this_person_and_contacts_no_others(
    tmp_path: Path, accounts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RentalFleet, "release", RentalFleet.give_back)
    run = started(open_store(str(tmp_path / "store"), create=True), accounts["east"])
    closed = Run(
        run.store, run.name, program_job(fleet=rented(tmp_path / "closed")).model_dump_json().encode(), run.code
    )
    remember(closed)
    for fleet in (rented(tmp_path / "closed"), rented(accounts["west"])):  # nobody here has started the second one
        run.record_launch(FleetLaunch(time.time(), "somebody", fleet))
    RentalProvider(accounts["west"]).create("network", label_of(run), {LABEL_TAG: label_of(run)})
    run.finish(Result("finished", "done", 1, 1.0))
    said: list[str] = []
    release(run, said.append)
    assert [kinds_in(account) for account in accounts.values()] == [[], ["network"]]
    left = [line for line in said if "may still cost money" in line]
    assert [("not started on rental from here" in line, "closed: no such account" in line) for line in left] == [
        (True, False), (False, True)
    ]  # fmt: skip


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("verb", "seen"), [("stop", "finished"), ("resume", "finished"), ("resume", "interrupted")])
def test_who_finds_that_a_run_has_ended_gives_its_machines_back(
    verb: str, seen: State, directory_store: Store, accounts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RentalFleet, "release", RentalFleet.give_back)
    monkeypatch.setattr(
        "packtrain.cli.jobs.state_of", lambda _: seen
    )  # `interrupted` if the result came a moment later
    run = started(directory_store, accounts["east"])
    run.finish(Result("finished", "done", 1, 1.0))
    done = command(verb, run.name, "--store", run.store.url)
    assert done.exit_code == 0, done.output
    assert kinds_in(accounts["east"]) == []


@pytest.mark.usefixtures("processes")
def test_the_result_of_a_run_that_ended_a_moment_ago_is_kept(directory_store: Store, accounts: dict[str, Path]) -> None:
    run = started(directory_store, accounts["east"])
    run.finish(Result("finished", "done", 1, 1.0))
    with pytest.raises(Mistake, match="job-1 is already complete"):
        reopen(run, refuse)
    assert run.result() is not None


@pytest.mark.usefixtures("processes")
def test_a_person_sees_which_machines_would_be_contacted(directory_store: Store) -> None:
    run = new_run(directory_store, program_job(fleet={"ssh": {"hosts": ["evil.example", "root@other"]}}))
    code, shown = in_terminal(["down", run.name, "--store", run.store.url], answer="")
    assert code == 2
    assert "job-1 was not started from here, and the store says how to reach its machines:" in shown
    assert '  ssh: {"machines":2,"hosts":["evil.example","root@other"]}' in shown
    assert "Contact them and end what this run has there? [y/N]" in shown
    assert "packtrain: nothing was ended" in shown
    assert run.stop_request() is None


def test_what_a_person_started_stays_trusted_when_the_run_moves(
    directory_store: Store, accounts: dict[str, Path]
) -> None:
    fleets = {name: program_job(fleet=rented(account)) for name, account in accounts.items()}
    run = new_run(directory_store, fleets["east"])
    assert not trusts_fleet(run, run.job.fleet.kind)
    remember(run)
    moved = Run(run.store, run.name, fleets["west"].model_dump_json().encode(), run.code)
    remember(moved)
    assert all(trusts_fleet(run, job.fleet.kind) for job in fleets.values())


def test_a_launch_of_an_unknown_fleet_is_a_damaged_record(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.record_launch(FleetLaunch(time.time(), "somebody", {"teapot": {}}))
    with pytest.raises(PacktrainError, match=r"launch of run job-1 .* is damaged, .*`packtrain down --all` finds"):
        take_down(run, never)


def test_a_machine_that_cannot_be_reached_is_named(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("far"))
    monkeypatch.setattr("packtrain.fleet.down._LEAVE_SECONDS", 0.0)
    monkeypatch.setattr("packtrain.fleet.down._POLL_SECONDS", 0.0)
    monkeypatch.setattr("packtrain.fleet.down.finish_unattended", lambda _: False)
    with pytest.raises(
        PacktrainError, match=r"job-1 is still running on host-of-far, .*run `packtrain down job-1` there"
    ):
        take_down(run, never)
    assert run.stop_request() is not None, "the machine will see it"


@pytest.mark.usefixtures("processes")
def test_down_ends_processes_and_resume_continues_the_run(tmp_path: Path) -> None:
    store, environment = tmp_path / "store", {"PACKTRAIN_CACHE": str(tmp_path / "cache")}
    job = write_program(tmp_path / "code", store, "{local: {}, price: 2.0}", UNTIL_RESUMED, "checkpoint: {every: 1 s}")
    begun = packtrain("run", job, "--detach", directory=tmp_path, environment=environment)
    assert begun.returncode == 0, begun.stderr
    run = open_run(open_store(str(store)), None)
    wait_until(lambda: last_step(run), "a commit")
    ended = packtrain("down", directory=tmp_path, environment=environment)
    assert ended.returncode == 0, ended.stderr
    assert "ending 1 node on this machine" in ended.stdout
    assert "counts-1 has no machines left. It is stopped." in ended.stdout
    assert "packtrain resume counts-1" in ended.stdout
    assert find_processes("python", run.name, run.store.url) == []
    again = packtrain("resume", "--detach", directory=tmp_path, environment=environment)
    assert again.returncode == 0, again.stderr
    wait_until(run.result, "the end of the run")
    assert state_of(run) == "finished"


def test_a_run_or_a_store_that_is_gone_leads_to_down_all(directory_store: Store, tmp_path: Path) -> None:
    for run, store in (("gone-1", directory_store.url), ("gone-1", str(tmp_path / "none"))):
        refused = command("down", run, "--store", store)
        assert isinstance(refused.exception, NotFound)
        assert str(refused.exception).endswith("; `packtrain down --all` finds machines without the store")


# All runs.


@pytest.fixture
def two_runs(processes: None, tmp_path: Path, accounts: dict[str, Path]) -> list[Run]:
    stores = [open_store(str(tmp_path / name), create=True) for name in ("mine", "theirs")]
    return [
        started(stores[0], accounts["east"], budget={"hours": 1}),
        started(stores[1], accounts["west"]),
    ]


def named(accounts: dict[str, Path], *words: str) -> Answer:
    places = ",".join(str(path) for path in accounts.values())
    return command("down", "--all", "--fleet", f"rental:{places}", *words)


def test_all_machines_are_listed_and_none_is_deleted_unasked(two_runs: list[Run], accounts: dict[str, Path]) -> None:
    listing = named(accounts, "--dry-run")
    assert listing.exit_code == 0, listing.output
    for word in ("east", "west", two_runs[0].name, "never", "machine", "network"):
        assert word in listing.output
    refused = named(accounts)
    assert isinstance(refused.exception, Mistake)
    assert "4 resources of 2 runs would be deleted; run this in a terminal to be asked, or pass --yes" in str(
        refused.exception
    )
    assert [len(kinds_in(account)) for account in accounts.values()] == [2, 2]


def test_all_machines_are_deleted_without_any_store(
    two_runs: list[Run], accounts: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("mine", "theirs"):
        shutil.rmtree(tmp_path / name)
    deleted = named(accounts, "--yes", "--json")
    assert deleted.exit_code == 0, deleted.output
    shown = json.loads(deleted.stdout)
    assert {(one["kind"], one["run"], one["place"]) for one in shown["deleted"]} == {
        (kind, run.name, place)
        for run, place in zip(two_runs, accounts, strict=True)
        for kind in ("machine", "network")
    }
    assert [kinds_in(account) for account in accounts.values()] == [[], []]
    assert named(accounts, "--yes").output == "No run has anything in rental east, rental west.\n"


def test_only_what_outlived_its_budget_is_expired(two_runs: list[Run], accounts: dict[str, Path]) -> None:
    assert json.loads(named(accounts, "--dry-run", "--json", "--expired").stdout)["found"] == []
    record = next(accounts["east"].glob("machine-*.json"))
    later = {**json.loads(record.read_text())}
    later["tags"]["packtrain-expires"] = "2020-01-01T00:00:00Z"
    record.write_text(json.dumps(later))
    found = json.loads(named(accounts, "--dry-run", "--json", "--expired").stdout)["found"]
    assert [(one["kind"], one["run"]) for one in found] == [("machine", two_runs[0].name)]
    assert named(accounts, "--expired", "--yes").exit_code == 0
    assert [len(kinds_in(account)) for account in accounts.values()] == [0, 2], "the rest of that run goes with it"


def test_a_place_that_does_not_answer_is_named_and_does_not_save_the_others(
    two_runs: list[Run], accounts: dict[str, Path], tmp_path: Path
) -> None:
    assert len(two_runs) == 2
    answer = named({**accounts, "closed": tmp_path / "closed"}, "--yes")
    assert answer.exit_code == 100
    assert "no answer: rental closed: " in answer.output
    assert [kinds_in(account) for account in accounts.values()] == [[], []]


def test_kinds_that_cannot_be_asked_are_named_with_the_reason(
    two_runs: list[Run], accounts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.fleet.down.FLEETS", {"rental": "parts.rental:RentalSettings"})
    refused = command("down", "--all")
    assert isinstance(refused.exception, Mistake)
    assert str(refused.exception) == f"no provider could be asked: rental: rental: no account; set {ACCOUNT}"
    nothing = take_inventory(())
    assert (nothing.resources, nothing.failed) == ([], False)
    assert nothing.unanswered == [("rental", f"rental: no account; set {ACCOUNT}")]
    monkeypatch.setenv(ACCOUNT, str(accounts["west"]))
    assert {one.run for one in take_inventory(()).resources} == {two_runs[1].name}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--all", "--fleet", "teapot"), "--fleet teapot: no such fleet; known: "),
        (("--all", "--fleet", "asw"), "--fleet asw: no such fleet; did you mean 'aws'?"),
        (("--all", "--fleet", "aws:us-east-11"), "--fleet aws:us-east-11: unknown region 'us-east-11'; did you mean"),
        (("--all", "--fleet", "local"), "local rents no machines; use `packtrain down RUN`"),
        (("--all", "--fleet", "rental"), "rental: no account"),
        (("--all", "job-1"), "omit RUN and --store"),
        (("job-1", "--expired"), "need --all"),
    ],
)
def test_a_wrong_request_is_refused(words: Sequence[str], text: str, accounts: dict[str, Path]) -> None:
    refused = command("down", *words)
    assert isinstance(refused.exception, Mistake), refused.output
    assert text in str(refused.exception)
    assert accounts


# A client that is killed.

MOMENTS = [f"{when} {call}" for call in ("list", "create network", "create machine") for when in ("before", "after")]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "find", [lambda run: ("down", run.name, "--store", run.store.url), lambda _: ("down", "--all")]
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_whenever_a_client_is_killed_down_finds_what_it_left(
    moment: str,
    find: Callable[[Run], Sequence[str]],
    directory_store: Store,
    accounts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = new_run(directory_store, program_job(fleet=rented(accounts["east"], machines=2)))
    remember(run)
    client = os.fork()
    if client == 0:
        RentalProvider.on_call = staticmethod(
            lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == moment else None
        )
        start(run, tied=False, say=lambda _: None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(client, 0)[1]) == -signal.SIGKILL
    monkeypatch.setenv(ACCOUNT, str(accounts["east"]))
    monkeypatch.setattr("packtrain.fleet.down.FLEETS", {"rental": "parts.rental:RentalSettings"})
    answer = command(*find(run), "--yes")
    assert answer.exit_code == 0, answer.output
    assert kinds_in(accounts["east"]) == []


@pytest.mark.usefixtures("processes")
def test_the_same_from_python(
    directory_store: Store, accounts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(directory_store, accounts["east"])
    handle = pt.open(run.name, run.store.url)
    monkeypatch.setenv("XDG_STATE_HOME", str(accounts["west"] / "state"))
    with pytest.raises(Mistake, match="then pass trust_fleet=True"):
        handle.down()
    assert len(handle.down(trust_fleet=True)) == 2
    assert handle.state() == "stopped"
