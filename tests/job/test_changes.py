"""What may change of a run that exists, and what is refused with its reason."""

from __future__ import annotations

import pytest

from packtrain.errors import Mistake
from packtrain.job.changes import changed_job
from packtrain.job.job import Job
from parts.runs import program_job, recipe_job


def stored(job: Job) -> bytes:
    return job.model_dump_json(indent=1).encode()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "fleet={ssh: {hosts: [a, b]}, workers: 1}",
            "fleet: {local: {}} -> {ssh: {machines: 2, hosts: [a, b]}, workers: 1}",
        ),
        ("fleet=slurm", "fleet: {local: {}} -> {slurm: {}}"),
        ("fleet.workers=4", "fleet: {local: {}} -> {local: {}, workers: 4}"),
        ("budget.hours=2", "budget.hours: none -> 2"),
        ("budget={hours: 2}", "budget.hours: none -> 2"),
        ("train.duration=20 steps", "train.duration: 10 steps -> 20 steps"),
        ("train.exact=false", "train.exact: True -> False"),
        ("train.patience=3 min", "train.patience: 60 seconds -> 180 seconds"),
        ("train.profile=20 steps", "train.profile: none -> 20 steps"),
        ("checkpoint.every=1 min", "checkpoint.every: 300 seconds -> 60 seconds"),
        ("evaluate.beam=8", "evaluate.beam: 4 -> 8"),
        ("data.stage=true", "data.stage: False -> True"),
        ("fleet.cache={directory: /mnt/data, size: 200 GB}", "fleet: {local: {}} -> {local: {}, cache: {directory:"),
    ],
)
def test_what_does_not_decide_the_losses_may_change(override: str, said: str) -> None:
    job, [change] = changed_job(stored(recipe_job()), [override])
    assert str(change).startswith(said)
    assert stored(job) != stored(recipe_job())


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("name=other", "the run is named after it"),
        ("recipe=classify", "its code is stored"),
        ("store=s3://bucket/x", "the run is there; `packtrain cp` copies it"),
        ("environment=[TOKEN]", "its code reads these variables"),
        ("data.vocabulary=900", "its pack is made"),
        ("model.width=64", "its checkpoints have the weights of this model"),
        ("train.batch=8 samples", "the losses depend on it"),
        ("train.seed=2", "the losses depend on it"),
        ("train.optimizer={sgd: {}}", "the losses depend on it"),
        ("train.schedule.constant.rate=0.1", "the losses depend on it"),
        ("checkpoint.best_by=loss", "its checkpoints have scores of the present kind"),
    ],
)
def test_everything_else_is_refused_with_the_reason_and_what_may_change(override: str, reason: str) -> None:
    field = override.partition("=")[0].replace(".constant.rate", "")
    with pytest.raises(Mistake) as caught:
        changed_job(stored(recipe_job()), [override])
    said = str(caught.value)
    assert said.startswith(f"--set {field}: cannot change in a run that exists: {reason}")
    assert said.endswith(
        "; start a new run (--from takes its weights), or set fleet, budget, train.duration, train.exact,"
        " train.patience, train.profile, checkpoint, evaluate, data.stage, report, program.resume"
    )
    assert "\n" not in said


def test_a_value_that_stays_as_it_is_changes_nothing() -> None:
    job, changes = changed_job(stored(recipe_job()), ["train.seed=1", "fleet=local"])
    assert (stored(job), changes) == (stored(recipe_job()), [])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("fleet=sssh", "--set fleet.sssh: unknown key; did you mean 'ssh'?"),
        ("fleet.ssh.hosts=[a]", "--set fleet: must name one kind, not 2; known: "),
        ("train.duration=soon", "--set train.duration: "),
        ("budget.dollars=5", "--set budget.dollars: requires fleet.price"),
        ("fleet.token=abc", "--set fleet.token: "),
    ],
)
def test_a_wrong_value_is_named_with_its_field(override: str, said: str) -> None:
    with pytest.raises(Mistake) as caught:
        changed_job(stored(recipe_job()), [override])
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_program_may_move_but_has_no_duration() -> None:
    _, [change] = changed_job(stored(program_job()), ["fleet={ssh: {hosts: [a]}}"])
    assert change.field == "fleet"
    with pytest.raises(Mistake, match=r"^--set train: applies to recipes only"):
        changed_job(stored(program_job()), ["train.duration=10 steps"])
    job, [change] = changed_job(stored(program_job()), ["program.resume=[--resume]"])
    assert (change.field, change.after) == ("program.resume", ["--resume"])
    assert job.program is not None
    assert (job.program.command, job.program.resume) == (("train.py",), ("--resume",))
    with pytest.raises(Mistake, match=r"^--set program.command: cannot change in a run that exists: its code"):
        changed_job(stored(program_job()), ["program=[other.py]"])
