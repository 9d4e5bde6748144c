"""What `packtrain init` writes: a job file with comments, with made-up data unless there is one's own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template

from packtrain.cli import samples
from packtrain.errors import Mistake, nearest
from packtrain.job.part import is_address, is_name

_COMMENT_COLUMN = 36
_COMMENT = re.compile(r"^( *[^ #\n].*?) +# ", re.MULTILINE)
# What a language takes, and what the few words of the made-up data do.
_OWN_WORDS = {"vocabulary": "8000", "duration": "10000 steps", "warmup": "1000 steps", "every": "1000 steps"}
_FEW_WORDS = {"vocabulary": "400", "warmup": "100 steps", "every": "100 steps"}
_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True)
class Start:
    """A way to begin. `format` is that of its data, `paths` those of a split's files in what `sample` makes."""

    about: str
    format: str = ""
    paths: tuple[str, ...] = ()
    sample: Callable[[], samples.Files] = dict
    modules: tuple[str, ...] = ()
    example: str = ""
    """What to give `packtrain predict`, after the first run; `$data` is the folder of the data."""
    duration: str = ""
    """How long what `sample` makes takes to be learnt."""


STARTS: Mapping[str, Start] = {
    "caption": Start(
        "a sentence about a picture",
        "coco",
        ("$split.json", "$split"),
        samples.scenes,
        example="$data/valid/000.png --pictures .",
    ),
    "chat": Start(
        "a reply to what is said",
        "dialogue",
        ("$split.tsv",),
        samples.small_talk,
        example='"what comes after Monday?"',
        duration="300 steps",
    ),
    "classify": Start(
        "what a picture shows",
        "imagenet",
        ("$split",),
        samples.shapes,
        example="$data/valid/star/00.png",
    ),
    "own": Start(
        "a recipe of your own: the language of a text",
        "folder",
        ("$split.jsonl",),
        samples.languages,
        modules=("languages.py",),
        example='"zweihundertelf"',
    ),
    "program": Start("any program that torchrun would start", modules=("train.py",)),
    "translate": Start(
        "a sentence in another language",
        "bitext",
        ("$split.en", "$split.de"),
        samples.counting,
        example='"we need two hundred and six chairs."',
        duration="500 steps",
    ),
}


@dataclass(frozen=True)
class Wanted:
    """What a person asks for. Without data of one's own there is some made up."""

    kind: str
    path: Path
    name: str | None = None
    train: Sequence[str] = field(default=())
    valid: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Written:
    """What was written, in words, and what to give `packtrain predict` after the first run."""

    files: list[str]
    example: str = ""


def write_start(wanted: Wanted) -> Written:
    """Writes the job file and what it needs, or nothing."""
    start = start_of(wanted.kind)
    name = wanted.name or wanted.path.stem.lower().replace("_", "-")
    if not is_name(name):
        raise Mistake(f"--name: {name!r} must be 1 to 63 of the characters a-z, 0-9 and -")
    if wanted.valid and not wanted.train:
        raise Mistake("--valid: is for data of your own; give --data as well")
    folder, data = wanted.path.parent, wanted.path.with_name(f"{wanted.path.stem}-data")
    if wanted.path.exists():
        raise Mistake(
            f"{wanted.path} is there already; give another name, as in `packtrain init {wanted.kind} my.yaml`"
        )
    modules = [folder / module for module in start.modules]
    beside = {module: _resource(f"{module.name}.txt") for module in modules if not module.exists()}  # one's own stays
    told = Written([str(wanted.path), *map(str, beside)])
    if wanted.train:
        if not start.format:
            raise Mistake(f"--data: a {wanted.kind} reads its data by itself")
        splits = {"train": wanted.train, "valid": wanted.valid}
        sources = {split: _source(start.format, split, paths, folder) for split, paths in splits.items()}
    else:
        sources = {split: _made_up(start, split, data.name) for split in ("train", "valid")}
        if made_up := start.sample():
            if data.exists():
                raise Mistake(f"{data} is there already; give the job another name, or --data to use it")
            beside |= {data / place: content for place, content in made_up.items()}
            example = Template(start.example).substitute(data=data)
            told = Written([*told.files, f"{data} with made-up data"], f"{name} {example}")
    template = Template(_resource(f"{wanted.kind}.yaml").decode())
    words = _OWN_WORDS if wanted.train else {**_FEW_WORDS, "duration": start.duration}
    text = template.substitute(sources, name=name, **words)
    _write(wanted.path, {wanted.path: _aligned(text).encode(), **beside})
    return told


def _aligned(text: str) -> str:
    """With the comments behind fields below each other, whatever was put in before them."""
    return _COMMENT.sub(lambda found: f"{found[1]:<{_COMMENT_COLUMN}}# ", text)


def start_of(kind: str) -> Start:
    if kind not in STARTS:
        raise Mistake(f"init: there is no {kind[:60]!r} to start from; {nearest(kind, STARTS)}")
    return STARTS[kind]


def _resource(name: str) -> bytes:
    return (files("packtrain.cli") / "templates" / name).read_bytes()


def _made_up(start: Start, split: str, folder: str) -> str:
    paths = [f"{folder}/{Template(path).substitute(split=split)}" for path in start.paths]
    return _flow(start.format, paths) if paths else ""


def _source(kind: str, split: str, paths: Sequence[str], folder: Path) -> str:
    """A source as a job file in `folder` has it; nothing where there are no paths."""
    option = "--data" if split == "train" else "--valid"
    for path in paths:
        if not is_address(path) and not Path(path).exists():
            raise Mistake(f"{option}: there is no {path}")
    placed = [path if is_address(path) else os.path.relpath(path, folder) for path in paths]
    lines = len(paths) == 1 and paths[0].endswith(".jsonl")
    return _flow("folder" if lines else kind, placed) if paths else ""


def _flow(kind: str, paths: Sequence[str]) -> str:
    shown = [path if _PLAIN.fullmatch(path) else json.dumps(path) for path in paths]
    return f"{{{kind}: {shown[0] if len(shown) == 1 else '[' + ', '.join(shown) + ']'}}}"


def _write(job: Path, contents: Mapping[Path, bytes]) -> None:
    """All of the files, or none of them: what is there already is somebody's."""
    with ExitStack() as undo:
        for path, content in contents.items():
            try:
                if path.parent != job.parent:
                    path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:
                    undo.callback(path.unlink)
                    file.write(content)
            except FileExistsError:
                raise Mistake(f"{path} is there already; give another name") from None
            except OSError as error:
                raise Mistake(f"{path}: {error.strerror}") from None
        undo.pop_all()
