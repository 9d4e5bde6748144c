"""This machine: agents as processes of their own, which go on when the terminal is closed."""

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
from psutil import Process

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet.fleet import Fleet, Machine, Start, Started, Tell, node_arguments, silent
from packtrain.fleet.remote import end_with_client
from packtrain.job.kinds import FleetKind
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.run.run import Run
from packtrain.system import cache_directory

HERE = "this machine"
_ADDRESS = "127.0.0.1"


class LocalSettings(FleetKind):
    """This machine; several agents on it stand for as many machines."""

    def build(self) -> Fleet:
        return LocalFleet(self)


class LocalNode(Started):
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self.log = process, log

    def exit_code(self) -> int | None:
        return self._process.poll()


class LocalFleet(Fleet):
    trains_here = True

    def __init__(self, settings: LocalSettings) -> None:
        self._settings = settings

    def plan(self, run: Run) -> builtins.list[Start]:
        arguments = (*node_arguments(run, sys.executable, self._settings), "--address", _ADDRESS)
        return [Start(HERE, arguments)] * self._settings.machines.most

    def start(self, starts: Sequence[Start], tied: bool, tell: Tell = silent) -> builtins.list[Started]:  # noqa: ARG002
        return [start_here(start, tied) for start in starts]

    def list(self, run: Run) -> builtins.list[Machine]:
        found = running(run.name, run.store.url)
        return [Machine(HERE, "running", f"process {process.pid}") for process in found]

    def end(self, run: Run) -> None:
        end(run.name, run.store.url)

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        if machine not in (None, HERE, socket.gethostname(), *(node.node for node in run.leases())):
            raise Mistake(f"{run.name} has no machine {machine!r}: it is on this one alone; leave that word out")
        return (os.environ.get("SHELL") or "/bin/sh",)


def start_here(start: Start, tied: bool) -> Started:
    """A process of this machine that writes to a log of its own, or ends with this one."""
    log = log_directory() / f"{uuid.uuid4().hex[:12]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            start.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={SECONDS_VARIABLE: f"{END_SECONDS:.0f}", **os.environ},
            start_new_session=True,
            preexec_fn=end_with_client if tied else None,  # noqa: PLW1509 - prctl alone
        )
    return LocalNode(process, log)


# Agents on the machine that this runs on: start one that nobody holds, list them, end them, ask what is here.
#
# python -m packtrain.fleet.local check|exchange|start|list|end ...
#
# Fleets run this on their machines. Secrets come as a JSON object in the first line of standard input, never as
# arguments; the answer is one JSON document on standard output.


END_SECONDS = 60.0  # how long an agent that is asked to end may take to commit
_JOIN_SECONDS = 10.0
_KEPT_SECONDS = 7 * 24 * 3600.0
_MODULE = "packtrain.fleet.local"


def session_name(run: str) -> str:
    """Of the tmux session that shows what the agent writes."""
    return f"packtrain-{run}"


def is_agent(arguments: Sequence[str], run: str, store: str) -> bool:
    """Whether this is the command line of an agent that takes part in the run."""
    for place in range(len(arguments) - 1):
        if arguments[place : place + 2] == ["node", run] and any("packtrain" in word for word in arguments[:place]):
            return ["--store", store] in [list(arguments[at : at + 2]) for at in range(place, len(arguments))]
    return False


def running(run: str, store: str) -> list[Process]:
    return started_by("python", run, store)


def started_by(program: str, run: str, store: str) -> list[Process]:
    """Processes here of that program with an agent's command line: python is the agent, mpirun has it started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if is_agent(arguments, run, store) and Path(arguments[0]).name.startswith(program):
                found.append(process)
    return found


def end(run: str, store: str) -> list[int]:
    """Asks every agent of the run to leave, and kills those that take too long. Whom it found."""
    return end_all(running(run, store), END_SECONDS)


def end_all(found: list[Process], seconds: float, number: signal.Signals = signal.SIGTERM) -> list[int]:
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    _, late = psutil.wait_procs(found, timeout=seconds)
    for process in late:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(late, timeout=10)
    return [process.pid for process in found]


# Starting.


def log_directory() -> Path:
    """Where agents write before the store has their words. Old logs of failed agents are taken away."""
    directory = cache_directory() / "agents"
    directory.mkdir(parents=True, exist_ok=True)
    for log in directory.glob("*.log"):
        with suppress(FileNotFoundError):
            if time.time() - log.stat().st_mtime > _KEPT_SECONDS:
                log.unlink()
    return directory


def new_log(run: str) -> Path:
    return log_directory() / f"{run}-{uuid.uuid4().hex[:12]}.log"


def start(run: str, arguments: list[str], tied: bool) -> None:
    """Becomes the agent of a run. Returns never in the agent; the caller's process says where it is and ends."""
    log = new_log(run)
    os.environ.setdefault(SECONDS_VARIABLE, f"{END_SECONDS:.0f}")
    if tied:
        threading.Thread(target=_leave_with_input, daemon=True).start()
        _become_agent(arguments, log)
    child = os.fork()
    if child == 0:
        os.setsid()
        _close_all(log)
        _become_agent(arguments, log)
    _show(run, child, log)
    _see_it_join(child, log)
    print(json.dumps({"pid": child, "log": str(log)}), flush=True)


def _become_agent(arguments: list[str], log: Path) -> None:
    """The agent in this very process: its environment was set here, and no argument ever held it."""
    sys.argv = ["packtrain", *arguments]
    code: object = 1
    try:
        runpy.run_module("packtrain", run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code
    finally:
        sys.stdout.flush()
        if code == 0:
            log.unlink(missing_ok=True)
    os._exit(code if isinstance(code, int) else 1)


def _close_all(log: Path) -> None:
    """Lets go of the connection: sshd waits for those who hold its pipes."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, number)
    os.closerange(3, 1024)


def _leave_with_input() -> None:
    """The connection is the leash: when its other end goes, so does the agent."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _see_it_join(agent: int, log: Path) -> None:
    """One that ends before it has said anything useful would leave its starter waiting."""
    deadline = time.monotonic() + _JOIN_SECONDS
    while time.monotonic() < deadline and "has joined" not in _written(log):
        if os.waitpid(agent, os.WNOHANG) != (0, 0):
            words = _written(log).strip().splitlines()
            raise PacktrainError(f"the agent ended at once: {words[-1] if words else 'it wrote nothing'}")
        time.sleep(0.1)


def _written(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _show(run: str, agent: int, log: Path) -> None:
    """A terminal that shows the log as long as the agent lives. The agent does not depend on it."""
    if shutil.which("tmux") is None:
        return
    watch = ["tail", f"--pid={agent}", "-n", "+1", "-F", str(log)]
    plain = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "USER", "SHELL") if name in os.environ}
    subprocess.run(
        ["tmux", "new-session", "-d", "-s", session_name(run), *watch],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=plain,
    )


# The verbs.


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=_MODULE)
    parser.add_argument("verb", choices=["check", "exchange", "start", "list", "end"])
    parser.add_argument("--run", default="")
    parser.add_argument("--store", default="")
    parser.add_argument("--key", default="")
    parser.add_argument("--tied", action="store_true")
    words = list(sys.argv[1:] if given is None else given)
    place = words.index("--") if "--" in words else len(words)  # what follows is the agent's
    options, arguments = parser.parse_args(words[:place]), words[place + 1 :]
    _read_environment()
    if options.verb == "start":
        start(options.run, _with_address(arguments), options.tied)
    elif options.verb == "list":
        print(json.dumps([process.pid for process in running(options.run, options.store)]))
    elif options.verb == "end":
        print(json.dumps(end(options.run, options.store)))
    elif options.verb == "exchange":
        from packtrain.fleet import link_probe as exchange

        exchange.main(arguments)
    else:
        from packtrain.fleet.facts import gather

        print(json.dumps(asdict(gather(options.store, options.key))))


def _read_environment() -> None:
    """One line, read byte by byte: what follows it belongs to whoever holds the connection."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    if line.strip():
        os.environ.update(json.loads(line))


def _with_address(arguments: list[str]) -> list[str]:
    """The address that ssh reached is where this machine is at home, and the others see it: docker0 is not.

    A public one is left for the agent to refuse or to better.
    """
    from packtrain.node.address import is_private

    parts = os.environ.get("SSH_CONNECTION", "").split()
    named = "--interface" in arguments or "--address" in arguments
    if named or len(parts) != 4 or ":" in parts[2] or parts[2].startswith("127.") or not is_private(parts[2]):
        return arguments
    return [*arguments, "--address", parts[2]]


if __name__ == "__main__":
    try:
        main()
    except PacktrainError as error:
        print(f"packtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
