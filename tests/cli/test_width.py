"""The main outputs at 80 columns: no line is longer, and nothing is cut; wider terminals and pipes get more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from packtrain.cli import app, machines, plan
from packtrain.cli.reports import _print_table
from packtrain.cli.screen import console, line_starts
from packtrain.fleet.fleet import Check
from packtrain.plan.devices import Link
from packtrain.plan.estimate import Advice, Goal, Layout, Speed, StepKind, Workload, choose, estimate, with_efficiency
from packtrain.plan.plan import Plan
from packtrain.run.records import Event, Point, Result
from packtrain.run.run import Run
from packtrain.store import Store
from parts.runs import MEASURED, a_generation, a_lease, new_run, recipe_job
from parts.terminal import shown_at

SIGNATURE = "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0"
FAILURE = (
    "RuntimeError: a remote worker crashed; check the logs of the remote worker before reporting an error (a.py:9)"
)
SCORES = {f"{name}{number}": 41.25 for name in ("bleu", "rouge") for number in range(1, 5)}


@pytest.fixture
def ended(directory_store: Store) -> Run:
    """A run with much to say: a failure, many scores, a long reason, signatures."""
    run = new_run(directory_store, recipe_job(train={"duration": "2 epochs"}))
    run.propose(a_generation(1, "a"))
    run.renew(a_lease("a", left=True))
    events, points = run.event_writer("a"), run.point_writer("a")
    events.append(Event(1.0, "failure", FAILURE, 1))
    points.append(Point("start", 1, 0, 1.0, {}))
    for step in range(1, 11):
        points.append(Point("train", 1, step, 1.0 + step, {**MEASURED, "samples": 4.0, "epoch": step / 20}))
    points.append(Point("valid", 1, 10, 12.0, {"loss": 1.5, **SCORES, "evaluation_seconds": 1.0}))
    events.flush()
    points.flush()
    run.finish(Result("failed", FAILURE, 10, 75.0, {"test.chrf": 46.5}, {"test.chrf": SIGNATURE}))
    run.store.put(run.key("report.html"), b"")
    return run


def command(run: Run, *words: str) -> Callable[[], object]:
    return lambda: app([*words, run.name, "--store", run.store.url])


def assert_fits(lines: list[str], whole: tuple[str, ...], width: int = 80) -> None:
    """Nothing is longer than the terminal, except a path, and each of the texts is there, maybe in several lines."""
    assert [line for line in lines if len(line) > width and "/" not in line] == []
    assert not any("…" in line for line in lines)
    text = " ".join(" ".join(lines).split())
    for words in whole:
        assert words in text, lines


@pytest.mark.parametrize("words", ["show", "follow"])
def test_the_summary_card_fits(ended: Run, words: str) -> None:
    lines = shown_at(80, command(ended, words))
    card = (f"job-1 failed: {FAILURE}", "step 10 of 40 in 1 min 15 s", f"test chrf 46.50 {SIGNATURE}")
    assert_fits(lines, card)
    assert any(line.startswith("run") and "job-1  failed: RuntimeError" in line for line in lines)


def test_events_and_evaluations_fit(ended: Run) -> None:
    lines = shown_at(80, command(ended, "follow"))
    assert_fits(lines, (f"failure {FAILURE}", "valid step 10 loss 1.500 bleu1 41.250", "rouge4 41.250"))
    scores = lines[next(number for number, line in enumerate(lines) if " valid " in line) + 1]
    assert scores.startswith(" " * 12) and scores[12] != " ", "the second line continues below the first"


def test_a_wide_terminal_and_a_pipe_have_a_line_for_each(ended: Run, capsys: pytest.CaptureFixture[str]) -> None:
    wide = shown_at(200, command(ended, "follow"))
    with pytest.raises(SystemExit):
        command(ended, "follow")()
    piped = capsys.readouterr().out
    for lines in (wide, piped.splitlines()):
        assert f"   failure  {FAILURE}" in lines
        assert any(line.endswith("rouge3 41.250  rouge4 41.250") and "bleu1" in line for line in lines)
    assert "\r" not in piped
    assert "\x1b" not in piped


def test_a_word_that_does_not_fit_stays_whole() -> None:
    path = f"/store/{'x' * 100}/report.html"
    assert line_starts(f"report  {path}", 60) == [8]
    assert line_starts(path, 60) == []


def test_values_stay_together_where_lines_break() -> None:
    text = "step 10  loss 1.500  bleu 20.000"
    starts = line_starts(text, 20)
    assert [text[a:b].rstrip() for a, b in zip([0, *starts], [*starts, None], strict=True)] == [
        "step 10  loss 1.500", "bleu 20.000",
    ]  # fmt: skip


def made_plan() -> Plan:
    work = Workload(
        unit="tokens", parameters=600_000_000, trained=600_000_000, buffer_bytes=0, copies=0, optimizer_copies=2,
        averaged=False, activation_bytes=1e5, flops=6e9, half=True, exchange_bytes=2_400_000_000, exchange_every=1,
        exchange_background=0.0, traffic=2, sharded=False, units_per_step=250_000.0, samples_per_step=9_000.0,
        steps_per_epoch=5_000.0, micro_batch=None, samples=45_000_000, data_bytes=5_000_000_000, valid_samples=0,
        test_samples=0, exact=True,
    )  # fmt: skip
    goal, speed = (
        Goal(100_000, None, 20.0, (StepKind(1.0, 1.0, 1.0),), None, 0, 24.5, None, None),
        Speed("a table", "gpu", 0.01, 1e-6, 0.0, 0.0, 0.0),
    )
    link = Link(1.25e9, 1e-4, "given")
    estimates = with_efficiency([estimate(work, goal, speed, Layout(many, 8, 80 * 10**9), link) for many in (1, 4, 64)])
    return Plan(
        "en-de", "translate", "big", None, work, goal, "every 5 min", "a table", link, (), tuple(estimates),
        choose(estimates) or Advice(None, None),
    )  # fmt: skip


def test_a_plan_has_two_tables_where_one_is_too_wide() -> None:
    made = made_plan()
    narrow, wide = (shown_at(width, lambda: plan._print(made)) for width in (80, 200))
    names = ("machines", "step", "tokens/s", "per worker", "limit", "memory", "sent", "needs", "loads", "time", "cost")
    assert_fits(narrow, (*names, "64 x 8"))
    assert [len([line for line in lines if line.startswith("machines")]) for lines in (narrow, wide)] == [2, 1]
    (head,) = (line for line in wide if line.startswith("machines"))
    assert head.split() == " ".join(names).split()


def test_a_plan_is_never_cut() -> None:
    made = made_plan()
    for width in range(80, 121):
        lines = shown_at(width, lambda: plan._print(made))
        assert not any("…" in line for line in lines), lines


def test_the_sizes_of_a_run_with_a_long_name_fit(directory_store: Store) -> None:
    run = new_run(directory_store, recipe_job("a-long-name-" * 4 + "x"))
    lines = shown_at(80, lambda: app(["du", "--store", directory_store.url]))
    assert not any("…" in line for line in lines)
    assert run.name in "".join(line.partition("  ")[0] for line in lines[1:])


def test_the_checks_of_doctor_fit_with_what_to_do() -> None:
    advice = "start chrony or systemd-timesyncd there; buckets reject requests with a wrong time"
    checks = [Check("gpu-cluster-a", "clock", False, "off by 45 s", advice), Check("gpu-cluster-a", "disk", True, "ok")]
    assert_fits(shown_at(80, lambda: machines._print(checks)), ("clock failed off by 45 s", f"fix: {advice}"))


def test_scores_with_signatures_fit() -> None:
    rows = [("score", "value", "95 % interval", ""), ("chrf", "99.73", "99.44 to 99.95", SIGNATURE)]
    lines = shown_at(80, lambda: _print_table(console(), rows))
    assert_fits(lines, (f"chrf 99.73 99.44 to 99.95 {SIGNATURE}",))
