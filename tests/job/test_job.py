# ruff: noqa: E501 (what is expected stands on one line, as a person reads it)
from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from packtrain.fleet.local import LocalSettings
from packtrain.job import Job
from packtrain.job import job as jobs
from packtrain.job.kinds import EXCHANGES, FLEETS, FORMATS, OPTIMIZERS, SCHEDULES, kind_class
from packtrain.job.part import faults, is_name
from packtrain.pack.bitext import BitextSource
from packtrain.train.optimizer import AdamSettings
from packtrain.train.schedule import ConstantSettings, NoamSettings, Phase
from packtrain.units import Duration, Machines

RECIPE: Mapping[str, Any] = {
    "name": "en-de",
    "recipe": "translate",
    "data": {
        "train": [{"bitext": ["train.en", "train.de"], "weight": 2.0}],
        "valid": {"bitext": "valid.tsv"},
    },
    "model": {"size": "base", "dropout": 0.3, "shared": True},
    "train": {
        "duration": "50000 steps",
        "batch": "25000 tokens",
        "schedule": {"noam": {"warmup": "8000 steps", "scale": 2.0}},
    },
}
NOT_PATHS = (
    "data: must be a path, a list of paths, or a mapping of names to paths for a program; sources such as bitext belong"
    " to recipes"
)
PROGRAM: Mapping[str, Any] = {"name": "mine", "program": ["train.py", "--lr", "0.1"]}


def with_field(document: Mapping[str, Any], field: str, value: object) -> dict[str, Any]:
    changed: Any = deepcopy(dict(document))
    inner, *steps = changed, *field.split(".")
    for step in steps[:-1]:
        inner = inner[int(step)] if isinstance(inner, list) else inner.setdefault(step, {})
    inner[int(steps[-1]) if isinstance(inner, list) else steps[-1]] = value
    return changed  # type: ignore[no-any-return]


def refusals(document: object) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        Job.model_validate(document)
    return [f"{'.'.join(map(str, location))}: {text}" for location, text, _needed in faults(refused.value)]


def test_the_job_of_a_recipe_is_typed_and_has_defaults() -> None:
    job = Job.model_validate(RECIPE)
    assert job.data.train == (BitextSource(paths=("train.en", "train.de"), weight=2.0),)
    assert job.data.valid == (BitextSource(paths=("valid.tsv",)),)
    assert (job.data.train[0].kind, job.data.vocabulary, job.data.max_words) == ("bitext", 8000, 80)
    assert (job.model.size, job.model.options) == ("base", {"dropout": 0.3, "shared": True})
    assert job.train.schedule == NoamSettings(warmup=Duration(8000, "steps"), scale=2.0)
    assert job.train.optimizer == AdamSettings(betas=(0.9, 0.997), epsilon=1e-9, decay=0.0)
    assert (job.train.precision, job.train.clip, job.train.seed) == ("auto", None, 1)
    assert (job.checkpoint.every, job.checkpoint.keep_last) == (Duration(300, "seconds"), 2)
    assert (job.fleet.kind, job.fleet.workers) == (LocalSettings(machines=Machines(1, 1)), None)
    assert (job.store, job.code, job.environment, job.budget.dollars) == ("./store", ".", (), None)


def test_the_job_of_a_program_has_no_recipe_sections() -> None:
    job = Job.model_validate(PROGRAM)
    assert job.program == jobs.ProgramSettings(command=("train.py", "--lr", "0.1"))
    assert [getattr(job, section) for section in ("data", "model", "train", "evaluate")] == [None] * 4
    assert job.checkpoint.keep_best == 0


@pytest.mark.parametrize(
    ("field", "short", "full"),
    [
        ("model", "base", {"size": "base"}),
        ("fleet", "local", {"local": {"machines": 1}}),
        ("fleet", {"workers": 2}, {"local": {}, "workers": 2}),
        ("train.optimizer", "adam", {"adam": {}}),
        ("train.optimizer", {"adam": None}, {"adam": {}}),
        ("data.train", {"bitext": "a.tsv"}, [{"bitext": ["a.tsv"]}]),
        ("budget", None, {}),
    ],
)
def test_short_forms_equal_their_long_forms(field: str, short: object, full: object) -> None:
    assert Job.model_validate(with_field(RECIPE, field, short)) == Job.model_validate(with_field(RECIPE, field, full))


@pytest.mark.parametrize(
    "document",
    [
        RECIPE,
        PROGRAM,
        with_field(RECIPE, "train.schedule", {"constant": {"rate": 1e-3}}),
        with_field(RECIPE, "train.schedule", {"noam": {"warmup": "10 steps", "peak": 3e-3}}),
        with_field(RECIPE, "evaluate", {"every": "0.5 epochs", "samples": 0, "beam": 1}),
        with_field(RECIPE, "fleet", {"local": {"machines": 3}, "workers": 2, "failures": 0}),
        with_field(PROGRAM, "environment", ["WANDB_API_KEY"]),
        with_field(PROGRAM, "budget", {"hours": 0.5}),
        with_field(with_field(PROGRAM, "fleet", {"local": {}, "price": 0.5}), "budget", {"dollars": 60}),
        with_field(RECIPE, "fleet", {"local": {"machines": "2..4", "power_off": True}, "public_address": True}),
    ],
)
def test_a_job_reads_back_what_it_writes(document: Mapping[str, Any]) -> None:
    job = Job.model_validate(document)
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert Job.model_validate(job.model_dump()) == job


def test_quantities_are_written_as_strings_and_kinds_as_words() -> None:
    written = Job.model_validate(RECIPE).model_dump(mode="json")
    assert written["train"]["duration"] == "50000 steps"
    assert written["checkpoint"]["every"] == "300 seconds"
    assert written["train"]["schedule"] == {"noam": {"warmup": "8000 steps", "scale": 2.0, "peak": None, "share": None}}
    assert written["data"]["train"] == [{"bitext": ["train.en", "train.de"], "weight": 2.0}]
    assert written["fleet"] == {
        "local": {"machines": 1, "power_off": False},
        "workers": None,
        "failures": 3,
        "price": None,
        "public_address": False,
        "cache": {"directory": None, "size": None},
    }
    assert written["model"] == {"size": "base", "dropout": 0.3, "shared": True}


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Job.model_validate(RECIPE).name = "other"


def test_a_job_can_be_built_from_parts() -> None:
    job = Job.model_validate(RECIPE)
    made = Job(name="en-de", recipe="translate", data=job.data, model=job.model, train=job.train)
    assert made == job


SCHEDULE_KINDS = "constant, cosine, noam, one_cycle, phases, step"
OUTSIDE = "must be a relative path inside the job file's directory"


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("nmae", "x", "nmae: unknown key; did you mean 'name'?"),
        ("train.bacth", "1 tokens", "train.bacth: unknown key; did you mean 'batch'?"),
        ("data.vocabulary", "8000", "data.vocabulary: must be an integer, not a string; remove the quotes"),
        ("data.vocabulary", "many", "data.vocabulary: must be an integer, not a string"),
        ("data.vocabulary", True, "data.vocabulary: must be an integer, not a boolean"),
        ("data.vocabulary", 8000.0, "data.vocabulary: must be an integer, not a decimal number"),
        ("data.vocabulary", 299, "data.vocabulary: must be at least 300"),
        ("data.max_ratio", 0.5, "data.max_ratio: must be at least 1"),
        ("data.train", [], "data.train: must have at least one source"),
        ("data.train", "a.tsv", "data.train: must be a list, not a string"),
        ("data.train", ["a.tsv"], "data.train.0: must be a mapping such as {bitext: [train.en, train.de]}, not a string"),
        ("data.train.0.bitext", ["a", "b", "c"],
         "data.train.0.bitext: takes 1 or 2 paths, not 3, such as [train.en, train.de]"),
        ("data.train.0.bitext", ["a", 1], "data.train.0.bitext.1: must be a string, not an integer; put it in quotes"),
        ("data.train.0.bitext", ["a", "../b"],
         "data.train.0.bitext.1: '../b' is outside the job file's directory; use an absolute path"),
        ("data.train.0.bitext", "x/../../b",
         "data.train.0.bitext.0: 'x/../../b' is outside the job file's directory; use an absolute path"),
        ("data.train.0.bitext", "a\0b", "data.train.0.bitext.0: contains a control character"),
        ("data.train.0.bitext", "~/a", "data.train.0.bitext.0: '~/a': ~ is not expanded; write the full path"),
        ("data.train.0.bitext", "ftp://a/b",
         "data.train.0.bitext.0: 'ftp://a/b' must be a path or start with one of s3://, gs://, az://, http://, https://, store:"),
        ("data.train.0.weight", 0, "data.train.0.weight: must be greater than 0"),
        ("data.train.0.weight", -1.5, "data.train.0.weight: must be greater than 0"),
        ("data.train.0.weigth", 1, "data.train.0.weigth: unknown key; did you mean 'weight'?"),
        ("data.train.0.columns", [0, 1], "data.train.0.columns.0: must be at least 1"),
        ("data.train.0.columns", [1, 2, 3], "data.train.0.columns: must have at most 2 entries"),
        ("data.train.0", {"bitext": ["a", "b"], "columns": [1, 2]},
         "data.train.0.columns: applies to one file of tab-separated columns only"),
        ("data.train.0", {"bitext": "a.tsv", "last": 1, "without_last": 1},
         "data.train.0.without_last: cannot be combined with last; remove one"),
        ("data.train.0", {"weight": 1}, "data.train.0: must name one kind, not none; known: bitext, coco, dialogue, folder, imagenet, vizwiz"),
        ("model", 5, "model: must be a mapping, not an integer"),
        ("model.dropout", [1], "model.dropout: must be a number, a string, true or false, not a list"),
        ("model.dropout", float("nan"), "model.dropout: must be a finite number"),
        ("model.Drop-out", 1, "model.Drop-out: 'Drop-out' is not a valid option name"),
        ("train.duration", 500, "train.duration: needs a unit, such as '500 steps'"),
        ("train.duration", None, "train.duration: must not be empty"),
        ("train.duration", "5 stesp", "train.duration: unknown unit 'stesp' in '5 stesp'; did you mean 'step'?"),
        ("train.batch", "100 steps", "train.batch: unknown unit 'steps' in '100 steps'; known: sample, samples, token, tokens"),
        ("train.batch", "-5 tokens", "train.batch: '-5 tokens' must be greater than zero and less than 1e+15"),
        ("train.precision", "bf61", "train.precision: 'bf61' is not one of auto, fp32, bf16, fp16; did you mean 'bf16'?"),
        ("train.precision", 16, "train.precision: must be one of auto, fp32, bf16, fp16, not an integer"),
        ("train.clip", float("inf"), "train.clip: must be a finite number"),
        ("train.label_smoothing", 1.0, "train.label_smoothing: must be less than 1"),
        ("train.ema", 0.0, "train.ema: must be greater than 0"),
        ("train.seed", -1, "train.seed: must be at least 0"),
        ("train.seed", 2**63, f"train.seed: must be at most {2**63 - 1}"),
        ("train.schedule", {}, f"train.schedule: must name one kind, not none; known: {SCHEDULE_KINDS}"),
        ("train.schedule", {"noam": {}, "constant": {}},
         f"train.schedule: must name one kind, not 2; known: {SCHEDULE_KINDS}"),
        ("train.schedule", {"naom": {}}, "train.schedule.naom: unknown key; did you mean 'noam'?"),
        ("train.schedule", {"noam": {"warmup": "1 epochs", "peak": 1.0}},
         "train.schedule.noam.warmup: must be in steps, such as '500 steps'"),
        ("train.schedule", {"noam": {"warmup": "10 steps"}},
         "train.schedule.noam: set exactly one of scale and peak"),
        ("train.schedule", {"noam": {"warmup": "10 steps", "peak": 1.0, "scale": 1.0}},
         "train.schedule.noam: set exactly one of scale and peak"),
        ("train.schedule", {"constant": {}}, "train.schedule.constant.rate: is required"),
        ("train.optimizer", {"adam": {"betas": [0.9]}}, "train.optimizer.adam.betas.1: is required"),
        ("train.optimizer", {"adam": {"betas": [0.9, 1.0]}}, "train.optimizer.adam.betas.1: must be less than 1"),
        ("evaluate", {"beam": 0}, "evaluate.beam: must be at least 1"),
        ("checkpoint", {"keep_last": 0}, "checkpoint.keep_last: must be at least 1"),
        ("fleet", {"local": {"machines": 0}}, "fleet.local.machines: must be at least 1"),
        ("fleet", {"local": {"machines": "4..2"}}, "fleet.local.machines: '4..2': the minimum is larger than the maximum; write the smaller number first"),
        ("fleet", {"local": {"machines": "many"}}, "fleet.local.machines: 'many' is not a number of machines, such as '3' or '2..4'"),
        ("fleet", {"local": {"machines": 2.4}}, "fleet.local.machines: must be a number of machines, such as 3 or 2..4, not a decimal number"),
        ("budget", {"dollars": 60}, "budget.dollars: requires fleet.price, the price of a machine in dollars per hour"),
        ("fleet", {"lcoal": {}}, "fleet.lcoal: unknown key; did you mean 'local'?"),
        ("fleet", "lcoal", "fleet.lcoal: unknown key; did you mean 'local'?"),
        ("fleet", {"kind": "local"}, "fleet.kind: unknown key; known: aws, cache, failures, ibm, kubernetes, local, mpi, price, public_address, slurm, ssh, workers"),
        ("budget", {"dollars": 0}, "budget.dollars: must be greater than 0"),
        ("name", "En_De", "name: 'En_De' must be 1 to 63 characters from a-z, 0-9 and -"),
        ("name", "-rf", "name: '-rf' must not begin with -"),
        ("name", "a" * 64, f"name: '{'a' * 57}...' must be 1 to 63 characters from a-z, 0-9 and -"),
        ("store", "../elsewhere", "store: '../elsewhere' is outside the current directory; use an absolute path"),
        ("code", "../other", f"code: '../other' {OUTSIDE}, or .., ../.. and so on for a directory above it"),
        ("directory", "..", f"directory: '..' {OUTSIDE}"),
        ("code", "/etc", f"code: '/etc' {OUTSIDE}"),
        ("environment", ["A=b"], "environment.0: must be only the name of a variable; its value is read on the machine that starts the job"),
        ("environment", ["9a"], "environment.0: '9a' is not a valid variable name"),
        ("program", ["train.py"], "program: a job has a recipe or a program, not both"),
    ],
)  # fmt: skip
def test_wrong_fields_of_a_recipe_are_refused_with_their_place(field: str, value: object, refusal: str) -> None:
    assert refusals(with_field(RECIPE, field, value)) == [refusal]


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("data", 3, NOT_PATHS),
        ("data", {"train": {"bitext": ["a", "b"]}}, NOT_PATHS),
        ("data", ["a/x", "b/x"], "data.1: 'x' is there twice; write a mapping, such as {corpus: PATH}"),
        ("data", {"a/b": "x"}, "data.a/b: 'a/b' is no name for a folder; write a mapping, such as {corpus: PATH}"),
        ("data", ["../x"], "data.0: '../x' is outside the job file's directory; use an absolute path"),
        ("data", "https://a/b", "data.0: 'https://a/b' must be a path or start with one of s3://, gs://, az://, store:files/"),
        ("outputs", ["/tmp/x"], f"outputs.0: '/tmp/x' {OUTSIDE}"),
        ("outputs", ["./"], "outputs.0: must name a file or folder that the program writes, such as out/"),
        ("train", {"seed": 1}, "train: applies to recipes only, not to programs"),
        ("model", "tiny", "model: applies to recipes only, not to programs"),
        ("evaluate", {}, "evaluate: applies to recipes only, not to programs"),
        ("checkpoint", {"keep_best": 1}, "checkpoint.keep_best: applies to recipes only, not to programs"),
        ("checkpoint", {"every": "5 steps"}, "checkpoint.every: must be a time for a program, such as '5 min'"),
        ("program", [], "program: must name a script, such as [train.py]"),
        ("program", "train.py", "program: must be a list, not a string"),
        ("program", ["train.py", 1], "program.1: must be a string, not an integer; put it in quotes"),
        ("program", ["/bin/sh"], f"program.0: '/bin/sh' {OUTSIDE}"),
        ("program", ["a/../../b.py"], f"program.0: 'a/../../b.py' {OUTSIDE}"),
        ("program", ["-m", "x"], "program.0: must be the path of a script, not an option"),
        ("program", None, "recipe: is required, unless the job has a program"),
        ("program", {"resume": ["--resume"]}, "program.command: is required"),
        ("program", {"command": []}, "program.command: must name a script, such as [train.py]"),
        ("program", {"command": ["/bin/sh"]}, f"program.command.0: '/bin/sh' {OUTSIDE}"),
        ("program", {"command": ["a.py"], "resume": "--x"}, "program.resume: must be a list, not a string"),
        ("program", {"command": ["a.py"], "resume": [1]}, "program.resume.0: must be a string, not an integer; put it"
         " in quotes"),
    ],
)  # fmt: skip
def test_wrong_fields_of_a_program_are_refused_with_their_place(field: str, value: object, refusal: str) -> None:
    assert refusals(with_field(PROGRAM, field, value)) == [refusal]


def test_every_missing_field_of_a_recipe_is_named() -> None:
    assert refusals({"recipe": "translate"}) == [
        "name: is required",
        "data.train: is required",
        "model.size: is required",
        "train.duration: is required",
        "train.batch: is required",
        "train.schedule: is required",
    ]


def test_absolute_data_paths_and_urls_are_kept_as_written() -> None:
    for path in (
        "/data/train.tsv",
        "/data/../other.tsv",
        "s3://bucket/a.tsv",
        "https://host/a.tsv",
        "a/../b.tsv",
    ):
        document = with_field(RECIPE, "data.train.0.bitext", path)
        assert Job.model_validate(document).data.train[0].paths == (path,)


def test_names_of_jobs_and_runs_have_lowercase_letters_digits_and_hyphens() -> None:
    assert is_name("en-de-2")
    assert not any(map(is_name, ("", "En", "a_b", "a\n", "a" * 64, "ä", "a/b", "..", "-", "-rf")))


def test_the_word_of_a_schedule_selects_its_class() -> None:
    job = Job.model_validate(with_field(RECIPE, "train.schedule", {"constant": {"rate": 1}}))
    assert job.train.schedule == ConstantSettings(rate=1.0)


def models() -> Iterator[type[BaseModel]]:
    yield from (
        jobs.Job,
        jobs.DataSettings,
        jobs.ModelSettings,
        jobs.TrainSettings,
        jobs.EvaluateSettings,
        jobs.CheckpointSettings,
        jobs.BudgetSettings,
    )
    yield from (Phase,)
    for kinds in (SCHEDULES, OPTIMIZERS, EXCHANGES, FLEETS, FORMATS):
        yield from (kind_class(kinds, word) for word in kinds)


@pytest.mark.parametrize("model", list(models()), ids=lambda model: model.__name__)
def test_every_field_is_in_the_reference(model: type[BaseModel]) -> None:
    reference = (Path(__file__).parents[2] / "docs" / "job.md").read_text("utf-8")
    # Written as keys of their own, under the word of a format, and in the place of sources.
    internal = {"options", "paths", "held_out"}
    missing = [name for name in model.model_fields if name not in internal and f"`{name}`" not in reference]
    assert not missing


def test_every_kind_is_in_the_reference() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "job.md").read_text("utf-8")
    words = [
        *SCHEDULES,
        *OPTIMIZERS,
        *EXCHANGES,
        *FLEETS,
        *FORMATS,
        "weight",
        "workers",
        "failures",
    ]
    assert [word for word in words if f"`{word}`" not in reference] == []
