"""Image classification with a residual network, scored by top-1 and top-5 accuracy."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from packtrain.data.augment import PAIR, AugmentedBatches, mixes_of, swapped
from packtrain.data.images import ImageBatches, RectangularBatch, center_box, rectangular_plan, resize
from packtrain.data.order import Ids, block
from packtrain.data.pack import Pack
from packtrain.data.threads import in_threads, num_threads
from packtrain.errors import Mistake
from packtrain.job.job import EpochSettings, Job, ModelSettings
from packtrain.pack.tiles import Pixels, Tiled
from packtrain.recipes.images import RESNETS, ImageInput, ImageRecipe, ResNetShape, decode_box, resnet_size
from packtrain.recipes.pretrained import PIXELS, load_pretrained, pretrained_notes
from packtrain.recipes.recipe import (
    MAX_SHOWN,
    SHOWN_SAMPLES,
    Batch,
    Decoding,
    EvaluationRequest,
    Measurement,
    ModelSize,
    Network,
    Prediction,
    Rows,
    Scores,
    TaskWords,
    read_options,
)
from packtrain.recipes.statistics import Statistic, mean, rows_in_order
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

    from packtrain.recipes.graphs import Graph
    from packtrain.recipes.onnx import Session

EVALUATION_BATCH = 64
"""Images that an evaluation computes together."""
_TOP = 5
_MAX_WORDS_BYTES = 10_000_000

# Tiny learns images of about 32 pixels in minutes on two CPU cores; zero-initialized residuals would slow its start.
SIZES: Mapping[str, ResNetShape] = {
    "tiny": ResNetShape("basic", (1, 1, 1, 1), 32, "small", zero_init_residual=False),
    **RESNETS,
}


@dataclass(frozen=True)
class ClassifierOptions:
    """Options of the model: `weights` is a file of pretrained weights, `words` one with names of the classes.

    `pixels` is how images were normalized when those weights were trained.
    """

    width: int
    stem: str
    weights: str = ""
    pixels: str = "imagenet"
    words: str = ""


OPTIONS = {name: ClassifierOptions(shape.width, shape.stem) for name, shape in SIZES.items()}


CHOICES = {"stem": ("large", "small"), "pixels": tuple(PIXELS)}


def classifier_options(model: ModelSettings) -> ClassifierOptions:
    return read_options(model, OPTIONS, CHOICES)


def _resnet_shape(model: ModelSettings) -> ResNetShape:
    options = classifier_options(model)
    return replace(SIZES[model.size], width=options.width, stem=options.stem)


class Guess(NamedTuple):
    """The label of an image, and what the model took it for."""

    label: int
    guess: int
    confidence: float


class ClassifierNetwork(Network):
    @abstractmethod
    def logits(self, pixels: Pixels) -> NDArray[np.float32]:
        """Return the logits of images, bytes [N, height, width, RGB]: [N, classes]."""


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


class Classify(ImageRecipe[ImageBatches]):
    contents = frozenset({"labels"})
    kind = "labels"
    best_metric = "top1"
    limits: ClassVar[Mapping[str, float]] = {"top1": 100, "top5": 100}
    tolerances: ClassVar[Mapping[str, float]] = {"top1": 0.5}
    files = ("weights", "words")
    rows: ClassVar[Rows] = {"fc.weight": "classes", "fc.bias": "classes"}
    decode_options = frozenset()
    supports_augment = True
    sizes = OPTIONS
    words = TaskWords(hub_task="image-classification")
    choices = CHOICES
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
    # Smaller crops of an image of 32 pixels show hardly anything.
    size_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {"tiny": {"size": 32, "min_scale": 0.6}}

    def __init__(self, job: Job, pack: Pack) -> None:
        augment = job.train.augment
        make = ImageBatches if augment is None else partial(AugmentedBatches, settings=augment)
        super().__init__(job, pack, make)
        self._mixing = augment if augment is not None and augment.mixes else None
        self._options = classifier_options(job.model)
        self._shape = _resnet_shape(job.model)

    @classmethod
    def check(cls, job: Job) -> None:
        classifier_options(job.model)

    @classmethod
    def check_files(cls, job: Job, files: Mapping[str, Path], classes: Sequence[str]) -> Sequence[str]:
        return pretrained_notes(files, _resnet_shape(job.model), len(classes))

    # Data.

    @property
    def group(self) -> int:
        return 1 if self._mixing is None else PAIR

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        settings, seed = self.job.train.in_epoch(epoch), self.job.train.seed
        batches = self.copies.batches("train", settings.size)
        pixels = batches.random(ids, seed, epoch, settings.size, settings.min_scale, repeats)
        labels = self._labels("train", settings.size, ids)
        if self._mixing is None:
            return {"pixels": pixels, "label": labels}
        mixes = mixes_of(self._mixing, settings.size, seed, epoch, ids, repeats)
        weights = np.array([mix.weight for mix in mixes], np.float32)
        return {"pixels": pixels, "label": labels, "other_label": swapped(labels), "weight": weights}

    def _labels(self, split: str, size: int, ids: Ids) -> NDArray[np.int64]:
        places = map(self.copies.reader(split, size).at, ids.tolist())
        return np.fromiter((shard.plain["label"][row] for shard, row in places), np.int64, len(ids))

    # The model.

    @classmethod
    def size(cls, job: Job, vocabulary: int, classes: int) -> ModelSize:  # noqa: ARG003
        shape = _resnet_shape(job.model)
        size, last = resnet_size(shape, job.train.in_epoch(0).size), (shape.features + 1) * classes
        return replace(size, parameters=size.parameters + last, trained=size.trained + last)

    @property
    def width(self) -> int:
        return self._shape.features

    def build_model(self) -> nn.Module:
        from packtrain.recipes.resnet import ResNet

        return ResNet(self._shape, len(self.pack.manifest.classes))

    def initial_weights(self, model: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        if not (options := self._options).weights:
            return {}
        path, classes = self.pack.given_file(options.weights), len(self.pack.manifest.classes)
        return load_pretrained(path, self._shape, classes, options.pixels)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        from packtrain.recipes.resnet import normalize

        logits, smoothing = model(normalize(batch["pixels"])).float(), self.job.train.label_smoothing
        if self._mixing is None:
            return cross_entropy(logits, batch["label"], label_smoothing=smoothing, reduction="sum")
        # A cross-entropy is linear in its target, with smoothing too: that of the mix is the mix of both.
        label_loss, partner_loss = (
            cross_entropy(logits, batch[name], label_smoothing=smoothing, reduction="none")
            for name in ("label", "other_label")
        )
        return partner_loss.lerp(label_loss, batch["weight"]).sum()

    # Evaluation.

    def divide(self, split: str, num_ranks: int) -> list[Ids]:
        """Divide a split into contiguous parts; rectangular batches are the same for any number of workers."""
        if not self.final_settings.rectangular or not self.count(split):
            return super().divide(split, num_ranks)
        plan = self._plan(split, np.arange(self.count(split)), self.final_settings)
        none = np.zeros(0, np.int64)
        return [
            np.concatenate([none, *(plan[number].ids for number in block(len(plan), rank, num_ranks))])
            for rank in range(num_ranks)
        ]

    def _plan(self, split: str, ids: Ids, settings: EpochSettings) -> list[RectangularBatch]:
        size = settings.size
        if settings.rectangular:
            reader = self.copies.reader(split, size)
            widths, heights = reader.plain("width")[ids], reader.plain("height")[ids]
            plan = rectangular_plan(widths, heights, size, EVALUATION_BATCH)
            return [RectangularBatch(ids[batch.ids], batch.height, batch.width) for batch in plan]
        starts = range(0, len(ids), EVALUATION_BATCH)
        return [RectangularBatch(ids[start : start + EVALUATION_BATCH], size, size) for start in starts]

    def measure(self, model: nn.Module | Network, request: EvaluationRequest) -> Measurement:
        split, settings, network = request.split, self.job.train.in_epoch(request.epoch), _network(model)
        counted = self._plan(split, request.ids, settings)
        # A report shows only the first few of these. Their loss may be another worker's to count.
        shown = request.decode_ids if request.by_sample else request.decode_ids[:SHOWN_SAMPLES]
        uncounted = self._plan(split, np.setdiff1d(shown, request.ids), settings)
        sums = {"samples": float(len(request.ids)), "loss": 0.0, "top1": 0.0, "top5": 0.0, "confidence": 0.0}
        guesses: dict[int, Guess] = {}
        measured: list[tuple[Ids, dict[str, NDArray[Any]]]] = []
        batches = self.copies.batches(split, settings.size)
        for number, batch in enumerate([*counted, *uncounted]):
            request.on_batch()
            logits = network.logits(batches.centered(batch.ids, batch.height, batch.width))
            best = np.argsort(-logits, axis=1, kind="stable")[:, :_TOP]
            likely, labels = log_softmax(logits), self._labels(split, settings.size, batch.ids)
            chances = np.exp(np.take_along_axis(likely, best[:, :1], 1)[:, 0])
            batch_guesses = map(Guess, labels.tolist(), best[:, 0].tolist(), chances.tolist())
            guesses.update(zip(batch.ids.tolist(), batch_guesses, strict=True))
            if number < len(counted):
                right = best == labels[:, None]
                losses = -np.take_along_axis(likely, labels[:, None], 1)[:, 0]
                values = {"loss": losses, "top1": right[:, 0], "top5": right.any(axis=1), "confidence": chances}
                for name, column in values.items():
                    sums[name] += float(column.sum())
                measured.append((batch.ids, values))
        rows = rows_in_order(request.ids, measured) if request.by_sample else {}
        names = [self.labels[guesses[sample].guess] for sample in shown.tolist()]
        outputs = names + [""] * (len(request.decode_ids) - len(shown))
        if request.show_ids is None:
            return Measurement(sums, outputs, rows)
        samples, pictures = self.pictured(split, settings.size, self._worth_showing(guesses, request.show_ids))
        return Measurement(sums, outputs, rows, samples, pictures)

    def _worth_showing(self, guesses: Mapping[int, Guess], always: Ids) -> dict[int, Sample]:
        """Return the samples that are `always`, and the wrong guesses that the model is most certain of."""
        wrong = [sample for sample, guess in guesses.items() if guess.guess != guess.label]
        wrong.sort(key=lambda sample: (-guesses[sample].confidence, sample))
        certain = [sample for sample in wrong if sample not in always]
        return {
            sample: Sample(
                f"image {sample}",
                self.labels[guesses[sample].label],
                self.labels[guesses[sample].guess],
                confidence=_finite(round(guesses[sample].confidence, 4)),
            )
            for sample in [*always.tolist(), *certain[: MAX_SHOWN - SHOWN_SAMPLES]]
        }

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        total = {name: sum(measured.sums[name] for measured in parts) for name in ("samples", "loss", "top1", "top5")}
        samples = max(1.0, total["samples"])
        values = {"loss": total["loss"] / samples, "top1": 100 * total["top1"] / samples}
        if len(self.labels) > _TOP:  # with fewer classes top-5 would always be 100
            values["top5"] = 100 * total["top5"] / samples
        counts = dict.fromkeys(values, int(total["samples"]))
        shown_samples = {sample: record for measured in parts for sample, record in measured.samples.items()}
        if shown_samples:
            return Scores(
                values, samples=_wrong_first(shown_samples, decode_ids[:SHOWN_SAMPLES].tolist()), counts=counts
            )
        predictions = [output for measured in parts for output in measured.outputs]
        shown = decode_ids[:SHOWN_SAMPLES]
        labels = self._labels(split, self.final_settings.size, shown).tolist() if predictions else []
        references = [self.labels[label] for label in labels]
        inputs = [f"image {sample}" for sample in shown.tolist()]
        rows = zip(inputs, references, predictions, strict=False)
        return Scores(values, samples=tuple(Sample(*row) for row in rows), counts=counts)

    def statistics(self, split: str, ids: Ids, measured: Measurement) -> dict[str, Statistic]:  # noqa: ARG002
        rows = measured.rows
        return {"loss": mean(rows["loss"]), "top1": mean(rows["top1"], 100), "top5": mean(rows["top5"], 100)}

    def sample_records(self, split: str, ids: Ids, measured: Measurement) -> Iterator[dict[str, Any]]:
        labels = self._labels(split, self.final_settings.size, ids).tolist()
        rows = zip(ids.tolist(), labels, measured.outputs, measured.rows["confidence"], strict=True)
        for sample, label, output, confidence in rows:
            place = self.place_of(split, sample)
            yield {**place, "reference": self.labels[label], "prediction": output, "confidence": confidence}

    # Predictions.

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in words if the job has a file of them."""
        path = self._options.words
        words = read_words(self.pack.given_file(path), "model.words") if path else {}
        return tuple(words.get(name, name) for name in self.pack.manifest.classes)

    @property
    def prediction_side(self) -> int | None:  # type: ignore[override]
        return self.copies.short_side(self.final_settings.size)

    def evaluated(self, split: str, ids: Ids, size: int) -> Pixels:
        return self.copies.batches(split, size).centered(ids, size, size)

    def graphs(self, model: nn.Module) -> Mapping[str, Graph]:
        from packtrain.recipes.classify.model import graphs_of
        from packtrain.recipes.resnet import ResNet

        assert isinstance(model, ResNet)
        return graphs_of(model)

    def onnx_network(self, session: Callable[[str], Session]) -> ClassifierNetwork:
        return OnnxClassifier(session("classifier"), len(self.labels))

    def predict(
        self,
        model: nn.Module | Network,
        inputs: Sequence[ImageInput],
        decoding: Decoding,  # noqa: ARG002
    ) -> list[Prediction]:
        network, images = _network(model), self.read_all(inputs)
        by_size: dict[tuple[int, int], list[int]] = {}
        for number, image in enumerate(images):
            by_size.setdefault(self._size_of(image), []).append(number)
        batches = [
            (size, numbers[start : start + EVALUATION_BATCH])
            for size, numbers in by_size.items()
            for start in range(0, len(numbers), EVALUATION_BATCH)
        ]

        def likely(batch: tuple[tuple[int, int], list[int]]) -> NDArray[np.float64]:
            (height, width), numbers = batch

            def crop(image: Tiled) -> Pixels:
                return resize(decode_box(image, center_box(image.width, image.height, width, height)), height, width)

            # Where batches have threads of their own, the images of one batch need no more.
            pixels = in_threads(crop, [images[number] for number in numbers], num_threads() // network.at_once)
            return np.exp(log_softmax(network.logits(np.stack(list(pixels)))))

        predictions: dict[int, Prediction] = {}
        for (_, numbers), chances in zip(batches, in_threads(likely, batches, network.at_once), strict=True):
            predictions.update(zip(numbers, map(self._top, chances), strict=True))
        return [predictions[number] for number in range(len(images))]

    def _size_of(self, image: Tiled) -> tuple[int, int]:
        """Return the height and width of the input for an image: as in the last evaluation, but alone in its batch."""
        settings = self.final_settings
        if not settings.rectangular:
            return settings.size, settings.size
        [batch] = rectangular_plan(np.array([image.width]), np.array([image.height]), settings.size, 1)
        return batch.height, batch.width

    def _top(self, likely: NDArray[np.float64]) -> Prediction:
        best = np.argsort(-likely, kind="stable")[:_TOP].tolist()
        return top_prediction([self.labels[label] for label in best], likely[best].tolist())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # a model that diverged is certain of nothing


def _wrong_first(samples: Mapping[int, Sample], always: Sequence[int]) -> tuple[Sample, ...]:
    """Return the samples that are `always` shown and the most certain mistakes, these first.

    The same for any number of workers: each of them gave its own most certain mistakes.
    """

    def certain_first(number: int) -> tuple[float, int]:
        return -(samples[number].confidence or 0.0), number

    certain = sorted(samples.keys() - set(always), key=certain_first)
    chosen = [*(number for number in always if number in samples), *certain[: MAX_SHOWN - SHOWN_SAMPLES]]
    right = [number for number in chosen if samples[number].prediction == samples[number].reference]
    wrong = sorted(set(chosen) - set(right), key=certain_first)
    return tuple(samples[number] for number in [*wrong, *right])


def _network(model: nn.Module | Network) -> ClassifierNetwork:
    if isinstance(model, ClassifierNetwork):
        return model
    from packtrain.recipes.classify.model import TorchClassifier

    return TorchClassifier(cast("nn.Module", model))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    normalized: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return normalized


def top_prediction(names: Sequence[str], probabilities: Sequence[float]) -> Prediction:
    best = list(zip(names, probabilities, strict=True))
    text = ", ".join(f"{name} {f'{chance:.0%}' if chance >= 0.01 else '< 1%'}" for name, chance in best)
    return Prediction(text, {"top5": [{"class": name, "probability": chance} for name, chance in best]})


def read_words(path: Path, field: str) -> dict[str, str]:
    """Read the first name of each class from lines such as `n02123045 tabby, tabby cat`, ImageNet's format.

    `field` is the job's field that named the file, for errors.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_WORDS_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise Mistake(f"{field}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Mistake(f"{field}: not UTF-8; each line must look like 'n02123045 tabby, tabby cat'") from None
    if len(text) > _MAX_WORDS_BYTES:
        raise Mistake(f"{field}: larger than {_MAX_WORDS_BYTES // 1_000_000} MB; this is not a list of class names")
    rows = (line.split(None, 1) for line in text.splitlines())
    return {row[0]: row[1].partition(",")[0].strip() for row in rows if len(row) == 2}
