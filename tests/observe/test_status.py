from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pack.corpus import job_of
from packtrain.job import Job
from packtrain.observe.history import throughput
from packtrain.observe.measure import Score
from packtrain.observe.status import read_end, read_status, status_in_full, status_json
from packtrain.run.checkpoint import commit
from packtrain.run.records import Generation, Lease, Member, Point, Result, Status, Telemetry, TimeSpent
from packtrain.run.run import Run, add_run, open_run
from packtrain.store import Store
from parts.faulty import FaultyStore
from parts.runs import a_generation, a_lease, write_files


def trained(step: int, **values: float) -> Point:
    measured = {
        "loss": 4.0,
        "rate": 0.001,
        "gradient_norm": 1.0,
        "tokens": 64.0,
        "epoch": 0.1,
        "elapsed_seconds": 10.0 + step,
        "step_seconds": 0.5,
        "data_seconds": 0.1,
        "forward_seconds": 0.1,
        "backward_seconds": 0.2,
        "optimizer_seconds": 0.05,
    }
    return Point("train", 1, step, 100.0 + step, {**measured, **values})


def validated(step: int, **values: float) -> Point:
    return Point("valid", 1, step, 100.0 + step, {**values, "evaluation_seconds": 2.0})


@pytest.fixture
def run(directory_store: Store, tmp_path: Path) -> Run:
    return add_run(directory_store, job_of(tmp_path), b"", None)


@pytest.fixture
def program(directory_store: Store) -> Run:
    job = Job.model_validate({"name": "mine", "program": ["train.py", "--lr", "0.1"]})
    return add_run(directory_store, job, b"", None)


def test_a_run_without_metrics_is_at_step_0(run: Run) -> None:
    summary = status_in_full(run, "running", [], None)
    assert (summary.run, summary.state, summary.reason) == ("greetings-1", "running", "")
    assert (summary.step, summary.goal, summary.seconds) == (0, 10, 0.0)
    assert (summary.loss, summary.rate, summary.units_per_second) == (None, None, None)
    assert (summary.scores, summary.goodput.parts, summary.machines, summary.headline) == ({}, {}, (), "")


def test_a_run_is_described_by_its_recipe_or_its_program(run: Run, program: Run) -> None:
    assert status_in_full(run, "running", [], None).description == "translate tiny, 10 steps, 64 tokens per batch"
    assert status_in_full(program, "running", [], None).description == "train.py --lr 0.1"


def test_a_running_run_is_at_its_last_step(run: Run) -> None:
    points = [trained(1, loss=5.0), trained(2, loss=4.0, rate=0.002), validated(2, loss=4.5, bleu=1.5)]
    summary = status_in_full(run, "running", points, None)
    assert (summary.step, summary.seconds, summary.rate) == (2, 12.0, 0.002)
    assert summary.loss == pytest.approx(4.5)
    assert summary.units_per_second == pytest.approx(128)
    assert summary.scores == {"valid.loss": 4.5, "valid.bleu": 1.5}


def test_loss_is_that_of_the_last_50_steps_and_so_is_speed_until_the_run_ends(run: Run) -> None:
    points = [trained(step, loss=100.0, step_seconds=100.0) for step in range(1, 51)]
    points += [trained(step, loss=2.0) for step in range(51, 101)]
    summary = status_in_full(run, "running", points, None)
    assert summary.loss == pytest.approx(2.0)
    assert summary.loss_steps == 50
    assert summary.units_per_second == pytest.approx(128)
    ended = status_in_full(run, "finished", points, Result("finished", "reached 100 steps", 100, 99.0))
    assert ended.loss == pytest.approx(2.0)
    assert ended.units_per_second == pytest.approx(64 * 100 / (50 * 100 + 50 * 0.5))


def test_each_score_has_its_last_value(run: Run) -> None:
    points = [validated(5, loss=4.5, bleu=1.5), validated(10, loss=4.0)]
    assert status_in_full(run, "running", points, None).scores == {"valid.loss": 4.0, "valid.bleu": 1.5}


def test_a_finished_run_has_the_scores_and_signatures_of_its_result(run: Run) -> None:
    result = Result("finished", "reached 10 steps", 10, 99.0, {"test.bleu": 20.0}, {"test.bleu": "tok:13a"})
    summary = status_in_full(run, "finished", [trained(10), validated(10, bleu=18.0)], result)
    assert (summary.reason, summary.step, summary.seconds) == ("reached 10 steps", 10, 99.0)
    assert summary.scores == {"valid.bleu": 18.0, "test.bleu": 20.0}
    assert summary.signatures == {"test.bleu": "tok:13a"}


def test_the_time_of_a_run_is_the_one_that_its_parts_add_up_to(run: Run) -> None:
    times = run.time_spent_writer("a")
    times.append(TimeSpent(20.0, 1, 0, 10, {"start": 8.0, "forward": 12.0}))
    times.flush()
    for seconds, whole in ((12.0, 20.0), (25.0, 25.0)):
        summary = status_in_full(run, "finished", [trained(10)], Result("finished", "", 10, seconds))
        assert (summary.seconds, summary.goodput.seconds) == (whole, whole)


def test_the_run_of_a_program_has_neither_goal_nor_speed(program: Run) -> None:
    summary = status_in_full(program, "failed", [], Result("failed", "exit code 1", 0, 12.0))
    assert (summary.reason, summary.seconds, summary.step) == ("exit code 1", 12.0, 0)
    assert (summary.goal, summary.unit, summary.units_per_second) == (None, "", None)
    assert summary.headline == ""


def logged(step: int, generation: int = 1, **values: float) -> Point:
    return Point("log", generation, step, 100.0 + step / 2, values)


def test_a_program_that_logs_has_steps_a_loss_a_speed_and_its_own_numbers(program: Run) -> None:
    points = [logged(step, loss=10.0 - step, lr=0.5) for step in range(1, 5)]
    points += [Point("log", 1, 0, 1.0, {"parameters": 7.0}), logged(2, 1, loss=8.0, **{"val/loss": 9.0})]
    found = status_in_full(program, "running", points, None)
    assert (found.step, found.step_text, found.unit, found.units_per_second) == (4, "4", "steps", 2.0)
    assert (found.loss, found.rate, found.headline) == (7.5, 0.5, "val/loss 9.00")
    assert found.scores == {"parameters": 7.0, "loss": 6.0, "lr": 0.5, "val/loss": 9.0}


@pytest.mark.parametrize("name", ["train_loss", "reward"])
def test_the_speed_of_a_program_is_that_of_its_steps_and_not_of_its_epochs(program: Run, name: str) -> None:
    """Of 2 steps/s each tenth is logged; a score is logged by epochs of 50 steps, and once by samples."""
    points = [Point("log", 1, step, 100.0 + step / 2, {name: 1.0}) for step in range(10, 501, 10)]
    points += [Point("log", 1, epoch, 100.0 + epoch * 25, {"val_score": 0.5}) for epoch in range(1, 8)]
    points += [Point("log", 1, 32_000, 350.0, {"val_score": 0.5})]
    found = status_in_full(program, "finished", points, Result("finished", "", 1, 12.0))
    assert (found.units_per_second, found.headline) == (2.0, "val_score 0.5")


def test_batches_of_a_validation_are_no_steps(program: Run) -> None:
    """As Lightning writes them with `on_step=True`: 2 steps/s, and after every 50 of them 200 batches in a moment."""
    points = [Point("log", 1, batch, 125.0 + batch // 200 * 25, {"val_loss_step": 9.0}) for batch in range(1200)]
    for step in range(9, 300, 10):
        points[step] = logged(step, train_loss=2.0, epoch=0.0, val_loss_step=9.0)
    found = status_in_full(program, "running", points, None)
    assert (found.step, found.loss, found.units_per_second) == (299, 2.0, 2.0)
    only_scores = status_in_full(program, "running", [logged(step, accuracy=0.5) for step in range(1, 5)], None)
    assert (only_scores.step, only_scores.units_per_second) == (4, 2.0)


def test_the_speed_of_printed_steps_does_not_depend_on_when_they_were_read(program: Run) -> None:
    """A program makes 5 steps/s, and its output is read every two seconds."""
    points = [Point("log", 1, step, 102.0 + step // 10 * 2, {"loss": 1.0}) for step in range(1, 30)]
    assert status_in_full(program, "running", points, None).units_per_second == 5.0


def test_a_program_may_log_anything_but_a_loss(program: Run) -> None:
    found = status_in_full(program, "running", [logged(1, accuracy=0.0314)], None)
    assert (found.loss, found.rate, found.units_per_second, found.headline) == (None, None, None, "accuracy 0.0314")


def test_a_program_has_commits_and_the_time_of_its_machines_while_it_runs(program: Run, tmp_path: Path) -> None:
    for number in (1, 2):
        commit(program, number, 1, None, write_files(tmp_path, {"a": b"x"}))
    program.renew(a_lease("gone", used_seconds=5.0))
    program.renew(a_lease("here", used_seconds=30.0))
    for found in (read_end(program, "interrupted"), status_in_full(program, "interrupted", [], None)):
        assert (found.step, found.seconds, found.step_text) == (2, 30.0, "2 commits")
    program.finish(Result("stopped", "by user", 1, 40.0))
    ended = read_end(program, "stopped")
    assert (ended.step_text, ended.seconds) == ("1 commit", 40.0)


def test_the_goal_is_known_only_for_a_duration_in_steps(directory_store: Store, tmp_path: Path) -> None:
    train = {"duration": "2 epochs", "batch": "64 tokens", "schedule": {"constant": {"rate": 0.001}}}
    run = add_run(directory_store, job_of(tmp_path, train=train), b"", None)
    assert status_in_full(run, "running", [], None).goal is None


def test_the_score_of_a_run_is_its_last_one_on_the_validation_split_with_its_samples(run: Run) -> None:
    points = [validated(1, bleu=9.0), validated(2, bleu=20.0), replace(validated(3, bleu=18.0), counts={"bleu": 100})]
    final = Result("finished", "", 3, 9.0, {"test.bleu": 17.0}, counts={"test.bleu": 800})
    for found in (status_in_full(run, "running", points, None), status_in_full(run, "finished", points, final)):
        assert found.score == Score("valid.bleu", 18.0, 3, 100)
        assert found.headline == "valid bleu 18.00 (100 samples)"
        assert found.best == Score("valid.bleu", 20.0, 2)
    assert found.test == Score("test.bleu", 17.0, 3, 800)
    assert found.counts == {"valid.bleu": 100, "test.bleu": 800}


def test_the_score_of_the_full_validation_split_replaces_that_of_its_part_but_is_not_the_best(run: Run) -> None:
    final = Result("finished", "", 3, 9.0, {"valid.bleu": 25.0}, counts={"valid.bleu": 800})
    points = [replace(validated(step, bleu=20.0 - step), counts={"bleu": 100}) for step in (1, 3)]
    found = status_in_full(run, "finished", points, final)
    assert found.headline == "valid bleu 25.00 (800 samples)"
    assert found.best == Score("valid.bleu", 19.0, 1, 100)


def test_the_score_is_the_one_that_chooses_the_best_checkpoint(directory_store: Store, tmp_path: Path) -> None:
    run = add_run(directory_store, job_of(tmp_path, checkpoint={"best_by": "loss"}), b"", None)
    points = [validated(step, loss=loss, bleu=bleu) for step, loss, bleu in ((1, 2.0, 30.0), (2, 3.0, 40.0))]
    found = status_in_full(run, "running", points, None)
    assert (found.measure, found.lower, found.headline) == ("loss", True, "valid loss 3.00")
    assert found.best == Score("valid.loss", 2.0, 1)


def test_without_the_score_that_counts_the_loss_is_shown_and_without_validation_the_test_split(run: Run) -> None:
    assert status_in_full(run, "running", [validated(1, loss=4.0)], None).headline == "valid loss 4.00"
    final = Result("finished", "", 3, 9.0, {"test.bleu": 17.0, "test.loss": 2.0})
    assert status_in_full(run, "finished", [], final).headline == "test bleu 17.00"


def test_a_machine_that_was_lost_before_the_latest_generation_is_not_working(run: Run) -> None:
    for lease in (a_lease("lost"), a_lease("member"), a_lease("next", joined=3)):
        run.renew(lease)
    for generation in (a_generation(1, "lost", "member"), a_generation(2, "member")):
        assert run.propose(generation)
    machines = status_in_full(run, "running", [], None).machines
    assert [one.node for one in machines if one.working] == ["member", "next"]


def test_machines_are_working_only_while_the_run_is_running(run: Run) -> None:
    run.renew(Lease("n0", "host", "::1", 1, 2, 0, 5, 1.0, telemetry=Telemetry(0.5, 0.25)))
    run.renew(Lease("n1", "host", "::1", 1, 2, 0, 5, 1.0, left=True))
    going = status_in_full(run, "running", [], None).machines
    assert [(one.node, one.workers, one.working) for one in going] == [("n0", 2, True), ("n1", 2, False)]
    assert (going[0].cpu_fraction, going[0].memory_fraction) == (0.5, 0.25)
    assert not any(one.working for one in status_in_full(run, "interrupted", [], None).machines)


def test_generations_and_steps_are_read_from_the_store(run: Run) -> None:
    for number in (1, 2):
        run.propose(Generation(number, (Member("n0", "::1", 1),), 1, "start"))
    writer = run.point_writer("0")
    writer.append(trained(1))
    writer.flush()
    summary = read_status(run, "running")
    assert (summary.generations, summary.step) == (2, 1)


@pytest.mark.parametrize(
    ("state", "reason", "outcome"),
    [
        ("stopped", "", "stopped"),
        ("finished", "reached 10 steps", "finished: reached 10 steps"),
        ("stopped", "stopped by user", "stopped by user"),
    ],
)
def test_the_outcome_names_the_state_once(run: Run, state: Status, reason: str, outcome: str) -> None:
    assert status_in_full(run, state, [], Result(state, reason, 0, 0.0)).outcome == outcome


# The overview, for a list of many runs.


def written(run: Run, generation: int, points: Sequence[Point]) -> None:
    """Write each point in a chunk of its own."""
    writer = run.point_writer(f"{generation:06d}-rank-0")
    for point in points:
        writer.append(point)
        writer.flush()


def chunks_read(store: FaultyStore) -> int:
    return sum(operation == "find" and "/metrics/" in key for operation, key in store.operations)


@pytest.fixture
def watched(directory_store: Store, tmp_path: Path) -> FaultyStore:
    store = FaultyStore(directory_store)
    source = {"bitext": ["a.en", "a.de"]}
    job = job_of(tmp_path, data={"train": [source], "valid": [source]}, evaluate={"every": "100 steps"})
    add_run(store, job, b"", None)
    return store


def test_the_overview_agrees_with_the_summary(watched: FaultyStore) -> None:
    run = open_run(watched, None)
    written(run, 1, [Point("start", 1, 0, 0.0, {}), *(trained(step, loss=9.0) for step in range(1, 60))])
    again = [replace(trained(step, loss=step / 10), generation=2) for step in range(41, 80)]
    written(run, 2, [Point("start", 2, 40, 0.0, {}), *again, replace(validated(60, bleu=7.0), generation=2)])
    summary = status_json(read_status(run, "running"))
    shown = status_json(read_end(run, "running"), in_full=False)
    assert shown == {name: summary[name] for name in shown}
    assert (shown["step"], shown["scores"]) == (79, {"valid.bleu": 7.0})


def test_the_overview_of_a_long_run_reads_back_to_its_last_evaluation(watched: FaultyStore) -> None:
    run = open_run(watched, None)
    written(run, 1, [trained(step) for step in range(1, 201)])
    written(run, 2, [validated(200, bleu=7.0), *(trained(step) for step in range(201, 281))])
    watched.operations.clear()
    assert read_end(run, "running").headline == "valid bleu 7.00"
    assert chunks_read(watched) == 81


def test_the_overview_of_a_finished_run_reads_only_its_end(watched: FaultyStore) -> None:
    run = open_run(watched, None)
    written(run, 1, [*(trained(step) for step in range(1, 201)), validated(200, bleu=7.0)])
    run.finish(Result("finished", "reached 200 steps", 200, 99.0, {"test.bleu": 20.0}))
    watched.operations.clear()
    assert read_end(run, "finished").headline == "valid bleu 7.00"
    assert chunks_read(watched) == 51


# Time and speed.


def test_speed_is_units_divided_by_seconds() -> None:
    points = [trained(1, tokens=100.0, step_seconds=1.0), trained(2, tokens=50.0, step_seconds=0.5)]
    assert throughput(points, "tokens") == pytest.approx(100)
    assert throughput([], "tokens") is None
    assert throughput([trained(1, step_seconds=0.0)], "tokens") is None


def test_evaluations_and_saves_between_steps_do_not_count_as_step_time() -> None:
    points = [trained(1, tokens=100.0, step_seconds=9.0, evaluation_seconds=5.0, save_seconds=1.0, start_seconds=2.0)]
    assert throughput(points, "tokens") == pytest.approx(100)
