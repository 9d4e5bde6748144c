"""This machine: nodes as detached processes, which keep running when the terminal is closed.

`python -m packtrain.fleet.local check|link-probe|start|list|end` does the same on a machine that ssh reaches. It reads
secrets as a JSON object from the first line of standard input, never from arguments, and prints one JSON document.
"""

from __future__ import annotations

import argparse
import builtins
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
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
from psutil import Process

from packtrain.errors import EXIT_ALREADY_JOINED, Mistake, PacktrainError
from packtrain.fleet.facts import Facts, gather
from packtrain.fleet.fleet import (
    GOOD_ENDS,
    JOIN_SECONDS,
    JOINED,
    Fleet,
    LaunchPlan,
    Machine,
    Say,
    StartedNode,
    Target,
    missing_package,
    node_arguments,
    silent,
)
from packtrain.fleet.remote import end_with_client, last_line, secrets_line
from packtrain.job import Job
from packtrain.job.kinds import FleetKind
from packtrain.job.part import Location
from packtrain.node.address import LOOPBACK
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.process import LOG_VARIABLE, end_process, exit_code_of, run_main
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.system import cache_directory, check_shared_memory
from packtrain.units import MAX_WORKERS

THIS_MACHINE = "this machine"
END_SECONDS = 60.0  # how long a node that was asked to end may take to commit
_KEEP_LOGS_SECONDS = 7 * 24 * 3600.0


class LocalSettings(FleetKind):
    """This machine; several nodes on it stand for as many machines."""

    shares_machines = True
    harmless = frozenset({"machines"})

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.machines.most > MAX_WORKERS:
            yield ("machines",), f"must be at most {MAX_WORKERS:,}: each is a process on this machine"

    def build(self) -> Fleet:
        return LocalFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        return missing_package("torch", "train")


class LocalFleet(Fleet):
    trains_here = True

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings

    def check(self, job: Job, store: Store, say: Say = silent) -> None:  # noqa: ARG002
        log_directory()
        if job.recipe is not None:
            check_shared_memory()

    def plan(self, run: Run) -> builtins.list[LaunchPlan]:
        # All nodes are on this machine: they need no network, and nobody else should reach them.
        arguments = (*node_arguments(run, sys.executable, self._settings), "--address", LOOPBACK)
        return [LaunchPlan(THIS_MACHINE, arguments)] * self._settings.machines.most

    def start(
        self,
        run: Run,
        plans: Sequence[LaunchPlan],
        tied: bool,
        say: Say = silent,  # noqa: ARG002
    ) -> builtins.list[StartedNode]:
        return [start_process(run.name, plan.arguments, tied) for plan in plans]

    def list(self, run: Run) -> builtins.list[Machine]:
        found = find_processes("python", run.name, run.store.url)
        return [Machine(THIS_MACHINE, "running") for _ in found]

    def end(self, run: Run) -> None:
        end_processes(find_processes("python", run.name, run.store.url))

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        if machine not in (None, THIS_MACHINE, socket.gethostname(), *(lease.node for lease in run.leases())):
            raise Mistake(f"{run.name}: no machine {machine!r}; it runs on this machine only: omit the name")
        return (os.environ.get("SHELL") or "/bin/sh",)

    def targets(self) -> builtins.list[Target]:
        return [LocalTarget(f"process {number}") for number in range(1, self._settings.machines.most + 1)]


class LocalTarget(Target):
    def __init__(self, name: str) -> None:
        self.name = name

    def python(self) -> str | None:
        return sys.executable

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        text = secrets_line(secrets)
        done = subprocess.run(list(command), input=text, capture_output=True, check=False, timeout=seconds)
        if done.returncode != 0:
            raise Mistake(last_line(done.stderr.decode(errors="replace")) or f"exit code {done.returncode}")
        return done.stdout.decode()

    def link_options(self, rank: int, facts: Facts) -> list[str]:  # noqa: ARG002
        return ["--rank", str(rank), "--address", LOOPBACK]


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
    found = []
    psutil.process_iter.cache_clear()  # psutil would not end a process that has the number of one in its cache
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if is_node(arguments, run, store) and Path(arguments[0]).name.startswith(program):
                found.append(process)
    return found


def end_processes(found: Sequence[Process], number: signal.Signals = signal.SIGTERM) -> None:
    """Ask processes to end, and kill those that take too long."""
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    late = _still_running(found, END_SECONDS)
    for process in late:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _still_running(late, 10.0)


def _still_running(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait for processes to end; return those that have not. Parents may take their time to notice that one ended."""
    deadline, left = time.monotonic() + seconds, list(processes)
    while (left := [one for one in left if _is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


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


def text_of(log: Path) -> str:
    """Return what the log has. A node that ends well removes its own at any moment."""
    try:
        return log.read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""


def session_name(run: str) -> str:
    """Return the name of the tmux session that shows the node's output."""
    return f"packtrain-{run}"


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
    deadline, text, code = time.monotonic() + JOIN_SECONDS, "", None
    while code not in GOOD_ENDS and time.monotonic() < deadline and JOINED not in text:
        ended, status = os.waitpid(child, os.WNOHANG)  # before the log is read, so that it is complete
        code = os.waitstatus_to_exitcode(status) if ended else None
        text = text_of(log)
        if ended and code not in GOOD_ENDS and JOINED not in text:
            raise PacktrainError(f"the node exited on start: {last_line(text) or 'it wrote nothing'}")
        time.sleep(0.1)
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
        ["tmux", "new-session", "-d", "-s", session_name(run), *watch],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=plain,
    )


def main(words: Sequence[str]) -> None:
    place = words.index("--") if "--" in words else len(words)  # what follows is for the node or the link probe
    parser = argparse.ArgumentParser(prog="packtrain.fleet.local")
    parser.add_argument("verb", choices=["check", "link-probe", "start", "list", "end"])
    parser.add_argument("--run", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--key", default="")
    parser.add_argument("--tied", action="store_true")
    options, arguments = parser.parse_args(words[:place]), list(words[place + 1 :])
    read_secrets()
    if options.verb == "start":
        start_node(options.run, _with_address(arguments), options.tied)
    elif options.verb == "link-probe":
        from packtrain.fleet import link_probe

        link_probe.main(arguments)
    elif options.verb == "check":
        print(json.dumps(asdict(gather(options.store, options.key))))
    else:
        found = find_processes("python", options.run, options.store)
        if options.verb == "end":
            end_processes(found)
        print(json.dumps([process.pid for process in found]))


def read_secrets() -> None:
    """Read one line byte by byte: what follows must stay in the pipe, whose end means that the client is gone."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    if line.strip():
        os.environ.update(json.loads(line))


def _with_address(arguments: list[str]) -> list[str]:
    """Add the address at which ssh reached this machine: other machines reach it there, too."""
    from packtrain.node.address import ssh_address

    address = ssh_address(os.environ)
    is_given = "--interface" in arguments or "--address" in arguments
    return arguments if is_given or address is None else [*arguments, "--address", address]


if __name__ == "__main__":
    run_main(main)
