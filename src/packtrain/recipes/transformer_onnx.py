"""A Transformer in ONNX Runtime. No torch.

Inputs and outputs of the graphs are described in transformer_graphs.py. Arrays go into a graph without a copy, so a
search keeps its caches in NumPy, with space for more tokens, and takes over only what a step adds to them.

Dimensions: B sources, K hypotheses of each, R = B x K rows, S source positions, T tokens, P places in the caches,
V vocabulary, N predicted positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.pack.vocabulary import PAD
from packtrain.recipes.onnx import Arrays, OnnxSteps, Session, selected
from packtrain.recipes.pairs import TextNetwork, group_by_length
from packtrain.recipes.recipe import Decoding, Hypothesis
from packtrain.recipes.search import search

_SCORED_TOKENS = 1024  # positions whose logits are computed together: a vocabulary of 32,768 takes 130 MB for them
_PLACES = 16  # of new caches; they double when they are full


class OnnxText(TextNetwork):
    search_tokens = 4096

    def __init__(self, encoder: Session, decoder: Session, vocabulary: int) -> None:
        self._encoder, self._decoder, self._vocabulary = encoder, decoder, vocabulary
        self._layers = sum(name.startswith("keys_") for name in decoder.shapes)

    def search(
        self, source_BS: NDArray[np.int64], limits_B: NDArray[np.int64], decoding: Decoding, numbers: Sequence[int]
    ) -> list[list[Hypothesis]]:
        def start(beam: int) -> OnnxTextSteps:
            return OnnxTextSteps(self._decoder, self._encode(source_BS), beam, decoding, self._vocabulary)

        return search(start, limits_B, decoding, numbers)

    def losses(self, source_BS: NDArray[np.int64], target_BT: NDArray[np.int64]) -> NDArray[np.float64]:
        losses = np.zeros(len(source_BS))
        lengths = (target_BT[:, 1:] != PAD).sum(1)
        for rows in group_by_length(np.arange(len(source_BS)), lengths, _SCORED_TOKENS):
            losses[rows] = self._losses(source_BS[rows], target_BT[rows, : int(lengths[rows].max()) + 1])
        return losses

    def _losses(self, source_BS: NDArray[np.int64], target_BT: NDArray[np.int64]) -> NDArray[np.float64]:
        tokens_BT, labels_BT = target_BT[:, :-1], target_BT[:, 1:]
        places = np.flatnonzero(labels_BT != PAD)
        inputs = {
            "tokens": tokens_BT[:, None],
            "positions": np.arange(tokens_BT.shape[1]),
            "places": places,
            "labels": labels_BT.ravel()[places],
            "offsets": np.zeros(self._decoder.shapes["offsets"], np.float32),
            "is_written": np.zeros(1, np.bool_),
        }
        caches = _empty_caches(self._decoder, len(source_BS), 1, places=1)
        [scores_N] = self._decoder(["label_scores"], inputs | caches | self._encode(source_BS))
        rows = places // tokens_BT.shape[1]
        return np.bincount(rows, -scores_N.astype(np.float64), minlength=len(source_BS)).astype(np.float64)

    def _encode(self, source_BS: NDArray[np.int64]) -> Arrays:
        layers = range(self._layers)
        names = ["mask", *(f"{name}_{number}" for number in layers for name in ("memory_keys", "memory_values"))]
        return dict(zip(names, self._encoder(names, {"source": source_BS}), strict=True))


def _empty_caches(decoder: Session, sources: int, beam: int, places: int) -> Arrays:
    """Return the keys and values of every layer before anything is written: [B, K, heads, P, width of a head]."""
    shapes = {name: shape for name, shape in decoder.shapes.items() if name.startswith(("keys_", "values_"))}
    return {
        name: np.zeros((sources, beam, heads, places, width), np.float32)
        for name, (_, _, heads, _, width) in shapes.items()
    }


class OnnxTextSteps(OnnxSteps):
    def __init__(self, decoder: Session, memory: Arrays, beam: int, decoding: Decoding, vocabulary: int) -> None:
        super().__init__(decoder, memory, beam, decoding, vocabulary)
        self._caches = _empty_caches(decoder, len(memory["mask"]), beam, _PLACES)

    def select(self, rows: Ids, same_sources: bool = False) -> None:
        if not same_sources:
            self.select_memory(rows)
            self._caches = {name: selected(array, rows) for name, array in self._caches.items()}
            return
        # Most hypotheses continue in their own row: only those that moved are copied.
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        for array in self._caches.values():
            flat = array.reshape(-1, *array.shape[2:])
            flat[moved] = flat[rows[moved]]

    def step(self, written_RT: Ids, outputs: list[str]) -> list[NDArray[Any]]:
        rows, position = len(written_RT), written_RT.shape[1] - 1
        for name, array in self._caches.items():
            if position == array.shape[3]:  # full
                self._caches[name] = np.concatenate([array, np.zeros_like(array)], axis=3)
        places = next(iter(self._caches.values())).shape[3]
        inputs = {
            "tokens": written_RT[:, -1:].reshape(-1, self._beam, 1),
            "positions": np.array([position]),
            "places": np.arange(rows),
            "labels": np.zeros(rows, np.int64),
            "offsets": self._offsets,
            "is_written": np.arange(places) < position,
        }
        added = [f"new_{name}" for name in self._caches]
        arrays = self._decoder([*outputs, *added], inputs | self._memory | self._caches)
        for array, new_column in zip(self._caches.values(), arrays[len(outputs) :], strict=True):
            array[:, :, :, position] = new_column[:, :, :, 0]
        return arrays[: len(outputs)]
