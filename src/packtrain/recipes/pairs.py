"""What recipes from text to text have in common: batches of pairs, the loss over real tokens, and free outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, likeness
from packtrain.data.pack import Column, pad
from packtrain.errors import FieldMistake, Mistake
from packtrain.job.job import Job
from packtrain.pack.shard import Ragged
from packtrain.pack.vocabulary import EOS, PAD
from packtrain.recipes.recipe import Batch, Decoding, EvaluationRequest, Measurement, Prediction, Recipe, Scores
from packtrain.recipes.shapes import Shape
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

    from packtrain.recipes.transformer import Transformer

_DECODE_TOKENS = 4096  # source tokens decoded together: bounds the memory of a search
_MEASURE_TOKENS = 8192
_SHOWN_SAMPLES = 5
_LONGEST_INPUT = 1000


@dataclass(frozen=True)
class Sides:
    """The tokens of a split: sources end with EOS; targets are BOS ... EOS."""

    source: Ragged | Column
    target: Ragged | Column


class PairRecipe(Recipe):
    """A Transformer that reads one text and writes another."""

    unit = "tokens"
    kind = "pairs"

    @classmethod
    def check(cls, job: Job) -> None:
        cls.shape_of(job)
        if not job.data.joint:
            raise FieldMistake("data.joint", "must be true: one embedding serves both sides")

    @classmethod
    @abstractmethod
    def shape_of(cls, job: Job) -> Shape:
        """The dimensions of the job's model; refuses what does not fit."""

    @abstractmethod
    def limits(self, source_BS: Tensor) -> Tensor:
        """How many tokens may be written to each source."""

    @abstractmethod
    def grade(self, loss: float, wanted: Sequence[str], outputs: Sequence[str]) -> Scores:
        """The scores of a loss, and of free outputs where there are any."""

    @property
    def width(self) -> int:
        return self.shape_of(self.job).width

    # Data.

    @cached_property
    def _whole(self) -> dict[str, Sides]:
        splits = {name: self.pack.split(name) for name in self.pack.manifest.splits}
        return {name: Sides(split.column("source"), split.column("target")) for name, split in splits.items()}

    @property
    def sides(self) -> dict[str, Sides]:
        """What the model sees of each split."""
        return self._whole

    @property
    def costs(self) -> NDArray[np.int64]:
        return self.sides["train"].target.lengths - 1  # the beginning is not predicted

    @property
    def likeness(self) -> NDArray[np.int64]:
        train = self.sides["train"]
        return likeness(train.source.lengths, train.target.lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The positions that a sample takes on its longer side."""
        train = self.sides["train"]
        return np.maximum(train.source.lengths, train.target.lengths)

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:  # noqa: ARG002 - no augmentation
        return self._batch("train", ids)

    def _batch(self, split: str, ids: Ids) -> dict[str, NDArray[Any]]:
        """`wanted` has the places that are predicted, row by row: to find them on a GPU, the host would wait for it."""
        sides = self.sides[split]
        target = pad(sides.target, ids, PAD)
        return {"source": pad(sides.source, ids, PAD), "target": target, "wanted": np.flatnonzero(target[:, 1:] != PAD)}

    def count(self, split: str) -> int:
        return len(self.sides[split].target) if split in self.sides else 0

    # Loss and measures.

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch, self.job.train.label_smoothing)

    @staticmethod
    def _loss(model: nn.Module, batch: Batch, label_smoothing: float) -> Tensor:
        from torch.nn.functional import cross_entropy

        target, wanted = batch["target"], batch["wanted"]
        logits = model(batch["source"], target[:, :-1], wanted)
        answers = target[:, 1:].flatten()[wanted]
        return cross_entropy(logits.float(), answers, label_smoothing=label_smoothing, reduction="sum")

    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        import torch

        device = next(model.parameters()).device
        sides = self.sides[request.split]
        loss, tokens = 0.0, 0
        with torch.inference_mode():
            for part in parts_of(request.ids, sides.target.lengths, _MEASURE_TOKENS):
                request.on_batch()
                batch = {
                    name: torch.from_numpy(rows).to(device) for name, rows in self._batch(request.split, part).items()
                }
                loss += float(self._loss(model, batch, label_smoothing=0.0))
                tokens += int((sides.target.lengths[part] - 1).sum())
        sums = {"loss": loss, "tokens": float(tokens)}
        decoding = replace(self.decoding, beam=request.beam)
        return Measurement(
            sums, self._written(model, sides.source, request.decode_ids, decoding, on_batch=request.on_batch)
        )

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        tokens = sum(part.sums["tokens"] for part in parts)
        loss = sum(part.sums["loss"] for part in parts) / max(1.0, tokens)
        outputs = [output for part in parts for output in part.outputs]
        wanted = self._texts(self._whole[split].target, decode_ids) if outputs else []
        inputs = self._texts(self.sides[split].source, decode_ids[:_SHOWN_SAMPLES])
        samples = tuple(Sample(*texts) for texts in zip(inputs, wanted, outputs, strict=False))
        return replace(self.grade(loss, wanted, outputs), samples=samples)

    def _texts(self, rows: Ragged | Column, ids: Ids) -> list[str]:
        """Rows as people read them; texts that follow each other in one row are told apart."""
        return [self._text(rows[sample].tolist()) for sample in ids.tolist()]

    def _text(self, row: list[int]) -> str:
        ends = [place for place, token in enumerate(row) if token == EOS] or [len(row)]
        texts = [row[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
        return " / ".join(filter(None, self.pack.vocabulary.decode(texts)))

    # Outputs.

    def _written(
        self,
        model: nn.Module,
        source: Ragged | Column,
        ids: Ids,
        decoding: Decoding,
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[str]:
        import torch

        from packtrain.recipes.decode import decode

        texts: dict[int, str] = {}
        for part in parts_of(ids, source.lengths, _DECODE_TOKENS // decoding.beam):
            on_batch()
            rows = torch.from_numpy(pad(source, part, PAD)).to(next(model.parameters()).device)
            written = decode(_transformer(model), rows, self.limits(rows), decoding, part.tolist())
            texts.update(zip(part.tolist(), self.pack.vocabulary.decode(written), strict=True))
        return [texts[sample] for sample in ids.tolist()]

    def predict(self, model: nn.Module, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]:
        outputs = self.answers(model, self.encoded(inputs), decoding)
        return [Prediction(output, note=self.note(text)) for text, output in zip(inputs, outputs, strict=True)]

    def note(self, text: str) -> str:
        """What a person should know of how a text is read; mostly nothing."""
        strange = self.pack.vocabulary.is_strange(text)
        return "its characters were hardly ever in the training data" if strange else ""

    def answers(self, model: nn.Module, rows: Sequence[Sequence[int]], decoding: Decoding) -> list[str]:
        """What the model writes to every row; nothing to one that is but an end."""
        source = Ragged.from_rows(rows, np.dtype("<u4"))
        filled = np.flatnonzero(source.lengths > 1)
        outputs = dict(zip(filled.tolist(), self._written(model, source, filled, decoding), strict=True))
        return [outputs.get(number, "") for number in range(len(rows))]

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of texts as sources; those of blank ones are but an end."""
        encoded = self.pack.vocabulary.encode(texts)
        rows = [[*row, EOS] if text.strip() else [EOS] for text, row in zip(texts, encoded, strict=True)]
        for number, (text, row) in enumerate(zip(texts, rows, strict=True), 1):
            if len(row) > _LONGEST_INPUT:
                which = f"text {number} of {len(texts):,}" if len(texts) > 1 else "a text"
                raise Mistake(f"{which} has {len(row):,} pieces, more than {_LONGEST_INPUT:,}: {text[:40]!r}...")
        return rows


def _transformer(model: nn.Module) -> Transformer:
    from packtrain.recipes.transformer import Transformer

    assert isinstance(model, Transformer)
    return model


def parts_of(ids: Ids, lengths: NDArray[np.int64], budget: int) -> list[Ids]:
    """`ids` by length in parts of at most `budget` padded positions, one sample at the least."""
    ordered = ids[np.argsort(lengths[ids], kind="stable")]
    parts, start = [], 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or (end + 1 - start) * lengths[ordered[end]] > budget:
            parts.append(ordered[start:end])
            start = end
    return parts
