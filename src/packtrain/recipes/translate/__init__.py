"""Translation with a Transformer, scored by SacreBLEU and chrF on decoded outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from packtrain.job import Job
from packtrain.pack.words import count_letters
from packtrain.recipes.pairs import PairRecipe, TransformerShape, read_shape
from packtrain.recipes.recipe import Scores, TaskWords
from packtrain.recipes.statistics import Statistic, bleu_rows, bleu_statistic, chrf_statistic

if TYPE_CHECKING:
    from torch import nn

EXTRA_TOKENS = 50  # that a translation may have beyond the length of its source

# Tiny learns in minutes on two CPU cores; there it sees its data once or twice, and dropout only slows it down.
SIZES: Mapping[str, TransformerShape] = {
    "tiny": TransformerShape(128, 4, 512, 3, 2, 0.0, 0.0),
    "small": TransformerShape(256, 4, 1024, 3, 3, 0.1, 0.0),
    "base": TransformerShape(512, 8, 2048, 6, 6, 0.1, 0.1),
    "big": TransformerShape(1024, 16, 4096, 6, 6, 0.3, 0.1),
}


class Translate(PairRecipe):
    contents = frozenset({"pairs"})
    best_metric = "bleu"
    score_packages = ("sacrebleu",)
    limits: ClassVar[Mapping[str, float]] = {"bleu": 100, "chrf": 100}
    forms: ClassVar[Mapping[str, str]] = {
        "ctranslate2": "packtrain.recipes.translate.ctranslate2:Ctranslate2Form",
        **PairRecipe.forms,
    }
    tolerances: ClassVar[Mapping[str, float]] = {"bleu": 0.3}
    sizes = SIZES
    words = TaskWords("translation", "translate", "translating", "translated", "translation")
    defaults: ClassVar[Mapping[str, object]] = {
        "data": {"vocabulary": 32768},
        "model": "base",
        "train": {
            "duration": "50000 steps",
            "batch": "25000 tokens",
            "optimizer": {"adam": {"betas": [0.9, 0.997], "epsilon": 1e-9}},
            "schedule": {"noam": {"warmup": "8000 steps", "scale": 2.0, "share": 0.2}},
            "label_smoothing": 0.1,
            "clip": 1.0,
        },
        "evaluate": {"every": "1000 steps"},
    }
    # A small model can take higher rates, and its runs are too short for them to become low at the end.
    size_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {"schedule": {"noam": {"warmup": "8000 steps", "scale": 3.0, "share": 0.2}}, "ema": 0.99}
    }

    @classmethod
    def shape_of(cls, job: Job) -> TransformerShape:
        return read_shape(job.model, SIZES)

    def build_model(self) -> nn.Module:
        from packtrain.recipes.transformer import Transformer

        return Transformer(self.shape_of(self.job), len(self.pack.vocabulary))

    def max_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths + EXTRA_TOKENS

    def grade(self, loss: float, references: Sequence[str], outputs: Sequence[str]) -> Scores:
        if not outputs:
            return Scores({"loss": loss})
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        metrics = {"bleu": BLEU(tokenize=bleu_tokenizer(references)), "chrf": CHRF()}
        values = {name: metric.corpus_score(outputs, [references]).score for name, metric in metrics.items()}
        signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
        return Scores({"loss": loss, **values}, signatures)

    def grade_statistics(
        self,
        rows: Mapping[str, Sequence[float]],  # noqa: ARG002
        references: Sequence[str],
        outputs: Sequence[str],
    ) -> dict[str, Statistic]:
        counts = bleu_rows(outputs, [[text] for text in references], bleu_tokenizer(references))
        return {"bleu": bleu_statistic(counts), "chrf": chrf_statistic(outputs, references)}


def bleu_tokenizer(references: Sequence[str]) -> str:
    """Return SacreBLEU's tokenizer for the script of the references.

    Its default splits at spaces, so that a sentence of Chinese, Japanese or Thai would be a single word. For Japanese
    it has a better one than characters, but that needs a dictionary which may not be installed.
    """
    text = "".join("".join(references).split())
    han, kana, spaceless = count_letters(text)
    if 2 * (han + kana + spaceless) <= len(text):
        return "13a"
    return "zh" if han > 9 * (kana + spaceless) else "char"
