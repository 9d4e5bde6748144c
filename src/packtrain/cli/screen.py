"""The terminal as commands draw on it: styled lines, tables, live lines and bars."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segment
from rich.text import Text

from packtrain.cli.output import ReaderGone, SafeStream
from packtrain.errors import harmless
from packtrain.units import show_count

Advance = Callable[[int], None]
Part = str | tuple[str, str]  # a text, or a text and its style
_GROUP, _WORD = re.compile(r"\S+(?: \S+)*"), re.compile(r"\S+")
_LEAST_TEXT = 20  # columns beside a label, in however narrow a terminal


class Screen(Console):
    """A console that takes no text as markup, and shows control characters of any text escaped.

    Rich would turn markup in a name into a style or a link, and passes escape sequences on.
    """

    def __init__(self, stream: TextIO) -> None:
        # Lines for a pipe are not wrapped.
        super().__init__(
            file=stream, highlight=False, markup=False, emoji=False, width=None if stream.isatty() else 10_000
        )

    def on_broken_pipe(self) -> None:
        """Leave it to `main`, which ends all commands the same way; Rich would end with 1."""
        raise ReaderGone

    def say(self, *texts: Part) -> None:
        """Print one line of texts and (text, style) pairs. The terminal wraps it, so that it can be copied whole."""
        self.print(self._assembled(texts), soft_wrap=True)

    def say_lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.say(text)

    def say_row(self, label: str, style: str, *texts: Part, gap: int = 2) -> None:
        """Print a label, and beside it texts in as many lines as they need; a path or another long word stays whole."""
        room = max(_LEAST_TEXT, self.width - len(label) - gap)
        text = self._assembled(texts)
        for number, line in enumerate(text.divide(line_starts(text.plain, room))):
            line.rstrip()
            start = (label, style) if number == 0 else " " * len(label)
            self.print(Text.assemble(start, " " * gap, line), soft_wrap=True)

    @staticmethod
    def _assembled(texts: Iterable[Part]) -> Text:
        shown = [harmless(text) if isinstance(text, str) else (harmless(text[0]), text[1]) for text in texts]
        return Text.assemble(*shown)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Segments with `control` move the cursor of a live line; Rich makes them itself.
            yield segment if segment.control else Segment(harmless(segment.text, keep="\n"), segment.style)


def line_starts(text: str, room: int) -> list[int]:
    """Return where new lines have to start: at double blanks, which separate values, or else between words."""
    starts, begin = [], 0
    for group in _GROUP.finditer(text):
        has_own_line = cell_len(group[0]) <= room
        for word in _WORD.finditer(text, *group.span()):
            end = group.end() if has_own_line and word.start() == group.start() else word.end()
            if word.start() > begin and cell_len(text[begin:end]) > room:
                begin = word.start()
                starts.append(begin)
    return starts


def console(stream: TextIO | None = None) -> Screen:
    """Return the screen of commands: standard output, unless another stream is given."""
    stream = stream or sys.stdout
    if isinstance(stream, SafeStream):
        stream = cast("TextIO", type(stream)(stream.stream, escapes=False))
    return Screen(stream)


def say_detail(text: str) -> None:
    """Print a line of news about what a command does."""
    console().say(f"  {text}")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{show_count(speed)}/s" if speed else "", style="cyan")


@contextmanager
def _bar(screen: Screen, label: str, total: int | None, *columns: ProgressColumn) -> Iterator[Advance]:
    shown = (TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeRemainingColumn())
    # `transient`: the bar disappears when it is done, and the line that is said then remains.
    with Progress(*shown, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        task = bars.add_task(label, total=total)
        yield lambda count: bars.advance(task, count)


class ProgressBars:
    """Progress with rate and time left; where there is no terminal, only the lines are printed."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def say(self, text: str) -> None:
        style = "yellow" if text.startswith("warning") else "dim"
        self._screen.say(("pack", style), f"  {text}")

    def track(self, activity: str, total: int | None) -> AbstractContextManager[Advance]:
        return _bar(self._screen, activity, total, MofNCompleteColumn(), _Rate(), TimeElapsedColumn())


class CopyBars:
    """A bar of bytes; where there is no terminal, only the lines are printed."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def say(self, text: str) -> None:
        self._screen.say(f"  {text}")

    def track(self, activity: str, total_bytes: int) -> AbstractContextManager[Advance]:
        return _bar(self._screen, activity, total_bytes, DownloadColumn(), TransferSpeedColumn())
