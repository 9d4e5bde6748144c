"""Shared by the benchmarks: options, a table for people, one JSON object for scripts."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--rounds", type=int, default=5, help="number of rounds for each contender")
    return made


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def show(
    title: str, rows: Sequence[Mapping[str, object]], notes: Sequence[str], as_json: bool, markdown: bool = False
) -> None:
    """Print the measurements; `markdown` makes a table for the docs."""
    if as_json:
        print(json.dumps({"title": title, "rows": list(rows), "notes": list(notes)}))
        return
    if markdown:
        lines: list[list[object]] = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        for line in lines:
            print(f"| {' | '.join(map(str, line))} |")
        print("", *notes, sep="\n")
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="left" if column == next(iter(rows[0])) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    screen = Console(highlight=False)
    screen.print(table)
    for note in notes:
        screen.print(note)
