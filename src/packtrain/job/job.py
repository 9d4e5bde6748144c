"""The job: what a person asks for, typed and frozen, validated once.

What comes in kinds (schedules, optimizers, fleets, sources) is a class each and a line in a plain dict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, PlainSerializer, PlainValidator, ValidationError, model_serializer
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from packtrain.job.kinds import FLEETS, FORMATS, FleetKind, Source, default_kind, kind_class, not_one, word_of
from packtrain.job.part import (
    NEEDED,
    Argument,
    CodePath,
    Count,
    Interval,
    Length,
    Location,
    Name,
    Ordinal,
    Part,
    Positive,
    RecipeName,
    ScoreName,
    StorePath,
    Variable,
    code_path_fault,
    quoted,
    refusal,
    unknown_keys,
    what_is,
    wrong,
    wrongs_of,
)
from packtrain.job.train import Train
from packtrain.units import Duration

SMALLEST_VOCABULARY = 300  # every byte, the special pieces, and a few merges

_OPTION = re.compile(r"[a-z][a-z0-9_]{0,62}")


def _read_source(value: object) -> Source:
    if isinstance(value, Source):
        return value
    known = (*FORMATS, "weight")
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping such as {{bitext: [train.en, train.de]}}, not {what_is(value)}")
    unknown = unknown_keys([key for key in value if key not in known], known)
    words = [word for word in value if word in FORMATS]
    if not unknown and len(words) != 1:
        raise ValueError(not_one(FORMATS, len(words)))
    if not words:
        raise refusal(unknown)
    word = words[0]
    paths = _expand_source(value)[word]
    weight = {"weight": value["weight"]} if "weight" in value else {}
    try:
        source: Source = kind_class(FORMATS, word).model_validate({"paths": paths, **weight})
    except ValidationError as error:
        wrongs = wrongs_of(error)
        for one in wrongs:  # a job file has the paths right under the kind's word
            location = one.get("loc", ())
            one["loc"] = (word, *location[1:]) if location[:1] == ("paths",) else location
        raise refusal(unknown + wrongs) from None
    if unknown:
        raise refusal(unknown)
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
        raise ValueError(f"must be a mapping, not {what_is(value)}")
    wrongs = []
    for name, option in value.items():
        if not _OPTION.fullmatch(name):
            wrongs.append(wrong(f"{quoted(name)} is not the name of an option", name))
        elif not isinstance(option, (bool, int, float, str)):
            wrongs.append(wrong(f"must be a number, a text, or true or false, not {what_is(option)}", name))
        elif isinstance(option, float) and not math.isfinite(option):
            wrongs.append(wrong("must be a finite number", name))
    if wrongs:
        raise refusal(wrongs)
    return dict(value)


class Model(Part):
    """A named size and the options that change it; which ones there are is the recipe's business."""

    size: Name
    options: Annotated[dict[str, Option], PlainValidator(_read_options)] = Field(default_factory=dict)

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:
        if "options" in given:
            return given
        options = {key: value for key, value in given.items() if key != "size"}
        try:
            _read_options(options)
        except ValidationError as error:
            wrongs += wrongs_of(error)
            options = {}
        return {**({"size": given["size"]} if "size" in given else {}), "options": options}

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"size": self.size, **self.options}


class Evaluate(Part):
    """`every` is None when there is only the evaluation at the end."""

    every: Length | None = None
    samples: Count = 100
    beam: Annotated[int, Field(strict=True, ge=1, le=1000)] = 4


class Checkpoint(Part):
    """`every` may be left to what saves take and how often machines fail; `best_by` is loss, or one of the scores."""

    every: Interval = Duration(300, "seconds")
    keep_last: Ordinal = 2
    keep_best: Count = 1
    best_by: ScoreName | None = None


class FleetSettings(Part):
    """`workers` is per machine; None is one for each GPU, or one where there is none.

    `price` is in dollars for a machine and an hour. `public_address`: collectives, which nobody guards, may use one.
    """

    kind: FleetKind = default_kind(FLEETS, "local")
    workers: Ordinal | None = None
    failures: Count = 3
    price: Positive | None = None
    public_address: Annotated[bool, Field(strict=True)] = False

    @property
    def dollars_per_hour(self) -> float | None:
        """Of one machine: what the job says, or else what the fleet knows."""
        return self.kind.price if self.price is None else self.price

    @classmethod
    def known(cls) -> Iterable[str]:
        return (*FLEETS, *(field for field in cls.model_fields if field != "kind"))

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:
        if isinstance(given.get("kind"), FleetKind):
            return given
        if "kind" in given:
            del given["kind"]
            wrongs += unknown_keys(["kind"], cls.known())
        words = [word for word in given if word in FLEETS]
        settings = {word: given.pop(word) for word in words}
        if len(words) > 1:
            wrongs.append(wrong(not_one(FLEETS, len(words))))
        elif words:
            try:
                given["kind"] = kind_class(FLEETS, words[0]).model_validate(settings[words[0]] or {})
            except ValidationError as error:
                wrongs += wrongs_of(error, words[0])
        return given

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        settings = self.kind.model_dump(mode="json")
        others = {field: getattr(self, field) for field in type(self).model_fields if field != "kind"}
        return {word_of(FLEETS, self.kind): settings, **others}


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
    recipe: RecipeName | None = None
    program: tuple[Argument, ...] | None = None
    store: StorePath = "./store"
    code: CodePath = "."
    environment: tuple[Variable, ...] = ()
    data: Annotated[Data, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    model: Annotated[Model, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    train: Annotated[Train, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    evaluate: Annotated[Evaluate, _ONLY_OF_RECIPES] = Field(default_factory=_absent)
    checkpoint: Checkpoint = Checkpoint()
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    budget: Budget = Budget()

    @classmethod
    def arrange(cls, given: dict[str, Any], wrongs: list[InitErrorDetails]) -> dict[str, Any]:
        given = {key: value for key, value in expand(given).items() if value is not None or key not in _SECTIONS}
        recipe, program = given.get("recipe") is not None, given.get("program") is not None
        if recipe and program:
            wrongs.append(wrong("a job has a recipe or a program, not both", "program"))
        elif recipe:
            for section in _RECIPE_SECTIONS:
                given.setdefault(section, {})
        elif program:
            for section in [section for section in _RECIPE_SECTIONS if section in given]:
                del given[section]
                wrongs.append(wrong("has a meaning for a recipe only, not for a program", section))
            checkpoint = given.setdefault("checkpoint", {})
            if isinstance(checkpoint, Mapping):
                given["checkpoint"] = {"keep_best": 0, **checkpoint}
        elif given.get("data") is None or any(section in given for section in ("model", "train", "evaluate")):
            wrongs.append(wrong("is needed, or a program", "recipe", kind=NEEDED))
        return given

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.budget.dollars is not None and self.fleet.dollars_per_hour is None:
            yield ("budget", "dollars"), "needs to know what a machine costs: give fleet.price, in dollars an hour"
        if self.program is None or self.recipe is not None:
            return
        if not self.program:
            yield ("program",), "must name a script, such as [train.py]"
        elif self.program[0].startswith("-"):
            yield ("program", 0), "must be the path of a script, not an option"
        elif fault := code_path_fault(self.program[0]):
            yield ("program", 0), fault
        if self.checkpoint.every == "auto" or self.checkpoint.every.unit != "seconds":
            yield ("checkpoint", "every"), "must be a time for a program, such as '5 min'"
        if self.checkpoint.keep_best or self.checkpoint.best_by:
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
        for field in ("optimizer", "schedule", "exchange"):
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
    return {key: [value] if key in FORMATS and isinstance(value, str) else value for key, value in source.items()}
