"""The interface of a recipe: data, model, loss, metrics and predictions of one task.

Importing a recipe does not import torch, so that the client can check a job; the methods that train do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from packtrain.data.loader import Order
from packtrain.data.order import Ids, block
from packtrain.data.pack import Pack
from packtrain.errors import FieldMistake, Mistake, nearest
from packtrain.job.job import Job, ModelSettings
from packtrain.job.kinds import Source
from packtrain.recipes.statistics import Statistic
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]
Family = Literal["transformer", "bottleneck", "basic"]
"""Models that are alike in how much of a GPU they use: Transformers, and residual networks by their blocks."""
Rows = Mapping[str, Literal["pieces", "classes"]]
"""The names of tensors, and of what each of their rows belongs to."""

SHOWN_SAMPLES = 5
"""Samples of an evaluation that are shown at every evaluation: always the same ones."""
MAX_SHOWN = 16
"""Samples of an evaluation that are recorded, with those that a recipe adds."""
PASSES = 3
"""Operations of a step by those of its forward pass."""
LAST_EPOCH = 1 << 40
"""Beyond all phases of a schedule: an epoch whose settings are those of a trained model."""


@dataclass(frozen=True, eq=False)
class EvaluationRequest:
    """One worker's part of an evaluation; both lists of ids may be empty.

    `ids` are the samples whose loss counts, `decode_ids` those that need a free output. `epoch` is the epoch training
    is in, for settings that change with it. Call `on_batch` before every batch: it may raise to end the evaluation.
    `by_sample` asks for the rows of a measurement. `show_ids` asks for its samples: these of `decode_ids`, and others
    that the recipe wants to show; None asks for no samples.
    """

    split: str
    ids: Ids
    decode_ids: Ids
    beam: int = 1
    epoch: int = 0
    on_batch: Callable[[], None] = lambda: None
    by_sample: bool = False
    show_ids: Ids | None = None


@dataclass(frozen=True)
class Measurement:
    """One worker's result of an evaluation: sums that add up over workers, and the outputs it decoded.

    `rows` has what was summed, by sample, if the request asked for it: a number for each of its `ids`, in their order.
    `samples` has what only this worker knows of samples that may be shown, by their number, and `pictures` the JPEGs
    that they name, which are not sent to other workers.
    """

    sums: dict[str, float]
    outputs: list[str]
    rows: dict[str, list[float]] = field(default_factory=dict)
    samples: dict[int, Sample] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """Scores of a split; `signatures` say how a metric with several definitions was computed.

    `counts` says of how many samples each score is: some are of all, others of those that were decoded.
    """

    values: dict[str, float]
    signatures: dict[str, str] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


class Unwanted(Exception):
    """Nobody waits for the outputs of a search any more."""


@dataclass(frozen=True)
class Decoding:
    """How outputs are generated: by beam search, or by nucleus sampling if `nucleus` (the probability mass) is set.

    `repetition` above 1 makes tokens that were already written less likely; no n-gram of `no_repeat` tokens is
    written twice. A beam search returns its `n_best` outputs, at most as many as the beam. What is sampled depends on
    the seed and on the number of an input; `first_number` is that of the first one. A search that runs step by step
    raises Unwanted as soon as nobody waits for it.
    """

    beam: int = 4
    nucleus: float | None = None
    temperature: float = 1.0
    repetition: float = 1.0
    no_repeat: int = 0
    seed: int = 1
    first_number: int = 0
    n_best: int = 1
    is_wanted: Callable[[], bool] = field(default=lambda: True, compare=False, repr=False)

    def check_wanted(self) -> None:
        if not self.is_wanted():
            raise Unwanted


@dataclass(frozen=True)
class Hypothesis:
    """An output of a search: its tokens without EOS, and its log-probability, normalized as the search compares it."""

    tokens: list[int]
    score: float


class Network(ABC):  # noqa: B024 - each recipe has an interface of its own below it
    """A trained model as a recipe uses it to evaluate and to predict: arrays in, arrays out.

    The form of the model is behind it: torch's module of a run, or a file of another runtime (export/).
    """

    at_once: int = 1
    """Batches that may be computed at the same time, in threads with one core each; most runtimes have their own."""


@dataclass(frozen=True)
class Prediction:
    """The output for one input: as text, as values for scripts, and for some recipes an attention map.

    `note` warns about the input, for instance that its beginning was cut off.
    """

    text: str
    details: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    draw_map: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def attention_map(self) -> bytes | None:
        """The attention map (PNG), drawn now; None if the recipe has none."""
        return self.draw_map() if self.draw_map else None


@dataclass(frozen=True)
class TaskWords:
    """Words that people read of a recipe: on the card of a model, on the page of its service, and beside its samples.

    `hub_task` is what Hugging Face's hub calls the task. On the service's page a person asks the model to do `action`;
    `doing`, `done` and `result` are said while it does, of the inputs, and of what comes of it. Samples of texts have
    an `input` and an `output`; if outputs `follow_references`, the differences between both are marked.
    """

    hub_task: str = ""
    action: str = "predict"
    doing: str = "predicting"
    done: str = "predicted"
    result: str = "prediction"
    input: str = "Input"
    output: str = "Prediction"
    follow_references: bool = True


@dataclass(frozen=True)
class ModelSize:
    """`trained` are the parameters that learn; operations and activations are for one unit of a batch.

    With activation checkpointing, `block_flops` are computed once more, and `checkpointed_bytes` are kept instead of
    `activation_bytes`. `evaluation_bytes` are those of its outputs.
    """

    parameters: int
    trained: int
    buffer_bytes: int
    flops: float
    activation_bytes: float
    block_flops: float
    checkpointed_bytes: float
    family: Family = "transformer"
    evaluation_bytes: float = 0.0


class InputMistake(Mistake):
    """An input that a recipe refuses: the one at `index` of those that it was given."""

    def __init__(self, inputs: Sequence[object], index: int, fault: str) -> None:
        super().__init__(f"{f'input {index + 1} of {len(inputs):,}' if len(inputs) > 1 else 'the input'} {fault}")
        self.index, self.fault = index, fault


def text_prediction(texts: Sequence[str], scores: Sequence[float]) -> Prediction:
    """Return the best text; scripts get the score, and the other texts if there are any."""
    details: dict[str, Any] = {"score": round(scores[0], 4)}
    if len(texts) > 1:
        pairs = zip(texts, scores, strict=True)
        details["n_best"] = [{"output": text, "score": round(score, 4)} for text, score in pairs]
    return Prediction(texts[0], details)


class LearningTask(ABC):
    """Data, model and loss: what is learned, and from which samples of a pack.

    The cost of a sample is its part of the batch size: its target tokens, or 1 for an image. The loss is a sum over as
    many terms, so that its mean does not depend on how a batch is divided among workers.
    """

    defaults: ClassVar[Mapping[str, object]]
    """Defaults for fields of the job file. A schedule or an interval in them is adapted to other durations."""
    size_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Other defaults for fields of `train`, by the size of the model."""
    unit: ClassVar[str]
    """The unit of batch sizes: tokens or samples."""
    contents: ClassVar[frozenset[str]]
    """Contents of raw data that it can learn from: pairs, turns, labels or captions."""
    kind: ClassVar[str]
    """The kind of pack it learns from."""
    sizes: ClassVar[Mapping[str, Any]] = {}
    """The named sizes of the model: each is a dataclass of its options. Editors offer them."""
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}
    """The values of those options of the model that have only a few."""
    files: ClassVar[Sequence[str]] = ()
    """Options of the model that name files; a run carries them along, and `pack.given_file` opens them."""
    supports_augment: ClassVar[bool] = False
    """True if it makes use of `train.augment`."""
    on_host: ClassVar[frozenset[str]] = frozenset()
    """Arrays of a batch that stay in main memory: sizes that a GPU's work depends on, without a wait to read them."""
    rows: ClassVar[Rows] = {}
    """Tensors of the model that have a row for each piece of the vocabulary, or for each class: where two packs differ,
    a run that starts from the weights of another takes over the rows of the same name."""

    def __init__(self, job: Job, pack: Pack) -> None:
        self.job, self.pack = job, pack

    @classmethod
    def defaults_for(cls, model: Mapping[str, object]) -> Mapping[str, object]:
        """Return the defaults for a job whose section `model` says this; it has not been checked."""
        changes = cls.size_defaults.get(str(model.get("size", cls.defaults.get("model"))))
        train = cast("Mapping[str, object]", cls.defaults.get("train", {}))
        return {**cls.defaults, "train": {**train, **changes}} if changes else cls.defaults

    @classmethod
    @abstractmethod
    def check(cls, job: Job) -> None:
        """Raise FieldMistake if this recipe does not support the job."""

    @classmethod
    def check_files(cls, job: Job, files: Mapping[str, Path], classes: Sequence[str]) -> Sequence[str]:  # noqa: ARG003
        """Return what a run will do with the files that options of the model name, as lines for a person.

        Raises FieldMistake if one does not fit. Called on the machine that starts a run, which may lack torch: before
        its data is packed, without classes, and after.
        """
        return ()

    # Data.

    @property
    def notes(self) -> Sequence[str]:
        """Remarks about the data for the user, such as how many samples are truncated."""
        return ()

    @property
    @abstractmethod
    def costs(self) -> NDArray[np.int64]:
        """The part of the batch size that each training sample takes."""

    @property
    @abstractmethod
    def sort_keys(self) -> NDArray[np.int64]:
        """Sort key of the training samples: neighbors fit into one batch with little padding."""

    @property
    @abstractmethod
    def lengths(self) -> NDArray[np.int64]:
        """Positions that each training sample takes when padded: they bound the memory of a batch."""

    @property
    def group(self) -> int:
        """How many samples in a row belong together, such as 2 if pairs are mixed: `batch` gets whole groups.

        Only the last group of a global batch may have fewer.
        """
        return 1

    @abstractmethod
    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        """Return the training samples `ids`, stacked, as this epoch shows them.

        `repeats` says how often each sample came before in the epoch, which happens when its source has a weight above
        1; None means never. Random draws should depend on (seed, epoch, sample, repeat) alone.
        """

    def prefetch(self, ids: Ids, epoch: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Announce the order in which an epoch uses its samples, so that their shards can be downloaded ahead."""
        return nullcontext()

    # The model.

    @property
    @abstractmethod
    def width(self) -> int:
        """The model's width, which some schedules use."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model with random weights; a checkpoint may replace them."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the parts of the model that are compiled, or recomputed for the backward pass, one by one.

        These are the layers of its lists (`nn.ModuleList`), or else all of the model. A block may have an attribute
        `varying_sizes`: the dimensions of each input whose sizes differ between batches. Without it, all may.
        """
        return list(_layers(model)) or [model]

    def initial_weights(self, model: nn.Module) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return tensors of the model's state that do not start at random, the same on every rank.

        Not called if the run resumes from a checkpoint: the files they come from may be gone by then.
        """
        return {}

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss summed over the batch."""

    def prepare(self, epoch: int, model: nn.Module) -> None:  # noqa: B027 - most recipes have nothing to do
        """Prepare the model for an epoch, for instance freeze a part. Called before its first step and on resume."""


class Scorer(ABC):
    """How good a model is on a split, computed by all workers together.

    `model` is torch's module, here and below. An `Exportable` recipe also accepts its `Network`.
    """

    best_metric: ClassVar[str]
    """The score that decides which checkpoint is the best."""
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss", "perplexity"})
    """Scores that should be low; all others should be high."""
    limits: ClassVar[Mapping[str, float]] = {}
    """The most that a score can be, of those that lie between 0 and that."""
    score_packages: ClassVar[Sequence[str]] = ()
    """Packages that its scores need, beyond those of the base install."""

    @abstractmethod
    def count(self, split: str) -> int:
        """Return the number of samples of a split; 0 if there is no such split."""

    def divide(self, split: str, num_ranks: int) -> list[Ids]:
        """Divide the samples of a split among workers: each sample goes to exactly one."""
        # Contiguous parts: neighbors are in the same shard, so a rank opens few of them.
        ids = np.arange(self.count(split))
        return [ids[list(block(len(ids), rank, num_ranks))] for rank in range(num_ranks)]

    @abstractmethod
    def measure(self, model: Any, request: EvaluationRequest) -> Measurement:
        """Compute one worker's part of an evaluation: the loss on some samples, free outputs for others."""

    @abstractmethod
    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        """Combine the parts of all workers; their outputs, in order, belong to `decode_ids`. Runs on rank 0."""

    def statistics(self, split: str, ids: Ids, measured: Measurement) -> dict[str, Statistic]:  # noqa: ARG002
        """Return what each score is computed from, sample by sample; scores without it have no confidence interval.

        `measured` is the result of a request with these `ids` to count and to decode, `by_sample`.
        """
        return {}

    def sample_records(self, split: str, ids: Ids, measured: Measurement) -> Iterator[dict[str, Any]]:  # noqa: ARG002
        """Yield, for scripts, where each sample is in the raw data, its input if that is text, its reference and the
        prediction. `measured` is as for `statistics`."""
        decoded = len(measured.outputs) == len(ids)
        yield from ({"prediction": output} for output in measured.outputs) if decoded else ({} for _ in ids)


class Inference(ABC):
    """Predictions of a trained model for inputs that a person gives."""

    inputs: ClassVar[Literal["texts", "images"]] = "texts"
    """The inputs of predictions: texts, or images, which are paths of files or their bytes."""
    decoding: ClassVar[Decoding] = Decoding()
    """How predictions are generated by default."""
    decode_options: ClassVar[frozenset[str]] = frozenset(
        {"beam", "n_best", "nucleus", "temperature", "repetition", "seed"}
    )
    """Fields of `decoding` that `packtrain predict` may change."""
    words: ClassVar[TaskWords] = TaskWords()

    @abstractmethod
    def predict(self, model: Any, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]:
        """Return a prediction for every input."""


class Recipe(LearningTask, Scorer, Inference):
    """One learning task, built for a job and its pack. The classes below it say what else a recipe can do."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, as predictions say them; empty if the data has none."""
        return self.pack.manifest.classes

    def source_of(self, split: str, sample: int) -> tuple[int, Source | None]:
        """Return the number of the source that a sample is from, and the source if the job names it."""
        data, counts = self.job.data, self.pack.manifest.splits[split].sources
        sources = data.train if split == "valid" and data.held_out is not None else getattr(data, split)
        number = int(np.searchsorted(np.cumsum(counts), sample, side="right"))
        return number, sources[number] if number < len(sources) else None


class Conversational(Recipe):
    """A recipe that replies in a conversation."""

    @abstractmethod
    def reply(self, model: Any, conversations: Sequence[Sequence[str]], decoding: Decoding) -> list[Prediction]:
        """Return the replies to conversations whose last turn is the user's."""


class Sized(Recipe):
    """A recipe that knows the size of its model by arithmetic, for a client that must not take the time for torch."""

    @classmethod
    @abstractmethod
    def size(cls, job: Job, vocabulary: int, classes: int) -> ModelSize:
        """Return the size of the job's model for so many pieces of the vocabulary, or so many classes."""


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the outermost lists."""
    from torch import nn

    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


def training_order(recipe: Recipe) -> Order:
    """Return the order in which a run of the recipe's job sees its samples."""
    settings = recipe.job.train
    return Order(
        recipe.costs,
        recipe.sort_keys,
        lambda epoch: settings.in_epoch(epoch).batch.value,
        settings.seed,
        recipe.lengths,
        recipe.pack.manifest.splits["train"].sources,
        tuple(source.weight for source in recipe.job.data.train),
        recipe.group,
    )


Options = TypeVar("Options", bound="DataclassInstance")


def read_options(
    model: ModelSettings,
    sizes: Mapping[str, Options],
    choices: Mapping[str, Collection[str]] | None = None,
    may_be_zero: Collection[str] = (),
) -> Options:
    """Return the named size with the job's model options applied; raise FieldMistake for a wrong name or value.

    An option has the type of its default: integers are at least 1 (0 if in `may_be_zero`), numbers at least 0, dropouts
    below 1, and strings one of `choices` if there are any.
    """
    if model.size not in sizes:
        raise FieldMistake("model.size", f"no size {model.size!r}; {nearest(model.size, sizes)}")
    size = sizes[model.size]
    defaults = asdict(size)
    for option, value in model.options.items():
        if option not in defaults:
            raise FieldMistake(f"model.{option}", f"unknown option; {nearest(option, defaults)}")
        default = defaults[option]
        allowed = choices.get(option) if choices else None
        if isinstance(default, str):
            expected = f"one of {', '.join(allowed)}" if allowed else "a string"
            is_valid = isinstance(value, str) and (allowed is None or value in allowed)
        elif isinstance(default, int):
            least = 0 if option in may_be_zero else 1
            expected = f"an integer of at least {least}"
            # A bool is an int in Python, but `heads: true` is a mistake.
            is_valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
        else:
            limit = 1.0 if option.endswith("dropout") else math.inf
            expected = "a number of at least 0" + (" and less than 1" if limit == 1 else "")
            is_valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < limit
        if not is_valid:
            raise FieldMistake(f"model.{option}", f"must be {expected}, not {value!r}")
    return replace(size, **model.options)
