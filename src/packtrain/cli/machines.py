"""Verbs for the machines of a fleet: doctor, attach."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import JsonOption, RunArgument, StoreOption, console, find_run, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packtrain.fleet.doctor import Check
    from packtrain.job.kinds import FleetKind
from packtrain.cli.common import find_store

if TYPE_CHECKING:
    from packtrain.node.agent import Agent
    from packtrain.run.run import Run


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(attach)
    app.command()(node)


def doctor(
    fleet: Annotated[
        str, typer.Option("--fleet", metavar="JOB|local|ssh:HOST,HOST", help="The machines to try.")
    ] = "local",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try each step that a run takes on its machines, and say what to do about what fails."""
    from packtrain.errors import EXIT_DONE, EXIT_MISTAKE, EXIT_UNFINISHED
    from packtrain.fleet.doctor import examine

    kind, place, names, public = _target(fleet, store)
    checks = list(examine(kind, place, names, public))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    failed = any(check.tried and not check.ok for check in checks)
    sys.exit(EXIT_MISTAKE if failed else EXIT_DONE if all(check.tried for check in checks) else EXIT_UNFINISHED)


def attach(
    name: RunArgument = None,
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="A node or a host. Default: the first.")] = None,
    store: StoreOption = None,
) -> None:
    """Open a shell on a machine of a run; where it has tmux, in the session that shows the agent's words."""
    from packtrain.fleet import fleet_of

    run = find_run(store, name)
    command = fleet_of(run.job.fleet.kind).shell(run, node)
    os.execvp(command[0], command)  # noqa: S606 - the terminal is the shell's from now on


def _target(fleet: str, store: str | None) -> tuple[FleetKind, str, Sequence[str], bool]:
    """The machines, the store, the variables, and whether addresses may be public: of a job, or of a short form."""
    from packtrain.errors import Mistake
    from packtrain.fleet.local import LocalSettings
    from packtrain.fleet.ssh import SshSettings
    from packtrain.start import load

    place = store or os.environ.get("PACKTRAIN_STORE") or "./store"
    if fleet == "local":
        return LocalSettings(), place, (), False
    if fleet.startswith("ssh:"):
        from pydantic import ValidationError

        from packtrain.job.part import faults

        try:
            return SshSettings.model_validate({"hosts": fleet.removeprefix("ssh:").split(",")}), place, (), False
        except ValidationError as error:
            raise Mistake(f"--fleet {fleet}: {faults(error)[0][1]}") from None
    if not Path(fleet).exists():
        raise Mistake(f"--fleet {fleet}: there is no such job file; or write local, or ssh:host,host")
    job = load(fleet).job
    return job.fleet.kind, store or job.store, job.environment, job.fleet.public_address


def _print(checks: Sequence[Check]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("machine", "step", "", "what", "what to do"):
        table.add_column(column)
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[red]fails[/red]" if check.tried else "[yellow]not tried[/yellow]"
        table.add_row(escape(check.machine), check.step, mark, escape(check.what), escape(check.advice))
    console().print(table)


# The verb that fleets start on machines: node.


_FEW = 3


def node(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run to take part in.")],
    store: StoreOption = None,
    address: Annotated[
        str | None, typer.Option(help="Where the other machines reach this one. Default: a private address.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="The network interface with that address, such as eth0.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes. Default: the job's, or one per GPU.")
    ] = None,
    power_off: Annotated[
        bool,
        typer.Option("--power-off", help="Switch this machine off when its part is over. Default: as the job says."),
    ] = False,
) -> None:
    """Take part in a run on this machine until it ends. Fleets start this; people may, too."""
    from packtrain.errors import Mistake, NotFound
    from packtrain.node.preemption import say_why, switch_off
    from packtrain.report import write_report
    from packtrain.run.liveness import EXIT_CODES
    from packtrain.run.run import Run

    run, agent = Run(find_store(store), name), None
    over = True  # for this machine: also where its agent ends by a defect, for nobody would start another
    try:
        power_off = power_off or run.job.fleet.kind.power_off
        agent = _agent(run, address, interface, workers)
        agent.work()
        over = agent.has_done_its_part
        result = run.result()
        if result is not None:
            over = True
            write_report(run)
    except KeyboardInterrupt:
        over = False
        raise
    except Mistake:
        over = agent is not None  # before that it is for a person to mend, who may be at work on this machine
        raise
    except NotFound:
        raise
    except Exception as error:
        if over:
            say_why(run, error)
        raise
    finally:
        switch_off(power_off and over)
    sys.exit(EXIT_CODES["interrupted" if result is None else result.status])


def _agent(run: Run, address: str | None, interface: str | None, workers: int | None) -> Agent:
    from packtrain.fleet import fleet_of
    from packtrain.node.address import check_private, choose_address
    from packtrain.node.agent import Agent
    from packtrain.node.telemetry import gpu_count

    fleet = run.job.fleet
    own = choose_address(address, interface, fleet.kind.machines.most == 1, run.store.endpoint, _some_addresses(run))
    check_private(own, fleet.public_address)
    count = workers or fleet.workers or gpu_count() or 1
    return Agent(run, own, count, dict(os.environ), fleet_of(fleet.kind).notices())


def _some_addresses(run: Run) -> list[str]:
    """Of a few machines that are there: the way to them shows the interface. All would be too many to ask for."""
    latest = run.latest_generation()
    if latest is not None:
        return [member.address for member in latest.members[:_FEW]]
    names = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in run.store.list(run.key("nodes/"))]
    return [lease.address for lease in map(run.lease, names[:_FEW]) if lease is not None]
