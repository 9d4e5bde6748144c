"""`packtrain ls`, `show` and `stop`: who started what and when, what is listed, and whose run is stopped."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typer.testing import Result as Answer

from packtrain.cli import app
from packtrain.cli.runs import fitting
from packtrain.errors import Mistake
from packtrain.run.records import FleetLaunch, JobSource, Notes, Point, Result, Status
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.system import this_client
from packtrain.units import show_time
from parts.dashboard import a_step, write_points
from parts.runs import new_run, program_job, recipe_job
from parts.terminal import in_terminal

DAY = 24 * 3600.0
NOW = time.time()


def command(store: Store, *words: str) -> Answer:
    return CliRunner().invoke(app, [*words, "--store", store.url])


@pytest.fixture
def two_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run of each of two jobs in two stores, one below the other; the outer one is in use."""
    monkeypatch.delenv("PACKTRAIN_STORE", raising=False)
    for place, job in (("store", "outer"), ("sub/store", "inner")):
        new_run(open_store(str(tmp_path / place), create=True), program_job(job)).finish(
            Result("finished", "the program exited with code 0", 1, 1.0)
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(store: Store) -> list[str]:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, ["ls", "--store", store.url]).output.splitlines()


@pytest.mark.parametrize("words", [["stop", "inner-1"], ["show", "inner"], ["du", "inner-1"], ["report", "inner"]])
def test_a_run_that_only_another_store_nearby_has_is_named_with_that_store(two_stores: Path, words: list[str]) -> None:
    refused = CliRunner().invoke(app, words).exception
    advice = f"inner-1 is in another store; add --store {two_stores}/sub/store"
    assert str(refused) == f"no run {words[1]!r} in {two_stores}/store; newest runs: outer-1; {advice}"


def test_show_and_the_list_say_what_was_set(directory_store: Store) -> None:
    def with_overrides(*overrides: str) -> None:
        a_run(directory_store, "tuned", "finished").put_source(JobSource("job.yaml", "", overrides))

    with_overrides("train.seed=1", "train.duration=9 steps", "train.duration=20 steps")
    with_overrides("train.seed=2", "train.duration=20 steps", "fleet.workers=2")
    shown = command(directory_store, "show", "tuned-2").output
    assert re.search(r"^set +train.seed=2; train.duration=20 steps; fleet.workers=2$", shown, re.MULTILINE)
    rows = {row["run"]: row for row in json.loads(command(directory_store, "ls", "--json").output)}
    assert rows["tuned-1"]["overrides"] == ["train.seed=1", "train.duration=20 steps"]
    lines = {line.split()[0]: line for line in listed(directory_store)}
    assert "  seed=1  " in lines["tuned-1"]
    assert "  seed=2, workers=2  " in lines["tuned-2"]


def test_show_prints_the_last_warnings(directory_store: Store) -> None:
    run = a_run(directory_store, "warned", "finished")
    for number in range(4):
        run.record_event("warning", f"look at {number}")
    run.record_event("data", "staged corpus")
    shown = command(directory_store, "show", "warned").output
    assert re.findall(r"^warning +(.*)$", shown, re.MULTILINE) == ["look at 1", "look at 2", "look at 3"]
    assert "staged" not in shown


def test_the_list_has_no_column_of_settings_if_all_runs_of_a_job_have_the_same(directory_store: Store) -> None:
    for _ in range(2):
        a_run(directory_store, "same", "finished").put_source(JobSource("job.yaml", "", ("train.seed=1",)))
    assert " set " not in listed(directory_store)[0]


def test_fields_with_the_same_last_part_are_told_apart(directory_store: Store) -> None:
    for field in ("evaluate.every", "checkpoint.every"):
        a_run(directory_store, "often", "finished").put_source(JobSource("job.yaml", "", (f"{field}=1 min",)))
    text = "\n".join(listed(directory_store))
    assert "  evaluate.every=1 min  " in text
    assert "  checkpoint.every=1 min  " in text


def test_a_directory_without_a_store_names_one_nearby(two_stores: Path) -> None:
    (two_stores / "store").rename(two_stores / "results")
    advice = f"inner-1 is in another store; add --store {two_stores}/sub/store"
    for words in (["ls"], ["show"]):
        assert str(CliRunner().invoke(app, words).exception).endswith(f"create a store; {advice}")


def test_the_commands_in_a_hint_find_the_run_from_where_they_are_printed(
    two_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Run(open_store(str(two_stores / "sub/store")), "inner-1")
    assert inner.command("stop") == f"packtrain stop inner-1 --store {two_stores}/sub/store"
    (two_stores / "sub/deep").mkdir()
    monkeypatch.chdir(two_stores / "sub/deep")
    assert inner.command("stop") == "packtrain stop inner-1"
    assert "inner-1 has already finished" in CliRunner().invoke(app, ["stop", "inner-1"]).output


def test_a_hint_names_the_store_if_another_one_nearby_has_a_run_of_that_name(two_stores: Path) -> None:
    outer = Run(open_store(str(two_stores / "store")), "outer-1")
    assert outer.command("stop") == "packtrain stop outer-1"
    new_run(open_store(str(two_stores / "sub/store")), program_job("outer"))
    assert outer.command("stop") == f"packtrain stop outer-1 --store {two_stores}/store"


def a_run(
    store: Store, job: str, status: Status | None, *, days_ago: float = 0.0, client: str = "me@here", tags: str = ""
) -> Run:
    run = new_run(store, recipe_job(job))
    run.record_launch(FleetLaunch(NOW - days_ago * DAY, client, {"local": {}}))
    run.record_launch(FleetLaunch(NOW, "other@there", {"local": {}}))
    if status is not None:
        run.finish(Result(status, "reached 10 steps", 10, 65.0, {"valid.bleu": 12.5}))
    if tags:
        run.put_notes(Notes(tuple(tags.split()), "a note"))
    return run


@pytest.fixture
def store(directory_store: Store) -> Store:
    a_run(directory_store, "old", "finished", days_ago=9.0, tags="good paper")
    a_run(directory_store, "new", "failed", days_ago=1.0, tags="good")
    a_run(directory_store, "new", "finished")
    return directory_store


def test_ls_shows_who_started_a_run_and_when(store: Store) -> None:
    new_run(store, program_job("never"))
    row = next(one for one in json.loads(command(store, "ls", "--json").output) if one["run"] == "old-1")
    assert (row["job"], row["started_by"], row["tags"], row["note"]) == ("old", "me@here", ["good", "paper"], "a note")
    assert row["created"] == pytest.approx(NOW - 9 * DAY)
    lines = command(store, "ls").output.splitlines()
    assert lines[0].split() == ["run", "state", "started", "step", "score", "time", "tags", "job"]
    assert re.match(
        rf"old-1 +finished +{show_time(NOW - 9 * DAY)} +10 +valid bleu 12.50 +1 min 05 s +good paper ", lines[-1]
    )
    assert re.match(r"never-1 +waiting +\w{3} \d\d \d\d:\d\d ", lines[1]), "the time of its job"
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--state", "finished"], ["new-2", "old-1"]),
        (["--state", "finished", "--state", "failed"], ["new-2", "new-1", "old-1"]),
        (["--job", "new"], ["new-2", "new-1"]),
        (["--tag", "good"], ["new-1", "old-1"]),
        (["--tag", "good", "--tag", "paper"], ["old-1"]),
        (["--since", "2d"], ["new-2", "new-1"]),
        (["--since", "12 hours"], ["new-2"]),
        (["--since", "2001-01-01"], ["new-2", "new-1", "old-1"]),
        (["--since", "2d", "--job", "new", "--state", "failed"], ["new-1"]),
        (["--job", "none"], []),
    ],
)
def test_ls_lists_what_is_asked_for(store: Store, options: list[str], names: list[str]) -> None:
    assert [row["run"] for row in json.loads(command(store, "ls", "--json", *options).output)] == names
    lines = command(store, "ls", *options).output.splitlines()
    assert lines == [f"None of 3 runs in {store.url} matches."] if not names else len(lines) == 1 + len(names)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--state", "finishd"], "--state finishd: no such state; did you mean 'finished'?"),
        (["--since", "soon"], "--since: 'soon' is neither a date, as 2026-11-17, nor a time, as 2d or 90min"),
    ],
)
def test_ls_refuses_what_it_does_not_understand(store: Store, options: list[str], words: str) -> None:
    done = command(store, "ls", *options)
    assert isinstance(done.exception, Mistake) and str(done.exception) == words


WIDTHS = {"run": 11, "state": 8, "started": 12, "step": 6, "loss": 5, "score": 16, "time": 10, "job": 48}


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (200, "run state started step loss score time job"),
        (100, "run state started step loss score time job"),
        (85, "run state started step score time"),
        (80, "run state started step score time"),
        (60, "run state started score"),
        (40, "run state started"),
        (10, "run state"),
    ],
)
def test_a_list_has_the_columns_that_fit(width: int, columns: str) -> None:
    assert fitting(WIDTHS, width) == columns.split()


@pytest.mark.usefixtures("processes")
def test_a_run_has_one_line_on_a_terminal_of_80_columns(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(store, "a-name-that-is-as-long-as-names-of-jobs-may-be", "failed")
    store.put("runs/damaged-1/job.json", b"{")
    monkeypatch.setenv("COLUMNS", "80")
    _, shown = in_terminal(["ls", "--store", store.url], "")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines() if line]
    rows = [line for line in lines if re.match(r"\S+ +(finished|failed|\?) *", line)]
    assert len(rows) == 5 and max(map(len, rows)) <= 80
    assert any(line.startswith("damaged-1: job.json of run damaged-1 in ") for line in lines)


def test_show_says_who_started_a_run(store: Store) -> None:
    shown = command(store, "show", "old").output
    assert f"\nstarted     {show_time(NOW - 9 * DAY)} by me@here\n" in shown
    assert "\ntags        good paper\nnote        a note\n" in shown
    found = json.loads(command(store, "show", "old", "--json").output)
    assert (found["started_by"], found["tags"], found["note"]) == ("me@here", ["good", "paper"], "a note")


def test_notes_that_cannot_be_read_do_not_hide_a_run(store: Store) -> None:
    store.put("runs/old-1/notes.json", b"{")
    assert json.loads(command(store, "ls", "--json", "--job", "old").output)[0]["tags"] == []


# stop


def a_waiting(store: Store, client: str) -> Run:
    run = new_run(store, program_job("mine"))
    run.record_launch(FleetLaunch(NOW - DAY, client, {"local": {}}))
    return run


def test_a_bare_stop_refuses_a_run_of_somebody_else_where_it_cannot_ask(directory_store: Store) -> None:
    run = a_waiting(directory_store, "you@there")
    done = command(directory_store, "stop")
    assert isinstance(done.exception, Mistake)
    assert str(done.exception).startswith("the newest run is mine-1, which was started by you@there; run this in a")
    assert (run.result(), run.stop_request()) == (None, None)


@pytest.mark.parametrize("words", [["stop", "mine"], ["stop", "--yes"]])
def test_who_names_a_run_or_says_yes_stops_it(directory_store: Store, words: list[str]) -> None:
    run = a_waiting(directory_store, "you@there")
    assert command(directory_store, *words).exit_code == 0
    assert asdict(run.result() or Result("failed", "", 0, 0.0))["status"] == "stopped"


def test_a_bare_stop_stops_a_run_of_ones_own(directory_store: Store) -> None:
    run = a_waiting(directory_store, this_client())
    assert command(directory_store, "stop").exit_code == 0
    assert run.result() is not None


@pytest.mark.usefixtures("processes")
def test_a_bare_stop_asks_on_a_terminal(directory_store: Store) -> None:
    run = a_waiting(directory_store, "you@there")
    code, shown = in_terminal(["stop", "--store", directory_store.url], "n")
    assert "The newest run is mine-1, which was started by you@there." in shown and "Stop mine-1? [y/N]" in shown
    assert (code, run.result()) == (2, None)


def test_show_says_what_every_number_is_of(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job("said"))
    counts = {"loss": 800, "bleu": 100}
    write_points(
        run,
        *(a_step(step, loss=float(step)) for step in range(1, 5)),
        Point("valid", 1, 2, 1.0, {"loss": 2.5, "bleu": 20.301}, counts=counts),
        Point("valid", 1, 4, 2.0, {"loss": 2.25, "bleu": 18.0}, counts=counts),
    )
    scores, signatures = {"test.bleu": 17.5}, {"test.bleu": "nrefs:1"}
    run.finish(Result("finished", "reached 4 steps", 4, 65.0, scores, signatures, counts={"test.bleu": 800}))
    lines = [line.split(maxsplit=2) for line in command(directory_store, "show", "said").output.splitlines()]
    assert ["train", "loss", "2.500  mean of the last 4 steps"] in lines
    assert ["valid", "loss", "2.25   800 samples"] in lines
    assert ["valid", "bleu", "18.00  100 samples"] in lines
    assert ["best", "valid", "bleu  20.30  at step 2 (100 samples)"] in lines
    assert ["test", "bleu", "17.50  800 samples  nrefs:1"] in [
        [*line[:2], re.sub(" +$", "", line[2])] for line in lines
    ]
    shown = json.loads(command(directory_store, "show", "said", "--json").output)
    assert shown["score"] == {"name": "valid.bleu", "value": 18.0, "step": 4, "samples": 100}
    assert (shown["best"]["value"], shown["test"]["samples"], shown["loss_steps"]) == (20.301, 800, 4)
