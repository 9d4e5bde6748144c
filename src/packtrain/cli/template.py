"""The files that `packtrain init` writes: a commented job file, its modules, and toy data if the user has none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from packtrain.cli.common import write_output
from packtrain.cli.output import json_text
from packtrain.cli.splits import Ask, Splits, find_splits
from packtrain.errors import Mistake, nearest
from packtrain.job.part import is_address, is_name
from packtrain.job.schema import Schema, job_schema
from packtrain.recipes import RECIPES, recipe_class, recipe_template
from packtrain.recipes.template import Files, JobTemplate, divided, english, german, lines

# Beside the job file: it works offline, from any checkout, and the name of the folder keeps it out of the run's code.
SCHEMA = Path(".packtrain/job.schema.json")
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA}\n"

_COMMENT_COLUMN = 35
_COMMENT = re.compile(r"^( *[^ #\n].*?) +# ", re.MULTILINE)
# Settings for a natural language, and for the few words of the toy data.
_LANGUAGE = {"vocabulary": "8000", "duration": "10000 steps", "warmup": "1000 steps", "every": "1000 steps"}
_FEW_WORDS = {"vocabulary": "400", "warmup": "100 steps", "every": "100 steps"}
_VALID = re.compile(r"^  valid: .*\n", re.MULTILINE)
_HELD_OUT = "5 %"  # where a person has no validation data
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")


def languages() -> Files:
    """Return number words with their language."""
    contents: Files = {}
    for split, numbers in divided(range(1, 1000)):
        rows = [row for number in numbers for row in ((english(number), "English"), (german(number), "German"))]
        texts = [json.dumps({"source": text, "target": name}, ensure_ascii=False) for text, name in rows]
        contents[f"{split}.jsonl"] = lines(texts)
    return contents


_FOLDER = files("packtrain.cli") / "templates"
_OTHERS = {
    "own": JobTemplate(
        "your own recipe, with an example that detects the language of a text",
        _FOLDER / "own.yaml",
        "folder",
        ("$split.jsonl",),
        languages,
        modules=(_FOLDER / "languages.py",),
        example='"zweihundertelf"',
    ),
    "program": JobTemplate(
        "any program that runs under torchrun", _FOLDER / "program.yaml", modules=(_FOLDER / "train.py",)
    ),
}
TEMPLATES: Mapping[str, JobTemplate] = {
    name: _OTHERS.get(name) or recipe_template(name) for name in sorted([*RECIPES, *_OTHERS])
}


@dataclass(frozen=True)
class InitRequest:
    """Arguments of `packtrain init`. Without `train` data, toy data is written."""

    kind: str
    path: Path
    name: str | None = None
    train: Sequence[str] = field(default=())
    valid: Sequence[str] = field(default=())


@dataclass(frozen=True)
class InitResult:
    """Descriptions of the files that were written, and arguments of `packtrain predict` to try.

    `data` says which data was found in a folder, and `notes` what that means.
    """

    files: list[str]
    example: str = ""
    data: Sequence[str] = ()
    notes: Sequence[str] = ()


def write_job(request: InitRequest, ask: Ask = lambda _question, _answers: None) -> InitResult:
    """Write the job file and all files it needs, or nothing if one of them exists."""
    template = template_of(request.kind)
    name = request.name or request.path.stem.lower().replace("_", "-")
    if not is_name(name):
        raise Mistake(f"--name: {name!r} must be 1 to 63 of the characters a-z, 0-9 and -")
    if request.valid and not request.train:
        raise Mistake("--valid: needs --data; without it, init writes toy data")
    folder, data = request.path.parent, request.path.with_name(f"{request.path.stem}-data")
    if request.path.exists():
        raise Mistake(f"{request.path} exists; use another name, e.g. packtrain init {request.kind} my.yaml")
    # A module that exists is the user's own, perhaps from an earlier `init`: keep it.
    modules = ((folder / module.name, module) for module in template.modules)
    beside = {path: module.read_bytes() for path, module in modules if not path.exists()}
    result = InitResult([str(request.path), *map(str, beside)])
    if request.train:
        if not template.format:
            raise Mistake(f"--data: not for a {request.kind}, which reads its data itself")
        named_splits = _splits(template.format, request, ask)
        splits = {"train": named_splits.train, "valid": named_splits.valid, "test": named_splits.test}
        sources = {split: _source(template.format, split, paths, folder) for split, paths in splits.items()}
        if tuple(request.train) != named_splits.train:
            data_of_splits = [f"{' '.join(paths)} for {split}" for split, paths in splits.items() if paths]
            result = replace(result, data=data_of_splits, notes=named_splits.notes)
    else:
        sources = {}
        for split in ("train", "valid"):
            paths = [f"{data.name}/{Template(path).substitute(split=split)}" for path in template.paths]
            sources[split] = _flow(template.format, paths) if paths else ""
        if toy_files := template.make_data():
            if data.exists():
                raise Mistake(f"{data} exists; use another name for the job, or --data to train on it")
            beside |= {data / place: content for place, content in toy_files.items()}
            example = Template(template.example).substitute(data=data)
            result = InitResult([*result.files, f"{data} with toy data"], f"{name} {example}")
    settings = _LANGUAGE if request.train else {**_FEW_WORDS, "duration": template.duration}
    text = Template(template.job.read_text("utf-8")).substitute(sources, name=name, **settings)
    held_out = f"  valid: {_HELD_OUT} # of the training data, chosen by a hash of each sample\n"
    text = text.replace("  valid: []\n", held_out)
    if sources.get("test"):
        text = _VALID.sub(lambda valid: f"{valid[0]}  test: [{sources['test']}]\n", text)
    # Align the comments after fields, whatever was substituted before them.
    text = _COMMENT.sub(lambda before: f"{before[1]:<{_COMMENT_COLUMN}} # ", text)
    _write(request.path, {request.path: (EDITOR_LINE + text).encode(), **beside})
    schema = request.path.parent / SCHEMA
    schema.parent.mkdir(exist_ok=True)
    write_output(schema, f"{json_text(current_schema())}\n", option="")
    return result


@cache
def current_schema() -> Schema:
    """Return the schema of a job file, with the options of the recipes that come with Packtrain."""
    return job_schema({name: recipe_class(name) for name in RECIPES})


def _splits(kind: str, request: InitRequest, ask: Ask) -> Splits:
    """Return the data of each split: as named, or as found in the one folder that is named."""
    named = Splits(tuple(request.train), tuple(request.valid))
    if len(named.train) != 1 or is_address(named.train[0]) or not Path(named.train[0]).is_dir():
        return named
    splits = find_splits(kind, Path(named.train[0]), ask)
    if splits is None:
        return named
    return replace(splits, valid=named.valid) if named.valid else splits


def template_of(kind: str) -> JobTemplate:
    if kind not in TEMPLATES:
        raise Mistake(f"init: unknown kind {kind[:60]!r}; {nearest(kind, TEMPLATES)}")
    return TEMPLATES[kind]


def _source(kind: str, split: str, paths: Sequence[str], folder: Path) -> str:
    """Return a source for a job file in `folder`; an empty string if there are no paths."""
    option = "--data" if split == "train" else "--valid"
    for path in paths:
        if not is_address(path) and not Path(path).exists():
            raise Mistake(f"{option}: no such file: {path}")
    # A user gives paths relative to the current directory; those in a job file are relative to the file.
    placed = [path if is_address(path) else os.path.relpath(path, folder) for path in paths]
    lines = len(paths) == 1 and paths[0].endswith(".jsonl")  # JSON lines are always the folder format
    return _flow("folder" if lines else kind, placed) if paths else ""


def _flow(kind: str, paths: Sequence[str]) -> str:
    shown = [path if _PLAIN.fullmatch(path) else json.dumps(path) for path in paths]
    return f"{{{kind}: {shown[0] if len(shown) == 1 else '[' + ', '.join(shown) + ']'}}}"


def _write(job: Path, contents: Mapping[Path, bytes]) -> None:
    """Write all files or none: never replace one that exists."""
    # On an error the stack removes every file written so far; on success `pop_all` keeps them.
    with ExitStack() as undo:
        for path, content in contents.items():
            try:
                if path.parent != job.parent:
                    path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:  # x: fails if the file exists, even if it appeared just now
                    undo.callback(path.unlink)
                    file.write(content)
            except FileExistsError:
                raise Mistake(f"{path} exists; use another name") from None
            except OSError as error:
                raise Mistake(f"{path}: {error.strerror}") from None
        undo.pop_all()
