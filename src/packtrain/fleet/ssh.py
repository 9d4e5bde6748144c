"""Hosts over ssh. Each agent goes on without the connection that started it.

reach every host at once, find its Python, let it look at the store
make the environment where there is none
too few hosts: refuse, before the data is packed and anything runs
look again, for packing may take hours
start the agents; if that leaves too few, end those that run
"""

from __future__ import annotations

import builtins
import shlex
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic_core import InitErrorDetails

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import environment
from packtrain.fleet.facts import PROBE, Facts
from packtrain.fleet.fleet import (
    Fleet,
    Machine,
    Python,
    Start,
    Started,
    Tell,
    Word,
    node_arguments,
    passed_on,
    silent,
    values_of,
)
from packtrain.fleet.local import END_SECONDS, new_log, session_name
from packtrain.fleet.remote import (
    Remote,
    Unreachable,
    agents_command,
    secrets_line,
    split_destination,
)
from packtrain.job.job import Job
from packtrain.job.kinds import FleetKind
from packtrain.job.part import Location, StorePath, matching
from packtrain.run.run import Run
from packtrain.store import Store, open_store

_CONNECTIONS = 32
Item = TypeVar("Item")
Answer = TypeVar("Answer")


_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:]+\])"
_USER = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?"
_DESTINATION = rf"{_USER}{_HOST}(?::[0-9]{{1,5}})?"
Destination = Annotated[str, matching(_DESTINATION, "a host, as in gpu-a, user@gpu-b or gpu-c:2222")]


class ListedHosts(FleetKind):
    """Machines by their names; all of them, unless the job says how many."""

    hosts: tuple[Destination, ...]

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:  # noqa: ARG003
        hosts = given.get("hosts")
        if "machines" not in given and isinstance(hosts, Sequence) and not isinstance(hosts, str) and hosts:
            return {**given, "machines": len(hosts)}
        return given

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.hosts:
            yield ("hosts",), "must name at least one host"
        elif len(set(self.hosts)) != len(self.hosts):
            yield ("hosts",), "has a host twice"
        elif self.machines.most > len(self.hosts):
            yield ("machines",), f"asks for {self.machines.most} of {len(self.hosts)} hosts"


class SshSettings(ListedHosts):
    """Hosts that the system's ssh reaches. `bundle` is a directory of wheels for those without a package index."""

    python: Python | None = None
    bundle: StorePath | None = None
    interface: Word | None = None

    def build(self) -> Fleet:
        return SshFleet(self)


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
    def __init__(self, settings: SshSettings) -> None:
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
