"""Weights from elsewhere in a model that is about to learn: which tensors and rows fit, and which start anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from packtrain.errors import Mistake
from packtrain.pack.vocabulary import Vocabulary
from packtrain.recipes import Recipe
from packtrain.run.parent import VOCABULARY_FILE, WEIGHTS_FILE, ParentRecord, read_record
from packtrain.train.engine import Engine
from packtrain.train.tensors import Shapes, StoredTensor, open_tensors, shapes_of
from packtrain.units import counted

RowNames = Mapping[str, Sequence[str]]
"""What each row of a tensor belongs to, such as a piece of the vocabulary or a class, by the tensor's name."""

_NAMED = 3  # tensors that an error names
_LISTED = 4  # tensors that are listed by name; of more, their modules are


@dataclass(frozen=True)
class Fit:
    """The tensors to take as they are, and of others the rows to take: (row in the model, row in the file).

    A tensor with an empty list of rows starts anew, as those in `anew` do. Those in `left_out` have no place in the
    model.
    """

    as_they_are: tuple[str, ...]
    rows: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    anew: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def in_words(self) -> str:
        phrases, anew = [counted(len(self.as_they_are), "tensor")], list[str]()
        for name, rows in self.rows.items():
            if rows:
                phrases.append(f"{len(rows):,} of {self.counts[name]:,} rows of {name}")
            else:
                anew.append(name)
        anew += self.anew
        lists = [f"; {word}: {_listed(names)}" for word, names in (("new", anew), ("left out", self.left_out)) if names]
        return ", ".join(phrases) + "".join(lists)


def _listed(names: Sequence[str]) -> str:
    """Return the names of a few tensors, or else the modules that many are in."""
    if len(names) <= _LISTED:
        return ", ".join(names)
    modules: dict[str, list[list[str]]] = {}
    for name in names:
        modules.setdefault(name.partition(".")[0], []).append(name.split("."))
    counts = {_shared(group): len(group) for group in modules.values()}
    return ", ".join(name if number == 1 else f"{name} ({number} tensors)" for name, number in counts.items())


def _shared(names: Sequence[Sequence[str]]) -> str:
    """Return the module that all of these names are in."""
    columns = zip(*names, strict=False)
    return ".".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))


def fit(shapes: Shapes, stored: Shapes, row_names: RowNames, stored_row_names: RowNames) -> Fit:
    """Return which `stored` tensors a model with these shapes can use; what is new or has another size starts anew.

    Rows are taken by their names, not by their numbers: row 300 of two vocabularies is not the same piece. Weights that
    give less than half of a model, without such rows, are those of another one, and refused.
    """
    as_they_are, rows, misfits = [], {}, {}
    for name, shape in shapes.items():
        names, stored_names = row_names.get(name), stored_row_names.get(name)
        if name not in stored:
            misfits[name] = "is not there"
        elif names is None or stored_names is None or tuple(names) == tuple(stored_names):
            if stored[name] == shape:
                as_they_are.append(name)
            else:
                misfits[name] = f"is {_size(stored[name])}, not {_size(shape)}"
        elif stored[name][1:] != shape[1:] or len(stored_names) > stored[name][0]:
            misfits[name] = f"is {_size(stored[name])}, not {_size(shape)}"
        else:
            places = {row: number for number, row in enumerate(stored_names)}
            rows[name] = [(number, places[row]) for number, row in enumerate(names) if row in places]
    sizes = {name: prod(shape) for name, shape in shapes.items() if name not in row_names}
    if 2 * sum(sizes.get(name, 0) for name in as_they_are) < sum(sizes.values()):
        ending = f" and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else ""
        fault = f"{'; '.join(f'{name} {why}' for name, why in list(misfits.items())[:_NAMED])}{ending}"
        raise Mistake(f"the weights are those of another model: {fault}; use the same model settings as that run")
    counts = {name: len(row_names[name]) for name in rows}
    return Fit(tuple(as_they_are), rows, counts, tuple(misfits), tuple(sorted(stored.keys() - shapes.keys())))


def fit_of(names: Collection[str], chosen: Collection[str]) -> Fit:
    """Return the fit of tensors that were chosen by name; counters of norms, which nothing depends on, are not new."""
    anew = [name for name in names if name not in chosen and not name.endswith("num_batches_tracked")]
    return Fit(tuple(chosen), anew=tuple(anew))


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


@dataclass(frozen=True)
class TakenWeights:
    """Whole tensors for a model to begin with."""

    tensors: Mapping[str, Tensor | StoredTensor]
    fit: Fit


def parent_fit(recipe: Recipe, shapes: Shapes, directory: Path, record: ParentRecord) -> Fit:
    """Return what of a run's files fits a model with these shapes; of the weights only the header is read."""
    has_vocabulary = VOCABULARY_FILE in {file.name for file in record.files}
    stored_vocabulary = Vocabulary.from_file(directory / VOCABULARY_FILE) if has_vocabulary else None
    stored = shapes_of(open_tensors(directory, WEIGHTS_FILE))
    row_names = _row_names(recipe, recipe.pack.vocabulary if has_vocabulary else None, recipe.pack.manifest.classes)
    return fit(shapes, stored, row_names, _row_names(recipe, stored_vocabulary, record.classes))


def _row_names(recipe: Recipe, vocabulary: Vocabulary | None, classes: Sequence[str]) -> RowNames:
    pieces = () if vocabulary is None else vocabulary.pieces
    return {name: pieces if kind == "pieces" else classes for name, kind in recipe.rows.items()}


def check_parent_fit(recipe: Recipe, directory: Path, record: ParentRecord) -> Fit:
    """Return what of the weights fits the recipe's model, before there is a run; refuse those of another one."""
    return parent_fit(recipe, shapes_of(recipe.build_model().state_dict()), directory, record)


def parent_weights(recipe: Recipe, engine: Engine, directory: Path) -> TakenWeights:
    """Read what `run.parent.fetch_weights` fetched, as it fits the model of the engine."""
    fitting = parent_fit(recipe, shapes_of(engine.model.state_dict()), directory, read_record(directory))
    stored = open_tensors(directory, WEIGHTS_FILE)
    tensors: dict[str, Tensor | StoredTensor] = {name: stored[name] for name in fitting.as_they_are}
    if fitting.anew:  # a file may have what the run does not, such as a pretrained encoder
        initial = recipe.initial_weights(engine.model)
        tensors |= {name: initial[name] for name in fitting.anew if name in initial}
        still_anew = tuple(name for name in fitting.anew if name not in initial)
        fitting = replace(fitting, as_they_are=tuple(tensors), anew=still_anew)
    if fitting.rows:
        # Not the engine's model, whose weights may be divided among the ranks: the seed makes the same ones.
        torch.manual_seed(recipe.job.train.seed)
        fresh = recipe.build_model().state_dict()
        for name, rows in fitting.rows.items():
            tensors[name] = mixed = fresh[name].clone()
            if rows:
                to, at = zip(*rows, strict=True)
                mixed[list(to)] = stored[name].read()[list(at)].to(mixed.dtype)
    return TakenWeights(tensors, fitting)
