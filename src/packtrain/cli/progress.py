"""Packing as a person sees it: a bar with rate and time left, and lines that stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn as Column
from rich.text import Text

from packtrain.pack.progress import Advance
from packtrain.units import show_count


class _Rate(Column):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{show_count(speed)}/s" if speed else "", style="cyan")


class Bars:
    """Progress for a terminal; elsewhere only the lines are printed."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen

    def say(self, text: str) -> None:
        style = "yellow" if text.startswith("warning") else "dim"
        self._screen.print(f"[{style}]pack[/{style}]  {escape(text)}")

    @contextmanager
    def track(self, what: str, total: int | None) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with RichProgress(*columns, console=self._screen, transient=True, disable=not self._screen.is_terminal) as bars:
            task = bars.add_task(what, total=total)
            yield lambda count: bars.advance(task, count)
