"""The verb that fleets start on machines: node."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import StoreOption, find_store

if TYPE_CHECKING:
    from packtrain.runs import Run

_FEW = 3


def register(app: typer.Typer) -> None:
    app.command()(node)


def node(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run to take part in.")],
    store: StoreOption = None,
    address: Annotated[
        str | None, typer.Option(help="Where the other machines reach this one. Default: a private address.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="The network interface with that address, such as eth0.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: the job's, or one per GPU.")] = None,
) -> None:
    """Take part in a run on this machine until it ends. Fleets start this; people may, too."""
    from packtrain.fleet import fleet_of
    from packtrain.node.address import check_private, choose_address
    from packtrain.node.agent import Agent
    from packtrain.node.endings import switch_off
    from packtrain.node.gpus import gpu_count
    from packtrain.report import write_report
    from packtrain.runs import EXIT_CODES, Run
    from packtrain.store.location import server_from

    run = Run(find_store(store), name)
    fleet = run.job.fleet
    endpoint = None if run.store.is_directory else server_from(os.environ).endpoint
    own = choose_address(address, interface, fleet.kind.machines.most == 1, endpoint, _some_addresses(run))
    check_private(own, fleet.public_address)
    count = workers or fleet.workers or gpu_count() or 1
    agent = Agent(run, own, count, dict(os.environ), fleet_of(fleet.kind).notices())
    result = None
    try:
        agent.work()
        result = run.result()
        if result is not None:
            write_report(run)
    finally:
        switch_off(fleet.kind.power_off and (result is not None or agent.has_done_its_part))
    sys.exit(EXIT_CODES["interrupted" if result is None else result.status])


def _some_addresses(run: Run) -> list[str]:
    """Of a few machines that are there: the way to them shows the interface. All would be too many to ask for."""
    latest = run.latest_generation()
    if latest is not None:
        return [member.address for member in latest.members[:_FEW]]
    names = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in run.store.list(run.key("nodes/"))]
    return [node.address for node in map(run.node, names[:_FEW]) if node is not None]
