from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.job.job import EpochSettings, TrainSettings
from packtrain.job.kinds import SCHEDULES
from packtrain.train.progress import Progress
from packtrain.train.schedule import CosineSettings, NoamSettings, Rate, StepDownSettings, rate_of
from packtrain.units import Amount, Duration

EXAMPLES: dict[str, dict[str, Any]] = {
    "noam": {"warmup": "4 steps", "peak": 0.1},
    "constant": {"rate": 0.1},
    "one_cycle": {"peak": 0.1},
    "cosine": {"peak": 0.1, "warmup": "3 steps"},
    "step": {"rate": 0.1, "every": "4 steps", "warmup": "2 steps"},
    "phases": {"phases": [{"until": "5 steps", "rate": [0.01, 0.1]}, {"until": "10 steps", "rate": [0.1, 0.001]}]},
}


def rate(kind: str, width: int = 512, duration: str = "100 steps", **fields: Any) -> Rate:
    train = {"duration": duration, "batch": "4 samples", "schedule": {kind: fields}}
    settings = TrainSettings.model_validate(train)
    rate: Rate = settings.schedule.build(width, settings.duration)
    return rate


def at(step: int, epoch: float = 0.0) -> Progress:
    return Progress(step, epoch)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rate_of_every_schedule_depends_on_progress_alone(kind: str) -> None:
    first, second = (rate(kind, duration="10 steps", **EXAMPLES[kind]) for _ in range(2))
    forwards = [first(at(step)) for step in range(15)]
    backwards = [second(at(step)) for step in reversed(range(15))]
    assert forwards == backwards[::-1]
    assert all(0 <= one <= 0.1 * (1 + 1e-9) for one in forwards)
    assert max(forwards) == pytest.approx(0.1)


# Noam.


def test_noam_is_the_formula_of_the_paper() -> None:
    """2.0 x d^-.5 x min((s+1) x warmup^-1.5, (s+1)^-.5), with steps counted from 0."""
    noam = rate("noam", warmup="8000 steps", scale=2.0)
    for step in (0, 1, 100, 7998, 7999, 8000, 50_000):
        wanted = 2.0 * 512**-0.5 * min((step + 1) * 8000**-1.5, (step + 1) ** -0.5)
        assert noam(at(step)) == pytest.approx(wanted, rel=1e-12)


@settings(deadline=None)
@given(st.integers(1, 100_000), st.floats(1e-6, 1.0))
def test_the_peak_is_reached_at_the_end_of_the_warm_up_and_nowhere_else(warmup: int, peak: float) -> None:
    noam = rate("noam", warmup=f"{warmup} steps", peak=peak)
    assert noam(at(warmup - 1)) == pytest.approx(peak)
    assert 0 < noam(at(0)) <= peak * (1 + 1e-9)
    assert noam(at(warmup)) < noam(at(warmup - 1))
    if warmup > 1:
        assert noam(at(warmup - 2)) < noam(at(warmup - 1))


def test_the_warm_up_is_linear() -> None:
    noam = rate("noam", warmup="100 steps", peak=1.0)
    assert [noam(at(step)) for step in range(100)] == pytest.approx([(step + 1) / 100 for step in range(100)])


def test_scale_and_peak_describe_the_same_curve() -> None:
    by_scale = rate("noam", 256, warmup="400 steps", scale=2.0)
    by_peak = rate("noam", 256, warmup="400 steps", peak=2.0 * 256**-0.5 * 400**-0.5)
    assert [by_scale(at(step)) for step in range(1000)] == pytest.approx([by_peak(at(step)) for step in range(1000)])


# The others.


def test_a_constant_rate_does_not_change() -> None:
    assert {rate("constant", rate=0.25)(at(step)) for step in (0, 1, 10_000)} == {0.25}


def test_one_cycle_rises_and_falls_along_a_cosine() -> None:
    cycle = rate("one_cycle", peak=2.0, warmup=0.25, start=0.1, end=0.01)
    assert cycle(at(0)) == pytest.approx(0.2)
    assert cycle(at(25)) == pytest.approx(2.0)
    assert cycle(at(100)) == pytest.approx(0.02)
    assert cycle(at(500)) == pytest.approx(0.02)
    assert cycle(at(10)) == pytest.approx(2.0 * (1.0 + (0.1 - 1.0) * (1 + math.cos(math.pi * 10 / 25)) / 2))
    assert cycle(at(70)) == pytest.approx(2.0 * (0.01 + (1.0 - 0.01) * (1 + math.cos(math.pi * 45 / 75)) / 2))


def test_one_cycle_counts_epochs_if_the_run_does() -> None:
    cycle = rate("one_cycle", duration="10 epochs", peak=2.0, warmup=0.5)
    assert cycle(at(0, 5.0)) == pytest.approx(2.0)
    assert cycle(at(12345, 5.0)) == cycle(at(0, 5.0))


def test_a_cosine_warms_up_falls_to_its_floor_and_stays_there() -> None:
    cosine = rate("cosine", peak=1.0, warmup="20 steps", floor=0.1)
    assert [cosine(at(step)) for step in range(20)] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert cosine(at(20)) == pytest.approx(1.0)
    assert cosine(at(60)) == pytest.approx(0.55)
    assert cosine(at(100)) == pytest.approx(0.1)
    assert cosine(at(101)) == pytest.approx(0.1)


def test_a_cosine_without_warm_up_starts_at_its_peak() -> None:
    cosine = rate("cosine", peak=1.0)
    assert cosine(at(0)) == 1.0
    assert cosine(at(50)) == pytest.approx(0.5)


def test_a_cycle_without_warm_up_starts_at_its_peak() -> None:
    assert rate("one_cycle", peak=2.0, warmup=0.0)(at(0)) == 2.0


def test_a_rate_steps_down_by_its_factor_every_so_often() -> None:
    down = rate("step", duration="90 epochs", rate=0.1, every="30 epochs", warmup="5 epochs")
    epochs = (2.5, 5.0, 29.9, 30.0, 59.9, 60.0, 89.0)
    assert [down(at(0, epoch)) for epoch in epochs] == pytest.approx([0.05, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_a_step_factor_may_be_one_half() -> None:
    down = rate("step", rate=0.8, every="10 steps", factor=0.5)
    assert [down(at(step)) for step in (0, 9, 10, 25, 39)] == pytest.approx([0.8, 0.8, 0.4, 0.2, 0.1])


def test_a_rate_steps_down_at_every_multiple_of_a_fraction_of_an_epoch() -> None:
    down = rate("step", duration="2 epochs", rate=1.0, every="0.1 epochs", factor=0.5)
    moments = [at(10 * epoch + batch, epoch + batch / 10) for epoch in range(2) for batch in range(10)]
    assert [down(one) for one in moments] == [0.5**number for number in range(20)]


def test_a_phase_starts_with_its_own_rate_also_within_an_epoch() -> None:
    lines = [{"until": "1.36 epochs", "rate": [0.1, 0.1]}, {"until": "2 epochs", "rate": [0.25, 0.5]}]
    rates = rate("phases", duration="2 epochs", phases=lines)
    assert rates(at(33, 1 + 8 / 25)) == pytest.approx(0.1)
    assert rates(at(34, 1 + 9 / 25)) == 0.25


def test_phases_are_linear() -> None:
    lines = rate("phases", **EXAMPLES["phases"])
    assert lines(at(0)) == pytest.approx(0.01)
    assert lines(at(4)) == pytest.approx(0.01 + 0.09 * 4 / 5)
    assert lines(at(5)) == pytest.approx(0.1)
    assert lines(at(8)) == pytest.approx(0.1 - 0.099 * 3 / 5)
    assert lines(at(10)) == lines(at(1000)) == pytest.approx(0.001)


def test_a_run_may_have_a_single_phase() -> None:
    single = rate("phases", duration="2 epochs", phases=[{"until": "0.5 epochs", "rate": [1.0, 2.0]}])
    assert [single(at(9, epoch)) for epoch in (0.0, 0.25, 0.5, 2.0)] == pytest.approx([1.0, 1.5, 2.0, 2.0])


def test_an_infinite_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="must be greater than 0"):
        rate("phases", phases=[{"until": "1 epoch", "rate": [1.0, math.inf]}])


IMAGES = EpochSettings(Amount(8, "samples"), 128, 0.35, False)


def in_epoch(epoch: int, *phases: dict[str, Any]) -> EpochSettings:
    """Return the settings of an epoch, given those of the section."""
    section = {"duration": "9 epochs", "batch": "8 samples", "schedule": {"phases": list(phases)}}
    settings = TrainSettings.model_validate(section).schedule.in_epoch(IMAGES, epoch)
    assert isinstance(settings, EpochSettings)
    return settings


def test_a_phase_changes_only_the_settings_that_it_has() -> None:
    plain = {"until": "1 epoch", "rate": 1.0}
    assert in_epoch(0, plain) == IMAGES
    assert in_epoch(0, {**plain, "batch": "4 samples"}) == replace(IMAGES, batch=Amount(4, "samples"))
    assert in_epoch(0, {**plain, "size": 64}) == replace(IMAGES, size=64)
    assert in_epoch(0, {**plain, "min_scale": 0.5}) == replace(IMAGES, min_scale=0.5)
    assert in_epoch(0, {**plain, "rectangular": True}) == replace(IMAGES, rectangular=True)


def test_a_phase_changes_the_settings_from_its_first_epoch_on() -> None:
    phases = [{"until": "2 epochs", "rate": 1.0, "size": 64}, {"until": "4 epochs", "rate": 1.0, "size": 96}]
    assert [in_epoch(epoch, *phases).size for epoch in range(6)] == [64, 64, 96, 96, 96, 96]
    small = {"until": "20 steps", "rate": 1.0, "size": 64}
    assert [in_epoch(epoch, small, {"until": "30 steps", "rate": 2.0}).size for epoch in (0, 1, 99)] == [64, 64, 64]


# Fitted to a run that became shorter or longer.

WITH_WARM_UP: dict[str, type[NoamSettings | CosineSettings | StepDownSettings]] = {
    "noam": NoamSettings,
    "cosine": CosineSettings,
    "step": StepDownSettings,
}


@pytest.mark.parametrize(
    ("kind", "warmup", "written", "now", "fitted"),
    [
        ("noam", "4000 steps", "100000 steps", "20000 steps", "4000 steps"),  # it still fits
        ("noam", "4000 steps", "100000 steps", "5000 steps", "1000 steps"),
        ("noam", "4000 steps", "10000 steps", "100 steps", "40 steps"),  # it had more than a fifth
        ("noam", "4000 steps", "100000 steps", "1 step", "1 step"),
        ("noam", "4000 steps", "100 epochs", "1000 steps", "200 steps"),
        ("noam", "4000 steps", "100000 steps", "9 epochs", "4000 steps"),
        ("noam", "4000 steps", "100000 steps", "1 min", "4000 steps"),
        ("cosine", "4000 steps", "100000 steps", "20000 steps", "4000 steps"),
        ("cosine", "4000 steps", "100000 steps", "4000 steps", "800 steps"),
        ("cosine", "4000 steps", "100000 steps", "10 epochs", "0.4 epochs"),
        ("cosine", "4000 steps", "100000 steps", "1 min", "4000 steps"),
        ("cosine", "2 epochs", "10 epochs", "1 epoch", "0.2 epochs"),
        ("cosine", "4000 steps", "4000 steps", "10 steps", None),
        ("cosine", None, "100000 steps", "10 steps", None),
        ("step", "4000 steps", "100000 steps", "20000 steps", "4000 steps"),
        ("step", "4000 steps", "100000 steps", "4000 steps", "800 steps"),
        ("step", "4000 steps", "100000 steps", "1 epoch", "4000 steps"),
        ("step", "2 epochs", "100 epochs", "1 epoch", "0.2 epochs"),
        ("step", None, "100000 steps", "10 steps", None),
    ],
)
def test_a_warm_up_takes_a_fifth_of_a_shortened_run_or_the_share_that_it_had(
    kind: str, warmup: str | None, written: str, now: str, fitted: str | None
) -> None:
    fields = {name: value for name, value in EXAMPLES[kind].items() if name != "warmup"}
    settings = WITH_WARM_UP[kind].model_validate(fields | ({"warmup": warmup} if warmup else {}))
    changed = settings.fitted(Duration.parse(written), Duration.parse(now))
    assert changed.warmup == (None if fitted is None else Duration.parse(fitted))
    assert changed.model_copy(update={"warmup": settings.warmup}) == settings, "nothing else changes"


# Scaled by the batch.


def scaled(schedule: dict[str, Any], batch: str = "1024 samples", **scale: str) -> Rate:
    train = {"duration": "9 epochs", "batch": batch, "schedule": schedule, "scale_rate": scale or None}
    return rate_of(TrainSettings.model_validate(train), 512)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_is_scaled_by_the_batch(kind: str) -> None:
    schedule = {kind: EXAMPLES[kind] | ({"warmup": "2 epochs"} if kind == "cosine" else {})}
    plain, linear, root = scaled(schedule), scaled(schedule, linear="256 samples"), scaled(schedule, sqrt="256 samples")
    for now in (at(0), at(7, 0.5), at(99, 8.5)):
        assert linear(now) == pytest.approx(4 * plain(now))
        assert root(now) == pytest.approx(2 * plain(now))
    assert scaled(schedule, "64 samples", linear="256 samples")(at(7)) == pytest.approx(plain(at(7)) / 4)


def test_a_phase_with_another_batch_is_scaled_by_that_batch() -> None:
    phases = [{"until": "2 epochs", "rate": 0.1}, {"until": "9 epochs", "rate": 0.1, "batch": "512 samples"}]
    rate = scaled({"phases": phases}, linear="256 samples")
    assert [rate(at(7, epoch)) for epoch in (0.0, 1.99, 2.0, 8.9)] == pytest.approx([0.4, 0.4, 0.2, 0.2])


def test_the_rate_of_a_job_depends_on_the_width_of_its_model() -> None:
    noam = {"noam": {"warmup": "400 steps", "scale": 2.0}}
    assert scaled(noam)(at(399)) == pytest.approx(2.0 * 512**-0.5 * 400**-0.5)
