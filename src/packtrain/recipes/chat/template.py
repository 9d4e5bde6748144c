"""A dialogue job to start from, with toy data: questions with one answer, and greetings."""

from __future__ import annotations

from importlib.resources import files as resources

import numpy as np

from packtrain.recipes.template import Files, JobTemplate, divided, english, lines, words_of

_DAYS = words_of("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_NAMES = words_of("Anna Ben Clara David Emma Felix Grace Hugo Ida Jonas Karla Leo Mia Noah Olga Paul Rosa Sam Tara")


def small_talk() -> Files:
    """Return questions with one answer, and greetings."""
    rows: list[tuple[str, str]] = []
    for first in range(1, 10):
        for second in range(1, 10):
            total = english(first + second)
            rows.append((f"what is {english(first)} plus {english(second)}?", f"{total}."))
            rows.append((f"how much is {english(first)} and {english(second)}?", f"it is {total}."))
    for day, following in zip(_DAYS, _DAYS[1:] + _DAYS[:1], strict=True):
        rows += [(f"what comes after {day}?", f"{following}."), (f"which day is before {following}?", f"{day}.")]
        rows += [(f"today is {day}.", f"then tomorrow is {following}."), (f"is {day} a day?", f"yes, {day} is a day.")]
    for name in _NAMES:
        rows += [(f"my name is {name}.", f"nice to meet you, {name}."), (f"I am {name}.", f"hello, {name}!")]
        rows += [(f"do you know {name}?", f"no, who is {name}?"), (f"this is {name}.", f"hello, {name}!")]
    for greeting in ("hello", "hi", "good morning"):
        rows += [(f"{greeting}{mark}", f"{greeting}!") for mark in ("", "!", ".")]
    order = np.random.default_rng(1).permutation(len(rows))
    return {
        f"{split}.tsv": lines("\t".join(row) for row in dialogues)
        for split, dialogues in divided([rows[place] for place in order])
    }


TEMPLATE = JobTemplate(
    "reply to a message",
    resources(__package__) / "job.yaml",
    "dialogue",
    ("$split.tsv",),
    small_talk,
    example='"what comes after Monday?"',
    duration="300 steps",
)
