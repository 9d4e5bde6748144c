"""Shared by the benchmarks: arguments, a table for people, one JSON object for scripts.

Every benchmark has three functions: `parser` makes its arguments, `measure` takes them and does all the work, and
`report` turns what was measured into a table. `report` starts nothing and reads no clock, so the tests call it with
measurements that they make up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).parent.parent
EXAMPLES = REPOSITORY / "examples"
FILE_COLUMNS = 240

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Report:
    """A table of measurements and the notes below it. A benchmark with faults exits with 1."""

    title: str
    rows: Sequence[Mapping[str, object]]
    notes: Sequence[str] = ()
    faults: Sequence[str] = ()


def parser(description: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """Return the arguments that all benchmarks have."""
    common = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = common.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print a table for the docs")
    common.add_argument("--rounds", type=int, default=rounds, help="number of rounds for each contender")
    return common


def main(
    arguments: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Measured],
    report: Callable[[argparse.Namespace, Measured], Report],
    argv: Sequence[str] | None = None,
) -> None:
    """Measure what the arguments ask for, and print it."""
    options = arguments.parse_args(argv)
    result = report(options, measure(options))
    show(result, options.json, options.markdown)
    for fault in result.faults:
        print(f"{arguments.prog}: {fault}", file=sys.stderr)
    if result.faults:
        sys.exit(1)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def not_installed(contenders: Iterable[str], measured: Iterable[str]) -> list[str]:
    """Return a note that names the contenders that could not be measured, if there are any."""
    names = [name for name in contenders if name not in set(measured)]
    return [f"not installed: {', '.join(names)}"] if names else []


def show(report: Report, as_json: bool, as_markdown: bool = False) -> None:
    if as_json:
        print(json.dumps({"title": report.title, "rows": list(report.rows), "notes": list(report.notes)}))
        return
    columns = list(dict.fromkeys(column for row in report.rows for column in row))
    lines = [[_cell(row.get(column)) for column in columns] for row in report.rows]
    if as_markdown:
        for line in (columns, ["---"] * len(columns), *lines) if lines else ():
            print(f"| {' | '.join(line)} |")
        print("", *report.notes, sep="\n")
        return
    table = Table(title=report.title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for line in lines:
        table.add_row(*line)
    # Without a terminal it would be 80 columns wide, and cut figures off.
    width = None if sys.stdout.isatty() else FILE_COLUMNS
    screen = Console(highlight=False, markup=False, width=width)
    screen.print(table if lines else f"{report.title}: nothing measured")
    for note in report.notes:
        screen.print(note, soft_wrap=True)


def _cell(value: object) -> str:
    """Return the text of a value; a row without one has an empty cell."""
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
