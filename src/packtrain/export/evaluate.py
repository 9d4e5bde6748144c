"""Scores of trained models, on their own splits or on data that came later: with confidence intervals, and compared.

A model is a run, which needs torch, or an exported folder, which does not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.data.order import Ids, spread
from packtrain.data.pack import Pack
from packtrain.errors import FieldMistake, Mistake, PacktrainError, printable
from packtrain.export.bootstrap import RESAMPLES, SEED, Difference, Interval, difference_of, interval_of, resampled
from packtrain.export.model import ExportedModel, read_model
from packtrain.export.predict import load_model, recipe_for
from packtrain.identity import install_command
from packtrain.job.kinds import Source
from packtrain.observe.measure import measure_of
from packtrain.pack.build import Learned, Packing, PackProgress, pack_later
from packtrain.pack.fetch import local_source
from packtrain.pack.given import read_sources
from packtrain.pack.manifest import Manifest, find_manifest
from packtrain.pack.workers import Workers
from packtrain.recipes import EvaluationRequest, Recipe
from packtrain.recipes.recipe import LAST_EPOCH, Measurement
from packtrain.recipes.statistics import Floats, Statistic
from packtrain.run.checkpoint import Choice, candidates
from packtrain.run.records import Sample
from packtrain.run.run import Run
from packtrain.run.trust import Accept, refuse
from packtrain.store import Store, open_store
from packtrain.system import cache_directory

LATER = "test"
"""The split that has the data of `--data`."""
_PER_TOKEN = frozenset({"loss", "perplexity"})  # they depend on how a vocabulary divides a text


@dataclass(frozen=True)
class EvaluateOptions:
    """The samples to evaluate on, and whether each is wanted with its prediction. `data` are values of `--data`; None
    leaves the choice to the model and its job."""

    data: Sequence[str] = ()
    split: str | None = None
    samples: int | None = None
    beam: int | None = None
    allow_drops: bool = False
    predictions: bool = False


@dataclass(frozen=True)
class Subject:
    """A model to evaluate. `recipe` has its own splits, unless `absent` says why it has not.

    `load` returns the model and the step of its weights. It is called when it is needed, so that two large models are
    not in memory together.
    """

    name: str
    recipe: Recipe
    load: Callable[[], tuple[Any, int]]
    absent: str = ""


@dataclass(frozen=True)
class SampledScore:
    """`interval` is None if the recipe does not say what a score is computed from, sample by sample."""

    value: float
    interval: Interval | None
    signature: str = ""


@dataclass(frozen=True, eq=False)
class ModelScores:
    """`samples` of the `available` ones were evaluated; `resamples` has each score on resamples of them.

    `predictions` has a JSON object for each sample, if they were asked for.
    """

    subject: Subject
    step: int
    split: str
    samples: int
    available: int
    beam: int
    seconds: float
    scores: Mapping[str, SampledScore]
    shown: Sequence[Sample]
    notes: Sequence[str] = ()
    resamples: Mapping[str, Floats] = field(default_factory=dict)
    predictions: Sequence[Mapping[str, Any]] = ()

    def as_json(self) -> dict[str, Any]:
        recipe = self.subject.recipe
        return {
            "model": self.subject.name,
            "recipe": recipe.job.recipe,
            "step": self.step,
            "split": self.split,
            "samples": self.samples,
            "available": self.available,
            "beam": self.beam if "beam" in recipe.decode_options else None,
            "seconds": round(self.seconds, 3),
            "bootstrap": {"resamples": RESAMPLES, "seed": SEED},
            "scores": {
                name: {
                    "value": score.value,
                    "interval": None if score.interval is None else [score.interval.low, score.interval.high],
                    "signature": score.signature,
                }
                for name, score in self.scores.items()
            },
            "notes": list(self.notes),
            # Pictures and the like are in the folder of a run, not here.
            "examples": [
                {"input": sample.input, "reference": sample.reference, "prediction": sample.prediction}
                for sample in self.shown
            ],
        }


# The models.


def run_subject(run: Run, choice: Choice = "last", accept: Accept = refuse) -> Subject:
    recipe = recipe_for(run, accept, "evaluate")
    candidates(run, choice)  # before data is packed: without a checkpoint there is nothing to evaluate

    def load() -> tuple[Any, int]:
        # Accepted above, so a person is not asked twice.
        _, model, checkpoint = load_model(run, choice, accept=lambda _: None, purpose="evaluate")
        return model, checkpoint.step

    return Subject(run.name, recipe, load)


def folder_subject(folder: Path, store: Callable[[], Store]) -> Subject:
    """Return the model of a folder; `store` opens the one that may have the splits of its run."""
    model = read_model(folder)
    home, origin = model.recipe, model.manifest.origin
    pack = _own_pack(model, store)
    absent = f"the splits of {origin.run} are not in this store; pass --data, or --store with pack {origin.pack}"
    recipe = home if pack is None else type(home)(home.job, pack)
    return Subject(str(folder), recipe, lambda: (model.network(), origin.step), absent if pack is None else "")


def _own_pack(model: ExportedModel, store: Callable[[], Store]) -> Pack | None:
    name, home = model.manifest.origin.pack, model.recipe.pack
    try:
        opened = store()
        manifest = find_manifest(opened, name)
    except PacktrainError:  # at home there is often no store
        return None
    if manifest is None:
        return None
    # Classes by their number: an exported model may have them in words.
    if _digest(manifest) != _digest(home.manifest) or len(manifest.classes) != len(home.manifest.classes):
        raise Mistake(f"pack {name} in {opened.url} has another vocabulary or other classes than {model.folder}")
    return SamplePack(opened, manifest, cache_directory() / "packs", home)


def _digest(manifest: Manifest) -> str | None:
    return manifest.vocabulary.sha256 if manifest.vocabulary else None


class SamplePack(Pack):
    """Samples for a model that is not from their pack: files that its job names stay those of its own."""

    def __init__(self, store: Store, manifest: Manifest, directory: Path, model_pack: Pack) -> None:
        super().__init__(store, manifest.name, directory, manifest=manifest)
        self._model_pack = model_pack

    def given_file(self, path: str) -> Path:
        return self._model_pack.given_file(path)


# The data.


@dataclass(frozen=True)
class EvaluationTask:
    """A recipe with the samples to evaluate, and remarks about them."""

    recipe: Recipe
    split: str
    notes: Sequence[str] = ()


def _own_task(subject: Subject, requested: str | None) -> EvaluationTask:
    if subject.absent:
        raise Mistake(f"{subject.name}: {subject.absent}")
    for split in (requested,) if requested else ("test", "valid"):
        if subject.recipe.count(split):
            return EvaluationTask(subject.recipe, split)
    if requested is None:
        raise Mistake(f"{subject.name} has neither a test nor a valid split; pass --data")
    available = [split for split in ("test", "valid") if subject.recipe.count(split)]
    advice = f"pass --split {available[0]}, or --data" if available else "pass --data"
    raise Mistake(f"--split {requested}: {subject.name} has no such split; {advice}")


class _LaterData:
    """Packs data that came later, in a temporary store, for each model as it needs it."""

    def __init__(self, folder: Path, options: EvaluateOptions, progress: PackProgress, workers: Workers) -> None:
        self._options, self._progress, self._workers = options, progress, workers
        self._folder = folder
        self._store = open_store(str(folder / "store"), create=True)
        self._packed: dict[tuple[object, ...], Manifest] = {}

    def task(self, subject: Subject) -> EvaluationTask:
        recipe = subject.recipe
        sources = read_sources("--data", self._options.data, str(recipe.job.recipe), recipe.contents)
        sources = tuple(map(self._local, sources))
        for source in sources:
            if (kind := source.pack_kind()) != recipe.kind:
                place = printable(source.paths[0], 200)
                raise Mistake(f"--data: {place} has {kind}, but {recipe.job.recipe} needs {recipe.kind}")
        data = recipe.job.data.model_copy(update={"train": (), "valid": (), LATER: sources})
        own, own_manifest = recipe.pack, recipe.pack.manifest
        learned = Learned(
            tuple(own_manifest.classes),
            own.vocabulary.to_json() if own_manifest.vocabulary else None,
            own.target_vocabulary.to_json() if own_manifest.target_vocabulary else None,
        )
        # Two models that learned the same can share a pack.
        key = learned, data.sizes
        if key not in self._packed:
            name = f"later-{len(self._packed)}"
            packing = Packing(name, data, self._store, self._workers, self._progress, learned)
            try:
                self._packed[key] = pack_later(packing, recipe.kind, self._options.allow_drops)
            except FieldMistake as mistake:
                raise Mistake(f"--data: {mistake.fault}") from None
        pack = SamplePack(self._store, self._packed[key], self._folder / "cache", recipe.pack)
        job = recipe.job.model_copy(update={"data": data})
        classes = pack.manifest.classes
        notes: list[str] = []
        if classes and (num_present := len(np.unique(pack.split(LATER).plain("label")))) != len(classes):
            notes = [f"the data has {num_present:,} of the {len(classes):,} classes of the model"]
        return EvaluationTask(type(recipe)(job, pack), LATER, notes)

    def _local(self, source: Source) -> Source:
        if any(path.startswith("store:") for path in source.paths):
            raise Mistake("--data: store: names no store here; pass a path, or an s3:// or https:// URL")
        return local_source(source, self._store, cache_directory() / "sources", self._progress.say)


# Evaluations.


def evaluate(
    subjects: Sequence[Subject], options: EvaluateOptions, progress: PackProgress, workers: Workers
) -> list[ModelScores]:
    """Evaluate models of one recipe on the same samples."""
    first = subjects[0]
    for subject in subjects:
        _check(subject, first, options)
    with tempfile.TemporaryDirectory(prefix="packtrain-evaluate-") as folder:
        if options.data:
            later = _LaterData(Path(folder), options, progress, workers)
            tasks = [later.task(subject) for subject in subjects]
        else:
            tasks = [_own_task(first, options.split)]
            tasks += [_own_task(subject, tasks[0].split) for subject in subjects[1:]]
            for subject, task in zip(subjects, tasks, strict=True):
                # Splits that were not packed from the same raw data cannot be compared.
                name = tasks[0].split
                manifests = [either.recipe.pack.manifest for either in (tasks[0], task)]
                sources = [manifest.settings.get("splits", {}).get(name) for manifest in manifests]
                counts = [either.recipe.count(name) for either in (tasks[0], task)]
                is_same_data = sources[0] == sources[1] and counts[0] == counts[1]
                if manifests[0].name != manifests[1].name and not is_same_data:
                    fault = f"the {name} splits of {first.name} and {subject.name} have different data; pass --data"
                    raise Mistake(f"--against: {fault}")
        return [_evaluated(*pair, options, progress) for pair in zip(subjects, tasks, strict=True)]


def _check(subject: Subject, first: Subject, options: EvaluateOptions) -> None:
    recipe, word, first_word = subject.recipe, subject.recipe.job.recipe, first.recipe.job.recipe
    if word != first_word:
        raise Mistake(
            f"--against: {subject.name} is a model of {word} and {first.name} one of {first_word};"
            " compare models of the same recipe"
        )
    if options.beam is not None and "beam" not in recipe.decode_options:
        raise Mistake(f"--beam: {recipe.job.recipe} does not support it")
    if options.data and options.split:
        raise Mistake("--split: chooses among the model's own data; remove it, or --data")
    missing = [package for package in recipe.score_packages if find_spec(package) is None]
    if missing:
        command = install_command("train", *missing)
        raise Mistake(f"evaluate needs {', '.join(missing)} for the scores of {recipe.job.recipe}; run `{command}`")


def _evaluated(subject: Subject, task: EvaluationTask, options: EvaluateOptions, progress: PackProgress) -> ModelScores:
    recipe, split = task.recipe, task.split
    count = recipe.count(split)
    ids = spread(count, count if options.samples is None else options.samples)
    beam = options.beam or recipe.job.evaluate.beam
    model, step = subject.load()
    started = time.perf_counter()
    with progress.track(f"evaluating {subject.name} in batches", None) as advance:
        request = EvaluationRequest(split, ids, ids, beam, LAST_EPOCH, lambda: advance(1), by_sample=True)
        measured = recipe.measure(model, request)
    scores = recipe.score(split, ids, [measured])
    seconds = time.perf_counter() - started
    statistics = {  # of these scores: a recipe derived from another may define a score of that name anew
        name: statistic
        for name, statistic in (recipe.statistics(split, ids, measured) if measured.rows else {}).items()
        if name in scores.values and np.isclose(statistic.value, scores.values[name], rtol=1e-6, atol=1e-9)
    }
    resamples = resampled(statistics)
    return ModelScores(
        subject,
        step,
        split,
        len(ids),
        count,
        beam,
        seconds,
        {
            name: SampledScore(
                value, interval_of(resamples[name]) if name in resamples else None, scores.signatures.get(name, "")
            )
            for name, value in scores.values.items()
        },
        scores.samples,
        task.notes,
        resamples,
        _predictions(subject, task, ids, measured, statistics) if options.predictions else (),
    )


def _predictions(
    subject: Subject, task: EvaluationTask, ids: Ids, measured: Measurement, statistics: Mapping[str, Statistic]
) -> list[dict[str, Any]]:
    """Return each sample: which one it is, what the model made of it, and its own scores."""
    by_sample = {name: statistic.by_sample for name, statistic in statistics.items()}
    records = task.recipe.sample_records(task.split, ids, measured)
    return [
        {
            "model": subject.name,
            "sample": sample,
            **record,
            "scores": {name: value for name, column in by_sample.items() if (value := column[place]) is not None},
        }
        for place, (sample, record) in enumerate(zip(ids.tolist(), records, strict=True))
    ]


# Comparisons.


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two models on the same samples; a difference is what the second has more."""

    first: ModelScores
    second: ModelScores
    differences: Mapping[str, Difference]
    verdict: str

    def as_json(self) -> dict[str, Any]:
        return {
            "against": self.second.as_json(),
            "differences": {
                name: {
                    "value": difference.value,
                    "interval": [difference.interval.low, difference.interval.high],
                    "p_value": difference.p_value,
                    "significant": difference.is_significant,
                }
                for name, difference in self.differences.items()
            },
            "verdict": self.verdict,
        }


def compare(first: ModelScores, second: ModelScores) -> Comparison:
    """Compare by paired bootstrap resampling: both models on the same resamples."""
    manifests = [scores.subject.recipe.pack.manifest for scores in (first, second)]
    unlike = frozenset() if _digest(manifests[0]) == _digest(manifests[1]) else _PER_TOKEN
    differences = {
        name: difference_of(
            first.resamples[name], second.resamples[name], second.scores[name].value - first.scores[name].value
        )
        for name in first.resamples
        if name in second.resamples and name not in unlike
    }
    return Comparison(first, second, differences, _verdict(first, second, differences))


def _verdict(first: ModelScores, second: ModelScores, differences: Mapping[str, Difference]) -> str:
    """Return a sentence about the score that decides which checkpoint of such a model is the best."""
    recipe = first.subject.recipe
    name = measure_of(recipe.job, type(recipe)).name
    if name not in differences:
        name = recipe.best_metric
    if name not in differences:
        return f"{name} cannot be compared: it has no interval, or is per token of different vocabularies"
    difference = differences[name]
    # From the point of view of the better model, so that the numbers are positive.
    second_leads = (difference.value > 0) != (name in recipe.lower_is_better)
    low, high = difference.interval.low, difference.interval.high
    if difference.value < 0:
        low, high = -high, -low
    figures = f"95 % interval {show(low)} to {show(high)}, p = {difference.p_value:.3f}"
    if not difference.is_significant:
        return f"no difference beyond noise: {show(abs(difference.value))} {name} ({figures})"
    winner = second if second_leads else first
    return f"{winner.subject.name} is better by {show(abs(difference.value))} {name} ({figures})"


def show(value: float) -> str:
    """Return a score with three digits or more, and two decimals at most unless it is small."""
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def report(evaluations: Sequence[ModelScores], data: Sequence[str]) -> dict[str, Any]:
    """Return everything for scripts; new data is of no split."""
    first = evaluations[0].as_json() | ({"data": list(data), "split": None} if data else {"data": []})
    return first | (compare(*evaluations).as_json() if len(evaluations) == 2 else {})
