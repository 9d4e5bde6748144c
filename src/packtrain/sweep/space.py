"""The trials of a sweep: combinations of values of fields, all of them or drawn at random. Pure functions."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from packtrain.errors import Mistake, printable
from packtrain.run.sweeps import MAX_TRIALS

_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(\s*[A-Za-z]*)")
_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "\"'"
_LOGARITHMIC = 10.0  # a range that spans this factor is drawn on a logarithmic scale
_DIGITS = 3  # of a number that is drawn
_FIXED = {"name": "runs are named after the sweep", "store": "a sweep is in one store"}


@dataclass(frozen=True)
class Range:
    """Numbers to draw from, with the unit behind them: `500..4000 steps`."""

    low: float
    high: float
    unit: str
    is_whole: bool

    def draw(self, generator: random.Random) -> str:
        if self.low > 0 and self.high / self.low >= _LOGARITHMIC:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        if self.is_whole:
            return f"{round(value)}{self.unit}"
        rounded = float(f"{value:.{_DIGITS}g}")
        return f"{min(max(rounded, self.low), self.high):g}{self.unit}"


@dataclass(frozen=True)
class Axis:
    """A field of the job and the values that it takes: some as a person writes them, or a range."""

    field: str
    values: tuple[str, ...] = ()
    range: Range | None = None


Combination = Mapping[str, str]
"""A value for every field."""


def read_axis(text: str, is_random: bool) -> Axis:
    """Read `train.seed=1,2,3`, or with `is_random` a range such as `train.schedule.noam.peak=0.0001..0.01`."""
    field, equals, written = text.partition("=")
    field = field.strip()
    if not equals or not field:
        name = printable(field, 60)
        raise Mistake(f"--grid {name}: write it as field=value,value, such as train.schedule.noam.peak=0.001,0.003")
    if field.split(".")[0] in _FIXED:
        raise Mistake(f"--grid {field}: cannot be swept: {_FIXED[field.split('.')[0]]}")
    if (match := _RANGE.fullmatch(written.strip())) is not None:
        if not is_random:
            raise Mistake(f"--grid {field}: a range is drawn from; add --random N, or list the values")
        low, high = float(match[1]), float(match[2])
        if low >= high:
            raise Mistake(f"--grid {field}: write the smaller number of a range first")
        is_whole = all(re.fullmatch(r"[-+]?[0-9]+", match[place]) for place in (1, 2))
        return Axis(field, range=Range(low, high, match[3], is_whole))
    values = split_values(written)
    if "" in values:
        raise Mistake(f"--grid {field}: has an empty value; write it as {field}=value,value")
    if len(set(values)) != len(values):
        raise Mistake(f"--grid {field}: lists a value twice")
    return Axis(field, tuple(values))


def split_values(text: str) -> list[str]:
    """Split at commas, but not inside of brackets or quotes: `{size: tiny, heads: 2},base` has two values."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def read_axes(texts: Sequence[str], is_random: bool) -> list[Axis]:
    axes = [read_axis(text, is_random) for text in texts]
    if not axes:
        raise Mistake("a sweep needs at least one --grid FIELD=VALUE,VALUE, such as --grid train.seed=1,2,3")
    fields = [axis.field for axis in axes]
    twice = next((field for field in fields if fields.count(field) > 1), None)
    if twice is not None:
        raise Mistake(f"--grid {twice}: is given twice; list all of its values in one")
    return axes


def combinations_of(axes: Sequence[Axis], draws: int | None, seed: int) -> list[Combination]:
    """Return every combination in order, or as many different ones drawn at random."""
    fields = [axis.field for axis in axes]
    if any(axis.range is not None for axis in axes):
        return _drawn(axes, draws or 0, seed)
    count = math.prod(len(axis.values) for axis in axes)
    if draws is None:
        if count > MAX_TRIALS:
            raise Mistake(f"--grid: {count:,} combinations are more than {MAX_TRIALS:,}; add --random N to draw some")
        return [dict(zip(fields, values, strict=True)) for values in product(*(axis.values for axis in axes))]
    if draws >= count:
        raise Mistake(f"--random {draws}: the grid has only {count:,} combinations; remove it to train all of them")
    _check_draws(draws)
    places = sorted(random.Random(seed).sample(range(count), draws))  # noqa: S311 - not a secret
    return [_at(axes, place) for place in places]


def _at(axes: Sequence[Axis], place: int) -> Combination:
    """Return a combination by its place in the order of all: a grid may have more than fit into memory."""
    values: list[str] = []
    for axis in reversed(axes):
        place, index = divmod(place, len(axis.values))
        values.append(axis.values[index])
    return dict(zip((axis.field for axis in axes), reversed(values), strict=True))


def _drawn(axes: Sequence[Axis], draws: int, seed: int) -> list[Combination]:
    _check_draws(draws)
    generator = random.Random(seed)  # noqa: S311 - not a secret
    combinations: dict[tuple[str, ...], Combination] = {}
    for _ in range(100 * draws):
        drawn = {
            axis.field: axis.range.draw(generator) if axis.range else generator.choice(axis.values) for axis in axes
        }
        combinations.setdefault(tuple(drawn.values()), drawn)
        if len(combinations) == draws:
            return list(combinations.values())
    raise Mistake(f"--random {draws}: the ranges have too few different values; ask for at most {len(combinations)}")


def _check_draws(draws: int) -> None:
    if draws > MAX_TRIALS:
        raise Mistake(f"--random {draws:,}: at most {MAX_TRIALS:,} runs")
