"""A run's model, ready to be used."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.checkpoint import best as best_of
from packtrain.checkpoint import committed, fetch
from packtrain.control import cache_directory
from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFinished
from packtrain.recipes import Recipe, recipe_class
from packtrain.runs import Run

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Predictor:
    recipe: Recipe
    model: nn.Module
    step: int

    def predict(self, inputs: Sequence[str], beam: int) -> list[str]:
        for number, text in enumerate(inputs, 1):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise Mistake(f"input {number} is not valid UTF-8; convert it first")
        return self.recipe.predict(self.model, inputs, beam)


def load_predictor(run: Run, best: bool) -> Predictor:
    """The averaged weights of the last checkpoint, or of the best, where there is an average."""
    job = run.job
    if job.recipe is None:
        raise Mistake(f"{run.name} runs a program: only its author knows how to use its model")
    try:
        from packtrain.train.state import AVERAGE_FILE, MODEL_FILE, load_weights
    except ImportError as error:
        raise Mistake("predictions need torch: pip install 'packtrain[train]'") from error
    checkpoints = committed(run)
    chosen = best_of(checkpoints) if best else next(reversed(checkpoints), None)
    if chosen is None:
        raise NotFinished(f"{run.name} has no checkpoint yet; `packtrain show {run.name}` says how far it is")
    recipe = recipe_class(job.recipe)(job, Pack(run.store, run.pack_name(), cache_directory() / "packs"))
    model = recipe.build_model().eval()
    with tempfile.TemporaryDirectory(prefix="packtrain-predict-") as directory:
        fetch(run, chosen, Path(directory))
        names = {file.name for file in chosen.files}
        load_weights(model, Path(directory) / (AVERAGE_FILE if AVERAGE_FILE in names else MODEL_FILE))
    return Predictor(recipe, model, chosen.step)
