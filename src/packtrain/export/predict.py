"""A run's model, ready to be used."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFinished, quoted
from packtrain.recipes import Decoding, Prediction, Recipe, recipe_of
from packtrain.run.checkpoint import Checkpoint, CorruptCheckpoint, committed, fetch
from packtrain.run.checkpoint import best as best_of
from packtrain.run.run import Run
from packtrain.system import cache_directory

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

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def on(self, decoding: Decoding) -> Decoding:
        given = self.given
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
        for number, one in enumerate(inputs, 1):
            if self.recipe.inputs == "texts":
                _check_text(one, f"input {number}")
            elif not one.strip():
                raise Mistake(f"input {number} is empty; it must be the path of a picture")
        return self.recipe.predict(self.model, inputs, self._decoding(wishes))

    def converse(self, turns: Sequence[str], wishes: Wishes) -> Prediction:
        """What the model says after these turns; every turn has its own luck where replies are drawn."""
        decoding = self.check_conversation(wishes)
        _check_text(turns[-1], "that")
        return self.recipe.converse(self.model, turns, replace(decoding, seed=decoding.seed + len(turns)))

    def check_conversation(self, wishes: Wishes) -> Decoding:
        """How replies are found; refuses what does not converse, and wishes that say nothing."""
        if not self.recipe.converses:
            raise Mistake(f"{self.recipe.job.recipe} does not converse; give it its inputs without --chat")
        return self._decoding(wishes)

    def _decoding(self, wishes: Wishes) -> Decoding:
        for name in wishes.given.keys() - self.recipe.heeds:
            raise Mistake(f"--{name}: {self.recipe.job.recipe} has no use for it")
        decoding = wishes.on(self.recipe.decoding)
        is_drawn = decoding.nucleus is not None
        if is_drawn and wishes.beam not in (None, 1):
            raise Mistake(
                "--beam: an output is drawn (--nucleus, --temperature) or searched for; leave one of them out"
            )
        if not is_drawn and wishes.seed is not None:
            raise Mistake("--seed: nothing is drawn; add --nucleus or --temperature, or leave it out")
        return decoding


def _check_text(text: str, what: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise Mistake(f"{what} is not valid UTF-8; convert it first")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def load_predictor(run: Run, best: bool, complain: Callable[[str], None] = _tell) -> Predictor:
    """The averaged weights of the last checkpoint, or of the best, where there is an average.

    One that is damaged is complained of, and the next takes its place.
    """
    if run.job.recipe is None:
        raise Mistake(f"{run.name} runs a program: only its author knows how to use its model")
    try:
        import packtrain.train.state  # noqa: F401
    except ImportError as error:
        raise Mistake("predictions need torch: pip install 'packtrain[train]'") from error
    remaining = committed(run)
    if not remaining:
        raise NotFinished(f"{run.name} has no checkpoint yet; `packtrain show {run.name}` says how far it is")
    recipe = recipe_of(run)(run.job, Pack(run.store, run.pack_name(), cache_directory() / "packs"))
    while True:
        chosen = best_of(remaining) if best else remaining[-1]
        assert chosen is not None
        remaining.remove(chosen)
        with tempfile.TemporaryDirectory(prefix="packtrain-predict-") as directory:
            try:
                fetch(run, chosen, Path(directory))
            except CorruptCheckpoint as error:
                if not remaining:
                    raise
                complain(f"{error}; passed over")
                continue
            return Predictor(recipe, _loaded(run, recipe, chosen, Path(directory)), chosen.step)


def _loaded(run: Run, recipe: Recipe, checkpoint: Checkpoint, directory: Path) -> nn.Module:
    """On the first GPU, where there is one."""
    import torch

    from packtrain.train.state import EMA_FILE, MODEL_FILE, load_weights

    _refuse_others(run, checkpoint, directory)
    model = recipe.build_model().eval()
    names = {file.name for file in checkpoint.files}
    load_weights(model, directory / (EMA_FILE if EMA_FILE in names else MODEL_FILE))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


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
