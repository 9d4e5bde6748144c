"""Commands for machines: doctor, attach, down, volume."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.table import Table

from packtrain.cli.common import (
    JsonOption,
    RunArgument,
    StoreOption,
    YesOption,
    confirm,
    find_run,
    hints,
)
from packtrain.cli.output import print_json
from packtrain.cli.screen import console
from packtrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE, EXIT_UNFINISHED, Mistake, NotFound, harmless
from packtrain.fleet import fleet_of, fleet_to_ask
from packtrain.fleet.cloud import Resource
from packtrain.fleet.doctor import describe, examine
from packtrain.fleet.down import remove_found, take_down, take_inventory
from packtrain.fleet.fleet import Check, Fleet, HasShell, HasVolumes, silent
from packtrain.job import Job
from packtrain.job.kinds import FLEETS, FleetKind, kind_class, word_of
from packtrain.job.part import faults
from packtrain.launch.load import load
from packtrain.run.liveness import node_directory
from packtrain.run.run import Run
from packtrain.store import StoreError, default_store
from packtrain.units import counted

_NOTHING = "nothing was ended"
_SHOWN_PLACES = 5  # AWS has dozens of regions


def doctor(
    fleet: Annotated[
        str | None,
        typer.Option(
            "--fleet", metavar="JOB|local|ssh:HOST,HOST", help="The machines to check. Default: describe this machine."
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine or the machines of a fleet."""
    if fleet is None:
        description = describe(store or default_store(), create_store=store is not None)
        if as_json:
            print_json(asdict(description))
        else:
            screen = console()
            for trait in description.traits:
                advice = [f"  fix: {trait.fix}"] if trait.fix else [f"  note: {trait.note}"] if trait.note else []
                screen.say_row(f"{trait.name:<10}", "dim", (trait.detail, "red" if trait.fix else ""), *advice)
            screen.say()
            for word, missing in description.missing.items():
                state = ("needs ", "yellow") if missing else ("ok", "green")
                needs = "  ".join(f"{name}: {advice}" for name, advice in missing.items())
                screen.say_row(f"{word:<10}", "bold", state, needs)
            screen.say()
            screen.say("Check the machines of a fleet: ", ("packtrain doctor --fleet JOB", "bold"))
        sys.exit(EXIT_DONE if description.can_train else EXIT_MISTAKE)
    kind, location, job = _target(fleet, store)
    # Other programs need no torch. Without a job, a recipe is meant.
    needs_torch = job is None or job.program is None
    names, public = ((), False) if job is None else (job.environment, job.fleet.public_address)
    checks = list(examine(kind, location, names, public, needs_torch))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        _print(checks)
    failed = any(not check.ok and not check.skipped for check in checks)
    sys.exit(EXIT_MISTAKE if failed else EXIT_UNFINISHED if any(check.skipped for check in checks) else EXIT_DONE)


def _target(fleet: str, store: str | None) -> tuple[FleetKind, str, Job | None]:
    """Return the fleet's settings, the store, and the job if there is one."""
    location = store or default_store()
    word, _, hosts = fleet.partition(":")
    if word in FLEETS:
        try:
            kind = kind_class(FLEETS, word).model_validate({"hosts": hosts.split(",")} if hosts else {})
            return kind, location, None
        except ValidationError as error:
            field_path, text, missing = faults(error)[0]
            if not hosts:  # such as a cloud, whose settings are in a job
                advice = "give a job file that sets it, local, or ssh:host,host"
                raise Mistake(f"--fleet {fleet}: needs {field_path[-1]}; {advice}") from None
            raise Mistake(f"--fleet {fleet}: {f'{field_path[-1]} ' if missing else ''}{text}") from None
    if not Path(fleet).exists():
        raise Mistake(f"--fleet {fleet}: no such job file; give a job, local, or ssh:host,host")
    job = load(fleet).job
    return job.fleet.kind, store or job.store, job


def _print(checks: Sequence[Check]) -> None:
    """Print a line for each check, and below one that fails what to do about it."""
    screen = console()
    machines, steps = (max(len(getattr(check, name)) for check in checks) for name in ("machine", "step"))
    for check in checks:
        mark, style = ("ok", "green") if check.ok else ("skipped", "yellow") if check.skipped else ("failed", "red")
        label = f"{check.machine:<{machines}}  {check.step:<{steps}}  {mark:<7}"
        screen.say_row(label, style if not check.ok else "", "" if check.detail == "ok" else check.detail)
        if check.advice:
            screen.say_row(" " * machines, "", f"fix: {check.advice}")


def attach(
    name: RunArgument = None,
    node: Annotated[str | None, typer.Argument(metavar="MACHINE", help="Default: the run's first machine.")] = None,
    store: StoreOption = None,
    yes: YesOption = False,
) -> None:
    """Open a shell on a machine of a run. With tmux, it joins the session that shows the node's output."""
    run = find_run(store, name)
    if (result := run.result()) is not None:
        raise Mistake(f"{run.name} has already {result.status}; it has no machines to attach to")
    fleet = _fleet_of(run, "Contact them and open a shell?", yes)
    if not isinstance(fleet, HasShell):
        raise Mistake(f"{run.name}: cannot open a shell on its machines from here ({node or 'any'})")
    command = fleet.shell(run, node)
    screen = console(sys.stderr)
    latest, leases = run.latest_generation(), {lease.node: lease for lease in run.leases()}
    first = latest.members[0].node if latest is not None else next(iter(leases), None)
    lease = leases.get(node or first or "")
    if fleet.trains_here:  # the shell starts in the directory of the node of the run
        directory = None if lease is None else node_directory(run, lease.node)
        if directory is not None and directory.is_dir():
            os.chdir(directory)
        place = f"{socket.gethostname()}, this machine, in {Path.cwd()}"
    else:
        place = (lease.hostname if lease is not None else node) or "its first machine"
    screen.say("Attaching to ", (run.name, "bold"), f" on {place}.")
    screen.say("  exit leaves the shell; the run keeps running.")
    os.execvp(command[0], command)  # noqa: S606 - hands the terminal over


volume = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keep a run's data on volumes that outlive it.")


@volume.command()
def snapshot(
    name: RunArgument = None,
    machine: Annotated[
        str | None, typer.Argument(metavar="MACHINE", help="Machine to snapshot. Default: any with a volume.")
    ] = None,
    store: StoreOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Snapshot the data disk of a machine for later runs.

    The pack is on it, so the volumes of those runs start with their data.
    """
    run = find_run(store, name)
    pack = None if run.job.program is not None else run.pack_name()
    fleet = _fleet_of(run, "Contact them and take a snapshot?", yes)
    if not isinstance(fleet, HasVolumes):
        raise Mistake(f"{run.name}: its fleet has no volumes to take a snapshot of")
    disk_snapshot = fleet.snapshot(run, machine, pack)
    if as_json:
        print_json({"run": run.name, "snapshot": disk_snapshot.name, "new": disk_snapshot.is_new})
        return
    words = ("Making", "") if disk_snapshot.is_new else ("There is already", f" of {pack}")
    console().say(f"{words[0]} ", (disk_snapshot.name, "bold"), words[1])
    console().say(f"  use it: --set {disk_snapshot.field}={disk_snapshot.name}")


def down(
    name: RunArgument = None,
    store: StoreOption = None,
    every_run: Annotated[
        bool, typer.Option("--all", help="Delete the tagged resources of all runs at the providers.")
    ] = False,
    fleets: Annotated[
        list[str] | None,
        typer.Option(
            "--fleet",
            metavar="FLEET[:PLACE,PLACE]",
            help="With --all: only this fleet, such as ibm or aws:us-east-1; repeatable.",
        ),
    ] = None,
    expired: Annotated[bool, typer.Option("--expired", help="With --all: only runs whose budget is used up.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --all: only list the resources.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Terminate a run's machines now, and wait until they are gone. `packtrain resume` continues it."""
    if every_run:
        if name is not None or store is not None:
            raise Mistake("--all is for the runs of every store; omit RUN and --store")
        _down_all(fleets or (), expired, dry_run, yes, as_json)
        return
    if fleets or expired or dry_run:
        raise Mistake("--fleet, --expired and --dry-run need --all")
    try:
        run = find_run(store, name)
    except (NotFound, StoreError) as error:
        raise NotFound(f"{error}; `packtrain down --all` finds machines without the store") from None

    def accept(kinds: Sequence[FleetKind]) -> None:
        _confirm_contact(run, kinds, "Contact them and end what this run has there?", yes)

    screen = console()
    ended = take_down(run, accept, silent if as_json else screen.say)
    result = run.result()
    state = "interrupted" if result is None else result.status
    if as_json:
        print_json({"run": run.name, "state": state, "ended": ended})
        return
    screen.say(f"{run.name} has no machines left. It is {state}.")
    if state != "finished":
        screen.say_lines(hints(run, "resume"))


def _fleet_of(run: Run, question: str, yes: bool) -> Fleet:
    """Return the fleet of a run, after the person has agreed to contact one that was not started from here."""
    kind = run.job.fleet.kind
    if fleet_to_ask(run) is None:
        _confirm_contact(run, [kind], question, yes)
    return fleet_of(kind)


def _confirm_contact(run: Run, kinds: Sequence[FleetKind], question: str, yes: bool) -> None:
    lines = [f"  {word_of(FLEETS, kind)}: {kind.model_dump_json(exclude_defaults=True)}" for kind in kinds]
    reason = f"{run.name} was not started from here, and the store says how to reach its machines"
    confirm([f"{reason}:", *lines], question, reason, yes, _NOTHING)


def _down_all(fleets: Sequence[str], expired: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    screen, inventory = console(), take_inventory(fleets)
    if not inventory.answered:
        raise Mistake(
            "no provider could be asked: " + "; ".join(": ".join(failure) for failure in inventory.unanswered)
        )
    inventory = inventory.expired() if expired else inventory
    resources = inventory.resources
    if not as_json:
        if resources:
            _print_resources(resources)
        screen.say_lines(f"no answer: {where}: {why}" for where, why in inventory.unanswered)
    if resources and not dry_run:
        runs = counted(len({resource.label for resource in resources}), "run")
        amount = f"{counted(len(resources), 'resource')} of {runs}"
        confirm([], f"Delete {amount}?", f"{amount} would be deleted", yes, _NOTHING)
        resources = remove_found(inventory, silent if as_json else screen.say)
    if as_json:
        left_out = [{"fleet": where, "reason": why} for where, why in inventory.unanswered]
        listed = {"found" if dry_run else "deleted": [asdict(resource) for resource in resources]}
        print_json({**listed, "answered": inventory.answered, "unanswered": left_out})
    elif not resources:
        many = len(inventory.answered) > _SHOWN_PLACES
        places = counted(len(inventory.answered), "place") if many else ", ".join(inventory.answered)
        screen.say(f"No run has anything in {places}.")
    elif not dry_run:
        screen.say(f"Deleted {counted(len(resources), 'resource')}; nothing is left.")
    sys.exit(EXIT_FAILED if inventory.failed else EXIT_DONE)


def _print_resources(resources: Sequence[Resource]) -> None:
    """Print the resources of each run under a line that says whose it is: a table of all would be too wide."""
    screen = console()
    for label in dict.fromkeys(resource.label for resource in resources):
        of_run = [resource for resource in resources if resource.label == label]
        tagged = next(
            (resource for resource in of_run if resource.run), of_run[0]
        )  # IAM lists roles without their tags
        # Tags are anybody's, so names may be odd.
        words = [harmless(word) for word in (tagged.store, tagged.owner) if word]
        words += [f"expires {harmless(tagged.expires)}"] if tagged.expires else []
        screen.say((harmless(tagged.run or label), "bold"), "".join(f"  {word}" for word in words))
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for _ in range(4):
            table.add_column(overflow="fold")  # a name is there to be copied
        for resource in of_run:
            table.add_row(*map(harmless, ("", resource.place, resource.kind, resource.name)))
        screen.print(table)
