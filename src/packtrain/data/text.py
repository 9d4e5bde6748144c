"""Rows of tokens to padded batches, and which rows belong together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.data.pack import Column
from packtrain.pack.shard import Array, Ragged

_SHELL = 1 << 32  # more than any difference of two lengths, on either side


def likeness(source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs of these lengths that stand together when sorted by this need little padding on either side.

    A path through all pairs of lengths on which neighbours differ little: shells whose longer side is equal, each
    from the shortest source to the shortest target, and every other one the way back.
    """
    longer = np.maximum(source, target)
    return longer * _SHELL + np.where(longer % 2, target - source, source - target)


def pad(column: Ragged | Column, ids: Ids, filler: int) -> NDArray[np.int64]:
    """The rows `ids` side by side, filled up with `filler` to the longest of them."""
    if not len(ids):
        return np.zeros((0, 1), np.int64)
    if isinstance(column, Ragged):
        back, parts = None, [(column, ids)]
    else:
        back, parts = column.by_shard(ids)
    bounds = [(part.offsets[rows], part.offsets[rows + 1]) for part, rows in parts]
    lengths = np.concatenate([ends - starts for starts, ends in bounds])
    width = max(1, int(lengths.max()))
    found = [_wide(part.values, *edges, width) for (part, _), edges in zip(parts, bounds, strict=True)]
    batch = found[0] if len(found) == 1 else np.concatenate(found)
    if back is not None:
        batch, lengths = batch.take(back, axis=0), lengths[back]
    batch = batch.astype(np.int64)
    shortest = int(lengths.min())
    np.copyto(batch[:, shortest:], filler, where=np.arange(shortest, width) >= lengths[:, None])
    return batch


def _wide(values: Array, starts: Ids, ends: Ids, width: int) -> Array:
    """`width` values from each start on, those behind the end of a row being anything.

    Samples of a batch are about equally long, and taking a little too much is faster than choosing: the values are
    seen as windows that overlap, each a single item of all its bytes, so that a row is one item to copy.
    """
    last = len(values) - width
    if last < 0:
        values, last = np.concatenate([values, np.zeros(-last, values.dtype)]), 0
    window = np.dtype((np.void, width * values.itemsize))
    windows = np.ndarray((last + 1,), window, values, 0, values.strides)
    found: Array = windows[np.minimum(starts, last)].view(values.dtype).reshape(len(starts), width)
    for row in np.flatnonzero(starts > last).tolist():  # the last rows of a shard: no window begins there
        found[row, : ends[row] - starts[row]] = values[starts[row] : ends[row]]
    return found
