from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from packtrain.control import CONTROL_VARIABLE
from packtrain.members import Generation, Member
from packtrain.node.launch import (
    Directories,
    Launch,
    free_port,
    interface_of,
    last_words,
    launcher_arguments,
    worker_environment,
)
from packtrain.store import Store
from parts.runs import a_generation, new_run, program_job

LOGS = Path("/logs")
TWO_MACHINES = Generation(3, (Member("a", "10.0.0.1", 2), Member("b", "10.0.0.2", 4)), 29501, "start")


def test_a_recipe_is_started_as_a_module_of_ours() -> None:
    assert launcher_arguments(a_generation(1, "a", workers=2), 0, None, LOGS) == [
        "--nnodes", "1",
        "--nproc-per-node", "2",
        "--rdzv-backend", "packtrain",
        "--rdzv-endpoint", "127.0.0.1:29500",
        "--rdzv-id", "generation-1",
        "--rdzv-conf", "rank=0",
        "--max-restarts", "0",
        "--monitor-interval", "0.2",
        "--redirects", "3",
        "--log-dir", "/logs",
        "-m", "packtrain.train",
    ]  # fmt: skip


def test_machines_differ_in_rank_and_workers_and_meet_at_the_first() -> None:
    first, second = (dict(options(launcher_arguments(TWO_MACHINES, rank, None, LOGS))) for rank in (0, 1))
    assert (first["--rdzv-conf"], first["--nproc-per-node"]) == ("rank=0", "2")
    assert (second["--rdzv-conf"], second["--nproc-per-node"]) == ("rank=1", "4")
    for arguments in (first, second):
        assert arguments["--nnodes"] == "2"
        assert (arguments["--rdzv-endpoint"], arguments["--rdzv-id"]) == ("10.0.0.1:29501", "generation-3")


def options(arguments: list[str]) -> Iterator[tuple[str, str]]:
    return zip(arguments[::2], arguments[1::2], strict=False)


@pytest.mark.parametrize(
    ("program", "started"),
    [
        (("train.py", "--lr", "0.1"), ["train.py", "--lr", "0.1"]),
        (("./train.sh", "-x"), ["--no-python", "./train.sh", "-x"]),
        (("python", "-m", "train"), ["--no-python", "python", "-m", "train"]),
    ],
)
def test_a_program_is_started_with_its_arguments_as_they_are(program: tuple[str, ...], started: list[str]) -> None:
    arguments = launcher_arguments(a_generation(1), 0, program, LOGS)
    assert arguments[arguments.index("--log-dir") + 2 :] == started


def directories_in(path: Path) -> Directories:
    directories = Directories(path / "logs", path / "control", path / "code", path / "checkpoints")
    for directory in (directories.logs, directories.code):
        directory.mkdir(parents=True)
    return directories


def test_workers_find_the_run_and_where_to_put_things_in_their_environment(
    directory_store: Store, tmp_path: Path
) -> None:
    run, directories = new_run(directory_store), directories_in(tmp_path / "node")
    inherited = {"PATH": "/bin", "PACKTRAIN_RUN": "another", "OMP_NUM_THREADS": "7"}
    environment = worker_environment(run, a_generation(4, "a"), 0, directories, inherited)
    assert environment["PATH"] == "/bin"
    assert environment["PACKTRAIN_RUN"] == run.name
    assert environment["PACKTRAIN_STORE"] == directory_store.url
    assert environment["PACKTRAIN_GENERATION"] == "4"
    assert environment["PACKTRAIN_CONTROL"] == str(directories.control)
    assert environment["PACKTRAIN_CHECKPOINTS"] == str(directories.checkpoints)
    assert environment["OMP_NUM_THREADS"] == "7", "a person's own word is kept"


def test_workers_of_a_machine_share_its_cores(directory_store: Store, tmp_path: Path) -> None:
    run, directories = new_run(directory_store), directories_in(tmp_path / "node")
    for workers in (1, 10_000):
        environment = worker_environment(run, a_generation(1, "a", workers=workers), 0, directories, {})
        assert environment["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // workers))


def test_collectives_are_bound_to_the_interface_that_has_the_machines_address(
    directory_store: Store, tmp_path: Path
) -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in psutil.net_if_addrs()
    run, directories = new_run(directory_store), directories_in(tmp_path / "node")
    environment = worker_environment(run, a_generation(1, "a"), 0, directories, {})
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == loopback
    elsewhere = Generation(1, (Member("a", "192.0.2.1", 1),), 29500, "start")
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(run, elsewhere, 0, directories, {})


def test_only_the_job_binds_collectives_to_another_interface(directory_store: Store, tmp_path: Path) -> None:
    directories = directories_in(tmp_path / "node")
    of_the_machine = {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "eth9"}
    for named in ([], ["NCCL_SOCKET_IFNAME"]):
        run = new_run(directory_store, program_job(environment=named))
        environment = worker_environment(run, a_generation(1, "a"), 0, directories, of_the_machine)
        assert environment["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
        assert environment["NCCL_SOCKET_IFNAME"] == ("eth9" if named else interface_of("127.0.0.1"))


def test_workers_are_not_taken_for_ranks_of_mpi_or_tasks_of_srun(directory_store: Store, tmp_path: Path) -> None:
    run, directories = new_run(directory_store), directories_in(tmp_path / "node")
    of_others = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"]
    kept = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b", "CUDA_VISIBLE_DEVICES": "0"}
    inherited = {**dict.fromkeys(of_others, "2"), **kept}
    environment = worker_environment(run, a_generation(1, "a"), 0, directories, inherited)
    assert not environment.keys() & set(of_others)
    assert environment.items() >= kept.items()


# Ending. A stand-in for torch's launcher starts at once and behaves as the test needs.

FAMILY = """
import os, subprocess, sys, time
grandchild = "import time; time.sleep(600)"
session = subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True)
plain = subprocess.Popen([sys.executable, "-c", grandchild])
bare = subprocess.Popen([sys.executable, "-c", grandchild], start_new_session=True, env={})
print(session.pid, plain.pid, bare.pid, flush=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `-m torch.distributed.run` leads, for launchers of this test."""
    package = tmp_path / "stand-in" / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent.parent))
    return package / "run.py"


def launched(stand_in: Path, script: str, directories: Directories) -> tuple[Launch, list[int]]:
    """A launcher and what it started, once that is there."""
    stand_in.write_text(script)
    environment = {**os.environ, CONTROL_VARIABLE: str(directories.control)}
    launch = Launch([], environment, directories)
    log = directories.logs / "launcher.log"
    while not log.read_text().endswith("\n"):
        assert launch.poll() is None or log.read_text().endswith("\n"), "it ended without a word"
        time.sleep(0.02)
    return launch, [int(pid) for pid in log.read_text().split()]


def still_there(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_kill_ends_what_workers_started_in_sessions_of_their_own(stand_in: Path, tmp_path: Path) -> None:
    launch, pids = launched(stand_in, FAMILY + "time.sleep(600)", directories_in(tmp_path / "node"))
    assert still_there(pids) == pids
    launch.kill()
    assert launch.poll() is not None
    assert still_there(pids) == []


def test_kill_ends_orphans_of_a_launcher_that_is_gone(stand_in: Path, tmp_path: Path) -> None:
    launch, pids = launched(stand_in, FAMILY + "bare.kill()", directories_in(tmp_path / "node"))
    orphans = pids[:2]
    launch._process.wait()
    assert still_there(orphans) == orphans
    launch.kill()
    assert still_there(orphans) == []


def test_kill_spares_another_generations_workers(stand_in: Path, tmp_path: Path) -> None:
    one, pids_of_one = launched(stand_in, FAMILY + "time.sleep(600)", directories_in(tmp_path / "one"))
    other, pids_of_other = launched(stand_in, FAMILY + "time.sleep(600)", directories_in(tmp_path / "other"))
    one.kill()
    assert still_there(pids_of_one) == []
    assert still_there(pids_of_other) == pids_of_other
    other.kill()
    assert still_there(pids_of_other) == []


def test_a_launcher_can_be_killed_twice(stand_in: Path, tmp_path: Path) -> None:
    launch, _ = launched(stand_in, "print(flush=True)", directories_in(tmp_path / "node"))
    launch.kill()
    code = launch.poll()
    launch.kill()
    assert launch.poll() == code


def test_terminate_asks_the_launcher_politely(stand_in: Path, tmp_path: Path) -> None:
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(flush=True); time.sleep(600)"
    launch, _ = launched(stand_in, script, directories_in(tmp_path / "node"))
    launch.terminate()
    assert launch._process.wait(timeout=30) == 7


def test_a_notice_that_reaches_every_process_ends_no_launcher_and_is_heard_by_its_workers(
    stand_in: Path, tmp_path: Path
) -> None:
    script = """
import signal, subprocess, sys
hear = "import signal; signal.signal(10, lambda *_: exit(7)); print(flush=True); signal.pause()"
worker = subprocess.Popen([sys.executable, "-c", hear], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
sys.exit(worker.wait())
"""
    launch, pids = launched(stand_in, script, directories_in(tmp_path / "node"))
    for pid in (launch._process.pid, *pids):
        os.kill(pid, signal.SIGUSR1)
    assert launch._process.wait(timeout=30) == 7


def test_a_launcher_hears_of_the_death_of_its_agent(stand_in: Path, tmp_path: Path) -> None:
    """The agent is a process of its own here, because it has to die."""
    stand_in.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    directories = directories_in(tmp_path / "node")
    agent = f"""
import os, time
from pathlib import Path
from packtrain.node.launch import Directories, Launch
directories = Directories(*(Path({str(tmp_path / "node")!r}) / name for name in ("logs", "control", "code", "ckpt")))
Launch([], dict(os.environ), directories)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", agent])
    log = directories.logs / "launcher.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.02)
    launcher = psutil.Process(int(log.read_text()))
    process.kill()
    process.wait()
    gone, _ = psutil.wait_procs([launcher], timeout=30)
    assert gone == [launcher]


def test_a_port_that_is_free_can_be_listened_on() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", free_port()))
        listening.listen()
        assert listening.getsockname()[1] > 0


def test_the_last_words_are_those_of_the_launcher_and_of_every_worker(tmp_path: Path) -> None:
    (tmp_path / "x" / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "launcher.log").write_text("a" * 100_000 + "the end")
    (tmp_path / "x" / "attempt_0" / "1" / "stderr.log").write_text("MemoryError")
    (tmp_path / "x" / "attempt_0" / "1" / "stdout.log").write_text("not this")
    said = last_words(tmp_path)
    assert said.endswith("the end\nMemoryError")
    assert len(said) < 20_000
    assert last_words(tmp_path / "nothing") == ""
