"""An example of your own recipe: detect the language of a text. docs/recipes.md explains it.

torch is imported inside the methods, so that `packtrain run` can check the job on a machine without it.
"""

# ruff: noqa: ARG002 - methods have the arguments of the interface, used or not

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids
from packtrain.data.pack import pad
from packtrain.errors import FieldMistake
from packtrain.job import Job
from packtrain.pack.vocabulary import PAD
from packtrain.recipes import Batch, Decoding, EvaluationRequest, Measurement, Prediction, Recipe, Scores

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTHS = {"small": 16, "large": 128}


class Languages(Recipe):
    unit = "samples"  # of the batch size: texts
    contents = frozenset({"pairs"})  # a text and the name of its language
    kind = "pairs"
    best_metric = "accuracy"
    defaults: ClassVar[Mapping[str, object]] = {
        "data": {"vocabulary": 400},
        "model": "small",
        "train": {"batch": "64 samples", "schedule": {"constant": {"rate": 0.01}}},
    }

    @classmethod
    def check(cls, job: Job) -> None:
        if job.model.size not in WIDTHS:
            raise FieldMistake("model.size", f"no size {job.model.size!r}; use {', '.join(WIDTHS)}")

    # Data: token arrays of the pack, padded.

    @cached_property
    def _languages(self) -> list[str]:
        return sorted(set(self._targets("train", np.arange(self.count("train")))))

    def _targets(self, split: str, ids: Ids) -> list[str]:
        column = self.pack.split(split).column("target")
        return self.pack.target_vocabulary.decode([column[sample].tolist() for sample in ids.tolist()])

    def _batch(self, split: str, ids: Ids) -> dict[str, NDArray[Any]]:
        text = pad(self.pack.split(split).column("source"), ids, PAD)
        language = [self._languages.index(name) for name in self._targets(split, ids)]
        return {"text": text, "language": np.array(language, np.int64)}

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        return self._batch("train", ids)

    def count(self, split: str) -> int:
        return self.pack.manifest.splits[split].samples if split in self.pack.manifest.splits else 0

    @property
    def costs(self) -> NDArray[np.int64]:
        return np.ones(self.count("train"), np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.pack.split("train").column("source").lengths

    @property
    def sort_keys(self) -> NDArray[np.int64]:
        return self.lengths

    # The model: the mean of the token embeddings, and a linear layer.

    @property
    def width(self) -> int:
        return WIDTHS[self.job.model.size]

    def build_model(self) -> nn.Module:
        from torch import nn

        embedding = nn.EmbeddingBag(len(self.pack.vocabulary), self.width, padding_idx=PAD)
        return nn.Sequential(embedding, nn.Linear(self.width, len(self._languages)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch["text"]), batch["language"], reduction="sum")

    # Evaluation: each worker sums over its part, `score` combines the parts.

    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        import torch
        from torch.nn.functional import cross_entropy

        device = next(model.parameters()).device
        sums = {"samples": float(len(request.ids)), "loss": 0.0, "right": 0.0}
        for start in range(0, len(request.ids), 256):
            request.on_batch()
            arrays = self._batch(request.split, request.ids[start : start + 256])
            batch = {name: torch.from_numpy(rows).to(device) for name, rows in arrays.items()}
            with torch.inference_mode():
                logits = model(batch["text"])
            sums["loss"] += float(cross_entropy(logits, batch["language"], reduction="sum"))
            sums["right"] += float((logits.argmax(1) == batch["language"]).sum())
        return Measurement(sums, [])

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        samples, loss, right = (sum(part.sums[name] for part in parts) for name in ("samples", "loss", "right"))
        values = {"loss": loss / samples, "accuracy": 100 * right / samples}
        return Scores(values, counts=dict.fromkeys(values, int(samples)))

    # Predictions, for `packtrain predict`.

    def predict(self, model: nn.Module, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]:
        import torch

        device = next(model.parameters()).device
        predictions = []
        for row in self.pack.vocabulary.encode(inputs):
            with torch.inference_mode():
                probabilities = model(torch.tensor([row or [PAD]], device=device)).softmax(1)[0]
            best = int(probabilities.argmax())
            predictions.append(Prediction(f"{self._languages[best]} {float(probabilities[best]):.0%}"))
        return predictions
