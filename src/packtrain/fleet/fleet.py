"""The interface of fleets. A fleet only starts `packtrain node RUN` on machines, lists the nodes and ends them.

What only some fleets can do is a class of its own (`HasShell`, `HasQueue` and so on), which callers ask for with
`isinstance`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

from packtrain.backoff import Backoff
from packtrain.errors import PacktrainError
from packtrain.fleet.host import Facts, StartedNode
from packtrain.identity import install_command
from packtrain.job import Job
from packtrain.job.kinds import FleetKind
from packtrain.job.part import matching
from packtrain.node.preemption import NoticeSource
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.store.aws_keys import KEY_VARIABLES, SdkKeys, named_profile, needs_sdk, sdk_keys
from packtrain.units import counted

_DOWN_SECONDS = 120.0  # to wait for the end of nodes that commit first

Answer = TypeVar("Answer")
Say = Callable[[str], None]
"""Prints a line for the user who starts a run."""

_NAME = re.compile(r"\$\{([A-Z_]+)\}")
_END = "END_OF_INPUT"

# Settings that several fleets have.
Word = Annotated[str, matching(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,126}", "a name")]
Python = Annotated[str, matching(r"[A-Za-z0-9_./~+-]+", "the path of a Python, as in /opt/train/bin/python")]


def silent(_: str) -> None:
    """Discard a line: the default of `Say`."""


@dataclass(frozen=True)
class LaunchPlan:
    """A command that starts nodes, as a value that can be printed and compared. Never holds a secret.

    `variables` are the names of the environment variables to pass along; `script` is the command's standard input.
    What the command prints is the value of `gives`, a name that stands as `${NAME}` in arguments of later ones.
    """

    machine: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...] = ()
    script: str | None = None
    gives: str | None = None

    def in_shell(self) -> str:
        """Return the command as a person can type it, after those that give what it needs."""
        words = [_NAME.sub(r"""'"${\1}"'""", shlex.quote(word)) for word in self.arguments]
        command = " ".join(words)
        if self.script is not None:
            command += f" <<'{_END}'\n{self.script.rstrip()}\n{_END}\n"
        return command if self.gives is None else f"{self.gives}=$({command})"


@dataclass(frozen=True)
class Machine:
    """The state of a run on one machine, in the words of its fleet. `is_over`: no node will run there again."""

    name: str
    state: str
    is_over: bool = False


def states_of(machines: Sequence[Machine]) -> str:
    """Return the number of machines in each state: `2 RUNNING, 1 PENDING (Resources)`."""
    return ", ".join(f"{count} {state}" for state, count in Counter(machine.state for machine in machines).items())


@dataclass(frozen=True)
class Check:
    """One step of `doctor` on one machine; `advice` says what to do if it is not `ok`. A skipped step is never ok."""

    machine: str
    step: str
    ok: bool
    detail: str
    advice: str = ""
    skipped: bool = False


def tried(
    machine: str, step: str, ask: Callable[[], Answer], tell: Callable[[Any], str] | str
) -> tuple[Check, Answer | None]:
    """Return a check of what may be refused, and the answer; `tell` is a text, or makes one of the answer."""
    try:
        answer = ask()
        return Check(machine, step, True, tell if isinstance(tell, str) else tell(answer)), answer
    except PacktrainError as error:
        return Check(machine, step, False, *fault_and_advice(error)), None


def fault_and_advice(error: PacktrainError) -> tuple[str, str]:
    """Return what is wrong, and what to do about it, which errors have after a semicolon."""
    fault, _, advice = str(error).partition("; ")
    return fault, advice


class Target(ABC):
    """A machine, or several that start commands together, for `doctor` to run its checks on."""

    name: str
    interface: str | None = None

    @abstractmethod
    def python(self) -> str | None:
        """Return the Python with this Packtrain; None if the first run would create it."""

    @abstractmethod
    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        """Run a command there and return its standard output."""

    def link_options(self, rank: int, facts: Facts) -> list[str]:
        """Return the options of the link probe that differ between targets."""
        where = ["--interface", self.interface] if self.interface else ["--address", facts.address]
        return ["--rank", str(rank), *where]


class Fleet(ABC):
    programs: tuple[str, ...] = ()  # that this machine needs to start its nodes
    trains_here = False  # True if this machine is one of the fleet's, and so needs torch
    no_foreground: str | None = None  # why its nodes cannot be tied to a command, if they cannot

    def check(self, job: Job, store: Store, say: Say = silent) -> None:  # noqa: B027
        """Refuse what could not be started. Called before anything slow; `start` checks again."""

    @abstractmethod
    def plan(self, run: Run) -> list[LaunchPlan]:
        """Return what `start` would do for this run, without asking any machine."""

    @abstractmethod
    def start(self, run: Run, plans: Sequence[LaunchPlan], tied: bool, say: Say = silent) -> list[StartedNode]:
        """Start the nodes as planned. Tied nodes end with this process; others keep running without it.

        Returns the nodes that this client can watch; the state of all of them is in the store.
        """

    @abstractmethod
    def machines(self, run: Run) -> list[Machine]:
        """Return the state of the run on its machines now."""

    @abstractmethod
    def end(self, run: Run) -> None:
        """End the run's nodes on all machines; workers may commit first. Does nothing if none is left."""

    def down(self, run: Run, say: Say = silent) -> list[str]:
        """End the run's machines and return their names; when this returns, none of them is left."""
        names = [machine.name for machine in self.machines(run) if not machine.is_over]
        for name, count in Counter(names).items():
            say(f"ending {counted(count, 'node')} on {name}")
        self.end(run)
        backoff = Backoff(0.2, 5.0, limit_seconds=_DOWN_SECONDS)
        while remaining := [machine for machine in self.machines(run) if not machine.is_over]:
            if not backoff.wait():
                raise PacktrainError(f"still there: {states_of(remaining)}; run `{run.command('down')}` again")
        return names


class FleetBuilder(FleetKind):
    """The settings of a fleet, which it is built from."""

    @abstractmethod
    def build(self) -> Fleet: ...


# What only some fleets can do.


class HasTargets(ABC):
    """Its machines are there before a run, for `doctor` and `plan` to try things on."""

    @abstractmethod
    def targets(self) -> list[Target]: ...


class HasShell(ABC):
    @abstractmethod
    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        """Return the command that opens a terminal on a machine of the run."""


class HasQueue(ABC):
    def queue(self, run: Run) -> str | None:
        """Return the run's state in the fleet's queue; None if it has none, or none that can be asked from here."""
        try:
            return self.state_in_queue(run)
        except PacktrainError:
            return None  # no credentials or no program here, or no answer; the store still has one

    @abstractmethod
    def state_in_queue(self, run: Run) -> str | None: ...


class CancelsQueued(ABC):
    @abstractmethod
    def cancel_queued(self, run: Run) -> None:
        """Cancel what waits in the queue for a stopped run."""


class HasNotices(ABC):
    @abstractmethod
    def notices(self) -> Sequence[NoticeSource]:
        """Return sources of preemption notices for a node on one of its machines."""


@dataclass(frozen=True)
class DiskSnapshot:
    """A snapshot of a data disk, which later jobs name in `field`. `is_new`: it is made now; a pack is kept once."""

    name: str
    is_new: bool
    field: str


class HasVolumes(ABC):
    @abstractmethod
    def snapshot(self, run: Run, machine: str | None, pack: str | None) -> DiskSnapshot:
        """Return a snapshot of the data disk of a machine of the run, or of any."""


class HasManifests(ABC):
    """Another program can start its nodes, by a manifest in one of the `formats`."""

    formats: tuple[str, ...]

    @abstractmethod
    def manifests(self, run: Run, form: str) -> str:
        """Return what that program needs to start the run's nodes."""


class Releases(ABC):
    @abstractmethod
    def release(self, run: Run, say: Say = silent) -> None:
        """Give back machines that cost money although the run has ended; called by the client that sees its end."""


def missing_programs(**packages: str) -> dict[str, str]:
    """Return the programs that are not on this machine's path, with the Debian packages that have them."""
    return {program: f"apt install {package}" for program, package in packages.items() if shutil.which(program) is None}


def missing_package(name: str, extra: str) -> dict[str, str]:
    """Return a Python package that cannot be imported here, with the command that installs it."""
    return {} if find_spec(name) is not None else {name: install_command(extra)}


def node_arguments(run: Run, python: str, kind: FleetKind, interface: str | None = None) -> tuple[str, ...]:
    """Return the one command that every fleet starts."""
    where = () if interface is None else ("--interface", interface)
    # The job says so too, but a machine that cannot reach the store cannot read the job, and must still shut down.
    off = ("--power-off",) if kind.power_off else ()
    # The code that this client has put or checked: the store may have other code by the time the node reads it.
    words = ("node", run.name, *store_arguments(run), "--code", run.code_digest)
    # -P: without it, Python would import from the current directory first. Every Python that we start has it, or -I.
    return (python, "-P", "-m", "packtrain", *words, *where, *off)


def run_to_check(job: Job, store: Store) -> Run:
    """Return a run of the job for a dry run: there is none yet, and its number does not matter."""
    return Run(store, f"{job.name[:56]}-1", job.model_dump_json().encode(), b"")


def store_arguments(run: Run) -> tuple[str, ...]:
    """Return how a command on another machine finds the run's store, and refuses another one at the same place."""
    return ("--store", run.store.url, *(() if run.store.identity is None else ("--store-id", run.store.identity)))


def passed_variables(environment: Sequence[str], store: str) -> tuple[str, ...]:
    """Return the names of the variables that remote nodes need: the job's, and the credentials of a bucket."""
    scheme, separator, _ = store.partition("://")
    names: set[str] = set()
    if separator and scheme != "file":  # a node only reads and writes the store: a directory needs no keys
        from packtrain.store.services import SERVICES

        names = SERVICES[scheme].passed(os.environ)
    if (sdk := _sdk_for(environment) if scheme == "s3" else None) is not None:
        names |= {*KEY_VARIABLES, "AWS_REGION", *(() if sdk.endpoint is None else ("AWS_ENDPOINT_URL_S3",))}
    return tuple(sorted(names | {name for name in environment if name in os.environ}))


def values_of(variables: Sequence[str]) -> dict[str, str]:
    """Return the variables' values. Instead of a profile, which is this machine's own, others get its present keys."""
    values: dict[str, str | None] = {}
    keys: dict[str, str | None] = {}
    if {"AWS_REGION", KEY_VARIABLES[0]} & {*variables} and (sdk := _sdk_for(variables)) is not None:
        values = {"AWS_REGION": sdk.region, "AWS_ENDPOINT_URL_S3": sdk.endpoint}
        if KEY_VARIABLES[0] in variables:
            current = sdk.current()
            triple = (current.access_key, current.secret_key, current.session_token)
            keys = dict(zip(KEY_VARIABLES, triple, strict=True))
    # The environment has no whole pair of keys then; a token that is left in it belongs to other keys.
    values |= {name: os.environ[name] for name in variables if name in os.environ}
    values |= keys
    return {name: values[name] or "" for name in variables if name in values}


def passed_keys(variables: Sequence[str]) -> str | None:
    """Return a line about the keys that machines get instead of this machine's profile; None if there is none."""
    sdk = _sdk_for(variables) if KEY_VARIABLES[0] in variables else None
    if sdk is None:
        return None
    sdk.current()  # before that the SDK may not know when they end
    line = f"machines open the store with the current keys of {sdk.title}"
    if sdk.expires is None:
        return line
    return f"{line}; the keys expire at {sdk.expires:%Y-%m-%d %H:%M} UTC, and machines cannot renew them"


def _sdk_for(variables: Sequence[str]) -> SdkKeys | None:
    """Return what gives this machine keys, unless the job passes the profile's name: then machines have it, too."""
    if "AWS_PROFILE" in variables or not needs_sdk(os.environ):
        return None
    return sdk_keys(named_profile(os.environ))
