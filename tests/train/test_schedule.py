from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.job import Constant, Noam
from packtrain.train.schedule import rate_of


def test_noam_is_the_formula_of_the_paper() -> None:
    """2.0 x d^-.5 x min((s+1) x warmup^-1.5, (s+1)^-.5), with steps counted from 0."""
    rate = rate_of(Noam.model_validate({"warmup": "8000 steps", "scale": 2.0}), width=512)
    for step in (0, 1, 100, 7998, 7999, 8000, 50_000):
        wanted = 2.0 * 512**-0.5 * min((step + 1) * 8000**-1.5, (step + 1) ** -0.5)
        assert rate(step) == pytest.approx(wanted, rel=1e-12)


@settings(deadline=None)
@given(st.integers(1, 100_000), st.floats(1e-6, 1.0))
def test_the_peak_is_reached_at_the_end_of_the_warm_up_and_nowhere_else(warmup: int, peak: float) -> None:
    rate = rate_of(Noam.model_validate({"warmup": f"{warmup} steps", "peak": peak}), width=512)
    assert rate(warmup - 1) == pytest.approx(peak)
    assert 0 < rate(0) <= peak * (1 + 1e-9)
    assert rate(warmup) < rate(warmup - 1)
    if warmup > 1:
        assert rate(warmup - 2) < rate(warmup - 1)


def test_the_warm_up_is_a_straight_line() -> None:
    rate = rate_of(Noam.model_validate({"warmup": "100 steps", "peak": 1.0}), width=64)
    assert [rate(step) for step in range(100)] == pytest.approx([(step + 1) / 100 for step in range(100)])


def test_scale_and_peak_say_the_same_in_different_words() -> None:
    by_scale = rate_of(Noam.model_validate({"warmup": "400 steps", "scale": 2.0}), width=256)
    by_peak = rate_of(Noam.model_validate({"warmup": "400 steps", "peak": 2.0 * 256**-0.5 * 400**-0.5}), width=256)
    assert [by_scale(step) for step in range(1000)] == pytest.approx([by_peak(step) for step in range(1000)])


def test_a_constant_rate_does_not_change() -> None:
    rate = rate_of(Constant(rate=0.25), width=512)
    assert {rate(step) for step in (0, 1, 10_000)} == {0.25}
