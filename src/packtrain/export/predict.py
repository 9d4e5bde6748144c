"""Predictions with the model of a run, or with an exported one."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packtrain.data.pack import Pack
from packtrain.data.threads import in_threads, num_threads
from packtrain.errors import Mistake, quoted
from packtrain.export.model import is_model, read_model
from packtrain.identity import install_command
from packtrain.pack.raw import is_text
from packtrain.pack.tiles import Tiled
from packtrain.recipes import Decoding, Prediction, Recipe, recipe_of
from packtrain.recipes.images import ImageRecipe
from packtrain.recipes.recipe import Conversational, InputMistake, Network
from packtrain.run.checkpoint import Checkpoint, Choice, CorruptCheckpoint, candidates, fetch, parts_of
from packtrain.run.run import Run
from packtrain.run.trust import Accept, refuse, require_trust
from packtrain.system import cache_directory

if TYPE_CHECKING:
    from torch import nn

MAX_CHARACTERS = 1_000_000  # of a text, for any recipe; those of Packtrain accept fewer

_TEXTS_AT_ONCE = 2048  # sorted by length and divided into batches
_IMAGES_AT_ONCE = 128  # kept in memory together, as files

_COMPUTED = ("recipe", "data", "model", "train", "evaluate")  # the sections of a job that the model of a run needs


@dataclass(frozen=True)
class DecodeOptions:
    """Decoding options of `packtrain predict`; None leaves the choice to the recipe."""

    beam: int | None = None
    nucleus: float | None = None
    temperature: float | None = None
    repetition: float | None = None
    seed: int | None = None
    n_best: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def applied_to(self, decoding: Decoding) -> Decoding:
        chosen = self.given
        if self.temperature is not None:
            chosen.setdefault("nucleus", 1.0)  # a temperature alone means sampling from all tokens
        return replace(decoding, **chosen)


class Predicted(NamedTuple):
    """An input with its number, from 1, and its prediction."""

    number: int
    given: str
    prediction: Prediction


@dataclass(frozen=True)
class Predictor:
    """A trained model, in torch or in an exported form, with the recipe that knows how to use it."""

    recipe: Recipe
    model: nn.Module | Network
    step: int

    def predict(self, inputs: Sequence[str], options: DecodeOptions) -> list[Prediction]:
        """Return a prediction for every input; if one of them is invalid, predict nothing."""
        decoding = self.decoding(options)
        self.check(inputs)
        return self.recipe.predict(self.model, inputs, decoding)

    def stream(
        self, inputs: Iterable[str], options: DecodeOptions, skip: Callable[[str], None] | None = None
    ) -> Iterator[list[Predicted]]:
        """Yield predictions in the order of the inputs, some thousands at a time, so that memory is bounded.

        An invalid input ends it, after the predictions for those before. If there is a `skip`, it is told why an image
        is unusable, which is then left out.
        """
        decoding = self.decoding(options)
        is_text = self.recipe.inputs == "texts"
        remaining = iter(inputs)
        for turn in count():
            texts = list(islice(remaining, _TEXTS_AT_ONCE if is_text else _IMAGES_AT_ONCE))
            if not texts:
                return
            first = 1 + turn * (_TEXTS_AT_ONCE if is_text else _IMAGES_AT_ONCE)
            self.check(texts, first)
            numbered = enumerate(self._read(texts, skip), first)
            rows = [(number, text, read) for number, (text, read) in numbered if read is not None]
            # What is sampled depends on the number of a text among those at once: the next ones need another seed.
            turn_decoding = replace(decoding, seed=decoding.seed + (turn << 32))
            try:
                predictions = self.recipe.predict(self.model, [read for _, _, read in rows], turn_decoding)
            except InputMistake as mistake:
                if first == 1 and len(texts) == 1:
                    raise
                # It knows an input's number only among those that are predicted at once.
                raise Mistake(f"input {first + mistake.index} {mistake.fault}") from None
            yield [
                Predicted(number, text, prediction)
                for (number, text, _), prediction in zip(rows, predictions, strict=True)
            ]

    def _read(self, inputs: Sequence[str], skip: Callable[[str], None] | None) -> Sequence[tuple[str, Any]]:
        """Return each input with what the recipe gets for it; None for an image that is skipped."""
        if skip is None or not isinstance(self.recipe, ImageRecipe):
            return [(text, text) for text in inputs]

        def read(path: str) -> Tiled | Mistake:
            try:
                return recipe.read(path)
            except Mistake as fault:
                return fault

        recipe, inputs_read = self.recipe, []
        for path, image in zip(inputs, in_threads(read, inputs, num_threads()), strict=True):
            if isinstance(image, Mistake):
                skip(str(image))
            inputs_read.append((path, None if isinstance(image, Mistake) else image))
        return inputs_read

    def check(self, inputs: Iterable[str], first: int = 1) -> None:
        """Raise Mistake if an input is invalid for any recipe; `first` is the number of the first one."""
        for number, text in enumerate(inputs, first):
            if self.recipe.inputs == "texts":
                _check_text(text, f"input {number}")
            elif not text.strip():
                raise Mistake(f"input {number} is empty; give the path of an image")

    def converse(self, turns: Sequence[str], options: DecodeOptions) -> Prediction:
        """Return the reply to these turns; sampled replies use another seed in every turn."""
        decoding = self.check_conversation(options)
        _check_text(turns[-1], "the input")
        assert isinstance(self.recipe, Conversational)
        [reply] = self.recipe.reply(self.model, [turns], replace(decoding, seed=decoding.seed + len(turns)))
        return reply

    def check_conversation(self, options: DecodeOptions) -> Decoding:
        """Return how replies are generated; raise Mistake if the recipe does not support chat or an option."""
        if not isinstance(self.recipe, Conversational):
            raise Mistake(f"--chat: {self.recipe.job.recipe} does not support it; pass inputs without --chat")
        return self.decoding(options)

    def decoding(self, options: DecodeOptions) -> Decoding:
        """Return how outputs are generated; raise Mistake if the recipe does not support an option."""
        for name in sorted(options.given.keys() - self.recipe.decode_options):
            raise Mistake(f"--{name.replace('_', '-')}: {self.recipe.job.recipe} does not support it")
        decoding = options.applied_to(self.recipe.decoding)
        is_sampled = decoding.nucleus is not None
        if is_sampled and options.beam not in (None, 1):
            raise Mistake("--beam: beam search excludes sampling (--nucleus, --temperature); remove one of them")
        if not is_sampled and options.seed is not None:
            raise Mistake("--seed: only sampling uses it; add --nucleus or --temperature, or remove --seed")
        if decoding.n_best > (1 if is_sampled else decoding.beam):
            fix = "sampling has one output" if is_sampled else f"add --beam {decoding.n_best} or more"
            raise Mistake(f"--n-best: {decoding.n_best} is more than there are; {fix}")
        return decoding


def _check_text(text: str, name: str) -> None:
    if len(text) >= MAX_CHARACTERS:
        raise Mistake(f"{name} has {MAX_CHARACTERS:,} characters or more; shorten it: {text[:40]!r}...")
    # Python decodes invalid bytes of an argument or a line as lone surrogates.
    if not is_text(text):
        raise Mistake(f"{name} is not valid UTF-8; convert it first")


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def load_predictor(
    run: Run, choice: Choice = "last", warn: Callable[[str], None] = _warn, accept: Accept = refuse
) -> Predictor:
    """Load a checkpoint of a run (see `load_model`) to predict with it."""
    recipe, model, checkpoint = load_model(run, choice, warn, accept)
    return Predictor(recipe, model, checkpoint.step)


def open_model(folder: Path) -> Predictor:
    """Open the folder of an exported model to predict with it. Nothing here needs torch."""
    model = read_model(folder)
    return Predictor(model.recipe, model.network(), model.manifest.origin.step)


def is_folder(name: str) -> bool:
    """True if a name is that of a model's folder, not of a run, whose name has no slash."""
    return "/" in name or is_model(Path(name))


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
    """Load a checkpoint, with the averaged weights if it has any, on the first GPU if there is one.

    If it is damaged, warn and use the next; there is none if a step was chosen. `accept` decides about a user's recipe
    (run/trust.py), and `purpose` is the command that needs the model.
    """
    recipe = recipe_for(run, accept, purpose)
    import torch

    from packtrain.train.state import load_weights

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
            check_origin(run, chosen, Path(directory))  # first: its error is clearer than one about tensor shapes
            model = recipe.build_model().eval()
            load_weights(model, Path(directory), weights_file(chosen))
            return TrainedModel(recipe, model.to("cuda" if torch.cuda.is_available() else "cpu"), chosen)


def recipe_for(run: Run, accept: Accept = refuse, purpose: str = "predict") -> Recipe:
    """Return the recipe of a run on its pack; raise Mistake if this machine cannot or may not compute with it."""
    if run.job.recipe is None:
        raise Mistake(f"{run.name} runs a program; {purpose} works for recipes only")
    require_trust(run, accept, sections=_COMPUTED)
    # Before anything is downloaded: a client without torch gets one line instead of a traceback.
    try:
        import packtrain.train.state  # noqa: F401
    except ImportError as error:
        raise Mistake(
            f"{purpose} needs torch for a run; run `{install_command('train')}`, or use an exported model"
        ) from error
    return recipe_of(run)(run.job, Pack(run.store, run.pack_name(), cache_directory() / "packs"))


def weights_file(checkpoint: Checkpoint) -> str:
    """Return the name of the file with the weights that training evaluated: their average if there is one."""
    from packtrain.train.state import EMA_FILE, MODEL_FILE

    return EMA_FILE if parts_of(EMA_FILE, (file.name for file in checkpoint.files)) else MODEL_FILE


def check_origin(run: Run, checkpoint: Checkpoint, directory: Path) -> None:
    """Refuse a checkpoint copied from a run with another recipe, model or vocabulary."""
    from packtrain.train.state import read_description

    description, job = read_description(directory), run.job
    traits = {
        "recipe": (description.recipe, job.recipe),
        "model": (description.model, {"size": job.model.size, **job.model.options}),
        "data": (description.pack, run.pack_name()),
    }
    for trait, (its, expected) in traits.items():
        if its != expected:
            raise Mistake(
                f"checkpoint {checkpoint.name} belongs to another run: its {trait} is {quoted(str(its))}, that of"
                f" {run.name} is {quoted(str(expected))}"
            )
