"""Dialogue with a Transformer from the last turns to a reply, scored by perplexity and distinct n-grams.

A pack has pairs in the order in which they were said. A pair that starts with the reply of the pair before it belongs
to the same conversation; and since prompts lie one after another in a shard, the turns before a reply are one slice
of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.pack import SplitReader
from packtrain.job import Job
from packtrain.pack.shard import Columns, Ragged
from packtrain.pack.vocabulary import EOS
from packtrain.pack.words import split_words
from packtrain.recipes.pairs import PairRecipe, TokenPairs, TransformerShape, padded_to_8, read_shape
from packtrain.recipes.recipe import Conversational, Decoding, ModelSize, Network, Prediction, Rows, Scores, TaskWords
from packtrain.recipes.statistics import Statistic, perplexity

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ChatShape(TransformerShape):
    """`prompt` and `reply` are the maximum tokens of either with EOS: each position has a learned embedding.

    A prompt is the last `turns` of the conversation; if it is too long, its beginning is cut off.
    """

    prompt: int = 15
    reply: int = 16
    turns: int = 2


# Tiny learns in minutes on two CPU cores.
SIZES: Mapping[str, ChatShape] = {
    "tiny": ChatShape(128, 4, 512, 2, 2, 0.0, 0.0),
    "small": ChatShape(256, 4, 1024, 3, 3, 0.1, 0.0),
    "full": ChatShape(1024, 16, 4096, 6, 6, 0.1, 0.1),
}


class Chat(PairRecipe, Conversational):
    contents = frozenset({"pairs", "turns"})
    best_metric = "perplexity"
    decoding = Decoding(repetition=1.2, no_repeat=3)
    words = TaskWords(hub_task="text-generation", input="Prompt", output="Reply", follow_references=False)
    sizes = SIZES
    rows: ClassVar[Rows] = dict.fromkeys(("embedding.weight", "output.weight", "output.bias"), "pieces")
    defaults: ClassVar[Mapping[str, object]] = {
        "data": {"vocabulary": 8000, "max_ratio": 80.0},
        "model": "full",
        "train": {
            "duration": "500000 steps",
            "batch": "1500 tokens",
            "optimizer": {"adam": {"betas": [0.9, 0.999], "epsilon": 1e-7}},
            "schedule": {"noam": {"warmup": "2500 steps", "scale": 1.0, "share": 0.2}},
            "clip": 1.0,
        },
        "evaluate": {"every": "5000 steps"},
    }
    # A small model can take higher rates, and its runs are too short for them to become low at the end.
    size_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {"schedule": {"noam": {"warmup": "2500 steps", "scale": 1.7, "share": 0.2}}, "ema": 0.99}
    }

    @classmethod
    def shape_of(cls, job: Job) -> ChatShape:
        return read_shape(job.model, SIZES)

    @classmethod
    def size(cls, job: Job, vocabulary: int, classes: int) -> ModelSize:
        shape, size = cls.shape_of(job), super().size(job, vocabulary, classes)
        # Positions that are learned, and a softmax with weights of its own.
        extra_weights = (shape.prompt + shape.reply) * shape.width + padded_to_8(vocabulary) * (shape.width + 1)
        return replace(size, parameters=size.parameters + extra_weights, trained=size.trained + extra_weights)

    def build_model(self) -> nn.Module:
        from packtrain.recipes.chat.model import DialogueTransformer

        return DialogueTransformer(self.shape_of(self.job), len(self.pack.vocabulary))

    @cached_property
    def _truncated(self) -> dict[str, tuple[TokenPairs, Truncation]]:
        shape = self.shape_of(self.job)
        return {name: truncate(self.pack.split(name), shape) for name in self.pack.manifest.splits}

    @cached_property
    def pairs(self) -> dict[str, TokenPairs]:
        return {name: pairs for name, (pairs, _) in self._truncated.items()}

    @property
    def notes(self) -> list[str]:
        shape = self.shape_of(self.job)
        limits = f"limits: {shape.prompt} tokens for a prompt, {shape.reply} for a reply"
        return [f"{name}: {cut} ({limits})" for name, (_, cut) in self._truncated.items() if cut.prompts or cut.replies]

    def max_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full_like(lengths, self.shape_of(self.job).reply)

    def grade(self, loss: float, references: Sequence[str], outputs: Sequence[str]) -> Scores:  # noqa: ARG002
        values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # beyond that, exp overflows
        if outputs:
            values |= {"distinct_1": distinct(outputs, 1), "distinct_2": distinct(outputs, 2)}
        return Scores(values)

    def grade_statistics(
        self,
        rows: Mapping[str, Sequence[float]],
        references: Sequence[str],  # noqa: ARG002
        outputs: Sequence[str],  # noqa: ARG002
    ) -> dict[str, Statistic]:
        # The share of distinct n-grams is not a function of sums: repeating a sample adds no new ones.
        return {"perplexity": perplexity(rows["loss"], rows["tokens"])}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._last(row) for row in super().encode(texts)]

    def _last(self, row: list[int]) -> list[int]:
        return row[-self.shape_of(self.job).prompt :]

    def note(self, text: str) -> str:
        unread = len(super().encode([text])[0]) - self.shape_of(self.job).prompt
        cut = f"its first {unread:,} tokens were cut off" if unread > 0 else ""
        return "; ".join(filter(None, [cut, super().note(text)]))

    def reply(
        self, model: nn.Module | Network, conversations: Sequence[Sequence[str]], decoding: Decoding
    ) -> list[Prediction]:
        # A conversation of blank turns alone is an empty prompt, EOS, whose reply is empty.
        rows = [self._prompt(turns) or [EOS] for turns in conversations]
        replies = self.generate(model, rows, decoding)
        return [replace(reply, note=self.note(turns[-1])) for reply, turns in zip(replies, conversations, strict=True)]

    def _prompt(self, turns: Sequence[str]) -> list[int]:
        spoken = [turn for turn in turns if turn.strip()][-self.shape_of(self.job).turns :]
        return self._last(list(chain.from_iterable(super(Chat, self).encode([turn])[0] for turn in spoken)))


def distinct(texts: Sequence[str], size: int) -> float:
    """Return the share of n-grams of `size` words that are different; a letter is a word where there are no spaces."""
    words = [split_words(text.lower()) for text in texts]
    ngrams = [tuple(row[start : start + size]) for row in words for start in range(len(row) - size + 1)]
    return len(set(ngrams)) / max(1, len(ngrams))


# Prompts of several turns, cut to the positions that the model has.


@dataclass(frozen=True)
class Truncation:
    """How many prompts lost their beginning, and how many replies their end."""

    prompts: int
    replies: int
    samples: int

    def __str__(self) -> str:
        return (
            f"of {self.samples:,} pairs, {self.prompts:,} prompts lose their beginning"
            f" and {self.replies:,} replies their end"
        )


def truncate(split: SplitReader, shape: ChatShape) -> tuple[TokenPairs, Truncation]:
    """Return the last turns before each reply and the reply, both cut to the positions of the model."""
    # Shard by shard: a conversation that continues in the next shard loses its earlier turns, which is rare.
    prompts, replies, cut_prompts = [], [], 0
    for shard in split.shards():
        offsets, rows = shard.ragged["source"].offsets, np.arange(len(shard))
        first_rows = np.maximum.accumulate(np.where(_continues(shard), 0, rows))
        starts, ends = offsets[np.maximum(first_rows, rows - shape.turns + 1)], offsets[1:]
        cut_prompts += int((ends - starts > shape.prompt).sum())
        prompts.append(_slices(shard.ragged["source"], np.maximum(starts, ends - shape.prompt), ends))
        offsets = shard.ragged["target"].offsets
        reply_ends = np.minimum(offsets[1:], offsets[:-1] + 1 + shape.reply)  # BOS takes no position of the reply
        replies.append(_slices(shard.ragged["target"], offsets[:-1], reply_ends))
    cut_replies = int((split.lengths("target") - 1 > shape.reply).sum())
    pairs = TokenPairs(Ragged.joined(prompts), Ragged.joined(replies))
    return pairs, Truncation(cut_prompts, cut_replies, len(split))


def _continues(shard: Columns) -> NDArray[np.bool_]:
    """Return which pairs start with the reply of the pair before them."""
    source, target = shard.ragged["source"], shard.ragged["target"]
    continues = np.zeros(len(shard), np.bool_)
    # Lengths first, which is fast; a target has one token more, BOS.
    continues[1:] = source.lengths[1:] == target.lengths[:-1] - 1
    for row in np.flatnonzero(continues).tolist():
        continues[row] = np.array_equal(source[row], target[row - 1][1:])
    return continues


def _slices(column: Ragged, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Ragged:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], ends - starts)
    return Ragged(column.values[places], offsets)
