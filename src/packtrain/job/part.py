"""The building blocks of a job: frozen parts, the types of their fields, and errors in plain words.

`Part` rewrites the errors of pydantic, so that the reader of a job file only has to add the place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from packtrain.errors import meant, nearest, quoted
from packtrain.units import (
    AMOUNT_PATTERN,
    BYTES_PATTERN,
    DURATION_PATTERN,
    MACHINES_PATTERN,
    MAX_WORKERS,
    STEPS_PATTERN,
    TIME_PATTERN,
    Amount,
    Duration,
    Machines,
    parse_bytes,
)

Location = tuple[int | str, ...]

REQUIRED = "required"  # the type of an error about a field that is missing; all others are MISTAKE
MISTAKE = "mistake"
MAX_INTEGER = 2**63 - 1

_SHOWN = 60  # characters of a value that an error repeats

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")  # a hyphen first would make it an option of some program
_IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]*"
_OWN_RECIPE = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}")
OWN_RECIPE_PATTERN = f"^{_OWN_RECIPE.pattern}$"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|store:")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
FILES = "files/"
"""The folder of a store with the files that jobs name, such as pretrained weights, each under its SHA-256."""
IN_STORE = "store:"
STORED_FILE = f"{IN_STORE}{FILES}"
_INPUT_SCHEMES = ("s3://", "gs://", "az://", STORED_FILE)
_DATA_SCHEMES = ("s3://", "gs://", "az://", "http://", "https://", IN_STORE)


def is_name(text: str) -> bool:
    """True if a job or a run can have this name."""
    return _NAME.fullmatch(text) is not None


def is_recipe(text: str) -> bool:
    """True if this can name a recipe, or is the `module:Class` of a user's recipe."""
    return is_name(text) or _OWN_RECIPE.fullmatch(text) is not None


def is_address(path: str) -> bool:
    """True for a URL (`s3://bucket/key`, `store:key`), which does not depend on a directory."""
    return _ADDRESS.match(path) is not None


# Errors in plain words.

_TYPE_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
_EXPECTED: Mapping[str, str] = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
}
_LIMITS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def must_be(expected: str, value: object) -> str:
    """Return the error for a value of the wrong type."""
    if value is None:
        return "must not be empty"
    fault = f"must be {expected}, not {_TYPE_NAMES.get(type(value), type(value).__name__)}"
    if expected == "a string" and isinstance(value, (bool, int, float)):
        return f"{fault}; put it in quotes"
    if expected in ("an integer", "a number") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return f"{fault}; remove the quotes"
    return fault


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def _in_words(error: ErrorDetails) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind in _EXPECTED:
        return must_be(_EXPECTED[kind], value)
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        limit = context[name]
        return f"must be {words} {f'{limit:g}' if isinstance(limit, float) else limit}"
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])  # pydantic gives them as one string
        if not isinstance(value, str):
            return must_be(f"one of {', '.join(choices)}", value)
        hint = meant(value, choices)
        return f"{quoted(value, _SHOWN)} is not one of {', '.join(choices)}{'; ' if hint else ''}{hint}"
    if kind == "too_short":
        return f"must have at least {_entries(context['min_length'])}"
    if kind == "too_long":
        return f"must have at most {_entries(context['max_length'])}"
    if kind == "value_error":
        return str(context["error"])
    return error["msg"]


def problem(text: str, *location: int | str, kind: str = MISTAKE) -> InitErrorDetails:
    """Return one error of a validation, as pydantic takes it."""
    # The value stays out of the error: it may be long, or a secret.
    return InitErrorDetails(type=PydanticCustomError(kind, "{text}", {"text": text}), loc=location, input=None)


def refusal(problems: list[InitErrorDetails]) -> ValidationError:
    """Return the exception that reports all these problems together."""
    return ValidationError.from_exception_data("job", problems)


def faults(error: ValidationError) -> list[tuple[Location, str, bool]]:
    """Return the place of each fault, what is wrong in plain words, and whether a field is missing."""
    return [
        (tuple(detail["loc"]), _in_words(detail), detail["type"] in (REQUIRED, "missing"))
        for detail in error.errors(include_url=False)
    ]


def problems_of(error: ValidationError, *prefix: int | str) -> list[InitErrorDetails]:
    """Return the errors of a part in plain words, with their place in the whole."""
    return [
        problem(text, *prefix, *location, kind=REQUIRED if missing else MISTAKE)
        for location, text, missing in faults(error)
    ]


def unknown_keys(keys: Sequence[str], known_keys: Iterable[str]) -> list[InitErrorDetails]:
    known_keys = list(known_keys)
    hints = [nearest(key, known_keys) for key in keys[:10]]  # a hint for each of thousands would take seconds
    return [
        problem(f"unknown key; {hint}", key)
        for key, hint in zip_longest(keys, hints, fillvalue="known: " + ", ".join(known_keys))
    ]


class Part(BaseModel):
    """A frozen part of a job that refuses unknown keys and suggests the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    filled_in: ClassVar[frozenset[str]] = frozenset()
    """Required fields that a job file may leave out: a recipe's defaults, or `arrange`, fill them in."""

    harmless: ClassVar[frozenset[str]]
    """Fields that may hold any value in a job that somebody else has written (run/trust.py), whoever runs it.

    Subclasses add to those of their bases. A part whose classes name none needs trust as a whole.
    """

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:  # noqa: ARG003
        """Turn what a job file says into the fields of the class, where the two differ."""
        return fields

    @classmethod
    def known_keys(cls) -> Iterable[str]:
        """Return the keys that a job file may use here."""
        return cls.model_fields

    def faults(self) -> Iterator[tuple[Location, str]]:
        """Yield what is wrong between fields that are valid one by one."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise refusal([problem(must_be("a mapping", value))])
        # All errors are collected before raising, so that a message can say how many more there are.
        problems: list[InitErrorDetails] = []
        fields = cls.arrange(dict(value), problems)
        problems += unknown_keys([key for key in fields if key not in cls.model_fields], cls.known_keys())
        fields = {key: value for key, value in fields.items() if key in cls.model_fields}
        validated = None
        try:
            validated = handler(fields)
        except ValidationError as error:
            problems += problems_of(error)
        if validated is not None and not problems:  # rules between fields assume that every field is valid
            problems += [problem(text, *location) for location, text in validated.faults()]
        if validated is None or problems:
            raise refusal(problems)
        return validated


# Types of fields.

Quantity = TypeVar("Quantity", Duration, Amount)


def _reader(unit: type[Quantity], example: str, only: str | None = None) -> Callable[[object], Quantity]:
    def read(value: object) -> Quantity:
        # A bool is an int in Python, but `true` is not a number in a job file.
        if isinstance(value, bool) or not isinstance(value, (str, int, float, unit)):
            raise ValueError(must_be(f"a number with a unit, such as {example!r}", value))
        if isinstance(value, (int, float)):
            raise ValueError(f"needs a unit, such as {example!r}")
        read = unit.parse(value) if isinstance(value, str) else value
        if only is not None and read.unit != only:
            raise ValueError(f"must be in {only}, such as {example!r}")
        return read

    return read


def _interval(value: object) -> Duration | Literal["auto"]:
    return "auto" if value == "auto" else _reader(Duration, "5 min")(value)


def _quantity(
    unit: type[Quantity], example: str, pattern: str, *examples: str, only: str | None = None
) -> PlainValidator:
    """Return the validator of a quantity: an error has one example, and an editor shows the others."""
    read = _reader(unit, example, only)
    return PlainValidator(read, json_schema_input_type=text_in_schema(pattern, *(examples or (example,))))


def in_schema(**schema: Any) -> Any:
    """Return the type of what a job file may have in place of a value, for its JSON Schema (job/schema.py)."""
    return Annotated[Any, WithJsonSchema(schema)]


def is_set(name: str) -> dict[str, Any]:
    """Return the JSON Schema of mappings in which a field has a value."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def is_true(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"const": True}}}


def rules_in_schema(*rules: Mapping[str, Any]) -> ConfigDict:
    """Return the configuration of a part whose JSON Schema has these rules between fields, as `faults` has them."""
    return ConfigDict(json_schema_extra={"allOf": [dict(rule) for rule in rules]})


def text_in_schema(pattern: str, *examples: str) -> Any:
    """Return the type of a text that matches a pattern; an editor shows the examples."""
    return in_schema(type="string", pattern=pattern, **({"examples": list(examples)} if examples else {}))


def _string(fault_of: Callable[[str], str | None], pattern: str = r"\S") -> PlainValidator:
    """Return the validator of a string for which `fault_of` returns no fault; it matches the pattern anyway."""

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(must_be("a string", value))
        if fault := fault_of(value):
            raise ValueError(fault)
        return value

    return PlainValidator(read, json_schema_input_type=text_in_schema(pattern))


def matching(pattern: str, noun: str) -> PlainValidator:
    """Return the validator of a string that matches a pattern, and that no program would take for an option."""

    def fault_of(text: str) -> str | None:
        good = re.fullmatch(pattern, text) and not text.startswith("-")
        return None if good else f"{quoted(text, _SHOWN)} is not {noun}"

    return _string(fault_of, rf"^(?!-)(?:{pattern})$")


def _name_fault(text: str) -> str | None:
    if text.startswith("-"):
        return f"{quoted(text, _SHOWN)} must not begin with -"
    return None if is_name(text) else f"{quoted(text, _SHOWN)} must be 1 to 63 characters from a-z, 0-9 and -"


def _recipe_fault(text: str) -> str | None:
    return None if is_recipe(text) else f"{quoted(text, _SHOWN)} is neither a recipe name nor module:Class"


def _variable_fault(text: str) -> str | None:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", text):
        return None
    if "=" in text:  # not repeated: the value may be a secret
        return "must be only the name of a variable; its value is read on the machine that starts the job"
    return f"{quoted(text, _SHOWN)} is not a valid variable name"


# Paths as a JSON Schema can check them. It cannot count how often a path goes up after two directories or more, such as
# in a/b/../../..; everything else of the rules below is in these patterns.
_NO_PATH = r"~|\s*$|[\s\S]*[\u0000-\u001f\u007f-\u009f]"
_GOES_OUT = r"(?:\./+|[^/]+/+\.\./+)*\.\.(?:/|$)"
_SOME_ADDRESS = f"(?:{_ADDRESS.pattern})"


def _path_pattern(addresses: str, refused: str = _GOES_OUT) -> str:
    """Return the pattern of a path that does not begin with `refused`, or of one of these addresses."""
    return f"^(?!{_NO_PATH})(?:(?={addresses})|(?!{_SOME_ADDRESS}|{refused}))"


def _one_of(schemes: Iterable[str], any_case: bool = False) -> str:
    texts = "|".join(schemes)
    return re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", texts) if any_case else texts


CODE_PATTERN = f"^(?!{_NO_PATH}|/|{_SOME_ADDRESS}|{_GOES_OUT})"
"""Paths inside the directory of the job file."""
CODE_ROOT_PATTERN = rf"^(?:(?:\.\.?(?:/+|$))+$|{CODE_PATTERN.removeprefix('^')})"
"""Such a path, or one to a directory above."""
INPUT_PATTERN = _path_pattern(_one_of(_INPUT_SCHEMES))


def _path_fault(text: str) -> str | None:
    if not text.strip():
        return "must not be empty"
    if _CONTROL.search(text):
        return "contains a control character"
    if text.startswith("~"):
        return f"{quoted(text, _SHOWN)}: ~ is not expanded; write the full path"
    return None


def _is_outside(text: str) -> bool:
    return PurePosixPath(os.path.normpath(text)).parts[:1] == ("..",)


def _leaves(directory: str, text: str) -> str | None:
    """Return what is wrong with a relative path that leads out of a directory."""
    if is_address(text) or PurePosixPath(text).is_absolute() or not _is_outside(text):
        return None
    return f"{quoted(text, _SHOWN)} is outside {directory}; use an absolute path"


def _source_fault(text: str, address: str, schemes: tuple[str, ...]) -> str | None:
    if (fault := _path_fault(text)) or not is_address(text):
        return fault or _leaves("the job file's directory", text)
    if address.startswith(schemes):
        return None
    return f"{quoted(text, _SHOWN)} must be a path or start with one of {', '.join(schemes)}"


def _data_path_fault(text: str) -> str | None:
    return _source_fault(text, text.lower(), _DATA_SCHEMES)


def input_path_fault(text: str) -> str | None:
    """Return what is wrong with the path of a program's data."""
    return _source_fault(text, text, _INPUT_SCHEMES)


def _store_path_fault(text: str) -> str | None:
    return _path_fault(text) or _leaves("the current directory", text)


def code_path_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    if PurePosixPath(text).is_absolute() or is_address(text) or _is_outside(text):
        return f"{quoted(text, _SHOWN)} must be a relative path inside the job file's directory"
    return None


def code_root_fault(text: str) -> str | None:
    """Return what is wrong with the directory of the code: one inside the job file's directory, or one above it."""
    if set(PurePosixPath(os.path.normpath(text)).parts) == {".."}:
        return None
    if fault := code_path_fault(text):
        return f"{fault}, or .., ../.. and so on for a directory above it" if _is_outside(text) else fault
    return None


def is_tracking_uri(text: str) -> bool:
    """True if this names MLflow's server, or another place that does not depend on a directory."""
    return is_address(text) or text.startswith("file:") or text == "databricks"


def tracking_fault(text: str) -> str | None:
    """Return what is wrong with the URI of MLflow, which is stored, and an argument of a process. Repeats no secret."""
    if fault := _path_fault(text):
        return fault
    if is_address(text) and "@" in text.partition("://")[2].partition("/")[0]:
        return "contains a secret; set MLFLOW_TRACKING_TOKEN instead, and list it under `environment`"
    return None if is_tracking_uri(text) else _leaves("the job file's directory", text)


def _directory_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    return None if PurePosixPath(text).is_absolute() else f"{quoted(text, _SHOWN)} must be an absolute path"


def _size_fault(text: str) -> str | None:
    try:
        return None if parse_bytes(text) > 0 else "must be greater than 0"
    except ValueError as error:
        return str(error)


def _argument_fault(text: str) -> str | None:
    return "contains a NUL character" if "\0" in text else None


def _read_machines(value: object) -> Machines:
    if isinstance(value, Machines):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(must_be("a number of machines, such as 3 or 2..4", value))
    return Machines.parse(str(value))


def _write_machines(machines: Machines) -> int | str:
    return machines.least if machines.is_fixed else str(machines)


Name = Annotated[str, _string(_name_fault, f"^{_NAME.pattern}$")]
RecipeName = Annotated[str, _string(_recipe_fault, OWN_RECIPE_PATTERN)]  # the schema lists the built-in ones itself
ScoreName = Annotated[str, matching(r"[a-z][a-z0-9_-]{0,62}", "a valid score name")]
Variable = Annotated[str, _string(_variable_fault, "^[A-Za-z_][A-Za-z0-9_]{0,254}$")]
DataPath = Annotated[str, _string(_data_path_fault, _path_pattern(_one_of(_DATA_SCHEMES, any_case=True)))]
StorePath = Annotated[str, _string(_store_path_fault, _path_pattern(_SOME_ADDRESS))]
TrackingPath = Annotated[str, _string(tracking_fault, _path_pattern(f"{_SOME_ADDRESS}|file:"))]
CodePath = Annotated[str, _string(code_path_fault, CODE_PATTERN)]
CodeRoot = Annotated[str, _string(code_root_fault, CODE_ROOT_PATTERN)]
DirectoryPath = Annotated[str, _string(_directory_fault, _path_pattern("(?!)", refused="(?!/)"))]
ByteSize = Annotated[str, _string(_size_fault, BYTES_PATTERN)]
Argument = Annotated[str, _string(_argument_fault, "")]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]
Ordinal = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)]
WorkerCount = Annotated[int, Field(strict=True, ge=1, le=MAX_WORKERS)]
Pixels = Annotated[int, Field(strict=True, ge=8, le=8192)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Scale = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Boolean = Annotated[bool, Field(strict=True)]
Length = Annotated[
    Duration,
    _quantity(Duration, "500 steps", DURATION_PATTERN, "500 steps", "10 epochs", "6 h"),
    PlainSerializer(str),
]
Steps = Annotated[Duration, _quantity(Duration, "500 steps", STEPS_PATTERN, only="steps"), PlainSerializer(str)]
Seconds = Annotated[
    Duration, _quantity(Duration, "1 min", TIME_PATTERN, "5 min", "1 h", only="seconds"), PlainSerializer(str)
]
Interval = Annotated[
    Duration | Literal["auto"],
    PlainValidator(
        _interval,
        json_schema_input_type=in_schema(
            anyOf=[{"const": "auto"}, {"type": "string", "pattern": DURATION_PATTERN}], examples=["5 min", "auto"]
        ),
    ),
    PlainSerializer(str),
]
BatchSize = Annotated[
    Amount, _quantity(Amount, "4096 tokens", AMOUNT_PATTERN, "4096 tokens", "256 samples"), PlainSerializer(str)
]
MachineCount = Annotated[
    Machines,
    PlainValidator(
        _read_machines,
        json_schema_input_type=in_schema(
            anyOf=[{"type": "integer", "minimum": 1}, {"type": "string", "pattern": MACHINES_PATTERN}],
            examples=[3, "2..4"],
        ),
    ),
    PlainSerializer(_write_machines),
]
