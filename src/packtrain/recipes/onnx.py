"""ONNX graphs in ONNX Runtime, and the files that they are in. No torch."""

from __future__ import annotations

from abc import abstractmethod
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
from packtrain.pack.vocabulary import BOS, PAD
from packtrain.recipes.recipe import Decoding
from packtrain.recipes.search import Candidates, Floats, Steps
from packtrain.system import usable_cores

Arrays = dict[str, NDArray[Any]]


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
        self.inputs, self.outputs = (
            tuple(GraphValue(value.name, value.type[len("tensor(") : -1], tuple(value.shape)) for value in values)
            for values in (self._session.get_inputs(), self._session.get_outputs())
        )
        self.shapes: dict[str, tuple[Any, ...]] = {value.name: value.shape for value in (*self.inputs, *self.outputs)}

    def __call__(self, outputs: Sequence[str], inputs: Arrays) -> list[NDArray[Any]]:
        arrays: list[NDArray[Any]] = self._session.run(outputs, inputs)
        return arrays


def selected(array_BK: NDArray[Any], rows: Ids) -> NDArray[Any]:
    """Return these rows of an array [B, K, ...], in an array of the same K."""
    flat = array_BK.reshape(-1, *array_BK.shape[2:])
    return flat[rows].reshape(-1, *array_BK.shape[1:])


class OnnxSteps(Steps):
    """One search: the rows of a source are adjacent, and share its memory."""

    def __init__(self, decoder: Session, memory: Arrays, beam: int, decoding: Decoding, vocabulary: int) -> None:
        super().__init__(decoding)
        self._decoder, self._memory, self._beam, self._vocabulary = decoder, memory, beam, vocabulary
        if decoder.shapes["offsets"][0] < vocabulary:
            raise ValueError("the graph has a smaller vocabulary")
        # Added to the logits: PAD, BOS and the padding of the vocabulary never follow.
        self._offsets = np.zeros(decoder.shapes["offsets"], np.float32)
        self._offsets[[PAD, BOS]] = self._offsets[vocabulary:] = -np.inf

    @abstractmethod
    def step(self, written_RT: Ids, outputs: list[str]) -> list[NDArray[Any]]:
        """Read the last tokens, and return these outputs of the decoder."""

    def logits(self, written_RT: Ids) -> Floats:
        [logits_RV] = self.step(written_RT, ["logits"])
        return logits_RV[:, : self._vocabulary]

    def candidates(self, written_RT: Ids, count: int) -> Candidates:
        if self.penalizes or count > self._decoder.shapes["candidates"][1]:
            return super().candidates(written_RT, count)
        tokens_RC, scores_RC = self.step(written_RT, ["candidates", "candidate_scores"])
        return Candidates(tokens_RC[:, :count], scores_RC[:, :count])

    def select_memory(self, rows: Ids) -> None:
        """Keep the memory of the sources of these rows alone."""
        sources = rows[:: self._beam] // self._beam
        self._memory = {name: array[sources] for name, array in self._memory.items()}


# Files.

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
            names = set(_places(data))
    except (OSError, ValueError):  # the second also for an empty file
        raise Mistake(f"{printable(str(path))}: not an ONNX graph; export or copy the model again") from None
    if outside := sorted(name for name in names if "/" in name or not name.strip(".")):
        raise Mistake(f"{printable(str(path))}: its data is in {quoted(outside[0])}, which is not a file next to it")
    return names


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
