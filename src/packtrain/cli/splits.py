"""The splits in a folder that a person names with `packtrain init --data`: what is training data, what is for scores.

Names tell: `train/` and `val/`, `train.en`, `train.de` and `dev.en`, `dev.de`, `captions_train2014.json` with
`train2014/`. Where they can be read in two ways, the person is asked; if nobody is there, the first way is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.errors import Mistake
from packtrain.pack.archive import is_archive
from packtrain.pack.compression import plain_name
from packtrain.pack.dialogue import LINES
from packtrain.pack.raw import is_hidden

Ask = Callable[[str, Sequence[str]], str | None]
"""Asks a question with some answers, and returns one of them; None if there is nobody to ask."""

Paths = tuple[str, ...]

# In the order in which they are preferred.
_WORDS = {
    "train": "train", "training": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip
_NOT_TEXT = (".json", ".jsonl", ".md", ".zip", ".tar", ".tgz", ".yaml", ".yml", ".py", ".log")


@dataclass(frozen=True)
class Splits:
    """The paths of each split; `test` and `valid` may be missing. `notes` say what was decided without being asked."""

    train: Paths
    valid: Paths = ()
    test: Paths = ()
    notes: Sequence[str] = field(default=())


def find_splits(kind: str, folder: Path, ask: Ask) -> Splits | None:
    """Return the splits that a folder holds for a raw format; None if the folder itself is the training data."""
    entries = _entries(folder)
    notes: list[str] = []
    candidates = _json_lines(entries, ask, notes) or _FINDERS[kind](entries, ask, notes)
    if "train" not in candidates:
        if kind == "imagenet" or (kind == "dialogue" and (folder / LINES).exists()):
            return None
        raise Mistake(f"--data {folder}: holds {_EXPECTED[kind]}; name the files, each with --data")
    valid, test = _chosen(candidates, "valid", ask, notes), _chosen(candidates, "test", ask, notes)
    if test and not valid:
        question = f"{_shown(test)} is the only data beside the training data. Validate on it?"
        if (answer := ask(question, ("yes", "no"))) != "no":
            valid, test = test, ()
            if answer is None:
                notes.append("there is no validation data, so the best checkpoint is chosen by test")
    return Splits(_chosen(candidates, "train", ask, notes), valid, test, notes)


Candidates = Mapping[str, list[Paths]]
"""The sets of paths that may be a split, the preferred ones first."""


def _chosen(candidates: Candidates, split: str, ask: Ask, notes: list[str]) -> Paths:
    sets = candidates.get(split, [])
    if len(sets) < 2:
        return sets[0] if sets else ()
    answer = ask(f"Which is the {split} data?", [_shown(paths) for paths in sets])
    if answer is None:
        notes.append(f"left out {', '.join(map(_shown, sets[1:]))}")
        return sets[0]
    return next(paths for paths in sets if _shown(paths) == answer)


def _shown(paths: Paths) -> str:
    return " and ".join(Path(path).name for path in paths)


# Names.


@dataclass(frozen=True)
class _Entry:
    """A file or folder: the word of its split, empty if it has none, and its name with `*` for that word."""

    path: Path
    word: str
    pattern: str
    is_folder: bool

    @property
    def split(self) -> str:
        return _WORDS.get(self.word, "")


def _entries(folder: Path) -> list[_Entry]:
    try:
        paths = sorted(path for path in folder.iterdir() if not is_hidden(path.name))
        annotations = folder / "annotations"  # where COCO has its captions
        paths += sorted(annotations.glob("captions_*.json*")) if annotations.is_dir() else []
    except OSError as error:
        raise Mistake(f"--data {folder}: {error.strerror}") from None
    entries: list[_Entry] = []
    for path in paths:
        pieces = re.split(r"([._-])", path.name)
        words = {place: piece.lower().rstrip("0123456789") for place, piece in enumerate(pieces)}  # train2014
        places = [place for place, word in words.items() if word in _WORDS]
        word, pattern = "", path.name
        if len(places) == 1:
            word, pattern = words[places[0]], "".join([*pieces[: places[0]], "*", *pieces[places[0] + 1 :]])
        entries.append(_Entry(path, word, pattern, path.is_dir()))
    preferred = list(_WORDS)
    return sorted(entries, key=lambda entry: preferred.index(entry.word) if entry.word else len(preferred))


def _grouped(entries: Sequence[_Entry]) -> dict[str, list[Paths]]:
    grouped: dict[str, list[Paths]] = {}
    for entry in entries:
        if entry.split:
            grouped.setdefault(entry.split, []).append((str(entry.path),))
    return grouped


# What the raw formats look like.


def _json_lines(entries: Sequence[_Entry], _ask: Ask, _notes: list[str]) -> Candidates:
    return _grouped([entry for entry in entries if plain_name(entry.path.name).endswith(".jsonl")])


def _is_place(entry: _Entry) -> bool:
    # Only files with the word of a split are opened: there may be a million others.
    return entry.is_folder or (bool(entry.word) and is_archive(str(entry.path)))


def _class_folders(entries: Sequence[_Entry], ask: Ask, _notes: list[str]) -> Candidates:
    places = [entry for entry in entries if _is_place(entry)]
    candidates = _grouped(places)
    classes = [entry.path.name for entry in places if entry.is_folder and not entry.split]
    if "train" not in candidates or not classes:
        return candidates
    # `train` may be a class: of vehicles, for example.
    if len(candidates) == 1:
        return {}
    splits = [entry for entry in places if entry.split]
    names = " and ".join(entry.path.name for entry in splits)
    answer = ask(f"Are {names} classes, as {classes[0]} is?", ("yes", "no"))
    if answer is None:
        raise Mistake(
            f"--data {splits[0].path.parent}: {names} are beside {classes[0]}, so they may be classes;"
            f" name the data: --data {splits[0].path} --valid {splits[1].path}"
        )
    return {} if answer == "yes" else candidates


def _tables(entries: Sequence[_Entry], _ask: Ask, _notes: list[str]) -> Candidates:
    return _grouped([entry for entry in entries if plain_name(entry.path.name).endswith((".tsv", ".txt"))])


def _texts(entries: Sequence[_Entry], ask: Ask, notes: list[str]) -> Candidates:
    """Find tables of pairs, or else pairs of files that differ in their endings."""
    tables = _grouped([entry for entry in entries if plain_name(entry.path.name).endswith(".tsv")])
    if "train" in tables:
        return tables
    files = [
        entry
        for entry in entries
        if entry.word and not entry.is_folder and not plain_name(entry.path.name).endswith(_NOT_TEXT)
    ]
    # However each is compressed; of a file and a compressed copy of it the file is taken, which is the first.
    places = {(entry.word, plain_name(entry.pattern)): str(entry.path) for entry in reversed(files)}
    patterns = sorted(pattern for word, pattern in places if _WORDS[word] == "train")
    names = {pattern.rpartition("*")[2].strip("._-") or pattern: pattern for pattern in patterns}
    if len(names) < 2:
        return {}
    source, target = _languages(names, ask, notes)
    pairs: dict[str, list[Paths]] = {}
    for word, split in _WORDS.items():
        if (word, source) in places and (word, target) in places:
            pairs.setdefault(split, []).append((places[word, source], places[word, target]))
    return pairs


def _languages(names: Mapping[str, str], ask: Ask, notes: list[str]) -> Paths:
    """Return the pattern of the source and that of the target."""
    source = ask("Translate from which language?", list(names))
    if source is None and len(names) > 2:
        raise Mistake(f"--data: holds {', '.join(names)}; name the two files: --data train.en --data train.de")
    if source is None:
        source = next(iter(names))
        notes.append(f"translates from {source}; swap the files in the job for the other way")
    remaining = [name for name in names if name != source]
    target = remaining[0] if len(remaining) == 1 else ask("Translate to which language?", remaining) or remaining[0]
    return names[source], names[target]


def _captions(entries: Sequence[_Entry], _ask: Ask, _notes: list[str]) -> Candidates:
    """Find captions, each with the folder or archive of its images; one folder may be for all of them."""
    listings = [entry for entry in entries if entry.word and plain_name(entry.path.name).endswith(".json")]
    images = [entry for entry in entries if _is_place(entry) and entry.path.name != "annotations"]
    captions: dict[str, list[Paths]] = {}
    for listing in listings:
        places = [place for place in images if place.word == listing.word] or [
            place for place in images if not place.word
        ]
        if places:
            captions.setdefault(listing.split, []).append((str(listing.path), str(places[0].path)))
    return captions


_FINDERS: Mapping[str, Callable[[Sequence[_Entry], Ask, list[str]], Candidates]] = {
    "folder": _json_lines,
    "imagenet": _class_folders,
    "dialogue": _tables,
    "bitext": _texts,
    "coco": _captions,
}
_EXPECTED = {
    "folder": "no train.jsonl",
    "dialogue": f"neither train.tsv nor {LINES}",
    "bitext": "neither train.en and train.de nor train.tsv",
    "coco": "no train.json with a folder train",
}
