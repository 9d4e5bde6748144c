"""Nodes as fleets start them, each a process of its own, with torch's launcher and programs that need no torch.

Moments that cannot be hit with real processes come last: there a node lives in the test and looks at the world
when it is told to, and its workers end when the test says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from packtrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_UNFINISHED
from packtrain.node.causes import FAILURE
from packtrain.node.node import Node
from packtrain.node.program import ProgramCheckpoints
from packtrain.node.telemetry import machine_facts
from packtrain.observe.history import read_points
from packtrain.run.checkpoint import committed, fetch_newest
from packtrain.run.records import Result
from packtrain.run.run import Run
from packtrain.store import Store, StoreError, open_store
from packtrain.train.control import CONTROL_VARIABLE
from parts.faulty import FaultyStore
from parts.nodes import fake_node, look_until_settled
from parts.proxy import HANG, Proxy
from parts.runs import a_generation, a_lease, new_run, program_job, read_files, recipe_job
from parts.s3 import fresh_location

PATIENCE_SECONDS = 120.0

SAY_WHO = """
import os
print("I am", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "at", os.environ["LOCAL_RANK"], flush=True)
"""
# Works until it is asked to stop, and takes a while to write its last words.
WORK = """
import os, pathlib, signal, sys, time
directory, rank = pathlib.Path(os.environ["PACKTRAIN_CHECKPOINTS"]), os.environ.get("RANK", "0")
if (directory / "last").exists():
    sys.exit()

def leave(number, frame):
    if rank == "0":
        time.sleep(1.5)
        (directory / "last").write_text("words")
    sys.exit()

signal.signal(signal.SIGTERM, leave)
(directory / "state").write_text("some")
(pathlib.Path(os.environ["SCRATCH"]) / rank).touch()
time.sleep(600)
"""


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@dataclass
class Machine:
    """This one, with a cache and a store of the test's own, and what was started on it."""

    directory: Path
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return open_store(str(self.directory / "store"), create=True)

    @property
    def scratch(self) -> Path:
        return self.directory / "scratch"

    def run_of(self, script: str, **fields: Any) -> Run:
        return new_run(self.store, program_job(checkpoint={"every": "1 h"}, **fields), script)

    @property
    def log(self) -> str:
        return (self.directory / "node.log").read_text()

    def start(self, run: Run, **variables: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PACKTRAIN_CACHE": str(self.directory / "cache"),
            "SCRATCH": str(self.scratch),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        with (self.directory / "node.log").open("ab") as log:
            node = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "packtrain",
                    "node",
                    run.name,
                    "--store",
                    run.store.url,
                    "--code",
                    run.code_digest,
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )
        self.nodes.append(node)
        return node

    def exit_code(self, node: subprocess.Popen[bytes]) -> int:
        try:
            return node.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the node does not end:\n{self.log}")

    def working(self, *ranks: int) -> bool:
        return all((self.scratch / str(rank)).exists() for rank in ranks)

    def processes(self) -> list[psutil.Process]:
        """The fork server, launchers, workers and what they started."""
        found = []
        for process in psutil.process_iter():
            try:
                mark = process.environ().get(CONTROL_VARIABLE, "")
                if mark.startswith(str(self.directory)) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    made.scratch.mkdir()
    yield made
    for node in made.nodes:
        node.kill()
        node.wait()
    for process in made.processes():
        process.kill()


def committed_files(run: Run, scratch: Path) -> dict[str, bytes]:
    scratch.mkdir()
    fetch_newest(run, scratch, pytest.fail)
    return read_files(scratch)


def said(run: Run) -> list[tuple[int | None, str]]:
    return sorted((line.rank, line.text) for line in run.log_lines().read() if line.text.startswith("I am"))


@pytest.mark.usefixtures("processes")
def test_a_program_that_exits_with_code_0_finishes_the_run(machine: Machine) -> None:
    save = "\nimport pathlib; (pathlib.Path(os.environ['PACKTRAIN_CHECKPOINTS']) / os.environ['RANK']).write_text('x')"
    run = machine.run_of(SAY_WHO + save, fleet={"local": {}, "workers": 2})
    assert machine.exit_code(machine.start(run)) == EXIT_DONE
    result = run.result()
    assert result is not None
    assert (result.status, result.reason) == ("finished", "the program exited with code 0")
    assert said(run) == [(0, "I am 0 of 2 at 0"), (1, "I am 1 of 2 at 1")]
    assert committed_files(run, machine.directory / "back") == {"0": b"x", "1": b"x"}
    [lease] = run.leases()
    assert (lease.left, lease.facts) == (True, machine_facts())
    assert machine.processes() == []
    assert list((machine.directory / "cache" / "nodes").iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_a_program_that_fails_is_restarted_and_then_the_run_fails(machine: Machine) -> None:
    script = "import sys; print('it broke', file=sys.stderr); sys.exit(3)"
    run = machine.run_of(script, fleet={"local": {}, "workers": 1, "failures": 1})
    assert machine.exit_code(machine.start(run)) == EXIT_FAILED
    result = run.result()
    assert result is not None
    assert result.status == "failed"
    assert result.reason.startswith("the program exited with code 3: it broke; see `packtrain logs`")
    assert result.reason.endswith("(after 1 restart)")
    reasons = [generation.reason for generation in run.generations()]
    assert reasons[0] == "start"
    assert len(reasons) == 2
    assert reasons[1].startswith(FAILURE)
    broken = [line.generation for line in run.log_lines().read() if line.text == "it broke"]
    assert sorted(broken) == [1, 2]
    assert machine.processes() == []


@pytest.mark.usefixtures("processes")
def test_a_stop_commits_what_the_program_last_wrote_and_resume_restores_it(machine: Machine) -> None:
    run = machine.run_of(WORK)
    node = machine.start(run)
    until(lambda: machine.working(0), "the worker")
    run.request_stop("enough")
    assert machine.exit_code(node) == EXIT_STOPPED
    result = run.result()
    assert result is not None
    assert (result.status, result.reason, result.step) == ("stopped", "enough", 1)
    assert committed_files(run, machine.directory / "back") == {"state": b"some", "last": b"words"}

    run.clear_end()
    assert machine.exit_code(machine.start(run)) == EXIT_DONE
    assert [generation.reason for generation in run.generations()] == ["start", "resumed"]
    assert len(committed(run)) == 1
    assert machine.processes() == []


# As nanoGPT: it starts from scratch unless it is told to resume, and fails once.
RESUMES = """
import os, pathlib, sys
from packtrain import log
state = pathlib.Path(os.environ["PACKTRAIN_CHECKPOINTS"]) / "state"
first = int(state.read_text()) if sys.argv[1:] == ["--init_from=resume"] else 0
for step in range(first + 1, first + 21):
    log(loss=1 / step, step=step)
state.write_text(str(step))
sys.exit(os.environ["PACKTRAIN_GENERATION"] == "1")
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("resume", [[], ["--init_from=resume"]])
def test_a_program_that_resumes_only_if_it_is_told_to_is_told_after_a_restore(
    machine: Machine, resume: list[str]
) -> None:
    run = machine.run_of(RESUMES, program={"command": ["train.py"], "resume": resume})
    assert machine.exit_code(machine.start(run)) == EXIT_DONE
    assert [point.step for point in read_points(run) if point.kind == "log"] == list(range(1, 41 if resume else 21))
    warned = [event.text for event in run.events().read() if event.text.startswith("the program did not resume")]
    assert len(warned) == (0 if resume else 1)
    assert [checkpoint.reached for checkpoint in committed(run)] == ([20, 40] if resume else [20, 20])


@pytest.mark.usefixtures("processes")
def test_a_program_that_starts_again_and_fails_is_given_up_although_it_commits(machine: Machine) -> None:
    script = RESUMES.replace('os.environ["PACKTRAIN_GENERATION"] == "1"', "1")
    run = machine.run_of(script, program=["train.py"], fleet={"local": {}, "workers": 1, "failures": 2})
    assert machine.exit_code(machine.start(run)) == EXIT_FAILED
    assert [generation.restarted for generation in run.generations()] == [False, False, True]
    result = run.result()
    assert result is not None and result.reason.endswith("(after 2 restarts from the beginning)")


@pytest.mark.usefixtures("processes")
def test_a_preempted_machine_commits_and_leaves_the_run_unfinished(machine: Machine) -> None:
    run = machine.run_of(WORK)
    node = machine.start(run)
    until(lambda: machine.working(0), "the worker")
    node.send_signal(signal.SIGTERM)
    assert machine.exit_code(node) == EXIT_UNFINISHED
    assert run.result() is None
    assert committed_files(run, machine.directory / "back") == {"state": b"some", "last": b"words"}
    assert [node.left for node in run.leases()] == [True]
    assert machine.processes() == []


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("machines", [1, 2])
def test_a_machine_whose_store_is_gone_leaves_when_it_is_told_to(machines: int, machine: Machine) -> None:
    """Also while it waits for another machine, and has no workers."""
    run = machine.run_of(WORK, fleet={"local": {"machines": machines}})
    node = machine.start(run, PACKTRAIN_NOTICE_SECONDS="5")
    until((lambda: machine.working(0)) if machines == 1 else run.leases, "the machine at work")
    (machine.directory / "store").rename(machine.directory / "unmounted")
    until(lambda: "is not there" in machine.log, "the node to complain")
    node.send_signal(signal.SIGTERM)
    assert machine.exit_code(node) == EXIT_UNFINISHED
    assert machine.processes() == []


@pytest.mark.usefixtures("processes")
def test_a_machine_that_is_stuck_in_a_request_to_its_store_ends_within_its_grace(
    machine: Machine, s3_proxy: Proxy
) -> None:
    """The thread that runs Python's signal handlers waits for the answer, and runs none meanwhile."""
    run = new_run(open_store(fresh_location()), program_job(fleet={"local": {"machines": 2}}))
    node = machine.start(run, PACKTRAIN_NOTICE_SECONDS="3")
    until(lambda: "has joined" in machine.log, "the machine at work")
    s3_proxy.hang_seconds, s3_proxy.fault = 10 * PATIENCE_SECONDS, lambda *_: HANG
    until(lambda: sum(fault == HANG for *_, fault in s3_proxy.requests) > 2, "requests without an answer")
    node.send_signal(signal.SIGTERM)
    assert machine.exit_code(node) == EXIT_UNFINISHED
    assert "failed: preemption notice: SIGTERM, and the store does not answer" in machine.log


@pytest.mark.usefixtures("processes")
def test_a_damaged_record_in_the_store_does_not_end_the_workers(machine: Machine) -> None:
    run = machine.run_of(WORK)
    node = machine.start(run)
    until(lambda: machine.working(0), "the worker")
    run.store.put(run.key("generations/000002.json"), b"{")
    until(lambda: "damaged" in machine.log, "the node to complain")
    run.store.delete(run.key("generations/000002.json"))
    run.request_stop("enough")
    assert machine.exit_code(node) == EXIT_STOPPED
    assert len(run.generations()) == 1


@pytest.mark.usefixtures("processes")
def test_a_machine_leaves_in_order_although_a_record_in_the_store_is_damaged(machine: Machine) -> None:
    """A look ends at the record, before it comes to the notice."""
    run = machine.run_of(WORK)
    node = machine.start(run, PACKTRAIN_NOTICE_SECONDS="5")
    until(lambda: machine.working(0), "the worker")
    run.store.put(run.key("stop.json"), b"{")
    until(lambda: "damaged" in machine.log, "the node to complain")
    node.send_signal(signal.SIGTERM)
    assert machine.exit_code(node) == EXIT_UNFINISHED
    assert "and the store does not answer" not in machine.log
    assert committed_files(run, machine.directory / "back")["last"] == b"words"
    assert [node.left for node in run.leases()] == [True]
    assert machine.processes() == []


@pytest.mark.usefixtures("processes")
def test_a_stop_request_is_answered_even_by_a_preempted_machine(machine: Machine) -> None:
    """The person who asked for the stop waits for the result."""
    run = machine.run_of(WORK)
    node = machine.start(run)
    until(lambda: machine.working(0), "the worker")
    run.request_stop("enough")
    node.send_signal(signal.SIGTERM)
    assert machine.exit_code(node) == EXIT_STOPPED
    assert machine.processes() == []


@pytest.mark.usefixtures("processes")
def test_launcher_and_workers_end_with_a_killed_node(machine: Machine) -> None:
    run = machine.run_of(WORK, fleet={"local": {}, "workers": 2})
    node = machine.start(run)
    until(lambda: machine.working(0, 1), "the workers")
    assert len(machine.processes()) == 4, "the fork server, the launcher and two workers"
    node.kill()
    until(lambda: machine.processes() == [], "the end of all processes")
    assert run.result() is None


@pytest.mark.usefixtures("processes")
def test_two_machines_form_one_generation_and_their_common_failure_counts_once(machine: Machine) -> None:
    script = "import os, sys\nif os.environ['PACKTRAIN_GENERATION'] == '1': sys.exit(3)\n" + SAY_WHO
    run = machine.run_of(script, fleet={"local": {"machines": 2}, "workers": 1, "failures": 1})
    nodes = [machine.start(run) for _ in range(2)]
    assert [machine.exit_code(node) for node in nodes] == [EXIT_DONE, EXIT_DONE]
    assert said(run) == [(0, "I am 0 of 2 at 0"), (1, "I am 1 of 2 at 0")]
    generations = run.generations()
    assert [len(generation.members) for generation in generations] == [2, 2]
    assert machine.processes() == []


@pytest.mark.usefixtures("processes")
def test_a_stop_of_two_machines_waits_for_the_last_commit_of_the_first(machine: Machine) -> None:
    run = machine.run_of(WORK, fleet={"local": {"machines": 2}, "workers": 1})
    nodes = [machine.start(run) for _ in range(2)]
    until(lambda: machine.working(0, 1), "the workers")
    run.request_stop("enough")
    assert [machine.exit_code(node) for node in nodes] == [EXIT_STOPPED, EXIT_STOPPED]
    assert committed_files(run, machine.directory / "back") == {"state": b"some", "last": b"words"}
    assert machine.processes() == []


# One look at a time.


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stepped:
    """A node that looks at the world only when it is told to."""

    node: Node
    store: FaultyStore
    clock: Clock

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            look_until_settled(self.node)
            self.clock.now += 0.1

    def end_workers(self, code: int) -> None:
        assert self.node.group is not None
        launcher: Any = self.node.group.launcher
        launcher.code = code

    def checkpoint(self, **files: str) -> None:
        for name, text in files.items():
            (self.node.directory.path / "checkpoints" / name).write_text(text)


@pytest.fixture
def stepped(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Stepped]]:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    nodes: list[Node] = []

    def make(run: Run) -> Stepped:
        store = FaultyStore(directory_store)
        clock = Clock()
        nodes.append(fake_node(Run(store, run.name), clock=clock))
        return Stepped(nodes[-1], store, clock)

    yield make
    for node in nodes:
        node.lease.leave()


def with_another(run: Run, name: str, node: Node) -> None:
    """The node sees another machine renew its lease."""
    for _ in range(2):
        before = run.lease(name)
        run.renew(a_lease(name, 1 + (before.renewal if before else 0), joined=2, job=run.job_digest))
        node.assembly.look_at_all()


def test_a_result_that_the_store_refused_is_written_later_and_nothing_restarts(
    directory_store: Store, stepped: Callable[..., Stepped]
) -> None:
    run = new_run(directory_store)
    one = stepped(run)
    one.look(2)
    one.end_workers(0)
    one.store.refuse("put_if_absent")
    for _ in range(3):
        with pytest.raises(StoreError):
            one.look()
    one.store.refuse()
    one.look()
    result = run.result()
    assert result is not None
    assert result.status == "finished"
    assert len(run.generations()) == 1


def test_the_programs_directory_is_restored_once(
    directory_store: Store, stepped: Callable[..., Stepped], monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = []
    original = ProgramCheckpoints.restore

    def restore(checkpoints: ProgramCheckpoints, generation: int, is_first: bool) -> None:
        restored.append(1)
        original(checkpoints, generation, is_first)

    monkeypatch.setattr(ProgramCheckpoints, "restore", restore)
    one = stepped(new_run(directory_store, program_job()))
    one.look(4)
    assert one.node.is_working
    assert len(restored) == 1


def test_a_commit_that_comes_too_late_does_not_end_the_node(
    directory_store: Store, stepped: Callable[..., Stepped], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next generation begins between the look at the store and the commit."""
    run = new_run(directory_store, program_job(checkpoint={"every": "1 s"}))
    one = stepped(run)
    one.look(2)
    one.checkpoint(state="some")
    one.clock.now += 1
    seen_first = iter([run.latest_generation()])  # when the node looks; the commit looks again
    original = Run.latest_generation
    monkeypatch.setattr(
        Run, "latest_generation", lambda run, earlier=None: next(seen_first, None) or original(run, earlier)
    )
    run.propose(a_generation(2, "another"))
    one.look()
    assert committed(run) == []
    one.look()
    assert one.node.group is None
    assert run.result() is None


def test_a_commit_that_outlives_the_end_of_the_run_keeps_its_files(
    directory_store: Store, stepped: Callable[..., Stepped], tmp_path: Path
) -> None:
    """Another node writes the result while the manifest is on its way, and this node cleans up as it leaves."""
    run = new_run(directory_store, program_job(checkpoint={"every": "1 s"}))
    one = stepped(run)
    one.look(2)
    one.checkpoint(state="some")
    one.clock.now += 1
    held, released = threading.Event(), threading.Event()

    def hold(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("/manifest.json"):
            held.set()
            released.wait(PATIENCE_SECONDS)

    one.store.fault = hold
    one.node.look()
    assert one.node.group is not None
    committing = one.node.group.committing
    assert committing is not None
    assert held.wait(PATIENCE_SECONDS)
    run.finish(Result("failed", "another machine said so", 0, 0.0))
    one.node.is_over = True
    one.node.work()
    released.set()
    committing.result()
    assert committed_files(run, tmp_path / "fetched") == {"state": b"some"}


def test_an_output_that_no_list_names_is_removed_when_the_run_ends(
    directory_store: Store, stepped: Callable[..., Stepped]
) -> None:
    """As what a dead machine has sent last."""
    run = new_run(directory_store, program_job(outputs=["out"]))
    one = stepped(run)
    one.look(2)
    run.store.put(run.key("outputs/files/000001-0123456789ab/out/late"), b"late")
    one.end_workers(0)
    one.look(2)
    assert run.result() is not None
    one.node.work()
    assert [entry.key for entry in run.store.list(run.key("outputs"))] == [
        run.key("outputs/lists/000001-000000001.json")
    ]


def test_a_failure_that_another_node_has_already_answered_is_not_answered_again(
    directory_store: Store, stepped: Callable[..., Stepped]
) -> None:
    run = new_run(directory_store, program_job(fleet={"local": {"machines": 2}, "failures": 1}))
    one = stepped(run)
    with_another(run, "other", one.node)
    one.look(2)
    one.end_workers(1)
    group = one.node.group
    assert group is not None
    run.propose(replace(group.generation, number=2, reason=f"{FAILURE}as the other saw it"))
    one.node.after_exit(group, 1)
    assert [generation.number for generation in run.generations()] == [1, 2]
    assert run.result() is None


def test_workers_that_exit_with_code_0_without_a_result_are_restarted(
    directory_store: Store, stepped: Callable[..., Stepped]
) -> None:
    """A recipe's workers end so when somebody signals one of them: all commit and leave."""
    run = new_run(directory_store, recipe_job(fleet={"local": {"machines": 2}}))
    one = stepped(run)
    with_another(run, "other", one.node)
    one.look(2)
    one.end_workers(0)
    one.look()
    with_another(run, "other", one.node)
    one.look()
    assert [generation.rank_of("other") for generation in run.generations()] == [1, 1]


def test_the_next_generation_is_proposed_once_there_are_enough_machines(
    directory_store: Store, stepped: Callable[..., Stepped]
) -> None:
    run = new_run(directory_store, program_job(fleet={"local": {"machines": 2}}))
    one = stepped(run)
    with_another(run, "other", one.node)
    one.look(2)
    run.renew(a_lease("other", 3, joined=2, left=True))
    one.end_workers(1)
    one.look(3)
    assert len(run.generations()) == 1
    with_another(run, "third", one.node)
    one.look()
    assert [generation.rank_of("third") for generation in run.generations()] == [None, 1]
    assert run.generations()[-1].reason.startswith(FAILURE)
