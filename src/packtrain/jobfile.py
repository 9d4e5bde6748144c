"""Reading job files: YAML with the line of every field, `--set`, and each mistake in one line.

The text is read as a stream of events rather than composed by PyYAML: that lets depth, aliases and size be
refused while they come in, and leaves scalars to the rules of YAML 1.2 (`no` and `12:30` are texts).
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from packtrain.errors import Mistake
from packtrain.job import MAX_WHOLE, Data, Job, Location, Source, expand, faults, is_address, is_name

MAX_BYTES = 1_000_000
MAX_NODES = 10_000
MAX_DEPTH = 32
MAX_KEY = 200

# An event loader with libyaml when it is there: ten times faster, with the same events.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_WHOLE = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_STEP = re.compile(r"[A-Za-z0-9_-]+")

DefaultsOf = Callable[[str], Mapping[str, object]]


# Documents and their places.


@dataclass(frozen=True)
class Document:
    """Plain data with the place of each field: its line in the file, or None when `--set` gave it."""

    name: str
    text: str
    data: Mapping[str, Any]
    places: Mapping[Location, int | None]

    def place(self, location: Location) -> int | None:
        """The place of a field, or of what stands nearest above it.

        Steps that the file does not have are passed over: a short form, such as one source where a list
        may stand, has none.
        """
        known: Location = ()
        for step in location:
            if (*known, step) in self.places:
                known = (*known, step)
        for length in range(len(location), len(known) - 1, -1):
            if location[:length] in self.places:
                known = location[:length]
                break
        return self.places.get(known, 1)

    def mistake(self, location: Location, text: str, needed: bool = False, more: int = 0) -> Mistake:
        """What is wrong with a field, as the one line that a person reads."""
        line = self.place(location)
        field = ".".join(_shown(str(step)) for step in location)
        also = f" (and {more} more)" if more else ""
        if line is None:
            return Mistake(f"--set {field}{'' if needed else ':'} {text}{also}")
        where = f"{_shown(self.name, len(self.name))}:{line}:"
        return Mistake(f"{where} {field}{'' if needed or not field else ':'} {text}{also}")

    def first_mistake(self, error: ValidationError) -> Mistake:
        """The first by line of what a validation found, with the number of the others.

        Fields that are not there come last: a misspelt key explains a missing one.
        """
        found = faults(error)

        def order(fault: tuple[Location, str, bool]) -> tuple[bool, bool, int]:
            line = self.place(fault[0])
            return fault[2], line is None, line or 0

        location, text, needed = min(found, key=order)
        return self.mistake(location, text, needed, more=len(found) - 1)


def _shown(text: str, limit: int = 60) -> str:
    """A name as errors show it: short, and nothing in it that a terminal would act on."""
    short = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in short)


# From text to plain data.


@dataclass(frozen=True)
class _Node:
    """A value as written, and how many nodes and levels it takes when it is written out."""

    line: int
    value: object  # a scalar, list[_Node] or dict[str, _Node]
    size: int = 1
    height: int = 0


class _Reader:
    """One YAML document from events to nodes; `refuse` makes the error for a line, a field and a text."""

    def __init__(self, text: str, refuse: Callable[[int, Location, str], Mistake]) -> None:
        self.refuse = refuse
        self.aws_lines = {number for number, line in enumerate(text.split("\n"), 1) if _AWS_WORD.search(line)}
        self.events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
        self.anchors: dict[str, _Node] = {}
        self.open_anchors: set[str] = set()
        self.count = 0

    def document(self) -> _Node | None:
        """The only document of the text; None when there is none."""
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
            raise self.refuse(line, (), f"not valid YAML: {error.problem or error.context}") from None
        except (yaml.YAMLError, ValueError, OverflowError):  # the last two without libyaml: "\U00110000"
            raise self.refuse(1, (), "not valid YAML: it has a character that YAML does not allow") from None
        if not isinstance(after, yaml.StreamEndEvent):
            raise self.refuse(after.start_mark.line + 1, (), "a second document starts here; only one is read")
        return node

    def _node(self, event: Any, path: Location, depth: int) -> _Node:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), line, path, depth)
        self._add(1, line, path)
        if event.tag is not None:
            raise self.refuse(line, path, "YAML tags are not allowed; write the value alone")
        if event.anchor is not None:
            self.open_anchors.add(event.anchor)
        if isinstance(event, yaml.ScalarEvent):
            node = _Node(line, self._scalar(event, line, path))
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
            raise self.refuse(line, path, f"more than {MAX_NODES:,} values, with aliases written out")

    def _alias(self, anchor: str, line: int, path: Location, depth: int) -> _Node:
        if anchor in self.open_anchors:
            raise self.refuse(line, path, "an alias that refers to itself")
        node = self.anchors.get(anchor)
        if node is None:
            raise self.refuse(line, path, "an alias without its anchor")
        self._add(node.size, line, path)
        if depth - 1 + node.height > MAX_DEPTH:
            raise self.refuse(line, path, f"nested deeper than {MAX_DEPTH} levels")
        self._check_text(node.value, line, path)
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
        if found := _CONTROL.search(value):
            raise self.refuse(line, path, f"has the control character U+{ord(found[0]):04X} in it")
        beside_aws = line in self.aws_lines or any(_AWS_WORD.search(str(step)) for step in path)
        if has_secret(value, beside_aws):
            raise self.refuse(line, path, INLINE)

    def _sequence(self, line: int, path: Location, depth: int) -> _Node:
        entries: list[_Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            entry = self._node(event, (*path, len(entries)), depth + 1)
            if entries and is_secret_argument(entries[-1].value, entry.value):
                raise self.refuse(entry.line, (*path, len(entries)), INLINE)
            entries.append(entry)
        return _Node(line, entries, 1 + sum(e.size for e in entries), 1 + _tallest(entries))

    def _mapping(self, line: int, path: Location, depth: int) -> _Node:
        entries: dict[str, _Node] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key_line = event.start_mark.line + 1
            key = self._key(event, key_line, path, depth)
            if key in entries:
                first = entries[key].line
                raise self.refuse(key_line, (*path, key), f"given twice, first on line {first}")
            if names_secret(key):
                raise self.refuse(key_line, (*path, key), INLINE)
            value = self._node(next(self.events), (*path, key), depth + 1)
            entries[key] = replace(value, line=key_line)
        nodes = list(entries.values())
        return _Node(line, entries, 1 + sum(1 + n.size for n in nodes), 1 + _tallest(nodes))

    def _key(self, event: Any, line: int, path: Location, depth: int) -> str:
        if not isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)):
            raise self.refuse(line, path, "a key must be a text, not a list or a mapping")
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
            raise self.refuse(line, path, "merge keys (<<) are not allowed; write the fields out")
        key = self._node(event, path, depth).value
        if not isinstance(key, str):
            raise self.refuse(line, path, "a key must be a text; write it in quotes")
        if len(key) > MAX_KEY:
            raise self.refuse(line, path, f"a key of more than {MAX_KEY} characters")
        return key


def _tallest(nodes: Sequence[_Node]) -> int:
    return max((node.height for node in nodes), default=0)


def scalar(text: str) -> str | int | float | bool | None:
    """A plain scalar by the core rules of YAML 1.2; what is not finite or does not fit is refused."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _WHOLE.fullmatch(text) or _BASED.fullmatch(text):
        number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) <= 40 else MAX_WHOLE + 1
        if abs(number) > MAX_WHOLE:
            raise ValueError("a whole number that is too large")
        return number
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("must be a finite number")
    if _FLOAT.fullmatch(text):
        if not math.isfinite(float(text)):
            raise ValueError("must be a finite number")
        return float(text)
    return text


def _plain(node: _Node, path: Location, places: dict[Location, int | None], in_file: bool) -> Any:
    """The data of a node; `places` gets the place of each value in it."""
    places[path] = node.line if in_file else None
    if isinstance(node.value, list):
        return [_plain(entry, (*path, index), places, in_file) for index, entry in enumerate(node.value)]
    if isinstance(node.value, dict):
        return {key: _plain(entry, (*path, key), places, in_file) for key, entry in node.value.items()}
    return node.value


# Secrets, which belong in the environment: a job file is copied into every run's folder.

INLINE = "a secret is written here; put it in an environment variable and list its name under `environment`"

_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key"
    r"|(^|_)token(_|$)|(auth|access|api|bearer|hf|hub)token"
)
# An argument may well be called --eos-token: of tokens only those that open a door count.
_SECRET_ARGUMENT = re.compile(
    r"(^|_)(secret|passw(or)?d|passphrase|credentials?|api_?key|access_?key|private_?key)(_key)?$"
    r"|^token$|(^|_)(auth|access|api|bearer|bot|git|github|gitlab|hf|hub|login|session|wandb)_?token$"
)
_SECRET_VALUE = re.compile(
    r"(?<![A-Z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"
    r"|-----BEGIN [A-Z0-9 ]+-----"
    r"|(?<!\w)(gh[opsur]_|github_pat_|glpat-|hf_)[A-Za-z0-9_-]{20}"
    r"|(?<!\w)xox[a-z]-[A-Za-z0-9-]{8}"
    r"|(?<![\w-])sk-[A-Za-z0-9_-]{20}"
    r"|(?<!\w)AIza[A-Za-z0-9_-]{35}"
    r"|(?<![\w-])eyJ[A-Za-z0-9_-]{10,}\.eyJ"
    r"|://[^\s/?#@:]{0,256}:[^\s/?#@]{1,256}@"
    r"|[?&](?i:(access_)?token|api_?key|password|secret|sig|signature|x-amz-(signature|security-token))=[^&\s]"
)
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")
_AWS_WORD = re.compile(r"aws|amazon|secret|access.?key", re.IGNORECASE)
_OPTION_WITH_VALUE = re.compile(r"(?<![\w.-])--?([A-Za-z][\w.-]*)(?:=|\s+)[^\s$=-]")
_VARIABLE_WITH_VALUE = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=[^\s$]")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")


def _words(name: str) -> str:
    """`awsSecretKey`, `aws-secret.key` and `AWS_SECRET_KEY` as `aws_secret_key`."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def names_secret(name: str) -> bool:
    """Whether a key says that its value is a secret."""
    return _SECRET_NAME.search(_words(name)) is not None


def has_secret(text: str, beside_aws: bool = False) -> bool:
    """Whether a text looks like a secret or carries one; `beside_aws` when a word of AWS stands near it."""
    if _SECRET_VALUE.search(text):
        return True
    if beside_aws or _AWS_WORD.search(text):
        for found in _AWS_SECRET.findall(text):
            if re.search("[a-z]", found) and re.search("[A-Z]", found) and re.search("[0-9]", found):
                return True
    written = (*_OPTION_WITH_VALUE.finditer(text), *_VARIABLE_WITH_VALUE.finditer(text))
    return any(_SECRET_ARGUMENT.search(_words(option[1])) for option in written)


def is_secret_argument(option: object, value: object) -> bool:
    """Whether two neighbours in a list are an option for a secret and its value."""
    if not isinstance(option, str) or value is None or isinstance(value, (list, dict)):
        return False
    named = _OPTION.fullmatch(option)
    given = not str(value).startswith(("-", "$")) and str(value) != ""
    return named is not None and given and _SECRET_ARGUMENT.search(_words(named[1])) is not None


# Files, overrides, jobs.


def read_document(path: str | Path) -> Document:
    """A job file as plain data with the lines of its fields; whatever is wrong with it is a Mistake."""
    empty = Document(str(path), "", {}, {})
    text = _decode(_read_bytes(path), empty)

    def refuse(line: int, location: Location, problem: str) -> Mistake:
        return replace(empty, places={(): line}).mistake(location, problem)

    if found := _CONTROL.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise refuse(line, (), f"has the control character U+{ord(found[0]):04X} in it")
    node = _Reader(text, refuse).document()
    if node is None or node.value is None:
        raise refuse(1, (), "the file is empty; `packtrain init` writes one to start from")
    if not isinstance(node.value, dict):
        raise refuse(node.line, (), "must be a mapping of fields, such as `name: en-de`")
    for number, line_text in enumerate(text.split("\n"), 1):  # comments too
        if _SECRET_VALUE.search(line_text):
            raise refuse(number, (), INLINE)
    places: dict[Location, int | None] = {}
    data = _plain(node, (), places, in_file=True)
    return Document(str(path), text, data, places)


def _read_bytes(path: str | Path) -> bytes:
    name = _shown(str(path), len(str(path)))
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            raise Mistake(f"{name}: is a directory, not a job file")
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise Mistake(f"{name}: is not a regular file")
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise Mistake(f"{name}: no such file") from None
    except OSError as error:
        raise Mistake(f"{name}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise Mistake(f"{name}: not a path") from None
    if len(content) > MAX_BYTES:
        raise Mistake(f"{name}: larger than {MAX_BYTES // 1_000_000} MB, which no job file is")
    return content


def _decode(content: bytes, document: Document) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if content.startswith(b"\xef\xbb\xbf") else 0)
        located = replace(document, places={(): content.count(b"\n", 0, start) + 1})
        raise located.mistake((), f"not UTF-8 at byte {start}; save the file as UTF-8") from None


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each `field.path=value` set, the short forms on its way written out."""
    data = _copy(expand(document.data))
    places = dict(document.places)
    for override in overrides:
        location, node = _read_override(override)
        _set(data, places, location, node)
        data = expand(data)  # the value may be a short form itself, and the next field one below it
    return replace(document, data=data, places=places)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(entry) for entry in value]
    return value


_SET = Document("", "", {}, {(): None})


def _read_override(override: str) -> tuple[Location, _Node]:
    field, equals, text = override.partition("=")
    field = field.strip()
    if not equals:
        raise Mistake(f"--set {_shown(field)}: write it as field=value, such as train.seed=2")
    steps: Location = tuple(int(step) if re.fullmatch("[0-9]{1,4}", step) else step for step in field.split("."))
    if not all(_STEP.fullmatch(str(step)) for step in steps):
        raise Mistake(f"--set {_shown(field)}: not a field; write it with dots, such as train.seed=2")
    if any(names_secret(str(step)) for step in steps):
        raise _SET.mistake(steps, INLINE)

    def refuse(_line: int, location: Location, problem: str) -> Mistake:
        return _SET.mistake((*steps, *location), problem)

    if found := _CONTROL.search(text):
        raise refuse(1, (), f"has the control character U+{ord(found[0]):04X} in it")
    return steps, _Reader(text, refuse).document() or _Node(1, None)


def _set(data: Any, places: dict[Location, int | None], location: Location, node: _Node) -> None:
    """Puts a value where a location says, in place; what is not there on the way is made."""
    path: Location = ()
    for index, written in enumerate(location):
        step: Any = str(written) if isinstance(data, dict) else written
        if isinstance(data, list):
            if not isinstance(step, int) or step > len(data):
                count = f"the list has {len(data)}, counted from 0"
                raise _SET.mistake((*path, step), f"there is no such entry; {count}")
            if step == len(data):
                data.append(None)
        elif not isinstance(data, dict):
            raise _SET.mistake((*path, step), f"{'.'.join(map(str, path))} is a value and has no fields")
        path = (*path, step)
        if index == len(location) - 1:
            for under in [known for known in places if known[: len(path)] == path]:
                del places[under]
            data[step] = _plain(node, path, places, in_file=False)
            return
        if (data[step] if isinstance(data, list) else data.get(step)) is None:
            data[step] = [] if isinstance(location[index + 1], int) else {}
            places[path] = None
        data = data[step]


def merge_defaults(document: Document, defaults: Mapping[str, object]) -> Document:
    """The document over a recipe's defaults: by section and field; what a field has is never mixed."""
    data, below = expand(document.data), expand(defaults)
    for section, fields in below.items():
        given = data.get(section)
        if given is None:
            data[section] = fields
        elif isinstance(given, Mapping) and isinstance(fields, Mapping):
            data[section] = {**fields, **given}
    return replace(document, data=data)


def no_defaults(recipe: str) -> Mapping[str, object]:  # noqa: ARG001
    return {}


@dataclass(frozen=True)
class LoadedJob:
    """A job with the directory of its file, which its code is in."""

    job: Job
    directory: Path
    document: Document

    @property
    def text(self) -> str:
        """The file as it was written; what `--set` changed is in the job alone."""
        return self.document.text

    @property
    def code(self) -> Path:
        return self.directory / self.job.code

    def mistake(self, field: str, text: str) -> Mistake:
        """The error for a fault that only a recipe, a fleet or the data can tell, with the field's place."""
        steps = (int(step) if step.isdecimal() else step for step in field.split("."))
        return self.document.mistake(tuple(steps), text)


def load_job(path: str | Path, overrides: Sequence[str] = (), defaults_of: DefaultsOf = no_defaults) -> LoadedJob:
    """A job file over its recipe's defaults, with the overrides on top, validated; or one Mistake.

    `defaults_of` gives a recipe's part of a document, and raises Mistake for a recipe that it does not know.
    """
    document = read_document(path)
    recipe = apply_overrides(document, overrides).data.get("recipe")
    if isinstance(recipe, str) and is_name(recipe):
        try:
            defaults = defaults_of(recipe)
        except Mistake as mistake:
            raise apply_overrides(document, overrides).mistake(("recipe",), str(mistake)) from None
        document = merge_defaults(document, defaults)
    document = apply_overrides(document, overrides)
    try:
        job = Job.model_validate(document.data)
    except ValidationError as error:
        raise document.first_mistake(error) from None
    directory = Path(os.path.normpath(Path(path).absolute())).parent
    if job.recipe is not None:
        job = job.model_copy(update={"data": _with_absolute_paths(job.data, directory)})
    return LoadedJob(job, directory, document)


def _resolved(path: str, directory: Path) -> str:
    return path if is_address(path) else os.path.normpath(directory / path)


def _with_absolute_paths(data: Data, directory: Path) -> Data:
    def absolute(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return tuple(
            source.model_copy(update={"paths": tuple(_resolved(path, directory) for path in source.paths)})
            for source in sources
        )

    return data.model_copy(
        update={
            "train": absolute(data.train),
            "valid": absolute(data.valid),
            "test": absolute(data.test),
        }
    )
