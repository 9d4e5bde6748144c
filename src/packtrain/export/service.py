"""The model behind the HTTP service: loads it, warms it up, and computes what requests ask, in batches."""

from __future__ import annotations

import io
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from PIL import Image

from packtrain.errors import Mistake
from packtrain.export.batching import Batched, Batcher, BatchTimes
from packtrain.export.messages import MAX_INPUTS, ModelEntry, ModelFacts, ServiceLimits
from packtrain.export.model import ExportedModel
from packtrain.export.predict import DecodeOptions
from packtrain.export.service_metrics import ServiceMetrics
from packtrain.recipes import Decoding, Prediction, Recipe
from packtrain.recipes.recipe import Network

_MAX_SEED = 2**62
_STUCK = 4  # times the timeout of a request that a batch may take before the service counts as stuck
_MIN_STUCK_SECONDS = 60.0

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class ServiceSettings:
    """Sizes of a batch and of the queue are numbers of inputs."""

    batch: int = 64
    queue: int = 1024
    max_bytes: int = 20_000_000
    timeout_seconds: float = 30.0
    gather_seconds: float = 0.002


@dataclass(frozen=True)
class ServedModel:
    """A model with what the service says about it. `load` is called once, in a thread."""

    name: str
    recipe: Recipe
    load: Callable[[], Network]
    form: str
    precision: str
    step: int
    made: float

    @classmethod
    def of(cls, model: ExportedModel, threads: int | None) -> ServedModel:
        manifest, origin = model.manifest, model.manifest.origin
        return cls(
            origin.run,
            model.recipe,
            lambda: model.network(threads),
            manifest.form,
            manifest.precision,
            origin.step,
            origin.made,
        )


@dataclass(frozen=True)
class Manner:
    """How the inputs of a request are computed; requests with equal manners share batches.

    `number` is not 0 for a request that is computed alone: samples depend on the seed and on the place in the batch.
    """

    decoding: Decoding
    is_conversation: bool = False
    number: int = 0


@dataclass(frozen=True)
class Question:
    """One input: a text, the bytes of an image, or the turns of a conversation."""

    value: str | bytes | tuple[str, ...]
    max_tokens: int | None = None


@dataclass(frozen=True)
class Written:
    """One output; `is_cut` if it was longer than the request allows."""

    text: str
    num_tokens: int
    is_cut: bool = False


@dataclass(frozen=True)
class Answer:
    """The result of a question: `outputs` has the best text first, and more with `n_best`."""

    prediction: Prediction
    tokens_read: int
    outputs: tuple[Written, ...]


class Service:
    """Answers questions as soon as `start` has loaded the model, until `drain`."""

    def __init__(self, model: ServedModel, settings: ServiceSettings) -> None:
        self.model, self.settings = model, settings
        self.metrics = ServiceMetrics()
        self.failure: Exception | None = None
        self.draining_since: float | None = None
        self._network: Network | None = None
        self._numbers = count(1)
        self._batcher: Batcher[Manner, Question, Answer] = Batcher(
            self._compute, settings.batch, settings.queue, settings.gather_seconds, self._count_batch
        )

    def start(self) -> None:
        """Load the model in a thread, so that health and readiness are answered meanwhile."""
        threading.Thread(target=self._load, name="load", daemon=True).start()

    @property
    def state(self) -> State:
        if self.failure is not None:
            return "failed"
        if self.draining_since is not None:
            return "draining"
        return "ready" if self.is_loaded else "loading"

    @property
    def is_loaded(self) -> bool:
        return self._network is not None

    @property
    def is_stuck(self) -> bool:
        """True if the model computes without end: only a new process helps."""
        return not self._batcher.is_working(max(_MIN_STUCK_SECONDS, _STUCK * self.settings.timeout_seconds))

    def drain(self) -> None:
        """Refuse new work. Called by a signal handler: it must not wait for a lock."""
        self.draining_since = self.draining_since or time.monotonic()

    def close(self) -> None:
        self._batcher.close()

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting

    @property
    def entry(self) -> ModelEntry:
        """Describe the model and what it accepts."""
        model, recipe = self.model, self.model.recipe
        limits = ServiceLimits(
            max_bytes=self.settings.max_bytes,
            max_inputs=min(MAX_INPUTS, self.settings.queue),
            timeout_seconds=self.settings.timeout_seconds,
        )
        facts = ModelFacts(
            recipe=str(recipe.job.recipe),
            form=model.form,
            precision=model.precision,
            step=model.step,
            inputs=recipe.inputs,
            chat=recipe.supports_chat,
            options=sorted(recipe.decode_options | ({"n_best"} if "beam" in recipe.decode_options else set())),
            beam=recipe.decoding.beam,
            limits=limits,
        )
        return ModelEntry(id=model.name, created=int(model.made), packtrain=facts)

    def manner(self, options: DecodeOptions, n_best: int | None = None, is_conversation: bool = False) -> Manner:
        """Return how a request with these options is computed; raise Mistake if they do not fit the model."""
        recipe = self.model.recipe
        given = options.given.keys() | ({"n_best"} if n_best is not None else set())
        for name in sorted(given - set(self.entry.packtrain.options)):
            raise Mistake(f"{name}: {recipe.job.recipe} does not support it")
        decoding = options.applied_to(recipe.decoding)
        is_sampled = decoding.nucleus is not None
        if is_sampled and (options.beam not in (None, 1) or n_best not in (None, 1)):
            raise Mistake("beam and n_best: beam search excludes sampling (nucleus, temperature); remove one of them")
        if not is_sampled and options.seed is not None:
            raise Mistake("seed: only sampling uses it; add nucleus or temperature, or remove seed")
        if n_best is not None:
            if options.beam is not None and n_best > options.beam:
                raise Mistake(f"n_best: {n_best} is more than beam, {options.beam}; raise beam")
            decoding = replace(decoding, n_best=n_best, beam=max(decoding.beam, n_best))
        has_seed = is_sampled and options.seed is not None
        return Manner(decoding, is_conversation, next(self._numbers) if has_seed else 0)

    def submit(self, manner: Manner, questions: Sequence[Question]) -> Future[Batched[Answer]]:
        return self._batcher.submit(manner, questions)

    def _load(self) -> None:
        try:
            network = self.model.load()
            # The first computation takes longer: memory is allocated, files are read, kernels are chosen.
            self._answers(network, Manner(replace(self.model.recipe.decoding, n_best=1)), [_warm_up(self.model.recipe)])
        except Exception as error:
            self.failure = error
        else:
            self._network = network

    def _compute(self, manner: Manner, questions: Sequence[Question]) -> list[Answer]:
        assert self._network is not None  # requests are refused before
        if manner.decoding.nucleus is not None and not manner.number:
            # Nobody asked for a seed, so answers differ from request to request.
            manner = replace(manner, decoding=replace(manner.decoding, seed=secrets.randbelow(_MAX_SEED)))
        return self._answers(self._network, manner, questions)

    def _answers(self, network: Network, manner: Manner, questions: Sequence[Question]) -> list[Answer]:
        recipe = self.model.recipe
        values: list[Any] = [one.value for one in questions]  # of the one kind that the recipe and the manner take
        if recipe.inputs == "images":
            return [Answer(one, 0, ()) for one in recipe.predict(network, values, manner.decoding)]
        if manner.is_conversation:
            made = recipe.reply(network, values, manner.decoding)
        else:
            made = recipe.predict(network, values, manner.decoding)
        # Tokens are counted here and not where requests are answered: a tokenizer belongs to one thread.
        vocabulary = recipe.pack.vocabulary
        asked = [one if manner.is_conversation else (one,) for one in values]
        read = iter(vocabulary.encode([text for texts in asked for text in texts]))
        counts = [sum(len(next(read)) for _ in texts) for texts in asked]
        rows = zip(questions, made, counts, strict=True)
        return [Answer(one, num_read, self._outputs(one, question.max_tokens)) for question, one, num_read in rows]

    def _outputs(self, made: Prediction, max_tokens: int | None) -> tuple[Written, ...]:
        vocabulary = self.model.recipe.pack.vocabulary
        texts = [one["output"] for one in made.details.get("n_best", ())] or [made.text]
        outputs = []
        for text, tokens in zip(texts, vocabulary.encode(texts), strict=True):
            if max_tokens is not None and len(tokens) > max_tokens:
                [cut] = vocabulary.decode([tokens[:max_tokens]])
                outputs.append(Written(cut, max_tokens, is_cut=True))
            else:
                outputs.append(Written(text, len(tokens)))
        return tuple(outputs)

    def count_answers(self, answers: Sequence[Answer]) -> None:
        """Count what was computed for the metrics."""
        amounts: dict[str, int] = {self.model.recipe.inputs: len(answers)}
        if self.model.recipe.inputs == "texts":
            amounts["tokens_read"] = sum(one.tokens_read for one in answers)
            amounts["tokens_written"] = sum(written.num_tokens for one in answers for written in one.outputs)
        self.metrics.count_amounts(amounts)

    def _count_batch(self, times: BatchTimes) -> None:
        self.metrics.count_batch(times.inputs, times.seconds)


def _warm_up(recipe: Recipe) -> Question:
    if recipe.inputs == "texts":
        return Question("Hello, world!")
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "gray").save(file, "PNG")
    return Question(file.getvalue())
