"""JSON Schema of the job file, for editors: made of the settings that check a job, and of the tables in docs/job.md.

A job that loads is valid by the schema. The schema cannot know everything: sums and comparisons of numbers that are
written in texts, what files hold and what machines have are checked when a job is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Protocol

from packtrain.job.job import (
    FOLDER_NAME,
    AugmentSettings,
    BudgetSettings,
    CacheSettings,
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    FleetSettings,
    Job,
    ModelSettings,
    ProgramSettings,
    RandAugmentSettings,
    RateScale,
    ReportSettings,
    TrainSettings,
)
from packtrain.job.kinds import EXCHANGES, FLEETS, FORMATS, OPTIMIZERS, SCHEDULES, FleetKind, kind_class
from packtrain.job.part import INPUT_PATTERN, Part, is_set
from packtrain.units import TIME_PATTERN, Amount, Duration, Machines, amount_pattern

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

# The families of kinds: the base class that a field names, the words, and where the reference describes them.
_FAMILIES = {
    "ScheduleKind": (SCHEDULES, "schedule"),
    "OptimizerKind": (OPTIMIZERS, "optimizer"),
    "ExchangeKind": (EXCHANGES, "exchange"),
}
_SECTIONS: Mapping[str, type[Part]] = {
    "train": TrainSettings,
    "evaluate": EvaluateSettings,
    "checkpoint": CheckpointSettings,
    "budget": BudgetSettings,
    "report": ReportSettings,
}
# Parts within a section: their place in the reference. Each is named after the last word of it.
_WITHIN: Mapping[str, tuple[type[Part], str]] = {
    "CacheSettings": (CacheSettings, "fleet.cache"),
    "AugmentSettings": (AugmentSettings, "train.augment"),
    "RandAugmentSettings": (RandAugmentSettings, "train.randaugment"),
    "RateScale": (RateScale, "train.scale_rate"),
    "ProgramSettings": (ProgramSettings, "program"),
}
_STORED = ("origin", "inputs", "parent")  # fields of a run's job that a job file does not have
_PLAIN = {"type": ["string", "number", "boolean"]}
_SHARE = {  # above 0, and at most 50
    "type": "string",
    "pattern": r"^\s*(?=[0-9.]*[1-9])(?:50(?:\.0{1,3})?|[0-4]?[0-9](?:\.[0-9]{1,3})?) *%\s*$",
    "examples": ["5 %"],
}
_INPUT = {"type": "string", "pattern": INPUT_PATTERN}
_NULL = {"type": "null"}


class RecipeFacts(Protocol):
    """The facts of a recipe that the schema has."""

    unit: str
    contents: frozenset[str]
    supports_augment: bool
    sizes: Mapping[str, Any]
    choices: Mapping[str, Sequence[str]]


def job_schema(recipes: Mapping[str, type[RecipeFacts]] | Mapping[str, RecipeFacts]) -> Schema:
    """Return the schema of a job file; `recipes` are the built-in ones, by name."""
    texts = descriptions(reference())
    sections = {name: _part_schema(kind, texts, name) for name, kind in _SECTIONS.items()}
    size = _part_schema(ModelSettings, texts, "model")["properties"]["size"]
    model = {"type": "object", "properties": {"size": size}, "additionalProperties": _PLAIN}
    sections |= {"data": _data(texts), "fleet": _fleet(texts), "model": {"anyOf": [size, model]}}
    properties = _part_schema(Job, texts, "job")["properties"]
    for name in _STORED:
        del properties[name]
    for name in sections:
        properties[name] = {"anyOf": [_ref(name), {"type": "null"}], "description": texts["job", name]}
    # Shown with its description whatever the job runs; which form it has is said below.
    properties["data"] = {"description": texts["job", "data"]}
    command = ProgramSettings.model_json_schema(mode="validation")["properties"]["command"]
    properties["program"]["anyOf"].insert(0, _completed(command, is_schema=True))  # the command alone
    properties["recipe"]["anyOf"].insert(0, {"enum": list(recipes)})
    families = {}
    for kinds, family in _FAMILIES.values():
        settings = _settings(kinds, texts, family)
        mapping: Schema = {"type": "object", "properties": settings, "additionalProperties": False}
        one_word = {**mapping, "minProperties": 1, "maxProperties": 1}
        words = _words(settings)
        families[family] = {"anyOf": [{"enum": words}, one_word] if words else [one_word]}
    named = {_word_within(name): _part_schema(kind, texts, scope) for name, (kind, scope) in _WITHIN.items()}
    named |= {"source": _source(texts), "inputs": _inputs()}
    of_recipe = dict.fromkeys(("model", "train", "evaluate", "weights"), _NULL)
    saved = {"properties": {"every": {"pattern": TIME_PATTERN}, "keep_best": {"maximum": 0}, "best_by": _NULL}}
    of_program = {"data": _ref("inputs"), "recipe": _NULL, "checkpoint": saved, **of_recipe}
    of_data = {"if": {"not": is_set("recipe")}, "then": {"properties": of_recipe}}
    rules = [of_data, *(_recipe(name, recipe) for name, recipe in recipes.items())]
    not_program = {"data": _ref("data"), "outputs": {"maxItems": 0}, "directory": {"const": "."}}
    return {
        "$schema": DIALECT,
        "title": "Packtrain job",
        "type": "object",
        "properties": properties,
        "required": ["name"],
        "additionalProperties": False,
        "anyOf": [{"required": [name]} for name in ("recipe", "program", "data")],
        "if": is_set("program"),
        "then": {"properties": of_program},
        "else": {"properties": not_program, "required": ["data"], "allOf": rules},
        "dependentSchemas": {"budget": _budget()},
        "$defs": {**sections, **families, **named, **_nested(texts)},
    }


def _budget() -> Schema:
    """A limit in dollars needs the price of a machine, unless the fleet knows it."""
    rented = [word for word in FLEETS if kind_class(FLEETS, word).hourly_prices is not FleetKind.hourly_prices]
    priced = {"type": "object", "anyOf": [is_set("price"), *({"required": [word]} for word in rented)]}
    in_dollars = {"properties": {"budget": {"type": "object", **is_set("dollars")}}}
    with_price = {"required": ["fleet"], "properties": {"fleet": {"anyOf": [{"enum": rented}, priced]}}}
    return {"if": in_dollars, "then": with_price}


# Parts.


def _data(texts: Descriptions) -> Schema:
    """Return the section of the data: validation data may be a share of the training data, such as `5 %`."""
    section = _part_schema(DataSettings, texts, "data")
    del section["properties"]["held_out"]
    section["properties"]["valid"]["anyOf"].append(_SHARE)
    section["properties"]["train"]["anyOf"][1]["minItems"] = 1
    return section


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _part_schema(kind: type[Part], texts: Descriptions, scope: str) -> Schema:
    generated = kind.model_json_schema(mode="validation")
    properties = _completed(generated.get("properties", {}))
    for name, field in properties.items():
        default = kind.model_fields[name].default
        if isinstance(default, Machines):
            field["default"] = default.least
        elif isinstance(default, Duration | Amount):
            field["default"] = str(default)
        elif isinstance(default, Part):
            field.pop("default", None)
        if text := describe(texts, scope, name):
            field["description"] = text
    required = [name for name in generated.get("required", ()) if name not in kind.filled_in]
    rules = {"allOf": generated["allOf"]} if "allOf" in generated else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **rules} | (
        {"required": required} if required else {}
    )


def _completed(value: Any, is_schema: bool = False) -> Any:
    """Return a schema of pydantic without its titles, and with a reference for each family of kinds."""
    if isinstance(value, list):
        return [_completed(entry, is_schema=True) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.get("items") == {"kinds": "Source"}:
        return {"anyOf": [_ref("source"), {"type": "array", "items": _ref("source")}]}
    if "kinds" in value and isinstance(value["kinds"], str):
        return _ref(_FAMILIES[value["kinds"]][1])
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return _ref(_word_within(name) if name in _WITHIN else name)
    if "patternProperties" in value:  # of a mapping whose keys have a form: there are no others
        value = {**value, "additionalProperties": False}
    below = {key: _completed(entry, is_schema=key != "properties") for key, entry in value.items()}
    return {key: entry for key, entry in below.items() if not (is_schema and key == "title" and isinstance(entry, str))}


def _word_within(name: str) -> str:
    return _WITHIN[name][1].rpartition(".")[2]


def _nested(texts: Descriptions) -> dict[str, Schema]:
    """Return the parts that settings of kinds have in turn, such as the phases of a schedule."""
    nested: dict[str, Schema] = {}
    for kinds in (FLEETS, SCHEDULES, OPTIMIZERS, EXCHANGES):
        for word in kinds:
            definitions = kind_class(kinds, word).model_json_schema(mode="validation").get("$defs", {})
            for name, definition in definitions.items():
                nested[name] = {
                    key: value for key, value in _completed(definition, True).items() if key != "description"
                }
                for field, schema in nested[name]["properties"].items():
                    if text := describe(texts, "phase" if name == "Phase" else name, field):
                        schema["description"] = text
    return nested


# Kinds: a mapping of one word to its settings, or the word alone.


def _settings(kinds: Mapping[str, str], texts: Descriptions, family: str) -> dict[str, Schema]:
    """Return the schema of the settings of each word; those without a required field may be left out."""
    schemas: dict[str, Schema] = {}
    for word in kinds:
        settings = _part_schema(kind_class(kinds, word), texts, f"{family}.{word}")
        choices = [settings] if "required" in settings else [settings, {"type": "null"}]
        if word in settings["properties"]:  # `phases: [...]` sets `phases`
            choices.append(settings["properties"][word])
        schemas[word] = {"anyOf": choices} if len(choices) > 1 else settings
        text = describe(texts, family, word) or (kind_class(kinds, word).__doc__ or "").partition("\n")[0]
        schemas[word] = {**schemas[word], "description": text}
    return schemas


def _words(settings: Mapping[str, Schema]) -> list[str]:
    return [word for word, schema in settings.items() if {"type": "null"} in schema.get("anyOf", ())]


def _fleet(texts: Descriptions) -> Schema:
    fleet, settings = _part_schema(FleetSettings, texts, "fleet"), _settings(FLEETS, texts, "fleet")
    del fleet["properties"]["kind"]
    fleet["properties"] = {**settings, **fleet["properties"]}
    other_words = {word: [other_word for other_word in FLEETS if other_word != word] for word in FLEETS}
    fleet["dependentSchemas"] = {word: _without(words) for word, words in other_words.items()}
    return {"anyOf": [{"enum": _words(settings)}, fleet]}


def _without(names: Iterable[str]) -> Schema:
    return {"properties": dict.fromkeys(names, False)}


def _source(texts: Descriptions) -> Schema:
    properties: dict[str, Schema] = {}
    fields_of_word: dict[str, list[str]] = {}
    for word in FORMATS:
        kind = kind_class(FORMATS, word)
        of_kind = _part_schema(kind, texts, "source")["properties"]
        path = of_kind["paths"]["items"]
        listed = {"type": "array", "items": path, "minItems": min(kind.path_counts), "maxItems": max(kind.path_counts)}
        choices = [*([path] if 1 in kind.path_counts else []), listed]
        properties[word] = {"anyOf": choices, "description": texts["source", word], "examples": [kind.example]}
        fields = [name for name in of_kind if name != "paths"]
        properties |= {name: of_kind[name] for name in fields if name not in properties}
        fields_of_word[word] = [word, *fields]
    one_file = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": 1}]}
    of_columns = {"if": is_set("columns"), "then": {"properties": dict.fromkeys(FORMATS, one_file)}}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "anyOf": [{"required": [word]} for word in FORMATS],
        "dependentSchemas": {word: {"propertyNames": {"enum": names}} for word, names in fields_of_word.items()},
        "allOf": [of_columns, {"if": is_set("last"), "then": {"properties": {"without_last": _NULL}}}],
    }


def _inputs() -> Schema:
    names = {"pattern": f"^{FOLDER_NAME.pattern}$"}
    # The last part of a path without a name becomes its name; a dot or an empty part is left out of paths.
    unnamed = {**_INPUT, "allOf": [{"pattern": rf"(?:^|/){FOLDER_NAME.pattern}(?:/+\.?)*$"}]}
    mapping = {"type": "object", "propertyNames": names, "additionalProperties": _INPUT}
    return {"anyOf": [unnamed, {"type": "array", "items": unnamed, "uniqueItems": True}, mapping]}


# Recipes.


def _recipe(name: str, recipe: type[RecipeFacts] | RecipeFacts) -> Schema:
    """Return what holds for the jobs of a recipe: its sizes and options, the unit of its batches, the data it reads."""
    learns = [word for word in FORMATS if kind_class(FORMATS, word).contents & recipe.contents]
    without_others = _without(word for word in FORMATS if word not in learns)
    split = {"anyOf": [{"type": "array", "items": without_others}, {"type": "object", **without_others}, _SHARE]}
    amount = {"type": ["string", "null"], "pattern": amount_pattern(recipe.unit)}
    train = {"batch": amount, "micro_batch": amount, "scale_rate": {"properties": {"linear": amount, "sqrt": amount}}}
    if not recipe.supports_augment:
        train["augment"] = _NULL
    sizes = {"enum": list(recipe.sizes)}
    options = {
        option: _option(option, default) for option, default in asdict(next(iter(recipe.sizes.values()))).items()
    }
    options |= {option: {"enum": list(values)} for option, values in recipe.choices.items()}
    model = {"type": "object", "properties": {"size": sizes, **options}, "additionalProperties": False}
    return {
        "if": {"required": ["recipe"], "properties": {"recipe": {"const": name}}},
        "then": {
            "properties": {
                "model": {"anyOf": [sizes, model, _NULL]},
                "train": {"properties": train},
                "data": {"properties": dict.fromkeys(("train", "valid", "test"), split)},
            }
        },
    }


def _option(name: str, default: object) -> Schema:
    if isinstance(default, str):
        return {"type": "string"}
    if name.endswith("dropout"):
        return {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    return {"type": "integer" if isinstance(default, int) else "number", "minimum": 0}


# Descriptions: the tables of the reference.

Descriptions = dict[tuple[str, str], str]

_HEADINGS = {"The job": "job", "Optimizers": "optimizer", "Schedules": "schedule", "Exchanges": "exchange"}
_OF = re.compile(r"\(of (.*)\)")
_WORD = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def reference() -> str:
    return (files("packtrain.job") / "reference.md").read_text("utf-8")


def describe(texts: Descriptions, scope: str, field: str) -> str | None:
    """Return the meaning of a field; one that all kinds of a family have may be described once for all of them."""
    return texts.get((scope, field)) or texts.get((f"{scope.partition('.')[0]}.*", field))


def descriptions(markdown: str) -> Descriptions:
    """Return the meaning of each field in the tables of the reference, by its section or kind, and its name."""
    texts: Descriptions = {}
    scope, columns, kind = "", list[str](), ""
    for line in markdown.partition("\n## Reference\n")[2].splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            scope, columns = _HEADINGS.get(heading, heading), []
        elif not line.startswith("|"):
            columns = []
        elif not columns:
            columns, kind = _cells(line), ""
        elif not line.startswith("| ---"):
            row = dict(zip(columns, _cells(line), strict=True))
            kind = row.get("kind", "").strip("`") or kind
            if "kind" in columns:
                place = f"{scope}.{kind}"
            elif scope == "schedule":
                place = "phase"
            else:  # the second table of `data` describes a source; the first one ends with `pack`
                place = "source" if scope == "data" and ("data", "pack") in texts else scope
            # A cell may name several fields, of several kinds: "`hosts` (of `ssh`, `mpi`)".
            of = _OF.search(row["field"])
            owners = [""] if of is None else ["*"] if of[1] == "a kind" else _WORD.findall(of[1])
            for field in _WORD.findall(_OF.sub("", row["field"])) if row["meaning"] else ():
                for owner in owners:
                    texts.setdefault((f"{place}.{owner}" if owner else place, field), _sentence(row["meaning"]))
            if "kind" in row and not row["field"] and row["meaning"]:
                texts.setdefault((scope, kind), _sentence(row["meaning"]))
    return texts


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _sentence(text: str) -> str:
    text = _LINK.sub(r"\1", text).removesuffix(", below").replace(", below;", ";")
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
