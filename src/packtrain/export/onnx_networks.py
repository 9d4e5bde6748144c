"""Exported models in ONNX Runtime, as recipes use them. No torch.

Inputs and outputs of the graphs are described in graphs.py. Arrays go into a graph without a copy, so a search keeps
its caches in NumPy, with space for more tokens, and takes over only what a step adds to them.

Dimensions: B sources, K hypotheses of each, R = B x K rows, S source positions, T tokens, P places in the caches,
V vocabulary, N predicted positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.errors import Mistake, printable, quoted
from packtrain.identity import install_command
from packtrain.pack.tiles import Pixels
from packtrain.pack.vocabulary import BOS, PAD
from packtrain.recipes.caption import MAX_CAPTION_TOKENS, CaptionNetwork
from packtrain.recipes.classify import ClassifierNetwork
from packtrain.recipes.pairs import TextNetwork, group_by_length
from packtrain.recipes.recipe import Decoding, Hypothesis
from packtrain.recipes.search import Candidates, Floats, Steps, narrowing_search, search
from packtrain.system import usable_cores

Arrays = dict[str, NDArray[Any]]

_SCORED_TOKENS = 1024  # positions whose logits are computed together: a vocabulary of 32,768 takes 130 MB for them
_PLACES = 16  # of new caches; they double when they are full


@dataclass(frozen=True)
class GraphValue:
    """An input or output of a graph; a size is a number, or a word if it is free."""

    name: str
    type: str
    shape: tuple[int | str, ...]


class Session:
    """A graph that is ready to compute."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise Mistake(f"this model needs ONNX Runtime; run `{install_command('runtime')}`") from None
        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only, and those are raised as well
        # Always a number: for its default ONNX Runtime binds threads to cores, and complains where it may not.
        options.intra_op_num_threads = threads or usable_cores()
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # shapes differ from step to step, and each would leave a plan behind
        try:
            # Without a second try of the same, about which ONNX Runtime would print.
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime has a dozen classes of them, without a common base
            reason = printable(str(error).strip().split("\n")[0], 200)
            raise Mistake(f"{printable(str(path))}: ONNX Runtime cannot load it: {reason}") from error
        self.inputs, self.outputs = map(_described, (self._session.get_inputs(), self._session.get_outputs()))
        self.shapes: dict[str, tuple[Any, ...]] = {one.name: one.shape for one in (*self.inputs, *self.outputs)}

    def __call__(self, outputs: Sequence[str], inputs: Arrays) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = self._session.run(outputs, inputs)
        return found


# Where each message of an ONNX file has messages that may have tensors, as the numbers of its fields.
_BELOW: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "place"},
}
_KEY, _VALUE = 1, 2  # fields of a place, such as (location, decoder.onnx.data)


def external_files(path: Path) -> set[str]:
    """Return the files with data outside of a graph, by their names beside it: ONNX Runtime would open any path.

    The package onnx can read them, too, but the one that only computes does not have it.
    """
    try:
        with path.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            found = set(_places(data))
    except (OSError, ValueError):  # the second also for an empty file
        raise Mistake(f"{printable(str(path))}: not an ONNX graph; export or copy the model again") from None
    if outside := sorted(name for name in found if "/" in name or not name.strip(".")):
        raise Mistake(f"{printable(str(path))}: its data is in {quoted(outside[0])}, which is not a file next to it")
    return found


def _places(data: mmap) -> Iterator[str]:
    remaining = [("model", 0, len(data))]
    while remaining:
        kind, start, end = remaining.pop()
        fields = list(_fields(data, start, end))
        if kind == "place":
            texts = {number: data[first:last] for number, first, last in fields}
            if texts.get(_KEY) == b"location":
                yield texts.get(_VALUE, b"").decode(errors="replace")
        below = _BELOW.get(kind, {})
        remaining += [(below[number], first, last) for number, first, last in fields if number in below]


def _fields(data: mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a protobuf message that has a length, and where it starts and ends."""
    while at < end:
        key, at = _varint(data, at, end)
        if key & 7 == _VARINT:
            _, at = _varint(data, at, end)
        elif key & 7 == _BYTES:
            length, at = _varint(data, at, end)
            yield key >> 3, at, at + length
            at += length
        elif key & 7 in _FIXED:
            at += _FIXED[key & 7]
        else:
            raise ValueError(f"no field starts at byte {at}")
    if at != end:
        raise ValueError(f"a field goes beyond byte {end}")


_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}  # how a field is written


def _varint(data: mmap, at: int, end: int) -> tuple[int, int]:
    """Return a number of 7 bits in each byte, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"no number ends at byte {at}")


def _described(values: Sequence[Any]) -> tuple[GraphValue, ...]:
    return tuple(GraphValue(one.name, one.type[len("tensor(") : -1], tuple(one.shape)) for one in values)


def _forbidding(decoder: Session, vocabulary: int) -> Floats:
    """Return what a search adds to the logits: PAD, BOS and the padding of the vocabulary never follow."""
    if decoder.shapes["offsets"][0] < vocabulary:
        raise ValueError("the graph has a smaller vocabulary")
    offsets = np.zeros(decoder.shapes["offsets"], np.float32)
    offsets[[PAD, BOS]] = offsets[vocabulary:] = -np.inf
    return offsets


# Text to text.


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


class OnnxTextSteps(Steps):
    """The rows of a source are adjacent, and share its memory."""

    def __init__(self, decoder: Session, memory: Arrays, beam: int, decoding: Decoding, vocabulary: int) -> None:
        super().__init__(decoding)
        self._decoder, self._memory, self._beam, self._vocabulary = decoder, memory, beam, vocabulary
        self._caches = _empty_caches(decoder, len(memory["mask"]), beam, _PLACES)
        self._offsets = _forbidding(decoder, vocabulary)

    def logits(self, written_RT: Ids) -> Floats:
        [logits_RV] = self._step(written_RT, ["logits"])
        return logits_RV[:, : self._vocabulary]

    def candidates(self, written_RT: Ids, count: int) -> Candidates:
        if self.penalizes or count > self._decoder.shapes["candidates"][1]:
            return super().candidates(written_RT, count)
        tokens_RC, scores_RC = self._step(written_RT, ["candidates", "candidate_scores"])
        return Candidates(tokens_RC[:, :count], scores_RC[:, :count])

    def select(self, rows: Ids, same_sources: bool = False) -> None:
        if not same_sources:
            sources = rows[:: self._beam] // self._beam
            self._memory = {name: array[sources] for name, array in self._memory.items()}
            self._caches = {name: _selected(array, rows) for name, array in self._caches.items()}
            return
        # Most hypotheses continue in their own row: only those that moved are copied.
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        for array in self._caches.values():
            flat = array.reshape(-1, *array.shape[2:])
            flat[moved] = flat[rows[moved]]

    def _step(self, written_RT: Ids, outputs: list[str]) -> list[NDArray[Any]]:
        rows, position = len(written_RT), written_RT.shape[1] - 1
        self._make_space(position)
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
        found = self._decoder([*outputs, *added], inputs | self._memory | self._caches)
        for array, new in zip(self._caches.values(), found[len(outputs) :], strict=True):
            array[:, :, :, position] = new[:, :, :, 0]
        return found[: len(outputs)]

    def _make_space(self, position: int) -> None:
        for name, array in self._caches.items():
            if position == array.shape[3]:
                self._caches[name] = np.concatenate([array, np.zeros_like(array)], axis=3)


def _selected(array_BK: NDArray[Any], rows: Ids) -> NDArray[Any]:
    """Return these rows of an array [B, K, ...], in an array of the same K."""
    flat = array_BK.reshape(-1, *array_BK.shape[2:])
    return flat[rows].reshape(-1, *array_BK.shape[1:])


# Images.


class OnnxClassifier(ClassifierNetwork):
    def __init__(self, classifier: Session, classes: int) -> None:
        if classifier.shapes["logits"][1:] != (classes,):
            raise ValueError("the graph has other classes")
        self._classifier = classifier

    def logits(self, pixels: Pixels) -> NDArray[np.float32]:
        if not len(pixels):
            return np.zeros((0, self._classifier.shapes["logits"][1]), np.float32)
        [logits] = self._classifier(["logits"], {"pixels": pixels})
        return logits


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
            left = int((lengths > position).sum())
            inputs = {
                "tokens": captions[:left, position : position + 1],
                "labels": captions[:left, position + 1],
                "offsets": offsets,
                "state": state[:left],
            }
            memory = rows.select(slice(left)).memory
            scores, state = self._decoder(["label_scores", "next_state"], inputs | memory)
            losses[order[:left]] -= scores
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


class OnnxCaptionSteps(Steps):
    """The rows of an image are adjacent, and share its features."""

    def __init__(self, decoder: Session, encoded: EncodedArrays, beam: int, vocabulary: int) -> None:
        super().__init__(Decoding())
        self._decoder, self._memory, self._beam, self._vocabulary = decoder, encoded.memory, beam, vocabulary
        self._state = encoded.state[:, None].repeat(beam, axis=1)
        self._offsets = _forbidding(decoder, vocabulary)

    def logits(self, written_RT: Ids) -> Floats:
        [logits_RV] = self.step(written_RT, ["logits"])
        return logits_RV[:, : self._vocabulary]

    def candidates(self, written_RT: Ids, count: int) -> Candidates:
        if count > self._decoder.shapes["candidates"][1]:
            return super().candidates(written_RT, count)
        tokens_RC, scores_RC = self.step(written_RT, ["candidates", "candidate_scores"])
        return Candidates(tokens_RC[:, :count], scores_RC[:, :count])

    def select(self, rows: Ids, same_sources: bool = False) -> None:
        self._state = _selected(self._state, rows)
        if not same_sources:
            sources = rows[:: self._beam] // self._beam
            self._memory = {name: array[sources] for name, array in self._memory.items()}

    def step(self, written_RT: Ids, outputs: list[str]) -> list[NDArray[Any]]:
        inputs: Arrays = {
            "tokens": written_RT[:, -1:].reshape(-1, self._beam),
            "labels": np.zeros(len(written_RT), np.int64),
            "offsets": self._offsets,
            "state": self._state,
        }
        *found, self._state = self._decoder([*outputs, "next_state"], inputs | self._memory)
        return found
