"""Things that come in kinds: fleets, raw formats, schedules, optimizers and exchanges.

Each family is one dict from the word in a job file to the kind's settings class, which is in the kind's own file beside
its behavior. A class is imported when it is first used, so reading a job needs neither torch nor the kinds that it does
not name. Adding a kind is one file and one line here.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PlainSerializer, PlainValidator, ValidationError

from packtrain.job.part import (
    Boolean,
    DataPath,
    Location,
    MachineCount,
    NotNegative,
    Part,
    Positive,
    in_schema,
    must_be,
    problems_of,
    refusal,
    unknown_keys,
)
from packtrain.units import Duration, Machines

if TYPE_CHECKING:
    from packtrain.job.job import EpochSettings, TrainSettings

Drop = Callable[[str, str], None]
"""Reports a sample that is left out: the reason, which is counted, and the name of the sample."""

FLEETS: dict[str, str] = {
    "local": "packtrain.fleet.local:LocalSettings",
    "ssh": "packtrain.fleet.ssh:SshSettings",
    "mpi": "packtrain.fleet.mpi:MpiSettings",
    "slurm": "packtrain.fleet.slurm:SlurmSettings",
    "kubernetes": "packtrain.fleet.kubernetes.fleet:KubernetesSettings",
    "aws": "packtrain.fleet.aws.fleet:AwsSettings",
    "ibm": "packtrain.fleet.ibm:IbmSettings",
}
FORMATS: dict[str, str] = {
    "bitext": "packtrain.pack.bitext:BitextSource",
    "dialogue": "packtrain.pack.dialogue:DialogueSource",
    "imagenet": "packtrain.pack.imagenet:ImageNetSource",
    "coco": "packtrain.pack.coco:CocoSource",
    "vizwiz": "packtrain.pack.coco:VizWizSource",
    "folder": "packtrain.pack.folder:FolderSource",
}
SCHEDULES: dict[str, str] = {
    "noam": "packtrain.train.schedule:NoamSettings",
    "constant": "packtrain.train.schedule:ConstantSettings",
    "one_cycle": "packtrain.train.schedule:OneCycleSettings",
    "cosine": "packtrain.train.schedule:CosineSettings",
    "step": "packtrain.train.schedule:StepDownSettings",
    "phases": "packtrain.train.schedule:PhasesSettings",
}
OPTIMIZERS: dict[str, str] = {
    "sgd": "packtrain.train.optimizer:SgdSettings",
    "adam": "packtrain.train.optimizer:AdamSettings",
    "adamw": "packtrain.train.optimizer:AdamWSettings",
    "lars": "packtrain.train.optimizer:LarsSettings",
    "lamb": "packtrain.train.optimizer:LambSettings",
}
EXCHANGES: dict[str, str] = {
    "ddp": "packtrain.train.ddp:DdpSettings",
    "local": "packtrain.train.local_steps:LocalStepsSettings",
    "fsdp": "packtrain.train.fsdp:FsdpSettings",
}


def kind_class(kinds: Mapping[str, str], word: str) -> Any:
    """Import and return the settings class that a word stands for."""
    module, _, name = kinds[word].partition(":")
    return getattr(import_module(module), name)


def word_of(kinds: Mapping[str, str], settings: Part) -> str:
    """Return the word of a kind's settings, without importing the other kinds."""
    # By the reference, so that no other kind of the family has to be imported for a comparison.
    reference = f"{type(settings).__module__}:{type(settings).__qualname__}"
    return next(word for word, kind_reference in kinds.items() if kind_reference == reference)


def default_kind(kinds: Mapping[str, str], word: str) -> Any:
    """Return a field's default: the kind of that word with its own defaults, imported when a job needs it."""
    return Field(default_factory=lambda: kind_class(kinds, word).model_validate({}))


class FleetKind(Part):
    """Where the machines come from, and how many of them. `power_off`: a machine shuts down after its part of the run.

    `shares_machines`: several nodes of one run may be on one machine, each with a part of it, and each counts as a
    machine. Every kind is a `FleetBuilder` (fleet/fleet.py), from which its fleet is built.
    """

    shares_machines: ClassVar[bool] = False

    machines: MachineCount = Machines(1, 1)
    power_off: Boolean = False

    def divided(self, parallel: int | None) -> Sequence[FleetKind]:
        """Return the fleet of each of the runs that train at the same time; None is as many as its machines allow.

        Most start machines for each run, or share them: how many at once is for a person to say.
        """
        return [self] * (parallel or 1)

    @property
    def rented_types(self) -> Sequence[str]:
        """The types of machines that it may rent, such as `g5.xlarge`, the preferred one first."""
        return ()

    @property
    def port_mbps(self) -> int | None:
        """The speed of the network port that machines are ordered with; None if their type decides, or is unknown."""
        return None

    def hourly_prices(self) -> Mapping[str, float | None]:
        """Return the dollars per hour of every type of machine that it may rent; None is a price that is not known.

        A type is named as people do: `g5.xlarge in us-east-1`. Empty for machines that are not rented.
        """
        return {}

    def variable_fault(self, variable: str) -> str | None:
        """Return why machines would not get this variable of `environment`, or None. Most get it from this client."""
        return None if variable in os.environ else f"{variable} is not set here; export it before the run"

    def variables_here(self) -> Mapping[str, str]:
        """Return variables with which this client acts as the job says, such as the account that it uses."""
        return {}

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        """Return what this machine lacks to start such a fleet, each with how to get it. Asks nobody."""
        return {}


class Source(Part):
    """A raw data set and its share of the mix.

    `contents` is what a recipe can learn from it: pairs (of texts), turns (pairs of a prompt and its reply), labels or
    captions (of images). A format overrides the readers of what it holds. `drop` reports samples that cannot be used,
    `filtered` what is not meant to be used: the format itself says so, or it is no sample.
    """

    harmless = frozenset({"paths", "weight"})
    contents: ClassVar[frozenset[str]]
    path_counts: ClassVar[Sequence[int]]
    example: ClassVar[str]

    paths: tuple[DataPath, ...]
    weight: Positive = 1.0

    @property
    def kind(self) -> str:
        return word_of(FORMATS, self)

    @property
    def options(self) -> dict[str, Any]:
        """The settings beside paths and weight that are not the defaults. A pack depends on them."""
        return self.model_dump(mode="json", exclude={"paths", "weight"}, exclude_defaults=True)

    def faults(self) -> Iterator[tuple[Location, str]]:
        if len(self.paths) not in self.path_counts:
            counts = " or ".join(str(count) for count in self.path_counts)
            yield ("paths",), f"takes {counts} paths, not {len(self.paths)}, such as {self.example}"

    @abstractmethod
    def pack_kind(self) -> str:
        """Return the kind of pack that is made of it (pack/kind.py). May look into the data."""

    @classmethod
    def recognize(cls, paths: Sequence[str]) -> Sequence[str] | None:  # noqa: ARG003
        """Return the paths of a source for those that a person names without a format; None if they look like another.

        Files are told apart by their names, and folders by what is in them.
        """
        return None

    def named_files(self) -> Iterator[tuple[str, str | None]]:
        """Yield the name and path, or None if it is missing, of each file that the paths only name. A pack depends on
        their content, too."""
        return iter(())

    def pairs(self, drop: Drop) -> Iterator[Any]:
        """Yield each `TextPair` in order."""
        raise NotImplementedError

    def classes(self) -> tuple[str, ...]:
        raise NotImplementedError

    def labeled(self, classes: Sequence[str], drop: Drop, filtered: Drop) -> Iterator[Any]:
        """Yield each `RawImage` in order, labeled by its place in the classes of the training data."""
        raise NotImplementedError

    def captioned(self, drop: Drop, filtered: Drop) -> Iterator[Any]:
        """Yield each `RawImage` in order, with its captions."""
        raise NotImplementedError


class ScheduleKind(Part):
    """How the learning rate changes over a run. `ends_with_run`: it falls until the run ends."""

    ends_with_run: ClassVar[bool] = False
    harmless = frozenset()

    @property
    def follows_duration(self) -> bool:
        """True if its rates depend on where the run ends."""
        return self.ends_with_run

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:  # noqa: ARG002
        """Yield what is wrong between these settings and the rest of the `train` section."""
        yield from ()

    def doubts_in(self, train: TrainSettings) -> Iterator[str]:  # noqa: ARG002
        """Yield what is allowed in the rest of the `train` section, but hardly meant."""
        yield from ()

    def in_epoch(self, settings: EpochSettings, epoch: int) -> EpochSettings:  # noqa: ARG002
        """Return what holds in an epoch, for schedules that change more than the rate."""
        return settings

    def fitted(self, written: Duration, duration: Duration) -> ScheduleKind:  # noqa: ARG002
        """Return the schedule for a run of another length than it was written for: what would not fit shrinks."""
        return self

    def default_for(self, written: Duration, duration: Duration) -> ScheduleKind:
        """Return the schedule as a default of jobs of any length and unit, where a recipe has it for `written`."""
        return self.fitted(written, duration)

    def beside(self, fields: Mapping[str, object]) -> Mapping[str, object]:  # noqa: ARG002
        """Return the fields that this schedule has as a default beside those that are given, which are not checked."""
        return self.model_dump(mode="json", exclude_none=True)

    @property
    @abstractmethod
    def in_words(self) -> str:
        """The formula in one sentence, for a person who sees the curve and asks why."""

    @abstractmethod
    def build(self, width: int, duration: Duration) -> Callable[[Any], float]:
        """Return the rate as a function of the `Progress` before a step; `width` is the model's."""


class OptimizerKind(Part):
    """How gradients change the weights. Norms and biases do not decay."""

    harmless = frozenset({"decay"})

    decay: NotNegative = 0.0

    @property
    def state_tensors(self) -> int:
        """The number of tensors in its state for each weight, of the same shape."""
        return 0

    @abstractmethod
    def build(self, model: Any) -> Any:
        """Return the torch optimizer of a model."""


class ExchangeKind(Part):
    """How the workers keep their weights equal.

    `syncs_every_step`: all ranks have the same weights after every step, and reach a bad loss together.
    `shards_model`: a rank holds a part of the weights, so that every forward pass is a collective. `traffic` is how
    many times all gradients or weights pass each link in a sync.
    """

    syncs_every_step: ClassVar[bool] = True
    shards_model: ClassVar[bool] = False
    traffic: ClassVar[int] = 2
    harmless = frozenset()

    @property
    def weight_copies(self) -> int:
        """The number of further copies of the weights that a rank holds."""
        return 0

    @property
    def bytes_per_weight(self) -> float:
        """The bytes that a sync sends for each weight."""
        return 4.0

    @property
    def whole_gradients(self) -> bool:
        """True if a rank that holds a part of the weights sums the gradients of all of them over its micro-batches."""
        return False

    @property
    def interval(self) -> int:
        """The number of steps from one sync to the next."""
        return 1

    @property
    def background(self) -> float:
        """The share of the steps that are made while a sync of earlier ones proceeds."""
        return 0.0

    @property
    def lighter(self) -> str:
        """A setting of this kind that would send fewer bytes, as a job says it; empty if there is none."""
        return ""

    def faults_in(self, train: TrainSettings) -> Iterator[tuple[Location, str]]:  # noqa: ARG002
        """Yield what is wrong between these settings and the rest of the `train` section."""
        yield from ()

    @abstractmethod
    def build(self, synced: Any) -> Any:
        """Return the `GradientSync` of a `SyncedModel`."""


# The types of fields.


def not_one(kinds: Mapping[str, str], count: int) -> str:
    return f"must name one kind, not {count or 'none'}; known: {', '.join(sorted(kinds))}"


def read_kind(kinds: Mapping[str, str], base: type[Part]) -> PlainValidator:
    """Read a mapping of one word to its settings, `{noam: {warmup: 8000 steps, scale: 2.0}}`."""

    def read(value: object) -> Part:
        if isinstance(value, base):
            return value
        words = ", ".join(sorted(kinds))
        if not isinstance(value, Mapping):
            raise ValueError(must_be(f"a mapping of one of {words} to its settings", value))
        if len(value) != 1:
            raise ValueError(not_one(kinds, len(value)))
        [(word, settings)] = value.items()
        if word not in kinds:
            raise refusal(unknown_keys([str(word)], kinds))
        kind: type[Part] = kind_class(kinds, word)
        # Settings may be a list, if the kind has a field named after its word: `phases: [...]` sets `phases`.
        listed = isinstance(settings, list) and word in kind.model_fields
        try:
            return kind.model_validate({word: settings} if listed else {} if settings is None else settings)
        except ValidationError as error:
            raise refusal(problems_of(error, *(() if listed else (word,)))) from None

    return PlainValidator(read, json_schema_input_type=in_schema(kinds=base.__name__))


def write_kind(kinds: Mapping[str, str]) -> PlainSerializer:
    return PlainSerializer(lambda value: {word_of(kinds, value): value.model_dump(mode="json")})


def expand_source(source: Any) -> Any:
    """Return a source with a single path written as a list."""
    if not isinstance(source, Mapping):
        return source
    return {key: [value] if key in FORMATS and isinstance(value, str) else value for key, value in source.items()}


def _read_source(value: object) -> Source:
    """Read `{bitext: [train.en, train.de], weight: 2.0}`."""
    if isinstance(value, Source):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(must_be("a mapping such as {bitext: [train.en, train.de]}", value))
    words = [word for word in value if word in FORMATS]
    fields = (kind_class(FORMATS, words[0]) if len(words) == 1 else Source).model_fields
    options = [field for field in fields if field != "paths"]
    known_keys = (*FORMATS, *options)
    # Unknown keys are reported together with the errors of the known ones, or first if the kind itself is misspelled.
    unknown = unknown_keys([key for key in value if key not in known_keys], known_keys)
    if not unknown and len(words) != 1:
        raise ValueError(not_one(FORMATS, len(words)))
    if not words:
        raise refusal(unknown)
    word = words[0]
    paths = expand_source(value)[word]
    settings = {option: value[option] for option in options if option in value}
    try:
        source: Source = kind_class(FORMATS, word).model_validate({"paths": paths, **settings})
    except ValidationError as error:
        problems = problems_of(error)
        for source_problem in problems:  # a job file has the paths right under the kind's word
            location = source_problem.get("loc", ())
            source_problem["loc"] = (word, *location[1:]) if location[:1] == ("paths",) else location
        raise refusal(unknown + problems) from None
    if unknown:
        raise refusal(unknown)
    return source


def _write_source(source: Source) -> dict[str, Any]:
    return {source.kind: list(source.paths), "weight": source.weight, **source.options}


AnySource = Annotated[
    Source,
    PlainValidator(_read_source, json_schema_input_type=in_schema(kinds="Source")),
    PlainSerializer(_write_source),
]
AnySchedule = Annotated[ScheduleKind, read_kind(SCHEDULES, ScheduleKind), write_kind(SCHEDULES)]
AnyOptimizer = Annotated[OptimizerKind, read_kind(OPTIMIZERS, OptimizerKind), write_kind(OPTIMIZERS)]
AnyExchange = Annotated[ExchangeKind, read_kind(EXCHANGES, ExchangeKind), write_kind(EXCHANGES)]
