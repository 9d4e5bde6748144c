"""Event kinds and where a person sees them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from packtrain.run.records import EVENT_DISPLAY, Event, EventKind, Generation, Point, Result, Sample
from packtrain.store.records import DamagedRecord, decode, decode_many, encode
from parts.runs import MEASURED, a_generation


def test_every_event_kind_says_where_it_is_shown() -> None:
    assert set(EVENT_DISPLAY) == set(get_args(EventKind))


@pytest.mark.parametrize("kind", ["warning", "failure", "lost", "hang", "excluded"])
def test_bad_news_is_shown_as_a_warning(kind: EventKind) -> None:
    assert Event(0.0, kind, "text").display == "warning"


def test_a_list_with_millions_of_errors_is_refused_at_the_first() -> None:
    """An error for each of them would take gigabytes."""
    with pytest.raises(DamagedRecord, match=r"\(field 0\.kind\)$"):
        decode_many(Point, b"[" + b"{}," * 1_000_000 + b"{}]", "metrics")
    members = b'{"number": 1, "port": 1, "reason": "", "members": [' + b"{}," * 1_000_000 + b"{}]}"
    with pytest.raises(DamagedRecord, match=r"\(field members\.0\.node\)$"):
        decode(Generation, members, "a generation")


@pytest.mark.parametrize(
    ("values", "is_complete"),
    [
        (MEASURED, True),
        (MEASURED | {"loss": math.nan, "gradient_norm": math.inf}, True),
        (MEASURED | {"epoch": math.nan}, False),
        (MEASURED | {"elapsed_seconds": math.inf}, False),
        (MEASURED | {"data_seconds": 1e16}, False),
        ({"loss": 1.0}, False),
    ],
    ids=str,
)
def test_a_step_of_training_has_what_its_readers_need(values: dict[str, float], is_complete: bool) -> None:
    point = Point("train", 1, 1, 0.0, values)
    if is_complete:
        assert str(decode(Point, encode(point), "a point")) == str(point)
    else:
        with pytest.raises(DamagedRecord):
            decode(Point, encode(point), "a point")


def test_records_are_strict_about_types_and_ranges() -> None:
    good = encode(a_generation(1, "a"))
    assert decode(Generation, good, "it") == a_generation(1, "a")
    for old, new in ((b": 29500", b": 70000"), (b": 29500", b': "29500"'), (b'"a"', b'"../a"'), (b": 1,", b": -1,")):
        assert old in good
        with pytest.raises(DamagedRecord, match=r"^it is damaged, or from another version \(field "):
            decode(Generation, good.replace(old, new), "it")
    with pytest.raises(DamagedRecord, match=r"\(field step\)$"):
        decode(Result, b'{"status": "failed", "reason": "", "step": 1e30, "seconds": 1}', "it")


SHOWN = Sample("image 7", "cat", "dog", "ab" * 32, ("a", "dog"), ("AAECAwQF", "AAECAwQF"), (2, 3), 0.75)


def test_a_sample_of_an_earlier_version_has_no_picture() -> None:
    assert decode(Sample, encode(SHOWN), "it") == SHOWN
    old = decode(Sample, b'{"input": "a", "reference": "b", "prediction": "c"}', "it")
    assert (old.picture, old.words, old.attention, old.attention_shape, old.confidence) == (None, (), (), None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"picture": "../../job.json"},
        {"picture": "AB" * 32},
        {"words": ("dog",)},
        {"attention": ("AAECAwQF", "AAEC")},
        {"attention": ("AAECAwQF", "<script>")},
        {"attention_shape": (1, 3)},
        {"attention_shape": None},
        {"attention_shape": (10**9, 10**9)},
        {"confidence": 1.5},
        {"confidence": math.nan},
    ],
    ids=str,
)
def test_a_sample_that_nobody_would_write_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DamagedRecord):
        decode(Sample, encode(replace(SHOWN, **wrong)), "it")
