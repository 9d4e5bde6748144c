"""The parameters of a request, checked, and the errors that requests get for an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from packtrain.errors import PacktrainError
from packtrain.web.logs import LogPlace

_NUMBERS = 5  # edition, and rows of train, valid, test and log


class RefusedRequest(PacktrainError):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


class Query:
    """The parameters of a request, checked."""

    def __init__(self, request: Request) -> None:
        self._given = request.query_params

    def text(self, name: str, limit: int = 1000) -> str:
        value = self._given.get(name, "")
        if len(value) > limit:
            raise RefusedRequest(400, f"{name}: is longer than {limit} characters")
        return value

    def texts(self, name: str, limit: int) -> list[str]:
        values = list(dict.fromkeys(self._given.getlist(name)))
        if len(values) > limit:
            raise RefusedRequest(400, f"{name}: more than {limit} values")
        return values

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.text(name)
        if not value:
            return default
        try:
            number = float(value)
        except ValueError:
            raise RefusedRequest(400, f"{name}: not a number") from None
        if not math.isfinite(number):
            raise RefusedRequest(400, f"{name}: not a finite number")
        return number

    def integer(self, name: str, default: int | None, lowest: int, highest: int) -> int | None:
        number = self.number(name, default)
        if number is None:
            return None
        if number != int(number) or not lowest <= number <= highest:
            raise RefusedRequest(400, f"{name}: must be a whole number from {lowest} to {highest}")
        return int(number)

    def choice(self, name: str, choices: Sequence[str], default: str | None) -> str | None:
        value = self.text(name) or default
        if value is not None and value not in choices:
            raise RefusedRequest(400, f"{name}: must be one of {', '.join(choices)}")
        return value

    def place(self, name: str) -> LogPlace | None:
        value = self.text(name, 40)
        if not value:
            return None
        chunk, _, line = value.partition(".")
        if not (_is_number(chunk) and _is_number(line)):
            raise RefusedRequest(400, f"{name}: not a place that this server gave")
        return LogPlace(int(chunk), int(line))


@dataclass(frozen=True)
class Cursor:
    """How much of each run a page has: the edition of the run's rows, and their number by kind."""

    runs: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, text: str) -> Cursor:
        runs = {}
        for run_cursor in text.split(",") if text else ():
            name, *numbers = run_cursor.split(":")
            if len(numbers) != _NUMBERS or not all(map(_is_number, numbers)):
                raise RefusedRequest(400, "since: not a cursor that this server gave")
            runs[name] = tuple(map(int, numbers))
        return cls(runs)

    def __str__(self) -> str:
        return ",".join(f"{name}:{':'.join(map(str, numbers))}" for name, numbers in self.runs.items())
