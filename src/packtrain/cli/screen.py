"""The terminal as commands draw on it: styled lines, tables, live lines and bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from packtrain.errors import harmless

Part = str | tuple[str, str]  # a text, or a text and its style


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
        raise BrokenPipeError

    def say(self, *parts: Part) -> None:
        """Print one line of texts and (text, style) pairs. The terminal wraps it, so that it can be copied whole."""
        shown = [harmless(part) if isinstance(part, str) else (harmless(part[0]), part[1]) for part in parts]
        self.print(Text.assemble(*shown), soft_wrap=True)

    def say_lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.say(text)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Segments with `control` move the cursor of a live line; Rich makes them itself.
            yield segment if segment.control else Segment(harmless(segment.text, keep="\n"), segment.style)
