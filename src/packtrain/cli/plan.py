"""The command plan: what a run will need, before it starts."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from packtrain.cli.common import JobArgument, JsonOption, SetOption
from packtrain.cli.output import print_json
from packtrain.cli.screen import console
from packtrain.errors import Mistake
from packtrain.launch.load import load
from packtrain.plan.estimate import Estimate, show_parameters, show_step
from packtrain.plan.plan import Plan, PlanRequest, make_plan
from packtrain.units import counted, show_bytes, show_count, show_dollars, show_seconds, show_speed

_MAX_COUNTS = 20
_LINK = re.compile(r"([0-9.]+)\s*([kMGT]?)bit/s")
# Less important for the choice: below the others where they do not fit beside them.
_DETAILS = ("memory", "sent", "needs", "loads")


def plan(
    job: JobArgument,
    overrides: SetOption = None,
    machines: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Machine counts to compare. Default: the job's.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure a few steps and the links on the fleet's machines.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="GPU", help="Plan for this GPU from the table of devices, e.g. a100.")
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|SET",
            help="Plan without the data: its training samples, or the name of a set (imagenet, wmt14-en-de, cornell, "
            "coco, vizwiz); of a mix, one for each source.",
        ),
    ] = None,
    length: Annotated[
        float | None, typer.Option(metavar="TOKENS", min=1.0, max=1e6, help="Mean target length, for --samples.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help='Speed of the machines\' network, e.g. "10 Gbit/s".')
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate what a run will take: time, money, memory and network."""
    if probe and device is not None:
        raise Mistake("--probe measures the machines, and --device replaces them; use one of them")
    counts: tuple[int, ...] = ()
    if machines is not None:
        words = [word.strip() for word in machines.split(",")]
        if not all(word.isdecimal() and 1 <= int(word) <= 100_000 for word in words) or len(words) > _MAX_COUNTS:
            raise Mistake(f"--machines {machines}: must be up to {_MAX_COUNTS} numbers of machines, such as 1,2,4")
        counts = tuple(map(int, words))
    request = PlanRequest(counts, samples, length, probe, device, _link_speed(link))
    loaded = load(job, overrides or ())
    progress = console(sys.stderr)
    run_plan = make_plan(loaded, request, lambda text: progress.say((f"  {text}", "dim")))
    if as_json:
        print_json(asdict(run_plan))
    else:
        _print(run_plan)


def _link_speed(text: str | None) -> float | None:
    """Return a speed in bytes per second."""
    if text is None:
        return None
    match = _LINK.fullmatch(text.strip())
    try:
        bits = float(match[1]) * 1000 ** " kMGT".index(match[2] or " ") if match else 0.0
    except ValueError:
        bits = 0.0
    if bits <= 0:
        raise Mistake(f'--link {text}: must be a speed, such as "10 Gbit/s"')
    return bits / 8


def _print(plan: Plan) -> None:
    work, goal, screen = plan.workload, plan.goal, console()
    about = "about " if not work.exact else ""
    batches = list(dict.fromkeys(phase.batch for phase in goal.phases))
    first = show_count(work.units_per_step)
    batch = ", then ".join([first, *(show_count(share * work.units_per_step) for share in batches[1:])])
    screen.say((plan.job, "bold"), f"  {plan.recipe} {plan.model}")
    rows = {
        "model": f"{show_parameters(work.parameters)}, {show_bytes(work.weight_bytes)};"
        f" checkpoints of {show_bytes(work.checkpoint_bytes)} {plan.save_every}",
        "data": f"{about}{work.samples:,} samples, {show_bytes(work.data_bytes)} packed;"
        f" {about}{show_count(work.steps_per_epoch)} steps per epoch{' at first' if len(batches) > 1 else ''}",
        "steps": f"{plan.estimates[0].steps:,} steps of {batch} {work.unit}"
        + ("" if work.unit == "samples" else f" ({show_count(work.samples_per_step)} samples)")
        + (f", {goal.epochs:{',.0f' if goal.epochs >= 100 else '.3g'}} epochs" if goal.epochs else ""),
        "speed": plan.source,
    }
    if any(estimate.machines > 1 for estimate in plan.estimates):
        link = plan.link
        rows["network"] = f"{_rate(link.bytes_per_second)}, {link.latency_seconds * 1e3:.2g} ms ({link.source})"
    for name, text in rows.items():
        screen.say_row(f"  {name:<7}", "dim", text)
    for note in plan.notes:
        screen.say_row("  note   ", "yellow", note)
    columns = _columns(plan)
    width = sum(max(len(name), *(len(cell) for cell in cells)) + 2 for name, cells in columns.items()) - 2
    details = [] if width <= screen.width else [name for name in _DETAILS if name in columns]
    screen.print()
    _print_columns(plan, {name: cells for name, cells in columns.items() if name not in details})
    if details:
        screen.print()
        _print_columns(plan, {name: columns[name] for name in ("machines", *details)})
    screen.print()
    _print_advice(plan)


def _columns(plan: Plan) -> dict[str, list[str]]:
    """Return the cells of each column that says something about this job."""
    estimates = plan.estimates
    columns: dict[str, list[str]] = {
        "machines": [f"{estimate.machines} x {estimate.workers // estimate.machines}" for estimate in estimates],
        "step": [show_step(estimate.step_seconds) for estimate in estimates],
        f"{plan.workload.unit}/s": [show_speed(estimate.units_per_second) for estimate in estimates],
        "per worker": [f"{estimate.efficiency:.0%}" for estimate in estimates],
        "limit": [estimate.limit for estimate in estimates],
        "memory": [show_bytes(estimate.memory_bytes) for estimate in estimates],
        "sent": [show_bytes(estimate.sent_bytes) if estimate.sent_bytes else "-" for estimate in estimates],
        "needs": [_rate(estimate.needed_bytes_per_second) if estimate.machines > 1 else "-" for estimate in estimates],
        "loads": [f"{show_speed(estimate.samples_per_second)}/s" for estimate in estimates],
        "time": [show_seconds(estimate.seconds) for estimate in estimates],
        "cost": ["-" if estimate.dollars is None else show_dollars(estimate.dollars) for estimate in estimates],
    }
    return {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}


def _print_columns(plan: Plan, columns: dict[str, list[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)
    for estimate, row in zip(plan.estimates, zip(*columns.values(), strict=True), strict=True):
        limit = "red" if estimate.limit == "memory" else "yellow" if estimate.limit != "compute" else ""
        cells = [Text(cell, limit if name == "limit" else "") for name, cell in zip(columns, row, strict=True)]
        table.add_row(*cells, style="" if estimate.fits and estimate.in_budget else "dim")
    console().print(table)


def _print_advice(plan: Plan) -> None:
    screen, by_count = console(), {estimate.machines: estimate for estimate in plan.estimates}
    goal = plan.goal
    limits = [f"{goal.budget_hours:g} hours"] if goal.budget_hours else []
    limits += [show_dollars(goal.budget_dollars)] if goal.budget_dollars else []
    within = f" within {' and '.join(limits)}" if limits else ""
    if plan.advice.cheapest is None:
        tight = [estimate for estimate in plan.estimates if not estimate.fits]
        why = f"a worker has only {show_bytes(tight[0].memory_limit_bytes)}" if tight else f"none ends{within}"
        advice = "a smaller train.micro_batch, or exchange: fsdp" if tight else "raise the budget, or train for less"
        screen.say(("none fits: ", "red"), f"{why}; {advice}")
        return

    def line(count: int) -> str:
        estimate: Estimate = by_count[count]
        cost = "" if estimate.dollars is None else f", {show_dollars(estimate.dollars)}"
        return f"{counted(count, 'machine')}: {show_seconds(estimate.seconds)}{cost}{within}"

    cheapest, fastest = plan.advice.cheapest, plan.advice.fastest
    assert fastest is not None
    if cheapest == fastest:
        screen.say(("cheapest and fastest  ", "dim"), line(cheapest))
        return
    screen.say(("cheapest  ", "dim"), line(cheapest))
    screen.say(("fastest   ", "dim"), line(fastest))


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
