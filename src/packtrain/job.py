"""The job: what a person asks for, typed and frozen, validated once.

What comes in kinds (schedules, optimizers, fleets, sources) is a class each and a line in a plain dict.
The errors speak the person's words: `Part` rewrites those of pydantic, so that whoever reads a job has
only to add where the fault stands.
"""

from __future__ import annotations

import math
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
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from packtrain.errors import nearest
from packtrain.units import Amount, Duration

Location = tuple[int | str, ...]

NEEDED = "needed"  # the type of an error about a field that is not there; all others are MISTAKE
MISTAKE = "mistake"

_NAME = re.compile(r"[a-z0-9-]{1,63}")
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|store:")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_DATA_SCHEMES = ("s3://", "http://", "https://", "store:")


def is_name(text: str) -> bool:
    """Whether a text can name a job or a run."""
    return _NAME.fullmatch(text) is not None


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


def _what(value: object) -> str:
    return _KINDS_OF_VALUES.get(type(value), type(value).__name__)


def _quoted(text: str) -> str:
    """A text as errors show it: short, whatever was written."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _expected(expected: str, value: object) -> str:
    said = f"must be {expected}, not {_what(value)}"
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
            return f"must be one of {', '.join(choices)}, not {_what(value)}"
        return f"{_quoted(value)} is not one of {', '.join(choices)}; {nearest(value, choices)}"
    if kind == "too_short":
        return f"must have at least {context['min_length']}"
    if kind == "too_long":
        return f"must have at most {context['max_length']}"
    if kind == "value_error":
        return str(context["error"])
    return error["msg"]


def _wrong(text: str, *location: int | str, kind: str = MISTAKE) -> InitErrorDetails:
    # The value stays out of the error: what was written may be long, or a secret.
    return InitErrorDetails(type=PydanticCustomError(kind, "{text}", {"text": text}), loc=location, input=None)


def _refusal(wrongs: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("job", wrongs)


def _under(error: ValidationError, *prefix: int | str) -> list[InitErrorDetails]:
    """The errors of a part in our words, with their place in the whole."""
    return [
        _wrong(
            _in_words(detail),
            *prefix,
            *detail["loc"],
            kind=NEEDED if detail["type"] in (NEEDED, "missing") else MISTAKE,
        )
        for detail in error.errors(include_url=False)
    ]


def _unknown(keys: Sequence[str], known: Iterable[str]) -> list[InitErrorDetails]:
    known = list(known)
    hints = [nearest(key, known) for key in keys[:10]]  # a look at each of thousands would take seconds
    return [
        _wrong(f"unknown key; {hint}", key)
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
            raise _refusal([_wrong(f"must be a mapping, not {_what(value)}")])
        wrongs: list[InitErrorDetails] = []
        given = cls.arrange(dict(value), wrongs)
        wrongs += _unknown([key for key in given if key not in cls.model_fields], cls.known())
        given = {key: value for key, value in given.items() if key in cls.model_fields}
        made = None
        try:
            made = handler(given)
        except ValidationError as error:
            wrongs += _under(error)
        if made is not None and not wrongs:
            wrongs += [_wrong(text, *location) for location, text in made.faults()]
        if made is None or wrongs:
            raise _refusal(wrongs)
        return made


# Leaves.

Measured = TypeVar("Measured", Duration, Amount)


def _measured(unit: type[Measured], example: str, only: str | None = None) -> PlainValidator:
    def read(value: object) -> Measured:
        if isinstance(value, bool) or not isinstance(value, (str, int, float, unit)):
            raise ValueError(f"must be a number with a unit, such as {example!r}, not {_what(value)}")
        if isinstance(value, (int, float)):
            raise ValueError(f"a unit is missing: write it as in {example!r}")
        read = unit.parse(value) if isinstance(value, str) else value
        if only is not None and read.unit != only:
            raise ValueError(f"must be counted in {only}, such as {example!r}")
        return read

    return PlainValidator(read)


def _text(check: Callable[[str], str | None]) -> PlainValidator:
    """A text for which `check` finds nothing wrong."""

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(_expected("a text", value))
        if fault := check(value):
            raise ValueError(fault)
        return value

    return PlainValidator(read)


def _name_fault(text: str) -> str | None:
    if is_name(text):
        return None
    return f"{_quoted(text)} must be 1 to 63 of the characters a-z, 0-9 and -"


def _variable_fault(text: str) -> str | None:
    if _VARIABLE.fullmatch(text):
        return None
    if "=" in text:
        return "must be the name of a variable alone; its value is read where the job is started"
    return f"{_quoted(text)} is not the name of a variable"


def _path_fault(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    if _CONTROL.search(text):
        return "has a control character in it"
    if text.startswith("~"):
        return f"{_quoted(text)}: ~ is not expanded; write the path out"
    return None


def _leaves(text: str) -> bool:
    return PurePosixPath(os.path.normpath(text)).parts[:1] == ("..",)


def _data_path_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    if is_address(text):
        if text.lower().startswith(_DATA_SCHEMES):
            return None
        return f"{_quoted(text)}: data comes from a path or from {', '.join(_DATA_SCHEMES)}"
    if not PurePosixPath(text).is_absolute() and _leaves(text):
        return f"{_quoted(text)} leaves the job file's directory; use an absolute path for data elsewhere"
    return None


def _store_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    if not is_address(text) and not PurePosixPath(text).is_absolute() and _leaves(text):
        return f"{_quoted(text)} leaves the current directory; use an absolute path for a store elsewhere"
    return None


def _code_fault(text: str) -> str | None:
    if fault := _path_fault(text):
        return fault
    if PurePosixPath(text).is_absolute() or is_address(text) or _leaves(text):
        return f"{_quoted(text)} must be a relative path that stays inside the job file's directory"
    return None


def _argument_fault(text: str) -> str | None:
    return "has a NUL character in it" if "\0" in text else None


MAX_WHOLE = 2**63 - 1
SMALLEST_VOCABULARY = 300  # every byte, the special pieces, and a few merges

Name = Annotated[str, _text(_name_fault)]
Variable = Annotated[str, _text(_variable_fault)]
DataPath = Annotated[str, _text(_data_path_fault)]
StorePath = Annotated[str, _text(_store_fault)]
CodePath = Annotated[str, _text(_code_fault)]
Argument = Annotated[str, _text(_argument_fault)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_WHOLE)]
Ordinal = Annotated[int, Field(strict=True, ge=1, le=MAX_WHOLE)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Length = Annotated[Duration, _measured(Duration, "500 steps"), PlainSerializer(str)]
Steps = Annotated[Duration, _measured(Duration, "500 steps", only="steps"), PlainSerializer(str)]
Batch = Annotated[Amount, _measured(Amount, "4096 tokens"), PlainSerializer(str)]


# Kinds: a mapping of one word to its settings, `{noam: {warmup: 8000 steps, scale: 2.0}}`.


def _not_one(kinds: Mapping[str, type[Part]], count: int) -> str:
    return f"must name one kind, not {count or 'none'}; known: {', '.join(sorted(kinds))}"


def _kind(kinds: Mapping[str, type[Part]], base: type[Part]) -> PlainValidator:
    def read(value: object) -> Part:
        if isinstance(value, base):
            return value
        words = ", ".join(sorted(kinds))
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a mapping of one of {words} to its settings, not {_what(value)}")
        if len(value) != 1:
            raise ValueError(_not_one(kinds, len(value)))
        [(word, settings)] = value.items()
        if word not in kinds:
            raise _refusal(_unknown([str(word)], kinds))
        try:
            return kinds[word].model_validate({} if settings is None else settings)
        except ValidationError as error:
            raise _refusal(_under(error, word)) from None

    return PlainValidator(read)


def _word(kinds: Mapping[str, type[Part]], value: Part) -> str:
    return next(word for word, kind in kinds.items() if kind is type(value))


def _as_kind(kinds: Mapping[str, type[Part]]) -> PlainSerializer:
    return PlainSerializer(lambda value: {_word(kinds, value): value.model_dump(mode="json")})


class Schedule(Part):
    """How the rate goes with the steps."""


class Noam(Schedule):
    """Linear to the end of the warm-up, then with the inverse root of the step.

    `scale` is the factor of the formula that has the model's width in it; `peak` is the rate at the end of
    the warm-up.
    """

    warmup: Steps
    scale: Positive | None = None
    peak: Positive | None = None

    def faults(self) -> Iterator[tuple[Location, str]]:
        if (self.scale is None) == (self.peak is None):
            yield (), "exactly one of scale and peak is needed"


class Constant(Schedule):
    rate: Positive


SCHEDULES: Mapping[str, type[Schedule]] = {"noam": Noam, "constant": Constant}


class Optimizer(Part):
    """How gradients change the weights."""


class Adam(Optimizer):
    betas: tuple[Fraction, Fraction] = (0.9, 0.997)
    epsilon: Positive = 1e-9
    decay: NotNegative = 0.0


OPTIMIZERS: Mapping[str, type[Optimizer]] = {"adam": Adam}


class FleetKind(Part):
    """Where the machines come from."""


class Local(FleetKind):
    machines: Ordinal = 1


FLEETS: Mapping[str, type[FleetKind]] = {"local": Local}


class Source(Part):
    """A raw data set and its share of the mix. A kind says which numbers of paths it takes."""

    path_counts: ClassVar[Sequence[int]] = ()
    example: ClassVar[str] = ""

    kind: str
    paths: tuple[DataPath, ...]
    weight: Positive = 1.0

    def faults(self) -> Iterator[tuple[Location, str]]:
        if len(self.paths) not in self.path_counts:
            counts = " or ".join(str(count) for count in self.path_counts)
            yield ("paths",), f"takes {counts} paths, not {len(self.paths)}, as in {self.example}"


class Bitext(Source):
    """Two aligned text files, or one TSV of pairs."""

    path_counts = (1, 2)
    example = "[train.en, train.de]"

    kind: str = "bitext"


class Dialogue(Source):
    """Cornell Movie-Dialogs (its folder, or lines and conversations), or one TSV of prompts and replies."""

    path_counts = (1, 2)
    example = "[movie_lines.txt, movie_conversations.txt]"

    kind: str = "dialogue"


class ImageNet(Source):
    """A folder or a tar with a part for each class; or a flat one with the ground truth and the synset list."""

    path_counts = (1, 2, 3)
    example = "[ILSVRC2012_img_val.tar, ILSVRC2012_validation_ground_truth.txt, synsets.txt]"

    kind: str = "imagenet"


class Coco(Source):
    """Captions in COCO's JSON, and the folder of its images."""

    path_counts = (2,)
    example = "[captions_train2014.json, train2014]"

    kind: str = "coco"


class VizWiz(Source):
    """Captions in VizWiz' JSON, and the folder of its images."""

    path_counts = (2,)
    example = "[train.json, train]"

    kind: str = "vizwiz"


class Folder(Source):
    """JSON lines: an image with its label or captions, or a source with its target."""

    path_counts = (1,)
    example = "samples.jsonl"

    kind: str = "folder"


SOURCES: Mapping[str, type[Source]] = {
    "bitext": Bitext,
    "dialogue": Dialogue,
    "imagenet": ImageNet,
    "coco": Coco,
    "vizwiz": VizWiz,
    "folder": Folder,
}


def _read_source(value: object) -> Source:
    if isinstance(value, Source):
        return value
    known = (*SOURCES, "weight")
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping such as {{bitext: [train.en, train.de]}}, not {_what(value)}")
    unknown = _unknown([key for key in value if key not in known], known)
    words = [word for word in value if word in SOURCES]
    if not unknown and len(words) != 1:
        raise ValueError(_not_one(SOURCES, len(words)))
    if not words:
        raise _refusal(unknown)
    word = words[0]
    paths = _expand_source(value)[word]
    weight = {"weight": value["weight"]} if "weight" in value else {}
    try:
        source = SOURCES[word].model_validate({"paths": paths, **weight})
    except ValidationError as error:
        wrongs = _under(error)
        for wrong in wrongs:  # a job file has the paths right under the kind's word
            location = wrong.get("loc", ())
            wrong["loc"] = (word, *location[1:]) if location[:1] == ("paths",) else location
        raise _refusal(unknown + wrongs) from None
    if unknown:
        raise _refusal(unknown)
    return source


def _write_source(source: Source) -> dict[str, Any]:
    return {source.kind: list(source.paths), "weight": source.weight}


AnySource = Annotated[Source, PlainValidator(_read_source), PlainSerializer(_write_source)]


# Sections.


class Data(Part):
    train: tuple[AnySource, ...]
    valid: tuple[AnySource, ...] = ()
    test: tuple[AnySource, ...] = ()
    vocabulary: Annotated[int, Field(strict=True, ge=SMALLEST_VOCABULARY, le=1_000_000)] = 8000
    max_words: Ordinal = 80
    max_ratio: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = 9.0
    joint: Annotated[bool, Field(strict=True)] = True
    sizes: tuple[Annotated[int, Field(strict=True, ge=8, le=8192)], ...] = ()

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.train:
            yield ("train",), "must have at least one source"
        if len(set(self.sizes)) != len(self.sizes):
            yield ("sizes",), "has a size twice"


Option = bool | int | float | str


def _read_options(value: object) -> dict[str, Option]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping, not {_what(value)}")
    wrongs = []
    for name, option in value.items():
        if not _OPTION.fullmatch(name):
            wrongs.append(_wrong(f"{_quoted(name)} is not the name of an option", name))
        elif not isinstance(option, (bool, int, float, str)):
            wrongs.append(_wrong(f"must be a number, a text, or true or false, not {_what(option)}", name))
        elif isinstance(option, float) and not math.isfinite(option):
            wrongs.append(_wrong("must be a finite number", name))
    if wrongs:
        raise _refusal(wrongs)
    return dict(value)


class Model(Part):
    """A named size and the options that change it; which ones there are is the recipe's business."""

    size: Name
    options: Annotated[dict[str, Option], PlainValidator(_read_options)] = {}

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:
        if "options" in given:
            return given
        options = {key: value for key, value in given.items() if key != "size"}
        try:
            _read_options(options)
        except ValidationError as error:
            wrongs += _under(error)
            options = {}
        return {**({"size": given["size"]} if "size" in given else {}), "options": options}

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"size": self.size, **self.options}


class Train(Part):
    duration: Length
    batch: Batch
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    optimizer: Annotated[Optimizer, _kind(OPTIMIZERS, Optimizer), _as_kind(OPTIMIZERS)] = Adam()
    schedule: Annotated[Schedule, _kind(SCHEDULES, Schedule), _as_kind(SCHEDULES)]
    clip: Positive | None = None
    label_smoothing: Fraction = 0.0
    ema: Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)] | None = None
    seed: Count = 1


class Evaluate(Part):
    """`every` is None when there is only the evaluation at the end."""

    every: Length | None = None
    samples: Count = 100
    beam: Annotated[int, Field(strict=True, ge=1, le=1000)] = 4


class Checkpoint(Part):
    every: Length = Duration(300, "seconds")
    keep_last: Ordinal = 2
    keep_best: Count = 1


class Fleet(Part):
    """`workers` is per machine; None is one for each GPU, or one where there is none."""

    kind: FleetKind = Local()
    workers: Ordinal | None = None
    failures: Count = 3

    @classmethod
    def known(cls) -> Iterable[str]:
        return (*FLEETS, "workers", "failures")

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:
        if isinstance(given.get("kind"), FleetKind):
            return given
        if "kind" in given:
            del given["kind"]
            wrongs += _unknown(["kind"], cls.known())
        words = [word for word in given if word in FLEETS]
        settings = {word: given.pop(word) for word in words}
        if len(words) > 1:
            wrongs.append(_wrong(_not_one(FLEETS, len(words))))
        elif words:
            try:
                given["kind"] = FLEETS[words[0]].model_validate(settings[words[0]] or {})
            except ValidationError as error:
                wrongs += _under(error, words[0])
        return given

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        settings = self.kind.model_dump(mode="json")
        return {_word(FLEETS, self.kind): settings, "workers": self.workers, "failures": self.failures}


class Budget(Part):
    dollars: Positive | None = None
    hours: Positive | None = None


class _OnlyOfRecipes:
    """Lets a section be None in a program's job while its type says what every recipe's job has.

    Whatever reads `job.train` runs a recipe; a program's job never gets there.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.nullable_schema(handler(source))


def _absent() -> Any:
    return None


_ONLY_OF_RECIPES = _OnlyOfRecipes()
_RECIPE_SECTIONS = ("data", "model", "train", "evaluate")
_SECTIONS = (*_RECIPE_SECTIONS, "checkpoint", "fleet", "budget")


class Job(Part):
    """A recipe with its data, or any program, and how it is to be run. With data alone it can be packed, not run.

    Relative source paths are made absolute when a job is loaded; `store` and `code` stay as written.
    """

    name: Name
    recipe: Name | None = None
    program: tuple[Argument, ...] | None = None
    store: StorePath = "./store"
    code: CodePath = "."
    environment: tuple[Variable, ...] = ()
    data: Annotated[Data, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    model: Annotated[Model, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    train: Annotated[Train, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    evaluate: Annotated[Evaluate, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    checkpoint: Checkpoint = Checkpoint()
    fleet: Fleet = Fleet()
    budget: Budget = Budget()

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:
        given = {key: value for key, value in expand(given).items() if value is not None or key not in _SECTIONS}
        recipe, program = given.get("recipe") is not None, given.get("program") is not None
        if recipe and program:
            wrongs.append(_wrong("a job has a recipe or a program, not both", "program"))
        elif recipe:
            for section in _RECIPE_SECTIONS:
                given.setdefault(section, {})
        elif program:
            for section in [section for section in _RECIPE_SECTIONS if section in given]:
                del given[section]
                wrongs.append(_wrong("has a meaning for a recipe only, not for a program", section))
            checkpoint = given.setdefault("checkpoint", {})
            if isinstance(checkpoint, Mapping):
                given["checkpoint"] = {"keep_best": 0, **checkpoint}
        elif given.get("data") is None or any(section in given for section in ("model", "train", "evaluate")):
            wrongs.append(_wrong("is needed, or a program", "recipe", kind=NEEDED))
        return given

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.program is None or self.recipe is not None:
            return
        if not self.program:
            yield ("program",), "must name a script, such as [train.py]"
        elif self.program[0].startswith("-"):
            yield ("program", 0), "must be the path of a script, not an option"
        elif fault := _code_fault(self.program[0]):
            yield ("program", 0), fault
        if self.checkpoint.every.unit != "seconds":
            yield ("checkpoint", "every"), "must be a time for a program, such as '5 min'"
        if self.checkpoint.keep_best:
            yield ("checkpoint", "keep_best"), "has a meaning for a recipe only, not for a program"


def expand(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with its short forms written out: `model: base` is `model: {size: base}`, and so on."""
    full = dict(document)
    if isinstance(full.get("model"), str):
        full["model"] = {"size": full["model"]}
    if isinstance(full.get("fleet"), str):
        full["fleet"] = {full["fleet"]: {}}
    if isinstance(full.get("train"), Mapping):
        train = full["train"] = dict(full["train"])
        for field in ("optimizer", "schedule"):
            if isinstance(train.get(field), str):
                train[field] = {train[field]: {}}
    if isinstance(full.get("data"), Mapping):
        data = full["data"] = dict(full["data"])
        for field in ("train", "valid", "test"):
            if isinstance(data.get(field), Mapping):
                data[field] = [data[field]]
            if isinstance(data.get(field), list):
                data[field] = [_expand_source(source) for source in data[field]]
    return full


def _expand_source(source: Any) -> Any:
    if not isinstance(source, Mapping):
        return source
    return {key: [value] if key in SOURCES and isinstance(value, str) else value for key, value in source.items()}


def faults(error: ValidationError) -> list[tuple[Location, str, bool]]:
    """Each fault's place, what is wrong in our words, and whether it is a field that is not there."""
    return [
        (tuple(detail["loc"]), _in_words(detail), detail["type"] in (NEEDED, "missing"))
        for detail in error.errors(include_url=False)
    ]
