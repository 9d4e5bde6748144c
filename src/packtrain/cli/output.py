"""Standard output and standard error of commands, and JSON.

Everything that a command prints passes `SafeStream`, which escapes it unless a `Screen` has. Logs, events, names and
fields of jobs come from whoever writes the store, and the answers of hosts from whoever runs there: none of them may
steer the terminal.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO, cast

from packtrain.errors import harmless


class OutputLost(OSError):
    """Standard output cannot be written. It has no `errno`: Typer would end with 1 for the one of a broken pipe."""


class ReaderGone(OutputLost, BrokenPipeError):
    """The reader of standard output, such as `head`, has exited."""


class SafeStream(io.TextIOBase):
    """Standard output. What could steer a terminal is escaped, unless a `Screen` has already done so."""

    def __init__(self, stream: TextIO, escapes: bool = True) -> None:
        self.stream, self.escapes = stream, escapes

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def write(self, text: str) -> int:
        try:
            self.stream.write(harmless(text, keep="\n\t") if self.escapes else text)
        except OSError as error:
            self.fail(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        raise OutputLost(f"cannot write standard output: {error.strerror}") from error

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


class SafeErrors(SafeStream):
    """Standard error. When it cannot be written, the exit code still says how the command ended."""

    def fail(self, error: OSError) -> None:
        pass


class UnreadStream(SafeStream):
    """Standard output that drops what cannot be written; `error` is the reason why."""

    error: OSError | None = None

    def fail(self, error: OSError) -> None:
        self.error = error


@contextmanager
def unread_output() -> Iterator[None]:
    """Do everything in the block, even if standard output has no reader or is full; only then raise that error.

    What a command starts must not depend on who reads what it prints.
    """
    out = sys.stdout
    if not isinstance(out, SafeStream):
        yield
        return
    stream, unread = out.stream, UnreadStream(out.stream, escapes=False)
    out.stream = cast("TextIO", unread)
    try:
        yield
        out.flush()
    finally:
        out.stream = stream
    if unread.error is not None:
        out.fail(unread.error)


def prepare_streams() -> None:
    """Make pipes and files UTF-8, whatever the locale, and open the streams that the caller has closed, as by `>&-`.

    A terminal keeps its encoding, and gets escapes for what it cannot show.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the command ends
        elif isinstance(stream, io.TextIOWrapper):
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="surrogateescape" if mode == "r" else "backslashreplace")


@contextmanager
def safe_output() -> Iterator[None]:
    """Escape what is printed, to standard output and to standard error."""
    streams = sys.stdout, sys.stderr
    out, err = cast("TextIO", SafeStream(sys.stdout)), cast("TextIO", SafeErrors(sys.stderr))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # Python flushes once more as it exits, and would complain that it cannot.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def print_json(value: Any) -> None:
    print(json_text(value))


def print_json_list(rows: Iterable[Any]) -> None:
    """Print a list as `print_json` does, each row as soon as it is there."""
    separator = "["
    for row in rows:
        print(separator, textwrap.indent(json_text(row), "  "), sep="\n", end="", flush=True)
        separator = ","
    print("[]" if separator == "[" else "\n]")


def json_line(value: Any) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def json_text(value: Any) -> str:
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    if text == harmless(text, keep="\n"):
        return text
    # JSON leaves characters above 7f as they are; those that the stream would escape get the escapes of JSON.
    return "".join(
        character if character == "\n" or character == harmless(character) else json.dumps(character)[1:-1]
        for character in text
    )


def _finite(value: Any) -> Any:
    """Return the value with null for each number that JSON cannot write: a loss may be NaN."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
