"""A sweep of real runs: one driver at a time, killed, continued by others, and no run twice."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.fleet.ssh import SshSettings
from packtrain.job.changes import changed_job
from packtrain.job.job import ReportSettings
from packtrain.job.kinds import FLEETS, kind_class
from packtrain.launch.create import NewRun, create_with
from packtrain.observe.history import read_points
from packtrain.pack.build import PlainProgress
from packtrain.report.sweep import sweep_table
from packtrain.run.checkpoint import committed
from packtrain.run.code import archive
from packtrain.run.liveness import State
from packtrain.run.records import JobSource, Result
from packtrain.run.run import Run, open_run
from packtrain.run.sweeps import (
    DriverBeat,
    Rung,
    Sweep,
    SweepDriver,
    SweepPlan,
    Trial,
    TrialStart,
    add_trial_run,
    sweep_names,
    sweep_of,
)
from packtrain.run.trust import refuse, remember, require_trust
from packtrain.store import Store, open_store
from packtrain.store.records import DamagedRecord, encode
from packtrain.sweep import drive
from packtrain.sweep.create import SweepRequest, create_sweep, prepare_sweep
from packtrain.sweep.drive import DriverSeat, SweepDrive, moved
from parts.runs import new_run, recipe_job
from parts.sandbox import EXAMPLES, Sandbox, assert_nothing_left, make_sandbox, wait_until

JOB = f"""
name: toy
recipe: slow:Slow
code: code
store: STORE
data:
  train: [{{bitext: [{EXAMPLES}/data/en-de/valid.en.gz, {EXAMPLES}/data/en-de/valid.de.gz]}}]
  valid: [{{bitext: [valid.en, valid.de]}}]
  vocabulary: 500
model: {{size: tiny, width: 32, heads: 2, feedforward: 64, encoder_layers: 1, decoder_layers: 1, dropout: 0.1}}
train:
  duration: 40 steps
  batch: 600 tokens
  schedule: {{noam: {{warmup: 10 steps, peak: 0.003}}}}
evaluate: {{every: 20 steps, samples: 2, beam: 1}}
checkpoint: {{every: 20 steps, best_by: loss}}
fleet: {{local: {{}}, workers: 1}}
"""

# Steps after the rung take as long as the test says, so that there is time to stop a run.
RECIPE = """
import os, time
from pathlib import Path
from packtrain.recipes.translate import Translate

class Slow(Translate):
    steps = 0

    def loss(self, model, batch):
        self.steps += model.training
        if model.training and self.steps > 20:
            time.sleep(float(Path(os.environ["PACE"]).read_text()))
        return super().loss(model, batch)
"""
GRID = ("--grid", "train.schedule.noam.peak=0.000001,0.01", "--halving", "--parallel", "2", "--name", "both")


def toy(directory: Path) -> Sandbox:
    """Return a sandbox with the job, its recipe and its data."""
    sandbox = make_sandbox(directory)
    (directory / "job.yaml").write_text(JOB.replace("STORE", sandbox.store))
    (directory / "code" / "slow.py").write_text(RECIPE)
    for language in ("en", "de"):
        with gzip.open(EXAMPLES / f"data/en-de/test.{language}.gz", "rb") as lines:
            (directory / f"valid.{language}").write_bytes(b"".join(next(lines) for _ in range(20)))
    return sandbox


def started(sandbox: Sandbox, *arguments: str, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "packtrain", "sweep", *arguments]
    with output.open("w") as file:
        return subprocess.Popen(
            command, cwd=sandbox.directory, env=sandbox.environment, stdout=file, stderr=subprocess.STDOUT
        )


@pytest.fixture(scope="module")
def killed(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sandbox, list[str]]]:
    """A sweep of two runs whose driver was killed, and what the two that continued it together printed."""
    sandbox = toy(tmp_path_factory.mktemp("sweep"))
    sandbox.pace(3.0)
    try:
        first = started(sandbox, "job.yaml", *GRID, output=sandbox.directory / "first.txt")
        wait_until((sandbox.directory / "store/sweeps/both/starts/000002-001.json").exists, "both runs to start")
        sweep = Sweep(open_store(sandbox.store), "both")
        wait_until(lambda: all(sweep.run(trial).leases() for trial in sweep.plan.trials), "both runs to have machines")
        first.kill()
        first.wait()
        # The same command continues it, and so does its name.
        files = [sandbox.directory / "one.txt", sandbox.directory / "other.txt"]
        commands = [("job.yaml", *GRID), ("both", "--trust-code")]
        others = [started(sandbox, *words, output=file) for words, file in zip(commands, files, strict=True)]
        watching = "drives this sweep; watching"
        wait_until(lambda: any(watching in file.read_text() for file in files), "one to watch the other")
        wait_until(sweep.rung_results, "the rung to be settled")
        sandbox.pace(0.0)
        codes = [other.wait(300) for other in others]
        outputs = [file.read_text() for file in files]
        assert codes == [0, 0], outputs
        assert_nothing_left(sandbox)
        yield sandbox, outputs
    finally:
        sandbox.close()


def test_a_killed_sweep_continues_and_two_of_one_name_do_not_double_runs(killed: tuple[Sandbox, list[str]]) -> None:
    sandbox, outputs = killed
    sweep = Sweep(open_store(sandbox.store), "both")
    [result] = sweep.rung_results()
    assert result.survivors == (2,), "a rate of almost zero learns nothing"
    loser, winner = (sweep.run(trial) for trial in sweep.plan.trials)
    assert [(one.trial, one.attempt) for one in sweep.starts()] == [(1, 1), (2, 1), (2, 2)]
    assert [len(run.launches()) for run in (loser, winner)] == [1, 2]
    ends = [run.result() for run in (loser, winner)]
    assert [end.status for end in ends if end is not None] == ["stopped", "finished"]
    assert ends[0] is not None
    assert 20 <= ends[0].step < 40
    assert committed(loser)[-1].step == ends[0].step, "it could train on"
    steps = [point.step for point in read_points(winner) if point.kind == "train"]
    assert steps == list(range(1, 41)), "every step once"
    assert [sweep_of(run) for run in (loser, winner)] == ["both", "both"]
    assert sorted(open_store(sandbox.store).folders("runs/")) == ["both-1", "both-2"]
    assert sum("drives this sweep" in output for output in outputs) == 1


def test_the_table_of_a_sweep_is_for_people_scripts_and_pages(killed: tuple[Sandbox, list[str]]) -> None:
    sandbox, _ = killed
    where = ["--store", sandbox.store]
    table = sweep_table(open_store(sandbox.store), "both")
    assert [(row.run, row.standing, row.stopped_early) for row in table.rows] == [
        ("both-2", "finished", False), ("both-1", "stopped early at rung 1", True),
    ]  # fmt: skip
    assert (table.measure, table.lower, table.finished) == ("loss", True, 2)
    shown = CliRunner().invoke(app, ["sweep", "both", "--show", *where]).stdout
    assert "2 runs train 20 steps, the best one to the end" in shown
    assert "best: both-2  --set train.schedule.noam.peak=0.01" in shown
    found = json.loads(CliRunner().invoke(app, ["sweep", "both", "--json", *where]).stdout)
    assert (found["best"], found["rows"][0]["values"]) == ("both-2", {"train.schedule.noam.peak": "0.01"})
    source = Run(open_store(sandbox.store), "both-2").source()
    assert source is not None and source.overrides == ("train.schedule.noam.peak=0.01",), "as a person would write it"
    [listed] = json.loads(CliRunner().invoke(app, ["sweep", "--json", *where]).stdout)
    assert listed == {"name": "both", "job": "toy", "runs": 2, "finished": 2, "best": "both-2"}
    done = CliRunner().invoke(app, ["sweep", "both", *where])
    assert (done.exit_code, "2 of 2 runs done" in done.stdout) == (0, True), "a sweep that is over shows its table"


def test_another_sweep_under_a_name_that_is_taken_is_refused(killed: tuple[Sandbox, list[str]]) -> None:
    sandbox, _ = killed
    prepared = prepare_sweep(SweepRequest(sandbox.directory / "job.yaml", ["train.seed=1,2"], name="both"))
    with pytest.raises(Mistake, match="sweep both exists and trains other runs; choose another --name"):
        create_sweep(prepared, PlainProgress(lambda _: None))


# Plans.


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return toy(tmp_path)


def planned(sandbox: Sandbox, *grid: str, **fields: Any) -> SweepPlan:
    return prepare_sweep(SweepRequest(sandbox.directory / "job.yaml", grid, **fields)).plan


def test_the_same_command_finds_the_same_sweep(sandbox: Sandbox) -> None:
    plan = planned(sandbox, "train.seed=1,2,3,4", halving=True)
    assert plan == planned(sandbox, "train.seed=1,2,3,4", halving=True)
    assert plan.rungs == (Rung(20, 1),)
    assert plan.trials[2] == Trial(3, f"{plan.name}-3", {"train.seed": "3"})
    assert plan.name not in (
        planned(sandbox, "train.seed=1,2,3,4").name,
        planned(sandbox, "train.seed=1,2,3,5", halving=True).name,
        planned(sandbox, "train.seed=1,2,3,4", halving=True, overrides=["train.clip=2.0"]).name,
    )


@pytest.mark.parametrize(
    ("grid", "fields", "words"),
    [
        (["train.schedul=1"], {}, "--grid train.schedul: unknown key; did you mean 'schedule'? (in train.schedul=1)"),
        (["train.seed=1,x"], {}, "--grid train.seed"),
        (["model.width=64,60", "model.heads=2,4"], {}, "(in the combination model.width=60, model.heads=4)"),
        (["train.clip=1,1.0"], {}, "train.clip=1 and train.clip=1.0 are the same job"),
        (["train.duration=10 steps,20 steps"], {"halving": True}, "do not sweep train.duration"),
        (["train.seed=1,2"], {"halving": True, "overrides": ["evaluate.every=40 steps"]}, "before the end"),
        (["train.seed=1,2"], {"halving": True, "overrides": ["data.valid=[]"]}, "needs data.valid"),
        (["checkpoint.best_by=loss,bleu"], {}, "different scores (bleu, loss)"),
        (
            ["train.seed=1,2"],
            {"parallel": 3, "overrides": ["fleet={ssh: {hosts: [a, b, c], machines: 2}}"]},
            "--parallel 3: 3 hosts are enough for 1 run at a time with 2 machines each",
        ),
    ],
)
def test_an_impossible_sweep_is_refused_before_anything_is_written(
    sandbox: Sandbox, grid: list[str], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(Mistake) as raised:
        planned(sandbox, *grid, **fields)
    assert words in str(raised.value)
    assert not Path(sandbox.store).exists()


def test_a_dry_run_lists_the_runs_and_writes_nothing(sandbox: Sandbox) -> None:
    done = CliRunner().invoke(
        app, ["sweep", str(sandbox.directory / "job.yaml"), "--grid", "train.seed=1,2", "--name", "dry", "--dry-run"]
    )
    assert done.stdout == "dry: 2 runs to the end, 1 at a time\n  dry-1  train.seed=1\n  dry-2  train.seed=2\n"
    assert not Path(sandbox.store).exists()


def test_hosts_are_divided_among_the_runs_that_train_at_the_same_time() -> None:
    fleet = kind_class(FLEETS, "ssh").model_validate({"hosts": ["a", "b", "c", "d", "e"], "machines": 2})
    assert [part.hosts for part in fleet.divided(None)] == [("a", "b"), ("c", "d")]
    assert [part.hosts for part in fleet.divided(1)] == [("a", "b")]
    local = kind_class(FLEETS, "local").model_validate({})
    assert [len(local.divided(count)) for count in (None, 3)] == [1, 3]


def test_a_run_gets_its_part_of_the_fleet_before_it_starts(directory_store: Store) -> None:
    job = recipe_job(fleet={"ssh": {"hosts": ["a", "b", "c", "d"], "machines": 2}, "workers": 3, "price": 2.0})
    run, part = new_run(directory_store, job), job.fleet.kind.divided(None)[1]
    changed, _ = changed_job(run.job_data, moved(run, part))
    assert changed.fleet == job.fleet.model_copy(update={"kind": part})
    assert isinstance(changed.fleet.kind, SshSettings)
    assert changed.fleet.kind.hosts == ("c", "d")
    assert moved(run, job.fleet.kind) == moved(run, None) == []


# The store.


def stored(store: Store) -> Sweep:
    trials = tuple(Trial(number, f"s-{number}", {"train.seed": str(number)}) for number in (1, 2))
    sweep = Sweep(store, "s")
    sweep.put_plan(SweepPlan("s", "job", "digest", ("train.seed",), trials, 1, {}))
    return sweep


def test_a_plan_is_put_once_and_a_start_is_claimed_once(directory_store: Store) -> None:
    sweep = stored(directory_store)
    other = SweepPlan("s", "other", "other", (), sweep.plan.trials, 1, {})
    assert Sweep(directory_store, "s").put_plan(other).job == "job"
    start = TrialStart(1, 1, 0, 0, 1.0, 1)
    assert [sweep.claim(start), sweep.claim(start)] == [True, False]
    assert sweep_names(directory_store) == ["s"]
    with pytest.raises(NotFound, match="did you mean 's'"):
        _ = Sweep(directory_store, "ss").plan


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("plan.json", b"{}"),
        ("plan.json", b'{"name": "s", "job": "", "digest": "", "parameters": [], "trials": [], "parallel": 1}'),
        ("starts/000009-001.json", encode(TrialStart(9, 1, 0, 0, 1.0, 1))),
        ("rungs/001.json", b'{"scores": {"1": 1e999}, "survivors": [-1]}'),
    ],
)
def test_damaged_records_of_a_sweep_are_one_line(directory_store: Store, key: str, data: bytes) -> None:
    directory_store.put(stored(directory_store).key(key), data)
    with pytest.raises(DamagedRecord, match="damaged"):
        sweep_table(directory_store, "s")


def test_a_run_that_was_left_half_made_is_completed_and_other_code_is_refused(directory_store: Store) -> None:
    sweep = stored(directory_store)
    trial = sweep.plan.trials[0]
    job = new_run(directory_store).job_data
    directory_store.put("runs/s-1/job.json", job)  # and then its client was killed
    for _ in range(2):
        run = add_trial_run(sweep, trial, job, b"code", "a-pack")
        assert (run.code, run.pack_name(), sweep_of(run)) == (b"code", "a-pack", "s")
    with pytest.raises(Mistake, match="the code has changed since s-1 was created"):
        add_trial_run(sweep, trial, job, b"other", "a-pack")
    assert open_run(directory_store, "s").name == "s-1"
    assert sweep_of(Run(directory_store, "job-1")) is None


def test_a_run_that_somebody_else_has_changed_is_not_trusted_by_creating_its_sweep_again(
    directory_store: Store,
) -> None:
    """As the same command does, which continues a sweep."""
    sweep, job = stored(directory_store), recipe_job(fleet={"ssh": {"hosts": ["a", "b"]}})
    made = NewRun(directory_store, job, archive({}), None, JobSource("job.yaml", "", ()))

    def create() -> Run:
        data = job.model_dump_json().encode()
        return create_with(made, lambda: add_trial_run(sweep, sweep.plan.trials[0], data, made.code, None))

    part = job.model_copy(update={"fleet": job.fleet.model_copy(update={"kind": job.fleet.kind.divided(None)[0]})})
    remember(moved_run := create().changed(part), instead=False)
    moved_run.put_job()
    create()
    require_trust(Run(directory_store, "s-1"), refuse)
    changed = part.model_copy(update={"report": ReportSettings(mlflow="https://mlflow.of-somebody-else.example")})
    directory_store.put("runs/s-1/job.json", changed.model_dump_json().encode())
    create()
    with pytest.raises(Mistake, match=r"^s-1 is not what you ran before: job\.json changed"):
        require_trust(Run(directory_store, "s-1"), refuse)


def test_one_process_at_a_time_drives_a_sweep(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    sweep = stored(directory_store)
    first, second = DriverSeat(sweep), DriverSeat(sweep)
    assert [first.take(), second.take(), first.take()] == [True, False, True]
    assert second.other is not None
    first.close()
    assert second.take()
    second.close()
    # One that was killed has not left, but its lock is free.
    killed = SweepDriver(3, "somebody", sweep.drivers()[-1].machine, "its-lock")
    sweep.become_driver(killed)
    sweep.put_beat(3, DriverBeat(7))
    assert not first.take(), "without a lock file it has to be watched"
    (tmp_path / "cache" / "sweeps" / "its-lock.lock").touch()
    assert first.take()
    assert [driver.number for driver in sweep.drivers()] == [1, 2, 3, 4]
    first.close()


def test_a_run_that_ends_during_a_look_is_not_started_again(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    sweep = stored(directory_store)
    job = new_run(directory_store).job_data
    for trial in sweep.plan.trials:
        add_trial_run(sweep, trial, job, b"code", None)
        sweep.claim(TrialStart(trial.number, 1, 0, 0, 1.0, 1))

    def end(runs: Sequence[Run]) -> list[State | PacktrainError]:
        for run in runs:
            run.finish(Result("finished", "done", 3, 1.0))
        return ["interrupted"] * len(runs)

    monkeypatch.setattr(drive, "states_now", end)
    said: list[str] = []
    driver = SweepDrive(sweep, lambda *_: pytest.fail("nothing to accept"), said.append)
    assert [driver.look(), driver.look()] == [False, True]
    assert said == ["s-1 finished: done", "s-2 finished: done"]
    assert [(one.trial, one.attempt) for one in sweep.starts()] == [(1, 1), (2, 1)]
    driver.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from packtrain.cli import main
from packtrain.run.sweeps import Sweep

def claim(sweep, start, claim=Sweep.claim):
    assert claim(sweep, start)
    Path(f"{sweep.store.url}/{sweep.key('drivers')}/.tmp-{start.attempt}").touch()  # as in the middle of a write
    os.kill(os.getpid(), signal.SIGKILL)

Sweep.claim = claim
main()
"""


def left_behind(directory: Path) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.name.startswith(".tmp-") or path.suffix == ".lock"]


def test_a_trial_starts_however_often_its_driver_was_killed_and_nothing_of_them_stays(
    processes: None, tmp_path: Path
) -> None:
    sandbox = make_sandbox(tmp_path)
    (tmp_path / "code/work.py").write_text("print('worked')\n")
    (tmp_path / "job.yaml").write_text(
        f"{{name: work, program: [work.py, a], code: code, store: {sandbox.store}, fleet: {{local: {{}}, workers: 1}}}}"
    )
    words = ("sweep", "job.yaml", "--grid", "program.1=a,b", "--parallel", "1", "--name", "both")
    try:
        for _ in range(3):
            command = [sys.executable, "-c", KILLED, *words]
            done = subprocess.run(command, cwd=tmp_path, env=sandbox.environment, capture_output=True, check=False)
            assert done.returncode == -signal.SIGKILL, done.stderr
        sweep = Sweep(open_store(sandbox.store), "both")
        assert [(one.trial, one.attempt) for one in sweep.starts()] == [(1, 1), (1, 2), (1, 3)]
        assert left_behind(tmp_path), "of the last"
        assert started(sandbox, *words[1:], output=tmp_path / "last.txt").wait(120) == 0
        results = [sweep.run(trial).result() for trial in sweep.plan.trials]
        assert [result.status for result in results if result is not None] == ["finished", "finished"]
        assert left_behind(tmp_path) == []
    finally:
        sandbox.close()


def test_a_start_counts_only_if_its_driver_lived_to_see_what_came_of_it(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    sweep = stored(directory_store)
    job = new_run(directory_store).job_data
    for trial in sweep.plan.trials:
        add_trial_run(sweep, trial, job, archive({}), None)
    for number in range(1, 5):
        sweep.claim(TrialStart(1, number, 0, 0, 1.0, number))

    def fail(run: Run, *_: object, **__: object) -> Run:
        raise PacktrainError(f"{run.name}: a host does not answer")

    monkeypatch.setattr(drive, "reopen", fail)
    said: list[str] = []
    driver = SweepDrive(sweep, lambda _: None, said.append)
    assert [driver.look() for _ in range(7)] == [False] * 6 + [True]
    tried = [f"could not start s-{number}: s-{number}: a host does not answer" for number in (1, 2)]
    assert sorted(said) == sorted(3 * tried), "each is given up after three tries that its driver lived to see fail"
    assert [one.attempt for one in sweep.starts() if one.trial == 1 and one.tried] == [5, 6, 7]


def test_a_fleet_that_was_changed_in_the_plan_of_a_sweep_is_not_used_unasked(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machines would get the variables of the job."""
    for name in ("PACKTRAIN_CACHE", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    sweep = stored(directory_store)
    job = new_run(directory_store, recipe_job()).job_data
    for trial in sweep.plan.trials:
        remember(add_trial_run(sweep, trial, job, archive({}), None))
    elsewhere = {"ssh": {"hosts": ["gpu-of-somebody-else"]}}
    directory_store.put("sweeps/s/plan.json", encode(replace(sweep.plan, fleet=elsewhere)))
    driver = SweepDrive(Sweep(directory_store, "s"), refuse, print)
    with pytest.raises(Mistake, match=r"s-1 is not what you ran before: .* its sweep's fleet, changed"):
        driver.look()
    assert Run(directory_store, "s-1").launches() == []
    driver.close()


def test_a_run_that_a_person_has_stopped_is_shown_as_stopped(directory_store: Store) -> None:
    sweep = stored(directory_store)
    job = new_run(directory_store).job_data
    for trial in sweep.plan.trials:
        run = add_trial_run(sweep, trial, job, b"code", None)
        run.finish(Result("stopped", "stopped by user", 3, 1.0))
    sweep.claim(TrialStart(1, 1, 0, 0, 1.0, 1))
    rows = {row.trial: row.standing for row in sweep_table(directory_store, "s").rows}
    assert rows == {1: "stopped", 2: "not started"}
