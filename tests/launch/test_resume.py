"""A run that has ended is prepared to continue, with the changes that a person asks for."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.errors import Mistake
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.launch.resume import AlreadyComplete, edited_since, reopen
from packtrain.pack.build import PlainProgress
from packtrain.run.checkpoint import commit
from packtrain.run.records import FleetLaunch, JobSource, Result
from packtrain.run.run import Run
from packtrain.run.trust import is_remembered, refuse, remember
from packtrain.store import Store
from packtrain.system import this_client
from packtrain.units import show_time
from parts.faulty import FaultyStore, Killed
from parts.runs import a_lease, new_run, recipe_job, write_files


def ended_run(
    store: Store, tmp_path: Path, status: str = "finished", budget: dict[str, float] | None = None, **train: object
) -> Run:
    """A run of ten steps that ended at the tenth."""
    run = new_run(store, recipe_job(train=train, budget=budget or {}))
    commit(run, 10, 1, None, write_files(tmp_path / "saved", {"state.json": b"{}"}))
    run.finish(Result(status, "reached 10 steps", 10, 1.0, {"valid.bleu": 20.5}))  # type: ignore[arg-type]
    return run


def test_a_finished_run_continues_with_a_longer_duration_and_says_what_changed(
    directory_store: Store, tmp_path: Path
) -> None:
    run, said = ended_run(directory_store, tmp_path), list[str]()
    changed = reopen(run, refuse, said.append, ["train.duration=20 steps"])
    assert said == [
        "train.duration: 10 steps -> 20 steps",
        "the learning rate does not depend on train.duration: it continues as it was",
        "it had reached 10 steps with valid.bleu 20.5",
    ]
    assert (changed.result(), Run(directory_store, run.name).job) == (None, changed.job)
    assert str(changed.job.train.duration) == "20 steps"
    events = changed.events().read()
    assert [(event.kind, event.text.partition(" (by ")[0]) for event in events] == [("changed", line) for line in said]


@pytest.mark.usefixtures("processes")
def test_a_run_keeps_its_job_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the store is made
    text = "# why\nname: job  # a name\nprogram: [train.py]\nstore: ./store\n"
    write_files(tmp_path, {"mine.yaml": text.encode(), "train.py": b""})
    run = create(check(load(tmp_path / "mine.yaml", ["fleet.workers=2"]), PlainProgress(lambda _: None)))
    assert run.source() == JobSource("mine.yaml", text, ("fleet.workers=2",), directory=str(tmp_path))


@pytest.fixture
def started_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None) -> Run:
    """A run of `job.yaml` and `train.py` in this directory, which this person has started."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"job.yaml": b"name: job\nprogram: [train.py]\n", "train.py": b"oops()\n"})
    return launched(create(check(load("job.yaml", ["fleet.workers=2"]), PlainProgress(lambda _: None))))


def launched(run: Run, client: str = "") -> Run:
    run.record_launch(FleetLaunch(1.79e9, client or this_client(), {}))
    return run


def test_nobody_is_told_of_code_that_is_as_it_was(started_program: Run, tmp_path: Path) -> None:
    assert edited_since(started_program) is None
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/x").write_text("not in a snapshot")
    assert edited_since(started_program) is None


def test_a_resume_names_the_edited_files_and_the_command_that_uses_them(started_program: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("fine()\n")
    when = show_time(1.79e9)
    stored = f"resumes the code of {when}; train.py changed since. To use what is there now: packtrain run job.yaml"
    assert edited_since(started_program) == f"{stored} --set fleet.workers=2"
    commit(started_program, 3, 1, None, write_files(tmp_path.parent / "saved", {"files.json": b"{}"}))
    line = edited_since(started_program, ["budget.hours=2"])
    assert line == f"{stored} --set fleet.workers=2 --set budget.hours=2 --from job-1"


def test_that_command_finds_the_run_from_another_directory(
    started_program: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(started_program, 3, 1, None, write_files(tmp_path.parent / "saved", {"files.json": b"{}"}))
    (tmp_path / "more.py").write_text("")
    (tmp_path / "job.yaml").write_text("name: job\nprogram: [more.py]\n")
    monkeypatch.chdir(tmp_path.parent)
    line = edited_since(started_program)
    assert line is not None
    assert "; job.yaml, more.py changed since." in line
    command = f"packtrain run {tmp_path.name}/job.yaml --set fleet.workers=2 --from {tmp_path}/store/job-1"
    assert line.endswith(command)


def test_code_of_somebody_else_or_that_has_moved_is_not_compared(started_program: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("fine()\n")
    theirs = Run(started_program.store, "theirs-1", started_program.job_data, started_program.code)
    source = started_program.source()
    assert source is not None
    theirs.put_source(source)
    assert edited_since(launched(theirs, "somebody@elsewhere")) is None
    (tmp_path / "job.yaml").rename(tmp_path / "moved.yaml")
    assert edited_since(started_program) is None


def test_an_edited_job_file_of_a_recipe_is_named(directory_store: Store, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("# new\n")
    run = launched(new_run(directory_store, recipe_job()))
    run.put_source(JobSource("job.yaml", "# old\n", directory=str(tmp_path)))
    line = edited_since(run)
    assert line is not None
    assert line.startswith("resumes the job file of ")
    assert "; job.yaml changed since." in line


def test_what_is_set_when_a_run_continues_joins_what_was_set_before(directory_store: Store, tmp_path: Path) -> None:
    run = ended_run(directory_store, tmp_path)
    run.put_source(JobSource("job.yaml", "# mine", ("train.seed=1",)))
    changed = reopen(run, refuse, lambda _: None, ["train.duration=20 steps"])
    assert changed.source() == JobSource("job.yaml", "# mine", ("train.seed=1", "train.duration=20 steps"))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.duration=9 steps", "the run has already trained for 10 steps; set more"),
        ("train.patience=2 min", "is already complete; it continues with a longer train.duration"),
        ("train.seed=2", "train.seed: cannot change in a run that exists: the losses depend on it"),
    ],
)
def test_a_finished_run_is_not_reopened_without_something_to_do(
    override: str, reason: str, directory_store: Store, tmp_path: Path
) -> None:
    run = ended_run(directory_store, tmp_path)
    before = run.job_data
    with pytest.raises(Mistake, match=reason):
        reopen(run, refuse, lambda _: None, [override])
    assert run.result() is not None
    assert Run(directory_store, run.name).job_data == before


@pytest.mark.parametrize("status", ["finished", "stopped"])
@pytest.mark.parametrize("overrides", [["train.duration=20 steps"], []], ids=["the same command", "no change"])
def test_a_resume_that_is_killed_at_any_moment_can_be_repeated(
    overrides: list[str], status: str, directory_store: Store, tmp_path: Path
) -> None:
    """The job is local, and was started here: it resumes unasked whatever was written of the change."""
    fates, faulty = set(), FaultyStore(directory_store)
    for moment in count():
        run = ended_run(faulty, tmp_path, status)
        run.put_source(JobSource("job.yaml", ""))
        run.request_stop("stopped by user")
        remember(run)
        faulty.kill_at(moment)
        try:
            reopen(Run(faulty, run.name), refuse, lambda _: None, ["train.duration=20 steps"])
        except Killed:
            is_whole = False
        else:
            is_whole = True
        faulty.fault = lambda _operation, _key: None
        again = Run(faulty, run.name)
        is_changed = again.job_data != run.job_data
        assert is_remembered(again)
        try:
            again = reopen(again, refuse, lambda _: None, overrides)
        except AlreadyComplete:
            assert status == "finished" and not overrides and not is_changed
            fates.add("complete")
        else:
            assert again.result() is None and again.stop_request() is None and is_remembered(again)
            assert str(again.job.train.duration) == ("20 steps" if overrides or is_changed else "10 steps")
            fates.add("changed before" if is_changed else "changed now" if overrides else "as it was")
        if is_changed or overrides:
            source = again.source()
            assert source is not None and source.overrides == ("train.duration=20 steps",)
            assert "train.duration: 10 steps -> 20 steps" in {event.text[:36] for event in again.events().read()}
        if is_whole:
            break
    assert fates == {
        "changed before",
        "changed now" if overrides else "complete" if status == "finished" else "as it was",
    }


@pytest.mark.usefixtures("processes")
def test_a_finished_run_whose_job_wants_more_is_resumed_without_a_change(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_run(directory_store, tmp_path)
    monkeypatch.setattr("packtrain.cli.jobs.start", lambda *_args, **_options: [])
    words = ["resume", run.name, "--store", directory_store.url, "--detach"]
    assert "is already complete" in CliRunner().invoke(app, words).output
    run.changed(recipe_job(train={"duration": "20 steps"})).put_job()  # the client was killed then
    assert f"Started {run.name}" in CliRunner().invoke(app, words).output
    assert run.result() is None


def test_a_schedule_that_follows_the_duration_is_told(directory_store: Store, tmp_path: Path) -> None:
    run, said = ended_run(directory_store, tmp_path, "stopped", schedule={"cosine": {"peak": 0.1}}), list[str]()
    reopen(run, refuse, said.append, ["train.duration=20 steps"])
    assert said[-1] == "the learning rate follows train.duration: at step 10 it changes from 0 to 0.05"


def test_a_run_whose_budget_is_used_up_needs_another_one(directory_store: Store, tmp_path: Path) -> None:
    run = ended_run(directory_store, tmp_path, budget={"hours": 1.0})
    run.renew(a_lease("a", used_seconds=3700.0, left=True))
    longer = "train.duration=20 steps"
    with pytest.raises(Mistake, match="job-1: the budget of 1 hours is used up; set budget"):
        reopen(run, refuse, lambda _: None, [longer])
    assert reopen(run, refuse, lambda _: None, [longer, "budget.hours=2"]).job.budget.hours == 2


def test_a_changed_run_stays_trusted_only_if_it_was(directory_store: Store, tmp_path: Path) -> None:
    run = ended_run(directory_store, tmp_path, "stopped")
    changed = reopen(run, refuse, lambda _: None, ["budget.hours=1"])
    assert not is_remembered(changed)
    remember(changed)
    assert is_remembered(reopen(changed, refuse, lambda _: None, ["budget.hours=2"]))


def test_a_run_of_somebody_else_does_not_move_to_other_machines_unseen(directory_store: Store, tmp_path: Path) -> None:
    run = ended_run(directory_store, tmp_path, "stopped")
    with pytest.raises(Mistake, match="was not started from here"):
        reopen(run, refuse, lambda _: None, ["fleet={ssh: {hosts: [a]}}"])


def test_a_running_run_is_not_changed(directory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(directory_store, recipe_job())
    monkeypatch.setattr("packtrain.cli.jobs.state_of", lambda _: "running")
    arguments = ["resume", run.name, "--store", directory_store.url, "--set", "budget.hours=1"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, Mistake)
    assert str(done.exception) == f"job-1 is running; stop it first (`{run.command('stop')}`), then resume it"
