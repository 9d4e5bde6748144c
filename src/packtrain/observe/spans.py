"""The spans of time that a run is made of: their names in the records, and how people read them.

A worker's clock is a chain of marks without gaps (train/recorder.py), so the spans that it records add up. `recovery`
and `lost steps` are found later, from the generations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Of each class of color: on a light and on a dark ground.
COLORS: Mapping[str, tuple[str, str]] = {
    "s0": ("#2a6fdb", "#6aa5ff"),
    "s1": ("#bd4d14", "#ff9a66"),
    "s2": ("#1f7a4d", "#5fd19c"),
    "s3": ("#8e4bab", "#c58be0"),
    "s4": ("#8795a3", "#7c8996"),
    "s5": ("#c23b32", "#ff8078"),
}


@dataclass(frozen=True)
class Span:
    """`color` is the class of its color, paler with a lower `opacity`: those of one kind have the same.

    `place`: within a step, or between steps, as startup, evaluations and checkpoint copies are, or not recorded at all.
    `makes_steps`: it is what steps are made of; all others are overhead. `is_work`: a rank does it by itself; what it
    spends on the others is communication and waiting.
    """

    name: str
    label: str
    color: str
    opacity: float
    place: Literal["step", "between", "found later"] = "step"
    makes_steps: bool = False
    is_work: bool = False


# In display order. Computing, exchange, data and the rest have a color each.
_TABLE = (
    Span("forward", "forward", "s0", 0.7, makes_steps=True, is_work=True),
    Span("backward", "backward", "s0", 1.0, makes_steps=True, is_work=True),
    Span("communication", "communication not overlapped", "s1", 1.0, makes_steps=True),
    Span("wait", "waiting for the slowest rank", "s1", 0.6, makes_steps=True),
    Span("optimizer", "optimizer", "s0", 0.4, makes_steps=True, is_work=True),
    Span("data", "waiting for data", "s3", 1.0, is_work=True),
    Span("save", "checkpoint copies", "s2", 0.65, "between"),
    Span("evaluation", "evaluation", "s2", 1.0, "between"),
    Span("start", "startup", "s4", 0.9, "between"),
    Span("recovery", "recovery", "s5", 1.0, "found later"),
    Span("lost steps", "lost steps", "s5", 0.6, "found later"),
    Span("other", "bookkeeping", "s4", 0.5),
)
SPANS: Mapping[str, Span] = {span.name: span for span in _TABLE}
LABELS: Mapping[str, str] = {span.name: span.label for span in _TABLE}
RECORDED = (
    "start", "data", "forward", "backward", "communication", "wait", "optimizer", "save", "evaluation", "other",
)  # fmt: skip
"""The spans of a worker's clock, in the order of its records: a generation starts, and a step begins with its data."""
STEP_SPANS = tuple(name for name in RECORDED if SPANS[name].place == "step")
BETWEEN_STEPS = tuple(span.name for span in _TABLE if span.place == "between")
"""Spans that the record of a step includes, because they came before it, but that are not part of it."""
COMPUTING = tuple(span.name for span in _TABLE if span.makes_steps)
ON_DEVICE = tuple(span.name for span in _TABLE if span.makes_steps and span.is_work)
"""What more workers divide among them."""
RANK_WORK = tuple(name for name in STEP_SPANS if SPANS[name].is_work)
