from __future__ import annotations

import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.units import (
    Amount,
    Duration,
    Machines,
    amount_pattern,
    counted,
    keep_share,
    parse_bytes,
    parse_moment,
    parse_seconds,
    show_bytes,
    show_score,
    show_seconds,
    show_speed,
    show_time,
)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("50_000 steps", 50_000, "steps"),
        ("1,000,000 steps", 1_000_000, "steps"),
        ("1e3 steps", 1000, "steps"),
        ("0.5 epochs", 0.5, "epochs"),
        ("5min", 300, "seconds"),
        (" 1.5 h ", 5400, "seconds"),
        ("2 days", 172_800, "seconds"),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, value: float, unit: str) -> None:
    assert Duration.parse(text) == Duration(value, unit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("500", "'500' is not a number with a unit, such as '500 steps'"),
        ("steps", "'steps' is not a number with a unit, such as '500 steps'"),
        ("1,5 hours", "'1,5 hours' is not a number with a unit, such as '500 steps'"),
        ("5 stesp", "unknown unit 'stesp' in '5 stesp'; did you mean 'step'?"),
        ("2.5 steps", "'2.5 steps' is not a whole number of steps"),
        ("-5 steps", "'-5 steps' must be greater than zero and less than 1e+15"),
        ("0 steps", "'0 steps' must be greater than zero and less than 1e+15"),
        ("1e15 steps", "'1e15 steps' must be greater than zero and less than 1e+15"),
        ("1e999 s", "'1e999 s' must be greater than zero and less than 1e+15"),
        ("1e14 days", "'1e14 days' must be less than 1e+15 seconds"),
        ("nan steps", "'nan steps' is not a number with a unit, such as '500 steps'"),
        ("9" * 5000 + " steps", f"'{'9' * 57}...' is not a number with a unit, such as '500 steps'"),
    ],
)
def test_an_invalid_duration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        Duration.parse(text)
    assert str(refused.value) == message


def test_a_low_speed_is_not_rounded_to_a_whole_number() -> None:
    assert [show_speed(speed) for speed in (74_978.2, 45.02, 9.96, 9.2, 2.0, 0.034)] == [
        "74,978", "45", "10", "9.2", "2", "0.034",
    ]  # fmt: skip


def test_a_counted_noun_gets_its_plural() -> None:
    assert [counted(number, "worker") for number in (0, 1, 2, 1000)] == [
        "0 workers", "1 worker", "2 workers", "1,000 workers",
    ]  # fmt: skip


def test_times_and_sizes_are_shown_with_about_two_digits() -> None:
    seconds = (0.84, 9.95, 42, 59.6, 185, 3599.6, 7620, 273_600)
    shown = ["0.8 s", "10 s", "42 s", "1 min 00 s", "3 min 05 s", "1 h 00 min", "2 h 07 min", "3 d 04 h"]
    assert [show_seconds(number) for number in seconds] == shown
    days = ["23 h 59 min", "1 d 00 h", "1000 d 00 h"]
    assert [show_seconds(number) for number in (86_369, 86_370, 86_400_000)] == days
    sizes = ["512 B", "4.3 MB", "100 MB", "2.0 GB"]
    assert [show_bytes(number) for number in (512, 4_300_000, 99_600_000, 2e9)] == sizes


def test_a_size_changes_its_unit_where_it_would_be_rounded_to_the_next() -> None:
    sizes = (5, 999, 999.5, 1000, 4300, 99_400, 99_500, 999_400, 999_500, 2e12)
    shown = ["5 B", "999 B", "1.0 kB", "1.0 kB", "4.3 kB", "99.4 kB", "100 kB", "999 kB", "1.0 MB", "2000 GB"]
    assert [show_bytes(number) for number in sizes] == shown


def test_a_score_has_two_decimals_or_three_digits_if_it_is_below_one() -> None:
    scores = (20.123, 1.0, 1.006, 0.0, -1.0, -20.126, 0.99949, 0.03141, -0.03141)
    shown = ["20.12", "1.00", "1.01", "0.00", "-1.00", "-20.13", "0.999", "0.0314", "-0.0314"]
    assert [show_score(score) for score in scores] == shown


def test_a_batch_is_a_whole_number_of_tokens_or_samples() -> None:
    assert Amount.parse("25000 tokens") == Amount(25_000, "tokens")
    assert Amount.parse("1 sample") == Amount(1, "samples")
    with pytest.raises(ValueError, match=r"'1\.5 samples' is not a whole number of samples"):
        Amount.parse("1.5 samples")
    with pytest.raises(ValueError, match="unknown unit 'steps'"):
        Amount.parse("100 steps")
    with pytest.raises(ValueError, match=r"^'100' is not a number with a unit, such as '4096 tokens'$"):
        Amount.parse("100")


def test_sizes_and_times_are_read_with_their_units() -> None:
    assert parse_bytes("2 GB") == 2_000_000_000
    assert parse_bytes("2 GiB") == 2**31
    assert parse_bytes("1 B") == parse_bytes("1.9 bytes") == 1
    assert parse_seconds("90 s") == 90


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("90", "'90' is not a number with a unit, such as '5 min'"),
        ("90 mim", "unknown unit 'mim' in '90 mim'; did you mean 'min'?"),
        ("11574074074.074074 d", "'11574074074.074074 d' must be less than 1e+15 seconds"),  # exactly that many
    ],
)
def test_an_invalid_time_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_seconds(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "'2' is not a number with a unit, such as '2 GB'"),
        ("0.1 B", "'0.1 B' is less than a byte"),
    ],
)
def test_an_invalid_size_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_bytes(text)
    assert str(refused.value) == message


def test_a_quantity_has_at_most_sixty_characters() -> None:
    assert parse_seconds(" " * 56 + "90 s") == 90
    with pytest.raises(ValueError, match=r"^'x{60}' is not a number with a unit"):
        parse_seconds("x" * 60)
    with pytest.raises(ValueError, match=r"^' {57}\.\.\.' is not a number with a unit"):
        parse_seconds(" " * 57 + "90 s")


def test_the_pattern_of_an_amount_accepts_its_own_unit_only() -> None:
    pattern = amount_pattern("tokens")
    for text in ("25000 tokens", "1token", " +4,096 tokens ", "1e3 tokens"):
        assert re.search(pattern, text), text
    for text in ("4 samples", "tokens", "4", "4 tokens each", "about 4 tokens", "-4 tokens", "4 token|tokens"):
        assert not re.search(pattern, text), text
    assert re.search(amount_pattern("samples"), "4 samples")


# Machines.


@pytest.mark.parametrize(
    ("text", "least", "most", "shown"),
    [("3", 3, 3, "3"), (" 2..4 ", 2, 4, "2..4"), ("1 .. 100000", 1, 100_000, "1..100000"), ("2..2", 2, 2, "2")],
)
def test_a_number_of_machines_may_be_a_range(text: str, least: int, most: int, shown: str) -> None:
    machines = Machines.parse(text)
    assert machines == Machines(least, most)
    assert str(machines) == shown
    assert machines.is_fixed == (least == most)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "must be at least 1"),
        ("0..2", "must be at least 1"),
        ("100001", "must be at most 100,000"),
        ("4..2", "'4..2': the minimum is larger than the maximum; write the smaller number first"),
        ("two", "'two' is not a number of machines, such as '3' or '2..4'"),
        ("2...4", "'2...4' is not a number of machines, such as '3' or '2..4'"),
        ("1" * 61, f"'{'1' * 60}' is not a number of machines, such as '3' or '2..4'"),
        (" " * 59 + "0", "must be at least 1"),
    ],
)
def test_an_invalid_number_of_machines_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        Machines.parse(text)
    assert str(refused.value) == message


# Lengths of a run that became shorter or longer.


@pytest.mark.parametrize(
    ("length", "written", "now", "kept"),
    [
        ("4000 steps", "50000 steps", "1000 steps", "80 steps"),
        ("15 steps", "100 steps", "10 steps", "2 steps"),
        ("1 step", "1000 steps", "10 steps", "1 step"),  # at least one
        ("1 epoch", "3 epochs", "2 epochs", "0.667 epochs"),
        ("1 min", "1 h", "10 min", "10 s"),
        ("2 epochs", "4000 steps", "50 epochs", "5 epochs"),  # a tenth, if the share is not known
        ("2 epochs", "4000 steps", "200 steps", "20 steps"),
        ("10 steps", "10 steps", "5 steps", None),
        ("1 step", "100 steps", "1 step", None),
    ],
)
def test_a_length_keeps_its_share_of_the_run(length: str, written: str, now: str, kept: str | None) -> None:
    share = keep_share(*map(Duration.parse, (length, written, now)))
    assert share == (None if kept is None else Duration.parse(kept))


@given(
    st.floats(min_value=1e-300, max_value=9e14) | st.integers(1, 10**15 - 1),
    st.sampled_from(["seconds", "epochs"]),
)
def test_a_duration_reads_back_what_it_writes(value: float, unit: str) -> None:
    duration = Duration(float(value), unit)
    assert Duration.parse(str(duration)) == duration


@given(st.integers(1, 10**15 - 1), st.sampled_from(["tokens", "samples"]))
def test_an_amount_reads_back_what_it_writes(value: int, unit: str) -> None:
    assert Amount.parse(str(Amount(value, unit))) == Amount(value, unit)


@given(st.text(max_size=80))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    try:
        duration = Duration.parse(text)
    except ValueError:
        return
    assert Duration.parse(str(duration)) == duration


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


NOON = 1794916800.0  # November 17, 2026


@pytest.mark.usefixtures("utc")
def test_moments_are_short_and_have_a_year_if_it_is_another_one() -> None:
    assert show_time(NOON + 240, present=NOON) == "Nov 17 12:04"
    assert show_time(NOON - 300 * 86400, present=NOON) == "Jan 21 12:00"
    assert show_time(NOON - 365 * 86400, present=NOON) == "Nov 17 2025"
    assert show_time(NOON - 365 * 86400, present=NOON - 365 * 86400) == "Nov 17 12:00"


@pytest.mark.usefixtures("utc")
def test_a_moment_is_compared_with_the_present_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(localtime=time.localtime, strftime=time.strftime, time=lambda: NOON - 365 * 86400)
    monkeypatch.setattr("packtrain.units.time", clock)
    assert show_time(NOON - 365 * 86400) == "Nov 17 12:00"
    assert show_time(NOON) == "Nov 17 2026"


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2d", NOON - 2 * 86400),
        ("90 min", NOON - 5400),
        ("2026-11-17", NOON - 12 * 3600),
        ("2026-11-17 11:30", NOON - 1800),
        (" 2026-11-17T12:00:00+02:00 ", NOON - 7200),
    ],
)
def test_a_moment_is_a_date_or_a_time_ago(text: str, moment: float) -> None:
    assert parse_moment(text, NOON) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "2", "-2d", "2026-13-01", "x" * 500])
def test_other_words_are_no_moment(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a date, as 2026-11-17, nor a time, as 2d or 90min"):
        parse_moment(text, NOON)
