"""Try every step that a run takes on its machines, and say what to do about what fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from packtrain.errors import Mistake, PacktrainError
from packtrain.fleet import fleet_of
from packtrain.fleet.facts import Facts, visible_object
from packtrain.fleet.fleet import Check, Fleet, Target, passed_keys, passed_variables, tried, values_of
from packtrain.fleet.link_probe import RENDEZVOUS_SECONDS, SECONDS, LinkSpeed
from packtrain.fleet.remote import Unreachable, verb_command
from packtrain.fleet.ssh import store_advice
from packtrain.identity import identity, install_command
from packtrain.job.kinds import FleetKind
from packtrain.store import Store, open_store
from packtrain.units import show_bytes, show_seconds

DISK_BYTES = 2_000_000_000
CLOCK_SECONDS = 30.0
_FACTS_SECONDS = 120.0
_LINK_PROBE_SECONDS = 2 * RENDEZVOUS_SECONDS + SECONDS


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
    found = {program: shutil.which(program) for program in fleet.programs}
    for program, path in found.items():
        advice = f"install it, or start from a machine that has {program}"
        yield _check("this machine", program, path is not None, path or "not found", advice)
    if not all(found.values()):
        yield Check("all machines", "connect", False, "missing prerequisites", "install them first", skipped=True)
        return
    if fleet.rents:
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
        for checks, one in pool.map(look, fleet.targets()):
            yield from checks
            usable += [one] if one else []
        count = sum(len(one.machines) for one in usable)
        if count > 1 and not all(machine.torch for one in usable for machine in one.machines):
            detail, advice = "needs torch on every machine", "install torch there to measure the links"
            yield Check("all machines", "link probe", False, detail, advice, skipped=True)
        elif count > 1:
            options = ["--store", store.url, "--key", f"{key}-link", "--world", str(count)]
            options += ["--public-address"] if public_address else []
            yield _link_probe(usable, options, secrets)
        elif kind.machines.most > 1:
            detail = f"only {count} of {kind.machines} machines can take part"
            yield Check("all machines", "link probe", False, detail, "fix the machines above", skipped=True)


def _examine_rented(fleet: Fleet, location: str) -> Iterator[Check]:
    """Check what can be checked from here: these machines exist only while a run rents them."""

    def reach() -> tuple[Store, bool]:
        store = open_store(location, create=True, outage_seconds=10.0, answer_seconds=5.0)
        with visible_object(store):
            return store, store.supports_put_if_absent()

    check, reached = tried("this machine", "store", reach, _reached_words)
    yield check
    if reached is not None:
        yield _atomic_create("this machine", reached[1])
    yield from fleet.checks(reached[0] if reached else None)


def _reached_words(reached: tuple[Store, bool]) -> str:
    source = reached[0].key_source
    return "reachable" if source is None else f"reachable with {source}, which machines do not get"


def check_target(
    target: Target, store: str, key: str, secrets: dict[str, str], needs_torch: bool = True
) -> tuple[list[Check], Usable | None]:
    """Run every check on one target."""
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
        detail, rest = f"packtrain {identity()} is not installed", "requires packtrain on the machine"
        install = f"run doctor again after the first run, or install packtrain {identity()} there from its source"
        checks.append(Check(name, "python", False, detail, "the first run creates an environment", skipped=True))
        return [*checks, Check(name, "disk, clock, store", False, rest, install, skipped=True)], None
    command = verb_command(python, "check", ["--store", store, "--key", key])
    # The machine's clock is read between these two moments: that bounds how far it may be off.
    asked = time.time()
    try:
        machines = [Facts(**answer) for answer in documents(target.run(command, secrets, _FACTS_SECONDS))]
    except (PacktrainError, OSError, subprocess.SubprocessError, TypeError) as error:
        advice = f"run `{python} -m packtrain --version` there"
        return [*checks, Check(name, "python", False, str(error), advice)], None
    answered = time.time()
    for facts in machines:
        own = name if len(machines) == 1 else facts.hostname
        checks += judge(own, facts, clock_offset(facts.time, asked, answered), store, needs_torch)
    # Even with another version of Packtrain: the links are worth measuring before that is fixed.
    able = [facts for facts in machines if not facts.store_error and (facts.torch or not needs_torch)]
    return checks, Usable(target, python, able) if able else None


def clock_offset(theirs: float, asked: float, answered: float) -> float:
    """Return how far a machine's clock is off, not counting the time that the question itself took."""
    return theirs - answered if theirs > answered else min(0.0, theirs - asked)


def judge(name: str, facts: Facts, offset_seconds: float, store: str, needs_torch: bool = True) -> list[Check]:
    """Turn a machine's facts into checks."""
    version = f"{facts.version}, packtrain {facts.identity}" + ("" if facts.torch else ", no torch")
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
        _check(name, "python", fits, version, install),
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

    def join(rank: int) -> str:
        one = usable[rank]
        own = one.target.link_options(rank, one.machines[0])
        command = verb_command(one.python, "link-probe", ["--", *options, "--backend", link_backend(usable), *own])
        return one.target.run(command, secrets, _LINK_PROBE_SECONDS)

    with ThreadPoolExecutor(len(usable)) as pool:  # a thread for each: all must run at the same time to meet
        answers = list(pool.map(join, range(len(usable))))
    return LinkSpeed(**documents(answers[0])[0])  # a collective: all of them measured the same


def link_backend(usable: Sequence[Usable]) -> str:
    return "nccl" if all(machine.gpus for one in usable for machine in one.machines) else "gloo"


def _link_probe(usable: Sequence[Usable], options: Sequence[str], secrets: dict[str, str]) -> Check:
    names = f"{sum(len(one.machines) for one in usable)} machines"
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
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict):
                found.append(document)
    if not found:
        raise Mistake(f"unexpected answer: {text[-200:]!r}")
    return found
