"""Raw data as a person names it in a command: a source as in a job, a file of sources, or paths without a format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from packtrain.errors import Mistake, printable
from packtrain.job.document import Document, plain, read_node
from packtrain.job.kinds import FORMATS, AnySource, Source, expand_source, kind_class
from packtrain.job.load import text_of
from packtrain.job.part import Location, faults, is_address
from packtrain.pack.archive import split_member
from packtrain.system import expanded

_YAML = (".yaml", ".yml")
_SOURCE: TypeAdapter[Source] = TypeAdapter(AnySource)

MistakeAt = Callable[[Location, str], Mistake]


def read_sources(option: str, texts: Sequence[str], recipe: str, contents: frozenset[str]) -> tuple[Source, ...]:
    """Return the sources that the values of an option name; `contents` are those that the recipe can learn from.

    Paths without a format are together one source, such as two aligned files, or else one source each.
    """
    sources: list[Source] = []
    paths: list[str] = []
    for text in texts:
        if text.lstrip().startswith(("{", "[")):
            sources += _written(option, text)
        elif text.lower().endswith(_YAML) and not is_address(text):
            sources += _from_file(text)
        else:
            paths.append(text)
    if paths:
        sources += _recognized(option, paths, recipe, contents)
    for source in sources:
        if not source.contents & contents:
            raise Mistake(f"{option}: {recipe} does not support {source.kind} data; use {_supported(contents)}")
    return tuple(sources)


def _supported(contents: frozenset[str]) -> str:
    return ", ".join(sorted(word for word in FORMATS if kind_class(FORMATS, word).contents & contents))


# Sources as in a job.


def _written(option: str, text: str) -> Iterator[Source]:
    def mistake(location: Location, problem: str) -> Mistake:
        field = ".".join(map(str, location))
        return Mistake(f"{option}: {f'{field}: ' if field else ''}{problem}")

    node = read_node(text, lambda _, location, problem: mistake(location, problem))
    return _sources(plain(node, (), {}, in_file=False) if node else None, Path.cwd(), mistake)


def _from_file(path: str) -> Iterator[Source]:
    places: dict[Location, int | None] = {}

    def refuse(line: int, location: Location, problem: str) -> Mistake:
        return Document(path, "", {}, {(): line}).mistake(location, problem)

    node = read_node(text_of(path), refuse)
    value = plain(node, (), places, in_file=True) if node else None
    return _sources(value, Path(path).absolute().parent, Document(path, "", {}, places).mistake)


def _sources(value: Any, directory: Path, mistake: MistakeAt) -> Iterator[Source]:
    """Yield the sources of a mapping or of a list of them; `directory` is where their paths start."""
    entries = value if isinstance(value, list) else [value]
    for number, entry in enumerate(entries):
        above: Location = (number,) if isinstance(value, list) else ()
        if not isinstance(entry, Mapping):
            raise mistake(above, "must be a source, such as {bitext: [new.en, new.de]}, or a list of them")
        try:
            source = dict(expand_source(entry))
            for word in FORMATS:
                if isinstance(source.get(word), list):
                    source[word] = [_absolute(path, directory) for path in source[word]]
            yield _SOURCE.validate_python(source)
        except ValidationError as error:
            location, problem, _ = faults(error)[0]
            raise mistake((*above, *location), problem) from None


def _absolute(path: Any, directory: Path) -> Any:
    # An empty path is refused as such, and not as a folder; so is what is no path.
    is_place = isinstance(path, str) and path.strip() and not is_address(path)
    return os.path.normpath(directory / expanded(path)) if is_place else path


# Paths without a format.


def _recognized(option: str, paths: Sequence[str], recipe: str, contents: frozenset[str]) -> list[Source]:
    for path in paths:
        if not is_address(path) and not os.path.lexists(split_member(path)[0]):
            raise Mistake(f"{option} {printable(path, 200)}: no such file or folder")
    recognized = _recognized_as_one(paths, lambda kind: bool(kind.contents & contents))
    if recognized is not None:
        return list(_sources(recognized, Path.cwd(), lambda _, problem: Mistake(f"{option}: {problem}")))
    if len(paths) > 1:
        return [source for path in paths for source in _recognized(option, [path], recipe, contents)]
    shown = f"{option} {printable(paths[0], 200)}"
    misfit = _recognized_as_one(paths, lambda kind: not kind.contents & contents)
    if misfit is not None:
        raise Mistake(f"{shown}: looks like {next(iter(misfit))} data, but {recipe} needs {_supported(contents)}")
    word = next(word for word in FORMATS if kind_class(FORMATS, word).contents & contents)
    example = kind_class(FORMATS, word).example
    raise Mistake(f"{shown}: {recipe} does not recognize it; name its format: {option} '{{{word}: {example}}}'")


def _recognized_as_one(paths: Sequence[str], fits: Callable[[type[Source]], bool]) -> dict[str, list[str]] | None:
    """Return the paths as a single source, as a job has it."""
    for word in reversed(FORMATS):  # the first one takes any text
        kind: type[Source] = kind_class(FORMATS, word)
        source_paths = kind.recognize(paths) if fits(kind) else None
        if source_paths is not None:
            return {word: list(source_paths)}
    return None
