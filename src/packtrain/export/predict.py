"""Predictions with the model of a run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFinished, NotFound, quoted
from packtrain.identity import install_command
from packtrain.pack.raw import is_text
from packtrain.recipes import Decoding, Prediction, Recipe, recipe_of
from packtrain.run.checkpoint import Checkpoint, CorruptCheckpoint, best_first, committed, fetch
from packtrain.run.run import Run
from packtrain.run.trust import Accept, refuse, require_trust
from packtrain.system import cache_directory

if TYPE_CHECKING:
    from torch import nn

Choice = Literal["best", "last"] | int
"""A checkpoint of a run: by its score, the newest, or by its step."""

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


def load_predictor(
    run: Run, choice: Choice = "last", warn: Callable[[str], None] = _warn, accept: Accept = refuse
) -> Predictor:
    """Load a checkpoint of a run (see `load_model`) to predict with it."""
    recipe, model, checkpoint = load_model(run, choice, warn, accept)
    return Predictor(recipe, model, checkpoint.step)


class TrainedModel(NamedTuple):
    """The model of a run in torch, with the weights of a checkpoint."""

    recipe: Recipe
    model: nn.Module
    checkpoint: Checkpoint


def load_model(
    run: Run,
    choice: Choice = "last",
    warn: Callable[[str], None] = _warn,
    accept: Accept = refuse,
    purpose: str = "predict",
) -> TrainedModel:
    """Load a checkpoint, with the averaged weights if it has any.

    If it is damaged, warn and use the next; there is none if a step was chosen. `accept` decides about a user's recipe
    (run/trust.py), and `purpose` is the command that needs the model.
    """
    recipe = recipe_for(run, accept, purpose)
    remaining = list(candidates(run, choice))
    while True:
        chosen = remaining.pop(0)
        with tempfile.TemporaryDirectory(prefix=f"packtrain-{purpose}-") as directory:
            try:
                fetch(run, chosen, Path(directory))
            except CorruptCheckpoint as error:
                if not remaining:
                    raise
                warn(f"{error}; skipped")
                continue
            return TrainedModel(recipe, _loaded(run, recipe, chosen, Path(directory)), chosen)


def recipe_for(run: Run, accept: Accept = refuse, purpose: str = "predict") -> Recipe:
    """Return the recipe of a run on its pack; raise Mistake if this machine cannot or may not compute with it."""
    if run.job.recipe is None:
        raise Mistake(f"{run.name} runs a program; {purpose} works for recipes only")
    if run.job.has_own_code:
        require_trust(run, accept)
    # Before anything is downloaded: a client without torch gets one line instead of a traceback.
    try:
        import packtrain.train.state  # noqa: F401
    except ImportError as error:
        raise Mistake(
            f"{purpose} needs torch for a run; run `{install_command('train')}`, or use an exported model"
        ) from error
    return recipe_of(run)(run.job, Pack(run.store, run.pack_name(), cache_directory() / "packs"))


def choice_of(text: str) -> Choice:
    """Read the value of `--checkpoint`."""
    if text == "best":
        return "best"
    if text == "last":
        return "last"
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise Mistake(f"--checkpoint: must be best, last or the number of a step, not {quoted(text)}")
    return int(text)


def candidates(run: Run, choice: Choice) -> Sequence[Checkpoint]:
    """Return the checkpoints that the choice allows, the preferred one first: at least one."""
    found = committed(run)
    if not found:
        raise NotFinished(f"{run.name} has no checkpoint yet; see `packtrain show {run.name}`")
    if choice == "best":
        return best_first(found)
    if choice == "last":
        return found[::-1]
    steps = sorted({one.step for one in found})
    if choice not in steps:
        raise NotFound(f"{run.name} has no checkpoint of step {choice}; it has {', '.join(map(str, steps))}")
    return [one for one in reversed(found) if one.step == choice]


def weights_file(checkpoint: Checkpoint) -> str:
    """Return the file with the weights that training evaluated: their average if there is one."""
    from packtrain.train.state import EMA_FILE, MODEL_FILE

    return EMA_FILE if EMA_FILE in {file.name for file in checkpoint.files} else MODEL_FILE


def _loaded(run: Run, recipe: Recipe, checkpoint: Checkpoint, directory: Path) -> nn.Module:
    """Build the model and load its weights, on the first GPU if there is one."""
    import torch

    from packtrain.train.state import load_weights

    check_origin(run, checkpoint, directory)  # first: its error is clearer than one about tensor shapes
    model = recipe.build_model().eval()
    load_weights(model, directory / weights_file(checkpoint))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def check_origin(run: Run, checkpoint: Checkpoint, directory: Path) -> None:
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
