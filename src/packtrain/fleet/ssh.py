"""Hosts over ssh. Nodes keep running without the connection that started them.

1. Connect to all hosts in parallel; on each, find the Python and test the store.
2. Create a Python environment where there is none.
3. Refuse if too few hosts are usable, before the data is packed and anything runs.
4. Check again before the start, because packing may take hours.
5. Start the nodes; if too few start, end those that did.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from pydantic_core import InitErrorDetails

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import environment
from packtrain.fleet.fleet import (
    Fleet,
    FleetBuilder,
    HasShell,
    HasTargets,
    LaunchPlan,
    Machine,
    Python,
    Say,
    Target,
    Word,
    missing_programs,
    node_arguments,
    passed_variables,
    silent,
    values_of,
)
from packtrain.fleet.host import (
    Host,
    StartedNode,
    new_log,
    secrets_line,
    session_command,
    verb_command,
    visible_object,
)
from packtrain.fleet.remote import Remote, Unreachable, split_destination
from packtrain.identity import install_command
from packtrain.job import Job
from packtrain.job.part import Location, StorePath, matching
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.units import counted

_CONNECTIONS = 32  # at the same time: each is a process
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:]+\])"
_USER = r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?"
_DESTINATION = rf"{_USER}{_HOST}(?::[0-9]{{1,5}})?"
Destination = Annotated[str, matching(_DESTINATION, "a host, as in gpu-a, user@gpu-b or gpu-c:2222")]
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class ListedHosts(FleetBuilder):
    """Machines by their names; all of them, unless the job says how many."""

    hosts: Annotated[tuple[Destination, ...], Field(json_schema_extra={"minItems": 1, "uniqueItems": True})]

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:  # noqa: ARG003
        hosts = fields.get("hosts")
        if "machines" not in fields and isinstance(hosts, Sequence) and not isinstance(hosts, str) and hosts:
            return {**fields, "machines": len(hosts)}
        return fields

    def divided(self, parallel: int | None) -> Sequence[ListedHosts]:
        """Give each run hosts of its own, as many as the job asks for."""
        size = self.machines.most
        groups = [self.hosts[start : start + size] for start in range(0, len(self.hosts) - size + 1, size)]
        if parallel is not None and parallel > len(groups):
            raise Mistake(
                f"--parallel {parallel}: {len(self.hosts)} hosts are enough for {counted(len(groups), 'run')} at a time"
                f" with {counted(size, 'machine')} each; lower it, or fleet machines"
            )
        return [self.model_copy(update={"hosts": hosts}) for hosts in groups[:parallel]]

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.hosts:
            yield ("hosts",), "must name at least one host"
        elif len(set(self.hosts)) != len(self.hosts):
            yield ("hosts",), "lists a host twice"
        elif self.machines.most > len(self.hosts):
            yield ("machines",), f"asks for {self.machines.most} machines, but hosts lists only {len(self.hosts)}"


class SshSettings(ListedHosts):
    """Hosts that the system's ssh reaches. `bundle` is for those without a package index."""

    python: Python | None = None
    bundle: StorePath | None = None
    interface: Word | None = None

    def build(self) -> SshFleet:
        return SshFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        return missing_programs(ssh="openssh-client")


class AlreadyThere(Unreachable):
    """A host on which the run already has its node."""


class SshFleet(Fleet, HasTargets, HasShell):
    """`remote` says how a host of the settings is reached, for fleets that rent their hosts."""

    programs: tuple[str, ...] = ("ssh",)

    def __init__(self, settings: SshSettings, remote: Callable[[str], Remote] = Remote) -> None:
        self._settings, self._remote = settings, remote

    def plan(self, run: Run) -> list[LaunchPlan]:
        settings = self._settings
        command = node_arguments(run, settings.python or "python", settings, settings.interface)
        names = passed_variables(run.job.environment, run.store.url)
        remotes = map(self._remote, settings.hosts)
        return [LaunchPlan(remote.name, (*remote.arguments(), shlex.join(command)), names) for remote in remotes]

    def check(self, job: Job, store: Store, say: Say = silent) -> None:
        names = passed_variables(job.environment, store.url)
        _, faults = self.usable_hosts(store.url, names, say, needs_torch=job.program is None)
        for fault in faults:
            say(f"{unavailable(fault)}; the run can start without it")

    def start(self, run: Run, plans: Sequence[LaunchPlan], tied: bool, say: Say = silent) -> list[StartedNode]:
        machines = self._settings.machines
        # Again, although `check` did the same: packing may have taken hours since.
        needs_torch = run.job.program is None
        usable, missing = self.usable_hosts(run.store.url, plans[0].variables, say, needs_torch=needs_torch)
        for fault in missing:
            say(f"{unavailable(fault)}; continuing without it")
        chosen = usable[: machines.most]
        # The node's arguments without `python -P -m packtrain`: which Python it is differs between hosts.
        commands = {plan.machine: shlex.split(plan.arguments[-1])[4:] for plan in plans}
        secrets = values_of(plans[0].variables)
        # PR_SET_PDEATHSIG follows the thread that started a process, not its process: tied connections must be started
        # by this thread, not by one of a pool that ends soon.
        started, faults = in_parallel(
            lambda host: start_node(host, run, commands[host.name], secrets, tied),
            chosen,
            1 if tied else _CONNECTIONS,
        )
        already = [fault for fault in faults if isinstance(fault, AlreadyThere)]
        failed = [fault for fault in faults if not isinstance(fault, AlreadyThere)]
        for fault in already:
            say(f"{fault}; another client has started it")
        if len(started) + len(already) < machines.least:
            # On hosts where the start failed, too: the node may run, and only the answer was lost.
            ours = [host for host in chosen if host.name not in {fault.host for fault in already}]
            in_parallel(lambda host: host.nodes(run.name, run.store.url, end=True), ours)
            raise failed[0]
        for fault in failed:
            say(f"{unavailable(fault)}; continuing without it")
        return [node for node in started if node is not None]

    def usable_hosts(
        self, store: str, variables: Sequence[str], say: Say = silent, *, needs_torch: bool = True
    ) -> tuple[list[Host], list[PacktrainError]]:
        """Return the hosts that can take part, in the job's order, and what is wrong with the others.

        Refuses if too few can.
        """
        hosts, needed = self._settings.hosts, self._settings.machines.least
        bundle = Path(self._settings.bundle) if self._settings.bundle is not None else None
        if bundle is not None:
            environment.check_bundle(bundle)

        def prepare(name: str) -> Host:
            remote = self._remote(name)
            python = environment.find(remote, self._settings.python)
            if python is None:
                say(f"{name}: creating a Python environment for packtrain")
                python = environment.create(remote, bundle)
            host = Host(remote, python)
            # A host that cannot see the store would start its node, and the run would wait for it forever.
            facts = host.facts(store, key, values_of(variables))
            if facts.store_error:
                raise Unreachable(name, f"cannot see the store {store} ({facts.store_error}); {store_advice(store)}")
            if needs_torch and not facts.torch:
                raise Unreachable(name, f"{python} has no torch; run `{python} -m {install_command('train')}` there")
            return host

        with visible_object(open_store(store)) as key:
            usable, faults = in_parallel(prepare, hosts)
        if len(usable) < needed:
            if len(hosts) == 1:
                raise faults[0]
            raise Mistake(f"only {len(usable)} of the {needed} hosts that the run needs are usable: {together(faults)}")
        return usable, faults

    def machines(self, run: Run) -> list[Machine]:
        def state(name: str) -> Machine:
            try:
                host = environment.find_any(self._remote(name), self._settings.python)
                nodes = () if host is None else host.nodes(run.name, run.store.url)
            except PacktrainError:
                return Machine(name, "unreachable")
            return Machine(name, "running") if nodes else Machine(name, "ended", is_over=True)

        return in_parallel(state, self._settings.hosts)[0]

    def end(self, run: Run) -> None:
        def end(name: str) -> None:
            if (host := environment.find_any(self._remote(name), self._settings.python)) is not None:
                host.nodes(run.name, run.store.url, end=True)

        _, faults = in_parallel(end, self._settings.hosts)
        if faults:
            raise Mistake(f"{together(faults)}; nodes may still be running there, end them manually")

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        remote = self._remote(_chosen(self._settings.hosts, machine))
        destination, port = split_destination(remote.name)
        login = ("ssh", "-t", *remote.options, *(("-p", port) if port else ()), "--", destination)
        return (*login, session_command(run.name))

    def targets(self) -> list[Target]:
        settings = self._settings
        return [SshTarget(self._remote(host), settings.python, settings.interface) for host in settings.hosts]


class SshTarget(Target):
    def __init__(self, remote: Remote, python: str | None, interface: str | None) -> None:
        self.name, self._remote, self._python, self.interface = remote.name, remote, python, interface

    def python(self) -> str | None:
        return environment.find(self._remote, self._python)

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        return self._remote.run(command, secrets_line(secrets), seconds)


def start_node(
    host: Host, run: Run, arguments: Sequence[str], secrets: dict[str, str], tied: bool
) -> StartedNode | None:
    """Start a node on a host. A tied one is held by its connection; any other is followed through the store.

    Raises AlreadyThere if the run has its node there: the machine decides, because several clients may start it at the
    same moment.
    """
    options = ["--run", run.name, *(["--tied"] if tied else []), "--", *arguments]
    if tied:
        log = new_log(run.name)
        command = verb_command(host.python, "start", options)
        return StartedNode(host.remote.hold(command, secrets_line(secrets), log), log)
    if host.ask("start", options, secrets)["pid"] is None:
        raise AlreadyThere(host.name, f"{run.name} already has its node there")
    return None


def store_advice(store: str) -> str:
    if "://" in store:
        return "check that the endpoint's address is reachable from there"
    return "mount the same directory there, or use s3://bucket/prefix; `packtrain cp` copies a run to it"


def unavailable(fault: PacktrainError) -> str:
    return f"host {fault.host} is unavailable ({fault.fault})" if isinstance(fault, Unreachable) else str(fault)


def together(faults: Sequence[PacktrainError]) -> str:
    """Join the faults of several hosts; a fault that they share is named once."""
    hosts: dict[str, list[str]] = {}
    for fault in faults:
        text = fault.fault if isinstance(fault, Unreachable) else str(fault)
        hosts.setdefault(text, []).append(fault.host if isinstance(fault, Unreachable) else "all")
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in hosts.items())


def _chosen(hosts: Sequence[str], machine: str | None) -> str:
    """Find a host by its name in the job, or by the node's name in the store, which begins with the hostname."""
    if machine is None:
        return hosts[0]
    for host in hosts:
        plain = split_destination(host)[0].rpartition("@")[2]
        if machine in (host, plain) or machine.startswith(f"{plain.lower()}-"):
            return host
    raise Mistake(f"no host {machine!r} in the job; it has {', '.join(hosts)}")


def in_parallel(
    work: Callable[[Item], Answer], items: Sequence[Item], connections: int = _CONNECTIONS
) -> tuple[list[Answer], list[PacktrainError]]:
    """Return the answers, and the errors that are ours (PacktrainError), both in the order of the items."""

    def attempt(item: Item) -> Answer | PacktrainError:
        try:
            return work(item)
        except PacktrainError as error:
            return error

    if connections == 1 or len(items) < 2:
        answers = [attempt(item) for item in items]
    else:
        with ThreadPoolExecutor(min(connections, len(items))) as pool:
            answers = list(pool.map(attempt, items))
    good = [answer for answer in answers if not isinstance(answer, PacktrainError)]
    return good, [answer for answer in answers if isinstance(answer, PacktrainError)]
