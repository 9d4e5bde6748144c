"""A finding: the answer to one question about a run, with its verdict and its evidence, as values.

Nothing here knows how it is shown: the report page, Markdown, JSON and the dashboard show the same findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from packtrain.report.page import Series

Verdict = Literal["good", "note", "bad", "unknown"]


@dataclass(frozen=True)
class VerdictWords:
    """How people read a verdict."""

    mark: str
    meaning: str


VERDICTS: Mapping[Verdict, VerdictWords] = {
    "good": VerdictWords("✓", "good"),
    "note": VerdictWords("!", "worth knowing"),
    "bad": VerdictWords("✕", "worth changing"),
    "unknown": VerdictWords("?", "not enough data"),
}
Topic = Literal["model", "speed", "run"]


@dataclass(frozen=True)
class Chart:
    """Lines over common axes; `marks` are places on the x axis with a name, such as a restart."""

    title: str
    series: tuple[Series, ...]
    x_label: str = "step"
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Shares:
    """Parts of a whole, in seconds, largest meaning first."""

    title: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Rows:
    """A table; numbers are text already, as people read them."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Text:
    """Text as it is to be copied: a file, or a command."""

    title: str
    text: str


Figure = Chart | Shares | Rows | Text


@dataclass(frozen=True)
class Finding:
    """`answer` is one sentence or two; `evidence` has the numbers behind it and how it was decided.

    `numbers` are for scripts: plain values with their unit in the name.
    """

    key: str
    topic: Topic
    question: str
    answer: str
    verdict: Verdict
    evidence: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)


def unknown(key: str, topic: Topic, question: str, why: str, evidence: Sequence[str] = ()) -> Finding:
    """Return the finding of a question that the records cannot answer."""
    return Finding(key, topic, question, f"Not enough data: {why}.", "unknown", tuple(evidence))
