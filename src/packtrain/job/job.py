"""The job: what a person asks for, typed and frozen, validated once when it is read."""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    WithJsonSchema,
    model_serializer,
)
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from packtrain.errors import quoted
from packtrain.job.kinds import (
    EXCHANGES,
    FLEETS,
    OPTIMIZERS,
    AnyExchange,
    AnyOptimizer,
    AnySchedule,
    AnySource,
    FleetKind,
    Source,
    default_kind,
    expand_source,
    kind_class,
    not_one,
    word_of,
)
from packtrain.job.part import (
    CODE_PATTERN,
    REQUIRED,
    Argument,
    BatchSize,
    Boolean,
    ByteSize,
    CodePath,
    CodeRoot,
    Count,
    DirectoryPath,
    Fraction,
    Interval,
    Length,
    Location,
    Name,
    NotNegative,
    Ordinal,
    Part,
    Pixels,
    Positive,
    RecipeName,
    Scale,
    ScoreName,
    Seconds,
    Steps,
    StorePath,
    TrackingPath,
    Variable,
    WorkerCount,
    code_path_fault,
    faults,
    input_path_fault,
    is_set,
    matching,
    must_be,
    problem,
    problems_of,
    refusal,
    rules_in_schema,
    unknown_keys,
)
from packtrain.units import Amount, Duration

_MAX_PROFILED_STEPS = 100
MIN_VOCABULARY = 300  # every byte, the special tokens, and a few merges

Option = bool | int | float | str

FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_SHARE = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,3})?) *%", re.ASCII)
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,62}")
_RECIPES_ONLY = "applies to recipes only, not to programs"


class DataSettings(Part):
    """The data of each split. `valid: 5 %` in a job file is `held_out`: that share of the training data."""

    harmless = frozenset({
        "train", "valid", "test", "vocabulary", "max_words", "max_ratio", "joint", "sizes", "stage", "pack", "held_out",
    })  # fmt: skip

    train: tuple[AnySource, ...]
    valid: tuple[AnySource, ...] = ()
    test: tuple[AnySource, ...] = ()
    vocabulary: Annotated[int, Field(strict=True, ge=MIN_VOCABULARY, le=1_000_000)] = 8000
    max_words: Ordinal = 80
    max_ratio: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = 9.0
    joint: Boolean = True
    sizes: Annotated[tuple[Pixels, ...], Field(json_schema_extra={"uniqueItems": True})] = ()
    stage: Boolean = False
    pack: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", "the name of a pack")] | None = None
    held_out: Annotated[float, Field(strict=True, gt=0, le=0.5)] | None = None

    @classmethod
    def known_keys(cls) -> Iterable[str]:
        return (field for field in cls.model_fields if field != "held_out")

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:
        if "held_out" in fields:  # a field of this class, but not a key of the job file
            del fields["held_out"]
            problems += unknown_keys(["held_out"], cls.known_keys())
        if not isinstance(fields.get("valid"), str):
            return fields
        share = _SHARE.fullmatch(fields["valid"].strip())
        if share is None or not 0 < float(share[1]) <= 50:
            problems.append(problem("must be sources, or a share of the training data of up to 50 %: 5 %", "valid"))
            return {**fields, "valid": ()}
        return {**fields, "valid": (), "held_out": float(share[1]) / 100}

    @model_serializer(mode="wrap")
    def _with_share(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        if document.pop("held_out", None) is not None:
            document["valid"] = self.share
        return document

    @property
    def share(self) -> str:
        """The share of the training data that is held out, as people write it: `5 %`."""
        return "" if self.held_out is None else f"{self.held_out * 100:.6g} %"

    @property
    def has_valid(self) -> bool:
        return bool(self.valid) or self.held_out is not None

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.train:
            yield ("train",), "must have at least one source"
        if len(set(self.sizes)) != len(self.sizes):
            yield ("sizes",), "lists a size twice"

    def map_sources(self, change: Callable[[Source], Source]) -> DataSettings:
        """Return the same settings with every source changed."""
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        return self.model_copy(update={name: tuple(map(change, sources)) for name, sources in splits.items()})

    def map_paths(self, change: Callable[[str], str]) -> DataSettings:
        """Return the same settings with every path of every source changed."""
        return self.map_sources(lambda source: source.model_copy(update={"paths": tuple(map(change, source.paths))}))


def _read_options(value: object) -> dict[str, Option]:
    if not isinstance(value, Mapping):
        raise ValueError(must_be("a mapping", value))
    problems = []
    for name, option in value.items():
        # Only form and type; the recipe checks which options exist.
        if not _OPTION.fullmatch(name):
            problems.append(problem(f"{quoted(name, 60)} is not a valid option name", name))
        elif not isinstance(option, (bool, int, float, str)):
            problems.append(problem(must_be("a number, a string, true or false", option), name))
        elif isinstance(option, float) and not math.isfinite(option):
            problems.append(problem("must be a finite number", name))
    if problems:
        raise refusal(problems)
    return dict(value)


class ModelSettings(Part):
    """A named size and the options that change it. The recipe checks both."""

    filled_in = frozenset({"size"})
    harmless = frozenset({"size", "options"})  # files that options name are taken from the store only

    size: Name
    options: Annotated[dict[str, Option], PlainValidator(_read_options, json_schema_input_type=dict[str, Option])] = (
        Field(default_factory=dict)
    )

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:
        if "options" in fields:  # from code; a job file has the options beside `size`
            return fields
        options = {key: value for key, value in fields.items() if key != "size"}
        try:
            _read_options(options)
        except ValidationError as error:
            problems += problems_of(error)
            options = {}
        return {**({"size": fields["size"]} if "size" in fields else {}), "options": options}

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"size": self.size, **self.options}


@dataclass(frozen=True)
class EpochSettings:
    """The settings of one epoch."""

    batch: Amount
    size: int
    min_scale: float
    rectangular: bool


# Up to the first number a GPU waits for its kernels to start more than it computes; with the second it is busy.
_GPU_SHARE = {"samples": (16, 64), "tokens": (1024, 4096)}


class RandAugmentSettings(Part):
    """How many random operations change an image, and how much each of them changes it."""

    harmless = frozenset({"operations", "magnitude"})

    operations: Annotated[int, Field(strict=True, ge=1, le=8)] = 2
    magnitude: Annotated[float, Field(strict=True, ge=0, le=30, allow_inf_nan=False)] = 9.0


class AugmentSettings(Part):
    """Changes of a training image after it is cropped. `mixup` and `cutmix` mix pairs of images, and their classes.

    These two are the parameter of the beta distribution that the weights are drawn from; 0 is off.
    """

    harmless = frozenset({"randaugment", "erasing", "mixup", "cutmix"})

    randaugment: RandAugmentSettings | None = None
    erasing: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.0
    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class RateScale(Part):
    """The batch that the rates of the schedule are written for: with another one they change linearly with it, or with
    its square root."""

    harmless = frozenset({"linear", "sqrt"})
    model_config = rules_in_schema({"oneOf": [is_set("linear"), is_set("sqrt")]})

    linear: BatchSize | None = None
    sqrt: BatchSize | None = None

    def faults(self) -> Iterator[tuple[Location, str]]:
        if (self.linear is None) == (self.sqrt is None):
            yield (), "set exactly one of linear and sqrt, such as {linear: 256 samples}"

    @property
    def base(self) -> Amount:
        base = self.linear or self.sqrt
        assert base is not None
        return base

    def factor(self, batch: Amount) -> float:
        """Return what a rate is multiplied by with a batch of that size."""
        ratio = batch.value / self.base.value
        return math.sqrt(ratio) if self.linear is None else ratio

    def in_words(self, batch: Amount) -> str:
        how = "linearly" if self.sqrt is None else "with the square root"
        return (
            f"rates are written for {self.base} and scaled {how}: at {batch} they are multiplied by"
            f" {self.factor(batch):.4g}"
        )


class TrainSettings(Part):
    """How a model is trained. A worker accumulates gradients over micro-batches of at most `micro_batch`."""

    filled_in = frozenset({"duration", "batch", "schedule"})
    harmless = frozenset({
        "duration", "batch", "micro_batch", "precision", "exchange", "optimizer", "schedule", "scale_rate", "clip",
        "label_smoothing", "ema", "size", "min_scale", "rectangular", "augment", "exact", "compile", "compile_backend",
        "activation_checkpointing", "patience", "profile", "seed",
    })  # fmt: skip

    duration: Length
    batch: BatchSize
    micro_batch: BatchSize | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    exchange: AnyExchange = default_kind(EXCHANGES, "ddp")
    optimizer: AnyOptimizer = default_kind(OPTIMIZERS, "adam")
    schedule: AnySchedule
    scale_rate: RateScale | None = None
    clip: Positive | None = None
    label_smoothing: Fraction = 0.0
    ema: Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)] | None = None
    size: Pixels = 224
    min_scale: Scale = 0.08
    rectangular: Boolean = False
    augment: AugmentSettings | None = None
    exact: Boolean = True
    compile: Boolean = False
    compile_backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    activation_checkpointing: Boolean = False
    patience: Seconds = Duration(60, "seconds")
    profile: Steps | None = None
    seed: Count = 1

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.micro_batch is not None and self.micro_batch.unit != self.batch.unit:
            yield ("micro_batch",), f"must be in {self.batch.unit}, like the batch"
        if self.scale_rate is not None and self.scale_rate.base.unit != self.batch.unit:
            word = "sqrt" if self.scale_rate.linear is None else "linear"
            yield ("scale_rate", word), f"must be in {self.batch.unit}, like the batch"
        if self.augment is not None and self.augment.mixes:
            for field, amount in (("batch", self.batch), ("micro_batch", self.micro_batch)):
                if amount is not None and amount.value < 2:
                    yield (field,), "must be at least 2 samples: mixup and cutmix mix pairs of images"
        if self.profile is not None and self.profile.value > _MAX_PROFILED_STEPS:
            yield ("profile",), f"must be at most {_MAX_PROFILED_STEPS} steps: a trace of more takes minutes to write"
        # Rules of one kind are in its own class: this one names no kind.
        yield from self.schedule.faults_in(self)
        yield from self.exchange.faults_in(self)

    def small_share(self, gpus: int) -> str | None:
        """Return a line that says what to set if the batch gives each GPU little work at the start; else None."""
        batch = self.in_epoch(0).batch
        small, enough = _GPU_SHARE[batch.unit]
        if batch.value > small * gpus:
            return None
        per_gpu = f"{batch.value // gpus:,} for each of {gpus} GPUs, " if gpus > 1 else ""
        busy = "them" if gpus > 1 else "a GPU"
        fewer = ", or use fewer GPUs" if gpus > 1 else ""
        too_few = f"train.batch: {batch.value:,} {batch.unit} are {per_gpu}too few to keep {busy} busy"
        return f"{too_few}; set {enough * gpus:,} or more and adapt the learning rate{fewer}"

    def in_epoch(self, epoch: int) -> EpochSettings:
        return self.schedule.in_epoch(EpochSettings(self.batch, self.size, self.min_scale, self.rectangular), epoch)


class EvaluateSettings(Part):
    """When and how to evaluate. `every` is None if the only evaluation is at the end."""

    harmless = frozenset({"every", "samples", "beam"})

    every: Length | None = None
    samples: Count = 100
    beam: Annotated[int, Field(strict=True, ge=1, le=1000)] = 4


class CheckpointSettings(Part):
    """When to save and what to keep. `every: auto` depends on how long a save takes and how often machines fail.

    `best_by` is `loss`, or one of the recipe's scores.
    """

    harmless = frozenset({"every", "keep_last", "keep_best", "best_by"})

    every: Interval = Duration(300, "seconds")
    keep_last: Ordinal = 2
    keep_best: Count = 1
    best_by: ScoreName | None = None


class CacheSettings(Part):
    """The place and the size of each machine's cache of packs. The environment of a machine takes precedence."""

    directory: DirectoryPath | None = None
    size: ByteSize | None = None


class FleetSettings(Part):
    """The machines of a run. `workers` is per machine; None is one per GPU, or one on a machine without.

    `price` is in dollars per machine and hour. `public_address` allows collectives over public addresses, although they
    are neither encrypted nor authenticated.
    """

    harmless = frozenset({"kind", "workers", "failures", "price"})

    kind: FleetKind = default_kind(FLEETS, "local")
    workers: WorkerCount | None = None
    failures: Count = 3
    price: Positive | None = None
    public_address: Boolean = False
    cache: CacheSettings = CacheSettings()

    @property
    def dollars_per_hour(self) -> float | None:
        """The price of one machine: what the job says, or else that of the dearest machine that the fleet may rent."""
        if self.price is not None:
            return self.price
        prices = [price for price in self.kind.hourly_prices().values() if price is not None]
        return max(prices, default=None) if not self.unpriced else None

    @property
    def unpriced(self) -> list[str]:
        """The types of machines that the fleet may rent, and whose price is not known."""
        return [name for name, price in self.kind.hourly_prices().items() if price is None]

    @classmethod
    def known_keys(cls) -> Iterable[str]:
        return (*FLEETS, *(field for field in cls.model_fields if field != "kind"))

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:
        if isinstance(fields.get("kind"), FleetKind):
            return fields
        if "kind" in fields:  # a field of this class, but not a key of the job file
            del fields["kind"]
            problems += unknown_keys(["kind"], cls.known_keys())
        words = [word for word in fields if word in FLEETS]
        settings = {word: fields.pop(word) for word in words}
        if len(words) > 1:
            problems.append(problem(not_one(FLEETS, len(words))))
        elif words:
            chosen = settings[words[0]]
            try:
                fields["kind"] = kind_class(FLEETS, words[0]).model_validate({} if chosen is None else chosen)
            except ValidationError as error:
                problems += problems_of(error, words[0])
        return fields

    @model_serializer
    def _flat(self, info: SerializationInfo) -> dict[str, Any]:
        settings = self.kind.model_dump(mode="json", exclude_defaults=info.exclude_defaults)
        other_fields = {name: getattr(self, name) for name in type(self).model_fields if name != "kind"}
        if info.exclude_defaults:
            other_fields = {
                name: value for name, value in other_fields.items() if value != type(self).model_fields[name].default
            }
        return {word_of(FLEETS, self.kind): settings, **other_fields}


class ReportSettings(Part):
    """Where else to report a run: `mlflow` is the URI of a tracking server, or a directory for MLflow's file store."""

    harmless = frozenset()  # the URI gets this person's keys for MLflow

    mlflow: TrackingPath | None = None


class BudgetSettings(Part):
    harmless = frozenset({"dollars", "hours"})

    dollars: Positive | None = None
    hours: Positive | None = None


def _read_inputs(value: object) -> dict[str, str]:
    """Return the data of a program by name; a path or a list of paths is named after the last part of each."""
    listed = [value] if isinstance(value, str) else value
    if isinstance(listed, (list, tuple)) and all(isinstance(path, str) for path in listed):
        named = [(PurePosixPath(path).name, path) for path in listed]
    elif isinstance(listed, Mapping) and all(isinstance(path, str) for path in listed.values()):
        named = list(listed.items())
    else:
        kinds = "a path, a list of paths, or a mapping of names to paths"
        raise ValueError(f"must be {kinds} for a program; sources such as bitext belong to recipes")
    problems, names_before = [], set()
    for place, (name, path) in zip(listed if isinstance(listed, Mapping) else range(len(named)), named, strict=True):
        if fault := input_path_fault(path):
            problems.append(problem(fault, place))
        elif not FOLDER_NAME.fullmatch(name) or name in names_before:
            fault = "there twice" if name in names_before else "no name for a folder"
            problems.append(problem(f"{quoted(name, 60)} is {fault}; write a mapping, such as {{corpus: PATH}}", place))
        names_before.add(name)
    if problems:
        raise refusal(problems)
    return dict(named)


class CodeOrigin(Part):
    """The directory that the code of a run came from; `packtrain run` writes it, a job file does not.

    Another machine sees the same directory if the path has the same inode there, as on a network file system.
    """

    directory: DirectoryPath
    inode: Count


class Parent(Part):
    """The checkpoint of another run that a run started from; `packtrain run` writes it, a job file does not.

    `takes` is everything, for a fork, or the weights alone: as they were trained, or their moving average. `sha256` is
    that of the checkpoint's manifest. The run has its own copy of what it takes.
    """

    harmless = frozenset({"run", "store", "step", "checkpoint", "sha256", "takes"})

    run: Name
    store: StorePath
    step: Count
    checkpoint: Annotated[str, matching(r"[0-9]{9,}-[0-9]{6,}-[0-9a-f]{12}", "the name of a checkpoint")]
    sha256: Annotated[str, matching("[0-9a-f]{64}", "a SHA-256")]
    takes: Literal["everything", "weights", "ema"]

    @property
    def in_words(self) -> str:
        if self.takes == "everything":
            return f"{self.run} at step {self.step:,}, as a fork"
        average = ", their moving average" if self.takes == "ema" else ""
        return f"the weights of {self.run} at step {self.step:,}{average}"

    @property
    def identified(self) -> str:
        """The same with the digest, so that anybody can tell which checkpoint it was."""
        return f"{self.in_words} (SHA-256 {self.sha256[:12]})"


class _NullForPrograms:
    """Lets a section be None in the job of a program, although its type says that every job has it.

    Only code that runs a recipe reads `job.train`, so it need not check for None.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.nullable_schema(handler(source))


def _absent() -> Any:  # a factory: the type of a section does not allow None as a plain default
    return None


_NULL_FOR_PROGRAMS = _NullForPrograms()
_RUN_NAME = "a run, such as run:NAME or run:NAME:STEP; a file of weights goes into model.weights"
_RECIPE_SECTIONS = ("data", "model", "train", "evaluate")
_SECTIONS = (*_RECIPE_SECTIONS, "checkpoint", "fleet", "budget", "report")


# The first word is the path of a script, and never an option.
Command = Annotated[
    tuple[Argument, ...],
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "prefixItems": [{"type": "string", "pattern": rf"{CODE_PATTERN}(?!-)"}],
        }
    ),
]
_OUTPUTS_IN_SCHEMA = WithJsonSchema(
    {"type": "array", "items": {"type": "string", "pattern": rf"{CODE_PATTERN}(?![./]*$)"}}
)


class ProgramSettings(Part):
    """The command of a program, and arguments that follow it once a checkpoint was restored."""

    command: Command
    resume: tuple[Argument, ...] = ()

    @property
    def in_words(self) -> str:
        return " ".join(self.command) + (f" (after a restore: {' '.join(self.resume)})" if self.resume else "")

    def faults(self) -> Iterator[tuple[Location, str]]:
        if not self.command:
            yield ("command",), "must name a script, such as [train.py]"
        elif self.command[0].startswith("-"):
            yield ("command", 0), "must be the path of a script, not an option"
        elif fault := code_path_fault(self.command[0]):
            yield ("command", 0), fault


class Job(Part):
    """A recipe with its data, or any program, and how to run it. A job with data alone can be packed, but not run.

    Relative source paths are made absolute when a job is loaded; `store` and `code` stay as written.
    """

    # Only creating a run reads `store`, `code`, `weights` and the paths of `data`. `recipe` is harmless unless it is
    # somebody's own, which `risks` in run/trust.py says.
    harmless = frozenset({
        "name", "recipe", "store", "code", "weights", "parent", "data", "model", "train", "evaluate", "checkpoint",
        "fleet", "budget", "report",
    })  # fmt: skip

    name: Name
    recipe: RecipeName | None = None
    program: ProgramSettings | None = None
    store: StorePath = "./store"
    code: CodeRoot = "."
    directory: CodePath = "."
    environment: tuple[Variable, ...] = ()
    outputs: Annotated[tuple[CodePath, ...], _OUTPUTS_IN_SCHEMA] = ()
    origin: CodeOrigin | None = None
    weights: Annotated[str, matching(r"run:\S{1,1000}", _RUN_NAME)] | None = None
    parent: Parent | None = None
    inputs: Annotated[dict[str, str], PlainValidator(_read_inputs, json_schema_input_type=dict[str, str])] = Field(
        default_factory=dict
    )
    data: Annotated[DataSettings, _NULL_FOR_PROGRAMS] = Field(default_factory=_absent)
    model: Annotated[ModelSettings, _NULL_FOR_PROGRAMS] = Field(default_factory=_absent)
    train: Annotated[TrainSettings, _NULL_FOR_PROGRAMS] = Field(default_factory=_absent)
    evaluate: Annotated[EvaluateSettings, _NULL_FOR_PROGRAMS] = Field(default_factory=_absent)
    checkpoint: CheckpointSettings = CheckpointSettings()
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    budget: BudgetSettings = BudgetSettings()
    report: ReportSettings = ReportSettings()

    @property
    def step_kind(self) -> Literal["train", "log"]:
        """The kind of the points that are the steps of its runs; anyone who can write a store can add others."""
        return "train" if self.recipe is not None else "log"

    @property
    def has_own_code(self) -> bool:
        """True if it runs a program or a recipe of the user's own, and not only code of Packtrain."""
        return self.program is not None or (self.recipe is not None and ":" in self.recipe)

    @property
    def named_paths(self) -> tuple[str, ...]:
        """Everything with which the program's command may name a file of the code, relative to the code."""
        words = () if self.program is None else (*self.program.command, *self.program.resume)
        paths = (path for word in words for path in (word, word.partition("=")[2]) if path)
        return tuple(os.path.normpath(PurePosixPath(self.directory, path)) for path in paths)

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:
        # `train:` with nothing below it is null in YAML, and means the defaults.
        fields = {key: value for key, value in expand(fields).items() if value is not None or key not in _SECTIONS}
        recipe, program = fields.get("recipe") is not None, fields.get("program") is not None
        if program and not isinstance(fields["program"], (Mapping, ProgramSettings)):  # the command alone
            try:
                fields["program"] = ProgramSettings(command=fields["program"])
            except ValidationError as error:
                fields["program"] = None
                problems += [problem(text, "program", *location[1:]) for location, text, _ in faults(error)]
        if recipe and program:
            problems.append(problem("a job has a recipe or a program, not both", "program"))
        elif recipe:
            for section in _RECIPE_SECTIONS:
                fields.setdefault(section, {})
        elif program:
            if "data" in fields:  # folders for its machines; `inputs` in the job of a run
                try:
                    fields["inputs"] = _read_inputs(fields.pop("data"))
                except ValidationError as error:
                    problems += problems_of(error, "data")
                except ValueError as error:
                    problems.append(problem(str(error), "data"))
            for section in [section for section in _RECIPE_SECTIONS if section in fields]:
                del fields[section]
                problems.append(problem(_RECIPES_ONLY, section))
            checkpoint = fields.setdefault("checkpoint", {})  # a program has no scores to choose the best by
            if isinstance(checkpoint, Mapping):
                fields["checkpoint"] = {"keep_best": 0, **checkpoint}
        elif fields.get("data") is None or any(section in fields for section in ("model", "train", "evaluate")):
            problems.append(problem("is required, unless the job has a program", "recipe", kind=REQUIRED))
        return fields

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.budget.dollars is not None and self.fleet.dollars_per_hour is None:
            unpriced = ", ".join(self.fleet.unpriced)
            why = f"; no price is known for {unpriced}" if unpriced else ""
            yield ("budget", "dollars"), f"requires fleet.price, the price of a machine in dollars per hour{why}"
        for number, output in enumerate(self.outputs):
            if self.program is None:
                yield ("outputs", number), "applies to programs only, not to recipes"
            elif output.strip("./") == "":
                yield ("outputs", number), "must name a file or folder that the program writes, such as out/"
        if self.program is None and self.directory != ".":
            yield ("directory",), "applies to programs only, not to recipes"
        if self.recipe is None and self.weights is not None:
            yield ("weights",), _RECIPES_ONLY
        if self.program is None or self.recipe is not None:
            return
        if self.checkpoint.every == "auto" or self.checkpoint.every.unit != "seconds":
            yield ("checkpoint", "every"), "must be a time for a program, such as '5 min'"
        if self.checkpoint.keep_best or self.checkpoint.best_by:
            yield ("checkpoint", "keep_best"), _RECIPES_ONLY


def expand(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with its short forms written out: `model: base` as `model: {size: base}`, and so on."""
    full = dict(document)
    if isinstance(full.get("model"), str):
        full["model"] = {"size": full["model"]}
    if isinstance(full.get("fleet"), str):
        full["fleet"] = {full["fleet"]: {}}
    if isinstance(full.get("train"), Mapping):
        train = full["train"] = dict(full["train"])
        for field in ("optimizer", "schedule", "exchange"):
            if isinstance(train.get(field), str):
                train[field] = {train[field]: {}}
    if isinstance(full.get("data"), Mapping):
        data = full["data"] = dict(full["data"])
        for field in ("train", "valid", "test"):
            if isinstance(data.get(field), Mapping):
                data[field] = [data[field]]
            if isinstance(data.get(field), list):
                data[field] = [expand_source(source) for source in data[field]]
    return full
