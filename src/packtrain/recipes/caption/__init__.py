"""Image captioning with Show, Attend and Tell, scored by BLEU and CIDEr on decoded captions."""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from packtrain.data.images import Crop, ImageBatches, random_crops, resize
from packtrain.data.order import Ids, Stream, philox_words
from packtrain.data.pack import Pack, pad
from packtrain.data.threads import in_threads, num_threads
from packtrain.errors import FieldMistake
from packtrain.job.job import Job, ModelSettings
from packtrain.pack.shard import Array, Ragged
from packtrain.pack.tiles import Box, Pixels, Tiled
from packtrain.pack.vocabulary import PAD
from packtrain.recipes.caption.scores import BLEU_SIGNATURE, CIDER_SIGNATURE, ORDERS, Cider, bleu_counts
from packtrain.recipes.images import RESNETS, ImageInput, ImageRecipe, ResNetShape, decode_box, resnet_size
from packtrain.recipes.pairs import LOGITS_HELD, padded_to_8
from packtrain.recipes.pretrained import PIXELS, load_pretrained, pretrained_notes
from packtrain.recipes.recipe import (
    PASSES,
    SHOWN_SAMPLES,
    Batch,
    Decoding,
    EvaluationRequest,
    Hypothesis,
    Measurement,
    ModelSize,
    Network,
    Prediction,
    Rows,
    Scores,
    TaskWords,
    read_options,
    text_prediction,
)
from packtrain.recipes.statistics import Statistic, bleu_statistic, mean, ratio, rows_in_order
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

    from packtrain.recipes.caption.model import Captioner
    from packtrain.recipes.graphs import Graph
    from packtrain.recipes.onnx import Session

MAX_CAPTION_TOKENS = 50
"""The longest caption that is decoded, with EOS."""
_USUAL_TOKENS = 12.0  # of a caption
_EVALUATION_BATCH = 32  # images: bounds the memory of an evaluation

# Tiny is for images of about 48 pixels, whose map then has 6 x 6 positions.
ENCODERS: Mapping[str, ResNetShape] = {
    "tiny": ResNetShape("basic", (1, 1), 64, zero_init_residual=False),
    **RESNETS,
}


@dataclass(frozen=True)
class CaptionerShape:
    """The encoder; the width of embedding, state and attention; and how the encoder learns.

    An encoder with pretrained `weights` is frozen for `frozen_epochs`; then its last `tuned_stages` are fine-tuned. A
    random encoder learns as a whole from the start. `pixels` is how images were normalized for those weights.
    """

    encoder: str
    width: int
    attention: int
    cell: str = "gru"
    dropout: float = 0.2
    penalty: float = 1.0
    weights: str = ""
    pixels: str = "imagenet"
    frozen_epochs: int = 5
    tuned_stages: int = 1

    @property
    def is_pretrained(self) -> bool:
        return bool(self.weights)

    def is_frozen(self, epoch: int) -> bool:
        return self.is_pretrained and (epoch < self.frozen_epochs or not self.tuned_stages)


SIZES: Mapping[str, CaptionerShape] = {
    "tiny": CaptionerShape("tiny", 160, 128),
    "resnet18": CaptionerShape("resnet18", 500, 500),
    "resnet50": CaptionerShape("resnet50", 500, 500),
    "resnet101": CaptionerShape("resnet101", 500, 500),
}


CHOICES = {"encoder": tuple(ENCODERS), "cell": ("gru", "lstm"), "pixels": tuple(PIXELS)}


def captioner_shape(model: ModelSettings) -> CaptionerShape:
    """Return the named size with the job's options applied."""
    shape = read_options(model, SIZES, CHOICES, may_be_zero=("frozen_epochs", "tuned_stages"))
    stages = len(ENCODERS[shape.encoder].depths)
    if shape.tuned_stages > stages:
        raise FieldMistake("model.tuned_stages", f"{shape.encoder} has {stages} stages")
    return shape


class CaptionBatches(ImageBatches):
    """Images that still match their captions: neither mirrored, nor cropped in an evaluation."""

    def random(
        self, ids: Ids, seed: int, epoch: int, size: int, min_scale: float, repeats: Ids | None = None
    ) -> Pixels:
        """Return random crops for training, not mirrored."""
        crop_of = random_crops(ids, min_scale, seed, epoch, repeats)
        return self._batch(ids, size, size, lambda *place: crop_of(*place)._replace(flip=False))

    def whole(self, ids: Ids, size: int) -> Pixels:
        """Return whole images for evaluation, squeezed into a square."""
        return self._batch(ids, size, size, lambda _, width, height: Crop(Box(0, 0, width, height)))


@dataclass(frozen=True)
class CaptionReferences:
    """The captions of a split as texts, and CIDEr's document frequencies over all of them.

    Each source of a mix has a CIDEr of its own, the same as if it were the only source.
    """

    texts: list[list[str]]
    cider: Cider
    by_source: dict[str, tuple[range, Cider]]


Encoded = TypeVar("Encoded")


class CaptionNetwork(Network, Generic[Encoded]):
    """A captioner; `Encoded` is what it makes of images, and nobody else looks into."""

    @abstractmethod
    def encode(self, pixels: Pixels) -> Encoded:
        """Encode bytes [B, height, width, RGB]."""

    @abstractmethod
    def search(self, encoded: Encoded, beam: int, n_best: int = 1) -> list[list[Hypothesis]]:
        """Return the best captions of each image."""

    @abstractmethod
    def losses(self, encoded: Encoded, images: Ids, captions: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the negative log-probability of each caption, padded, of the image with that number."""

    @abstractmethod
    def attention(self, encoded: Encoded, image: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the attention over the positions of an image for each token: [tokens, side, side]."""


class Caption(ImageRecipe[CaptionBatches]):
    """Batches are counted in samples, since an image has another of its captions in every epoch.

    The loss of a sample is the sum over its tokens, divided by the mean length of all captions: a constant, so that
    the mean over a batch does not depend on how the batch is divided.
    """

    contents = frozenset({"captions"})
    kind = "captions"
    best_metric = "cider"
    on_host = frozenset({"unfinished"})
    score_packages = ("sacrebleu",)
    tolerances: ClassVar[Mapping[str, float]] = {"cider": 3.0}
    files = ("weights",)
    rows: ClassVar[Rows] = {"embedding.weight": "pieces", "bias": "pieces"}
    decode_options = frozenset({"beam", "n_best"})
    decoding = Decoding(beam=5)
    sizes = SIZES
    words = TaskWords(hub_task="image-to-text")
    longest_output = MAX_CAPTION_TOKENS
    choices = CHOICES
    defaults: ClassVar[Mapping[str, object]] = {
        "data": {"vocabulary": 10000},
        "model": "resnet101",
        "train": {
            "duration": "15 epochs",
            "batch": "64 samples",
            "optimizer": {"adam": {"betas": [0.9, 0.999], "epsilon": 1e-8}},
            "schedule": {
                "phases": [
                    {"until": "5 epochs", "rate": 4e-4},
                    # Adam has no gradient history of the frozen encoder: its first steps would be several times too
                    # long, so the rate warms up again.
                    {"until": "5.2 epochs", "rate": [1e-5, 1e-4]},
                    {"until": "15 epochs", "rate": 1e-4},
                ],
            },
            "clip": 5.0,
            "min_scale": 0.7,
        },
        "evaluate": {"every": "1 epochs", "beam": 5},
    }
    size_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {"tiny": {"size": 48}}

    def __init__(self, job: Job, pack: Pack) -> None:
        super().__init__(job, pack, CaptionBatches)
        self._shape = captioner_shape(job.model)
        self._references: dict[str, CaptionReferences] = {}

    @classmethod
    def defaults_for(cls, model: Mapping[str, object]) -> Mapping[str, object]:
        defaults = super().defaults_for(model)
        if model.get("weights"):
            return defaults
        # The published rates are those of an encoder that was trained before. Without, it needs higher ones.
        peak = 2e-3 if model.get("size") == "tiny" else 1e-3
        schedule = {"cosine": {"peak": peak, "warmup": "1 epochs"}}
        return {**defaults, "train": {**cast("Mapping[str, object]", defaults["train"]), "schedule": schedule}}

    @classmethod
    def check(cls, job: Job) -> None:
        shape = captioner_shape(job.model)
        if job.train.optimizer.decay > 0 and shape.is_frozen(0) and shape.tuned_stages:
            raise FieldMistake(
                "train.optimizer", "weight decay would shrink the frozen encoder; remove it or set frozen_epochs to 0"
            )

    @classmethod
    def check_files(cls, job: Job, files: Mapping[str, Path], classes: Sequence[str]) -> Sequence[str]:  # noqa: ARG003
        return pretrained_notes(files, ENCODERS[captioner_shape(job.model).encoder], None)

    # Data.

    @cached_property
    def mean_tokens(self) -> float:
        """Mean tokens of a training caption, with EOS."""
        split = self.pack.split("train")
        captions = int(split.lengths("caption_lengths").sum())
        return float(split.lengths("captions").sum() - captions) / max(1, captions)

    def _captions(self, split: str, sample: int) -> list[Array]:
        shard, row = self.pack.split(split).at(sample)
        ends = np.cumsum(shard.ragged["caption_lengths"][row], dtype=np.int64)
        return np.split(shard.ragged["captions"][row], ends[:-1])

    def _choose_caption(self, sample: int, epoch: int, repeat: int) -> Array:
        captions = self._captions("train", sample)
        word = int(philox_words(1, self.job.train.seed, epoch, sample, Stream.CAPTIONS, turn=repeat)[0])
        return captions[word % len(captions)]

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        train = self.job.train
        settings = train.in_epoch(epoch)
        pixels = self.copies.batches("train", settings.size).random(
            ids, train.seed, epoch, settings.size, settings.min_scale, repeats
        )
        numbered = zip(ids.tolist(), np.zeros_like(ids) if repeats is None else repeats, strict=True)
        tokens = _padded([self._choose_caption(sample, epoch, int(repeat)) for sample, repeat in numbered])
        lengths = (tokens[:, 1:] != PAD).sum(axis=1)
        unfinished = (lengths[:, None] > np.arange(tokens.shape[1] - 1)).sum(axis=0)
        return {"pixels": pixels, "tokens": tokens, "unfinished": unfinished}

    # The model.

    @classmethod
    def size(cls, job: Job, vocabulary: int, classes: int) -> ModelSize:  # noqa: ARG003
        """Return the size with the memory of the epochs in which most of the encoder learns."""
        shape, pixels = captioner_shape(job.model), job.train.in_epoch(0).size
        encoder = ENCODERS[shape.encoder]
        size = resnet_size(encoder, pixels, shape.tuned_stages if shape.is_pretrained else None)
        channels, width, padded = encoder.features, shape.width, padded_to_8(vocabulary)
        gates, states = (3, 1) if shape.cell == "gru" else (4, 2)
        decoder = padded * width + padded + (channels + 1) * states * width
        decoder += (channels + 1) * shape.attention + (width + 1) * shape.attention + shape.attention
        decoder += (width + 1) * channels + gates * width * (2 * width + channels + 2)
        # A token keeps its logits, and for every position what the attention adds up there.
        positions = max(1, pixels // encoder.total_stride) ** 2
        token = LOGITS_HELD * padded + 2 * positions * shape.attention + 2 * channels + 2 * gates * width
        held = 4.0 * (_USUAL_TOKENS * token + positions * (channels + shape.attention))
        is_frozen = shape.is_frozen(0)
        forward = resnet_size(encoder, pixels, 0).flops
        return replace(
            size,
            parameters=size.parameters + decoder,
            trained=size.trained + decoder,
            flops=(forward if is_frozen else size.flops) + 2.0 * PASSES * _USUAL_TOKENS * decoder,
            activation_bytes=size.activation_bytes + held,
            block_flops=0.0 if is_frozen else size.block_flops,
            checkpointed_bytes=size.checkpointed_bytes + held,
        )

    @property
    def width(self) -> int:
        return self._shape.width

    def build_model(self) -> nn.Module:
        from packtrain.recipes.caption.model import Captioner

        return Captioner(self._shape, len(self.pack.vocabulary))

    def initial_weights(self, model: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        if not (shape := self._shape).is_pretrained:
            return {}
        path = self.pack.given_file(shape.weights)
        weights = load_pretrained(path, ENCODERS[shape.encoder], None, shape.pixels)
        return {f"encoder.{name}": tensor for name, tensor in weights.items()}

    def prepare(self, epoch: int, model: nn.Module) -> None:
        _captioner(model).encoder_is_frozen = self._shape.is_frozen(epoch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        forced = model(batch["pixels"], batch["tokens"], batch["unfinished"].tolist())
        smoothing = self.job.train.label_smoothing
        tokens = cross_entropy(forced.logits.float(), forced.labels, label_smoothing=smoothing, reduction="sum")
        # Doubly stochastic attention: over a caption, every position should be attended to once.
        penalty = (1 - forced.attention.float()).square().mean(1).sum()
        loss: Tensor = tokens / self.mean_tokens + self._shape.penalty * penalty
        return loss

    # Evaluation.

    def measure(self, model: nn.Module | Network, request: EvaluationRequest) -> Measurement:
        network = _network(model)
        loss, tokens, none = 0.0, 0, np.zeros(0, np.int64)
        measured: list[tuple[Ids, dict[str, NDArray[Any]]]] = []
        outputs: list[str] = []
        shown: dict[int, Sample] = {}
        for batch_ids, encoded in self._encode(network, request, request.ids):
            rows = [self._captions(request.split, sample) for sample in batch_ids.tolist()]
            captions = _padded([row for captions_of_image in rows for row in captions_of_image])
            images = np.repeat(np.arange(len(batch_ids)), [len(captions_of_image) for captions_of_image in rows])
            losses = network.losses(encoded, images, captions)
            lengths = (captions[:, 1:] != PAD).sum(axis=1)
            loss += float(losses.sum())
            tokens += int(lengths.sum())
            sums_by_image = {
                name: np.bincount(images, values) for name, values in (("loss", losses), ("tokens", lengths))
            }
            measured.append((batch_ids, sums_by_image))
        for batch_ids, encoded in self._encode(network, request, request.decode_ids):
            hypotheses = network.search(encoded, request.beam)
            outputs += self.pack.vocabulary.decode([best.tokens for best, *_ in hypotheses])
            for number in np.flatnonzero(
                np.isin(batch_ids, none if request.show_ids is None else request.show_ids)
            ).tolist():
                attention = network.attention(encoded, number, hypotheses[number][0].tokens)
                shown[int(batch_ids[number])] = self._sample(
                    request.split, int(batch_ids[number]), hypotheses[number][0], attention
                )
        by_sample = rows_in_order(request.ids, measured) if request.by_sample else {}
        samples, pictures = self.pictured(request.split, self.job.train.in_epoch(request.epoch).size, shown)
        sums = {"loss": loss, "tokens": float(tokens), "samples": float(len(request.ids))}
        return Measurement(sums, outputs, by_sample, samples, pictures)

    def _sample(self, split: str, number: int, caption: Hypothesis, attention: NDArray[np.float32]) -> Sample:
        """Return an image's captions and, for each word of the model's, where the model looked."""
        from packtrain.recipes.caption.attention import attention_by_word, grid_of

        decode = self.pack.vocabulary.decode
        references = decode([row.tolist() for row in self._captions(split, number)])
        by_word = attention_by_word(self.pack.vocabulary, caption.tokens, attention)
        grids = [grid_of(word.map) for word in by_word]
        return Sample(
            f"{split} image {number}",
            " / ".join(references),
            decode([caption.tokens])[0],
            words=tuple(word.word for word in by_word),
            attention=tuple(base64.b64encode(grid.tobytes()).decode() for grid in grids),
            attention_shape=next(((grid.shape[0], grid.shape[1]) for grid in grids), None),
        )

    def _encode(
        self, network: CaptionNetwork[Encoded], request: EvaluationRequest, ids: Ids
    ) -> Iterator[tuple[Ids, Encoded]]:
        size = self.job.train.in_epoch(request.epoch).size
        for start in range(0, len(ids), _EVALUATION_BATCH):
            request.on_batch()
            batch_ids = ids[start : start + _EVALUATION_BATCH]
            yield batch_ids, network.encode(self.evaluated(request.split, batch_ids, size))

    def evaluated(self, split: str, ids: Ids, size: int) -> Pixels:
        return self.copies.batches(split, size).whole(ids, size)

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        """Each source of a mix has scores of its own besides: those of a mix say little about its parts."""
        tokens = sum(measured.sums["tokens"] for measured in parts)
        values = {"loss": sum(measured.sums["loss"] for measured in parts) / max(1.0, tokens)}
        outputs = [output for measured in parts for output in measured.outputs]
        counts = {"loss": int(sum(measured.sums["samples"] for measured in parts))}
        if not outputs:
            return Scores(values, counts=counts)
        values |= {name: score.value for name, score in self._output_scores(split, decode_ids, outputs).items()}
        counts |= {name: len(outputs) for name in values if name not in counts}
        for name, (samples_of_source, _) in self.references(split).by_source.items():
            num_outputs = sum(sample in samples_of_source for sample in decode_ids.tolist())
            counts |= {key: num_outputs for key in (f"bleu4_{name}", f"cider_{name}") if key in values}
        shown = {number: sample for measured in parts for number, sample in measured.samples.items()}
        texts = self.references(split).texts
        samples = tuple(shown[number] for number in sorted(shown)) or tuple(
            Sample(f"{split} image {sample}", " / ".join(texts[sample]), output)
            for sample, output in zip(decode_ids[:SHOWN_SAMPLES].tolist(), outputs, strict=False)
        )
        return Scores(values, {"bleu4": BLEU_SIGNATURE, "cider": CIDER_SIGNATURE}, samples, counts)

    def statistics(self, split: str, ids: Ids, measured: Measurement) -> dict[str, Statistic]:
        loss = ratio(measured.rows["loss"], measured.rows["tokens"])
        return {"loss": loss, **self._output_scores(split, ids, measured.outputs)}

    def _output_scores(self, split: str, ids: Ids, outputs: Sequence[str]) -> dict[str, Statistic]:
        truth, samples = self.references(split), ids.tolist()
        references = [truth.texts[sample] for sample in samples]
        counts = bleu_counts(outputs, references)
        by_name = {f"bleu{order}": bleu_statistic(counts, order, smooth=False) for order in range(1, ORDERS + 1)}
        by_name["cider"] = mean([truth.cider.score_of(*texts) for texts in zip(outputs, references, strict=True)])
        for name, (samples_of_source, cider) in truth.by_source.items():
            # A resample has any number of samples of a source: those of others count nothing.
            mine = np.array([sample in samples_of_source for sample in samples])
            if mine.any():
                texts = zip(mine, outputs, references, strict=True)
                scores = [cider.score_of(output, captions) if is_mine else 0.0 for is_mine, output, captions in texts]
                by_name[f"bleu4_{name}"] = bleu_statistic(counts * mine[:, None], smooth=False)
                by_name[f"cider_{name}"] = ratio(scores, mine)
        return by_name

    def sample_records(self, split: str, ids: Ids, measured: Measurement) -> Iterator[dict[str, Any]]:
        texts = self.references(split).texts
        for sample, output in zip(ids.tolist(), measured.outputs, strict=True):
            yield {**self.place_of(split, sample), "references": texts[sample], "prediction": output}

    def references(self, split: str) -> CaptionReferences:
        """Return the captions of a whole split, however few of its samples are decoded."""
        if split not in self._references:
            rows = [self._captions(split, sample) for sample in range(self.count(split))]
            decoded = iter(self.pack.vocabulary.decode([row.tolist() for captions in rows for row in captions]))
            texts = [[next(decoded) for _ in captions] for captions in rows]
            ranges = self._ranges_by_source(split)
            ciders = [Cider(texts[samples.start : samples.stop]) for samples in ranges.values()]
            by_source = dict(zip(ranges, zip(ranges.values(), ciders, strict=True), strict=True))
            cider = Cider.joined(ciders) if ranges else Cider(texts)
            self._references[split] = CaptionReferences(texts, cider, by_source)
        return self._references[split]

    def _ranges_by_source(self, split: str) -> dict[str, range]:
        """Return the samples of each source of a mix by its kind, numbered if a kind comes twice."""
        kinds = [source.kind for source in getattr(self.job.data, split)]
        if len(kinds) < 2:
            return {}
        names = [kind if kinds.count(kind) == 1 else f"{kind}{number}" for number, kind in enumerate(kinds, 1)]
        ends = np.cumsum([0, *self.pack.manifest.splits[split].sources]).tolist()
        return {name: range(start, end) for name, (start, end) in zip(names, pairwise(ends), strict=True)}

    # Without torch.

    def graphs(self, model: nn.Module) -> Mapping[str, Graph]:
        from packtrain.recipes.caption.graphs import graphs_of

        return graphs_of(_captioner(model))

    def onnx_network(self, session: Callable[[str], Session]) -> CaptionNetwork[Any]:
        from packtrain.recipes.caption.onnx import OnnxCaptioner

        return OnnxCaptioner(session("encoder"), session("decoder"), len(self.pack.vocabulary))

    # Predictions.

    def predict(self, model: nn.Module | Network, inputs: Sequence[ImageInput], decoding: Decoding) -> list[Prediction]:
        """Return a caption for each image, with the attention of each word."""
        network, size = _network(model), self.final_settings.size
        images = self.read_all(inputs)
        predictions: list[Prediction] = []
        for start in range(0, len(images), _EVALUATION_BATCH):
            batch = images[start : start + _EVALUATION_BATCH]
            pixels = in_threads(lambda image: resize(_all_pixels(image), size, size), batch, num_threads())
            encoded = network.encode(np.stack(list(pixels)))
            hypotheses = network.search(encoded, decoding.beam, decoding.n_best)
            for number, (image, captions) in enumerate(zip(batch, hypotheses, strict=True)):
                attention = network.attention(encoded, number, captions[0].tokens)
                predictions.append(self._prediction(image, captions, attention))
        return predictions

    def _prediction(self, image: Tiled, captions: Sequence[Hypothesis], attention: NDArray[np.float32]) -> Prediction:
        from packtrain.recipes.caption.attention import attention_by_word, draw_attention

        vocabulary = self.pack.vocabulary
        written = text_prediction(
            vocabulary.decode([caption.tokens for caption in captions]), [caption.score for caption in captions]
        )
        words = attention_by_word(vocabulary, captions[0].tokens, attention)
        details = {"words": [{"word": word.word, "attention": word.map.round(4).tolist()} for word in words]}
        # It is drawn only if somebody asks for it: pixels are large, and drawing takes longer than the caption.
        return Prediction(
            written.text,
            written.details | details,
            draw_map=lambda: draw_attention(_all_pixels(image), written.text, words),
        )


def _all_pixels(image: Tiled) -> Pixels:
    return decode_box(image, Box(0, 0, image.width, image.height))


def _padded(rows: Sequence[Array]) -> NDArray[np.int64]:
    return pad(Ragged.from_rows([row.tolist() for row in rows], np.dtype("<u4")), np.arange(len(rows)), PAD)


def _captioner(model: nn.Module) -> Captioner:
    from packtrain.recipes.caption.model import Captioner

    assert isinstance(model, Captioner)
    return model


def _network(model: nn.Module | Network) -> CaptionNetwork[Any]:
    if isinstance(model, CaptionNetwork):
        return model
    from packtrain.recipes.caption.model import TorchCaptioner

    return TorchCaptioner(_captioner(cast("nn.Module", model)))
