"""The verb that fleets start on machines: node."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.common import StoreOption, find_store

if TYPE_CHECKING:
    from packtrain.node.agent import Agent
    from packtrain.runs import Run

_FEW = 3


def register_node(app: typer.Typer) -> None:
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
    from packtrain.node.endings import say_why, switch_off
    from packtrain.report import write_report
    from packtrain.runs import EXIT_CODES, Run

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
    from packtrain.node.gpus import gpu_count
    from packtrain.store.location import server_from

    fleet = run.job.fleet
    endpoint = None if run.store.is_directory else server_from(os.environ).endpoint
    own = choose_address(address, interface, fleet.kind.machines.most == 1, endpoint, _some_addresses(run))
    check_private(own, fleet.public_address)
    count = workers or fleet.workers or gpu_count() or 1
    return Agent(run, own, count, dict(os.environ), fleet_of(fleet.kind).notices())


def _some_addresses(run: Run) -> list[str]:
    """Of a few machines that are there: the way to them shows the interface. All would be too many to ask for."""
    latest = run.latest_generation()
    if latest is not None:
        return [member.address for member in latest.members[:_FEW]]
    names = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in run.store.list(run.key("nodes/"))]
    return [node.address for node in map(run.node, names[:_FEW]) if node is not None]
