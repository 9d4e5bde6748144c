"""The verb that fleets start on machines: node."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from packtrain.cli.common import StoreOption, find_store


def register(app: typer.Typer) -> None:
    app.command()(node)


def node(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run to take part in.")],
    store: StoreOption = None,
    address: Annotated[str, typer.Option(help="Where the other machines reach this one.")] = "127.0.0.1",
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: the job's, or one per GPU.")] = None,
) -> None:
    """Take part in a run on this machine until it ends. Fleets start this; people may, too."""
    from packtrain.node.agent import Agent
    from packtrain.report import write_report
    from packtrain.runs import EXIT_CODES, Run

    run = Run(find_store(store), name)
    count = workers or run.job.fleet.workers or gpu_count() or 1
    Agent(run, address, count, dict(os.environ)).work()
    result = run.result()
    if result is None:
        sys.exit(EXIT_CODES["interrupted"])
    write_report(run)
    sys.exit(EXIT_CODES[result.status])


def gpu_count() -> int:
    """How many NVIDIA GPUs this machine has; none where the driver is not there."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
