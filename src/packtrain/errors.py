"""Errors that a person can act on.

Each is a single line (where, what is wrong, what to do) and carries the exit code of the command that raised it. Any
other exception that escapes is a defect of Packtrain and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_DONE = 0
EXIT_UNWRITTEN = 1  # standard output is lost; what the command did is not
EXIT_MISTAKE = 2
EXIT_FAILED = 100
EXIT_UNFINISHED = 101
EXIT_NOT_FOUND = 102
EXIT_STOPPED = 103
EXIT_ALREADY_JOINED = 104
EXIT_INTERRUPTED = 130  # by Ctrl-C, as shells have it

# Control characters, separators of lines and paragraphs, overrides of the direction of text; surrogates cannot be
# encoded. No-break spaces, joiners and the like belong to many languages.
_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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


class AlreadyJoined(PacktrainError):
    """The machine already has a node of this run: another client has started it."""

    exit_code = EXIT_ALREADY_JOINED


class NotFound(PacktrainError):
    exit_code = EXIT_NOT_FOUND


def printable(text: str, limit: int | None = None) -> str:
    """Return a name as it can be shown and stored: on one line, every odd character escaped, and as valid UTF-8."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 3] + "..."
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def harmless(text: str, keep: str = "") -> str:
    """Return text in any language without color codes, and with what could steer a terminal escaped.

    It is one line, unless newlines are in `keep`.
    """

    def escaped(letter: re.Match[str]) -> str:
        return letter[0] if letter[0] in keep else letter[0].encode("unicode_escape").decode("ascii")

    return _UNSAFE.sub(escaped, _COLOR.sub("", text))


def quoted(text: str, limit: int = 200) -> str:
    """Return the text for an error message: in quotes, escaped and short."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a hint that names the closest known word, or lists them all if none is close."""
    choices = sorted(words)
    return meant(word, choices) or "known: " + ", ".join(choices)


def meant(word: str, words: Iterable[str]) -> str:
    """Return a hint that names the closest known word, or an empty string if none is close."""
    close = get_close_matches(word, sorted(words), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""
