"""Weights from elsewhere in a model that is about to learn: which tensors and rows fit, and which start anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Fit:
    """The tensors to take as they are, and of others the rows to take: (own row, row in the file).

    A tensor with an empty list of rows starts anew.
    """

    whole: tuple[str, ...]
    rows: Mapping[str, Sequence[tuple[int, int]]]
    counts: Mapping[str, int]

    @property
    def in_words(self) -> str:
        parts = [counted(len(self.whole), "tensor")]
        parts += [f"{len(rows):,} of {self.counts[name]:,} rows of {name}" for name, rows in self.rows.items() if rows]
        new = [name for name, rows in self.rows.items() if not rows]
        return ", ".join(parts) + (f"; new: {', '.join(new)}" if new else "")


def fit(own: Shapes, found: Shapes, own_rows: RowNames, found_rows: RowNames) -> Fit:
    """Return what of `found` a model with the shapes `own` can use; refuse what is another model.

    Rows are taken by their names, not by their numbers: row 300 of two vocabularies is not the same piece.
    """
    whole, rows, misfits = [], {}, []
    for name, shape in own.items():
        names, theirs = own_rows.get(name), found_rows.get(name)
        if name not in found:
            misfits.append(f"{name} is not there")
        elif names is None or theirs is None or tuple(names) == tuple(theirs):
            if found[name] == shape:
                whole.append(name)
            else:
                misfits.append(f"{name} is {_size(found[name])}, not {_size(shape)}")
        elif found[name][1:] != shape[1:] or len(theirs) > found[name][0]:
            misfits.append(f"{name} is {_size(found[name])}, not {_size(shape)}")
        else:
            places = {row: number for number, row in enumerate(theirs)}
            rows[name] = [(number, places[row]) for number, row in enumerate(names) if row in places]
    misfits += [f"{name} has no place" for name in sorted(found.keys() - own.keys())]
    if misfits:
        more = f" and {len(misfits) - _NAMED} more" if len(misfits) > _NAMED else ""
        fault = f"{'; '.join(misfits[:_NAMED])}{more}"
        raise Mistake(f"the weights are those of another model: {fault}; use the same model settings as that run")
    return Fit(tuple(whole), rows, {name: len(own_rows[name]) for name in rows})


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


@dataclass(frozen=True)
class TakenWeights:
    """Whole tensors for a model to begin with."""

    tensors: Mapping[str, Tensor | StoredTensor]
    fit: Fit


def parent_fit(recipe: Recipe, own: Shapes, directory: Path, record: ParentRecord) -> Fit:
    """Return what of a run's files fits a model with these shapes; of the weights only the header is read."""
    has_vocabulary = VOCABULARY_FILE in {file.name for file in record.files}
    theirs = Vocabulary.from_file(directory / VOCABULARY_FILE) if has_vocabulary else None
    found = shapes_of(open_tensors(directory, WEIGHTS_FILE))
    own_rows = _row_names(recipe, recipe.pack.vocabulary if has_vocabulary else None, recipe.pack.manifest.classes)
    return fit(own, found, own_rows, _row_names(recipe, theirs, record.classes))


def _row_names(recipe: Recipe, vocabulary: Vocabulary | None, classes: Sequence[str]) -> RowNames:
    pieces = () if vocabulary is None else vocabulary.pieces
    return {name: pieces if kind == "pieces" else classes for name, kind in recipe.rows.items()}


def check_parent_fit(recipe: Recipe, directory: Path, record: ParentRecord) -> None:
    """Refuse weights that do not fit the recipe's model, before there is a run."""
    parent_fit(recipe, shapes_of(recipe.build_model().state_dict()), directory, record)


def parent_weights(recipe: Recipe, engine: Engine, directory: Path) -> TakenWeights:
    """Read what `run.parent.fetch_weights` fetched, as it fits the model of the engine."""
    fitting = parent_fit(recipe, shapes_of(engine.model.state_dict()), directory, read_record(directory))
    found = open_tensors(directory, WEIGHTS_FILE)
    taken: dict[str, Tensor | StoredTensor] = {name: found[name] for name in fitting.whole}
    if fitting.rows:
        # Not the engine's model, whose weights may be divided among the ranks: the seed makes the same ones.
        torch.manual_seed(recipe.job.train.seed)
        fresh = recipe.build_model().state_dict()
        for name, rows in fitting.rows.items():
            taken[name] = mixed = fresh[name].clone()
            if rows:
                to, at = zip(*rows, strict=True)
                mixed[list(to)] = found[name].whole()[list(at)].to(mixed.dtype)
    return TakenWeights(taken, fitting)
