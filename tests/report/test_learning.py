"""Answers about the model on series whose truth is known."""

from __future__ import annotations

import math

import pytest

from packtrain.job import Job
from packtrain.observe.evidence import Evidence
from packtrain.report.finding import Chart
from packtrain.report.learning import gains, learning_rate, overfitting, progression, stability, trained
from packtrain.report.trend import trend
from packtrain.run.records import Point
from parts.runs import program_job, recipe_job
from report.made import evaluations_of, evidence_of, falling, generation_of, steps_of
from report.made import trained as step_at


def with_both(loss: list[Point], score: list[Point]) -> list[Point]:
    """Return evaluations that have a loss and a score."""
    both = zip(loss, score, strict=True)
    return [Point("valid", 1, one.step, one.time, {**one.values, **other.values}) for one, other in both]


def still_improving(step: int) -> float:
    return 6.0 - 0.5 * math.log2(step)


def plateau(step: int) -> float:
    return 2.0 + 3.0 * math.exp(-step / 30)


def rising_from_200(step: int) -> float:
    return 2.0 + abs(step - 200) / 200


# Trained or not.


def test_a_loss_that_falls_with_the_logarithm_of_the_step_is_still_improving() -> None:
    found = trained(evidence_of([*steps_of(), *evaluations_of(still_improving)]))
    assert found is not None
    assert found.verdict == "note"
    assert found.answer.startswith("No, it is still improving: validation loss falls by ")
    assert found.numbers["loss_per_doubling"] == pytest.approx(-0.5, abs=0.05)
    assert "800 steps" in found.answer, "twice the 400 that were made"


def test_the_next_doubling_brings_what_the_last_one_brought_if_gains_do_not_shrink() -> None:
    points = [(float(step), 6.0 - 0.5 * math.log2(step)) for step in range(100, 1601, 100)]
    line = trend([(math.log2(step), value) for step, value in points])
    assert line is not None
    found = gains(points, line)
    assert found is not None
    assert found.expected == pytest.approx(found.end - 0.5, abs=0.01)
    assert found.at_best == pytest.approx(found.end - 0.5, abs=0.01)


def test_gains_that_halve_are_expected_to_halve_again() -> None:
    points = [(100.0, 8.0), (200.0, 4.0), (400.0, 2.0)]  # gains of 4, then of 2
    line = trend([(math.log2(step), value) for step, value in [(399.0, 2.0), (400.0, 2.0), (401.0, 2.0)]])
    assert line is not None
    found = gains(points, line)
    assert found is not None
    assert (found.start, found.end, found.expected, found.at_best) == pytest.approx((4.0, 2.0, 1.0, 0.0))


def test_evaluations_that_do_not_reach_back_say_nothing_about_shrinking() -> None:
    line = trend([(8.0, 3.0), (8.5, 2.5), (9.0, 2.0)])
    assert line is not None
    assert gains([(400.0, 2.4), (512.0, 2.0)], line) is None
    found = gains([(200.0, 3.2), (512.0, 2.0)], line)
    assert found is not None
    assert found.expected is None


def test_a_curve_that_has_become_flat_is_trained() -> None:
    found = trained(evidence_of([*steps_of(), *evaluations_of(plateau)]))
    assert found is not None
    assert found.verdict == "good"
    assert found.answer.startswith("Yes, validation loss is flat at ")


def test_a_score_that_falls_got_worse() -> None:
    scores = evaluations_of(lambda step: 40 - step / 20, name="bleu", noise=0.1)
    found = trained(evidence_of([*steps_of(), *with_both(evaluations_of(lambda _: 2.0), scores)]))
    assert found is not None
    assert found.verdict == "bad"
    assert found.answer.startswith("It got worse: validation bleu falls by")


def test_a_score_still_improves_although_its_loss_is_flat() -> None:
    scores = evaluations_of(lambda step: 5 * math.log2(step), name="bleu", noise=0.1)
    found = trained(evidence_of([*steps_of(), *with_both(evaluations_of(plateau), scores)]))
    assert found is not None
    assert found.answer.startswith("No, it is still improving: validation bleu rises by")


def test_perplexity_improves_downward() -> None:
    falls = [(float(step), 60 - 4 * math.log2(step)) for step in range(100, 1100, 100)]
    found = [progression("perplexity", falls, lower) for lower in (True, False)]
    assert [one.course for one in found if one] == ["improving", "worse"]


def test_evaluations_that_scatter_widely_tell_nothing() -> None:
    found = trained(evidence_of([*steps_of(), *evaluations_of(lambda _: 2.0, noise=0.8)]))
    assert found is not None
    assert found.verdict == "unknown"
    assert found.answer.startswith("Not enough data: the evaluations scatter too much")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_three_evaluations_are_not_enough(count: int) -> None:
    found = trained(evidence_of([*steps_of(), *evaluations_of(plateau, count)]))
    assert found is not None
    assert found.verdict == "unknown"
    assert found.answer.startswith("Not enough data")
    assert "Training loss changed by" in found.evidence[0]


def test_a_schedule_that_ends_with_the_run_is_named_as_a_reason() -> None:
    job = recipe_job(train={"schedule": {"cosine": {"peak": 0.1}}})
    found = trained(evidence_of([*steps_of(), *evaluations_of(plateau)], job))
    assert found is not None
    assert any("The schedule ends with the run" in text for text in found.evidence)


# Overfitting.


def test_validation_that_rises_while_training_falls_is_overfitting_from_the_lowest_evaluation() -> None:
    found = overfitting(evidence_of([*steps_of(), *evaluations_of(rising_from_200, noise=0.01)]))
    assert found is not None
    assert found.verdict == "bad"
    assert found.answer.startswith("Yes, from about step 200: validation loss rose from ")
    assert (found.numbers["best_loss"], found.numbers["rise"]) == pytest.approx((2.0, 0.95), abs=0.05)
    [chart] = found.figures
    assert isinstance(chart, Chart)
    assert chart.marks == ((200.0, "lowest"),)


def test_noise_after_the_lowest_evaluation_is_not_overfitting() -> None:
    for noise in (0.01, 0.05, 0.2):
        found = overfitting(evidence_of([*steps_of(), *evaluations_of(lambda _: 2.0, noise=noise)]))
        assert found is not None
        assert found.verdict == "good", found.answer


@pytest.mark.parametrize("curve", [plateau, still_improving])
def test_a_loss_that_does_not_rise_is_no_overfitting(curve: object) -> None:
    found = overfitting(evidence_of([*steps_of(), *evaluations_of(curve)]))  # type: ignore[arg-type]
    assert found is not None
    assert found.verdict == "good"
    assert found.answer.startswith("No:")


def test_if_training_loss_rises_as_well_it_is_not_overfitting() -> None:
    points = [*steps_of(loss=rising_from_200), *evaluations_of(rising_from_200, noise=0.01)]
    found = overfitting(evidence_of(points))
    assert found is not None
    assert found.answer.startswith("No, but something else is wrong")


def test_a_score_that_still_improves_makes_a_rising_loss_a_note() -> None:
    scores = evaluations_of(lambda step: 5 * math.log2(step), name="bleu", noise=0.1)
    points = with_both(evaluations_of(rising_from_200, noise=0.01), scores)
    found = overfitting(evidence_of([*steps_of(), *points]))
    assert found is not None
    assert found.verdict == "note"
    assert "bleu still improves" in found.answer


def test_two_evaluations_cannot_show_overfitting() -> None:
    found = overfitting(evidence_of([*steps_of(), *evaluations_of(plateau, 2)]))
    assert found is not None
    assert found.verdict == "unknown"


# Stability.


def test_an_undisturbed_run_was_stable() -> None:
    found = stability(evidence_of(steps_of()))
    assert found is not None
    assert (found.verdict, found.numbers["spikes"]) == ("good", 0.0)


def test_a_loss_that_climbs_back_has_diverged() -> None:
    found = stability(evidence_of(steps_of(loss=lambda step: falling(step) if step < 250 else 2.0 + (step - 250) / 30)))
    assert found is not None
    assert found.verdict == "bad"
    assert "diverged" in found.answer
    assert "at step 2" in found.answer


def test_spikes_are_counted_and_marked() -> None:
    points = [step_at(one.step, one.values["loss"] * (4 if one.step % 50 == 0 else 1)) for one in steps_of()]
    found = stability(evidence_of(points))
    assert found is not None
    assert (found.verdict, found.numbers["spikes"]) == ("note", 8.0)


def test_a_loss_that_is_not_a_number_is_named_with_its_step() -> None:
    found = stability(evidence_of([*steps_of(60), step_at(61, math.nan)]))
    assert found is not None
    assert (found.verdict, "at step 61" in found.answer) == ("bad", True)


def test_a_generation_that_ended_for_its_numbers_is_not_stable() -> None:
    generations = (
        generation_of(1),
        generation_of(1, number=2, cause="number", reason="the loss of step 9 is not finite"),
    )
    found = stability(evidence_of(steps_of(), generations=generations))
    assert found is not None
    assert (found.verdict, "the loss of step 9 is not finite" in found.answer) == ("bad", True)


def test_skipped_updates_and_clipping_are_told() -> None:
    points = [Point("train", 1, one.step, one.time, {**one.values, "skipped": 1.0}) for one in steps_of(30)]
    found = stability(evidence_of(points, recipe_job(train={"clip": 0.5})))
    assert found is not None
    assert "30 updates skipped because of an overflow in fp16." in found.evidence
    assert "Gradients were clipped to a norm of 0.5 in 100% of the steps." in found.evidence


def test_a_few_steps_are_too_few_to_judge() -> None:
    found = stability(evidence_of(steps_of(5)))
    assert found is not None
    assert found.verdict == "unknown"


# The rate.


def rate_of(schedule: dict[str, object], **train: object) -> str:
    points = [*steps_of(30)]
    rated = [Point("train", 1, one.step, one.time, {**one.values, "rate": (31 - one.step) / 1000}) for one in points]
    found = learning_rate(evidence_of(rated, recipe_job(train={"schedule": schedule, **train})))
    assert found is not None
    return found.answer


def test_every_schedule_is_told_in_words() -> None:
    noam: dict[str, object] = {"noam": {"warmup": "400 steps", "scale": 2.0}}
    assert "rises linearly for 400 steps, then falls with the inverse square root of the step" in rate_of(noam)
    assert "2 divided by the square root of the model's width" in rate_of(noam)
    assert "the peak is 0.003" in rate_of({"noam": {"warmup": "400 steps", "peak": 0.003}})
    assert rate_of({"constant": {"rate": 0.1}}).startswith("It stays at 0.1.")
    assert "over the first 30% of the run" in rate_of({"one_cycle": {"peak": 1.0}})
    assert "half a cosine to 0 at the end" in rate_of({"cosine": {"peak": 1.0, "warmup": "5 steps"}})
    assert "multiplied by 0.1 every 5 epochs" in rate_of({"step": {"rate": 1.0, "every": "5 epochs"}})
    phases = [{"until": "3 epochs", "rate": [0.5, 2.0]}, {"until": "5 epochs", "rate": 0.1}]
    assert "until 3 epochs linearly from 0.5 to 2; until 5 epochs at 0.1" in rate_of({"phases": phases})


def test_a_scaled_rate_is_told_with_its_factor() -> None:
    answer = rate_of({"constant": {"rate": 0.1}}, batch="64 samples", scale_rate={"sqrt": "4 samples"})
    scaled = "Rates are written for 4 samples and scaled with the square root: at 64 samples they are multiplied by 4."
    assert answer.startswith(f"It stays at 0.1. {scaled} ")


def test_what_the_steps_recorded_is_told_too() -> None:
    answer = rate_of({"constant": {"rate": 0.1}})
    assert answer.endswith("It was highest at step 1 (0.03) and 0.001 at step 30.")


@pytest.mark.parametrize(
    ("peak_step", "state", "verdict", "words"),
    [
        (30, "finished", "bad", "It was still rising when training ended at step 30"),
        (30, "stopped", "note", "The run ended at step 30, before the rate had reached its peak."),
        (30, "running", "good", "It rises linearly"),
        (24, "finished", "note", "The warm-up took 80% of the run, which is long."),
        (6, "finished", "good", "It rises linearly"),
    ],
)
def test_a_warm_up_that_never_ends_is_questioned(peak_step: int, state: str, verdict: str, words: str) -> None:
    points = [
        Point("train", 1, one.step, one.time, {**one.values, "rate": 30.0 - abs(one.step - peak_step)})
        for one in steps_of(30)
    ]
    job = recipe_job(train={"schedule": {"noam": {"warmup": "8000 steps", "scale": 2.0}}})
    found = learning_rate(evidence_of(points, job, status={"state": state}))
    assert found is not None
    assert found.verdict == verdict
    assert found.answer.startswith(words)


@pytest.mark.parametrize("ask", [trained, overfitting, stability, learning_rate])
def test_a_program_has_no_model_to_judge(ask: object) -> None:
    job: Job = program_job()
    evidence: Evidence = evidence_of(job=job)
    assert ask(evidence) is None  # type: ignore[operator]
