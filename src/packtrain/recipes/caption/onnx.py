"""A captioner in ONNX Runtime; inputs and outputs of the graphs are described in graphs.py. No torch.

Dimensions: B images, K hypotheses of each, R = B x K rows, Q positions of an image, T tokens, D width of a state,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.pack.tiles import Pixels
from packtrain.pack.vocabulary import BOS, PAD
from packtrain.recipes.caption import MAX_CAPTION_TOKENS, CaptionNetwork
from packtrain.recipes.onnx import Arrays, OnnxSteps, Session, selected
from packtrain.recipes.recipe import Decoding, Hypothesis
from packtrain.recipes.search import narrowing_search


@dataclass(frozen=True)
class EncodedArrays:
    """Images after the encoder: `memory` is what the decoder attends to, `state` [B, D] that before the first token."""

    memory: Arrays
    state: NDArray[np.float32]

    def select(self, images: Ids | slice) -> EncodedArrays:
        return EncodedArrays({name: array[images] for name, array in self.memory.items()}, self.state[images])


class OnnxCaptioner(CaptionNetwork[EncodedArrays]):
    def __init__(self, encoder: Session, decoder: Session, vocabulary: int) -> None:
        self._encoder, self._decoder, self._vocabulary = encoder, decoder, vocabulary

    def encode(self, pixels: Pixels) -> EncodedArrays:
        if not len(pixels):  # the encoder of one blank image has the right shapes
            return self.encode(np.zeros((1, *pixels.shape[1:]), np.uint8)).select(slice(0))
        features, keys, state = self._encoder(["features", "keys", "state"], {"pixels": pixels})
        return EncodedArrays({"features": features, "keys": keys}, state)

    def search(
        self, encoded: EncodedArrays, beam: int, n_best: int = 1, longest: int = MAX_CAPTION_TOKENS
    ) -> list[list[Hypothesis]]:
        steps = OnnxCaptionSteps(self._decoder, encoded, beam, self._vocabulary)
        return narrowing_search(steps, len(encoded.state), beam, longest, n_best)

    def losses(self, encoded: EncodedArrays, images: Ids, captions: NDArray[np.int64]) -> NDArray[np.float64]:
        lengths = (captions[:, 1:] != PAD).sum(1)
        order = np.argsort(-lengths, kind="stable")  # so that finished captions leave at the end
        lengths, captions, rows = lengths[order], captions[order], encoded.select(images[order])
        state, losses = rows.state[:, None], np.zeros(len(captions))
        offsets = np.zeros(self._decoder.shapes["offsets"], np.float32)
        for position in range(int(lengths.max(initial=0))):
            unfinished = int((lengths > position).sum())
            inputs = {
                "tokens": captions[:unfinished, position : position + 1],
                "labels": captions[:unfinished, position + 1],
                "offsets": offsets,
                "state": state[:unfinished],
            }
            memory = rows.select(slice(unfinished)).memory
            scores, state = self._decoder(["label_scores", "next_state"], inputs | memory)
            losses[order[:unfinished]] -= scores
        return losses

    def attention(self, encoded: EncodedArrays, image: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        encoded = encoded.select(slice(image, image + 1))
        positions = encoded.memory["keys"].shape[1]
        maps = np.zeros((len(tokens), positions), np.float32)
        steps = OnnxCaptionSteps(self._decoder, encoded, 1, self._vocabulary)
        for number, token in enumerate([BOS, *tokens][: len(tokens)]):
            [attention_BKQ] = steps.step(np.array([[token]]), ["attention"])
            maps[number] = attention_BKQ[0, 0]
        side = math.isqrt(positions)
        return maps.reshape(len(tokens), side, side)


class OnnxCaptionSteps(OnnxSteps):
    def __init__(self, decoder: Session, encoded: EncodedArrays, beam: int, vocabulary: int) -> None:
        super().__init__(decoder, encoded.memory, beam, Decoding(), vocabulary)
        self._state = encoded.state[:, None].repeat(beam, axis=1)

    def select(self, rows: Ids, same_sources: bool = False) -> None:
        self._state = selected(self._state, rows)
        if not same_sources:
            self.select_memory(rows)

    def step(self, written_RT: Ids, outputs: list[str]) -> list[NDArray[Any]]:
        inputs: Arrays = {
            "tokens": written_RT[:, -1:].reshape(-1, self._beam),
            "labels": np.zeros(len(written_RT), np.int64),
            "offsets": self._offsets,
            "state": self._state,
        }
        *arrays, self._state = self._decoder([*outputs, "next_state"], inputs | self._memory)
        return arrays
