"""Nodes on this machine: what is started, and what survives the client."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import Fleet, LaunchPlan, fleet_of
from packtrain.fleet.here import describe
from packtrain.fleet.local import END_SECONDS, LocalFleet, LocalSettings, is_node, start_process, text_of
from packtrain.job.kinds import FLEETS, kind_class
from packtrain.node.preemption import seconds_from
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import Processes
from packtrain.run.records import FleetLaunch
from packtrain.start import create, load, wait_until_joined
from packtrain.store import Store, open_store
from packtrain.system import this_client
from packtrain.units import Machines
from parts.runs import new_run, program_job, recipe_job, write_files
from parts.sandbox import wait_until

SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_kind_of_fleet_in_a_job_file_can_be_built() -> None:
    settings: dict[str, dict[str, object]] = {
        "local": {},
        "slurm": {},
        "ssh": {"hosts": ["a"]},
        "mpi": {"hosts": ["a"]},
        "kubernetes": {"image": "train:1"},
        "aws": {"region": "us-east-1", "instances": ["g5.xlarge"], "role": "train"},
        "ibm": {"datacenter": "dal10", "flavor": "AC2_8X60X100", "image": "mine"},
    }
    assert settings.keys() == FLEETS.keys()
    for word, given in settings.items():
        assert isinstance(fleet_of(kind_class(FLEETS, word).model_validate(given)), Fleet)
    assert isinstance(fleet_of(LocalSettings()), LocalFleet)


def test_a_plan_has_the_node_command_for_each_machine(directory_store: Store) -> None:
    run = new_run(directory_store)
    assert directory_store.identity is not None
    command = (
        sys.executable, "-P", "-m", "packtrain", "node", "job-1", "--store", directory_store.url,
        "--store-id", directory_store.identity, "--code", run.code_digest, "--address", "127.0.0.1",
    )  # fmt: skip
    assert LocalFleet(LocalSettings(machines=Machines(3, 3))).plan(run) == [LaunchPlan("this machine", command)] * 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -m packtrain node job-1 --store /s", True),
        ("mpirun -H a:1 python -m packtrain node job-1 --store /s --interface eth0", True),
        ("python -m packtrain node job-2 --store /s", False),
        ("python -m packtrain node job-1 --store /other", False),
        ("grep node job-1 --store /s", False),
    ],
)
def test_a_node_is_recognized_by_its_command_line(words: str, expected: bool) -> None:
    assert is_node(words.split(), "job-1", "/s") == expected


def test_a_plan_holds_no_secret(s3_store: Store) -> None:
    """The keys are in the environment, where the node finds them too."""
    plan = LocalFleet(LocalSettings()).plan(new_run(s3_store))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert os.environ[variable]
        assert os.environ[variable] not in repr(plan)


@pytest.mark.usefixtures("processes")
def test_the_exit_code_and_the_output_of_a_node_are_kept(own_cache: Path) -> None:
    arguments = (sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    node = start_process("job-1", arguments, tied=False)
    while node.exit_code() is None:
        time.sleep(0.02)
    assert node.exit_code() == 7
    assert node.log.is_relative_to(own_cache)
    assert sorted(node.log.read_text().split()) == ["err", "out"]
    assert (node.log.stat().st_mode & 0o777, node.log.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "stop", "left"),
    [("", False, 0), ("import time; time.sleep(600)", True, 0), ("raise SystemExit(3)", False, 1)],
    ids=["finished", "stopped", "failed"],
)
def test_the_log_of_a_node_stays_only_if_the_run_failed(
    script: str, stop: bool, left: int, directory_store: Store, own_cache: Path
) -> None:
    run = new_run(directory_store, program_job(fleet={"failures": 0, "workers": 1}), f"import os\n{script}\n")
    fleet = LocalFleet(LocalSettings())
    [node] = fleet.start(run, fleet.plan(run), tied=True)
    if stop:
        wait_until(run.generations, "the first generation")
        run.request_stop("a person asked for it")
    assert node.process.wait(120) == {0: 0, 1: 100}[left] or stop
    result = run.result()
    assert result is not None
    assert result.status == ("failed" if left else "stopped" if stop else "finished"), result
    assert len(list((own_cache / "logs").iterdir())) == left


STARTER = f"""
import sys, time
from packtrain.fleet.here import describe
from packtrain.fleet.local import start_process
for how in sys.argv[1:]:
    node = start_process("job-1", {SLEEPER!r}, tied=how == "tied")
    while "up" not in node.log.read_text():
        time.sleep(0.02)
    print(node.process.pid, flush=True)
time.sleep(600)
"""


def started(*how: str) -> tuple[Any, ...]:
    """A client and the nodes that it started."""
    client = subprocess.Popen([sys.executable, "-c", STARTER, *how], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    return client, *(psutil.Process(int(client.stdout.readline())) for _ in how)


@pytest.mark.usefixtures("processes")
def test_a_tied_node_ends_with_its_client() -> None:
    client, node = started("tied")
    assert node.is_running()
    client.kill()
    client.wait()
    gone, _ = psutil.wait_procs([node], timeout=90)
    assert gone == [node]


@pytest.mark.usefixtures("processes")
def test_an_untied_node_outlives_its_client_and_knows_how_long_it_has_after_a_signal() -> None:
    client, node, tied = started("untied", "tied")
    try:
        assert os.getsid(node.pid) == node.pid
        assert seconds_from(node.environ()) == END_SECONDS
        client.kill()
        client.wait()
        gone, _ = psutil.wait_procs([tied], timeout=90)  # the kernel would have ended both at the same time
        assert gone == [tied]
        assert node.is_running()
        assert node.status() != psutil.STATUS_ZOMBIE
    finally:
        node.kill()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_a_recipe_needs_locks_that_processes_share_and_a_program_does_not(
    number: int, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    fleet = LocalFleet(LocalSettings())
    fleet.check(program_job(), directory_store)
    fault = rf"processes cannot share locks in /dev/shm \({os.strerror(number)}\); mount a tmpfs there"
    with pytest.raises(Mistake, match=fault):
        fleet.check(recipe_job(), directory_store)
    with pytest.raises(Mistake, match=fault):
        next(Processes(1).do(abs, [1]))
    found = {one.name: one.detail for one in describe("./store", create_store=False).found}
    assert found["shared"] == f"processes cannot share locks in /dev/shm ({os.strerror(number)})"


@pytest.mark.usefixtures("processes")
def test_a_cache_that_cannot_be_written_is_refused_before_there_is_a_run(
    tmp_path: Path, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    write_files(tmp_path, {"job.yaml": b"name: mine\nprogram: [train.py]\nstore: ./store\n", "train.py": b""})
    with pytest.raises(Mistake, match="cannot write to this directory; set PACKTRAIN_CACHE"):
        create(load(tmp_path / "job.yaml"), PlainProgress(lambda _: None))
    assert open_store(str(tmp_path / "store")).folders("runs/") == []


@pytest.mark.usefixtures("processes")
def test_a_detached_client_waits_until_its_nodes_have_joined(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go = new_run(directory_store), tmp_path / "go"
    slow = (
        "import time, pathlib, sys\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
        "print('machine: here has joined', flush=True); time.sleep(600)"
    )
    node = start_process("job-1", (sys.executable, "-c", slow, str(go)), tied=False)
    pause = time.sleep

    def wait(seconds: float) -> None:
        """It joins only when it is waited for."""
        go.touch()
        pause(seconds)

    monkeypatch.setattr("packtrain.start.time.sleep", wait)
    assert not node.has_joined()
    try:
        wait_until_joined(run, [node])
        assert node.has_joined()
    finally:
        node.process.kill()
        node.process.wait()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("code", "joined"), [(0, True), (104, True), (2, False)])
def test_a_detached_client_says_why_a_node_could_not_start(code: int, joined: bool, directory_store: Store) -> None:
    run = new_run(directory_store)
    run.record_launch(FleetLaunch(0.0, this_client(), {}))
    node = start_process("job-1", (sys.executable, "-c", f"print('packtrain: no disk'); exit({code})"), tied=False)
    if joined:
        wait_until_joined(run, [node])
    else:
        with pytest.raises(PacktrainError, match="the node exited on start: no disk"):
            wait_until_joined(run, [node])
    result = run.result()
    assert (result is None) if joined else (result is not None and result.reason.endswith("on start: no disk"))
    node.process.wait()


def test_a_log_that_its_node_has_removed_meanwhile_is_empty(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_bytes(b"machine: \xff has joined\n")
    assert text_of(log) == "machine: \N{REPLACEMENT CHARACTER} has joined\n"
    log.unlink()
    assert text_of(log) == ""
