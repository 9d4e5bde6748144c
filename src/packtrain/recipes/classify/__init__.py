"""Classification: a residual network tells what a picture shows; its first and its first five guesses are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.images import ImageBatches, RectangularBatch, rectangular_plan
from packtrain.data.order import Ids, block
from packtrain.data.pack import Pack
from packtrain.job.job import Job
from packtrain.job.train import EpochSettings
from packtrain.pack.tiles import Pixels
from packtrain.recipes.classify.shape import classifier_of
from packtrain.recipes.classify.words import read_words
from packtrain.recipes.images import Copies, Pictured, middle_of, read_picture
from packtrain.recipes.recipe import Batch, Decoding, EvaluationRequest, Measurement, Prediction, Scores
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

_MEASURED_TOGETHER = 64
_GUESSES = 5
_SHOWN_SAMPLES = 5
_LAST_EPOCH = 1 << 40  # beyond all phases


class Classify(Pictured[ImageBatches]):
    contents = frozenset({"labels"})
    kind = "labels"
    measure_of_best = "top1"
    files = ("weights", "words")
    heeds = frozenset()
    defaults: ClassVar[Mapping[str, object]] = {
        "data": {},
        "model": "resnet50",
        "train": {
            "duration": "90 epochs",
            "batch": "256 samples",
            "optimizer": {"sgd": {"momentum": 0.9, "decay": 1e-4}},
            "schedule": {"cosine": {"peak": 0.1, "warmup": "5 epochs"}},
            "label_smoothing": 0.1,
        },
        "evaluate": {"every": "1 epochs"},
    }

    def __init__(self, job: Job, pack: Pack) -> None:
        super().__init__(job, pack)
        self._copies = Copies(pack, job.data.sizes, ImageBatches)

    @property
    def copies(self) -> Copies[ImageBatches]:
        return self._copies

    @classmethod
    def check(cls, job: Job) -> None:
        classifier_of(job.model)

    # The data.

    @property
    def width(self) -> int:
        return classifier_of(self.job.model).shape.features

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        settings = self.job.train.in_epoch(epoch)
        batches = self._copies.batches("train", settings.size)
        pixels = batches.random(ids, self.job.train.seed, epoch, settings.size, settings.min_scale, repeats)
        return {"pixels": pixels, "label": self._labels("train", settings.size, ids)}

    def _labels(self, split: str, size: int, ids: Ids) -> NDArray[np.int64]:
        places = map(self._copies.reader(split, size).at, ids.tolist())
        return np.fromiter((shard.plain["label"][row] for shard, row in places), np.int64, len(ids))

    # The model.

    def build_model(self) -> nn.Module:
        from packtrain.recipes.resnet import ResNet

        return ResNet(classifier_of(self.job.model).shape, len(self.pack.manifest.classes))

    def first_weights(self, model: nn.Module) -> dict[str, Tensor]:
        from packtrain.recipes.resnet import published

        weights = classifier_of(self.job.model).weights
        if weights is None:
            return {}
        return published(self.pack.given_file(weights), model.state_dict(), "model.weights")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        from packtrain.recipes.resnet import normalised

        logits = model(normalised(batch["pixels"])).float()
        return cross_entropy(logits, batch["label"], label_smoothing=self.job.train.label_smoothing, reduction="sum")

    # Evaluation.

    def divide(self, split: str, num_ranks: int) -> list[Ids]:
        """Contiguous parts; where batches are to be rectangular, of the same batches for any number of workers."""
        last = self.job.train.in_epoch(_LAST_EPOCH)
        if not last.rectangular or not self.count(split):
            return super().divide(split, num_ranks)
        batches = [batch.ids for batch in self._rectangular(split, np.arange(self.count(split)), last.size)]
        none = np.zeros(0, np.int64)
        return [
            np.concatenate([none, *(batches[number] for number in block(len(batches), rank, num_ranks))])
            for rank in range(num_ranks)
        ]

    def _rectangular(self, split: str, ids: Ids, size: int) -> list[RectangularBatch]:
        reader = self._copies.reader(split, size)
        widths, heights = reader.plain("width")[ids], reader.plain("height")[ids]
        plan = rectangular_plan(widths, heights, size, _MEASURED_TOGETHER)
        return [RectangularBatch(ids[batch.ids], batch.height, batch.width) for batch in plan]

    def _plan(self, split: str, ids: Ids, settings: EpochSettings) -> list[RectangularBatch]:
        if settings.rectangular:
            return self._rectangular(split, ids, settings.size)
        starts = range(0, len(ids), _MEASURED_TOGETHER)
        together = [ids[start : start + _MEASURED_TOGETHER] for start in starts]
        return [RectangularBatch(part, settings.size, settings.size) for part in together]

    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        import torch
        from torch.nn.functional import cross_entropy

        from packtrain.recipes.resnet import normalised

        split, ids = request.split, request.ids
        settings = self.job.train.in_epoch(request.epoch)
        device = next(model.parameters()).device
        counted = self._plan(split, ids, settings)
        # Only the first of these are ever shown; another worker may count them.
        shown = request.decode_ids[:_SHOWN_SAMPLES]
        others = self._plan(split, np.setdiff1d(shown, ids), settings)
        sums = {"samples": float(len(ids)), "loss": 0.0, "top1": 0.0, "top5": 0.0}
        guesses: dict[int, int] = {}
        batches = self._copies.batches(split, settings.size)
        for number, batch in enumerate([*counted, *others]):
            request.on_batch()
            pixels = torch.from_numpy(batches.centered(batch.ids, batch.height, batch.width)).to(device)
            with torch.inference_mode():
                logits = model(normalised(pixels)).float()
            best = logits.topk(min(_GUESSES, logits.shape[1])).indices
            guesses.update(zip(batch.ids.tolist(), best[:, 0].tolist(), strict=True))
            if number < len(counted):
                labels = torch.from_numpy(self._labels(split, settings.size, batch.ids)).to(device)
                right = best == labels[:, None]
                sums["loss"] += float(cross_entropy(logits, labels, reduction="sum"))
                sums["top1"] += float(right[:, 0].sum())
                sums["top5"] += float(right.sum())
        names = [self._names[guesses[sample]] for sample in shown.tolist()]
        return Measurement(sums, names + [""] * (len(request.decode_ids) - len(shown)))

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        total = {name: sum(part.sums[name] for part in parts) for name in ("samples", "loss", "top1", "top5")}
        samples = max(1.0, total["samples"])
        values = {"loss": total["loss"] / samples, "top1": 100 * total["top1"] / samples}
        if len(self._names) > _GUESSES:  # otherwise the first five are all there are
            values["top5"] = 100 * total["top5"] / samples
        outputs = [output for part in parts for output in part.outputs]
        shown = decode_ids[:_SHOWN_SAMPLES]
        size = self.job.train.in_epoch(_LAST_EPOCH).size
        wanted = [self._names[label] for label in self._labels(split, size, shown).tolist()] if outputs else []
        inputs = [f"picture {sample}" for sample in shown.tolist()]
        return Scores(values, samples=tuple(Sample(*row) for row in zip(inputs, wanted, outputs, strict=False)))

    # Predictions.

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """Of the classes, in words where there are some."""
        path = classifier_of(self.job.model).words
        words = {} if path is None else read_words(self.pack.given_file(path), "model.words")
        return tuple(words.get(name, name) for name in self.pack.manifest.classes)

    def predict(self, model: nn.Module, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]:  # noqa: ARG002
        import torch

        from packtrain.recipes.resnet import normalised

        device = next(model.parameters()).device
        found = []
        for path in inputs:
            pixels = torch.from_numpy(self._seen(path)[None]).to(device)
            with torch.inference_mode():
                found.append(model(normalised(pixels)).float().softmax(1)[0].topk(min(_GUESSES, len(self._names))))
        return [self._prediction(best.values.tolist(), best.indices.tolist()) for best in found]

    def _seen(self, path: str) -> Pixels:
        """A picture as those of the last evaluation were seen."""
        settings = self.job.train.in_epoch(_LAST_EPOCH)
        picture = read_picture(path, self._copies.short_side(settings.size))
        height = width = settings.size
        if settings.rectangular:
            sides = np.array([picture.width]), np.array([picture.height])
            [batch] = rectangular_plan(*sides, settings.size, 1)
            height, width = batch.height, batch.width
        return middle_of(picture, height, width)

    def _prediction(self, probabilities: list[float], classes: list[int]) -> Prediction:
        best = [(self._names[one], chance) for one, chance in zip(classes, probabilities, strict=True)]
        text = ", ".join(f"{name} {_percent(chance)}" for name, chance in best)
        return Prediction(text, {"top5": [{"class": name, "probability": chance} for name, chance in best]})


def _percent(chance: float) -> str:
    return f"{100 * chance:.0f} %" if chance >= 0.01 else "< 1 %"
