"""Documents: YAML as plain data with the line of every field, and each mistake in one line.

The text is read as a stream of events, not with `yaml.compose`: libyaml's composer crashes on deep nesting, and the one
in Python takes 8 s for a file of the largest size (docs/decisions.md). Events let depth, aliases and size be refused as
they arrive. Scalars follow the rules of YAML 1.2 (`no` and `12:30` are strings).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pydantic import ValidationError

from packtrain.errors import Mistake, printable
from packtrain.job.part import MAX_INTEGER, Location, faults
from packtrain.job.secrets import (
    has_plain_secret,
    has_secret,
    holds_secret,
    is_secret_argument,
    mentions_aws,
    secret_in,
)

MAX_NODES = 10_000
MAX_DEPTH = 32
MAX_KEY = 200
_SHOWN = 60  # characters of a key or a field that an error repeats

# libyaml if PyYAML was built with it: ten times faster, with the same events.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

Refuse = Callable[[int, Location, str], Mistake]
"""Makes the error for a line, a field and what is wrong."""


@dataclass(frozen=True)
class Document:
    """Plain data with the place of each field: its line in the file, or None if it comes from `--set`."""

    name: str
    text: str
    data: Mapping[str, Any]
    places: Mapping[Location, int | None]

    def place(self, location: Location) -> int | None:
        """Return the place of a field, or of its nearest parent.

        Steps that the file does not have are skipped: a short form, such as one source instead of a list, has none.
        """
        nearest: Location = ()
        for step in location:
            if (*nearest, step) in self.places:
                nearest = (*nearest, step)
        # A prefix of the location itself, if it is at least as long, is more precise than one with skipped steps.
        for length in range(len(location), len(nearest) - 1, -1):
            if location[:length] in self.places:
                nearest = location[:length]
                break
        return self.places.get(nearest, 1)

    def mistake(self, location: Location, text: str, missing: bool = False, remaining: int = 0) -> Mistake:
        """Return the error for a field, in one line."""
        line = self.place(location)
        field = ".".join(printable(str(step), _SHOWN) for step in location)
        also = f" (and {remaining} more)" if remaining else ""
        if line is None:
            return Mistake(f"--set {field}{'' if missing else ':'} {text}{also}")
        where = f"{printable(self.name)}:{line}:"
        return Mistake(f"{where} {field}{'' if missing or not field else ':'} {text}{also}")

    def first_mistake(self, error: ValidationError) -> Mistake:
        """Return the first error by line that a validation found, with the number of the others.

        Missing fields come last: a misspelled key explains a missing one.
        """
        all_faults = faults(error)

        def order(fault: tuple[Location, str, bool]) -> tuple[bool, bool, int]:
            line = self.place(fault[0])
            return fault[2], line is None, line or 0

        location, text, missing = min(all_faults, key=order)
        return self.mistake(location, text, missing, remaining=len(all_faults) - 1)


# From text to plain data.


@dataclass(frozen=True)
class YamlNode:
    """A value as written, with the number of its nodes and levels if aliases are expanded."""

    line: int
    value: object  # a scalar, list[YamlNode] or dict[str, YamlNode]
    size: int = 1
    height: int = 0


class _Reader:
    """Builds the nodes of one YAML document from its events."""

    def __init__(self, text: str, refuse: Refuse, above: Location) -> None:
        self.refuse, self.above = refuse, above
        self.aws_lines = {number for number, line in enumerate(text.split("\n"), 1) if mentions_aws(line)}
        self.events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
        self.anchors: dict[str, YamlNode] = {}
        self.open_anchors: set[str] = set()
        self.count = 0

    def document(self) -> YamlNode | None:
        """Return the only document of the text, or None if there is none."""
        try:
            next(self.events)  # the stream's start
            if isinstance(next(self.events), yaml.StreamEndEvent):
                return None
            node = self._node(next(self.events), (), 1)
            next(self.events)  # the document's end
            after = next(self.events)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise self.refuse(line, (), f"invalid YAML: {error.problem or error.context}") from None
        except (yaml.YAMLError, ValueError, OverflowError):  # the last two without libyaml: "\U00110000"
            raise self.refuse(1, (), "invalid YAML: it contains a character that YAML does not allow") from None
        if not isinstance(after, yaml.StreamEndEvent):
            line = after.start_mark.line + 1
            raise self.refuse(line, (), "a second YAML document starts here; a job file has only one")
        return node

    def _node(self, event: Any, path: Location, depth: int) -> YamlNode:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), line, path, depth)
        self._add(1, line, path)
        if event.tag is not None:
            raise self.refuse(line, path, "YAML tags are not supported; write the plain value")
        if event.anchor is not None:
            self.open_anchors.add(event.anchor)
        if isinstance(event, yaml.ScalarEvent):
            node = YamlNode(line, self._scalar(event, line, path))
        else:
            if depth > MAX_DEPTH:
                raise self.refuse(line, path, f"nested deeper than {MAX_DEPTH} levels")
            read = self._mapping if isinstance(event, yaml.MappingStartEvent) else self._sequence
            node = read(line, path, depth)
        if event.anchor is not None:
            self.open_anchors.discard(event.anchor)
            self.anchors[event.anchor] = node
        return node

    def _add(self, nodes: int, line: int, path: Location) -> None:
        self.count += nodes
        if self.count > MAX_NODES:
            raise self.refuse(line, path, f"more than {MAX_NODES:,} values, with aliases expanded")

    def _alias(self, anchor: str, line: int, path: Location, depth: int) -> YamlNode:
        if anchor in self.open_anchors:
            raise self.refuse(line, path, "the alias refers to itself")
        node = self.anchors.get(anchor)
        if node is None:
            raise self.refuse(line, path, "the alias is not defined")
        self._add(node.size, line, path)
        if depth - 1 + node.height > MAX_DEPTH:
            raise self.refuse(line, path, f"nested deeper than {MAX_DEPTH} levels")
        self._check_text(node.value, line, path)  # again: beside AWS words a value may be a secret only here
        return replace(node, line=line)

    def _scalar(self, event: Any, line: int, path: Location) -> object:
        try:
            value = scalar(event.value) if event.implicit[0] else event.value
        except ValueError as error:
            raise self.refuse(line, path, str(error)) from None
        self._check_text(value, line, path)
        return value

    def _check_text(self, value: object, line: int, path: Location) -> None:
        if not isinstance(value, str):
            return
        if control := _CONTROL.search(value):
            raise self.refuse(line, path, f"contains the control character U+{ord(control[0]):04X}")
        beside_aws = line in self.aws_lines or any(mentions_aws(str(step)) for step in path)
        if has_secret(value, beside_aws):
            raise self.refuse(line, path, self._secret_in(path))

    def _secret_in(self, path: Location) -> str:
        return secret_in(next(iter((*self.above, *path)), ""))

    def _sequence(self, line: int, path: Location, depth: int) -> YamlNode:
        entries: list[YamlNode] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            entry = self._node(event, (*path, len(entries)), depth + 1)
            if entries and is_secret_argument(entries[-1].value, entry.value):
                raise self.refuse(entry.line, (*path, len(entries)), self._secret_in(path))
            entries.append(entry)
        return YamlNode(line, entries, 1 + sum(e.size for e in entries), 1 + _tallest(entries))

    def _mapping(self, line: int, path: Location, depth: int) -> YamlNode:
        entries: dict[str, YamlNode] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key_line = event.start_mark.line + 1
            key = self._key(event, key_line, path, depth)
            if key in entries:
                first = entries[key].line
                raise self.refuse(key_line, (*path, key), f"duplicate key; first on line {first}")
            if holds_secret((*self.above, *path, key)):
                raise self.refuse(key_line, (*path, key), self._secret_in((*path, key)))
            value = self._node(next(self.events), (*path, key), depth + 1)
            entries[key] = replace(value, line=key_line)  # a value may start on the line after its key
        nodes = list(entries.values())
        return YamlNode(line, entries, 1 + sum(1 + n.size for n in nodes), 1 + _tallest(nodes))

    def _key(self, event: Any, line: int, path: Location, depth: int) -> str:
        if not isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)):
            raise self.refuse(line, path, "a key must be a string, not a list or a mapping")
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
            raise self.refuse(line, path, "merge keys (<<) are not supported; write the fields out")
        key = self._node(event, path, depth).value
        if not isinstance(key, str):
            raise self.refuse(line, path, "a key must be a string; put it in quotes")
        if len(key) > MAX_KEY:
            raise self.refuse(line, path, f"a key is longer than {MAX_KEY} characters")
        return key


def _tallest(nodes: Sequence[YamlNode]) -> int:
    return max((node.height for node in nodes), default=0)


def scalar(text: str) -> str | int | float | bool | None:
    """Read a plain scalar by the core rules of YAML 1.2; numbers that are not finite or too large are refused."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INTEGER.fullmatch(text) or _BASED.fullmatch(text):
        # Python refuses to convert thousands of digits, with an error of its own.
        number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= 40 else MAX_INTEGER + 1
        if abs(number) > MAX_INTEGER:
            raise ValueError("the integer is too large")
        return number
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("must be a finite number")
    if _FLOAT.fullmatch(text):
        if not math.isfinite(float(text)):
            raise ValueError("must be a finite number")
        return float(text)
    return text


def plain(node: YamlNode, path: Location, places: dict[Location, int | None], in_file: bool) -> Any:
    """Return the data of a node, and add the place of each value in it to `places`."""
    places[path] = node.line if in_file else None
    if isinstance(node.value, list):
        return [plain(entry, (*path, index), places, in_file) for index, entry in enumerate(node.value)]
    if isinstance(node.value, dict):
        return {key: plain(entry, (*path, key), places, in_file) for key, entry in node.value.items()}
    return node.value


def read_node(text: str, refuse: Refuse, above: Location = ()) -> YamlNode | None:
    """Return the only value of a text, or None if there is none. It is a whole job, or the field `above` of one."""
    if control := _CONTROL.search(text):
        line = text.count("\n", 0, control.start()) + 1
        raise refuse(line, (), f"contains the control character U+{ord(control[0]):04X}")
    return _Reader(text, refuse, above).document()


def read_text(name: str, text: str) -> Document:
    """Return the text of a job file as plain data with the lines of its fields, or raise one Mistake."""

    def refuse(line: int, location: Location, problem: str) -> Mistake:
        return Document(name, "", {}, {(): line}).mistake(location, problem)

    node = read_node(text, refuse)
    if node is None or node.value is None:
        raise refuse(1, (), "the file is empty; create one with `packtrain init`")
    if not isinstance(node.value, dict):
        raise refuse(node.line, (), "must be a mapping of fields, such as `name: en-de`")
    for number, line_text in enumerate(text.split("\n"), 1):  # comments too
        if has_plain_secret(line_text):
            raise refuse(number, (), secret_in(""))
    places: dict[Location, int | None] = {}
    data = plain(node, (), places, in_file=True)
    return Document(name, text, data, places)
