"""The model behind the HTTP service: loads it, warms it up, and computes what requests ask, in batches."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from packtrain.errors import Mistake
from packtrain.export.batching import Batched, Batcher, BatchTimes
from packtrain.export.messages import MAX_INPUTS, ActionWords, ModelEntry, ModelFacts, ServiceLimits
from packtrain.export.model import ExportedModel, trial_inputs
from packtrain.export.predict import DecodeOptions
from packtrain.pack.picture import pixels_to_decode
from packtrain.recipes import Decoding, Prediction, Recipe
from packtrain.recipes.forms import form_of
from packtrain.recipes.images import ImageRecipe
from packtrain.recipes.pairs import MAX_INPUT_TOKENS, PairRecipe
from packtrain.recipes.recipe import Conversational, InputMistake, Network

# The work that counts as one input: tokens that are read, or written in every hypothesis, and pixels of a file.
_TOKENS_PER_INPUT, _CHARACTERS_PER_INPUT, _PIXELS_PER_INPUT = 512, 2048, 1_000_000
# And the time to read what precedes the pixels, mostly below a millisecond: it may have millions of small parts.
_SECONDS_PER_INPUT = 0.01
# Of one text, which cannot be divided: others wait for all of it. A model's own beam is accepted for any length.
_MAX_TOKENS = 8192

_SAMPLING = {"nucleus", "temperature", "seed"}  # options
_MAX_SEED = 2**62
_STUCK = 4  # times the timeout of a request that a batch may take before the service counts as stuck
_MIN_STUCK_SECONDS = 60.0

# Upper bounds of the histograms.
_SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INPUTS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class ServiceSettings:
    """Sizes of a batch and of the queue are numbers of inputs, of which a large one counts as several.

    A batch is smaller if it would take longer than `turn_seconds`, which requests of others would have to wait.
    """

    batch: int = 64
    queue: int = 1024
    max_bytes: int = 20_000_000
    timeout_seconds: float = 30.0
    gather_seconds: float = 0.002
    turn_seconds: float = 2.0

    @property
    def largest_request(self) -> int:
        """Half of the queue, so that no request alone makes it full."""
        return max(1, self.queue // 2)


@dataclass(frozen=True)
class ServedModel:
    """A model with what the service says about it. `load` is called once, in a thread."""

    name: str
    recipe: Recipe
    load: Callable[[], Network]
    form: str
    precision: str
    step: int
    created: float
    can_sample: bool = True

    @property
    def options(self) -> frozenset[str]:
        """Options of `DecodeOptions` that change its outputs."""
        options = self.recipe.decode_options
        return options if self.can_sample else options - _SAMPLING

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
            form_of(type(model.recipe), manifest.form).can_sample,
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
    """One input: a text, the bytes of an image, or a conversation's turns; `number` is its place in the request."""

    value: str | bytes | tuple[str, ...]
    max_tokens: int | None = None
    number: int = 0


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


class ServiceMetrics:
    """Metrics for Prometheus. Thread-safe: the event loop counts requests, the thread that computes counts batches.

    The registry is not the global one, which two services in a process would share and which describes the process.
    """

    def __init__(self, service: Service) -> None:
        disable_created_metrics()  # a second series for each of these, which nobody asks for
        self.registry = CollectorRegistry()
        model = service.model
        labels = {"model": model.name, "recipe": str(model.recipe.job.recipe), "form": model.form}
        labels["precision"] = model.precision
        info = Gauge("packtrain_model_info", "The model that is served.", list(labels), registry=self.registry)
        info.labels(**labels).set(1)
        self.add_gauge("packtrain_ready", "1 if requests are answered.", lambda: service.state == "ready")
        waiting_help = "Inputs waiting to be computed; a large one counts as several."
        self.add_gauge("packtrain_queue_inputs", waiting_help, lambda: service.num_waiting)
        self.add_gauge("packtrain_queue_limit", "Inputs that may wait.", lambda: service.settings.queue)
        self._requests = Counter(
            "packtrain_http_requests", "Requests by route and status.", ["route", "code"], registry=self.registry
        )
        self._latencies = Histogram(
            "packtrain_http_request_seconds",
            "Time from the headers of a request to the end of its response.",
            ["route"],
            buckets=_SECONDS_BOUNDS,
            registry=self.registry,
        )
        self._batches = Histogram(
            "packtrain_batch_inputs",
            "Inputs that were computed together.",
            buckets=_INPUTS_BOUNDS,
            registry=self.registry,
        )
        self._batch_seconds = Histogram(
            "packtrain_batch_seconds", "Time to compute a batch.", buckets=_SECONDS_BOUNDS, registry=self.registry
        )
        self._processed = Counter(
            "packtrain_processed", "Inputs, and tokens that were read and written.", ["unit"], registry=self.registry
        )

    def add_gauge(self, name: str, documentation: str, measure: Callable[[], float]) -> None:
        """Add a number that is measured when the metrics are read."""
        Gauge(name, documentation, registry=self.registry).set_function(measure)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._latencies.labels(route).observe(seconds)

    def count_batch(self, times: BatchTimes) -> None:
        self._batches.observe(times.inputs)
        self._batch_seconds.observe(times.seconds)

    def count_processed(self, unit: str, amount: int) -> None:
        """Add to what was processed: texts or images, tokens that were read and written."""
        self._processed.labels(unit).inc(amount)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Service:
    """Answers questions as soon as `start` has loaded the model, until `drain`."""

    def __init__(self, model: ServedModel, settings: ServiceSettings) -> None:
        self.model, self.settings = model, settings
        self.metrics = ServiceMetrics(self)
        self.failure: Exception | None = None
        self.draining_since: float | None = None
        self._network: Network | None = None
        self._numbers = count(1)
        self._loading = threading.Thread(target=self._load, name="load", daemon=True)
        self._batcher: Batcher[Manner, Question, Answer] = Batcher(
            self._compute,
            settings.batch,
            settings.queue,
            settings.gather_seconds,
            settings.turn_seconds,
            self.metrics.count_batch,
        )

    def start(self) -> None:
        """Load the model in a thread, so that health and readiness are answered meanwhile."""
        self._loading.start()

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
    def is_busy(self) -> bool:
        """True until the threads that compute have ended: a process that ends before them would crash."""
        return self._loading.is_alive() or self._batcher.is_alive

    @property
    def num_waiting(self) -> int:
        return self._batcher.num_waiting

    @property
    def entry(self) -> ModelEntry:
        """Describe the model and what it accepts."""
        model, recipe = self.model, self.model.recipe
        limits = ServiceLimits(
            max_bytes=self.settings.max_bytes,
            max_inputs=min(MAX_INPUTS, self.settings.largest_request),
            timeout_seconds=self.settings.timeout_seconds,
        )
        words = recipe.words
        facts = ModelFacts(
            recipe=str(recipe.job.recipe),
            form=model.form,
            precision=model.precision,
            step=model.step,
            inputs=recipe.inputs,
            chat=isinstance(recipe, Conversational),
            words=ActionWords(action=words.action, doing=words.doing, done=words.done, result=words.result),
            options=sorted(model.options),
            beam=recipe.decoding.beam,
            limits=limits,
        )
        return ModelEntry(id=model.name, created=int(model.created), packtrain=facts)

    @property
    def no_sampling(self) -> str | None:
        """Why this model does not sample, or None if it does."""
        if self.model.can_sample:
            return None
        return f"a {self.model.form} model does not sample; export it with --format onnx to do so"

    def manner(self, options: DecodeOptions, n_best: int | None = None, is_conversation: bool = False) -> Manner:
        """Return how a request with these options is computed; raise Mistake if they do not fit the model."""
        model, recipe = self.model, self.model.recipe
        requested = options.given.keys() | ({"n_best"} if n_best is not None else set())
        for name in sorted(requested - model.options):
            if name in recipe.decode_options:
                raise Mistake(f"{name}: {self.no_sampling}")
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

    def sizes(self, manner: Manner, questions: Sequence[Question]) -> list[int]:
        """Return as how many inputs each question counts, by the work that it takes; end early if it is too much."""
        recipe = self.model.recipe
        values: list[Any] = [question.value for question in questions]  # of the one kind that the recipe takes
        if isinstance(recipe, PairRecipe):
            return [1 + tokens // _TOKENS_PER_INPUT for tokens in _tokens(recipe, values, manner.decoding)]
        if recipe.inputs == "texts":
            return [1 + sum(map(len, _texts(value))) // _CHARACTERS_PER_INPUT for value in values]
        written = manner.decoding.beam * recipe.longest_output if isinstance(recipe, ImageRecipe) else 0
        sizes: list[int] = []
        for value in values:
            started = time.thread_time()
            decoded = pixels_to_decode(value) // _PIXELS_PER_INPUT
            opened = int((time.thread_time() - started) / _SECONDS_PER_INPUT)
            sizes.append(1 + opened + decoded + written // _TOKENS_PER_INPUT)
            if sum(sizes) > self.settings.largest_request:
                break
        return sizes

    def submit(self, manner: Manner, questions: Sequence[Question], sizes: Sequence[int]) -> Future[Batched[Answer]]:
        numbered = [replace(question, number=number) for number, question in enumerate(questions)]
        return self._batcher.submit(manner, numbered, sizes)

    def _load(self) -> None:
        try:
            network = self.model.load()
            # The first computation takes longer: memory is allocated, files are read, kernels are chosen.
            first = Question(trial_inputs(self.model.recipe)[0])
            manner = Manner(replace(self.model.recipe.decoding, n_best=1))
            started = time.monotonic()
            self._answers(network, manner, [first])
            self._batcher.learn_speed(1, time.monotonic() - started)
        except Exception as error:
            self.failure = error
        else:
            self._network = network

    def _compute(self, manner: Manner, questions: Sequence[Question], is_wanted: Callable[[], bool]) -> list[Answer]:
        assert self._network is not None  # requests are refused before
        decoding = replace(manner.decoding, is_wanted=is_wanted)
        if decoding.nucleus is not None:
            # Without a seed of the client, answers differ from request to request. With one they do not depend on how
            # the request is divided into batches.
            seed = decoding.seed if manner.number else secrets.randbelow(_MAX_SEED)
            decoding = replace(decoding, seed=seed, first_number=questions[0].number)
        return self._answers(self._network, replace(manner, decoding=decoding), questions)

    def _answers(self, network: Network, manner: Manner, questions: Sequence[Question]) -> list[Answer]:
        recipe = self.model.recipe
        # All are of the one kind that the recipe and the manner take.
        values: list[Any] = [question.value for question in questions]
        if recipe.inputs == "images":
            return [Answer(prediction, 0, ()) for prediction in recipe.predict(network, values, manner.decoding)]
        if manner.is_conversation:
            assert isinstance(recipe, Conversational)
            predictions = recipe.reply(network, values, manner.decoding)
        else:
            predictions = recipe.predict(network, values, manner.decoding)
        read = iter(self._encoded([text for value in values for text in _texts(value)]))
        counts = [sum(len(next(read)) for _ in _texts(value)) for value in values]
        rows = zip(questions, predictions, counts, strict=True)
        return [
            Answer(prediction, num_read, self._outputs(prediction, question.max_tokens))
            for question, prediction, num_read in rows
        ]

    def _encoded(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of texts; nothing for a recipe without a vocabulary, which counts none."""
        pack = self.model.recipe.pack
        return pack.vocabulary.encode(texts) if pack.manifest.vocabulary is not None else [()] * len(texts)

    def _outputs(self, prediction: Prediction, max_tokens: int | None) -> tuple[Written, ...]:
        texts = [candidate["output"] for candidate in prediction.details.get("n_best", ())] or [prediction.text]
        outputs = []
        for text, tokens in zip(texts, self._encoded(texts), strict=True):
            if max_tokens is not None and len(tokens) > max_tokens:
                [cut] = self.model.recipe.pack.vocabulary.decode([tokens[:max_tokens]])
                outputs.append(Written(cut, max_tokens, is_cut=True))
            else:
                outputs.append(Written(text, len(tokens)))
        return tuple(outputs)

    def count_answers(self, answers: Sequence[Answer]) -> None:
        """Count what was computed for the metrics."""
        self.metrics.count_processed(self.model.recipe.inputs, len(answers))
        if self.model.recipe.inputs == "texts":
            num_written = sum(output.num_tokens for answer in answers for output in answer.outputs)
            self.metrics.count_processed("tokens_read", sum(answer.tokens_read for answer in answers))
            self.metrics.count_processed("tokens_written", num_written)


def _tokens(recipe: PairRecipe, values: Sequence[Any], decoding: Decoding) -> list[int]:
    """Return how many tokens are read for each value, or may be written in all hypotheses."""
    rows = iter(recipe.pack.vocabulary.encode([text for value in values for text in _texts(value)]))
    read = np.array([sum(len(next(rows)) for _ in _texts(value)) for value in values]).clip(max=MAX_INPUT_TOKENS)
    beam, own_beam = 1 if decoding.nucleus is not None else decoding.beam, recipe.decoding.beam
    written = recipe.max_lengths(read)
    tokens: list[int] = (read + beam * written).tolist()
    if beam > own_beam and max(tokens) > _MAX_TOKENS:
        number = tokens.index(max(tokens))
        largest = max(own_beam, (_MAX_TOKENS - read[number]) // written[number])
        raise InputMistake(values, number, f"is too long for a beam of {beam}; shorten it, or use at most {largest}")
    return tokens


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
