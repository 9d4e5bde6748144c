"""Rows of tokens to padded batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.pack.shard import Ragged


def pad(column: Ragged, ids: Ids, filler: int) -> NDArray[np.int64]:
    """The rows `ids` side by side, filled up with `filler` to the longest of them."""
    starts = column.offsets[ids]
    lengths = column.offsets[ids + 1] - starts
    positions = np.arange(max(1, int(lengths.max(initial=0))))
    inside = positions < lengths[:, None]
    padded = np.full(inside.shape, filler, np.int64)
    padded[inside] = column.values[(starts[:, None] + positions)[inside]]
    return padded
