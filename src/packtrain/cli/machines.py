"""Commands for machines: doctor, attach, and node, which fleets start on them."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import (
    JsonOption,
    RunArgument,
    StoreOption,
    TrustOption,
    console,
    default_store,
    find_run,
    find_store,
    print_json,
    trusting,
)
from packtrain.units import MAX_WORKERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packtrain.fleet.doctor import Check
    from packtrain.job.kinds import FleetKind
    from packtrain.node.directory import NodeSlot
    from packtrain.node.node import Node
    from packtrain.run.run import Run

_MOUNT_SECONDS = 60.0
_KNOWN_ADDRESSES = 3  # a new machine asks for the addresses of this many others; all would be many requests


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(attach)
    app.command()(node)


def doctor(
    fleet: Annotated[
        str, typer.Option("--fleet", metavar="JOB|local|ssh:HOST,HOST", help="The machines to check.")
    ] = "local",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the machines of a fleet and say how to fix what fails."""
    from packtrain.errors import EXIT_DONE, EXIT_MISTAKE, EXIT_UNFINISHED
    from packtrain.fleet.doctor import examine

    kind, place, names, public = _target(fleet, store)
    checks = list(examine(kind, place, names, public))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    failed = any(not check.ok and not check.skipped for check in checks)
    sys.exit(EXIT_MISTAKE if failed else EXIT_UNFINISHED if any(check.skipped for check in checks) else EXIT_DONE)


def _target(fleet: str, store: str | None) -> tuple[FleetKind, str, Sequence[str], bool]:
    """Return the fleet's settings, the store, the variables to pass, and True if addresses may be public."""
    from packtrain.errors import Mistake
    from packtrain.job.kinds import FLEETS, kind_class
    from packtrain.start import load

    place = store or default_store()
    word, _, hosts = fleet.partition(":")
    if word in FLEETS:
        from pydantic import ValidationError

        from packtrain.job.part import faults

        try:
            kind = kind_class(FLEETS, word).model_validate({"hosts": hosts.split(",")} if hosts else {})
            return kind, place, (), False
        except ValidationError as error:
            location, text, missing = faults(error)[0]
            raise Mistake(f"--fleet {fleet}: {f'{location[-1]} ' if missing else ''}{text}") from None
    if not Path(fleet).exists():
        raise Mistake(f"--fleet {fleet}: no such job file; give a job, local, or ssh:host,host")
    job = load(fleet).job
    return job.fleet.kind, store or job.store, job.environment, job.fleet.public_address


def _print(checks: Sequence[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("machine", "check", "", "detail", "fix"):
        table.add_column(column)
    for check in checks:
        mark, style = ("ok", "green") if check.ok else ("skipped", "yellow") if check.skipped else ("failed", "red")
        table.add_row(check.machine, check.step, Text(mark, style), check.detail, check.advice)
    console().print(table)


def attach(
    name: RunArgument = None,
    node: Annotated[str | None, typer.Argument(metavar="MACHINE", help="Default: the run's first machine.")] = None,
    store: StoreOption = None,
) -> None:
    """Open a shell on a machine of a run. With tmux, it joins the session that shows the node's output."""
    from packtrain.fleet import fleet_of

    run = find_run(store, name)
    command = fleet_of(run.job.fleet.kind).shell(run, node)
    os.execvp(command[0], command)  # noqa: S606 - hands the terminal over


def node(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run to take part in.")],
    store: StoreOption = None,
    store_id: Annotated[
        str | None, typer.Option("--store-id", help="Id of the store in a directory; any other one is refused.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Address that other machines reach this one at. Default: a private one.")
    ] = None,
    interface: Annotated[str | None, typer.Option(help="Network interface with that address, such as eth0.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_WORKERS, help="Number of workers. Default: from the job, or one per GPU."),
    ] = None,
    power_off: Annotated[
        bool,
        typer.Option("--power-off", help="Shut this machine down when its part is over. Default: from the job."),
    ] = False,
    code: Annotated[
        str | None, typer.Option("--code", metavar="DIGEST", help="Digest of the code to run; fleets pass it.")
    ] = None,
    trust_code: TrustOption = False,
) -> None:
    """Take part in a run on this machine until it ends. Fleets run this command; you can, too."""
    from packtrain.errors import AlreadyJoined, Mistake, NotFound
    from packtrain.fleet.local import OwnLog
    from packtrain.node.directory import NodeSlot
    from packtrain.node.preemption import record_crash, switch_off
    from packtrain.report import write_report
    from packtrain.run.liveness import EXIT_CODES
    from packtrain.run.run import Run
    from packtrain.store import StoreAway

    log = OwnLog()
    run, slot, joined = Run(find_store(store, store_id), name), None, None
    over = True  # for this machine, even if the node crashes: nothing would start another one here
    try:
        _wait_for_store(run)
        _check_code(run, code, trust_code)
        power_off = power_off or run.job.fleet.kind.power_off
        slot = NodeSlot(run)
        joined = _node(run, address, interface, workers, slot)
        joined.work()
        over = joined.has_done_its_part
        result = run.result()
        if result is not None:
            over = True
            write_report(run)
            if result.status != "failed":
                log.remove()
    except KeyboardInterrupt:
        over = False
        raise
    except AlreadyJoined:  # the other node does this machine's part
        over = False
        log.remove()
        raise
    except Mistake:
        # Before the node joined, a person has to fix the mistake, and may be logged in on this machine to do so.
        over = joined is not None
        raise
    except NotFound:  # no such run: it may have been deleted, and then this machine is no longer needed
        raise
    except Exception as error:
        if over and not isinstance(error, StoreAway):
            record_crash(run, error)
        raise
    finally:
        if slot is not None:
            slot.close()
        switch_off(power_off and over)
    sys.exit(EXIT_CODES["interrupted" if result is None else result.status])


def _wait_for_store(run: Run) -> None:
    """Read the job as soon as the store is there: a machine may start before its mounts, or while one is away.

    A bucket's own client waits just as long.
    """
    from packtrain.backoff import Backoff
    from packtrain.store import StoreAway
    from packtrain.system import say

    backoff = Backoff(0.2, 5.0, limit_seconds=_MOUNT_SECONDS)
    has_said = False
    while True:
        try:
            run.job  # noqa: B018 - reads it
            return
        except StoreAway as error:
            if not has_said:
                say(f"waiting up to {_MOUNT_SECONDS:.0f} s for the store: {error}")
                has_said = True
            if not backoff.wait():
                raise


def _node(run: Run, address: str | None, interface: str | None, workers: int | None, slot: NodeSlot) -> Node:
    from packtrain.fleet import fleet_of
    from packtrain.node.address import check_own, choose_address
    from packtrain.node.node import Node
    from packtrain.node.telemetry import gpu_count

    fleet = run.job.fleet
    own = choose_address(address, interface, fleet.kind.machines.most == 1, run.store.endpoint, _some_addresses(run))
    check_own(own, fleet.public_address)
    count = workers or fleet.workers or gpu_count() or 1
    return Node(run, own, count, dict(os.environ), fleet_of(fleet.kind).notices(), slot=slot)


def _check_code(run: Run, expected: str | None, trust_code: bool) -> None:
    """Refuse other code than that of the client that started this node; without a client, ask the person."""
    from packtrain.errors import RunFailed
    from packtrain.run.trust import require_trust

    if expected is None:
        if run.job.has_own_code or run.job.fleet.kind.power_off:
            require_trust(run, trusting(trust_code))
    elif run.code_digest != expected:
        # Not a Mistake: nobody is at this machine to correct it, and a rented one has to shut down.
        raise RunFailed(f"{run.name}: job or code in {run.store.url} are not those that its client started; not run")


def _some_addresses(run: Run) -> list[str]:
    """Return addresses of a few machines of the run: the route to them shows which interface to use."""
    latest = run.latest_generation()
    if latest is not None:
        return [member.address for member in latest.members[:_KNOWN_ADDRESSES]]
    names = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in run.store.list(run.key("nodes/"))]
    return [lease.address for lease in map(run.lease, names[:_KNOWN_ADDRESSES]) if lease is not None]
