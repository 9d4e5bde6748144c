"""Shared by the text-to-text recipes: the shape of a Transformer, batches of pairs, loss, and decoded outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, sort_keys
from packtrain.data.pack import Column, pad
from packtrain.data.threads import in_threads
from packtrain.errors import FieldMistake
from packtrain.job.job import Job, ModelSettings
from packtrain.pack.shard import Ragged
from packtrain.pack.vocabulary import EOS, MAX_TEXT_BYTES, PAD, is_too_long
from packtrain.recipes.forms import Exportable
from packtrain.recipes.recipe import (
    PASSES,
    SHOWN_SAMPLES,
    Batch,
    Decoding,
    EvaluationRequest,
    Hypothesis,
    InputMistake,
    Measurement,
    ModelSize,
    Network,
    Prediction,
    Rows,
    Scores,
    Sized,
    read_options,
    text_prediction,
)
from packtrain.recipes.statistics import Statistic, ratio, rows_in_order
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

    from packtrain.recipes.graphs import Graph
    from packtrain.recipes.onnx import Session
    from packtrain.recipes.transformer import Transformer

MEASURE_TOKENS = 8192  # of a batch whose loss is measured: bounds its memory
LOGITS_HELD = 3  # with their softmax and what torch needs to compute it
MAX_INPUT_TOKENS = 1000


@dataclass(frozen=True)
class TransformerShape:
    width: int
    heads: int
    feedforward: int
    encoder_layers: int
    decoder_layers: int
    dropout: float
    attention_dropout: float


Shape = TypeVar("Shape", bound=TransformerShape)


def read_shape(model: ModelSettings, sizes: Mapping[str, Shape]) -> Shape:
    """Return the named size with the job's options applied."""
    shape = read_options(model, sizes)
    if shape.width % (2 * shape.heads):
        raise FieldMistake("model.width", f"{shape.width} must be a multiple of twice model.heads ({shape.heads})")
    return shape


@dataclass(frozen=True)
class TokenPairs:
    """The tokens of a split: sources end with EOS; targets are BOS ... EOS."""

    source: Ragged | Column
    target: Ragged | Column


def padded_to_8(count: int) -> int:
    """Round up to a multiple of 8, the tiles of a GPU's matrix units."""
    return -(-count // 8) * 8


def transformer_size(shape: TransformerShape, vocabulary: int) -> ModelSize:
    width, inner, padded = shape.width, shape.feedforward, padded_to_8(vocabulary)
    attention, norm = 4 * width * width + 4 * width, 2 * width
    feedforward = 2 * width * inner + inner + width
    layers = shape.encoder_layers * (attention + feedforward + 2 * norm)
    layers += shape.decoder_layers * (2 * attention + feedforward + 3 * norm)
    embedding = padded * width
    weights = embedding + layers + 2 * norm
    # For one target token there is about one source token; of both, each layer keeps its inputs and those inside.
    layer, logits = 12 * width + 2 * inner, LOGITS_HELD * padded
    inside = (shape.encoder_layers + 2 * shape.decoder_layers) * layer + logits
    inputs = (shape.encoder_layers + shape.decoder_layers) * width
    return ModelSize(
        parameters=weights,
        trained=weights,
        buffer_bytes=0,
        flops=2.0 * PASSES * (layers + embedding),
        activation_bytes=4.0 * inside,
        block_flops=2.0 * layers,
        checkpointed_bytes=4.0 * (inputs + 2 * layer + logits),
        family="transformer",
        evaluation_bytes=4.0 * logits,
    )


class TextNetwork(Network):
    """A Transformer that reads one text and writes another."""

    search_tokens: int
    """Source tokens of all hypotheses that one search may have: bounds its memory."""

    @abstractmethod
    def search(
        self, source_BS: NDArray[np.int64], limits_B: NDArray[np.int64], decoding: Decoding, numbers: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """Return the outputs for each source, the best first: at most `limits_B` tokens each.

        `numbers` identify the sources, so that a sampled output does not depend on the other sources of the batch.
        """

    @abstractmethod
    def losses(self, source_BS: NDArray[np.int64], target_BT: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the negative log-probability of each target after BOS, given its source. Both are padded."""


class PairRecipe(Exportable, Sized):
    """A Transformer that reads one text and writes another."""

    unit = "tokens"
    kind = "pairs"
    rows: ClassVar[Rows] = {"embedding.weight": "pieces"}

    @classmethod
    def check(cls, job: Job) -> None:
        cls.shape_of(job)
        if not job.data.joint:
            raise FieldMistake("data.joint", "must be true: source and target share one embedding")

    @classmethod
    @abstractmethod
    def shape_of(cls, job: Job) -> TransformerShape:
        """Return the shape of the job's model; raise FieldMistake if its options do not fit."""

    @abstractmethod
    def max_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens may be written for sources of these lengths."""

    @abstractmethod
    def grade(self, loss: float, references: Sequence[str], outputs: Sequence[str]) -> Scores:
        """Return the scores for a loss, and for outputs if there are any."""

    def grade_statistics(
        self,
        rows: Mapping[str, Sequence[float]],  # noqa: ARG002
        references: Sequence[str],  # noqa: ARG002
        outputs: Sequence[str],  # noqa: ARG002
    ) -> dict[str, Statistic]:
        """Return what the scores of `grade` beside the loss are computed from; `rows` has loss and tokens."""
        return {}

    @property
    def width(self) -> int:
        return self.shape_of(self.job).width

    @classmethod
    def size(cls, job: Job, vocabulary: int, classes: int) -> ModelSize:  # noqa: ARG003
        return transformer_size(cls.shape_of(job), vocabulary)

    # Data.

    @cached_property
    def _untruncated(self) -> dict[str, TokenPairs]:
        splits = {name: self.pack.split(name) for name in self.pack.manifest.splits}
        return {name: TokenPairs(split.column("source"), split.column("target")) for name, split in splits.items()}

    @property
    def pairs(self) -> dict[str, TokenPairs]:
        """The tokens of each split as the model sees them."""
        return self._untruncated

    @property
    def costs(self) -> NDArray[np.int64]:
        return self.pairs["train"].target.lengths - 1  # BOS is not predicted

    @property
    def sort_keys(self) -> NDArray[np.int64]:
        train = self.pairs["train"]
        return sort_keys(train.source.lengths, train.target.lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        train = self.pairs["train"]
        return np.maximum(train.source.lengths, train.target.lengths)

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:  # noqa: ARG002
        return self._batch("train", ids)

    def _batch(self, split: str, ids: Ids) -> dict[str, NDArray[Any]]:
        """Pad a batch. `predicted` has the positions that are not padding, counted row by row.

        It is computed here, because finding it on a GPU would make the host wait.
        """
        pairs = self.pairs[split]
        target = pad(pairs.target, ids, PAD)
        predicted = np.flatnonzero(target[:, 1:] != PAD)
        return {"source": pad(pairs.source, ids, PAD), "target": target, "predicted": predicted}

    def count(self, split: str) -> int:
        return len(self.pairs[split].target) if split in self.pairs else 0

    # Loss and evaluation.

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        target, predicted = batch["target"], batch["predicted"]
        labels = target[:, 1:].flatten()[predicted]
        loss: Tensor = model(batch["source"], target[:, :-1], predicted, labels, self.job.train.label_smoothing)
        return loss

    def measure(self, model: nn.Module | Network, request: EvaluationRequest) -> Measurement:
        network, pairs = _network(model), self.pairs[request.split]
        loss, tokens = 0.0, 0
        measured = []
        for batch_ids in group_by_length(request.ids, pairs.target.lengths, MEASURE_TOKENS):
            request.on_batch()
            losses = network.losses(pad(pairs.source, batch_ids, PAD), pad(pairs.target, batch_ids, PAD))
            lengths = pairs.target.lengths[batch_ids] - 1
            loss += float(losses.sum())
            tokens += int(lengths.sum())
            measured.append((batch_ids, {"loss": losses, "tokens": lengths}))
        decoding = replace(self.decoding, beam=request.beam)
        # One at a time: the precision that a worker computes in holds for its own thread.
        outputs = self._outputs(network, pairs.source, request.decode_ids, decoding, on_batch=request.on_batch)
        rows = rows_in_order(request.ids, measured) if request.by_sample else {}
        sums = {"loss": loss, "tokens": float(tokens), "samples": float(len(request.ids))}
        return Measurement(sums, [texts[0] for texts, _ in outputs], rows)

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        tokens = sum(measured.sums["tokens"] for measured in parts)
        loss = sum(measured.sums["loss"] for measured in parts) / max(1.0, tokens)
        outputs = [output for measured in parts for output in measured.outputs]
        references = self._references(split, decode_ids) if outputs else []
        inputs = self._texts(self.pairs[split].source, decode_ids[:SHOWN_SAMPLES])
        samples = tuple(Sample(*texts) for texts in zip(inputs, references, outputs, strict=False))
        graded = self.grade(loss, references, outputs)
        # The loss, and what is computed from it, is of all samples; everything else of the outputs.
        of_all = self.grade(loss, [], []).values
        samples_of_all = int(sum(measured.sums["samples"] for measured in parts))
        counts = {name: samples_of_all if name in of_all else len(outputs) for name in graded.values}
        return replace(graded, samples=samples, counts=counts)

    def statistics(self, split: str, ids: Ids, measured: Measurement) -> dict[str, Statistic]:
        rows = measured.rows
        graded = self.grade_statistics(rows, self._references(split, ids), measured.outputs)
        return {"loss": ratio(rows["loss"], rows["tokens"]), **graded}

    def sample_records(self, split: str, ids: Ids, measured: Measurement) -> Iterator[dict[str, Any]]:
        reader = self.pack.split(split)
        texts = (self._texts(self.pairs[split].source, ids), self._references(split, ids), measured.outputs)
        for sample, text, reference, output in zip(ids.tolist(), *texts, strict=True):
            number, source = self.source_of(split, sample)
            shard, row = reader.at(sample)
            yield {
                "source": number,
                "file": None if source is None else Path(source.paths[0]).name,
                "line": int(shard.plain["line"][row]) if "line" in shard.plain else None,
                "input": text,
                "reference": reference,
                "prediction": output,
            }

    def _references(self, split: str, ids: Ids) -> list[str]:
        # Whole references: scores must not depend on how a model truncates its targets.
        return self._texts(self._untruncated[split].target, ids)

    def _texts(self, rows: Ragged | Column, ids: Ids) -> list[str]:
        return [self._text(rows[sample].tolist()) for sample in ids.tolist()]

    def _text(self, row: list[int]) -> str:
        """Decode a row; slashes separate the texts of a row with several, such as the turns of a prompt."""
        ends = [place for place, token in enumerate(row) if token == EOS] or [len(row)]
        texts = [row[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
        return " / ".join(filter(None, self.pack.vocabulary.decode(texts)))

    # Outputs.

    def _outputs(
        self,
        network: TextNetwork,
        source: Ragged | Column,
        ids: Ids,
        decoding: Decoding,
        at_once: int = 1,
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[tuple[list[str], list[float]]]:
        """Return the texts for each source, the best first, and their scores; `at_once` searches run side by side."""
        outputs: dict[int, tuple[list[str], list[float]]] = {}
        batches = group_by_length(ids, source.lengths, network.search_tokens // decoding.beam)

        def search(batch_ids: Ids) -> list[list[Hypothesis]]:
            on_batch()
            limits = self.max_lengths(source.lengths[batch_ids])
            return network.search(
                pad(source, batch_ids, PAD), limits, decoding, (batch_ids + decoding.first_number).tolist()
            )

        for batch_ids, hypotheses in zip(batches, in_threads(search, batches, at_once), strict=True):
            texts = iter(
                self.pack.vocabulary.decode([hypothesis.tokens for ranked in hypotheses for hypothesis in ranked])
            )
            for sample, ranked in zip(batch_ids.tolist(), hypotheses, strict=True):
                outputs[sample] = [next(texts) for _ in ranked], [hypothesis.score for hypothesis in ranked]
        return [outputs[sample] for sample in ids.tolist()]

    def predict(self, model: nn.Module | Network, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]:
        predictions = self.generate(model, self.encode(inputs), decoding)
        return [replace(prediction, note=self.note(text)) for text, prediction in zip(inputs, predictions, strict=True)]

    def note(self, text: str) -> str:
        """Return a warning about an input, or an empty string."""
        strange = self.pack.vocabulary.is_strange(text)
        return "its characters are rare or absent in the training data" if strange else ""

    def generate(
        self, model: nn.Module | Network, rows: Sequence[Sequence[int]], decoding: Decoding
    ) -> list[Prediction]:
        """Return a prediction for every row; that of a row with only EOS is empty."""
        source = Ragged.from_rows(rows, np.dtype("<u4"))
        filled = np.flatnonzero(source.lengths > 1)
        network = _network(model)
        texts = self._outputs(network, source, filled, decoding, network.at_once)
        outputs = dict(zip(filled.tolist(), texts, strict=True))
        return [text_prediction(*outputs.get(number, ([""], [0.0]))) for number in range(len(rows))]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts as sources; a blank text is EOS alone."""
        for number, text in enumerate(texts):
            if is_too_long(text):  # before it is tokenized, which would take seconds for megabytes
                raise _too_long(texts, number, f"more than {MAX_TEXT_BYTES:,} bytes")
        encoded = self.pack.vocabulary.encode(texts)
        rows = [[*row, EOS] if text.strip() else [EOS] for text, row in zip(texts, encoded, strict=True)]
        for number, row in enumerate(rows):
            if len(row) > MAX_INPUT_TOKENS:
                raise _too_long(texts, number, f"{len(row):,} tokens, more than {MAX_INPUT_TOKENS:,}")
        return rows

    # Without torch.

    def graphs(self, model: nn.Module) -> Mapping[str, Graph]:
        from packtrain.recipes.transformer_graphs import graphs_of

        return graphs_of(_transformer(model))

    def onnx_network(self, session: Callable[[str], Session]) -> TextNetwork:
        from packtrain.recipes.transformer_onnx import OnnxText

        return OnnxText(session("encoder"), session("decoder"), len(self.pack.vocabulary))


def _transformer(model: nn.Module | Network) -> Transformer:
    from packtrain.recipes.transformer import Transformer

    assert isinstance(model, Transformer)  # a recipe with another model has predictions of its own
    return model


def _network(model: nn.Module | Network) -> TextNetwork:
    """Return the model behind the interface that all of its forms share."""
    if isinstance(model, TextNetwork):
        return model
    from packtrain.recipes.decode import TorchText

    return TorchText(_transformer(model))


def _too_long(texts: Sequence[str], number: int, size: str) -> InputMistake:
    return InputMistake(texts, number, f"has {size}; shorten it: {texts[number][:40]!r}...")


def group_by_length(ids: Ids, lengths: NDArray[np.int64], budget: int) -> list[Ids]:
    """Sort `ids` by length and divide them into parts of at most `budget` padded positions, or of one sample."""
    ordered = ids[np.argsort(lengths[ids], kind="stable")]
    batches, start = [], 0
    for end in range(1, len(ordered) + 1):
        # Sorted, so the next sample would be the longest of its part, and all would be padded to it.
        if end == len(ordered) or (end + 1 - start) * lengths[ordered[end]] > budget:
            batches.append(ordered[start:end])
            start = end
    return batches
