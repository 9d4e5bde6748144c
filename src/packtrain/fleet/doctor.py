"""What works from here: each step that a run takes on each machine, tried, and what to do about what fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import environment
from packtrain.fleet.facts import PROBE, Facts, identity
from packtrain.fleet.link_probe import MEET_SECONDS, SECONDS, Measured
from packtrain.fleet.local import LocalSettings as Local
from packtrain.fleet.mpi import MpiSettings as Mpi
from packtrain.fleet.remote import Remote, Unreachable, agents_command, last_line, secrets_line
from packtrain.fleet.slurm import SlurmSettings as Slurm
from packtrain.fleet.slurm import ask
from packtrain.fleet.ssh import SshSettings as Ssh
from packtrain.fleet.ssh import store_advice
from packtrain.job.kinds import FleetKind
from packtrain.store import open_store
from packtrain.units import show_bytes, show_seconds

DISK_BYTES = 2_000_000_000
CLOCK_SECONDS = 30.0
_EXCHANGE_SECONDS = 2 * MEET_SECONDS + SECONDS


@dataclass(frozen=True)
class Check:
    """One step on one machine. `advice` says what to do where it is not `ok`; nothing is ok that was not `tried`."""

    machine: str
    step: str
    ok: bool
    what: str
    advice: str = ""
    tried: bool = True


@dataclass(frozen=True)
class Seen:
    """A machine that answered: what it says, and how far its clock is from ours."""

    facts: Facts
    offset_seconds: float


class Site(ABC):
    """A machine to try the steps on."""

    name: str

    @abstractmethod
    def python(self) -> str | None:
        """The Python with our Packtrain; None where one would be made."""

    @abstractmethod
    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        """What a command wrote there."""


class Here(Site):
    def __init__(self, name: str = "this machine") -> None:
        self.name = name

    def python(self) -> str | None:
        return sys.executable

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        text = secrets_line(secrets)
        done = subprocess.run(list(command), input=text, capture_output=True, check=False, timeout=seconds)
        if done.returncode != 0:
            raise Mistake(last_line(done.stderr.decode(errors="replace")) or f"exit code {done.returncode}")
        return done.stdout.decode()


class There(Site):
    def __init__(self, host: str, python: str | None) -> None:
        self.name, self._remote, self._python = host, Remote(host), python

    def python(self) -> str | None:
        return environment.find(self._remote, self._python)

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:
        return self._remote.run(command, secrets_line(secrets), seconds)


class OnSlurm(Site):
    """All nodes of the job at once, each under its number: srun starts the command on every one of them."""

    def __init__(self, settings: Slurm) -> None:
        self.name, self._settings = "slurm", settings

    def python(self) -> str | None:
        return self._settings.python or sys.executable

    def run(self, command: Sequence[str], secrets: dict[str, str], seconds: float) -> str:  # noqa: ARG002
        settings = self._settings
        options = [
            f"--nodes={settings.machines.least}", "--ntasks-per-node=1", f"--immediate={MEET_SECONDS:.0f}",
            f"--time={max(1, round(seconds / 60))}",
            *([f"--partition={settings.partition}"] if settings.partition else []),
            *([f"--account={settings.account}"] if settings.account else []),
            *([f"--gres=gpu:{settings.gpus}"] if settings.gpus else []),
        ]  # fmt: skip
        return ask(("srun", *options, *settings.options, *command), "", seconds)


def sites_of(kind: FleetKind) -> list[Site]:
    if isinstance(kind, Ssh):
        return [There(host, kind.python) for host in kind.hosts]
    if isinstance(kind, Mpi):
        return [There(host, kind.python or sys.executable) for host in kind.hosts]
    if isinstance(kind, Slurm):
        return [OnSlurm(kind)]
    return [Here(f"process {number}") for number in range(1, kind.machines.most + 1)]


def examine(
    kind: FleetKind, location: str, environment_names: Sequence[str] = (), public_address: bool = False
) -> Iterator[Check]:
    """Every step in order, as soon as it is known; those that depend on a failed one are left out."""
    programs = list(_programs(kind))
    yield from programs
    if not all(check.ok for check in programs):
        yield Check("all machines", "reach", False, "needs what is not there", "see above, then ask again", tried=False)
        return
    store = open_store(location)
    key = f"scratch/doctor-{uuid.uuid4().hex}"
    secrets = {
        name: value for name, value in os.environ.items() if name.startswith("AWS_") or name in environment_names
    }
    try:
        store.put(key, PROBE)
    except PacktrainError as error:
        yield Check("this machine", "store", False, str(error), "nothing can run without it: see above")
        return
    try:
        reached: list[tuple[Site, str, list[Seen]]] = []
        with ThreadPoolExecutor(32) as pool:
            for checks, found in pool.map(lambda site: _look(site, store.url, key, secrets), sites_of(kind)):
                yield from checks
                reached += found
        seen = [one for _, _, several in reached for one in several]
        if len(seen) > 1:
            yield _exchange(kind, reached, store.url, f"{key}-meet", secrets, public_address)
        elif kind.machines.most > 1:
            what = f"{len(seen)} of {kind.machines} machines could take part"
            yield Check("all machines", "exchange", False, what, "see above, then ask again", tried=False)
    finally:
        for entry in store.list("scratch/"):
            if entry.key.startswith(key):
                store.delete(entry.key)


def _programs(kind: FleetKind) -> Iterator[Check]:
    """What this machine needs to start such a fleet."""
    wanted = {Local: (), Ssh: ("ssh",), Mpi: ("mpirun", "ssh"), Slurm: ("sbatch", "squeue", "srun")}
    for program in wanted.get(type(kind), ()):
        found = shutil.which(program)
        advice = "" if found else f"install it, or start from a machine that has {program}"
        yield Check("this machine", program, found is not None, found or "is not there", advice)


def _look(
    site: Site, store: str, key: str, secrets: dict[str, str]
) -> tuple[list[Check], list[tuple[Site, str, list[Seen]]]]:
    """What one site says: every check of it, and how to go on with it."""
    try:
        began = time.monotonic()
        python = site.python()
        took = time.monotonic() - began
    except PacktrainError as error:
        if isinstance(error, Unreachable) and error.answers:
            text = "mend `python` in the job, or leave it out to have an environment made"
            return [
                Check(site.name, "reach", True, "answers"),
                Check(site.name, "python", False, error.fault, text),
            ], []
        return [Check(site.name, "reach", False, str(error), "the run can do without it if `machines` allows")], []
    checks = [Check(site.name, "reach", True, f"answers in {show_seconds(took)}")]
    if python is None:
        return [*checks, *_fresh(site.name)], []
    try:
        command = agents_command(python, "check", ["--store", store, "--key", key])
        asked = time.time()
        answers = _documents(site.run(command, secrets, 120.0))
        seen = [_seen(Facts(**answer), asked, time.time()) for answer in answers]
    except (PacktrainError, OSError, subprocess.SubprocessError, TypeError) as error:
        return [
            *checks,
            Check(site.name, "python", False, str(error), f"try `{python} -m packtrain --version` there"),
        ], []
    for one in seen:
        name = site.name if len(seen) == 1 else one.facts.hostname
        checks += judged(name, one, store)
    able = [one for one in seen if not one.facts.store and one.facts.torch]
    return checks, [(site, python, able)] if able else []


def _fresh(name: str) -> list[Check]:
    """There is nothing there yet that could try the other steps."""
    made = "the first run makes an environment there"
    install = f"ask again after the first run, or install 'packtrain[train]' {identity()} there"
    return [
        Check(name, "python", False, f"no packtrain {identity()} there", made, tried=False),
        Check(name, "disk, clock, store", False, "need packtrain there", install, tried=False),
    ]


def _seen(facts: Facts, asked: float, answered: float) -> Seen:
    """Its clock is off by what cannot be explained by the time that the question took."""
    offset = facts.time - answered if facts.time > answered else min(0.0, facts.time - asked)
    return Seen(facts, offset)


def judged(name: str, seen: Seen, store: str) -> list[Check]:
    """What a machine's answers mean for a run."""
    facts, offset = seen.facts, seen.offset_seconds
    same, enough = facts.identity == identity(), facts.free_bytes >= DISK_BYTES
    right, sees = abs(offset) <= CLOCK_SECONDS, not facts.store
    python = f"{facts.version}, packtrain {facts.identity}" + ("" if facts.torch else ", no torch")
    return [
        Check(name, "python", same and facts.torch, python, "" if same and facts.torch else _install(facts)),
        Check(name, "disk", enough, f"{show_bytes(facts.free_bytes)} free", "" if enough else "make room for packs"),
        Check(
            name,
            "clock",
            right,
            f"off by {abs(offset):.0f} s" if abs(offset) >= 1 else "right",
            "" if right else "start chrony or systemd-timesyncd there; buckets refuse wrong clocks",
        ),
        Check(
            name, "store", sees, "is seen" if sees else facts.store, "" if sees else store_advice(store, facts.store)
        ),
        *_put_if_absent(name, facts),
    ]


def _install(facts: Facts) -> str:
    return f"install 'packtrain[train]' {identity()} there, or leave `python` out to have it made ({facts.python})"


def _put_if_absent(name: str, facts: Facts) -> list[Check]:
    if facts.put_if_absent is None:
        return []
    advice = "" if facts.put_if_absent else "machines could not agree: use another store for more than one"
    what = "holds" if facts.put_if_absent else "is ignored by the store"
    return [Check(name, "put-if-absent", facts.put_if_absent, what, advice)]


def _exchange(
    kind: FleetKind,
    reached: Sequence[tuple[Site, str, list[Seen]]],
    store: str,
    key: str,
    secrets: dict[str, str],
    public_address: bool = False,
) -> Check:
    """An all-reduce between all machines that can take part."""
    facts = [one.facts for _, _, several in reached for one in several]
    world = len(facts)
    backend = "nccl" if all(one.gpus for one in facts) else "gloo"
    options = ["--store", store, "--key", key, "--world", str(world), "--backend", backend]
    options += ["--public-address"] if public_address else []
    interface = getattr(kind, "interface", None)

    def join(rank: int) -> str:
        site, python, _ = reached[rank]
        where = ["--interface", interface] if interface else []
        if not interface and not isinstance(kind, Slurm):
            where = ["--address", "127.0.0.1" if isinstance(kind, Local) else facts[rank].address]
        own = [] if isinstance(kind, Slurm) else ["--rank", str(rank)]
        command = agents_command(python, "exchange", ["--", *options, *own, *where])
        return site.run(command, secrets, _EXCHANGE_SECONDS)

    names = f"{world} machines"
    try:
        with ThreadPoolExecutor(world) as pool:
            answers = list(pool.map(join, range(len(reached))))
        measured = Measured(**_documents(answers[0])[0])
    except (PacktrainError, OSError, subprocess.SubprocessError, IndexError) as error:
        if "is a public address" in str(error):
            return Check(names, "exchange", False, str(error), "name `interface` in the fleet, such as wg0 of a VPN")
        text = "they must reach each other on any port of that interface: open the firewall, or name `interface`"
        return Check(names, "exchange", False, str(error), text)
    rate, delay = measured.bytes_per_second, measured.latency_seconds
    what = f"{backend}: {show_bytes(rate)}/s ({rate * 8 / 1e9:.2f} Gbit/s), {delay * 1e3:.2f} ms"
    return Check(names, "exchange", True, what)


def _documents(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                found.append(document)
    if not found:
        raise Mistake(f"an answer that cannot be read: {text[-200:]!r}")
    return found
