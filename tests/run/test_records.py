"""Event kinds and where a person sees them."""

from __future__ import annotations

from typing import get_args

import pytest

from packtrain.run.records import EVENT_DISPLAY, Event, EventKind


def test_every_event_kind_says_where_it_is_shown() -> None:
    assert set(EVENT_DISPLAY) == set(get_args(EventKind))


@pytest.mark.parametrize("kind", ["warning", "failure", "lost", "hang", "excluded"])
def test_bad_news_is_shown_as_a_warning(kind: EventKind) -> None:
    assert Event(0.0, kind, "text").display == "warning"
