"""Nodes on one host: what it is like before a run starts there, and how its nodes are started, found and ended.

`python -m packtrain.fleet.on_host check|link-probe|start|list|end` is how the ssh fleet and `doctor` do this on another
machine, and `plan` its check. It reads secrets as a JSON object from the first line of standard input, never from
arguments, and prints one JSON document. `Host` is the client's side of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from psutil import Process

from packtrain.errors import EXIT_ALREADY_JOINED, EXIT_DONE, EXIT_STOPPED, PacktrainError
from packtrain.fleet.remote import Remote, Unreachable, end_with_client, last_line
from packtrain.identity import identity
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.process import LOG_VARIABLE
from packtrain.store import Store, open_store
from packtrain.system import cache_directory, nearest, readable_cache

MODULE = "packtrain.fleet.on_host"
END_SECONDS = 60.0  # how long a node that was asked to end may take to commit
JOIN_SECONDS = 30.0  # to wait until a node has joined: a busy machine takes its time to start Python
_GOOD_ENDS = (EXIT_DONE, EXIT_STOPPED, EXIT_ALREADY_JOINED)  # after these a node removes its log
_JOINED = "has joined"  # in the log of a node that takes part
_KEEP_LOGS_SECONDS = 7 * 24 * 3600.0
_PROBE = b"visible"


# What a host is like.


@dataclass(frozen=True)
class Facts:
    """`store_error` is empty if the machine can read and write the store; `atomic_create` is None if untested."""

    hostname: str
    address: str
    python: str
    version: str
    identity: str
    torch: bool
    gpus: int
    free_bytes: int
    time: float
    store_error: str = ""
    atomic_create: bool | None = None


@contextmanager
def visible_object(store: Store) -> Iterator[str]:
    """Put an object for machines to see, and delete it and their answers, whose keys begin with its key."""
    key = f"scratch/visible-{uuid.uuid4().hex}"
    store.put(key, _PROBE)
    try:
        yield key
    finally:
        # Machines answer with objects of their own, even if they were too late to be read.
        for entry in store.list("scratch/"):
            if entry.key.startswith(key):
                store.delete(entry.key)


def gather(store: str, key: str) -> Facts:
    """Collect the facts. The store is tested with the object that the caller has put at `key`, if there is one."""
    from packtrain.node.address import choose_address, ssh_address

    store_error, atomic_create = _test_store(store, key) if key else ("", None)
    try:  # as ssh reached it, or as the node would choose it
        address = ssh_address(os.environ) or choose_address(None, None, False, None)
    except PacktrainError:
        address = "127.0.0.1"
    return Facts(
        hostname=socket.gethostname(),
        address=address,
        python=sys.executable,
        version=".".join(map(str, sys.version_info[:3])),
        identity=identity(),
        torch=find_spec("torch") is not None,
        # The driver's directory, not NVML: this must answer even where the driver and its library disagree.
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        free_bytes=shutil.disk_usage(nearest(readable_cache())).free,
        time=time.time(),
        store_error=store_error,
        atomic_create=atomic_create,
    )


def _test_store(location: str, key: str) -> tuple[str, bool | None]:
    try:
        # Impatient, unlike a node: a person waits for the answer.
        store = open_store(location, outage_seconds=10.0, answer_seconds=5.0)
        if store.find(key) != _PROBE:
            return "an object written by the client is not there", None
        store.put(f"{key}-{socket.gethostname()}-{os.getpid()}", _PROBE)  # the client deletes it with its own
        return "", store.supports_put_if_absent()
    except PacktrainError as error:
        return str(error), None


# Nodes as processes.


@dataclass(frozen=True)
class StartedNode:
    """A node that this client can watch: the process itself, or the connection that holds it."""

    process: subprocess.Popen[bytes]
    log: Path

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self.process.poll()

    def has_joined(self) -> bool:
        """True once it has joined its run, or another node is there in its place. Raises if it ended before."""
        return is_settled(self.exit_code(), self.log)  # the code before the log, which is then complete


def is_settled(code: int | None, log: Path) -> bool:
    text = ""
    with suppress(FileNotFoundError):  # a node that ends well removes its own at any moment
        text = log.read_text("utf-8", "replace")
    if _JOINED in text or code in _GOOD_ENDS:
        return True
    if code is None:
        return False
    raise PacktrainError(f"the node exited on start: {last_line(text) or f'exit code {code}'}")


def start_process(run: str, arguments: Sequence[str], tied: bool) -> StartedNode:
    """Start a process with a log of its own; in its own session, so that closing the terminal does not end it."""
    log = new_log(run)
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The user's own number of seconds takes precedence.
            env={SECONDS_VARIABLE: f"{END_SECONDS:.0f}", **os.environ, LOG_VARIABLE: str(log)},
            start_new_session=True,
            preexec_fn=end_with_client if tied else None,  # noqa: PLW1509 - prctl alone
        )
    return StartedNode(process, log)


def is_node(arguments: Sequence[str], run: str, store: str) -> bool:
    """True if this command line is, or starts, a node of the run."""
    for place in range(len(arguments) - 1):
        if arguments[place : place + 2] == ["node", run] and any("packtrain" in word for word in arguments[:place]):
            return ["--store", store] in [list(arguments[at : at + 2]) for at in range(place, len(arguments))]
    return False


def find_processes(program: str, run: str, store: str) -> list[Process]:
    """Return this machine's processes of a program with a node's command line: `python` is the node itself."""
    processes = []
    psutil.process_iter.cache_clear()  # psutil would not end a process that has the number of one in its cache
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if is_node(arguments, run, store) and Path(arguments[0]).name.startswith(program):
                processes.append(process)
    return processes


def end_processes(processes: Sequence[Process], number: signal.Signals = signal.SIGTERM) -> None:
    """Ask processes to end, and kill those that take too long."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    late = _still_running(processes, END_SECONDS)
    for process in late:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _still_running(late, 10.0)


def _still_running(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait for processes to end; return those that have not. Parents may take their time to notice that one ended."""
    deadline, running = time.monotonic() + seconds, list(processes)
    while (running := [process for process in running if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def _is_alive(process: Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def log_directory() -> Path:
    """Return the directory for the output of nodes, after removing logs that are older than a week."""
    directory = cache_directory() / "logs"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for log in directory.glob("*.log"):
        with suppress(FileNotFoundError):  # another process cleans up, too
            if time.time() - log.stat().st_mtime > _KEEP_LOGS_SECONDS:
                log.unlink()
    return directory


def new_log(run: str) -> Path:
    """Create an empty log that only this user can read."""
    log = log_directory() / f"{run}-{uuid.uuid4().hex[:12]}.log"
    log.touch(mode=0o600, exist_ok=False)
    return log


def session_command(run: str) -> str:
    """Return what a login on the host runs to show the node: the tmux session with its output, or else a shell."""
    # The session lasts as long as the node.
    return f'tmux attach -t packtrain-{run} 2>/dev/null || exec "${{SHELL:-sh}}" -l'


# The client's side.


def verb_command(python: str, verb: str, options: Sequence[str], module: str = MODULE) -> list[str]:
    return [python, "-P", "-m", module, verb, *options]


def secrets_line(secrets: Mapping[str, str]) -> bytes:
    return json.dumps(dict(secrets)).encode() + b"\n"


def read_secrets() -> None:
    """Read one line byte by byte: what follows must stay in the pipe, whose end means that the client is gone."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    if line.strip():
        os.environ.update(json.loads(line))


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches, and its Python with Packtrain. `module` is the one that answers there."""

    remote: Remote
    python: str
    module: str = MODULE

    @property
    def name(self) -> str:
        return self.remote.name

    def ask(
        self, verb: str, options: Sequence[str], secrets: Mapping[str, str] | None = None, seconds: float = 120.0
    ) -> Any:
        """Return the answer of the module on the host."""
        command = verb_command(self.python, verb, options, self.module)
        answer = self.remote.run(command, secrets_line(secrets or {}), seconds)
        try:
            return json.loads(answer.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise Unreachable(self.name, f"unexpected answer to `{verb}`: {answer[-200:]!r}") from None

    def facts(self, store: str, key: str, secrets: Mapping[str, str]) -> Facts:
        return Facts(**self.ask("check", ["--store", store, "--key", key], secrets))

    def nodes(self, run: str, store: str, end: bool = False) -> Sequence[int]:
        """Return the process ids of the run's nodes there, after ending them if asked to."""
        options = ["--run", run, "--store", store]
        pids: list[int] = self.ask("end" if end else "list", options, seconds=END_SECONDS + 30)
        return pids
