"""Commands that fleets and nodes start: node, mirror."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from packtrain.cli.common import (
    RunArgument,
    StoreOption,
    TrustOption,
    find_store,
    run_in,
    trusting,
)
from packtrain.cli.follow import StepLines
from packtrain.cli.screen import console
from packtrain.errors import EXIT_DONE, EXIT_FAILED, Mistake
from packtrain.fleet import fleet_of
from packtrain.fleet.fleet import HasNotices
from packtrain.job.part import tracking_fault
from packtrain.node.main import NodeOptions, take_part
from packtrain.node.node import Node
from packtrain.node.preemption import NoticeSource
from packtrain.process import Task, end_with_parent, say
from packtrain.report import write_report
from packtrain.report.mirror import follow, follow_as_node
from packtrain.run.run import Run
from packtrain.run.trust import require_trust
from packtrain.store import StoreError
from packtrain.store.records import DamagedRecord
from packtrain.units import MAX_WORKERS

_LOOK_SECONDS, _STEP_SECONDS = 10.0, 30.0  # between two looks at new steps, and between two lines about them


def node(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run to take part in.")],
    store: StoreOption = None,
    store_id: Annotated[
        str | None, typer.Option("--store-id", metavar="ID", help="Required ID of a store in a directory.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address at which other machines reach this one. Default: a private one."),
    ] = None,
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="Network interface with that address, such as eth0.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MAX_WORKERS, help="Number of workers. Default: from the job, or one per GPU."
        ),
    ] = None,
    power_off: Annotated[
        bool, typer.Option("--power-off", help="Shut this machine down when it is done. Default: from the job.")
    ] = False,
    code: Annotated[
        str | None, typer.Option("--code", metavar="DIGEST", help="Digest of the code to run; fleets pass it.")
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option("--identity", metavar="ID", help="Required Packtrain identity; fleets with an image pass it."),
    ] = None,
    trust_code: TrustOption = False,
) -> None:
    """Take part in a run on this machine until it ends. Fleets run this command; you can also run it yourself."""
    run = Run(find_store(store, store_id), name)
    options = NodeOptions(address, interface, workers, power_off, code, identity)

    def notices() -> Sequence[NoticeSource]:
        fleet = fleet_of(run.job.fleet.kind)
        return fleet.notices() if isinstance(fleet, HasNotices) else ()

    sys.exit(take_part(run, options, trusting(trust_code), notices, _steps_printed, write_report))


@contextmanager
def _steps_printed(run: Run, node: Node) -> Iterator[None]:
    """Print the steps and scores of a recipe's run if this is its first node, as `packtrain logs -f` does."""
    over = threading.Event()

    def follow() -> None:
        lines, points, is_last = StepLines(run.job, _STEP_SECONDS), None, False
        while True:
            with suppress(StoreError, DamagedRecord):  # the node itself complains about its store
                if node.leads is False:
                    points = None  # another node prints them
                else:
                    points = points or run.points().skip()
                    for _, line in lines.lines(points.read()):
                        say(line.replace("\n", "\\n"))
            if is_last:
                return
            is_last = over.wait(_LOOK_SECONDS)

    following = Task(follow if run.job.recipe is not None else lambda: None, "steps")
    try:
        yield
    finally:
        over.set()
        following.wait(_LOOK_SECONDS)  # the machine must not wait for a store that is away


def mirror(
    name: RunArgument = None,
    store: StoreOption = None,
    uri: Annotated[
        str | None, typer.Option("--mlflow", metavar="URI", help="Tracking server or directory. Default: from the job.")
    ] = None,
    trust_code: TrustOption = False,
    node: Annotated[str | None, typer.Option(hidden=True)] = None,
    store_id: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Mirror a run to MLflow until it ends. The first machine does this if the job asks for it."""
    run = run_in(find_store(store, store_id), name)
    if uri is None:
        uri = run.job.report.mlflow
        if uri is None:
            raise Mistake(f"{run.name} does not say where MLflow is; pass --mlflow URI")
        # Whoever writes the store could send this person's keys for MLflow elsewhere.
        require_trust(run, trusting(trust_code))
    elif (fault := tracking_fault(uri)) is not None:
        raise Mistake(f"--mlflow: {fault}")
    if node is not None:
        end_with_parent(signal.SIGKILL)
        follow_as_node(run, uri, node)
        return
    screen = console()
    is_complete = follow(run, uri, lambda text: screen.say(f"warning: {text}"))
    if is_complete:
        screen.say(f"{run.name} is in MLflow")
    sys.exit(EXIT_DONE if is_complete else EXIT_FAILED)
