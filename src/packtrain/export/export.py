"""From a run to a model that predicts without torch: weights in another form, and proof that it says the same."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.data.order import Ids, spread
from packtrain.errors import Mistake, PacktrainError, printable, quoted
from packtrain.export.bootstrap import difference_of, resampled, widened
from packtrain.export.card import card_of, drop_in_words
from packtrain.export.deliver import replace_folder
from packtrain.export.evaluate import show
from packtrain.export.model import (
    CARD,
    FORMAT,
    JOB,
    MANIFEST,
    VOCABULARY,
    ExportedModel,
    ModelManifest,
    Origin,
    Parity,
    decode_manifest,
    exportable,
    is_model,
)
from packtrain.export.predict import TrainedModel, load_model, weights_file
from packtrain.files import sha256_of
from packtrain.identity import identity
from packtrain.job import Job
from packtrain.job.job import BudgetSettings, CheckpointSettings, FleetSettings
from packtrain.observe.status import read_end
from packtrain.recipes import EvaluationRequest, Recipe
from packtrain.recipes.forms import Exportable, Form, Precision, form_of
from packtrain.recipes.recipe import LAST_EPOCH, Network, Scores
from packtrain.recipes.statistics import Floats
from packtrain.run.checkpoint import Checkpoint, Choice, StoredFile, candidates, fetch
from packtrain.run.liveness import state_of
from packtrain.run.run import Run
from packtrain.run.trust import Accept, refuse
from packtrain.store.records import encode

if TYPE_CHECKING:
    from torch import Tensor, nn

Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportOptions:
    """`average` checkpoints, the best or the last ones, become one model. None leaves the choice to the recipe.

    `tolerance` is how much worse the exported model may score than the trained one, on at most `samples` samples.
    `replace` lets it take the place of the model of another run.
    """

    choice: Choice = "best"
    average: int = 1
    form: str | None = None
    precision: Precision = "fp32"
    tolerance: float | None = None
    samples: int = 1000
    license: str | None = None
    replace: bool = False


class TooFar(PacktrainError):
    """The exported model is worse than the trained one, by more than the tolerance and beyond noise."""


def export_run(run: Run, folder: Path, options: ExportOptions, say: Say, accept: Accept = refuse) -> ExportedModel:
    """Write the model of a run to a folder, which appears only when it is complete and has been compared."""
    _check_target(folder, run, options.replace)
    trained = load_model(run, options.choice, say, accept, "export")
    checkpoints = [trained.checkpoint]
    if options.average > 1:
        checkpoints = _average(run, trained, options)
        say(f"averaged the weights of steps {', '.join(str(averaged.step) for averaged in checkpoints)}")
    if not run.job.has_own_code:
        exportable(str(run.job.recipe))
    forms = list(trained.recipe.forms if isinstance(trained.recipe, Exportable) else Exportable.forms)
    form = options.form or forms[0]
    if form not in forms:
        raise Mistake(f"--format {quoted(form)}: {run.job.recipe} has {' and '.join(forms)}")
    if run.job.has_own_code and options.precision != "fp32":
        raise Mistake(f"--int8: not supported for {run.job.recipe}, a recipe of your own; remove it")
    with _appearing(folder) as new_folder:
        say(f"writing step {trained.checkpoint.step:,} of {run.name} for {form} in {options.precision}")
        manifest = _written(run, trained, checkpoints, new_folder, form, options)
        for parity in manifest.parity:
            say(_in_words(parity))
            available = trained.recipe.count(parity.split)
            if parity.interval.high > parity.tolerance and parity.samples < available:
                beyond = f"a loss beyond the tolerance of {parity.tolerance:g}"
                say(f"{parity.samples:,} samples cannot rule out {beyond}; for more, pass --samples {available}")
    return ExportedModel(folder, manifest)


def _written(
    run: Run, trained: TrainedModel, checkpoints: list[Checkpoint], folder: Path, form_name: str, options: ExportOptions
) -> ModelManifest:
    """Write all files of the model, the manifest last."""
    from packtrain.export.onnx import OwnGraph, export_own, write_weights

    recipe, model, checkpoint = trained
    parity: tuple[Parity, ...] = ()
    graph: OwnGraph | None = None
    if run.job.has_own_code:
        graph = export_own(recipe, model, folder)  # compares its outputs itself: nobody else knows what they mean
    else:
        assert isinstance(recipe, Exportable)
        form = form_of(type(recipe), form_name)
        form.write(recipe, model, folder, options.precision)
        write_context(recipe, folder)
        if recipe.inputs == "images":
            write_weights(model, folder)
        parity = (measure_parity(recipe, model, form, folder, options),)
    origin = Origin(
        run=run.name,
        checkpoints=tuple(checkpoint_used.name for checkpoint_used in checkpoints),
        step=checkpoint.step,
        pack=run.pack_name(),
        job=run.job_digest,
        packtrain=identity(),
        made=time.time(),
    )
    scores = {name: float(value) for name, value in read_end(run, state_of(run)).scores.items()}
    manifest = ModelManifest(
        FORMAT, str(run.job.recipe), form_name, options.precision, recipe.labels, origin, parity, scores, files=()
    )
    (folder / CARD).write_text(card_of(manifest, run.job, recipe, options.license, graph), encoding="utf-8")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    stored = (StoredFile(path.relative_to(folder).as_posix(), path.stat().st_size, sha256_of(path)) for path in paths)
    manifest = replace(manifest, files=tuple(stored))
    (folder / MANIFEST).write_bytes(encode(manifest))
    return manifest


# Weights.


def _average(run: Run, trained: TrainedModel, options: ExportOptions) -> list[Checkpoint]:
    """Replace the weights of the model by their mean over several checkpoints, and return these."""
    import torch

    from packtrain.train.state import load_weights

    if not isinstance(options.choice, str):
        raise Mistake("--average: takes the best or the last checkpoints; remove the step of --checkpoint")
    available = list(candidates(run, options.choice))
    if len(available) < options.average:
        has = f"{run.name} has {len(available)}; checkpoint.keep_best and keep_last keep more"
        raise Mistake(f"--average {options.average}: {has}")
    chosen = available[: options.average]
    with tempfile.TemporaryDirectory(prefix="packtrain-export-") as directory:
        total: dict[str, Tensor] = {}
        for number, checkpoint in enumerate(chosen):
            place = Path(directory, str(number))
            place.mkdir()
            fetch(run, checkpoint, place)
            load_weights(trained.model, place, weights_file(checkpoint))
            for name, tensor in trained.model.state_dict().items():
                double = tensor.cpu().to(torch.float64, copy=True)
                total[name] = double + total[name] if name in total else double
        state = trained.model.state_dict()
        for name, tensor in total.items():
            state[name].copy_((tensor / len(chosen)).to(state[name].dtype))
    return chosen


# Files.


def write_context(recipe: Recipe, folder: Path) -> None:
    """Write what a recipe needs beside the weights: the job, and the vocabulary if it has one."""
    (folder / JOB).write_text(home_job(recipe.job, recipe.files).model_dump_json(indent=1), encoding="utf-8")
    if recipe.pack.manifest.vocabulary is not None:
        (folder / VOCABULARY).write_text(recipe.pack.vocabulary.to_json(), encoding="utf-8")


def home_job(job: Job, files: Sequence[str]) -> Job:
    """Return the job without the places of its data, its machines and its money: they are nobody's business at home."""
    options = {name: value for name, value in job.model.options.items() if name not in files}
    return job.model_copy(
        update={
            "store": "./store",
            "code": ".",
            "environment": (),
            # The query of an address may be a signature.
            "data": job.data.map_paths(
                lambda path: re.split(r"[/\\]", re.split(r"[?#]", path)[0].rstrip("/"))[-1] or "data"
            ),
            "model": job.model.model_copy(update={"options": options}),
            "checkpoint": CheckpointSettings(),
            "fleet": FleetSettings(),
            "budget": BudgetSettings(),
        }
    )


def _check_target(folder: Path, run: Run, may_replace: bool) -> None:
    name = printable(str(folder))
    if folder.exists() and not folder.is_dir():
        raise Mistake(f"{name}: is a file; choose another folder with --output")
    if is_model(folder):
        try:
            origin: Origin | None = decode_manifest((folder / MANIFEST).read_bytes(), name).origin
        except (Mistake, OSError):
            origin = None
        # Other stores have runs of the same name.
        is_same = origin is not None and (origin.run, origin.job) == (run.name, run.job_digest)
        if not (is_same or may_replace):
            holds = "a model that cannot be read" if origin is None else f"the model of {origin.run}"
            raise Mistake(f"{name}: has {holds}; choose another folder with --output, or pass --replace")
    elif folder.is_dir() and any(folder.iterdir()):
        raise Mistake(f"{name}: exists and is not an exported model; choose another folder with --output")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Give a new folder that takes the place of another one at the end, or disappears if anything fails."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise Mistake(f"{printable(str(folder))}: cannot write there: {error.strerror}") from None
    try:
        new_folder.chmod(0o755)
        yield new_folder
        replace_folder(new_folder, folder)
    except OSError as error:
        raise PacktrainError(f"{printable(str(folder))}: cannot write: {error.strerror}") from error
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)


# Parity.


def measure_parity(recipe: Exportable, model: nn.Module, form: Form, folder: Path, options: ExportOptions) -> Parity:
    """Compare the exported model with the trained one; raise TooFar if it is worse than the tolerance allows.

    A few samples give either model a better score by chance. So the interval of the difference decides, not its value.
    """
    [(metric, usual)] = recipe.tolerances.items()
    split = "valid" if recipe.count("valid") else "test"
    ids = spread(recipe.count(split), options.samples)
    if not len(ids):
        raise Mistake("the run has neither a validation nor a test split to compare the exported model on")
    before, resamples_before = _scores(recipe, model, split, ids, metric)
    after, resamples_after = _scores(recipe, form.load(recipe, folder), split, ids, metric)
    sign = -1 if metric in recipe.lower_is_better else 1
    drop = sign * (before.values[metric] - after.values[metric])
    difference = difference_of(sign * resamples_after, sign * resamples_before, drop)
    parity = Parity(
        metric,
        split,
        len(ids),
        before.values[metric],
        after.values[metric],
        difference.value,
        widened(difference, len(ids)),
        usual if options.tolerance is None else options.tolerance,
        before.signatures.get(metric, ""),
    )
    if not (math.isfinite(drop) and parity.interval.low <= parity.tolerance):
        remedy = "export without --int8, or accept it with" if options.precision == "int8" else "accept it with"
        limit = f"beyond the tolerance of {parity.tolerance:g}"
        raise TooFar(f"{_in_words(parity)}, {limit}; nothing was written; {remedy} --tolerance")
    return parity


def _scores(recipe: Recipe, model: nn.Module | Network, split: str, ids: Ids, metric: str) -> tuple[Scores, Floats]:
    """Return the scores, as the last evaluation of the run has them, and one of them on resamples."""
    request = EvaluationRequest(split, ids, ids, recipe.job.evaluate.beam, LAST_EPOCH, by_sample=True)
    measured = recipe.measure(model, request)
    statistic = recipe.statistics(split, ids, measured)[metric]
    return recipe.score(split, ids, [measured]), resampled({metric: statistic})[metric]


def _in_words(parity: Parity) -> str:
    where = f"{parity.samples:,} samples of {parity.split}"
    values = f"{show(parity.exported)}, in torch {show(parity.trained)}"
    return f"{parity.metric} on {where}: {values}; {drop_in_words(parity)}"
