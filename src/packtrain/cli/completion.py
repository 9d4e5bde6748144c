"""The command completion: what a shell offers for the word that a person is typing.

A script of a few lines for each shell asks `packtrain completion SHELL -- WORD...` at every press of the tab key. So
nothing heavy is imported here, nothing takes longer than a moment, and nothing is said about errors.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packtrain.process import end_process

if TYPE_CHECKING:
    from packtrain.store import Store

SHELLS = ("bash", "zsh", "fish")

Schema = Mapping[str, Any]

_STORE_SECONDS = 1.0  # to list the runs of a bucket
_RECIPE = re.compile(r"^recipe:\s*([a-z0-9-]+)\s*(#|$)", re.MULTILINE)
_MAX_JOB_BYTES = 1_000_000


def register(app: typer.Typer) -> None:
    app.command()(completion)


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Shell to complete in.")],
    words: Annotated[
        list[str] | None, typer.Argument(hidden=True, metavar="WORD", help="Words so far; the script passes them.")
    ] = None,
) -> None:
    """Print a shell script that completes commands, runs and fields."""
    from packtrain.errors import EXIT_DONE, Mistake, nearest

    if shell not in SHELLS:
        raise Mistake(f"completion: unknown shell {shell[:60]!r}; {nearest(shell, SHELLS)}")
    if not words:
        print((files("packtrain.cli") / "shells" / f"packtrain.{shell}").read_text("utf-8"), end="")
        return
    with suppress(Exception):  # whatever is wrong, the person is in the middle of a line
        for one in candidates(context.find_root().command, words):
            print(one.value if shell == "bash" or not one.help else f"{one.value}\t{one.help}")
    end_process(EXIT_DONE)  # a store that does not answer may still be asked


@dataclass(frozen=True)
class Candidate:
    """A word to offer, and what it means."""

    value: str
    help: str = ""


@dataclass
class _Typed:
    """The words so far: the command, its arguments and options, and the option that lacks its value."""

    command: Any
    arguments: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    pending: Any = None


def candidates(tree: Any, words: Sequence[str]) -> Iterator[Candidate]:
    """Yield what may stand for the last word, after the others; nothing where files should be offered."""
    *before, last = words
    typed = _read(tree, before)
    if typed is None:
        return
    option, equals, value = last.partition("=")
    if typed.pending is not None:
        found = list(_values(typed.pending, last, typed))
    elif equals and (parameter := _option(typed.command, option)) is not None:
        found = [Candidate(f"{option}={one.value}", one.help) for one in _values(parameter, value, typed)]
    elif last.startswith("-"):
        found = list(_options(typed.command))
    elif hasattr(typed.command, "commands"):
        commands = typed.command.commands.items()
        found = [Candidate(name, _sentence(one.help)) for name, one in commands if not one.hidden]
    elif (argument := _argument(typed)) is not None:
        found = list(_values(argument, last, typed))
    else:
        found = list(_options(typed.command))
    yield from (one for one in found if one.value.startswith(last))


def _read(command: Any, words: Sequence[str]) -> _Typed | None:
    """Return what words mean; None if one of them is no command."""
    typed = _Typed(command)
    for word in words:
        if typed.pending is not None:
            typed.options[typed.pending.opts[-1]] = word
            typed.pending = None
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            option = _option(typed.command, name)
            if option is not None and equals:
                typed.options[option.opts[-1]] = value
            elif option is not None and not option.is_flag:
                typed.pending = option
        elif hasattr(typed.command, "commands"):
            if word not in typed.command.commands:
                return None
            typed.command = typed.command.commands[word]
        else:
            typed.arguments.append(word)
    return typed


def _option(command: Any, name: str) -> Any:
    return next(
        (one for one in command.params if name.startswith("-") and name in (*one.opts, *one.secondary_opts)), None
    )


def _options(command: Any) -> Iterator[Candidate]:
    for one in command.params:
        if not getattr(one, "hidden", False) and one.opts[0].startswith("-"):
            for name in (*one.opts, *one.secondary_opts):
                if name.startswith("--"):
                    yield Candidate(name, _sentence(one.help))
    yield Candidate("--help", "Show this message and exit.")


def _argument(typed: _Typed) -> Any:
    """Return the argument that comes next; the last one may take any number of words."""
    arguments = [one for one in typed.command.params if not one.opts[0].startswith("-")]
    number = len(typed.arguments)
    if number < len(arguments):
        return arguments[number]
    return arguments[-1] if arguments and arguments[-1].nargs == -1 else None


def _sentence(text: str | None) -> str:
    """Return the first sentence of a help text, in one line."""
    return re.split(r"(?<=[.;])(?<!e\.g\.)\s", " ".join((text or "").split()))[0].rstrip(";")


# Values, by what the help calls them.


def _values(parameter: Any, text: str, typed: _Typed) -> Iterator[Candidate]:
    metavar = parameter.metavar or ""
    if metavar.startswith("FIELD="):
        yield from _field_values(text, typed)
        return
    names = re.split(r"[|\s]+", metavar.replace(".", " "))
    yield from (Candidate(name) for name in names if "|" in metavar and re.fullmatch(r"[a-z0-9/]+", name))
    if "RUN" in names or (names == ["MODEL"] and "run" in (parameter.help or "")):
        from packtrain.store import default_store

        yield from map(Candidate, _runs(typed.options.get("--store") or default_store()))
    if metavar == "KIND":
        templates = (files("packtrain.cli") / "templates").iterdir()
        yield from (
            Candidate(name.removesuffix(".yaml"))
            for name in sorted(one.name for one in templates)
            if name.endswith(".yaml")
        )


def _runs(location: str) -> list[str]:
    """Return the runs of a store; of a bucket, only if it answers soon."""
    if "://" not in location:
        from packtrain.system import expanded

        folder = expanded(location) / "runs"
        return sorted(entry.name for entry in os.scandir(folder) if re.fullmatch(r"[a-z0-9][a-z0-9-]*", entry.name))
    found: list[str] = []

    def look() -> None:
        from packtrain.job.part import is_name
        from packtrain.store import open_store

        store: Store = open_store(location)
        found.extend(name for name in store.folders("runs/") if is_name(name))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_STORE_SECONDS)
    return sorted(found)


# Fields of a job: from its schema.


def _field_values(text: str, typed: _Typed) -> Iterator[Candidate]:
    schema, recipe = cached_schema(), _recipe_of(typed.arguments)
    path, equals, _ = text.partition("=")
    above, dot, _ = path.rpartition(".")
    for name, place in fields(schema, above, recipe).items():
        whole = f"{above}{dot}{name}"
        words = values(schema, place)
        if equals:
            yield from (Candidate(f"{whole}={word}") for word in words if whole == path)
            continue
        below = fields(schema, whole, recipe)
        if below:
            yield Candidate(f"{whole}.", _sentence(place.get("description")))
        if words or not below:
            yield Candidate(f"{whole}=", _sentence(place.get("description")))


def _recipe_of(arguments: Sequence[str]) -> str | None:
    """Return the recipe of the job file among the arguments, without reading it as YAML, which would take longer."""
    for argument in arguments[:1]:
        with suppress(OSError):
            if not Path(argument).is_file():  # a pipe would block
                return None
            with Path(argument).open("rb") as file:
                found = _RECIPE.search(file.read(_MAX_JOB_BYTES).decode("utf-8", "replace"))
            return found[1] if found else None
    return None


def cached_schema() -> Schema:
    """Return the schema of the job file; making it takes a second, so it is kept for this very code."""
    from packtrain.identity import identity
    from packtrain.system import cache_directory

    digest = re.sub("[^0-9a-z]", "", identity())[-32:]
    path = cache_directory() / f"job-{digest}.schema.json"
    with suppress(OSError, ValueError):
        kept: Schema = json.loads(path.read_text("utf-8"))
        return kept
    from packtrain.cli.schema import current_schema

    made = current_schema()
    for old in path.parent.glob("job-*.schema.json"):
        old.unlink(missing_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(made), "utf-8")
    part.replace(path)  # whole, or not there
    return made


def fields(schema: Schema, path: str, recipe: str | None = None) -> dict[str, Schema]:
    """Return the fields below a path such as `train.schedule`, each with its schema; empty if it has none."""
    places = [schema]
    if recipe is not None:
        asked = {"recipe": {"const": recipe}}
        places += [rule["then"] for rule in schema["else"]["allOf"] if rule["if"].get("properties") == asked]
    for step in filter(None, path.split(".")):
        places = [below for place in places for below in _below(schema, place, step)]
    found: dict[str, Schema] = {}
    for place in places:
        for name, value in _objects(schema, place):
            found[name] = {**found.get(name, {}), **value}  # that of the recipe says more
    return found


def values(schema: Schema, field: Schema) -> list[str]:
    """Return the words that a field may be set to, such as `true` and `false`, or those of an enumeration."""
    found: dict[str, None] = {}
    for place in _resolved(schema, field):
        given = place.get("enum", [place["const"]] if "const" in place else [])
        found |= dict.fromkeys(str(value) for value in given)
        if place.get("type") == "boolean":
            found |= dict.fromkeys(("true", "false"))
    return list(found)


def _below(schema: Schema, place: Schema, step: str) -> Iterator[Schema]:
    if step.isdecimal():  # an entry of a list, or of a source that may be one
        for resolved in _resolved(schema, place):
            yield resolved.get("items", resolved)
        return
    yield from (value for name, value in _objects(schema, place) if name == step)


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
