"""Nodes on one host: what it is like before a run starts there, and how its nodes are started, found and ended.

`python -m packtrain.fleet.host check|link-probe|start|list|end` is how the ssh fleet, `doctor` and `plan` do this on
another machine. It reads secrets as a JSON object from the first line of standard input, never from arguments, and
prints one JSON document. `Host` is the client's side of it.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from psutil import Process

from packtrain.errors import EXIT_ALREADY_JOINED, EXIT_DONE, EXIT_STOPPED, PacktrainError
from packtrain.fleet.remote import Remote, Unreachable, end_with_client, last_line
from packtrain.identity import identity
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.process import LOG_VARIABLE, end_process, exit_code_of, run_main
from packtrain.store import Store, open_store
from packtrain.system import cache_directory, nearest, readable_cache

MODULE = "packtrain.fleet.host"
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
        return _has_joined(self.exit_code(), self.log)  # the code before the log, which is then complete


def _has_joined(code: int | None, log: Path) -> bool:
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


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches, and its Python with Packtrain. `module` is what this module is called there."""

    remote: Remote
    python: str
    module: str = MODULE

    @property
    def name(self) -> str:
        return self.remote.name

    def ask(
        self, verb: str, options: Sequence[str], secrets: Mapping[str, str] | None = None, seconds: float = 120.0
    ) -> Any:
        """Return the answer of this module on the host."""
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


# The host's side.


def start_node(run: str, arguments: list[str], tied: bool) -> None:
    """Become the node of a run if tied; else fork it, wait until it has joined, and print where it is.

    The pid is null if the run already has its node on this machine.
    """
    os.environ.setdefault(SECONDS_VARIABLE, f"{END_SECONDS:.0f}")
    if tied:  # no fork: the node is this process, and its standard input is the connection
        threading.Thread(target=_leave_with_connection, daemon=True).start()
        _become_node(arguments)
    log = new_log(run)
    os.environ[LOG_VARIABLE] = str(log)
    child = os.fork()
    if child == 0:
        os.setsid()  # a session of its own, so that the end of the ssh session does not signal it
        # Let go of the connection: sshd keeps it open as long as any process holds its pipes.
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        for number, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, number)
        os.closerange(3, 1024)
        _become_node(arguments)
    _show_in_tmux(run, child, log)
    # A node that fails early would otherwise leave the client waiting for it without a reason.
    deadline, code = time.monotonic() + JOIN_SECONDS, None
    while not _has_joined(code, log) and time.monotonic() < deadline:
        time.sleep(0.1)
        ended, status = os.waitpid(child, os.WNOHANG)  # before the log is read, so that it is complete
        code = os.waitstatus_to_exitcode(status) if ended else None
    print(json.dumps({"pid": None if code == EXIT_ALREADY_JOINED else child, "log": str(log)}), flush=True)


def _become_node(arguments: list[str]) -> None:
    """Run the node in this process, whose environment has the secrets: they must not appear in arguments."""
    sys.argv = ["packtrain", *arguments]
    code = exit_code_of(lambda: runpy.run_module("packtrain", run_name="__main__"))
    end_process(code)  # never return into the code that forked


def _leave_with_connection() -> None:
    """End the node when standard input closes: that is how it notices that the client or the connection is gone."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _show_in_tmux(run: str, node: int, log: Path) -> None:
    """Open a tmux session that shows the log as long as the node lives. The node does not depend on it."""
    if shutil.which("tmux") is None:
        return
    watch = ["tail", f"--pid={node}", "-n", "+1", "-F", str(log)]
    # tmux keeps the environment of its first session for all later ones: no secret may be in it.
    plain = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "USER", "SHELL") if name in os.environ}
    subprocess.run(
        ["tmux", "new-session", "-d", "-s", f"packtrain-{run}", *watch],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=plain,
    )


def read_secrets() -> None:
    """Read one line byte by byte: what follows must stay in the pipe, whose end means that the client is gone."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    if line.strip():
        os.environ.update(json.loads(line))


def main(words: Sequence[str]) -> None:
    place = words.index("--") if "--" in words else len(words)  # what follows is for the node or the link probe
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("verb", choices=["check", "link-probe", "start", "list", "end"])
    parser.add_argument("--run", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--key", default="")
    parser.add_argument("--tied", action="store_true")
    options, arguments = parser.parse_args(words[:place]), list(words[place + 1 :])
    read_secrets()
    if options.verb == "start":
        from packtrain.node.address import ssh_address

        # Other machines reach this one where ssh did, unless the job says otherwise.
        address = None if {"--interface", "--address"} & {*arguments} else ssh_address(os.environ)
        start_node(options.run, arguments if address is None else [*arguments, "--address", address], options.tied)
    elif options.verb == "link-probe":
        from packtrain.fleet import link_probe

        link_probe.main(arguments)
    elif options.verb == "check":
        print(json.dumps(asdict(gather(options.store, options.key))))
    else:
        processes = find_processes("python", options.run, options.store)
        if options.verb == "end":
            end_processes(processes)
        print(json.dumps([process.pid for process in processes]))


if __name__ == "__main__":
    run_main(main)
