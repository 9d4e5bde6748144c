"""Hosts over ssh. Each agent goes on without the connection that started it.

reach every host at once, find its Python, let it look at the store
make the environment where there is none
too few hosts: refuse, before the data is packed and anything runs
look again, for packing may take hours
start the agents; if that leaves too few, end those that run
"""

from __future__ import annotations

import builtins
import json
import re
import shlex
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import environment
from packtrain.fleet.facts import PROBE, Facts
from packtrain.fleet.fleet import Fleet, Machine, Start, Started, Tell, node_arguments, passed_on, silent, values_of
from packtrain.fleet.local import END_SECONDS, new_log, session_name
from packtrain.job.fleets import Ssh
from packtrain.job.job import Job
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.system import end_with_parent

_CONNECTIONS = 32
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class SshNode(Started):
    """One that a connection holds. A free one is followed through the store."""

    def __init__(self, connection: subprocess.Popen[bytes], log: Path) -> None:
        self._connection, self.log = connection, log

    def exit_code(self) -> int | None:
        return self._connection.poll()


@dataclass(frozen=True)
class Ready:
    """A host that can take part."""

    start: Start
    python: str
    facts: Facts


class SshFleet(Fleet):
    def __init__(self, settings: Ssh) -> None:
        self._settings = settings

    def plan(self, run: Run) -> builtins.list[Start]:
        settings = self._settings
        command = node_arguments(run, settings.python or "python", settings, settings.interface)
        names = passed_on(run.job)
        return [
            Start(host, (*Remote(host).arguments(), shlex.join(command)), names, run.store.url)
            for host in self._settings.hosts
        ]

    def check(self, job: Job, store: Store, tell: Tell = silent) -> None:
        names = passed_on(job)
        _, faults = self.prepare([Start(host, (), names, store.url) for host in self._settings.hosts], tell)
        for fault in faults:
            tell(f"could do without {fault}")

    def start(self, starts: Sequence[Start], tied: bool, tell: Tell = silent) -> builtins.list[Started]:
        machines = self._settings.machines
        able, missing = self.prepare(starts, tell)
        for fault in missing:
            tell(f"goes on without {fault}")
        ready = able[: machines.most]
        # A tied connection ends with the thread that made it, so that has to be this one.
        started, faults = _sorted(_at_once(lambda host: self._start(host, tied), ready, 1 if tied else _CONNECTIONS))
        if len(started) < machines.least:
            _at_once(lambda host: _end(Remote(host.start.machine), host.python, host.start), ready)
            raise faults[0]
        for fault in faults:
            tell(f"goes on without {fault}")
        return [node for node in started if node is not None]

    def prepare(
        self, starts: Sequence[Start], tell: Tell = silent
    ) -> tuple[builtins.list[Ready], builtins.list[PacktrainError]]:
        """The hosts that can take part, in the job's order, and what is wrong with the others. Too few: refused."""
        if self._settings.bundle is not None:
            environment.check_bundle(Path(self._settings.bundle))
        store = open_store(starts[0].store)
        with _probe(store) as key:
            ready, faults = _sorted(_at_once(lambda start: self._ready(start, key, tell), starts))
        least = self._settings.machines.least
        if len(ready) < least:
            count = f"{len(ready)} of the {least} hosts that the run needs can take part"
            raise faults[0] if len(starts) == 1 else Mistake(f"{count}: {together(faults)}")
        return ready, faults

    def _ready(self, start: Start, key: str, tell: Tell) -> Ready:
        remote = Remote(start.machine)
        python = environment.find(remote, self._settings.python)
        if python is None:
            tell(f"{start.machine}: makes a Python environment for packtrain")
            python = environment.make(remote, Path(self._settings.bundle) if self._settings.bundle else None)
        facts = look(remote, python, start.store, key, start.variables)
        if facts.store:
            raise Unreachable(start.machine, store_advice(start.store, facts.store))
        if not facts.torch:
            raise Unreachable(start.machine, f"{python} has no torch: install 'packtrain[train]' there")
        return Ready(start, python, facts)

    def _start(self, host: Ready, tied: bool) -> Started | None:
        remote, start = Remote(host.start.machine), host.start
        node = shlex.split(start.arguments[-1])[3:]  # what follows `python -m packtrain`
        options = ["--run", node[1], *(["--tied"] if tied else []), "--", *node]
        secrets = values_of(start.variables)
        if tied:
            command = agents_command(host.python, "start", options)
            log = new_log(node[1])
            return SshNode(remote.hold(command, secrets_line(secrets), log), log)
        remote.ask(host.python, "start", options, secrets)
        return None

    def list(self, run: Run) -> builtins.list[Machine]:
        def state(start: Start) -> Machine:
            try:
                remote = Remote(start.machine)
                python = environment.find_any(remote, self._settings.python)
                found = remote.ask(python, "list", _of(run), {})
            except PacktrainError as error:
                return Machine(start.machine, "unreachable", str(error))
            return Machine(start.machine, "running" if found else "ended")

        return [state for state in _at_once(state, self.plan(run)) if isinstance(state, Machine)]

    def end(self, run: Run) -> None:
        def end(start: Start) -> None:
            remote = Remote(start.machine)
            python = environment.find_any(remote, self._settings.python)
            remote.ask(python, "end", _of(run), {}, seconds=END_SECONDS + 30)

        _, faults = _sorted(_at_once(end, self.plan(run)))
        if faults:
            raise faults[0]

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        host = _chosen(self._settings.hosts, machine)
        destination, port = split_destination(host)
        session = shlex.quote(session_name(run.name))
        there = f'tmux attach -t {session} 2>/dev/null || exec "${{SHELL:-sh}}" -l'
        return ("ssh", "-t", *(("-p", port) if port else ()), destination, there)


def look(remote: Remote, python: str, store: str, key: str, variables: Sequence[str]) -> Facts:
    return Facts(**remote.ask(python, "check", ["--store", store, "--key", key], values_of(variables)))


def store_advice(store: str, fault: str) -> str:
    """Why a machine cannot take part, and what would let it."""
    if "://" in store:
        return f"it does not see the store {store} ({fault}): is the endpoint's address one that it reaches?"
    return f"it does not see the store {store} ({fault}): mount the same directory there, or use s3://bucket/prefix"


def together(faults: Sequence[PacktrainError]) -> str:
    """What is wrong with each host; what is wrong with several is said once."""
    hosts: dict[str, builtins.list[str]] = {}
    for fault in faults:
        text = fault.fault if isinstance(fault, Unreachable) else str(fault)
        hosts.setdefault(text, []).append(fault.host if isinstance(fault, Unreachable) else "all")
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in hosts.items())


def _of(run: Run) -> builtins.list[str]:
    return ["--run", run.name, "--store", run.store.url]


def _end(remote: Remote, python: str, start: Start) -> None:
    node = shlex.split(start.arguments[-1])[3:]
    with suppress(PacktrainError):
        remote.ask(python, "end", ["--run", node[1], "--store", start.store], {}, seconds=END_SECONDS + 30)


def _chosen(hosts: Sequence[str], machine: str | None) -> str:
    """By the host's name in the job, or the node's name in the store, which begins with the hostname."""
    if machine is None:
        return hosts[0]
    for host in hosts:
        plain = split_destination(host)[0].rpartition("@")[2]
        if machine in (host, plain) or machine.startswith(f"{plain.lower()}-"):
            return host
    raise Mistake(f"no host {machine!r} in the job; it has {', '.join(hosts)}")


@contextmanager
def _probe(store: Store) -> Iterator[str]:
    """Something to see in the store while the block lasts."""
    key = f"scratch/visible-{uuid.uuid4().hex}"
    store.put(key, PROBE)
    try:
        yield key
    finally:
        for entry in store.list("scratch/"):
            if entry.key.startswith(key):
                store.delete(entry.key)


def _at_once(
    work: Callable[[Item], Answer], items: Sequence[Item], connections: int = _CONNECTIONS
) -> builtins.list[Answer | PacktrainError]:
    """The answers in order; an error of ours is an answer too."""

    def one(item: Item) -> Answer | PacktrainError:
        try:
            return work(item)
        except PacktrainError as error:
            return error

    if connections == 1 or len(items) < 2:
        return [one(item) for item in items]
    with ThreadPoolExecutor(min(connections, len(items))) as pool:
        return list(pool.map(one, items))


def _sorted(
    answers: Sequence[Answer | PacktrainError],
) -> tuple[builtins.list[Answer], builtins.list[PacktrainError]]:
    good = [answer for answer in answers if not isinstance(answer, PacktrainError)]
    return good, [answer for answer in answers if isinstance(answer, PacktrainError)]


# A machine that the system's ssh reaches, with the person's own configuration: jump hosts, agents, ports, known hosts.
#
# Nothing here switches off a check. Host keys that are not known, or have changed, are refused, and what to do is said.


CONNECT_SECONDS = 10
_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",
    "-o", f"ConnectTimeout={CONNECT_SECONDS}",
    "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
# $0: the length of the script. Byte by byte: what follows it is the script's own input.
_READ_SCRIPT = 'eval "$(dd bs=1 count="$0" 2>/dev/null)"'
_FAILED = 255  # ssh's own errors; everything else is the command's

# What ssh says, and what a person can do about it; {host} is as in the job.
_ADVICE: Sequence[tuple[str, str]] = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed: ask whoever runs it, then `ssh-keygen -R`"),
    ("host key for .* has changed", "its host key has changed: ask whoever runs it, then `ssh-keygen -R`"),
    ("Host key verification failed", "its host key is not known here: `ssh {host}` once, and compare the fingerprint"),
    ("Permission denied", "it lets nobody in without a password: `ssh-copy-id {host}`, or start ssh-agent"),
    ("Could not resolve hostname", "its name is not known: see ~/.ssh/config"),
    ("Connection refused", "nothing listens there: is sshd running, and is the port right?"),
    ("timed out|No route to host|Network is unreachable", "it does not answer: is it on, and is the network?"),
)


class Unreachable(Mistake):
    """One host that cannot be used, and why; `host` alone says which. `answers`: ssh reached it all the same."""

    def __init__(self, host: str, fault: str, answers: bool = True) -> None:
        super().__init__(f"{host}: {fault}")
        self.host, self.fault, self.answers = host, fault, answers


@dataclass(frozen=True)
class Remote:
    """One destination as a job names it: `gpu-a`, `user@gpu-b:2222`."""

    name: str

    def arguments(self, *options: str) -> tuple[str, ...]:
        """ssh to it, without a command."""
        destination, port = split_destination(self.name)
        return ("ssh", *_OPTIONS, *options, *(("-p", port) if port else ()), destination)

    def run(self, command: Sequence[str], text: bytes = b"", seconds: float = 120.0) -> str:
        """What the command wrote on standard output; `text` is its standard input."""
        try:
            done = subprocess.run(
                [*self.arguments(), shlex.join(command)], input=text, capture_output=True, check=False, timeout=seconds
            )
        except FileNotFoundError:
            raise Mistake("the ssh command is not there: install openssh-client") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(self.name, f"`{command[0]}` did not end within {seconds:g} s", False) from None
        errors = done.stderr.decode(errors="replace")
        if done.returncode == _FAILED:
            raise Unreachable(self.name, advice(self.name, errors), False)
        if done.returncode != 0:
            raise Unreachable(self.name, last_line(errors) or f"`{command[0]}` ended with exit code {done.returncode}")
        return done.stdout.decode(errors="replace")

    def script(
        self, script: str, arguments: Sequence[str], text: bytes = b"", seconds: float = 120.0, lines: int = 1
    ) -> list[str]:
        """The last lines that a shell script wrote; before them may be what the host says to everybody.

        It goes over standard input, with `text` behind it: the login shell may be one that reads nothing of sh.
        """
        data = script.encode()
        said = self.run(["sh", "-c", _READ_SCRIPT, str(len(data)), *arguments], data + text, seconds).splitlines()
        written = [line.strip() for line in said if line.strip()]
        if len(written) < lines:
            raise Unreachable(self.name, f"its answer cannot be read: {' '.join(written)!r}")
        return written[-lines:]

    def ask(self, python: str, verb: str, options: Sequence[str], secrets: Mapping[str, str], **given: Any) -> Any:
        """The answer of `packtrain.fleet.local` there."""
        answer = self.run(agents_command(python, verb, options), secrets_line(secrets), **given)
        try:
            return json.loads(answer.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise Unreachable(self.name, f"its answer to `{verb}` cannot be read: {answer[-200:]!r}") from None

    def hold(self, command: Sequence[str], text: bytes, log: Path) -> subprocess.Popen[bytes]:
        """Starts a command that ends with this process: the connection is what holds it. Its words go to the log."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.arguments(), shlex.join(command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the client, which asks the run to stop
                preexec_fn=end_with_client,  # noqa: PLW1509 - prctl alone
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and its log says why
            process.stdin.write(text)
            process.stdin.flush()
        return process


def end_with_client() -> None:
    end_with_parent(signal.SIGTERM)


def agents_command(python: str, verb: str, options: Sequence[str]) -> list[str]:
    return [python, "-m", "packtrain.fleet.local", verb, *options]


def secrets_line(secrets: Mapping[str, str]) -> bytes:
    return json.dumps(dict(secrets)).encode() + b"\n"


def split_destination(name: str) -> tuple[str, str | None]:
    """What ssh takes as its destination, and the port beside it."""
    match = re.fullmatch(r"((?:[^@]+@)?)(\[[^]]+\]|[^:]+)(?::([0-9]+))?", name)
    if match is None:
        return name, None
    return match[1] + match[2].strip("[]"), match[3]


def advice(host: str, errors: str) -> str:
    """What ssh's words mean for a person."""
    for pattern, text in _ADVICE:
        if re.search(pattern, errors):
            return text.format(host=host)
    return last_line(errors) or "ssh could not reach it"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("packtrain: ") if lines else ""
