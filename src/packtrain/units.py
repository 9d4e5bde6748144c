"""Numbers with their units, as people write them: `5 min`, `50000 steps`, `25000 tokens`, `2 GB`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from packtrain.errors import nearest

# Separators only between groups of three: `1,5 hours` must not become fifteen.
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:_[0-9]{3})+|[0-9]+"
_NUMBER = rf"(?:(?:{_WHOLE})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_QUANTITY = re.compile(rf"([-+]?{_NUMBER})\s*([A-Za-z]+)", re.ASCII)
_MACHINES = re.compile(r"([0-9]+)(?:\s*\.\.\s*([0-9]+))?", re.ASCII)
_MAX_MACHINES = 100_000
MAX_WORKERS = 1024  # of one machine, more than any has GPUs or cores for
_LONGEST = 60  # characters of a quantity, and of one that an error repeats
_LARGEST = 1e15  # whole numbers below are exact as floats

_SECONDS_PER: Mapping[str, float] = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_COUNTED: Mapping[str, str] = {
    **dict.fromkeys(("step", "steps"), "steps"),
    **dict.fromkeys(("epoch", "epochs"), "epochs"),
}
_AMOUNTS: Mapping[str, str] = {
    **dict.fromkeys(("token", "tokens"), "tokens"),
    **dict.fromkeys(("sample", "samples"), "samples"),
}
_BYTES_PER: Mapping[str, int] = {
    **dict.fromkeys(("B", "byte", "bytes"), 1),
    **{prefix + "B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T"), 1)},
    **{prefix + "iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}


def _pattern(*units: str) -> str:
    """Return the pattern of a number above 0 with one of these units, as JSON Schema has patterns."""
    return rf"^(?=[^A-Za-z]*[1-9])\s*\+?{_NUMBER}\s*(?:{'|'.join(units)})\s*$"


TIME_PATTERN = _pattern(*_SECONDS_PER)
STEPS_PATTERN = _pattern("step", "steps")
DURATION_PATTERN = _pattern(*_SECONDS_PER, *_COUNTED)
AMOUNT_PATTERN = _pattern(*_AMOUNTS)
BYTES_PATTERN = _pattern(*_BYTES_PER)
MACHINES_PATTERN = r"^\s*0*[1-9][0-9]*(?:\s*\.\.\s*[0-9]+)?\s*$"


def amount_pattern(unit: str) -> str:
    """Return the pattern of an amount in tokens, or of one in samples."""
    return _pattern(*(word for word, meant in _AMOUNTS.items() if meant == unit))


def _quantity(text: str, units: Mapping[str, object], example: str) -> tuple[float, str]:
    short = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{short!r} is not a number with a unit, such as {example!r}")
    number, unit = float(match[1].replace(",", "")), match[2]
    if unit not in units:
        raise ValueError(f"unknown unit {unit!r} in {text!r}; {nearest(unit, units)}")
    if not 0 < number < _LARGEST:
        raise ValueError(f"{text!r} must be greater than zero and less than {_LARGEST:g}")
    return number, unit


@dataclass(frozen=True)
class Duration:
    """A length of training: a number of steps, of epochs, or of seconds."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Duration:
        number, unit = _quantity(text, {**_SECONDS_PER, **_COUNTED}, "500 steps")
        if unit in _SECONDS_PER:
            return cls(parse_seconds(text), "seconds")
        counted = _COUNTED[unit]
        # Epochs may be fractions: a phase or an evaluation can be due in the middle of one.
        if counted == "steps" and number != int(number):
            raise ValueError(f"{text!r} is not a whole number of steps")
        return cls(number, counted)

    def __str__(self) -> str:
        return f"{int(self.value) if self.value == int(self.value) else repr(self.value)} {self.unit}"


_UNKNOWN_SHARE = 0.1  # of a run, for a length in another unit than the run that it was written for


def keep_share(length: Duration, written: Duration, duration: Duration) -> Duration | None:
    """Return a length with the share of the new `duration` that it had of the one it was `written` for.

    None if that is all. In steps it is at least one.
    """
    share = length.value / written.value if length.unit == written.unit else _UNKNOWN_SHARE
    value = share * duration.value
    value = max(1.0, float(round(value))) if duration.unit == "steps" else float(f"{value:.3g}")
    return Duration(value, duration.unit) if value < duration.value else None


ENOUGH = 0.2
"""The share of a run that is enough for a warm-up, or from one evaluation to the next."""


def cut_to(length: Duration, written: Duration, duration: Duration) -> Duration | None:
    """Return a length that takes at most a fifth of the new `duration`, or the share of the one it was `written` for.

    In another unit than the run it gets its share of it, as `keep_share` says. None if that is all of the run.
    """
    if length.unit != duration.unit:
        return keep_share(length, written, duration)
    share = max(ENOUGH, length.value / written.value if written.unit == length.unit else 0.0)
    if length.value <= share * duration.value:
        return length
    return keep_share(Duration(share, duration.unit), Duration(1.0, duration.unit), duration)


@dataclass(frozen=True)
class Amount:
    """The size of a batch: a whole number of tokens or of samples."""

    value: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> Amount:
        number, unit = _quantity(text, _AMOUNTS, "4096 tokens")
        if number != int(number):
            raise ValueError(f"{text!r} is not a whole number of {_AMOUNTS[unit]}")
        return cls(int(number), _AMOUNTS[unit])

    def __str__(self) -> str:
        return f"{self.value} {self.unit}"


@dataclass(frozen=True)
class Machines:
    """The number of machines of a run: it starts with `least` and takes in more as they join, up to `most`."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Machines:
        match = _MACHINES.fullmatch(text.strip()) if len(text) <= _LONGEST else None
        if match is None:
            raise ValueError(f"{text[:_LONGEST]!r} is not a number of machines, such as '3' or '2..4'")
        machines = cls(int(match[1]), int(match[2] or match[1]))
        if machines.least < 1:
            raise ValueError("must be at least 1")
        if machines.most > _MAX_MACHINES:
            raise ValueError(f"must be at most {_MAX_MACHINES:,}")
        if machines.least > machines.most:
            raise ValueError(f"{text!r}: the minimum is larger than the maximum; write the smaller number first")
        return machines

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most

    def __str__(self) -> str:
        return str(self.least) if self.is_fixed else f"{self.least}..{self.most}"


def parse_seconds(text: str) -> float:
    number, unit = _quantity(text, _SECONDS_PER, "5 min")
    seconds = number * _SECONDS_PER[unit]
    if seconds >= _LARGEST:
        raise ValueError(f"{text!r} must be less than {_LARGEST:g} seconds")
    return seconds


def parse_bytes(text: str) -> int:
    number, unit = _quantity(text, _BYTES_PER, "2 GB")
    count = int(number * _BYTES_PER[unit])
    if count < 1:
        raise ValueError(f"{text!r} is less than a byte")
    return count


def show_seconds(seconds: float) -> str:
    """Show a time: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if seconds < 9.95:  # from here on, one decimal would round to `10.0 s`
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 1440:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def show_time(seconds: float, present: float | None = None) -> str:
    """Show a moment, in seconds since 1970, in local time: `Nov 17 12:04`, or `Nov 17 2025` of another year."""
    moment = time.localtime(seconds)
    today = time.localtime(time.time() if present is None else present)
    return time.strftime("%b %d %H:%M" if moment.tm_year == today.tm_year else "%b %d %Y", moment)


def parse_moment(text: str, present: float) -> float:
    """Return the moment that a date names, in local time, or that is so long ago: `2026-11-17`, `2 d`, `90 min`."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text.strip()).timestamp()
    try:
        return present - parse_seconds(text)
    except ValueError:
        raise ValueError(f"{text[:_LONGEST]!r} is neither a date, as 2026-11-17, nor a time, as 2d or 90min") from None


def show_bytes(count: float) -> str:
    """Show a size in powers of ten: `512 B`, `4.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Show a number with its noun: `1 worker`, `2 workers`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_dollars(dollars: float) -> str:
    """Show a sum of money to the cent: `$1,234.50`."""
    return f"${dollars:,.2f}"


def show_score(value: float) -> str:
    """Return two decimals, or three digits of a very small or large number: `20.12`, `0.0314`, `1e+20`."""
    return f"{value:.2f}" if 1 <= abs(value) < 1e15 or value == 0 else f"{value:.3g}"


def show_count(count: float) -> str:
    """Show a whole number with thousands separated: `74,978`."""
    return f"{count:,.0f}"


def show_speed(per_second: float) -> str:
    """Show how many of something are done in a second, with two digits of a few: `74,978`, `9.2`, `0.3`."""
    return show_count(per_second) if per_second >= 9.95 else f"{per_second:.2g}"
