"""What a job is made of: frozen parts, their leaves, what comes in kinds, and errors in the person's words.

`Part` rewrites the errors of pydantic, so that whoever reads a job has only to add where the fault stands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from packtrain.errors import nearest
from packtrain.units import Amount, Duration, Machines

Location = tuple[int | str, ...]

NEEDED = "needed"  # the type of an error about a field that is not there; all others are MISTAKE
MISTAKE = "mistake"

_NAME = re.compile(r"[a-z0-9-]{1,63}")
_OWN_RECIPE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_SCORE = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|store:")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_DATA_SCHEMES = ("s3://", "http://", "https://", "store:")


def is_name(text: str) -> bool:
    """Whether a text can name a job or a run."""
    return _NAME.fullmatch(text) is not None


def is_recipe(text: str) -> bool:
    """Whether a text can name a recipe, or `module:Class` of somebody's own."""
    return is_name(text) or _OWN_RECIPE.fullmatch(text) is not None


def is_address(path: str) -> bool:
    """Whether a path is a URL (`s3://bucket/key`, `store:key`) and so stands for itself, whatever the directory."""
    return _ADDRESS.match(path) is not None


# Errors in the person's words.

_KINDS_OF_VALUES: Mapping[type, str] = {
    type(None): "nothing",
    bool: "true or false",
    int: "a whole number",
    float: "a number with a fraction",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
}
_LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def what_is(value: object) -> str:
    return _KINDS_OF_VALUES.get(type(value), type(value).__name__)


def quoted(text: str) -> str:
    """A text as errors show it: short, whatever was written."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _expected(expected: str, value: object) -> str:
    said = f"must be {expected}, not {what_is(value)}"
    if expected == "a text" and isinstance(value, (bool, int, float)):
        return f"{said}; write it in quotes"
    if expected.endswith("number") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return f"{said}; write it without quotes"
    return said


def _in_words(error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in (MISTAKE, NEEDED):
        return error["msg"]
    if kind == "missing":
        return "is needed"
    if kind in _EXPECTED:
        return _expected(_EXPECTED[kind], value)
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        limit = context[name]
        return f"must be {words} {f'{limit:g}' if isinstance(limit, float) else limit}"
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        if not isinstance(value, str):
            return f"must be one of {', '.join(choices)}, not {what_is(value)}"
        return f"{quoted(value)} is not one of {', '.join(choices)}; {nearest(value, choices)}"
    if kind == "too_short":
        return f"must have at least {context['min_length']}"
    if kind == "too_long":
        return f"must have at most {context['max_length']}"
    if kind == "value_error":
        return str(context["error"])
    return error["msg"]


def wrong(text: str, *location: int | str, kind: str = MISTAKE) -> InitErrorDetails:
    # The value stays out of the error: what was written may be long, or a secret.
    return InitErrorDetails(type=PydanticCustomError(kind, "{text}", {"text": text}), loc=location, input=None)


def refusal(wrongs: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("job", wrongs)


def wrongs_of(error: ValidationError, *prefix: int | str) -> list[InitErrorDetails]:
    """The errors of a part in our words, with their place in the whole."""
    return [
        wrong(
            _in_words(detail),
            *prefix,
            *detail["loc"],
            kind=NEEDED if detail["type"] in (NEEDED, "missing") else MISTAKE,
        )
        for detail in error.errors(include_url=False)
    ]


def faults(error: ValidationError) -> list[tuple[Location, str, bool]]:
    """Each fault's place, what is wrong in our words, and whether it is a field that is not there."""
    return [
        (tuple(detail["loc"]), _in_words(detail), detail["type"] in (NEEDED, "missing"))
        for detail in error.errors(include_url=False)
    ]


def unknown_keys(keys: Sequence[str], known: Iterable[str]) -> list[InitErrorDetails]:
    known = list(known)
    hints = [nearest(key, known) for key in keys[:10]]  # a look at each of thousands would take seconds
    return [
        wrong(f"unknown key; {hint}", key)
        for key, hint in zip_longest(keys, hints, fillvalue="known: " + ", ".join(known))
    ]


class Part(BaseModel):
    """A frozen part of the job that refuses unknown keys with the nearest right one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:  # noqa: ARG003
        """From what a job file says to the fields of the class, where the two differ."""
        return given

    @classmethod
    def known(cls) -> Iterable[str]:
        """The words that a job file may use here."""
        return cls.model_fields

    def faults(self) -> Iterator[tuple[Location, str]]:
        """What is wrong between fields that are right one by one."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise refusal([wrong(f"must be a mapping, not {what_is(value)}")])
        wrongs: list[InitErrorDetails] = []
        given = cls.arrange(dict(value), wrongs)
        wrongs += unknown_keys([key for key in given if key not in cls.model_fields], cls.known())
        given = {key: value for key, value in given.items() if key in cls.model_fields}
        made = None
        try:
            made = handler(given)
        except ValidationError as error:
            wrongs += wrongs_of(error)
        if made is not None and not wrongs:
            wrongs += [wrong(text, *location) for location, text in made.faults()]
        if made is None or wrongs:
            raise refusal(wrongs)
        return made


# Leaves.

Measured = TypeVar("Measured", Duration, Amount)


def _measured(unit: type[Measured], example: str, only: str | None = None) -> PlainValidator:
    return PlainValidator(_reader(unit, example, only))


def _reader(unit: type[Measured], example: str, only: str | None = None) -> Callable[[object], Measured]:
    def read(value: object) -> Measured:
        if isinstance(value, bool) or not isinstance(value, (str, int, float, unit)):
            raise ValueError(f"must be a number with a unit, such as {example!r}, not {what_is(value)}")
        if isinstance(value, (int, float)):
            raise ValueError(f"a unit is missing: write it as in {example!r}")
        read = unit.parse(value) if isinstance(value, str) else value
        if only is not None and read.unit != only:
            raise ValueError(f"must be counted in {only}, such as {example!r}")
        return read

    return read


def _interval(value: object) -> Duration | Literal["auto"]:
    return "auto" if value == "auto" else _reader(Duration, "5 min")(value)


def _text(check: Callable[[str], str | None]) -> PlainValidator:
    """A text for which `check` finds nothing wrong."""

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(_expected("a text", value))
        if fault := check(value):
            raise ValueError(fault)
        return value

    return PlainValidator(read)


def matching(pattern: str, what: str) -> PlainValidator:
    """A text of a pattern; never one that a program would take for an option."""

    def check(text: str) -> str | None:
        good = re.fullmatch(pattern, text) and not text.startswith("-")
        return None if good else f"{quoted(text)} is not {what}"

    return _text(check)


def _name_fault(text: str) -> str | None:
    if is_name(text):
        return None
    return f"{quoted(text)} must be 1 to 63 of the characters a-z, 0-9 and -"


def _recipe_fault(text: str) -> str | None:
    if is_recipe(text):
        return None
    return f"{quoted(text)} is neither the name of a recipe nor module:Class of your own"


def _score_fault(text: str) -> str | None:
    return None if _SCORE.fullmatch(text) else f"{quoted(text)} is not the name of a score"


def _variable_fault(text: str) -> str | None:
    if _VARIABLE.fullmatch(text):
        return None
    if "=" in text:
        return "must be the name of a variable alone; its value is read where the job is started"
    return f"{quoted(text)} is not the name of a variable"


def _path_fault(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    if _CONTROL.search(text):
        return "has a control character in it"
    if text.startswith("~"):
        return f"{quoted(text)}: ~ is not expanded; write the path out"
    return None


def _leaves(text: str) -> bool:
    return PurePosixPath(os.path.normpath(text)).parts[:1] == ("..",)


def _data_path_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    if is_address(text):
        if text.lower().startswith(_DATA_SCHEMES):
            return None
        return f"{quoted(text)}: data comes from a path or from {', '.join(_DATA_SCHEMES)}"
    if not PurePosixPath(text).is_absolute() and _leaves(text):
        return f"{quoted(text)} leaves the job file's directory; use an absolute path for data elsewhere"
    return None


def _store_path_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    if not is_address(text) and not PurePosixPath(text).is_absolute() and _leaves(text):
        return f"{quoted(text)} leaves the current directory; use an absolute path for a store elsewhere"
    return None


def code_path_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    if PurePosixPath(text).is_absolute() or is_address(text) or _leaves(text):
        return f"{quoted(text)} must be a relative path that stays inside the job file's directory"
    return None


def _argument_fault(text: str) -> str | None:
    return "has a NUL character in it" if "\0" in text else None


def _read_machines(value: object) -> Machines:
    if isinstance(value, Machines):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"must be a number of machines, such as 3 or 2..4, not {what_is(value)}")
    return Machines.parse(str(value))


def _write_machines(machines: Machines) -> int | str:
    return machines.least if machines.is_fixed else str(machines)


MAX_WHOLE = 2**63 - 1

Name = Annotated[str, _text(_name_fault)]
RecipeName = Annotated[str, _text(_recipe_fault)]
ScoreName = Annotated[str, _text(_score_fault)]
Variable = Annotated[str, _text(_variable_fault)]
DataPath = Annotated[str, _text(_data_path_fault)]
StorePath = Annotated[str, _text(_store_path_fault)]
CodePath = Annotated[str, _text(code_path_fault)]
Argument = Annotated[str, _text(_argument_fault)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_WHOLE)]
Ordinal = Annotated[int, Field(strict=True, ge=1, le=MAX_WHOLE)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Pixels = Annotated[int, Field(strict=True, ge=8, le=8192)]
Scale = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Truth = Annotated[bool, Field(strict=True)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Length = Annotated[Duration, _measured(Duration, "500 steps"), PlainSerializer(str)]
Steps = Annotated[Duration, _measured(Duration, "500 steps", only="steps"), PlainSerializer(str)]
MachineCount = Annotated[Machines, PlainValidator(_read_machines), PlainSerializer(_write_machines)]
Seconds = Annotated[Duration, _measured(Duration, "1 min", only="seconds"), PlainSerializer(str)]
Interval = Annotated[Duration | Literal["auto"], PlainValidator(_interval), PlainSerializer(str)]
Batch = Annotated[Amount, _measured(Amount, "4096 tokens"), PlainSerializer(str)]
