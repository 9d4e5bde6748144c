from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from packtrain.errors import AlreadyJoined, Mistake
from packtrain.node.directory import NodeDirectory, NodeSlot, owner_of, take_over_leftovers
from packtrain.node.launcher import kill_marked
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.system import nodes_directory
from packtrain.train.control import CONTROL_VARIABLE
from parts.faulty import FaultyStore
from parts.runs import a_generation, a_lease, new_run, program_job
from parts.sandbox import wait_until

LIVING = """
import sys, time
from packtrain.node.directory import NodeDirectory
from packtrain.run.run import Run
from packtrain.store import open_store
directory = NodeDirectory.create(Run(open_store(sys.argv[1]), sys.argv[2]), "dead")
logs = directory.path / "000002" / "logs" / "x" / "attempt_0" / "0"
logs.mkdir(parents=True)
(logs / "stdout.log").write_text("one\\ntwo\\nthree\\nand a half")
print(directory.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(directory_store: Store) -> Run:
    run = new_run(directory_store)
    run.propose(a_generation(1, "dead"))
    run.propose(a_generation(2, "first", "dead", workers=2))
    run.renew(a_lease("dead", 7))
    return run


def living(run: Run) -> tuple[subprocess.Popen[bytes], Path]:
    process = subprocess.Popen([sys.executable, "-c", LIVING, run.store.url, run.name], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().decode().strip())


def killed(run: Run) -> Path:
    process, directory = living(run)
    process.kill()
    process.wait()
    return directory


def texts(run: Run) -> list[tuple[int | None, str]]:
    return sorted((line.rank, line.text) for line in run.log_lines().read())


def ignore(kind: str, text: str) -> None:
    pass


@pytest.mark.usefixtures("processes")
def test_the_directory_of_a_live_node_is_left_alone(run: Run) -> None:
    process, directory = living(run)
    take_over_leftovers(run, ignore)
    assert directory.exists()
    assert texts(run) == []
    process.kill()
    process.wait()


@pytest.mark.usefixtures("processes")
def test_the_last_output_of_a_dead_node_is_recovered_and_its_directory_removed(run: Run) -> None:
    directory = killed(run)
    told: list[str] = []
    take_over_leftovers(run, lambda _, text: told.append(text))
    assert texts(run) == [(2, "and a half"), (2, "one"), (2, "three"), (2, "two")]
    assert not directory.exists()
    node = run.lease("dead")
    assert node is not None
    assert node.left, "nobody needs to wait for its lease to run out"
    assert told == ["dead died on this machine; recovered 4 more lines of its logs"]


@pytest.mark.usefixtures("processes")
def test_lines_that_the_store_already_has_are_not_recovered_again(run: Run) -> None:
    from packtrain.run.records import LogLine

    writer = run.log_writer("dead")
    for text in ("one", "two"):
        writer.append(LogLine(1.0, 2, "dead", 2, "out", text))
    writer.flush()
    killed(run)
    take_over_leftovers(run, ignore)
    assert [text for _, text in texts(run)] == ["and a half", "one", "three", "two"]


@pytest.mark.usefixtures("processes")
def test_a_directory_is_kept_until_the_store_is_back(run: Run) -> None:
    directory = killed(run)
    away = FaultyStore(run.store)
    away.url = run.store.url
    away.refuse("put")
    take_over_leftovers(Run(away, run.name), ignore)
    assert directory.exists()
    take_over_leftovers(run, ignore)
    assert not directory.exists()
    assert len(texts(run)) == 4


def start_orphan(directory: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, CONTROL_VARIABLE: str(directory / "000002" / "control")}
    return subprocess.Popen(["sleep", "600"], env=environment)


@pytest.mark.usefixtures("processes")
def test_processes_of_a_dead_node_are_killed(run: Run) -> None:
    directory = killed(run)
    orphan = start_orphan(directory)
    take_over_leftovers(run, ignore)
    orphan.wait(30)
    assert not psutil.pid_exists(orphan.pid)


@pytest.mark.usefixtures("processes")
def test_a_process_that_is_just_being_executed_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says that its environment is empty, for a moment that is longer on a busy machine."""
    orphan = start_orphan(tmp_path)
    environ, early = psutil.Process.environ, [orphan.pid] * 3
    monkeypatch.setattr(psutil.Process, "environ", lambda it: {} if it.pid in early and early.pop() else environ(it))
    kill_marked(tmp_path)
    orphan.wait(30)
    assert early == []


@pytest.mark.usefixtures("processes")
def test_a_process_with_the_number_of_an_earlier_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = start_orphan(tmp_path)
    earlier = psutil.Process(orphan.pid)
    earlier._ident = (orphan.pid, 1.0)  # type: ignore[attr-defined]
    monkeypatch.setattr(psutil, "_pmap", {orphan.pid: earlier})
    kill_marked(tmp_path)
    orphan.wait(30)


@pytest.mark.usefixtures("processes")
def test_directories_of_another_store_are_kept_for_a_week(run: Run, tmp_path: Path) -> None:
    other = new_run(open_store(str(tmp_path / "other"), create=True))
    directory = killed(other)
    take_over_leftovers(run, ignore)
    assert directory.exists()
    old = time.time() - 30 * 24 * 3600
    os.utime(directory, (old, old))
    take_over_leftovers(run, ignore)
    assert not directory.exists()


def moved_to(directory: Path, hostname: str) -> None:
    owner = json.loads((directory / "owner.json").read_text())
    (directory / "owner.json").write_text(json.dumps({**owner, "hostname": hostname}))


@pytest.mark.usefixtures("processes")
def test_directories_of_another_machine_are_left_alone(run: Run) -> None:
    """They may share a cache where each knows of its own locks alone."""
    directory = killed(run)
    moved_to(directory, "another-machine")
    old = time.time() - 30 * 24 * 3600
    for _ in range(2):
        take_over_leftovers(run, ignore)
        assert directory.exists()
        assert (node := run.lease("dead")) is not None
        assert not node.left
        os.utime(directory, (old, old))  # a run of weeks makes no new folder there


@pytest.mark.usefixtures("processes")
def test_directories_of_another_machine_that_died_long_ago_are_removed(run: Run) -> None:
    directory = killed(run)
    moved_to(directory, "another-machine")
    old = time.time() - 30 * 24 * 3600
    os.utime(directory, (old, old))
    os.utime(Path(run.store.url) / run.key("nodes/dead.json"), (old, old))
    take_over_leftovers(run, ignore)
    assert not directory.exists()
    assert len(texts(run)) == 4


def test_directories_can_be_created_during_a_takeover(run: Run) -> None:
    over = threading.Event()

    def keep_taking_over() -> None:
        while not over.is_set():
            take_over_leftovers(run, ignore)

    takeover = threading.Thread(target=keep_taking_over)
    takeover.start()
    try:
        for number in range(50):
            directory = NodeDirectory.create(run, f"n{number}")
            assert owner_of(directory.path) is not None
            directory.remove()
    finally:
        over.set()
        takeover.join()


def test_a_file_system_without_locks_is_refused_with_advice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("packtrain.files.fcntl.flock", unsupported)
    with pytest.raises(Mistake, match=r"No locks available\); set PACKTRAIN_CACHE to a directory on a local disk"):
        NodeDirectory.create(run, "mine")
    assert list(nodes_directory().iterdir()) == []


def test_a_directory_is_removed_with_its_node(run: Run) -> None:
    directory = NodeDirectory.create(run, "mine")
    owner = owner_of(directory.path)
    assert owner is not None
    assert (owner.run, owner.node) == (run.name, "mine")
    directory.remove()
    assert list(nodes_directory().iterdir()) == []


# How many nodes of a run a machine has.


def test_a_machine_has_one_node_of_a_run(directory_store: Store) -> None:
    run, other = (new_run(directory_store, program_job(fleet={"ssh": {"hosts": ["a", "b"]}})) for _ in range(2))
    slots = [NodeSlot(run), NodeSlot(other)]
    with pytest.raises(AlreadyJoined, match=r"job-1 already has its node on this machine"):
        NodeSlot(run, patience=0)
    slots[0].close()
    slots[0].close()
    slots += [NodeSlot(run, patience=0)]
    for slot in slots:
        slot.close()
    assert list(nodes_directory().iterdir()) == []


def test_a_store_that_is_named_by_another_path_is_the_same_for_the_slot(directory_store: Store, tmp_path: Path) -> None:
    run = new_run(directory_store, program_job(fleet={"ssh": {"hosts": ["a"]}}))
    (tmp_path / "link").symlink_to(directory_store.url)
    slot = NodeSlot(run)
    with pytest.raises(AlreadyJoined):
        NodeSlot(Run(open_store(str(tmp_path / "link")), run.name), patience=0)
    slot.close()


def test_the_nodes_of_a_local_fleet_stand_for_as_many_machines_and_no_more(directory_store: Store) -> None:
    run = new_run(directory_store, program_job(fleet={"local": {"machines": "1..2"}}))
    slots = [NodeSlot(run), NodeSlot(run)]
    with pytest.raises(AlreadyJoined):
        NodeSlot(run, patience=0)
    slots.pop().close()
    slots.append(NodeSlot(run, patience=0))
    for slot in slots:
        slot.close()


def test_a_node_that_joins_while_another_leaves_waits_for_it(run: Run) -> None:
    leaving = NodeSlot(run)
    threading.Timer(0.3, leaving.close).start()
    NodeSlot(run).close()


@pytest.mark.usefixtures("processes")
def test_only_one_of_many_clients_that_start_a_node_at_the_same_moment_succeeds(run: Run) -> None:
    script = (
        "import sys\nfrom packtrain.node.directory import NodeSlot\nfrom packtrain.run.run import Run\n"
        "from packtrain.store import open_store\nsys.stdin.readline()\n"
        f"slot = NodeSlot(Run(open_store({run.store.url!r}), {run.name!r}), patience=0)\nprint('joined', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for _ in range(4)
    ]
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(b"\n")
        client.stdin.flush()
    wait_until(lambda: sum(client.poll() is not None for client in clients) == 3, "the others to be refused")
    [winner] = [client for client in clients if client.poll() is None]
    winner.kill()
    said = [client.communicate()[0] for client in clients]
    assert sorted(said) == [b"", b"", b"", b"joined\n"]
    take_over_leftovers(run, lambda *_: None)
    assert list(nodes_directory().iterdir()) == [], "the slot of a node that was killed is removed"
