"""What the model sees of a conversation: the last turns before a reply, and as much of both as has a position.

A pack has pairs in the order in which they were said. Where a pair begins with what the one before it ended with,
both belong to one conversation; and because prompts lie one behind the other in a shard, the turns before a reply
are a stretch of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packtrain.data.pack import SplitReader
from packtrain.pack.shard import Columns, Ragged
from packtrain.recipes.pairs import Sides


@dataclass(frozen=True)
class Cut:
    """How many prompts lost their beginning, and how many replies their end."""

    prompts: int
    replies: int
    samples: int

    def __str__(self) -> str:
        return (
            f"of {self.samples:,} pairs, {self.prompts:,} prompts are cut at their beginning"
            f" and {self.replies:,} replies at their end"
        )


def seen(split: SplitReader, prompt: int, reply: int, turns: int) -> tuple[Sides, Cut]:
    """The last turns before each reply, at most `prompt` tokens; and the reply, at most `reply` tokens behind BOS."""
    shards = [split.shard(number) for number in range(split.num_shards)]
    spoken = [_prompt_edges(shard, turns) for shard in shards]
    prompts = [
        _stretches(shard.ragged["source"], np.maximum(starts, ends - prompt), ends)
        for shard, (starts, ends) in zip(shards, spoken, strict=True)
    ]
    replies = [_stretches(shard.ragged["target"], *_reply_edges(shard, reply)) for shard in shards]
    sides = Sides(Ragged.joined(prompts), Ragged.joined(replies))
    cut_prompts = sum(int((ends - starts > prompt).sum()) for starts, ends in spoken)
    cut_replies = int((split.lengths("target") - 1 > reply).sum())
    return sides, Cut(cut_prompts, cut_replies, len(split))


Edges = tuple[NDArray[np.int64], NDArray[np.int64]]


def _prompt_edges(shard: Columns, turns: int) -> Edges:
    """Of all that was said in the last turns."""
    offsets = shard.ragged["source"].offsets
    rows = np.arange(len(shard))
    began = np.maximum.accumulate(np.where(_goes_on(shard), 0, rows))
    return offsets[np.maximum(began, rows - turns + 1)], offsets[1:]


def _reply_edges(shard: Columns, reply: int) -> Edges:
    offsets = shard.ragged["target"].offsets
    return offsets[:-1], np.minimum(offsets[1:], offsets[:-1] + 1 + reply)


def _goes_on(shard: Columns) -> NDArray[np.bool_]:
    """Which pairs begin with what the one before them ended with."""
    source, target = shard.ragged["source"], shard.ragged["target"]
    found = np.zeros(len(shard), np.bool_)
    found[1:] = source.lengths[1:] == target.lengths[:-1] - 1
    for row in np.flatnonzero(found).tolist():
        found[row] = np.array_equal(source[row], target[row - 1][1:])
    return found


def _stretches(column: Ragged, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Ragged:
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], ends - starts)
    return Ragged(column.values[places], offsets)
