from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import packtrain.train
from packtrain.node import launcher as launcher_module
from packtrain.node.address import interface_of
from packtrain.node.causes import LastOutput, why_they_ended
from packtrain.node.launcher import (
    Directories,
    ForkServer,
    Launcher,
    free_port,
    last_output,
    launcher_arguments,
    rank_variables,
    with_places,
    worker_environment,
)
from packtrain.run.records import Generation, Member
from packtrain.run.run import Run
from packtrain.store import Store
from parts.runs import a_generation, new_run, program_job

LOGS = Path("/logs")
TWO_MACHINES = Generation(3, (Member("a", "10.0.0.1", 2), Member("b", "10.0.0.2", 4)), 29501, "start")


def test_a_recipe_is_started_as_the_training_module() -> None:
    assert launcher_arguments(a_generation(1, "a", workers=2), 0, None, LOGS) == [
        "--nnodes", "1",
        "--nproc-per-node", "2",
        "--rdzv-backend", "packtrain",
        "--rdzv-endpoint", "127.0.0.1:29500",
        "--rdzv-id", "generation-1",
        "--rdzv-conf", "rank=0,listen=no",
        "--max-restarts", "0",
        "--monitor-interval", "0.1",
        "--redirects", "3",
        "--log-dir", "/logs",
        "--start-method", "fork",
        "--run-path", str(Path(packtrain.train.__file__).with_name("__main__.py")),
    ]  # fmt: skip


def test_machines_differ_in_rank_and_workers_and_share_the_rendezvous_at_the_first() -> None:
    first, second = (dict(options(launcher_arguments(TWO_MACHINES, rank, None, LOGS))) for rank in (0, 1))
    assert (first["--rdzv-conf"], first["--nproc-per-node"]) == ("rank=0,listen=yes", "2")
    assert (second["--rdzv-conf"], second["--nproc-per-node"]) == ("rank=1,listen=yes", "4")
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
        (("python", "-m", "train"), ["--no-python", sys.executable, "-m", "train"]),
        (("env", "A=b", "python3.11", "a.py"), ["--no-python", "env", "A=b", sys.executable, "a.py"]),
        (("torchrun", "train.py", "-x"), ["train.py", "-x"]),
        (("torchrun", "env", "A=b", "python", "a.py"), ["--no-python", "env", "A=b", sys.executable, "a.py"]),
    ],
)
def test_a_program_is_started_with_its_arguments_unchanged(program: tuple[str, ...], started: list[str]) -> None:
    arguments = launcher_arguments(a_generation(1), 0, program, LOGS)
    assert "rank=0,listen=yes" in arguments, "it joins by the launcher's store"
    assert arguments[arguments.index("--log-dir") + 2 :] == started


def directories_in(home: Path) -> Directories:
    directories = Directories(home / "logs", home / "control", home / "checkpoints")
    for directory in (directories.logs, home / "code"):
        directory.mkdir(parents=True)
    return directories


def test_a_program_can_be_given_its_directories_as_arguments() -> None:
    program = (
        "train.py",
        "--out=$PACKTRAIN_CHECKPOINTS/run",
        "${PACKTRAIN_DATA}",
        "$PACKTRAIN_CHECKPOINTS_OLD",
        "$HOME",
    )
    found = with_places(program, {"PACKTRAIN_CHECKPOINTS": "/here", "HOME": "/home"})
    assert found == ("train.py", "--out=/here/run", "${PACKTRAIN_DATA}", "$PACKTRAIN_CHECKPOINTS_OLD", "$HOME")


def test_the_environment_of_workers_names_the_run_and_its_directories(directory_store: Store, tmp_path: Path) -> None:
    run, directories = new_run(directory_store), directories_in(tmp_path / "node")
    inherited = {"PATH": "/bin", "PACKTRAIN_RUN": "another", "OMP_NUM_THREADS": "7"}
    environment = worker_environment(run, a_generation(4, "a"), 0, directories, inherited)
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/bin", "`python` in a script is this one"
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


def test_collectives_are_bound_to_the_interface_with_the_machines_address(
    directory_store: Store, tmp_path: Path
) -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in psutil.net_if_addrs()
    run, directories = new_run(directory_store), directories_in(tmp_path / "node")
    environment = worker_environment(run, a_generation(1, "a"), 0, directories, {})
    assert environment["GLOO_SOCKET_IFNAME"] == loopback
    assert environment["NCCL_SOCKET_IFNAME"] == f"={loopback}", "NCCL would also take interfaces that begin so"
    elsewhere = Generation(1, (Member("a", "192.0.2.1", 1),), 29500, "start")
    with pytest.raises(OSError, match=r"192.0.2.1 is no longer an address of this machine"):
        worker_environment(run, elsewhere, 0, directories, {})


def test_only_the_job_binds_collectives_to_another_interface(directory_store: Store, tmp_path: Path) -> None:
    directories = directories_in(tmp_path / "node")
    of_the_machine = {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "eth9"}
    for named in ([], ["NCCL_SOCKET_IFNAME"]):
        run = new_run(directory_store, program_job(environment=named))
        environment = worker_environment(run, a_generation(1, "a"), 0, directories, of_the_machine)
        assert environment["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
        assert environment["NCCL_SOCKET_IFNAME"] == ("eth9" if named else f"={interface_of('127.0.0.1')}")


def test_workers_are_not_taken_for_ranks_of_mpi_or_torchrun_or_tasks_of_srun(
    directory_store: Store, tmp_path: Path
) -> None:
    run, directories = new_run(directory_store), directories_in(tmp_path / "node")
    of_others = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"]
    of_others += ["RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID"]
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


FORKED = """
import os, signal, time
orphan = os.fork()
if orphan == 0:
    time.sleep(600)
print(orphan, flush=True)
"""


class NodeLaunchers:
    """ForkServer of a run's nodes, and what they start in place of torch's."""

    def __init__(self, run: Run, directory: Path) -> None:
        self.run, self.directory = run, directory
        self._made: list[ForkServer] = []
        self.packages = directory / "stand-in"
        self._package = self.packages / "torch" / "distributed"
        self._package.mkdir(parents=True)
        for folder in (self._package, self._package.parent):
            (folder / "__init__.py").touch()

    def does(self, script: str) -> None:
        """Define what launchers do with their work; they report that they are ready when imported."""
        ready = "import os, pathlib; pathlib.Path(os.environ['PACKTRAIN_CONTROL'] + '.ready').touch()\n"
        body = "def main(arguments):\n" + textwrap.indent(script, "    ")
        (self._package / "run.py").write_text(ready + body)

    def fork_server(self, name: str, **variables: str) -> ForkServer:
        (self.directory / name / "code").mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": str(self.packages), **variables}
        self._made.append(ForkServer(self.run, self.directory / name, 1, environment))
        return self._made[-1]

    def close(self) -> None:
        for fork_server in self._made:
            fork_server.close()

    def is_ready(self, name: str) -> bool:
        return (self.directory / name / "launcher.ready").exists()

    def launched(self, script: str, name: str = "node") -> tuple[Launcher, list[int]]:
        """A launcher and what it started, once that is there."""
        self.does(script)
        return self.start_launcher(self.fork_server(name), name)

    def start_launcher(
        self, fork_server: ForkServer, name: str = "node", generation: int = 1
    ) -> tuple[Launcher, list[int]]:
        home = self.directory / name
        directories = Directories(home / f"logs-{generation}", home / "control", home / "checkpoints")
        directories.logs.mkdir(exist_ok=True)
        launcher, log = (
            fork_server.start_launcher(a_generation(generation, "a"), 0, directories),
            directories.logs / "launcher.log",
        )
        until(lambda: (log.exists() and log.read_text().endswith("\n")) or launcher.poll() is not None)
        assert log.read_text().endswith("\n"), "it ended without a word"
        return launcher, [int(pid) for pid in log.read_text().split()]


@pytest.fixture
def nodes(directory_store: Store, tmp_path: Path) -> Iterator[NodeLaunchers]:
    made = NodeLaunchers(new_run(directory_store, program_job(program=["torchrun", "train.py"])), tmp_path)
    yield made
    made.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def still_there(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.usefixtures("processes")
def test_kill_ends_what_workers_started_in_sessions_of_their_own(nodes: NodeLaunchers) -> None:
    launcher, pids = nodes.launched(FAMILY + "time.sleep(600)")
    assert still_there(pids) == pids
    launcher.kill()
    assert launcher.poll() is not None
    assert still_there(pids) == []


@pytest.mark.usefixtures("processes")
def test_kill_ends_orphans_of_a_launcher_that_is_gone(nodes: NodeLaunchers) -> None:
    launcher, pids = nodes.launched(FAMILY + "bare.kill()")
    orphans = pids[:2]
    launcher.wait(90)
    assert still_there(orphans) == orphans
    launcher.kill()
    assert still_there(orphans) == []


@pytest.mark.usefixtures("processes")
def test_kill_leaves_the_workers_of_another_generation_alone(nodes: NodeLaunchers) -> None:
    one, pids_of_one = nodes.launched(FAMILY + "time.sleep(600)", "one")
    other, pids_of_other = nodes.launched(FAMILY + "time.sleep(600)", "other")
    one.kill()
    assert still_there(pids_of_one) == []
    assert still_there(pids_of_other) == pids_of_other
    other.kill()
    assert still_there(pids_of_other) == []


@pytest.mark.usefixtures("processes")
def test_a_launcher_can_be_killed_twice(nodes: NodeLaunchers) -> None:
    launcher, _ = nodes.launched("print(flush=True)")
    launcher.kill()
    code = launcher.poll()
    launcher.kill()
    assert launcher.poll() == code


@pytest.mark.usefixtures("processes")
def test_kill_ends_forked_orphans_of_a_launcher_that_is_gone(nodes: NodeLaunchers) -> None:
    """They have no environment of their own: the system shows that of the server, which must stay."""
    launcher, orphans = nodes.launched(FORKED)
    launcher.wait(90)
    assert still_there(orphans) == orphans
    launcher.kill()
    assert still_there(orphans) == []
    assert still_there([launcher.server_pid]) == [launcher.server_pid]


@pytest.mark.usefixtures("processes")
def test_terminate_sends_sigterm_to_the_launcher(nodes: NodeLaunchers) -> None:
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(flush=True); time.sleep(600)"
    launcher, _ = nodes.launched(script)
    # The worker may print before the fork server has said what it started.
    until(lambda: launcher.poll() is None and launcher._launcher is not None)
    launcher.terminate()
    assert launcher.wait(90) == 7


@pytest.mark.usefixtures("processes")
def test_terminate_before_there_is_a_launcher_ends_the_server(nodes: NodeLaunchers) -> None:
    nodes.does("pass")
    module = nodes.packages / "torch" / "distributed" / "run.py"
    module.write_text("import time\ntime.sleep(600)\n")
    home = nodes.directory / "node"
    fork_server = nodes.fork_server("node")
    (home / "logs").mkdir()
    launcher = fork_server.start_launcher(
        a_generation(1, "a"), 0, Directories(home / "logs", home / "control", home / "work")
    )
    launcher.terminate()
    assert launcher.poll() == -signal.SIGKILL


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_leaves_the_launcher_its_time_to_end_the_workers(
    nodes: NodeLaunchers, number: signal.Signals
) -> None:
    """As the system sends when it shuts down a service."""
    script = f"""
import os, signal, sys, time
def end(*_):
    time.sleep(0.5)
    sys.exit(7)
signal.signal({number.value}, end)
print(os.getpid(), flush=True)
time.sleep(600)
"""
    launcher, pids = nodes.launched(script)
    for pid in (launcher.server_pid, *pids):
        os.kill(pid, number)
    assert launcher.wait(90) == 7


@pytest.mark.usefixtures("processes")
def test_sigusr1_to_every_process_reaches_the_workers_and_does_not_end_the_launcher(nodes: NodeLaunchers) -> None:
    script = """
import signal, subprocess, sys
hear = "import signal; signal.signal(10, lambda *_: exit(7)); print(flush=True); signal.pause()"
worker = subprocess.Popen([sys.executable, "-c", hear], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
sys.exit(worker.wait())
"""
    launcher, pids = nodes.launched(script)
    for pid in (launcher.server_pid, psutil.Process(pids[0]).ppid(), *pids):
        os.kill(pid, signal.SIGUSR1)
    assert launcher.wait(90) == 7


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("has_work", [True, False], ids=["at work", "ready"])
def test_a_launcher_ends_when_its_node_dies(nodes: NodeLaunchers, has_work: bool) -> None:
    """The node is a process of its own here, because it has to die."""
    nodes.does("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    (nodes.directory / "node" / "code").mkdir(parents=True)
    (nodes.directory / "node" / "logs").mkdir()
    node = f"""
import os, time
from pathlib import Path
from packtrain.node.launcher import Directories, ForkServer
from packtrain.run.run import Run
from packtrain.store import open_store
from parts.runs import a_generation
home = Path({str(nodes.directory / "node")!r})
environment = dict(os.environ, PYTHONPATH={str(nodes.packages)!r})
fork_server = ForkServer(Run(open_store({nodes.run.store.url!r}), {nodes.run.name!r}), home, 1, environment)
fork_server.prepare()
print(fork_server.process.pid, flush=True)
if {has_work}:
    directories = Directories(home / "logs", home / "control", home / "checkpoints")
    fork_server.start_launcher(a_generation(1, "a"), 0, directories)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", node], stdout=subprocess.PIPE, env=with_parts())
    assert process.stdout is not None
    started = [psutil.Process(int(process.stdout.readline()))]
    log = nodes.directory / "node" / "logs" / "launcher.log"
    until(lambda: log.exists() and log.read_text().endswith("\n") if has_work else nodes.is_ready("node"))
    if has_work:
        started.append(psutil.Process(int(log.read_text())))
    process.kill()
    process.wait()
    process.stdout.close()
    gone, _ = psutil.wait_procs(started, timeout=90)
    assert set(gone) == set(started)


def with_parts() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("killed", [False, True], ids=["one that ends", "one that is killed"])
def test_the_launcher_after_another_is_forked_from_the_same_server(nodes: NodeLaunchers, killed: bool) -> None:
    nodes.does(f"import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep({600 * killed})")
    fork_server = nodes.fork_server("node")
    fork_server.prepare()
    fork_server.prepare()
    first, (first_pid, first_parent) = nodes.start_launcher(fork_server)
    if killed:
        first.kill()
    assert first.wait(90) == (-signal.SIGKILL if killed else 0)
    second, (second_pid, second_parent) = nodes.start_launcher(fork_server, generation=2)
    assert fork_server.process is not None
    assert first_parent == second_parent == fork_server.process.pid
    assert first_pid != second_pid
    second.kill()
    fork_server.close()
    assert still_there([second_pid, second_parent]) == []


@pytest.mark.usefixtures("processes")
def test_work_does_not_begin_after_a_kill_before_the_server_was_ready(nodes: NodeLaunchers) -> None:
    nodes.does("pass")
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(nodes.directory / 'go')!r}).exists(): time.sleep(0.02)\n"
    module = nodes.packages / "torch" / "distributed" / "run.py"
    module.write_text(slow + module.read_text())
    home = nodes.directory / "node"
    fork_server = nodes.fork_server("node")
    (home / "logs").mkdir()
    launcher = fork_server.start_launcher(
        a_generation(1, "a"), 0, Directories(home / "logs", home / "control", home / "work")
    )
    assert launcher.poll() is None
    assert not launcher.has_workers()
    launcher.kill()
    assert launcher.poll() == -signal.SIGKILL
    assert still_there([launcher.server_pid]) == []
    (nodes.directory / "go").touch()
    nodes.does("import os; print(os.getpid(), os.getppid(), flush=True)")
    next_launcher, (_, parent) = nodes.start_launcher(fork_server, generation=2)
    assert parent == next_launcher.server_pid != launcher.server_pid


@pytest.mark.usefixtures("processes")
def test_a_launch_fails_with_its_server(nodes: NodeLaunchers) -> None:
    launcher, pids = nodes.launched("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    os.kill(launcher.server_pid, signal.SIGKILL)
    assert launcher.wait(90) == -signal.SIGKILL
    until(lambda: still_there(pids) == [])


@pytest.mark.usefixtures("processes")
def test_a_server_that_died_while_it_waited_is_replaced(nodes: NodeLaunchers) -> None:
    nodes.does("import os; print(os.getppid(), flush=True)")
    fork_server = nodes.fork_server("node")
    fork_server.prepare()
    dead = fork_server.process
    assert dead is not None
    dead.kill()
    dead.wait()
    _, parents = nodes.start_launcher(fork_server)
    assert parents != [dead.pid]


# A server that does not answer.


SAYS_PARENT = "import os; print(os.getppid(), flush=True)"


def assert_is_replaced(server: int, fork_server: ForkServer, nodes: NodeLaunchers) -> None:
    """The launcher that failed says why, and the next one has another server."""
    assert (
        "TimeoutError: the fork server or the launcher did not answer; both were replaced"
        in last_output(nodes.directory / "node/logs-1").launcher
    )
    assert still_there([server]) == []
    nodes.does(SAYS_PARENT)
    launcher, [parent] = nodes.start_launcher(fork_server, generation=2)
    assert parent != server
    assert launcher.wait(90) == 0


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_a_server_that_does_not_tell_how_its_launcher_ended_is_replaced(
    nodes: NodeLaunchers, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(launcher_module, "KILL_SECONDS", 0.5)
    nodes.does("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    fork_server = nodes.fork_server("node")
    launcher, [launcher_pid] = nodes.start_launcher(fork_server)
    assert launcher.poll() is None
    os.kill(launcher.server_pid, signal.SIGSTOP)
    if ends == "killed":
        launcher.kill()
    else:
        os.kill(launcher_pid, signal.SIGKILL)
    assert launcher.wait(90) == -signal.SIGKILL
    assert_is_replaced(launcher.server_pid, fork_server, nodes)


# Its worker ends when it gets SIGTERM, and also when the file `go` is there.
WITH_WORKER = """
import pathlib, signal, subprocess, sys, time
script = "import pathlib, time\\nwhile not pathlib.Path('GO').exists(): time.sleep(0.02)"
worker = subprocess.Popen([sys.executable, "-c", script])
signal.signal(15, lambda *_: worker.terminate())
print(os.getpid(), worker.pid, flush=True)
while worker.poll() is None:
    time.sleep(0.02)
sys.exit(7)
"""


def stopped_launcher(nodes: NodeLaunchers) -> tuple[ForkServer, Launcher, int]:
    """A launcher that somebody has stopped, and its worker, which works."""
    nodes.does(WITH_WORKER.replace("GO", str(nodes.directory / "go")))
    fork_server = nodes.fork_server("node")
    launcher, [launcher_pid, worker] = nodes.start_launcher(fork_server)
    os.kill(launcher_pid, signal.SIGSTOP)
    until(lambda: psutil.Process(launcher_pid).status() == psutil.STATUS_STOPPED)
    return fork_server, launcher, worker


@pytest.mark.usefixtures("processes")
def test_a_launcher_that_does_not_tell_how_its_workers_ended_is_replaced(
    nodes: NodeLaunchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "ANSWER_SECONDS", 0.2)
    fork_server, launcher, worker = stopped_launcher(nodes)
    assert launcher.wait(1.0) is None, "nothing is due while the worker works"
    assert launcher.has_workers()
    (nodes.directory / "go").touch()
    assert launcher.wait(90) == -signal.SIGKILL
    assert not launcher.has_workers()
    launcher.kill()
    assert still_there([worker]) == []
    assert_is_replaced(launcher.server_pid, fork_server, nodes)


@pytest.mark.usefixtures("processes")
def test_a_launcher_that_is_stopped_passes_a_signal_on(nodes: NodeLaunchers) -> None:
    _, launcher, worker = stopped_launcher(nodes)
    launcher.terminate()
    assert launcher.wait(90) == 7
    assert still_there([worker]) == []


@pytest.mark.usefixtures("processes")
def test_another_thread_may_give_up_on_the_server_at_any_moment(
    nodes: NodeLaunchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here between the server's end, which makes its pipe readable, and the reading."""
    nodes.does("import time; print(flush=True); time.sleep(600)")
    fork_server = nodes.fork_server("node")
    launcher, _ = nodes.start_launcher(fork_server)

    def close_and_select(readable: list[int], *_: object) -> tuple[list[int], list[int], list[int]]:
        fork_server.close()
        return readable, [], []

    monkeypatch.setattr(select, "select", close_and_select)
    assert launcher.poll() == -signal.SIGKILL


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("work_bytes", [0, 100_000], ids=["less than a pipe holds", "more than a pipe holds"])
def test_a_server_that_does_not_take_work_is_replaced(
    nodes: NodeLaunchers, work_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.does(SAYS_PARENT)
    fork_server = nodes.fork_server("node", PADDING="x" * work_bytes)
    fork_server.prepare()
    until(lambda: nodes.is_ready("node"))
    assert fork_server.process is not None
    server = fork_server.process.pid
    os.kill(server, signal.SIGSTOP)
    home = nodes.directory / "node"
    (home / "logs-1").mkdir()
    directories = Directories(home / "logs-1", home / "control", home / "checkpoints")
    with monkeypatch.context() as impatient:
        impatient.setattr(launcher_module, "START_SECONDS", 0.5)
        launcher = fork_server.start_launcher(a_generation(1, "a"), 0, directories)
        assert launcher.wait(90) == -signal.SIGKILL
    assert_is_replaced(server, fork_server, nodes)


@pytest.mark.usefixtures("processes")
def test_a_server_without_work_is_ended(nodes: NodeLaunchers) -> None:
    nodes.does("pass")
    fork_server = nodes.fork_server("node")
    fork_server.close()
    fork_server.prepare()
    server = fork_server.process
    assert server is not None
    fork_server.close()
    assert server.poll() is not None
    assert still_there([server.pid]) == []


@pytest.mark.usefixtures("processes")
def test_what_an_import_prints_is_no_answer(nodes: NodeLaunchers) -> None:
    nodes.does("print('1', flush=True)")
    module = nodes.packages / "torch" / "distributed" / "run.py"
    module.write_text("print(7)\n" + module.read_text())
    launcher, _ = nodes.start_launcher(nodes.fork_server("node"))
    assert launcher.wait(90) == 0


@pytest.mark.usefixtures("processes")
def test_torchs_launcher_does_not_look_for_gpus_which_its_forks_could_not_use_then(tmp_path: Path) -> None:
    arguments = launcher_arguments(a_generation(1, "a"), 0, None, tmp_path)  # torch creates the directory of logs
    script = f"""
import torch
from torch.distributed.run import config_from_args, parse_args
from packtrain.node.fork_server import leave_gpus_alone

def refuse():
    raise AssertionError("it looks for GPUs")

leave_gpus_alone()
torch.cuda.is_available = torch.cuda.device_count = refuse
config, _, _ = config_from_args(parse_args({arguments!r}))
assert config.numa_options is None
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("processes")
def test_workers_get_their_environment_and_an_empty_standard_input(nodes: NodeLaunchers) -> None:
    script = "import os, sys; print(os.environ['PACKTRAIN_GENERATION'], len(sys.stdin.read()), flush=True)"
    launcher, said = nodes.launched(script)
    assert said == [1, 0]
    assert launcher.wait(90) == 0


@pytest.mark.usefixtures("processes")
def test_a_launcher_that_cannot_start_fails_the_launch_and_its_log_says_why(nodes: NodeLaunchers) -> None:
    nodes.does("pass")
    (nodes.packages / "torch" / "distributed" / "run.py").write_text("raise ImportError('no such thing')")
    fork_server, home = nodes.fork_server("node"), nodes.directory / "node"
    (home / "logs").mkdir()
    directories = Directories(home / "logs", home / "control", home / "checkpoints")
    launcher = fork_server.start_launcher(a_generation(1, "a"), 0, directories)
    assert launcher.wait(90) == 1
    assert last_output(home / "logs").launcher.rstrip().endswith("ImportError: no such thing")


@pytest.mark.usefixtures("processes")
def test_what_workers_import_ahead_starts_no_thread_and_asks_for_no_device() -> None:
    """They are forked: a thread would be missing in them, and a device that was asked for could not be used."""
    script = """
import os
import torch

def refuse(*_): raise AssertionError("a device was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch.cuda._lazy_init = refuse
from packtrain.node.fork_server import prepare_workers
for recipe in ("translate", "classify", "chat", "caption"):
    prepare_workers(recipe)
print(len(os.listdir("/proc/self/task")))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # NumPy's own threads survive a fork
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "1\n"


@pytest.mark.usefixtures("processes")
def test_a_port_that_is_free_can_be_listened_on() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", free_port()))
        listening.listen()
        assert listening.getsockname()[1] > 0


def test_the_last_output_is_of_the_launcher_and_every_worker(tmp_path: Path) -> None:
    (tmp_path / "x" / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "launcher.log").write_text("a" * 100_000 + "the end")
    (tmp_path / "x" / "attempt_0" / "1" / "stderr.log").write_text("MemoryError")
    (tmp_path / "x" / "attempt_0" / "1" / "stdout.log").write_text("not this")
    said = last_output(tmp_path)
    assert said.launcher.endswith("the end")
    assert said.workers == "MemoryError"
    assert len(said.launcher) < 20_000
    assert last_output(tmp_path / "nothing") == LastOutput()


# Programs that are started without torch.

RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class PlainProgram:
    """A shell script, started on a machine whose Python has no torch, or has no use for it."""

    fork_server: ForkServer
    directories: Directories
    workers: int

    def start_launcher(self) -> Launcher:
        return self.fork_server.start_launcher(a_generation(1, "a", workers=self.workers), 0, self.directories)

    def said(self, worker: int = 0) -> str:
        return (self.directories.logs / str(worker) / "stdout.log").read_text()


@pytest.fixture
def plain(directory_store: Store, tmp_path: Path) -> Iterator[Callable[..., PlainProgram]]:
    with ExitStack() as started:

        def make(script: str, workers: int = 1, program: Sequence[str] = ("./it.sh",)) -> PlainProgram:
            job = program_job(program=list(program), directory="below", fleet={"local": {}, "workers": workers})
            directories = directories_in(tmp_path)
            (tmp_path / "code" / "below").mkdir()
            path = tmp_path / "code" / "below" / "it.sh"
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
            fork_server = ForkServer(new_run(directory_store, job), tmp_path, workers, os.environ)
            started.callback(fork_server.close)
            return PlainProgram(fork_server, directories, workers)

        yield make


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.node.launcher.find_spec", lambda _: None)


@pytest.mark.usefixtures("processes")
def test_a_single_worker_is_started_as_by_hand(plain: Callable[..., PlainProgram]) -> None:
    program = plain("env; basename $PWD")
    assert program.start_launcher().wait(60) == 0
    *variables, place = program.said().splitlines()
    assert place == "below"
    names = {line.partition("=")[0] for line in variables}
    assert {"PACKTRAIN_RUN", "PACKTRAIN_CHECKPOINTS"} <= names
    assert not [name for name in names if name in RANKS or name.startswith("TORCHELASTIC_")]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("program", "workers"), [(("torchrun", "./it.sh"), 1), (("./it.sh",), 2)])
def test_several_workers_have_ranks_and_a_single_one_if_it_asks(
    plain: Callable[..., PlainProgram], monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...], workers: int
) -> None:
    without_torch(monkeypatch)
    asking = plain("echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR", workers, program)
    assert asking.start_launcher().wait(60) == 0
    for worker in range(workers):
        assert asking.said(worker) == f"{worker} {worker} {workers} {workers} 127.0.0.1\n"


def test_torch_starts_what_has_ranks_where_it_is_installed(directory_store: Store, tmp_path: Path) -> None:
    for number, (program, fleet, workers, is_plain) in enumerate(
        [
            ("train.py", {}, 1, True),
            ("torchrun train.py", {}, 1, False),
            ("train.py", {"local": {"machines": "1..2"}}, 1, False),  # there may be more later
            ("train.py", {}, 2, False),
        ]
    ):
        run = new_run(directory_store, program_job(f"job{number}", program=program.split(), fleet=fleet))
        command = ForkServer(run, tmp_path, workers, {})._command
        assert ("--plain" in command) == is_plain, program


def test_ranks_continue_on_the_next_machine() -> None:
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in rank_variables(TWO_MACHINES, 1)] == [
        ("2", "0"), ("3", "1"), ("4", "2"), ("5", "3"),
    ]  # fmt: skip
    assert rank_variables(TWO_MACHINES, 0)[1] == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2",
        "GROUP_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501",
    }  # fmt: skip


@pytest.mark.usefixtures("processes")
def test_the_others_are_asked_to_end_when_a_worker_fails(
    plain: Callable[..., PlainProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_torch(monkeypatch)
    both = "trap 'echo asked; exit' TERM; touch $RANK.up; until [ -e 0.up ] && [ -e 1.up ]; do sleep 0.02; done"
    program = plain(f"{both}; [ $RANK = 0 ] || exit 3; exec 2> 0.err; while :; do sleep 0.02; done", 2)
    assert program.start_launcher().wait(60) == 1
    assert program.said(0) == "asked\n"
    report = why_they_ended(1, 1, [], last_output(program.directories.logs), 0)
    assert (report.cause, report.text) == ("program", "the program exited with code 3; see `packtrain logs`")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "program", "cause", "text"),
    [
        ("kill -9 $$", "./it.sh", "program", "rank 0 was killed (SIGKILL)"),
        ("kill -11 $$", "./it.sh", "program", "rank 0 was killed (SIGSEGV)"),
        ("echo 'bad option' >&2; exit 2", "./it.sh", "mistake", "the program exited with code 2: bad option"),
        ("", "./no.sh", "mistake", "FileNotFoundError: [Errno 2] No such file or directory: './no.sh'"),
    ],
)
def test_why_a_plain_program_ended_is_known(
    plain: Callable[..., PlainProgram], script: str, program: str, cause: str, text: str
) -> None:
    started = plain(script, program=[program])
    assert started.start_launcher().wait(60) == 1
    report = why_they_ended(1, 1, [], last_output(started.directories.logs), 0)
    assert report.cause == cause
    assert report.text.removesuffix("; see `packtrain logs`") == text


@pytest.mark.usefixtures("processes")
def test_a_plain_program_is_asked_to_stop_by_a_signal(plain: Callable[..., PlainProgram]) -> None:
    program = plain("trap 'echo asked; exit' TERM; echo up; while :; do sleep 0.02; done")
    launcher = program.start_launcher()
    until(lambda: (program.directories.logs / "0" / "stdout.log").exists() and "up" in program.said())
    launcher.terminate()
    assert launcher.wait(60) == 1
    assert program.said() == "up\nasked\n"


@pytest.mark.usefixtures("processes")
def test_the_program_of_a_script_is_asked_to_stop_and_has_time(plain: Callable[..., PlainProgram]) -> None:
    inner = "trap 'echo asked; sleep 1; echo saved; exit' TERM; echo up; while :; do sleep 0.02; done"
    program = plain(f'sh -c "{inner}"; echo after')
    launcher = program.start_launcher()
    until(lambda: (program.directories.logs / "0" / "stdout.log").exists() and "up" in program.said())
    launcher.terminate()
    until(lambda: "asked" in program.said())
    until(
        lambda: any(one.status() == psutil.STATUS_ZOMBIE for one in psutil.Process(launcher.server_pid).children(True))
    )
    assert launcher.has_workers(), "the script has ended, but its program has not"
    assert launcher.wait(60) == 1
    assert program.said() == "up\nasked\nsaved\n"
