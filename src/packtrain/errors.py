"""Errors that a person can act on.

Each is a single line (where, what is wrong, what to do) and carries the exit code of the command that raised it. Any
other exception that escapes is a defect of Packtrain and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_DONE = 0
EXIT_MISTAKE = 2
EXIT_FAILED = 100
EXIT_UNFINISHED = 101
EXIT_NOT_FOUND = 102
EXIT_STOPPED = 103


class PacktrainError(Exception):
    """The base of all errors that are shown as one line, without a traceback."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Mistake(PacktrainError):
    """A request that cannot be done; nothing was started."""

    exit_code = EXIT_MISTAKE


class FieldMistake(Mistake):
    """A mistake in a field of the job that only a recipe, a fleet or the data reveals."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{field}: {fault}")
        self.field, self.fault = field, fault


class RunFailed(PacktrainError):
    exit_code = EXIT_FAILED


class NotFinished(PacktrainError):
    exit_code = EXIT_UNFINISHED


class NotFound(PacktrainError):
    exit_code = EXIT_NOT_FOUND


def printable(text: str, limit: int | None = None) -> str:
    """Return the text as it can be shown and stored: on one line, without control characters, and as valid UTF-8."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 3] + "..."
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def quoted(text: str, limit: int = 200) -> str:
    """Return the text for an error message: in quotes, escaped and short."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest known word, or lists them all if none is close."""
    choices = sorted(known)
    close = get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(choices)
