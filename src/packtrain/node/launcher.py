"""Launchers from the node's side: has the fork server (fork_server.py) start a launcher and its workers, and ends them.

Nothing here imports torch: this runs in the node.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

import psutil

import packtrain.train
from packtrain.errors import PacktrainError
from packtrain.job.launchers import asks_for_rank, command_of, is_python
from packtrain.node.address import interface_of
from packtrain.node.causes import LastOutput
from packtrain.node.plain_launcher import PLAIN, is_alive
from packtrain.node.workspace import INPUTS, visible
from packtrain.process import end_with_parent
from packtrain.run.records import Generation
from packtrain.run.run import Run
from packtrain.system import usable_cores
from packtrain.train.control import (
    CHECKPOINTS_VARIABLE,
    CONTROL_VARIABLE,
    DATA_VARIABLE,
    GENERATION_VARIABLE,
    JOB_VARIABLE,
    PLACE_VARIABLES,
    RUN_VARIABLE,
    STORE_ID_VARIABLE,
    STORE_VARIABLE,
    SUBMIT_VARIABLE,
)

LAUNCHER_LOG = "launcher.log"
START_SECONDS = 600.0  # for a fork server to import torch, from a slow disk, and to answer for the first time ...
ANSWER_SECONDS = 30.0  # ... and for it or its launcher to do later what is due, such as to take a line
_WORKER = Path(packtrain.train.__file__).with_name("__main__.py")
KILL_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # between two looks whether an answer is overdue
_EXEC_SECONDS = 2.0  # from a process's start to its environment, on a busy machine
_PIPE_BYTES = 4096  # the answers are two short lines
_TAIL_BYTES = 8192  # of each log: enough for the last traceback
_SCRIPT = [sys.executable, "-u"]
# Below the ephemeral ports, which the system gives to any connection.
_PORTS = range(20_000, 30_000)
_PLACES = "|".join(PLACE_VARIABLES)
_PLACE = re.compile(rf"\$(?:\{{({_PLACES})\}}|({_PLACES})\b)")
# NCCL takes every interface whose name begins so, unless there is an equals sign.
_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
_OF_FORKED_WORKERS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # below, torch only warns of options that we chose and of peers that are gone
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for GPUs otherwise makes them unusable after a fork
}
# With these set, libraries take a worker for an MPI rank or a task of srun. The node may be one; its workers are not.
_RANK_PREFIXES = (
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "MV2_COMM_", "HYDI_", "PALS_", "SLURM_STEP", "SLURM_SRUN_", "TORCHELASTIC_",
)  # fmt: skip
_RANK_VARIABLES = {
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS",
    "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURM_GTIDS",
    "SLURM_LAUNCH_NODE_IPADDR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
}  # fmt: skip


@dataclass(frozen=True)
class Directories:
    """The directories of a generation on this machine."""

    logs: Path
    control: Path
    checkpoints: Path


def launcher_arguments(generation: Generation, rank: int, program: tuple[str, ...] | None, logs: Path) -> list[str]:
    """Return the launcher's command line: rendezvous at the first member, and no restarts of its own."""
    member = generation.members[rank]
    # A program joins by the launcher's store, as under torchrun; recipes on one machine do not need it.
    listen = "no" if program is None and len(generation.members) == 1 else "yes"
    arguments = [
        "--nnodes", str(len(generation.members)),
        "--nproc-per-node", str(member.workers),
        "--rdzv-backend", "packtrain",
        "--rdzv-endpoint", f"{generation.members[0].address}:{generation.port}",
        "--rdzv-id", f"generation-{generation.number}",
        "--rdzv-conf", f"rank={rank},listen={listen}",
        "--max-restarts", "0",  # a restart is a new generation, which the nodes agree on
        "--monitor-interval", "0.1",
        "--redirects", "3",
        "--log-dir", str(logs),
    ]  # fmt: skip
    if program is None:
        # A function, for torch's launcher: it forks the workers, which then need not import torch again.
        return [*arguments, "--start-method", "fork", "--run-path", str(_WORKER)]
    words = command_line(program)
    return [*arguments, *words[2:]] if words[:2] == _SCRIPT else [*arguments, "--no-python", *words]


def command_line(program: tuple[str, ...]) -> list[str]:
    """Return the words that start a program, as torch's launcher would."""
    words, command = list(program[asks_for_rank(program) :]), command_of(program) - asks_for_rank(program)
    if words[0].endswith(".py"):
        return [*_SCRIPT, *words]
    if is_python(words[command]):  # this one, which has torch; another may come first on the path
        words[command] = sys.executable
    return words


def rank_variables(generation: Generation, rank: int) -> list[dict[str, str]]:
    """Return what torch's launcher would tell each worker of this machine of its place."""
    members, first = generation.members, sum(member.workers for member in generation.members[:rank])
    everywhere = {
        "WORLD_SIZE": sum(member.workers for member in members),
        "LOCAL_WORLD_SIZE": members[rank].workers,
        "GROUP_WORLD_SIZE": len(members),
        "GROUP_RANK": rank,
        "MASTER_ADDR": members[0].address,
        "MASTER_PORT": generation.port,
    }
    return [
        {name: str(value) for name, value in {**everywhere, "RANK": first + local, "LOCAL_RANK": local}.items()}
        for local in range(members[rank].workers)
    ]


def with_places(program: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a program with the paths of its directories instead of their variables, such as $PACKTRAIN_CHECKPOINTS.

    There is no shell that would do it. Everything else that a shell would replace stays as it is.
    """
    return tuple(
        _PLACE.sub(lambda match: environment.get(match[1] or match[2], match[0]), argument) for argument in program
    )


def worker_environment(
    run: Run, generation: Generation, rank: int, directories: Directories, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the workers' environment, without what the launcher adds (RANK, MASTER_ADDR and so on)."""
    member = generation.members[rank]
    submitted = visible(run.job.origin)  # only where it is there: a program can ask for it
    environment = _without_other_launchers(inherited)
    interface = interface_of(member.address)
    if interface is None:  # torch would choose one, and might listen on a public address
        raise OSError(errno.EADDRNOTAVAIL, f"{member.address} is no longer an address of this machine")
    # A variable set on the machine may name another network than the one we checked: only the job overrides ours.
    bound = [name for name in _INTERFACE_VARIABLES if name not in run.job.environment or name not in environment]
    return {
        **_defaults(member.workers),
        **environment,
        # A script that a program runs says `python`, and means the one with torch.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]),
        **{name: _INTERFACE_VARIABLES[name].format(interface) for name in bound},
        RUN_VARIABLE: run.name,
        STORE_VARIABLE: run.store.url,
        STORE_ID_VARIABLE: run.store.identity or "",
        JOB_VARIABLE: run.job_digest,
        GENERATION_VARIABLE: str(generation.number),
        CONTROL_VARIABLE: str(directories.control),
        CHECKPOINTS_VARIABLE: str(directories.checkpoints),
        **({DATA_VARIABLE: str(directories.checkpoints.with_name(INPUTS))} if run.job.inputs else {}),
        **({SUBMIT_VARIABLE: str(submitted / run.job.directory)} if submitted is not None else {}),
    }


def _defaults(workers: int) -> dict[str, str]:
    """Return variables that only someone's own word overrides. Libraries read most of them when they are loaded."""
    return {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // workers)),  # torch would use all cores in every worker
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the core of the next worker
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _without_other_launchers(inherited: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in inherited.items()
        if not name.startswith(_RANK_PREFIXES) and name not in _RANK_VARIABLES
    }


class Work(TypedDict):
    """The work of a generation, as the fork server reads it in JSON.

    `arguments` are those of torch's launcher, or the program itself if it is started without. Then `workers` has the
    variables of each worker, and `logs` is the directory for their output.
    """

    arguments: list[str]
    environment: dict[str, str]
    log: str
    workers: list[dict[str, str]] | None
    logs: str


class ForkServer:
    """The fork server, which is started ahead of time and forks a launcher for each generation."""

    def __init__(self, run: Run, home: Path, workers: int, inherited: Mapping[str, str]) -> None:
        self._run, self._home, self._inherited = run, home, inherited
        # A single worker is started as by hand: many programs take RANK as a request to connect to others. By what the
        # job allows, not by the machines of the moment: checkpoints of the two ways may differ.
        program = run.job.program
        is_single = workers == 1 and run.job.fleet.kind.machines.most == 1
        self._has_ranks = program is None or asks_for_rank(program.command) or not is_single
        self._is_plain = program is not None and (not self._has_ranks or find_spec("torch") is None)
        self._mark = str(home / "launcher")
        # If the node dies, `kill_marked` finds what it started by these. The workers get their own with the work.
        marks = {RUN_VARIABLE: run.name, STORE_VARIABLE: run.store.url, CONTROL_VARIABLE: self._mark}
        quiet = {} if run.job.recipe is None else _OF_FORKED_WORKERS
        recipe = [PLAIN] if self._is_plain else [] if run.job.recipe is None else [run.job.recipe]
        self._command = [sys.executable, "-P", "-m", "packtrain.node.fork_server", *recipe]
        self._environment = {**_defaults(workers), **quiet, **_without_other_launchers(inherited), **marks}
        self.process: subprocess.Popen[bytes] | None = None
        self._latest: Launcher | None = None

    def prepare(self) -> None:
        """Start the server. Unless a program needs no torch, this costs some seconds of CPU time and torch's memory."""
        with suppress(OSError):  # if it fails, `start_launcher` tries again
            self.process = self.process or self._start()

    def start_launcher(
        self, generation: Generation, rank: int, directories: Directories, resume: tuple[str, ...] = ()
    ) -> Launcher:
        """Have a launcher started; `resume` are arguments that follow a program's own.

        If the server dies before, the launcher looks like one that failed, with its log.
        """
        environment = worker_environment(self._run, generation, rank, directories, self._inherited)
        program = self._run.job.program
        command = None if program is None else with_places((*program.command, *resume), environment)
        log = directories.logs / LAUNCHER_LOG
        work: Work = {
            "arguments": launcher_arguments(generation, rank, command, directories.logs),
            "environment": environment,
            "log": str(log),
            "workers": None,
            "logs": str(directories.logs),
        }
        if command is not None and self._is_plain:
            work["arguments"] = command_line(command)
            work["workers"] = rank_variables(generation, rank) if self._has_ranks else [{}]
        pipe = None if self.process is None else self.process.stdin
        if self.process is not None and (self.process.poll() is not None or pipe is None or pipe.closed):
            self.close()  # it died while it waited, or did not answer
        is_new = self.process is None or self._latest is None
        process = self.process = self.process or self._start()
        if self._log.exists():  # of this server's start, which belongs to the first launcher
            self._log.rename(log)
        seconds = START_SECONDS if is_new else ANSWER_SECONDS
        self._latest = Launcher(process, self._mark, str(directories.control), log, seconds)
        self._latest.send(json.dumps(work).encode() + b"\n")
        return self._latest

    def close(self) -> None:
        if self.process is not None:
            _discard(self.process)
            self.process = None

    @property
    def _log(self) -> Path:
        return self._home / LAUNCHER_LOG

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.unlink(missing_ok=True)
        with self._log.open("ab") as log:  # what is written late must not overwrite a launcher's lines
            server = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._home / "code" / self._run.job.directory,
                env=self._environment,
                start_new_session=True,  # signals of the terminal are for the node, which stops the workers in order
                preexec_fn=_end_with_node,  # noqa: PLW1509 - before any thread of the child
            )
        for pipe in (server.stdin, server.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return server


class Launcher:
    """The launcher of one generation and its workers. All of them descend from the fork server.

    A mark in their environment finds orphans: what was forked has the server's, what was executed has its own.

    A server that is stopped answers nothing, as does one whose launcher is stopped or outlives its kill. The
    launcher then counts as failed, the `log` says why, and the server is discarded. Its first answer may take
    `seconds`.
    """

    def __init__(self, server: subprocess.Popen[bytes], server_mark: str, mark: str, log: Path, seconds: float) -> None:
        self._server, self._marks, self._log = server, (server_mark, mark), log
        self._answer_seconds, self._due_since = seconds, time.monotonic()
        self._launcher: psutil.Process | None = None
        self._answers = b""
        self._code: int | None = None
        self._reading = threading.Lock()  # the deadline ends workers from a thread of its own

    @property
    def server_pid(self) -> int:
        return self._server.pid

    def send(self, work: bytes) -> None:
        assert self._server.stdin is not None
        deadline = time.monotonic() + self._answer_seconds
        with suppress(BrokenPipeError):
            while work:
                # Much fits into the pipe of a server that does not read.
                if not select.select([], [self._server.stdin], [], max(0.0, deadline - time.monotonic()))[1]:
                    self._give_up()
                    return
                work = work[os.write(self._server.stdin.fileno(), work) :]

    def poll(self) -> int | None:
        """Return the launcher's exit code, or None while it runs; the server's, if that died."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> int | None:
        """Like `poll`, but wait for the end."""
        deadline = time.monotonic() + seconds
        assert self._server.stdout is not None
        while self._code is None:
            seconds_left = max(0.0, deadline - time.monotonic())
            try:
                has_answer = bool(select.select([self._server.stdout], [], [], min(seconds_left, _LOOK_SECONDS))[0])
                if has_answer:
                    self._read_answers()
            except (OSError, ValueError):  # closed, perhaps by another thread, which gave up on the server
                self._code = -signal.SIGKILL
                break
            if not has_answer:
                if self._is_overdue():
                    self._give_up()
                elif seconds_left == 0.0:
                    break
        return self._code

    def _is_overdue(self) -> bool:
        """True if the server has owed an answer for too long, or the launcher its end after that of its workers."""
        is_at_work = False
        with suppress(psutil.NoSuchProcess):
            status = psutil.STATUS_ZOMBIE if self._launcher is None else self._launcher.status()
            # One that is stopped is at work as long as its workers are.
            is_at_work = self._has_workers() if status == psutil.STATUS_STOPPED else status != psutil.STATUS_ZOMBIE
        if is_at_work:
            self._due_since, self._answer_seconds = math.inf, ANSWER_SECONDS
            return False
        time_now = time.monotonic()
        self._due_since = min(self._due_since, time_now)  # the node may not have looked for a while
        return time_now - self._due_since > self._answer_seconds

    def _give_up(self) -> None:
        with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
            print("TimeoutError: the fork server or the launcher did not answer; both were replaced", file=log)
        _discard(self._server)

    def _read_answers(self) -> None:
        assert self._server.stdout is not None
        with self._reading, suppress(BlockingIOError):  # another thread was faster
            data = os.read(self._server.stdout.fileno(), _PIPE_BYTES)
            if not data:  # the server has ended, and with it the launcher
                self._code = self._server.wait()
                return
            self._answers += data
            self._due_since, self._answer_seconds = time.monotonic(), ANSWER_SECONDS
            pid, *code = self._answers.split(b"\n")[:-1]
            if self._launcher is None:
                with suppress(psutil.NoSuchProcess):
                    self._launcher = psutil.Process(int(pid))
            if code:
                self._code = int(code[0])

    def has_workers(self) -> bool:
        self.poll()
        return self._has_workers()

    def _has_workers(self) -> bool:
        """True until the launcher has seen the end of all workers; of one that is stopped, until they have ended.

        The plain launcher takes note of a script's end only after that of the program which the script has started.
        """
        with suppress(psutil.NoSuchProcess):
            if self._launcher is not None:
                workers = self._launcher.children()
                is_stopped = self._launcher.status() == psutil.STATUS_STOPPED
                return any(map(is_alive, workers)) if is_stopped else bool(workers)
        return False

    def terminate(self) -> None:
        """Send SIGTERM: the launcher passes it on to the workers and gives them half a minute."""
        if self.poll() is None and self._launcher is None:  # there are no workers yet
            self.kill()
        elif self._launcher is not None and self._code is None:
            with suppress(psutil.NoSuchProcess):
                self._launcher.terminate()
                self._launcher.resume()  # one that is stopped would not pass the signal on

    def kill(self) -> None:
        """Kill the launcher and every process that it and its workers started."""
        if self.poll() is None and self._launcher is None:  # the server must not fork it a moment later
            _kill(self._server)
        _kill_all(self._family)
        if self.wait(KILL_SECONDS) is None:
            self._give_up()

    def _family(self) -> list[psutil.Process]:
        """Return the launcher, all descendants and orphans. The launcher first: it would report each worker's death."""
        family: dict[psutil.Process, None] = {}
        if self._launcher is not None and self._code is None:
            with suppress(psutil.NoSuchProcess):
                family = dict.fromkeys([self._launcher, *self._launcher.children(recursive=True)])
        orphans = (process for process in _marked(self._marks.__contains__) if process.pid != self._server.pid)
        return list(family | dict.fromkeys(orphans))


def _kill(server: subprocess.Popen[bytes]) -> None:
    """Kill a fork server; a launcher of it gets SIGTERM."""
    server.kill()
    with suppress(subprocess.TimeoutExpired):
        server.wait(KILL_SECONDS)


def _discard(server: subprocess.Popen[bytes]) -> None:
    """Kill a fork server and close its pipes: even if it survives, in a system call, nobody waits for it any longer."""
    _kill(server)
    for pipe in (server.stdin, server.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()


def last_output(logs: Path) -> LastOutput:
    """Return the ends of the launcher's log and of the workers' stderr."""
    return LastOutput(_tail(logs / LAUNCHER_LOG), "\n".join(map(_tail, sorted(logs.rglob("stderr.log")))))


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def kill_marked(directory: Path) -> None:
    """Kill every process that was started for a control directory below this one."""
    _kill_all(lambda: _marked(lambda mark: mark.startswith(f"{directory}/")))


def _kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    killed: set[psutil.Process] = set()
    # Again until there are no others: one may have been started while its parent was being killed.
    while family := [process for process in find() if process not in killed]:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        killed.update(family)
    # A process blocked in the kernel, as on a dead network mount, ends only when the kernel call returns.
    psutil.wait_procs(killed, timeout=KILL_SECONDS)


def _marked(is_ours: Callable[[str], bool]) -> list[psutil.Process]:
    # A process that has the number of one in the cache would be listed, but psutil would refuse to kill it.
    psutil.process_iter.cache_clear()
    return [process for process in psutil.process_iter() if is_ours(_mark_of(process))]


def _mark_of(process: psutil.Process) -> str:
    try:
        while not (environment := process.environ()) and _is_starting(process):
            time.sleep(0.001)
        return environment.get(CONTROL_VARIABLE, "")
    except (psutil.Error, OSError):
        return ""


def _is_starting(process: psutil.Process) -> bool:
    """True if it may still get an environment: the system shows none between `exec` and the program's first moment.

    Threads of the kernel never have one, and no program either.
    """
    return process.exe() != "" and time.time() - process.create_time() < _EXEC_SECONDS


def free_port() -> int:
    """Return a port on which this machine could host the next rendezvous."""
    start = random.randrange(len(_PORTS))  # noqa: S311 - so that nodes on one machine do not all try the same
    for offset in range(len(_PORTS)):
        port = _PORTS[(start + offset) % len(_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise PacktrainError(f"no free port between {_PORTS.start} and {_PORTS.stop} on this machine")


def _end_with_node() -> None:
    """Have the fork server die with the node; its launcher then gets SIGTERM and ends the workers.

    Slurm sends its preemption notice, SIGUSR1, to every process of a step: it must not end a launcher, either.
    """
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
