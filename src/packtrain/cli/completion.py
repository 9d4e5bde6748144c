"""The command completion: what a shell offers for the word that a person is typing.

A script of a few lines for each shell asks `packtrain completion SHELL -- WORD...` at every press of the tab key. So
nothing heavy is imported here, nothing takes longer than a moment, and nothing is said about errors.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from packtrain.errors import EXIT_DONE, Mistake, nearest
from packtrain.identity import identity
from packtrain.process import end_process
from packtrain.store import default_store, open_store
from packtrain.system import cache_directory, expanded

SHELLS = ("bash", "zsh", "fish")

Schema = Mapping[str, Any]
Json = TypeVar("Json")

_STORE_SECONDS = 1.0  # to list the runs of a bucket
_RECIPE = re.compile(r"^recipe:\s*([a-z0-9-]+)\s*(#|$)", re.MULTILINE)
_RUN = re.compile(r"[a-z0-9][a-z0-9-]*")  # as a job's name, but without importing what checks it
_MAX_JOB_BYTES = 1_000_000


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Shell to complete in.")],
    words: Annotated[
        list[str] | None, typer.Argument(hidden=True, metavar="WORD", help="Words so far; the script passes them.")
    ] = None,
) -> None:
    """Print a shell script that completes commands, runs and fields."""
    if shell not in SHELLS:
        raise Mistake(f"completion: unknown shell {shell[:60]!r}; {nearest(shell, SHELLS)}")
    if not words:
        print((files("packtrain.cli") / "shells" / f"packtrain.{shell}").read_text("utf-8"), end="")
        return
    with suppress(Exception):  # whatever is wrong, the person is in the middle of a line
        for candidate in candidates(cached_commands(context.find_root().command), words):
            print(candidate.value if shell == "bash" or not candidate.help else f"{candidate.value}\t{candidate.help}")
    end_process(EXIT_DONE)  # a store that does not answer may still be asked


# The commands, without what they import.


@dataclass(frozen=True)
class Parameter:
    """An option, or an argument if it has no names. `takes_many`: an argument that may be any number of words."""

    names: Sequence[str]
    metavar: str
    help: str
    is_flag: bool
    takes_many: bool


@dataclass(frozen=True)
class Command:
    """A command with what it takes, or a group with its commands; hidden parameters are left out."""

    help: str
    is_hidden: bool
    parameters: Sequence[Parameter] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)

    @classmethod
    def of(cls, command: Any) -> Command:
        if hasattr(command, "commands"):
            below = {name: cls.of(command.get_command(None, name)) for name in command.commands}
            return cls(command.help or "", command.hidden, (), below)
        shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        return cls(command.help or "", command.hidden, [cls._parameter(parameter) for parameter in shown])

    @staticmethod
    def _parameter(parameter: Any) -> Parameter:
        names = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]
        is_flag = getattr(parameter, "is_flag", False)
        return Parameter(names, parameter.metavar or "", parameter.help or "", is_flag, parameter.nargs == -1)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Command:
        parameters = [Parameter(**parameter) for parameter in plain["parameters"]]
        below = {name: cls.read(command) for name, command in plain["commands"].items()}
        return cls(plain["help"], plain["is_hidden"], parameters, below)

    def option(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if name in parameter.names), None)


def cached_commands(tree: Any) -> Command:
    """Return all commands; importing their modules takes a second."""
    return Command.read(_cached("commands-*.json", lambda: asdict(Command.of(tree))))


def cached_schema() -> Schema:
    """Return the schema of the job file; making it takes a second."""

    def make() -> Schema:
        from packtrain.cli.template import current_schema  # takes as long to import as the schema takes to make

        return current_schema()

    return _cached("job-*.schema.json", make)


def _cached(pattern: str, make: Callable[[], Json]) -> Json:
    """Return what `make` returns, kept in a file for this very code: its digest replaces the star of the pattern."""
    digest = re.sub("[^0-9a-z]", "", identity())[-32:]
    path = cache_directory() / pattern.replace("*", digest)
    with suppress(OSError, ValueError):
        cached: Json = json.loads(path.read_text("utf-8"))
        return cached
    content = make()
    for outdated in path.parent.glob(pattern):
        outdated.unlink(missing_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(content), "utf-8")
    unfinished.replace(path)  # whole, or not there
    return content


# Words.


@dataclass(frozen=True)
class Candidate:
    """A word to offer, and what it means."""

    value: str
    help: str = ""


@dataclass
class _Typed:
    """The words so far: the command, its arguments and options, and the option that lacks its value."""

    command: Command
    arguments: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    pending: Parameter | None = None


def candidates(tree: Command, words: Sequence[str]) -> Iterator[Candidate]:
    """Yield what may stand for the last word, after the others; nothing where files should be offered."""
    *before, last = words
    typed = _read(tree, before)
    if typed is None:
        return
    name, equals, value = last.partition("=")
    offers: Iterator[Candidate]
    if typed.pending is not None:
        offers = _values(typed.pending, last, typed)
    elif equals and (option := typed.command.option(name)) is not None:
        offers = (Candidate(f"{name}={offer.value}", offer.help) for offer in _values(option, value, typed))
    elif last.startswith("-"):
        offers = _options(typed.command)
    elif typed.command.commands:
        visible = {name: command for name, command in typed.command.commands.items() if not command.is_hidden}
        offers = (Candidate(name, _sentence(command.help)) for name, command in visible.items())
    elif (argument := _argument(typed)) is not None:
        offers = _values(argument, last, typed)
    else:
        offers = _options(typed.command)
    yield from [offer for offer in offers if offer.value.startswith(last)]  # all or, after an error, none


def _read(command: Command, words: Sequence[str]) -> _Typed | None:
    """Return what words mean; None if one of them is no command."""
    typed = _Typed(command)
    for word in words:
        if typed.pending is not None:
            typed.options[typed.pending.names[-1]] = word
            typed.pending = None
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            option = typed.command.option(name)
            if option is not None and equals:
                typed.options[option.names[-1]] = value
            elif option is not None and not option.is_flag:
                typed.pending = option
        elif typed.command.commands:
            if word not in typed.command.commands:
                return None
            typed.command = typed.command.commands[word]
        else:
            typed.arguments.append(word)
    return typed


def _options(command: Command) -> Iterator[Candidate]:
    for option in command.parameters:
        for name in option.names:
            if name.startswith("--"):
                yield Candidate(name, _sentence(option.help))
    yield Candidate("--help", "Show this message and exit.")


def _argument(typed: _Typed) -> Parameter | None:
    """Return the argument that comes next; the last one may take any number of words."""
    arguments = [parameter for parameter in typed.command.parameters if not parameter.names]
    number = len(typed.arguments)
    if number < len(arguments):
        return arguments[number]
    return arguments[-1] if arguments and arguments[-1].takes_many else None


def _sentence(text: str) -> str:
    """Return the first sentence of a help text, in one line."""
    return re.split(r"(?<=[.;])(?<!e\.g\.)\s", " ".join(text.split()))[0].rstrip(";")


# Values, by what the help calls them.


def _values(parameter: Parameter, text: str, typed: _Typed) -> Iterator[Candidate]:
    metavar = parameter.metavar
    if metavar.startswith("FIELD="):
        yield from _field_values(text, typed)
        return
    names = re.split(r"[|\s]+", metavar.replace(".", " "))
    yield from (Candidate(name) for name in names if "|" in metavar and re.fullmatch(r"[a-z0-9/]+", name))
    if "RUN" in names or (names == ["MODEL"] and "run" in parameter.help):
        yield from map(Candidate, _runs(typed.options.get("--store") or default_store()))
    if metavar == "KIND":
        # By the names of files: importing the recipes takes longer than a person waits for a completion.
        package = files("packtrain")
        recipes = {folder.name for folder in (package / "recipes").iterdir() if (folder / "job.yaml").is_file()}
        templates = {path.name for path in (package / "cli" / "templates").iterdir()}
        kinds = recipes | {name.removesuffix(".yaml") for name in templates if name.endswith(".yaml")}
        yield from map(Candidate, sorted(kinds))


def _runs(location: str) -> list[str]:
    """Return the runs of a store; of a bucket, only if it answers soon."""
    if "://" not in location:
        folder = expanded(location) / "runs"
        return sorted(entry.name for entry in os.scandir(folder) if _RUN.fullmatch(entry.name))
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.extend(open_store(location).folders("runs/")), daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return sorted(filter(_RUN.fullmatch, names))


# Fields of a job: from its schema.


def _field_values(text: str, typed: _Typed) -> Iterator[Candidate]:
    schema, recipe = cached_schema(), _recipe_of(typed.arguments)
    path, equals, _ = text.partition("=")
    above, dot, _ = path.rpartition(".")
    for name, place in fields(schema, above, recipe).items():
        field_name = f"{above}{dot}{name}"
        words = values(schema, place)
        if equals:
            yield from (Candidate(f"{field_name}={word}") for word in words if field_name == path)
            continue
        below = fields(schema, field_name, recipe)
        if below:
            yield Candidate(f"{field_name}.", _sentence(place.get("description", "")))
        if words or not below:
            yield Candidate(f"{field_name}=", _sentence(place.get("description", "")))


def _recipe_of(arguments: Sequence[str]) -> str | None:
    """Return the recipe of the job file among the arguments, without reading it as YAML, which would take longer."""
    for argument in arguments[:1]:
        with suppress(OSError):
            if not Path(argument).is_file():  # a pipe would block
                return None
            with Path(argument).open("rb") as file:
                recipe = _RECIPE.search(file.read(_MAX_JOB_BYTES).decode("utf-8", "replace"))
            return recipe[1] if recipe else None
    return None


def fields(schema: Schema, path: str, recipe: str | None = None) -> dict[str, Schema]:
    """Return the fields below a path such as `train.schedule`, each with its schema; empty if it has none."""
    places = [schema]
    if recipe is not None:
        condition = {"recipe": {"const": recipe}}
        places += [rule["then"] for rule in schema["else"]["allOf"] if rule["if"].get("properties") == condition]
    for step in filter(None, path.split(".")):
        if step.isdecimal():  # an entry of a list, or of a source that may be one
            places = [resolved.get("items", resolved) for place in places for resolved in _resolved(schema, place)]
        else:
            places = [value for place in places for name, value in _objects(schema, place) if name == step]
    merged: dict[str, Schema] = {}
    for place in places:
        for name, value in _objects(schema, place):
            merged[name] = {**merged.get(name, {}), **value}  # that of the recipe says more
    return merged


def values(schema: Schema, field: Schema) -> list[str]:
    """Return the words that a field may be set to, such as `true` and `false`, or those of an enumeration."""
    words: dict[str, None] = {}
    for place in _resolved(schema, field):
        choices = place.get("enum", [place["const"]] if "const" in place else [])
        words |= dict.fromkeys(map(str, choices))
        if place.get("type") == "boolean":
            words |= dict.fromkeys(("true", "false"))
    return list(words)


def _objects(schema: Schema, place: Schema) -> Iterator[tuple[str, Schema]]:
    for resolved in _resolved(schema, place):
        for branch in (resolved, resolved.get("then", {}), resolved.get("else", {})):
            # `false` is the schema of a key that is not allowed here.
            yield from ((name, value) for name, value in branch.get("properties", {}).items() if value is not False)


def _resolved(schema: Schema, place: Schema) -> Iterator[Schema]:
    """Yield a schema and those that it refers to or chooses from."""
    if "$ref" in place:
        yield from _resolved(schema, schema["$defs"][place["$ref"].rpartition("/")[2]])
        return
    yield place
    for choice in place.get("anyOf", ()):
        yield from _resolved(schema, choice)
