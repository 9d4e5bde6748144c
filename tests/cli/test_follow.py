"""Following a run: machines that it waits for, events, evaluations and progress."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from packtrain.cli.follow import (
    ASK_FLEET_SECONDS,
    Follower,
    MachineWatch,
    StepLines,
    check_launched,
    follow,
    logged_line,
    progress_line,
    scores_in_words,
    shortage,
)
from packtrain.cli.screen import console
from packtrain.errors import EXIT_ALREADY_JOINED, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_UNFINISHED, NotFinished
from packtrain.fleet import Machine
from packtrain.fleet.host import start_process
from packtrain.fleet.local import LocalFleet
from packtrain.observe.follower import RunNews
from packtrain.run import liveness
from packtrain.run.liveness import fail_launch, watch_states
from packtrain.run.records import Event, FleetLaunch, LogLine, Point, Result
from packtrain.run.run import Run
from packtrain.store import Store, StoreError
from packtrain.system import this_client
from packtrain.units import Machines
from parts.runs import a_generation, a_lease, new_run, program_job, recipe_job

TWO = Machines(2, 2)
ENDED = Machine("b", "ended", is_over=True)


@pytest.mark.parametrize(
    ("alive", "machines", "said"),
    [
        (2, None, None),
        (1, [Machine("a", "running"), ENDED], "waiting for 1 of 2 machines: 1 running, 1 ended"),
        (
            0,
            [Machine("a", "unreachable"), ENDED],
            "waiting for 2 of 2 machines: 1 unreachable, 1 ended",
        ),
        (0, [Machine("7", "PENDING (Resources)")], "waiting for 2 of 2 machines: 1 PENDING (Resources)"),
        (0, None, "waiting for 2 of 2 machines"),
        (1, [], "waiting for 1 of 2 machines"),
    ],
)
def test_a_run_with_too_few_machines_says_what_it_waits_for(
    alive: int, machines: list[Machine] | None, said: str | None
) -> None:
    found = shortage(alive, TWO, machines, "packtrain resume job-1")
    assert (found.text if found else None) == said
    assert found is None or not found.none_left


@pytest.mark.parametrize("machines", [[], [ENDED], [ENDED, Machine("a", "TIMEOUT", is_over=True)]])
def test_a_run_without_machines_says_how_to_continue(machines: list[Machine]) -> None:
    found = shortage(0, TWO, machines, "packtrain resume job-1")
    assert found is not None
    assert found.none_left
    assert "`packtrain resume job-1`" in found.text


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def seen(watcher: MachineWatch, clock: Clock, seconds: float, each: Callable[[], None] = lambda: None) -> str:
    """Return the last text after that time, with a look every two seconds."""
    found = None
    for _ in range(int(seconds / 2)):
        clock.now += 2
        each()
        found = watcher.look()
        if watcher.asking is not None:
            watcher.asking.result()
    return found.text if found is not None else ""


def test_the_fleet_is_asked_only_while_too_few_machines_are_alive(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    here = [Machine("this machine", "running")]

    def machines(_: LocalFleet, run: Run) -> list[Machine]:
        asked.append(run.name)
        return here

    monkeypatch.setattr(LocalFleet, "machines", machines)
    run, clock = new_run(directory_store, program_job(fleet={"local": {"machines": 2}})), Clock()
    watcher = MachineWatch(run, clock)
    assert seen(watcher, clock, ASK_FLEET_SECONDS - 2) == ""
    assert not asked
    assert seen(watcher, clock, 6) == "waiting for 2 of 2 machines: 1 running"
    renewals = iter(range(1000))

    def renew() -> None:
        for name in "ab":
            run.renew(a_lease(name, next(renewals)))

    assert seen(watcher, clock, 60, renew) == ""
    assert len(asked) == 1
    here.clear()  # and nobody renews any more
    assert "no machine is left" in seen(watcher, clock, 20 + ASK_FLEET_SECONDS)
    assert not watcher.is_hopeless
    seen(watcher, clock, ASK_FLEET_SECONDS + 4)
    assert watcher.is_hopeless


def test_following_a_run_that_no_machine_works_on_ends_with_how_to_continue(
    directory_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFinished, match=r"no machine is left; run `packtrain resume job-1 --store .*`") as ended:
        run = new_run(directory_store)
        Follower(run, [], console(), MachineWatch(run, ask_seconds=0.0), poll_seconds=0.01).until_ended()
    assert ended.value.exit_code == EXIT_UNFINISHED
    assert "no machine is left" in capsys.readouterr().out, "it is said as soon as it is known"


def test_a_store_that_is_away_ends_following_but_not_the_run(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Run) -> None:
        raise StoreError("the store does not answer", temporary=True)

    monkeypatch.setattr(Run, "result", away)
    with pytest.raises(NotFinished, match="does not answer; the run may still be running: try `packtrain follow"):
        follow(new_run(directory_store), [], foreground=False)


def test_following_continues_when_a_mount_comes_back(
    directory_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = new_run(directory_store), Path(directory_store.url)
    follower = Follower(run, [], console(), poll_seconds=0.01)
    place.rename(place.with_name("away"))

    def come_back() -> None:
        place.with_name("away").rename(place)
        run.finish(Result("finished", "reached 10 steps", 10, 1.0))
        directory_store.put(run.key("report.html"), b"")

    timer = threading.Timer(0.3, come_back)
    timer.start()
    follower.until_ended()
    timer.join()
    assert capsys.readouterr().out.count("the store is not there; check its mount") == 1


def test_a_store_that_is_away_during_the_summary_does_not_make_a_finished_run_a_failed_one(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Run) -> None:
        raise StoreError("the store does not answer", temporary=True)

    run = new_run(directory_store)
    run.finish(Result("finished", "reached 10 steps", 10, 1.0))
    monkeypatch.setattr("packtrain.cli.follow.write_report", away)
    monkeypatch.setattr("packtrain.cli.follow.LEASE_LOST_SECONDS", 0.0)  # that it waits for a machine's report
    with pytest.raises(NotFinished, match="does not answer"):
        follow(run, [], foreground=False)


def test_a_program_is_shown_as_running_once_its_workers_have_started(directory_store: Store) -> None:
    run = new_run(directory_store)
    follower = Follower(run, [], console())
    assert "starting" in follower.line()
    events = run.event_writer("a")
    events.append(Event(0.0, "generation", "1: started 1 worker", 1))
    events.flush()
    follower.read()
    assert "running for" in follower.line()


@pytest.mark.parametrize("quiet", [False, True])
def test_what_rank_0_of_a_program_prints_is_shown_unless_quiet(
    directory_store: Store, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    run = new_run(directory_store)
    run.propose(a_generation(1, "a", "b"))
    logs = {node: run.log_writer(node) for node in ("a", "b")}
    logs["a"].append(LogLine(1.0, 1, "a", 0, "out", "before"))
    logs["a"].flush()
    follower = Follower(run, [], console(), news=RunNews(run), quiet=quiet)
    for node, rank, text in (("a", 0, "loss [0.5]"), ("a", 1, "rank 1"), ("a", None, "launcher"), ("b", 2, "other")):
        logs[node].append(LogLine(2.0, 1, node, rank, "out", text))
        logs[node].flush()
    follower.read()
    assert capsys.readouterr().out == ("" if quiet else "loss [0.5]\n")


def test_hangs_and_excluded_machines_are_shown_and_commits_are_not(
    directory_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(directory_store)
    events = run.event_writer("a")
    events.append(Event(0.0, "hang", "rank 1 hangs", 1))
    events.append(Event(1.0, "excluded", "m2 failed twice", 1))
    events.append(Event(2.0, "checkpoint", "committed step 4", 1))
    events.flush()
    Follower(run, [], console()).read()
    shown = capsys.readouterr().out
    assert "rank 1 hangs" in shown
    assert "m2 failed twice" in shown
    assert "committed" not in shown


def test_an_evaluation_that_repeats_the_last_one_is_shown_once(
    directory_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(directory_store)
    points = run.point_writer("a")
    shown: list[tuple[Literal["valid", "test"], int, float]] = [
        ("valid", 5, 2.0), ("valid", 10, 1.5), ("valid", 10, 1.5), ("test", 10, 1.5)
    ]  # fmt: skip
    for kind, step, loss in shown:
        points.append(Point(kind, 1, step, 0.0, {"loss": loss, "evaluation_seconds": float(step)}))
    points.flush()
    Follower(run, [], console()).read()
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["valid", "step", "5", "loss", "2.000"],
        ["valid", "step", "10", "loss", "1.500"],
        ["test", "step", "10", "loss", "1.500"],
    ]


def test_events_and_evaluations_are_shown_in_their_order_and_without_what_came_before_a_resume(
    directory_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(directory_store)
    events, points = run.event_writer("a"), run.point_writer("a")

    def record(generation: int, first: float) -> None:
        events.append(Event(first, "generation", f"{generation}: started 1 worker", generation))
        points.append(Point("valid", generation, 5, first + 1, {"loss": generation}))
        events.append(Event(first + 2, "warning", f"slow in {generation}", generation))
        events.flush()
        points.flush()

    record(1, 0.0)
    resumed = Follower(run, [], console(), news=RunNews(run))
    record(2, 10.0)
    resumed.read()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["generation", "valid", "warning"]
    Follower(run, [], console()).read()
    assert len(capsys.readouterr().out.splitlines()) == 6


def steps_of_a_second(count: int = 10) -> list[Point]:
    """Steps of one second and 4 samples each; twenty make an epoch."""
    return [
        Point(
            "train", 1, step, float(step),
            {"loss": 2.0, "rate": 0.001, "samples": 4.0, "epoch": step / 20, "elapsed_seconds": step + 1.0,
             "step_seconds": 1.0},
        )
        for step in range(1, count + 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("duration", "step", "left"),
    [("20 steps", "10 of 20", "10 s left"), ("2 epochs", "10 of 40", "30 s left"), ("30 s", "10", "19 s left")],
)
def test_progress_shows_total_speed_and_time_left_in_every_unit_of_duration(
    duration: str, step: str, left: str
) -> None:
    line = progress_line(recipe_job(train={"duration": duration}), steps_of_a_second(), 90.0)
    assert line == f"step {step}  loss 2.000  lr 0.001  4 samples/s  {left}  budget 1 min 30 s"


def test_progress_leaves_out_what_matters_least_in_a_narrow_terminal() -> None:
    job, steps = recipe_job(train={"duration": "2 epochs"}), steps_of_a_second()
    wide, narrow = (progress_line(job, steps, 90.0, width) for width in (200, 80))
    assert (
        wide == "━" * 5 + "╌" * 15 + "  step 10 of 40  loss 2.000  lr 0.001  4 samples/s  30 s left  budget 1 min 30 s"
    )
    assert narrow == "━━╌╌╌╌╌╌╌╌  step 10 of 40  loss 2.000  4 samples/s  30 s left  budget 1 min 30 s"
    assert progress_line(job, steps, 90.0, 40) == "step 10 of 40  loss 2.000  30 s left"
    # A budget that ends first matters more than speed.
    assert progress_line(job, steps, 20.0, 60) == "step 10 of 40  loss 2.000  30 s left  budget 20 s"


def test_a_log_has_scores_as_they_come_and_steps_every_few_seconds() -> None:
    lines = StepLines(recipe_job(train={"duration": "20 steps"}), every_seconds=5.0)
    valid = Point("valid", 1, 8, 8.5, {"loss": 1.5, "bleu": 20.0, "evaluation_seconds": 0.5})
    shown = [text for _, text in lines.lines([*steps_of_a_second(12), valid])]
    assert [text[:30] for text in shown] == [
        "[train] step 5 of 20  loss 2.0", "[valid] step 8  loss 1.500  bl", "[train] step 10 of 20  loss 2.",
    ]  # fmt: skip


def test_progress_of_a_program_shows_its_step_and_the_numbers_that_fit_beside_it() -> None:
    names = ("loss", "train/epoch", "val/\x1b[31mloss", "score", "a name that needs too much room")
    steps = [Point("log", 1, step, step / 2, {names[step - 1]: 1 / step}) for step in range(1, 6)]
    assert logged_line(steps, 90.0) == "  step 5  loss 1.00  val/loss 0.333  score 0.25  2 steps/s  budget 1 min 30 s"
    assert logged_line(steps[:1]) == "  step 1  loss 1.00"
    evaluated = Point("test", 1, 1, 0.5, {"loss": 0.25})
    assert logged_line(steps[3:4], evaluation=evaluated) == "  step 4  score 0.25  loss 0.25"


def test_progress_of_a_program_shows_the_last_score_that_it_counts_by_epochs(directory_store: Store) -> None:
    run = new_run(directory_store, program_job())
    points = run.point_writer("a")
    points.append(Point("log", 1, 100, 50.0, {"loss": 2.0}))
    points.append(Point("log", 1, 1, 50.0, {"val_score": 0.5}))
    points.append(Point("log", 1, 200, 100.0, {"loss": 1.0}))
    points.flush()
    follower = Follower(run, [], console())
    follower.read()
    assert follower.line() == "  step 200  loss 1.50  val_score 0.5  2 steps/s"


@pytest.mark.usefixtures("processes")
def test_a_client_whose_node_finds_another_in_its_place_follows_that_one(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = new_run(directory_store)
    node = start_process("job-1", (sys.executable, "-c", f"raise SystemExit({EXIT_ALREADY_JOINED})"), tied=False)
    node.process.wait()
    run.store.put(run.key("report.html"), b"")
    threading.Timer(0.5, lambda: run.finish(Result("finished", "it is done", 1, 1.0))).start()
    assert follow(run, [node], foreground=False) == EXIT_DONE
    assert capsys.readouterr().out.count("job-1 already has its node here") == 1


def test_a_run_that_has_ended_shows_its_end(directory_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(directory_store)
    events = run.event_writer("a")
    for number in range(30):
        events.append(Event(float(number), "warning", f"number {number}", 1))
    events.append(Event(30.0, "restored", "restored checkpoint 7", 1))
    events.append(Event(31.0, "restored", "restored checkpoint 7", 1))
    events.flush()
    run.finish(Result("stopped", "stopped by user", 10, 1.0))
    run.store.put(run.key("report.html"), b"")
    assert follow(run, [], foreground=False) == EXIT_STOPPED
    shown = capsys.readouterr().out
    assert "earlier  11 lines" in shown
    assert "number 10" not in shown
    assert "number 11" in shown
    assert shown.count("restored  checkpoint 7\n") == 1, "several machines tell of one thing"
    assert "run      job-1  stopped by user" in shown
    assert "packtrain resume job-1" in shown


def test_a_run_that_nobody_has_started_is_not_waited_for(directory_store: Store) -> None:
    run = new_run(directory_store)
    with pytest.raises(NotFinished, match=r"job-1 has not been started; run `packtrain resume job-1 --store .*`"):
        check_launched(run, seconds=0.0)
    run.store.put(run.key("sweep.txt"), b"rates")
    with pytest.raises(NotFinished, match="one of the sweep rates; `packtrain sweep rates` starts what is left"):
        check_launched(run, seconds=0.0)
    run.record_launch(FleetLaunch(0.0, "client", {}))
    check_launched(run, seconds=0.0)


def test_a_run_whose_launch_failed_is_not_waited_for(
    directory_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(directory_store)
    run.record_launch(FleetLaunch(0.0, this_client(), {}))
    fail_launch(run, "failed", "could not start: no such host")
    assert follow(run, [], foreground=False) == EXIT_FAILED
    assert "job-1  failed: could not start: no such host" in capsys.readouterr().out


def test_a_run_without_machines_shows_its_end_and_how_to_resume_it(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(liveness, "watch_states", partial(watch_states, seconds=0.1))
    run = new_run(directory_store)
    run.renew(a_lease("a", left=True))
    assert follow(run, [], foreground=False) == EXIT_UNFINISHED
    shown = capsys.readouterr().out
    assert "job-1  interrupted" in shown
    assert "packtrain resume job-1" in shown


def test_an_evaluation_says_of_how_many_samples_its_scores_are() -> None:
    values = {"loss": 4.1, "bleu": 2.3, "chrf": 22.25, "evaluation_seconds": 1.0}
    counts = {"loss": 800, "bleu": 100, "chrf": 100}
    parts = scores_in_words(Point("valid", 1, 500, 0.0, values, counts=counts))
    text = "".join(part if isinstance(part, str) else part[0] for part in parts)
    assert text == "step 500  loss 4.100 (800 samples)  bleu 2.300  chrf 22.250 (100 samples)"


def test_the_loss_of_a_run_is_the_mean_of_its_last_50_steps_as_everywhere() -> None:
    steps = [Point("log", 1, step, step / 2, {"loss": 100.0 if step <= 50 else float(step % 2)}) for step in range(101)]
    assert "loss 0.5 " in logged_line(steps)
