"""Predictions with the model of a run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFinished, quoted
from packtrain.identity import install_command
from packtrain.pack.raw import is_text
from packtrain.recipes import Decoding, Prediction, Recipe, recipe_of
from packtrain.run.checkpoint import Checkpoint, CorruptCheckpoint, committed, fetch
from packtrain.run.checkpoint import best as best_of
from packtrain.run.run import Run
from packtrain.run.trust import Accept, refuse, require_trust
from packtrain.system import cache_directory

if TYPE_CHECKING:
    from torch import nn


MAX_CHARACTERS = 1_000_000  # of a text, for any recipe; those of Packtrain accept fewer


@dataclass(frozen=True)
class DecodeOptions:
    """Decoding options of `packtrain predict`; None leaves the choice to the recipe."""

    beam: int | None = None
    nucleus: float | None = None
    temperature: float | None = None
    repetition: float | None = None
    seed: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def applied_to(self, decoding: Decoding) -> Decoding:
        given = self.given
        if self.temperature is not None:
            given.setdefault("nucleus", 1.0)  # a temperature alone means sampling from all tokens
        return replace(decoding, **given)


@dataclass(frozen=True)
class Predictor:
    recipe: Recipe
    model: nn.Module
    step: int

    def predict(self, inputs: Sequence[str], options: DecodeOptions) -> list[Prediction]:
        """Return a prediction for every input; if one of them is invalid, predict nothing."""
        for number, one in enumerate(inputs, 1):
            if self.recipe.inputs == "texts":
                _check_text(one, f"input {number}")
            elif not one.strip():
                raise Mistake(f"input {number} is empty; give the path of an image")
        return self.recipe.predict(self.model, inputs, self._decoding(options))

    def converse(self, turns: Sequence[str], options: DecodeOptions) -> Prediction:
        """Return the reply to these turns; sampled replies use another seed in every turn."""
        decoding = self.check_conversation(options)
        _check_text(turns[-1], "the input")
        return self.recipe.converse(self.model, turns, replace(decoding, seed=decoding.seed + len(turns)))

    def check_conversation(self, options: DecodeOptions) -> Decoding:
        """Return how replies are generated; raise Mistake if the recipe does not support chat or an option."""
        if not self.recipe.supports_chat:
            raise Mistake(f"--chat: {self.recipe.job.recipe} does not support it; pass inputs without --chat")
        return self._decoding(options)

    def _decoding(self, options: DecodeOptions) -> Decoding:
        for name in options.given.keys() - self.recipe.decode_options:
            raise Mistake(f"--{name}: {self.recipe.job.recipe} does not support it")
        decoding = options.applied_to(self.recipe.decoding)
        is_sampled = decoding.nucleus is not None
        if is_sampled and options.beam not in (None, 1):
            raise Mistake("--beam: beam search excludes sampling (--nucleus, --temperature); remove one of them")
        if not is_sampled and options.seed is not None:
            raise Mistake("--seed: only sampling uses it; add --nucleus or --temperature, or remove --seed")
        return decoding


def _check_text(text: str, what: str) -> None:
    if len(text) >= MAX_CHARACTERS:
        raise Mistake(f"{what} has {MAX_CHARACTERS:,} characters or more; shorten it: {text[:40]!r}...")
    # Python decodes invalid bytes of an argument or a line as lone surrogates.
    if not is_text(text):
        raise Mistake(f"{what} is not valid UTF-8; convert it first")


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def load_predictor(run: Run, best: bool, warn: Callable[[str], None] = _warn, accept: Accept = refuse) -> Predictor:
    """Load the last checkpoint or the best one, with the averaged weights if it has any.

    If a checkpoint is damaged, warn and use the next. `accept` decides about a user's recipe (run/trust.py).
    """
    if run.job.recipe is None:
        raise Mistake(f"{run.name} runs a program; predict works for recipes only")
    if run.job.has_own_code:
        require_trust(run, accept)
    # Before anything is downloaded: a client without torch gets one line instead of a traceback.
    try:
        import packtrain.train.state  # noqa: F401
    except ImportError as error:
        raise Mistake(f"predict needs torch; run `{install_command('train')}`") from error
    remaining = committed(run)
    if not remaining:
        raise NotFinished(f"{run.name} has no checkpoint yet; see `packtrain show {run.name}`")
    recipe = recipe_of(run)(run.job, Pack(run.store, run.pack_name(), cache_directory() / "packs"))
    while True:
        chosen = best_of(remaining) if best else remaining[-1]
        assert chosen is not None
        remaining.remove(chosen)  # if it is damaged, the next round chooses among the others
        with tempfile.TemporaryDirectory(prefix="packtrain-predict-") as directory:
            try:
                fetch(run, chosen, Path(directory))
            except CorruptCheckpoint as error:
                if not remaining:
                    raise
                warn(f"{error}; skipped")
                continue
            return Predictor(recipe, _loaded(run, recipe, chosen, Path(directory)), chosen.step)


def _loaded(run: Run, recipe: Recipe, checkpoint: Checkpoint, directory: Path) -> nn.Module:
    """Build the model and load its weights, on the first GPU if there is one."""
    import torch

    from packtrain.train.state import EMA_FILE, MODEL_FILE, load_weights

    _check_origin(run, checkpoint, directory)  # first: its error is clearer than one about tensor shapes
    model = recipe.build_model().eval()
    names = {file.name for file in checkpoint.files}
    # The average is what training evaluated, so predictions use it, too.
    load_weights(model, directory / (EMA_FILE if EMA_FILE in names else MODEL_FILE))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _check_origin(run: Run, checkpoint: Checkpoint, directory: Path) -> None:
    """Refuse a checkpoint copied from a run with another recipe, model or vocabulary."""
    from packtrain.train.state import read_description

    found, job = read_description(directory), run.job
    traits = {
        "recipe": (found.recipe, job.recipe),
        "model": (found.model, {"size": job.model.size, **job.model.options}),
        "data": (found.pack, run.pack_name()),
    }
    for trait, (its, own) in traits.items():
        if its != own:
            raise Mistake(
                f"checkpoint {checkpoint.name} belongs to another run: its {trait} is {quoted(str(its))}, that of"
                f" {run.name} is {quoted(str(own))}"
            )
