"""Comparisons of made runs, whose truth is known."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.observe.measure import Score
from packtrain.report.compare import (
    MAX_RUNS,
    ComparedRun,
    PairedTest,
    RunComparison,
    as_json,
    compare_runs,
    differing_fields,
    score_gaps,
    seed_spreads,
    speed_up,
    spread_near_end,
    time_to_score,
)
from packtrain.report.compare_render import compare_page, text_chart, text_lines
from packtrain.run.records import Point, Result
from packtrain.store import Store
from parts.runs import a_generation, new_run, recipe_job
from report.pages import Page

EVIL = "<script>alert(1)</script>"


def a_step(step: int, spans: dict[str, float], tokens: float = 1000.0) -> Point:
    seconds = {f"{span}_seconds": amount for span, amount in spans.items()}
    total = sum(spans.values())
    values = {"loss": 5.0 / step, "rate": 0.1, "epoch": 0.0, "elapsed_seconds": total * step, "step_seconds": total}
    return Point("train", 1, step, float(step), {**values, "tokens": tokens, **seconds})


def made(
    letter: str,
    spans: dict[str, float] | None = None,
    bleu: list[float] | None = None,
    workers: int = 1,
    tokens: float = 1000.0,
    **sections: Any,
) -> ComparedRun:
    """Return a run of 40 steps, with evaluations that are evenly spread over them."""
    points = [a_step(step, spans or {"forward": 1.0}, tokens) for step in range(1, 41)]
    scores = bleu or []
    points += [
        Point("valid", 1, round((place + 1) * 40 / len(scores)), 50.0, {"bleu": score, "loss": 1.0, "x_seconds": 1.0})
        for place, score in enumerate(scores)
    ]
    points.sort(key=lambda point: (point.step, point.kind))
    job = recipe_job("made", **sections)
    final = {"valid.bleu": scores[-1]} if scores else {}
    return ComparedRun(
        letter, f"made-{letter.lower()}", "finished", job, points, 40.0, 40, workers, workers, "tokens", "bleu",
        scores=final, score=Score("valid.bleu", scores[-1], 40) if scores else None,
    )  # fmt: skip


def noisy(seed: int, level: float, spread: float, slope: float = 0.0, count: int = 30) -> list[float]:
    draw = random.Random(seed)  # noqa: S311 - a made series
    return [level + slope * place + draw.gauss(0, spread) for place in range(count)]


# Speed.


def test_a_speed_up_beyond_the_number_of_machines_is_shown_to_be_the_data_loader() -> None:
    one = made("A", {"data": 2.7, "forward": 0.4, "backward": 0.6})
    two = made("B", {"data": 0.4, "forward": 0.2, "backward": 0.3, "communication": 0.1}, workers=2)
    found = speed_up(one, two)
    assert found.factor == pytest.approx(3.7)
    assert found.ideal == 2
    terms = {term.span: term for term in found.terms}
    assert terms["data"].saved == pytest.approx(2.3)
    assert terms["data"].without == pytest.approx(1.0 / 0.6)
    assert sum(term.saved for term in found.terms) == pytest.approx(found.base_seconds - found.other_seconds)
    text = " ".join(found.sentences)
    assert "B is 3.70 times as fast as A" in text
    assert "2.30 s of the 2.70 s saved is waiting for data (2.70 s -> 400 ms)" in text
    assert "everything else is 1.67 times as fast" in text
    assert "2 workers instead of 1 explain 2 times at most (computing itself is 2.00 times as fast)" in text
    assert "the rest is waiting for data" in text


def test_lost_scaling_names_the_communication() -> None:
    one = made("A", {"forward": 0.5, "backward": 0.5})
    two = made("B", {"forward": 0.25, "backward": 0.25, "communication": 0.4}, workers=2)
    text = " ".join(speed_up(one, two).sentences)
    assert "56% of that is reached" in text
    assert "The largest loss is communication not overlapped: 400 ms per step" in text


def test_perfect_scaling_is_explained_by_the_workers() -> None:
    found = speed_up(made("A", {"forward": 1.0}), made("B", {"forward": 0.5}, workers=2))
    assert "2 workers instead of 1 explain it" in found.sentences[-1]


def test_a_larger_batch_is_compared_for_the_same_number_of_units() -> None:
    found = speed_up(made("A", {"forward": 1.0}), made("B", {"forward": 2.0}, tokens=4000.0))
    assert found.factor == pytest.approx(2.0)
    assert "per 1,000 tokens (the batch of A)" in found.sentences[0]


def test_a_slower_run_says_what_was_added() -> None:
    found = speed_up(made("A", {"forward": 1.0}), made("B", {"forward": 1.0, "data": 1.0}))
    assert "B is 0.50 times as fast" in found.sentences[0]
    assert "1.00 s of the 1.00 s added is waiting for data" in found.sentences[1]


def test_a_difference_in_speed_within_the_noise_of_the_steps_is_none() -> None:
    draw = random.Random(1)  # noqa: S311 - a made series
    runs = [made("A"), made("B")]
    shaky = [
        ComparedRun(**{**vars(run), "points": [a_step(n, {"forward": draw.uniform(0.5, 1.5)}) for n in range(1, 200)]})
        for run in runs
    ]
    assert "equally fast within the noise" in speed_up(*shaky).sentences[0]


def test_a_step_that_is_faster_in_every_part_is_the_machine() -> None:
    found = speed_up(made("A", {"forward": 1.0, "backward": 2.0}), made("B", {"forward": 0.5, "backward": 1.1}))
    assert "Every part of a step is about as much faster: it is the machines" in found.sentences[1]


def test_runs_with_few_steps_have_no_speed_up() -> None:
    short = ComparedRun("B", "b", "running", recipe_job(), [a_step(1, {"forward": 1.0})], unit="tokens")
    found = speed_up(made("A"), short)
    assert found.factor is None
    assert found.sentences == ("Not enough data: B has fewer than 4 steps whose time is known.",)


# Scores.


def verdict_of(one: ComparedRun, two: ComparedRun, *more: ComparedRun, **tests: PairedTest) -> tuple[str, str, str]:
    paired = {("A", "B"): {name.replace("_", "."): test for name, test in tests.items()}}
    (gap,) = score_gaps(one, two, seed_spreads([one, two, *more]), paired)
    return gap.verdict, gap.better, gap.decided


OTHER: dict[str, Any] = {"train": {"clip": 2.0}}


def test_scores_that_differ_less_than_the_last_evaluations_vary_are_within_noise() -> None:
    found = verdict_of(made("A", bleu=[*noisy(1, 20, 0.5), 20.2]), made("B", bleu=[*noisy(2, 20, 0.5), 20.5], **OTHER))
    assert found[:2] == ("within noise", "")
    assert "spread of the evaluations near the end" in found[2]


def test_scores_that_differ_more_are_beyond_noise() -> None:
    one, two = made("A", bleu=[*noisy(1, 20, 0.3), 20.0]), made("B", bleu=[*noisy(2, 24, 0.3), 24.0], **OTHER)
    assert verdict_of(one, two)[:2] == ("beyond noise", "B")
    lower = [ComparedRun(**{**vars(run), "lower": frozenset({"bleu"})}) for run in (one, two)]
    assert verdict_of(*lower)[1] == "A"


def test_a_trend_is_not_noise() -> None:
    rising = spread_near_end(made("A", bleu=noisy(3, 0, 0.1, slope=1.0, count=20)), "bleu")
    flat = spread_near_end(made("A", bleu=noisy(3, 0, 0.1, count=20)), "bleu")
    assert rising is not None
    assert flat is not None
    assert rising.deviation == pytest.approx(flat.deviation)
    assert 0.03 < flat.deviation < 0.2


def measured_on(samples: int, *runs: ComparedRun) -> list[ComparedRun]:
    return [replace(run, limits={"bleu": 100.0}, counts={"valid.bleu": samples}) for run in runs]


def test_few_evaluations_are_not_enough_data_for_a_small_difference() -> None:
    one, two = made("A", bleu=[2.0]), made("B", bleu=[20.0], **OTHER)
    few = "not enough data: A has fewer than 4 evaluations"
    assert verdict_of(one, two) == ("unknown", "", few)
    assert verdict_of(*measured_on(200, one, two)) == (
        "unknown", "", f"{few}, and noise alone might be up to 28.3",
    )  # fmt: skip


def test_scores_of_different_numbers_of_samples_do_not_compare() -> None:
    [one], [two] = measured_on(100, made("A", bleu=noisy(1, 20, 1))), measured_on(800, made("B", bleu=noisy(2, 40, 1)))
    assert verdict_of(one, two) == ("unknown", "", "the scores use different numbers of samples")
    [gap] = compare_runs([one, two]).gaps
    assert gap.title == "valid bleu (100 and 800 samples)"
    assert compare_runs([one, *measured_on(100, made("B", bleu=[1.0]))]).gaps[0].title == "valid bleu (100 samples)"


@pytest.mark.parametrize("scores", [[1.98], [0.0, 1.98], [0.0, 0.5, 1.98]])
def test_a_large_difference_is_told_by_the_number_of_samples(scores: list[float]) -> None:
    one, two = made("A", bleu=scores), made("B", bleu=[*noisy(1, 98, 0.3), 98.31], **OTHER)
    verdict, better, decided = verdict_of(*measured_on(200, one, two))
    assert (verdict, better) == ("beyond noise", "B")
    assert decided.startswith("A has fewer than 4 evaluations, but noise alone would be 1")
    assert verdict_of(*measured_on(2, one, two))[0] == "unknown"  # two sentences say nothing


def test_the_way_from_one_evaluation_to_the_next_bounds_a_score_without_limits() -> None:
    far = verdict_of(made("A", bleu=[1.0, 2.0]), made("B", bleu=[30.0, 31.0], **OTHER))
    near = verdict_of(made("A", bleu=[1.0, 2.0]), made("B", bleu=[4.0, 5.0], **OTHER))
    assert (far[0], near[0]) == ("beyond noise", "unknown")


def test_a_loss_that_was_evaluated_once_is_bounded_by_the_losses_of_steps() -> None:
    one, two = (
        replace(run, scores={"valid.loss": loss}, points=run.steps)
        for run, loss in ((made("A"), 6.0), (made("B", **OTHER), 0.5))
    )
    assert verdict_of(one, two)[:2] == ("beyond noise", "B")
    assert verdict_of(one, replace(two, scores={"valid.loss": 5.9}))[0] == "unknown"


def test_runs_that_differ_only_in_the_seed_measure_the_noise() -> None:
    seeds = [
        made(letter, bleu=[score], train={"seed": n})
        for n, (letter, score) in enumerate(zip("ACD", (20, 22, 24), strict=True))
    ]
    close, far = made("B", bleu=[25.0], **OTHER), made("B", bleu=[50.0], **OTHER)
    assert verdict_of(seeds[0], close, *seeds[1:])[0] == "within noise"
    verdict, better, decided = verdict_of(seeds[0], far, *seeds[1:])
    assert (verdict, better) == ("beyond noise", "B")
    assert "differ only in the seed (± 2)" in decided
    assert verdict_of(seeds[0], made("B", bleu=[22.0], train={"seed": 9}))[0] == "within noise"


def test_a_paired_test_is_the_best_evidence() -> None:
    one, two = made("A", bleu=noisy(1, 20, 5)), made("B", bleu=noisy(2, 21, 5), **OTHER)
    verdict, _, decided = verdict_of(one, two, valid_bleu=PairedTest(1.0, 0.5, 1.5, 0.002, True))
    assert verdict == "beyond noise"
    assert decided == "paired bootstrap on the same samples: p = 0.002"


def test_scores_on_different_data_or_of_no_number_do_not_compare() -> None:
    data = {"train": [{"bitext": ["a", "b"]}], "valid": [{"bitext": ["c", "d"]}]}
    assert verdict_of(made("A", bleu=noisy(1, 9, 1)), made("B", bleu=noisy(1, 9, 1), data=data))[2] == (
        "the valid data differs"
    )
    assert verdict_of(made("A", bleu=[1.0]), made("B", bleu=[math.nan], **OTHER))[2] == "a score is not a number"


def test_time_to_a_score_is_that_of_the_best_score_that_all_reached() -> None:
    found = time_to_score([made("A", {"forward": 2.0}, [5.0, 10.0, 20.0, 30.0]), made("B", bleu=[11.0, 19.0])])
    assert found is not None
    assert (found.value, found.steps, found.seconds) == (19.0, (30, 40), (60.0, 40.0))
    assert time_to_score([made("A", bleu=[1.0]), made("B")]) is None


# Jobs and pages.


def test_only_fields_that_differ_are_listed() -> None:
    one, two = made("A", train={"clip": 1.0}), made("B", workers=2, fleet={"local": {"machines": 2}})
    rows = {row.field: row.values for row in differing_fields([one, two])}
    assert rows == {
        "train.clip": ("1.0", "-"),
        "fleet.local.machines": ("1", "2"),
        "(machines)": ("1", "2"),
        "(workers)": ("1", "2"),
    }
    assert differing_fields([one, one]) == ()


LONG_NAME = "english-to-german-with-a-long-name"


def long_names() -> RunComparison:
    """Runs whose names do not fit a narrow table, and values that share more than fits."""
    folder = f"/home/person/{'projects/' * 8}data"
    paths = [f"{folder}/{name}/train.tsv" for name in ("first", "second")]
    runs = [
        replace(made(letter, bleu=[1.0, 20.25]), name=f"{LONG_NAME}-{letter}", job=job)
        for letter, job in zip("AB", [recipe_job(data={"train": [{"bitext": path}]}) for path in paths], strict=True)
    ]
    return compare_runs(runs)


def test_names_and_scores_are_not_cut_where_a_table_is_too_wide() -> None:
    lines = text_lines(long_names(), 80)
    assert max(map(len, lines)) <= 80
    assert any(f"{LONG_NAME}-A" in line for line in lines)
    assert any(line.split() == ["tokens/s", "valid", "bleu"] for line in lines)
    assert any(line.startswith("A ") and line.endswith("20.25") for line in lines)
    for end in ("first/train.tsv", "second/train.tsv"):
        assert any(line.startswith("    ") and "..." in line and end in line for line in lines), "what differs"


def test_a_pipe_gets_everything_in_one_line_each() -> None:
    found = long_names()
    head, first, *rest = text_lines(found, 10_000)
    assert head.endswith("tokens/s  valid bleu")
    assert first.startswith(f"A  {LONG_NAME}-A") and first.endswith("20.25")
    assert any(f"A {found.fields[0].values[0]}  B {found.fields[0].values[1]}" in line for line in rest)
    assert not any("..." in line for line in rest)


def test_the_text_fits_80_columns_and_the_page_escapes_everything() -> None:
    job = recipe_job("made", data={"train": [{"bitext": [EVIL * 9, "b" * 300]}]})
    one, two = made("A", bleu=noisy(1, 20, 1)), made("B", {"forward": 0.5}, noisy(2, 20, 1), workers=2, **OTHER)
    two = ComparedRun(**{**vars(two), "job": job, "name": EVIL, "scores": {**two.scores, f"test.{EVIL}": 1.0}})
    one = ComparedRun(**{**vars(one), "scores": {**one.scores, f"test.{EVIL}": 2.0}})
    found = compare_runs([one, two, made("C")])
    assert max(map(len, text_lines(found, 80))) <= 80
    page = Page(compare_page(found))
    assert "script" not in page.tags
    assert not {"link", "img", "iframe", "a"} & set(page.tags)
    assert "aria-label" in dict(page.attributes)
    assert json.loads(json.dumps(as_json(found)))["speeds"][0]["factor"] == pytest.approx(2.0)


def test_curves_carry_the_letters_of_their_runs() -> None:
    found = compare_runs([made("A", bleu=[1.0, 2.0, 3.0]), made("B", bleu=[3.0, 2.0, math.nan])])
    names = [curve.name for curve in found.curves]
    assert names == ["train.loss", "valid.bleu", "valid.loss", "train.rate"]
    title, *rows, axis = text_chart(found.curves[1], ["A", "B"])
    assert title == "valid bleu"
    drawn = "".join(row.partition("|")[2] for row in rows)
    assert (drawn.count("A"), drawn.count("B")) == (2, 2), "B covers one A, and what is no number is not drawn"
    assert axis.split() == ["step", "13", "40"]


# The command.


def test_the_command_prints_text_and_json_and_writes_a_page(directory_store: Store, tmp_path: Path) -> None:
    for workers in (1, 2):
        run = new_run(directory_store, recipe_job("toy", train={"batch": "4 tokens"}))
        directory_store.put(run.key("pack.txt"), b"toy-pack")
        run.propose(a_generation(1, workers=workers))
        writer = run.point_writer("000001-rank-0")
        for step in range(1, 9):
            writer.append(a_step(step, {"forward": 1.0 / workers}))
        writer.flush()
        run.finish(Result("finished", "reached 8 steps", 8, 8.0, {"test.bleu": 20.0}))
    where = ["--store", directory_store.url]
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["compare", "toy-1", "toy-2", "-o", str(page), *where])
    assert (done.exit_code, done.stderr) == (0, "")
    assert "B is 2.00 times as fast as A" in done.stdout
    assert "toy-1 and toy-2" in page.read_text()
    found = json.loads(CliRunner().invoke(app, ["compare", "toy-1", "toy-2", "--json", *where]).stdout)
    assert [run["workers"] for run in found["runs"]] == [1, 2]
    assert found["fields"] == [{"field": "(workers)", "values": ["1", "2"]}]
    for names, words in (
        (["toy-1"], "compare takes 2 to 10 runs, not 1"),
        (["toy-1"] * (MAX_RUNS + 1), "not 11"),
        (["toy-1", "toy-1"], "toy-1 is named twice"),
        (["toy-1", "nobody"], "no run 'nobody'"),
    ):
        assert words in str(CliRunner().invoke(app, ["compare", *names, *where]).exception)
