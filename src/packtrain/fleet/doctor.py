"""`packtrain doctor`: what this machine has, and every step that a run takes on its machines, tried one by one.

Nothing is started, imported or asked over the network to describe this machine, and no credential is read: only whether
there are some.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import fleet_of
from packtrain.fleet.cloud import CloudFleet
from packtrain.fleet.fleet import (
    Check,
    HasTargets,
    Target,
    fault_and_advice,
    passed_keys,
    passed_variables,
    tried,
    values_of,
)
from packtrain.fleet.host import Facts, verb_command, visible_object
from packtrain.fleet.link_probe import RENDEZVOUS_SECONDS, SECONDS, LinkSpeed
from packtrain.fleet.remote import Unreachable
from packtrain.fleet.ssh import store_advice
from packtrain.identity import identity, install_command
from packtrain.job.kinds import FLEETS, FleetKind, kind_class
from packtrain.node.telemetry import GpuSampler
from packtrain.store import Store, open_store
from packtrain.system import cache_directory, check_shared_memory, is_scratch, state_directory, usable_cores
from packtrain.units import counted, show_bytes, show_seconds

DISK_BYTES = 2_000_000_000
CLOCK_SECONDS = 30.0
_FACTS_SECONDS = 120.0
_LINK_PROBE_SECONDS = 2 * RENDEZVOUS_SECONDS + SECONDS
_CUDA = re.compile(r"^cuda[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b([0-9]+\.[0-9]+(?:\.[0-9]+)?)\b")


# This machine.


@dataclass(frozen=True)
class Trait:
    """One thing about this machine. `fix` is empty unless a run on this machine lacks it; `note` is worth knowing."""

    name: str
    detail: str
    fix: str = ""
    note: str = ""


@dataclass(frozen=True)
class Here:
    """This machine. `missing` has for each fleet what it lacks, with how to get it."""

    traits: tuple[Trait, ...]
    missing: Mapping[str, Mapping[str, str]]

    @property
    def can_train(self) -> bool:
        return not any(trait.fix for trait in self.traits)


def describe(store: str, create_store: bool) -> Here:
    gpus = GpuSampler().sample()
    memories = {
        name: [gpu.memory_bytes for gpu in gpus if gpu.name == name] for name in dict.fromkeys(g.name for g in gpus)
    }
    models = [f"{len(sizes)} x {name}, {show_bytes(max(sizes))} each" for name, sizes in memories.items()]
    unreadable = f"a driver is loaded, but cannot be asked; run `{install_command('train')}`"
    memory = psutil.virtual_memory()
    driver = "none from NVIDIA"
    with suppress(OSError):  # the kernel's own words: NVIDIA's library may be missing
        number = _DRIVER_VERSION.search(_DRIVER.read_text("utf-8"))
        driver = f"NVIDIA {number[1]}" if number else "NVIDIA"
    shared: list[Trait] = []
    try:
        check_shared_memory()
    except Mistake as mistake:
        shared = [Trait("shared", *fault_and_advice(mistake))]
    traits = (
        Trait("machine", socket.gethostname()),
        Trait("python", f"{'.'.join(map(str, sys.version_info[:3]))}  {sys.executable}"),
        Trait("packtrain", identity()),
        _torch(has_gpus=bool(gpus)),
        Trait("GPUs", "; ".join(models) or "none")
        if gpus or not _DRIVER.exists()
        else Trait("GPUs", "unknown", note=unreadable),
        Trait("driver", driver),
        Trait("cores", counted(usable_cores(), "core")),
        Trait("memory", f"{show_bytes(memory.total)}, {show_bytes(memory.available)} available"),
        *shared,
        _disk(),
        _store(store, create_store),
    )
    kinds: dict[str, type[FleetKind]] = {word: kind_class(FLEETS, word) for word in FLEETS}
    return Here(traits, {word: kind.missing_here() for word, kind in kinds.items()})


def _torch(has_gpus: bool) -> Trait:
    """Return torch's version and CUDA, from its files: importing it takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return Trait("torch", "not installed", f"run `{install_command('train')}`")
    try:
        installed = version("torch")
        built = _CUDA.search(Path(spec.origin).with_name("version.py").read_text("utf-8"))
    except (PackageNotFoundError, OSError):
        return Trait("torch", "damaged", f"run `{install_command('train')}` again")
    note = "install a build of torch with CUDA to use the GPUs" if has_gpus and built is None else ""
    return Trait("torch", f"{installed}, {f'CUDA {built[1]}' if built else 'no CUDA'}", note=note)


def _disk() -> Trait:
    try:
        cache, state = cache_directory(), state_directory()
    except Mistake as mistake:
        fault, _, advice = str(mistake).rpartition("; ")
        return Trait("disk", fault, advice)
    free = shutil.disk_usage(cache).free
    fix = "" if free >= DISK_BYTES else "free some space, or set PACKTRAIN_CACHE to a larger disk"
    is_temporary = is_scratch(cache) or is_scratch(state)
    note = "cannot write to the home directory; set HOME, or PACKTRAIN_CACHE and XDG_STATE_HOME" if is_temporary else ""
    return Trait("disk", f"{show_bytes(free)} free  {cache}", fix, note)


def _store(location: str, create: bool) -> Trait:
    try:
        store = open_store(location, create=create, outage_seconds=10.0, answer_seconds=5.0)
        if not create and store.is_directory and not Path(store.url).exists():
            return Trait("store", f"none yet  {location}", note="`packtrain run` and `packtrain pack` create it")
        store.folders("runs/")
        is_atomic = store.supports_put_if_absent()
    except PacktrainError as error:
        fault, advice = fault_and_advice(error)
        return Trait("store", fault, advice or "check its address and your access to it")
    note = "" if is_atomic else "it has no atomic create; use another store to run on more than one machine"
    return Trait("store", f"reachable  {store.url}", note=note)


# The machines of a fleet.


@dataclass(frozen=True)
class Usable:
    """A target with machines that can take part in a run."""

    target: Target
    python: str
    machines: Sequence[Facts]


def examine(
    kind: FleetKind,
    location: str,
    environment_names: Sequence[str] = (),
    public_address: bool = False,
    needs_torch: bool = True,
) -> Iterator[Check]:
    """Yield every check as soon as it is known; steps that depend on a failed one are left out."""
    fleet = fleet_of(kind)
    paths = {program: shutil.which(program) for program in fleet.programs}
    for program, path in paths.items():
        advice = f"install it, or start from a machine that has {program}"
        yield _check("this machine", program, path is not None, path or "not found", advice)
    if not all(paths.values()):
        yield Check("all machines", "connect", False, "missing prerequisites", "install them first", skipped=True)
        return
    if isinstance(fleet, CloudFleet):
        yield from _examine_rented(fleet, location)
        return
    with ExitStack() as stack:
        try:
            variables = passed_variables(environment_names, location)
            secrets, keys = values_of(variables), passed_keys(variables)
            store = open_store(location, create=True)
            key = stack.enter_context(visible_object(store))
        except PacktrainError as error:
            yield Check("this machine", "store", False, str(error), "no run can start without a store; fix this first")
            return
        if keys is not None and not fleet.trains_here:
            yield Check("this machine", "store", True, keys)
        usable: list[Usable] = []
        # In parallel, because a host that does not answer takes ten seconds; `map` still yields in the job's order.
        pool = stack.enter_context(ThreadPoolExecutor(32))
        look = partial(check_target, store=store.url, key=key, secrets=secrets, needs_torch=needs_torch)
        for checks, able in pool.map(look, fleet.targets() if isinstance(fleet, HasTargets) else ()):
            yield from checks
            usable += [able] if able else []
        machines = [facts for able in usable for facts in able.machines]
        if len(machines) > 1 and not all(facts.torch for facts in machines):
            detail, advice = "needs torch on every machine", "install torch there to measure the links"
            yield Check("all machines", "link probe", False, detail, advice, skipped=True)
        elif len(machines) > 1:
            options = ["--store", store.url, "--key", f"{key}-link", "--world", str(len(machines))]
            options += ["--public-address"] if public_address else []
            yield _link_probe(usable, options, secrets)
        elif kind.machines.most > 1:
            detail = f"only {len(machines)} of {kind.machines} machines can take part"
            yield Check("all machines", "link probe", False, detail, "fix the machines above", skipped=True)


def _examine_rented(fleet: CloudFleet, location: str) -> Iterator[Check]:
    """Check what can be checked from here: these machines exist only while a run rents them."""

    def reach() -> tuple[Store, bool]:
        store = open_store(location, create=True, outage_seconds=10.0, answer_seconds=5.0)
        with visible_object(store):
            return store, store.supports_put_if_absent()

    def tell(reached: tuple[Store, bool]) -> str:
        source = reached[0].key_source
        return "reachable" if source is None else f"reachable with {source}, which machines do not get"

    check, reached = tried("this machine", "store", reach, tell)
    yield check
    if reached is not None:
        yield _atomic_create("this machine", reached[1])
    yield from fleet.checks(reached[0] if reached else None)


def check_target(
    target: Target, store: str, key: str, secrets: dict[str, str], needs_torch: bool = True
) -> tuple[list[Check], Usable | None]:
    name = target.name
    began = time.monotonic()
    try:
        python = target.python()
    except PacktrainError as error:
        if not (isinstance(error, Unreachable) and error.answers):  # ssh itself failed
            advice = "the run can start without it if `machines` is a range"
            return [Check(name, "connect", False, str(error), advice)], None
        advice = "fix `python` in the job, or remove it to have an environment created"
        return [Check(name, "connect", True, "ok"), Check(name, "python", False, error.fault, advice)], None
    checks = [Check(name, "connect", True, f"answered in {show_seconds(time.monotonic() - began)}")]
    if python is None:
        detail, reason = f"packtrain {identity()} is not installed", "requires packtrain on the machine"
        install = f"run doctor again after the first run, or install packtrain {identity()} there from its source"
        checks.append(Check(name, "python", False, detail, "the first run creates an environment", skipped=True))
        return [*checks, Check(name, "disk, clock, store", False, reason, install, skipped=True)], None
    command = verb_command(python, "check", ["--store", store, "--key", key])
    # The machine's clock is read between these two moments: that bounds how far it may be off.
    before = time.time()
    try:
        machines = [Facts(**answer) for answer in documents(target.run(command, secrets, _FACTS_SECONDS))]
    except (PacktrainError, OSError, subprocess.SubprocessError, TypeError) as error:
        advice = f"run `{python} -m packtrain --version` there"
        return [*checks, Check(name, "python", False, str(error), advice)], None
    after = time.time()
    for facts in machines:
        machine = name if len(machines) == 1 else facts.hostname
        checks += judge(machine, facts, clock_offset(facts.time, before, after), store, needs_torch)
    # Even with another version of Packtrain: the links are worth measuring before that is fixed.
    able = [facts for facts in machines if not facts.store_error and (facts.torch or not needs_torch)]
    return checks, Usable(target, python, able) if able else None


def clock_offset(theirs: float, before: float, after: float) -> float:
    """Return how far a machine's clock is off, not counting the time that the question itself took."""
    return theirs - after if theirs > after else min(0.0, theirs - before)


def judge(name: str, facts: Facts, offset_seconds: float, store: str, needs_torch: bool = True) -> list[Check]:
    """Turn a machine's facts into checks."""
    versions = f"{facts.version}, packtrain {facts.identity}" + ("" if facts.torch else ", no torch")
    install = (
        f"install packtrain {identity()} there from its source ({facts.python})"
        if facts.identity != identity()
        else f"run `{facts.python} -m {install_command('train')}` there"
    )
    install += ", or remove `python` to have an environment created"
    off = abs(offset_seconds)
    clock = f"off by {off:.0f} s" if off >= 1 else "ok"
    sync = "start chrony or systemd-timesyncd there; buckets reject requests with a wrong time"
    fits = facts.identity == identity() and (facts.torch or not needs_torch)
    checks = [
        _check(name, "python", fits, versions, install),
        _check(name, "disk", facts.free_bytes >= DISK_BYTES, f"{show_bytes(facts.free_bytes)} free", "free some space"),
        _check(name, "clock", off <= CLOCK_SECONDS, clock, sync),
        _check(name, "store", not facts.store_error, facts.store_error or "reachable", store_advice(store)),
    ]
    if facts.atomic_create is not None:
        checks.append(_atomic_create(name, facts.atomic_create))
    return checks


def _atomic_create(machine: str, works: bool) -> Check:
    detail = "ok" if works else "not supported by the store"
    return _check(machine, "atomic create", works, detail, "use another store to run on more than one machine")


def _check(machine: str, step: str, ok: bool, detail: str, advice: str) -> Check:
    return Check(machine, step, ok, detail, "" if ok else advice)


def measure_links(usable: Sequence[Usable], options: Sequence[str], secrets: dict[str, str]) -> LinkSpeed:
    """Measure an all-reduce between all machines that can take part."""

    backend = "nccl" if all(facts.gpus for able in usable for facts in able.machines) else "gloo"

    def join(rank: int) -> str:
        able = usable[rank]
        differing = able.target.link_options(rank, able.machines[0])
        words = ["--", *options, "--backend", backend, *differing]
        return able.target.run(verb_command(able.python, "link-probe", words), secrets, _LINK_PROBE_SECONDS)

    with ThreadPoolExecutor(len(usable)) as pool:  # a thread for each: all must run at the same time to meet
        answers = list(pool.map(join, range(len(usable))))
    return LinkSpeed(**documents(answers[0])[0])  # a collective: all of them measured the same


def _link_probe(usable: Sequence[Usable], options: Sequence[str], secrets: dict[str, str]) -> Check:
    names = f"{sum(len(able.machines) for able in usable)} machines"
    try:
        speed = measure_links(usable, options, secrets)
    except (PacktrainError, OSError, subprocess.SubprocessError) as error:
        advice = "open the firewall between the machines for all ports of that interface, or set `interface`"
        if "is a public address" in str(error):  # raised on the machine; here it is only text
            advice = "set `interface` in the fleet, such as wg0 of a VPN"
        return Check(names, "link probe", False, str(error), advice)
    rate, delay = speed.bytes_per_second, speed.latency_seconds
    detail = f"{speed.backend}: {show_bytes(rate)}/s ({rate * 8 / 1e9:.2f} Gbit/s), {delay * 1e3:.2f} ms"
    return Check(names, "link probe", True, detail)


def documents(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines; the host may print a greeting around them."""
    objects = []
    for line in text.splitlines():
        with suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                objects.append(document)
    if not objects:
        raise Mistake(f"unexpected answer: {text[-200:]!r}")
    return objects
