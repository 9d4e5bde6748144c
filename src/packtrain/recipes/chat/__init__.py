"""Dialogue: a Transformer from what was said to a reply, measured by perplexity and by how varied its replies are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

from packtrain.job.job import Job
from packtrain.recipes.chat.prompts import Cut, seen
from packtrain.recipes.chat.shape import SIZES, ChatShape
from packtrain.recipes.pairs import PairRecipe, Sides
from packtrain.recipes.recipe import Decoding, Prediction, Scores
from packtrain.recipes.shapes import read_shape

if TYPE_CHECKING:
    from torch import Tensor, nn


class Chat(PairRecipe):
    contents = frozenset({"pairs", "turns"})
    measure_of_best = "perplexity"
    decoding = Decoding(repetition=1.2, no_repeat=3)
    converses = True
    defaults: ClassVar[Mapping[str, object]] = {
        "data": {"vocabulary": 8000, "max_ratio": 80.0},
        "model": "full",
        "train": {
            "duration": "500000 steps",
            "batch": "1500 tokens",
            "optimizer": {"adam": {"betas": [0.9, 0.999], "epsilon": 1e-7}},
            "schedule": {"noam": {"warmup": "2500 steps", "scale": 1.0}},
            "clip": 1.0,
        },
        "evaluate": {"every": "5000 steps"},
    }

    @classmethod
    def shape_of(cls, job: Job) -> ChatShape:
        return read_shape(job.model, SIZES)

    def build_model(self) -> nn.Module:
        from packtrain.recipes.chat.model import DialogueTransformer

        return DialogueTransformer(self.shape_of(self.job), len(self.pack.vocabulary))

    @cached_property
    def _seen(self) -> dict[str, tuple[Sides, Cut]]:
        shape = self.shape_of(self.job)
        return {
            name: seen(self.pack.split(name), shape.prompt, shape.reply, shape.turns)
            for name in self.pack.manifest.splits
        }

    @cached_property
    def sides(self) -> dict[str, Sides]:
        return {name: sides for name, (sides, _) in self._seen.items()}

    @property
    def notes(self) -> list[str]:
        shape = self.shape_of(self.job)
        cuts = {name: cut for name, (_, cut) in self._seen.items() if cut.prompts or cut.replies}
        room = f"a prompt has room for {shape.prompt} tokens, a reply for {shape.reply}"
        return [f"{name}: {cut} ({room})" for name, cut in cuts.items()]

    def limits(self, source_BS: Tensor) -> Tensor:
        return source_BS.new_full((len(source_BS),), self.shape_of(self.job).reply)

    def grade(self, loss: float, wanted: Sequence[str], outputs: Sequence[str]) -> Scores:  # noqa: ARG002
        values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if outputs:
            values |= {"distinct_1": distinct(outputs, 1), "distinct_2": distinct(outputs, 2)}
        return Scores(values)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._last(row) for row in super().encoded(texts)]

    def _last(self, row: list[int]) -> list[int]:
        return row[-self.shape_of(self.job).prompt :]

    def note(self, text: str) -> str:
        unread = len(super().encoded([text])[0]) - self.shape_of(self.job).prompt
        cut = f"its first {unread:,} tokens were not read" if unread > 0 else ""
        return "; ".join(filter(None, [cut, super().note(text)]))

    def converse(self, model: nn.Module, turns: Sequence[str], decoding: Decoding) -> Prediction:
        spoken = [turn for turn in turns if turn.strip()][-self.shape_of(self.job).turns :]
        rows = [super(Chat, self).encoded([turn])[0] for turn in spoken]
        row = self._last(list(chain.from_iterable(rows)))
        return Prediction(self.answers(model, [row], decoding)[0] if row else "", note=self.note(turns[-1]))


def distinct(texts: Sequence[str], size: int) -> float:
    """Of all runs of so many words, the share that are different."""
    words = [text.lower().split() for text in texts]
    runs = [tuple(row[start : start + size]) for row in words for start in range(len(row) - size + 1)]
    return len(set(runs)) / max(1, len(runs))
