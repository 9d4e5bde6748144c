"""Translation: a Transformer from sentence to sentence, measured by SacreBLEU and chrF on what it writes freely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from packtrain.job.job import Job
from packtrain.pack.vocabulary import PAD
from packtrain.recipes.pairs import PairRecipe
from packtrain.recipes.recipe import Scores
from packtrain.recipes.shapes import Shape, read_shape
from packtrain.recipes.translate.shape import SIZES

if TYPE_CHECKING:
    from torch import Tensor, nn

_LONGER_THAN_SOURCE = 50  # a translation has at most this many tokens more than its source


class Translate(PairRecipe):
    contents = frozenset({"pairs"})
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
    def shape_of(cls, job: Job) -> Shape:
        return read_shape(job.model, SIZES)

    def build_model(self) -> nn.Module:
        from packtrain.recipes.transformer import Transformer

        return Transformer(self.shape_of(self.job), len(self.pack.vocabulary))

    def limits(self, source_BS: Tensor) -> Tensor:
        return (source_BS != PAD).sum(1) + _LONGER_THAN_SOURCE

    def grade(self, loss: float, wanted: Sequence[str], outputs: Sequence[str]) -> Scores:
        if not outputs:
            return Scores({"loss": loss})
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        metrics = {"bleu": BLEU(), "chrf": CHRF()}
        values = {name: metric.corpus_score(outputs, [wanted]).score for name, metric in metrics.items()}
        signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
        return Scores({"loss": loss, **values}, signatures)
