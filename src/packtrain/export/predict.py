"""A run's model, ready to be used."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.checkpoint import Checkpoint, committed, fetch
from packtrain.checkpoint import best as best_of
from packtrain.control import cache_directory
from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFinished
from packtrain.pack.raw import quoted
from packtrain.recipes import Decoding, Prediction, Recipe, recipe_of
from packtrain.runs import Run

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Wishes:
    """What a person says of how outputs are to be searched for; the rest is the recipe's choice."""

    beam: int | None = None
    nucleus: float | None = None
    temperature: float | None = None
    repetition: float | None = None
    seed: int | None = None

    def on(self, decoding: Decoding) -> Decoding:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if self.temperature is not None:
            given.setdefault("nucleus", 1.0)  # a temperature means to draw; unless told otherwise, from everything
        return replace(decoding, **given)


@dataclass(frozen=True)
class Predictor:
    recipe: Recipe
    model: nn.Module
    step: int

    def predict(self, inputs: Sequence[str], wishes: Wishes) -> list[Prediction]:
        """A prediction for every input; nothing is predicted when one of them is no input at all."""
        if self.recipe.inputs == "texts":
            for number, text in enumerate(inputs, 1):
                _check_text(text, f"input {number}")
        return self.recipe.predict(self.model, inputs, wishes.on(self.recipe.decoding))

    def converse(self, turns: Sequence[str], wishes: Wishes) -> Prediction:
        """What the model says after these turns; every turn has its own luck where replies are drawn."""
        if not self.recipe.converses:
            raise Mistake(f"{self.recipe.job.recipe} does not converse; give it its inputs without --chat")
        _check_text(turns[-1], "that")
        decoding = wishes.on(self.recipe.decoding)
        return self.recipe.converse(self.model, turns, replace(decoding, seed=decoding.seed + len(turns)))


def _check_text(text: str, what: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Mistake(f"{what} is not valid UTF-8; convert it first")


def load_predictor(run: Run, best: bool) -> Predictor:
    """The averaged weights of the last checkpoint, or of the best, where there is an average."""
    if run.job.recipe is None:
        raise Mistake(f"{run.name} runs a program: only its author knows how to use its model")
    try:
        from packtrain.train.state import AVERAGE_FILE, MODEL_FILE, load_weights
    except ImportError as error:
        raise Mistake("predictions need torch: pip install 'packtrain[train]'") from error
    checkpoints = committed(run)
    chosen = best_of(checkpoints) if best else next(reversed(checkpoints), None)
    if chosen is None:
        raise NotFinished(f"{run.name} has no checkpoint yet; `packtrain show {run.name}` says how far it is")
    recipe = recipe_of(run)(run.job, Pack(run.store, run.pack_name(), cache_directory() / "packs"))
    with tempfile.TemporaryDirectory(prefix="packtrain-predict-") as directory:
        fetch(run, chosen, Path(directory))
        _refuse_others(run, chosen, Path(directory))
        model = recipe.build_model().eval()
        names = {file.name for file in chosen.files}
        load_weights(model, Path(directory) / (AVERAGE_FILE if AVERAGE_FILE in names else MODEL_FILE))
    return Predictor(recipe, model, chosen.step)


def _refuse_others(run: Run, checkpoint: Checkpoint, directory: Path) -> None:
    """A checkpoint that was brought here from elsewhere may be of another recipe, size or vocabulary."""
    from packtrain.train.state import read_description

    found, job = read_description(directory), run.job
    traits = {
        "recipe": (found.recipe, job.recipe),
        "model": (found.model, {"size": job.model.size, **job.model.options}),
        "data": (found.pack, run.pack_name()),
    }
    for trait, (its, wanted) in traits.items():
        if its != wanted:
            raise Mistake(
                f"checkpoint {checkpoint.name} has the {trait} {quoted(str(its))}, and {run.name} has"
                f" {quoted(str(wanted))}: it belongs to another run"
            )
