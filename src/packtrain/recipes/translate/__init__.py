"""Translation: a Transformer from sentence to sentence, measured by SacreBLEU on what it writes freely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.data.split import Column
from packtrain.data.text import likeness, pad
from packtrain.errors import Mistake
from packtrain.job import Job
from packtrain.pack.shard import Ragged
from packtrain.pack.vocabulary import EOS, PAD
from packtrain.recipes.recipe import Batch, Measured, Recipe, Scores
from packtrain.recipes.translate.shape import shape_of
from packtrain.runs import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

_DECODE_TOKENS = 4096  # source tokens decoded together: bounds the memory of a search
_MEASURE_TOKENS = 8192
_SHOWN_SAMPLES = 5
_LONGEST_INPUT = 1000


class Translate(Recipe):
    unit = "tokens"
    sources = frozenset({"bitext", "folder"})
    kind = "pairs"
    measure_of_best = "bleu"
    defaults: ClassVar[Mapping[str, object]] = {
        "data": {"vocabulary": 32768},
        "model": "base",
        "train": {
            "duration": "50000 steps",
            "batch": "25000 tokens",
            "optimizer": {"adam": {"betas": [0.9, 0.997], "epsilon": 1e-9}},
            "schedule": {"noam": {"warmup": "8000 steps", "scale": 2.0}},
            "label_smoothing": 0.1,
            "clip": 1.0,
        },
        "evaluate": {"every": "1000 steps"},
    }

    @classmethod
    def check(cls, job: Job) -> None:
        shape_of(job.model)

    @property
    def width(self) -> int:
        return shape_of(self.job.model).width

    @cached_property
    def _columns(self) -> dict[str, dict[str, Column]]:
        splits = {name: self.pack.split(name) for name in self.pack.manifest.splits}
        return {name: {side: split.column(side) for side in ("source", "target")} for name, split in splits.items()}

    @property
    def costs(self) -> NDArray[np.int64]:
        return self._columns["train"]["target"].lengths - 1  # a target of BOS ... EOS is predicted but for BOS

    @property
    def likeness(self) -> NDArray[np.int64]:
        columns = self._columns["train"]
        return likeness(columns["source"].lengths, columns["target"].lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The positions that a sample takes on its longer side."""
        columns = self._columns["train"]
        return np.maximum(columns["source"].lengths, columns["target"].lengths)

    def batch(self, ids: Ids) -> dict[str, NDArray[Any]]:
        return self._batch("train", ids)

    def _batch(self, split: str, ids: Ids) -> dict[str, NDArray[Any]]:
        columns = self._columns[split]
        return {"source": pad(columns["source"], ids, PAD), "target": pad(columns["target"], ids, PAD)}

    def build_model(self) -> nn.Module:
        from packtrain.recipes.translate.model import Transformer

        return Transformer(shape_of(self.job.model), len(self.pack.vocabulary))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch, self.job.train.label_smoothing)

    @staticmethod
    def _loss(model: nn.Module, batch: Batch, label_smoothing: float) -> Tensor:
        from torch.nn.functional import cross_entropy

        target = batch["target"]
        wanted = target[:, 1:] != PAD
        logits = model(batch["source"], target[:, :-1], wanted)
        return cross_entropy(logits.float(), target[:, 1:][wanted], label_smoothing=label_smoothing, reduction="sum")

    def count(self, split: str) -> int:
        return len(self._columns[split]["target"]) if split in self._columns else 0

    def measure(self, model: nn.Module, split: str, ids: Ids, decoded: Ids, beam: int) -> Measured:
        import torch

        device = next(model.parameters()).device
        columns = self._columns[split]
        loss, tokens = 0.0, 0
        with torch.inference_mode():
            for part in _parts(ids, columns["target"].lengths, _MEASURE_TOKENS):
                batch = {name: torch.from_numpy(rows).to(device) for name, rows in self._batch(split, part).items()}
                loss += float(self._loss(model, batch, label_smoothing=0.0))
                tokens += int((columns["target"].lengths[part] - 1).sum())
        sums = {"loss": loss, "tokens": float(tokens)}
        return Measured(sums, self._decode(model, columns["source"], decoded, beam))

    def _decode(self, model: nn.Module, source: Ragged | Column, ids: Ids, beam: int) -> list[str]:
        import torch

        from packtrain.recipes.translate.decode import translate
        from packtrain.recipes.translate.model import Transformer

        assert isinstance(model, Transformer)
        device = next(model.parameters()).device
        texts: dict[int, str] = {}
        for part in _parts(ids, source.lengths, _DECODE_TOKENS // beam):
            rows = translate(model, torch.from_numpy(pad(source, part, PAD)).to(device), beam)
            texts.update(zip(part.tolist(), self.pack.vocabulary.decode(rows), strict=True))
        return [texts[sample] for sample in ids.tolist()]

    def score(self, split: str, decoded: Ids, parts: Sequence[Measured]) -> Scores:
        tokens = sum(part.sums["tokens"] for part in parts)
        values = {"loss": sum(part.sums["loss"] for part in parts) / max(1.0, tokens)}
        outputs = [output for part in parts for output in part.outputs]
        if not outputs:
            return Scores(values)
        from sacrebleu.metrics.bleu import BLEU

        wanted = self._texts(split, "target", decoded)
        bleu = BLEU()
        values["bleu"] = bleu.corpus_score(outputs, [wanted]).score
        shown = decoded[:_SHOWN_SAMPLES]
        inputs = self._texts(split, "source", shown)
        samples = tuple(Sample(*texts) for texts in zip(inputs, wanted, outputs, strict=False))
        return Scores(values, {"bleu": str(bleu.get_signature())}, samples)

    def _texts(self, split: str, column: str, ids: Ids) -> list[str]:
        rows = self._columns[split][column]
        return self.pack.vocabulary.decode([rows[sample].tolist() for sample in ids.tolist()])

    def predict(self, model: nn.Module, inputs: Sequence[str], beam: int) -> list[str]:
        rows = [[*row, EOS] for row in self.pack.vocabulary.encode(inputs)]
        for text, row in zip(inputs, rows, strict=True):
            if len(row) > _LONGEST_INPUT:
                raise Mistake(f"a sentence has {len(row):,} pieces, more than {_LONGEST_INPUT:,}: {text[:40]!r}...")
        source = Ragged.from_rows(rows, np.dtype("<u4"))
        filled = np.flatnonzero([bool(text.strip()) for text in inputs])
        outputs = dict(zip(filled.tolist(), self._decode(model, source, filled, beam), strict=True))
        return [outputs.get(number, "") for number in range(len(inputs))]


def _parts(ids: Ids, lengths: NDArray[np.int64], budget: int) -> list[Ids]:
    """`ids` by length in parts of at most `budget` padded positions, one sample at the least."""
    ordered = ids[np.argsort(lengths[ids], kind="stable")]
    parts, start = [], 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or (end + 1 - start) * lengths[ordered[end]] > budget:
            parts.append(ordered[start:end])
            start = end
    return parts
