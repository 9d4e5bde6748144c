"""Records: objects in a store that hold JSON. The types of their fields, and how they are written and read.

Anyone who can write the store can write a record, so every one is read by `decode`, which refuses what no writer of
Packtrain would write: wrong types, unknown words, numbers out of range, names that are paths. Who reads a record can
rely on that.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, FailFast, Field, TypeAdapter, ValidationError

from packtrain.errors import PacktrainError, printable
from packtrain.store.base import is_key
from packtrain.units import MAX_WORKERS

Record = TypeVar("Record")
Item = TypeVar("Item")

MAX_RECORD_BYTES = 4 << 20
"""Of one object; a generation of 10,000 machines has 1 MB."""
MAX_NUMBER = 2**63 - 1
MAX_SECONDS = 1e15
MAX_MEASUREMENT = 1e150
"""A measurement beyond it counts as infinite: its square, or the sum of many, would overflow in every view."""
_MAX_TIME = 253402300799.0  # the last second of the year 9999, the last that calendars of Python know
_NAME_LENGTH = 200
_MAX_ERRORS = 1000


def _file_name(text: str) -> str:
    # A name from the store becomes a part of keys and paths: with a slash it could lead elsewhere.
    if not is_key(text) or "/" in text:
        raise ValueError("is not a file name")
    return text


def _measurements(values: dict[str, float]) -> dict[str, float]:
    # A loss may be infinite, but times are added, compared and shown as dates and hours.
    if not all(abs(value) <= MAX_SECONDS for name, value in values.items() if name.endswith("_seconds")):
        raise ValueError("a time is out of range")
    return values


def _measurement(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) > MAX_MEASUREMENT else value


FileName = Annotated[str, Field(max_length=_NAME_LENGTH), AfterValidator(_file_name)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""A SHA-256."""
Address = Annotated[str, Field(max_length=255)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Port = Annotated[int, Field(ge=0, le=65535)]
WorkerCount = Annotated[int, Field(ge=1, le=MAX_WORKERS)]
Number = Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, le=_MAX_TIME, allow_inf_nan=False)]
"""Seconds since 1970."""
Seconds = Number
"""May be slightly negative: a span is the difference of two clocks."""
Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Many = Annotated[tuple[Item, ...], FailFast()]
"""Refused at the first one that is wrong: a list of millions would make millions of errors."""
Label = Annotated[str, Field(max_length=_NAME_LENGTH)]
Measurement = Annotated[float, AfterValidator(_measurement)]
Measurements = Annotated[dict[Label, Measurement], AfterValidator(_measurements)]


class DamagedRecord(PacktrainError):
    """A record that Packtrain did not write, or not this version of it."""


_ADAPTERS: dict[tuple[type, bool], TypeAdapter[Any]] = {}


def decode(kind: type[Record], data: bytes, subject: str) -> Record:
    """Return the record; DamagedRecord names its `subject` and the first field that is wrong."""
    record: Record = _decoded(kind, False, data, subject)
    return record


def decode_many(kind: type[Record], data: bytes, subject: str) -> list[Record]:
    return list(_decoded(kind, True, data, subject))


def _decoded(kind: type, many: bool, data: bytes, subject: str) -> Any:
    if (kind, many) not in _ADAPTERS:  # making one takes far longer than using it
        _ADAPTERS[kind, many] = TypeAdapter(Many[kind] if many else kind)  # type: ignore[valid-type]
    try:
        return _ADAPTERS[kind, many].validate_json(data, strict=True)
    except ValidationError as error:
        raise damaged(subject, error) from error


def decode_name(data: bytes, subject: str) -> str:
    """Return a name that is stored as plain text."""
    try:
        return _file_name(data.decode())
    except ValueError as error:
        raise DamagedRecord(f"{subject} is damaged: it is not a name") from error


def damaged(subject: str, error: ValidationError) -> DamagedRecord:
    place = ""
    if error.error_count() <= _MAX_ERRORS:  # all of them are made to see the first
        first, *_ = error.errors(include_url=False, include_context=False, include_input=False)
        place = ".".join(map(str, first["loc"]))
    where = f" (field {printable(place, 60)})" if place else ""
    return DamagedRecord(f"{subject} is damaged, or from another version{where}")


def encode(record: Any) -> bytes:
    # Half a character, as in the output of a program, becomes `?`: as an escape, `decode` would refuse the record.
    return json.dumps(asdict(record), indent=1, ensure_ascii=False).encode(errors="replace")
