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

from packtrain.errors import Mistake
from packtrain.node import directory as homes_module
from packtrain.node.directory import Home, remove_orphans, sweep
from packtrain.run.checkpoint import commit, committed
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.system import nodes_directory
from packtrain.train.control import CONTROL_VARIABLE
from parts.faulty import FaultyStore
from parts.runs import a_generation, a_lease, new_run

LIVING = """
import sys, time
from packtrain.node.directory import Home
from packtrain.run.run import Run
from packtrain.store import open_store
home = Home.make(Run(open_store(sys.argv[1]), sys.argv[2]), "dead")
logs = home.path / "000002" / "logs" / "x" / "attempt_0" / "0"
logs.mkdir(parents=True)
(logs / "stdout.log").write_text("one\\ntwo\\nthree\\nand a half")
print(home.path, flush=True)
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
    process, home = living(run)
    process.kill()
    process.wait()
    return home


def texts(run: Run) -> list[tuple[int | None, str]]:
    return sorted((line.rank, line.text) for line in run.log_lines().read())


def ignore(kind: str, text: str) -> None:
    pass


def test_the_home_of_a_lease_that_lives_is_left_alone(run: Run) -> None:
    process, home = living(run)
    sweep(run, ignore)
    assert home.exists()
    assert texts(run) == []
    process.kill()
    process.wait()


def test_what_a_dead_node_wrote_last_is_kept_and_its_home_removed(run: Run) -> None:
    home = killed(run)
    told: list[str] = []
    sweep(run, lambda _, text: told.append(text))
    assert texts(run) == [(2, "and a half"), (2, "one"), (2, "three"), (2, "two")]
    assert not home.exists()
    node = run.lease("dead")
    assert node is not None
    assert node.left, "nobody needs to wait for its lease to run out"
    assert told == ["dead was found dead on this machine; 4 more lines of its logs are kept"]


def test_lines_that_are_in_the_store_already_do_not_come_twice(run: Run) -> None:
    from packtrain.run.records import LogLine

    writer = run.log_writer("dead")
    for text in ("one", "two"):
        writer.append(LogLine(1.0, 2, "dead", 2, "out", text))
    writer.flush()
    killed(run)
    sweep(run, ignore)
    assert [text for _, text in texts(run)] == ["and a half", "one", "three", "two"]


def test_a_home_waits_for_the_store(run: Run) -> None:
    home = killed(run)
    away = FaultyStore(run.store)
    away.url = run.store.url
    away.refuse("put")
    sweep(Run(away, run.name), ignore)
    assert home.exists()
    sweep(run, ignore)
    assert not home.exists()
    assert len(texts(run)) == 4


def test_processes_that_a_dead_node_left_are_ended(run: Run) -> None:
    home = killed(run)
    environment = {**os.environ, CONTROL_VARIABLE: str(home / "000002" / "control")}
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    sweep(run, ignore)
    orphan.wait(30)
    assert not psutil.pid_exists(orphan.pid)


def test_homes_of_another_store_are_kept_for_a_while(run: Run, tmp_path: Path) -> None:
    other = new_run(open_store(str(tmp_path / "other")))
    home = killed(other)
    sweep(run, ignore)
    assert home.exists()
    old = time.time() - 30 * 24 * 3600
    os.utime(home, (old, old))
    sweep(run, ignore)
    assert not home.exists()


def moved_to(home: Path, hostname: str) -> None:
    owner = json.loads((home / "owner.json").read_text())
    (home / "owner.json").write_text(json.dumps({**owner, "hostname": hostname}))


def test_what_is_of_another_machine_is_left_to_it(run: Run) -> None:
    """They may share a cache where each knows of its own locks alone."""
    home = killed(run)
    moved_to(home, "another-machine")
    old = time.time() - 30 * 24 * 3600
    for _ in range(2):
        sweep(run, ignore)
        assert home.exists()
        assert (node := run.lease("dead")) is not None
        assert not node.left
        os.utime(home, (old, old))  # a run of weeks makes no new folder there


def test_what_another_machine_left_that_is_long_dead_is_removed(run: Run) -> None:
    home = killed(run)
    moved_to(home, "another-machine")
    old = time.time() - 30 * 24 * 3600
    os.utime(home, (old, old))
    os.utime(Path(run.store.url) / run.key("nodes/dead.json"), (old, old))
    sweep(run, ignore)
    assert not home.exists()
    assert len(texts(run)) == 4


def test_homes_can_be_made_while_others_sweep(run: Run) -> None:
    over = threading.Event()

    def keep_sweeping() -> None:
        while not over.is_set():
            sweep(run, ignore)

    sweeper = threading.Thread(target=keep_sweeping)
    sweeper.start()
    try:
        for number in range(50):
            home = Home.make(run, f"n{number}")
            assert home.owner() is not None
            home.remove()
    finally:
        over.set()
        sweeper.join()


def test_where_nothing_can_be_locked_it_is_said_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(homes_module.fcntl, "flock", unsupported)
    with pytest.raises(Mistake, match=r"No locks available\): set PACKTRAIN_CACHE to a directory on a disk of this"):
        Home.make(run, "mine")
    assert list(nodes_directory().iterdir()) == []


def test_a_home_is_removed_with_its_node(run: Run) -> None:
    home = Home.make(run, "mine")
    owner = home.owner()
    assert owner is not None
    assert (owner.run, owner.node) == (run.name, "mine")
    home.remove()
    assert list(nodes_directory().iterdir()) == []


# Checkpoints that were begun and never committed.


def test_files_of_older_generations_that_were_never_committed_are_removed(any_store: Store, tmp_path: Path) -> None:
    run = new_run(any_store)
    (tmp_path / "file").write_bytes(b"x")
    commit(run, 10, 1, None, {"f": tmp_path / "file"})
    for name in ("000000020-000001-aaa", "000000030-000002-bbb", "000000040-000003-ccc", "odd"):
        any_store.put(run.key(f"checkpoints/{name}/files/f"), b"x")
    remove_orphans(run, 3, pytest.fail)
    left = any_store.folders(run.key("checkpoints/"))
    assert [one.step for one in committed(run)] == [10]
    assert left == [committed(run)[0].name, "000000040-000003-ccc", "odd"]
