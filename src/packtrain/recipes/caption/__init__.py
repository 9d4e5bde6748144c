"""Captions: Show, Attend and Tell, measured by BLEU and CIDEr on what it says freely about pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from packtrain.data.order import Ids, Stream, philox_words
from packtrain.data.pack import Pack, pad
from packtrain.errors import FieldMistake
from packtrain.job.job import Job
from packtrain.pack.shard import Array, Ragged
from packtrain.pack.tiles import Tiled
from packtrain.pack.vocabulary import PAD
from packtrain.recipes.caption.images import CaptionedBatches, pressed, whole_of
from packtrain.recipes.caption.scores import BLEU_SIGNATURE, CIDER_SIGNATURE, Cider, bleu_of, counted
from packtrain.recipes.caption.shape import shape_of
from packtrain.recipes.images import Copies, Pictured, read_picture
from packtrain.recipes.recipe import Batch, Decoding, EvaluationRequest, Measurement, Prediction, Scores
from packtrain.run.records import Sample

if TYPE_CHECKING:
    from torch import Tensor, nn

    from packtrain.recipes.caption.model import Captioner, Seen

_SEEN_TOGETHER = 32  # pictures: bounds the memory of an evaluation
_SHOWN_SAMPLES = 5
_LAST_EPOCH = 1 << 40


@dataclass(frozen=True)
class _Truth:
    """The captions of a split as texts, and what CIDEr learns from all of them, however few samples are decoded.

    Each source of a mix has a CIDEr of its own, which is what it would be of that source alone.
    """

    references: list[list[str]]
    cider: Cider
    by_source: dict[str, tuple[range, Cider]]


class Caption(Pictured[CaptionedBatches]):
    """Batches are counted in samples, because which of its captions a picture has changes from epoch to epoch.

    A sample's loss is the sum over its tokens, divided by the mean length of all captions: a constant, so that the
    batch's mean is that of the tokens but for chance, and does not depend on how the batch is divided.
    """

    contents = frozenset({"captions"})
    kind = "captions"
    measure_of_best = "cider"
    files = ("weights",)
    heeds = frozenset({"beam"})
    decoding = Decoding(beam=5)
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
                    # Adam has seen no gradient of a frozen encoder: its first steps would be several times too long.
                    {"until": "5.2 epochs", "rate": [1e-5, 1e-4]},
                    {"until": "15 epochs", "rate": 1e-4},
                ],
            },
            "clip": 5.0,
            "min_scale": 0.7,
        },
        "evaluate": {"every": "1 epochs", "beam": 5},
    }

    def __init__(self, job: Job, pack: Pack) -> None:
        super().__init__(job, pack)
        self._shape = shape_of(job.model)
        self._copies = Copies(pack, job.data.sizes, CaptionedBatches)

    @property
    def copies(self) -> Copies[CaptionedBatches]:
        return self._copies

    @classmethod
    def check(cls, job: Job) -> None:
        shape = shape_of(job.model)
        if job.train.optimizer.decay > 0 and shape.is_frozen(0) and shape.tuned_stages:
            raise FieldMistake(
                "train.optimizer", "its decay would shrink the frozen encoder; leave it out, or set frozen_epochs to 0"
            )

    # The data.

    @property
    def width(self) -> int:
        return self._shape.width

    @cached_property
    def _mean_tokens(self) -> float:
        """Of a training caption, with its end mark."""
        split = self.pack.split("train")
        captions = int(split.lengths("caption_lengths").sum())
        return float(split.lengths("captions").sum() - captions) / max(1, captions)

    def _captions(self, split: str, sample: int) -> list[Array]:
        shard, row = self.pack.split(split).at(sample)
        ends = np.cumsum(shard.ragged["caption_lengths"][row], dtype=np.int64)
        return np.split(shard.ragged["captions"][row], ends[:-1])

    def _drawn(self, sample: int, epoch: int, turn: int) -> Array:
        """The caption that a picture has in a turn of an epoch."""
        captions = self._captions("train", sample)
        word = int(philox_words(1, self.job.train.seed, epoch, sample, Stream.CAPTIONS, turn=turn)[0])
        return captions[word % len(captions)]

    def batch(self, ids: Ids, epoch: int, repeats: Ids | None = None) -> dict[str, NDArray[Any]]:
        train = self.job.train
        now = train.in_epoch(epoch)
        pixels = self._copies.batches("train", now.size).random(
            ids, train.seed, epoch, now.size, now.min_scale, repeats
        )
        turns = [0] * len(ids) if repeats is None else repeats.tolist()
        drawn = [self._drawn(sample, epoch, turn) for sample, turn in zip(ids.tolist(), turns, strict=True)]
        return {"pixels": pixels, "tokens": _padded(drawn)}

    # Learning.

    def build_model(self) -> nn.Module:
        from packtrain.recipes.caption.model import Captioner

        return Captioner(self._shape, len(self.pack.vocabulary))

    def first_weights(self, model: nn.Module) -> dict[str, Tensor]:
        from packtrain.recipes.resnet import published

        if not self._shape.is_published:
            return {}
        own = _captioner(model).encoder.state_dict()
        found = published(self.pack.given_file(self._shape.weights), own, "model.weights")
        return {f"encoder.{name}": tensor for name, tensor in found.items()}

    def prepare(self, epoch: int, model: nn.Module) -> None:
        _captioner(model).encoder_is_frozen = self._shape.is_frozen(epoch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from torch.nn.functional import cross_entropy

        told = model(batch["pixels"], batch["tokens"])
        smoothing = self.job.train.label_smoothing
        tokens = cross_entropy(told.logits.float(), told.wanted, label_smoothing=smoothing, reduction="sum")
        penalty = (1 - told.places.float()).square().mean(1).sum()
        loss: Tensor = tokens / self._mean_tokens + self._shape.penalty * penalty
        return loss

    # Evaluation.

    def measure(self, model: nn.Module, request: EvaluationRequest) -> Measurement:
        import torch
        from torch.nn.functional import cross_entropy

        from packtrain.recipes.caption.model import captions, longest_first

        captioner = _captioner(model)
        loss, tokens = 0.0, 0
        outputs: list[str] = []
        with torch.inference_mode():
            for part, seen in self._seen(captioner, request, request.ids):
                rows = [self._captions(request.split, sample) for sample in part.tolist()]
                picture = np.repeat(np.arange(len(part)), [len(own) for own in rows])
                told_of = longest_first(torch.from_numpy(_padded([row for own in rows for row in own])))
                told = captioner.tell(seen.select(torch.from_numpy(picture).to(captioner.bias.device)), told_of)
                loss += float(cross_entropy(told.logits.float(), told.wanted, reduction="sum"))
                tokens += len(told.wanted)
            for _, seen in self._seen(captioner, request, request.decode_ids):
                outputs += self.pack.vocabulary.decode(captions(captioner, seen, request.beam))
        return Measurement({"loss": loss, "tokens": float(tokens)}, outputs)

    def _seen(self, model: Captioner, request: EvaluationRequest, ids: Ids) -> Iterator[tuple[Ids, Seen]]:
        import torch

        size = self.job.train.in_epoch(request.epoch).size
        for start in range(0, len(ids), _SEEN_TOGETHER):
            request.on_batch()
            part = ids[start : start + _SEEN_TOGETHER]
            pixels = torch.from_numpy(self._copies.batches(request.split, size).whole(part, size))
            yield part, model.see(pixels.to(model.bias.device))

    def score(self, split: str, decode_ids: Ids, parts: Sequence[Measurement]) -> Scores:
        """With several sources, each has scores of its own besides: a mix says little about its parts."""
        tokens = sum(part.sums["tokens"] for part in parts)
        values = {"loss": sum(part.sums["loss"] for part in parts) / max(1.0, tokens)}
        outputs = [output for part in parts for output in part.outputs]
        if not outputs:
            return Scores(values)
        truth = self._truth(split)
        wanted = [truth.references[sample] for sample in decode_ids.tolist()]
        counts = [counted(output, truths) for output, truths in zip(outputs, wanted, strict=True)]
        values |= {f"bleu{order}": score for order, score in enumerate(bleu_of(counts), 1)}
        values["cider"] = truth.cider.score(outputs, wanted)
        for name, (samples_of_it, cider) in truth.by_source.items():
            chosen = [at for at, sample in enumerate(decode_ids.tolist()) if sample in samples_of_it]
            if chosen:
                values[f"bleu4_{name}"] = bleu_of([counts[at] for at in chosen])[-1]
                values[f"cider_{name}"] = cider.score([outputs[at] for at in chosen], [wanted[at] for at in chosen])
        samples = tuple(
            Sample(f"{split} picture {sample}", " / ".join(truths), output)
            for sample, truths, output in zip(decode_ids[:_SHOWN_SAMPLES].tolist(), wanted, outputs, strict=False)
        )
        return Scores(values, {"bleu4": BLEU_SIGNATURE, "cider": CIDER_SIGNATURE}, samples)

    @cached_property
    def _truths(self) -> dict[str, _Truth]:
        return {}

    def _truth(self, split: str) -> _Truth:
        if split not in self._truths:
            rows = [self._captions(split, sample) for sample in range(self.count(split))]
            texts = iter(self.pack.vocabulary.decode([row.tolist() for own in rows for row in own]))
            references = [[next(texts) for _ in own] for own in rows]
            parts = self._by_source(split)
            ciders = [Cider(references[part.start : part.stop]) for part in parts.values()]
            by_source = dict(zip(parts, zip(parts.values(), ciders, strict=True), strict=True))
            self._truths[split] = _Truth(references, Cider.joined(ciders) if parts else Cider(references), by_source)
        return self._truths[split]

    def _by_source(self, split: str) -> dict[str, range]:
        """The samples of each source of a mix, by its kind; numbered where a kind comes twice."""
        kinds = [source.kind for source in getattr(self.job.data, split)]
        if len(kinds) < 2:
            return {}
        names = [kind if kinds.count(kind) == 1 else f"{kind}{number}" for number, kind in enumerate(kinds, 1)]
        ends = np.cumsum([0, *self.pack.manifest.splits[split].sources]).tolist()
        return {name: range(start, end) for name, (start, end) in zip(names, pairwise(ends), strict=True)}

    # Predictions.

    def predict(self, model: nn.Module, inputs: Sequence[str], decoding: Decoding) -> list[Prediction]:
        """A caption for each picture, with what was looked at for each of its words, also as a picture."""
        pictures = [read_picture(path) for path in inputs]
        return [self._told(_captioner(model), picture, decoding.beam) for picture in pictures]

    def _told(self, model: Captioner, picture: Tiled, beam: int) -> Prediction:
        import torch

        from packtrain.recipes.caption.attention import by_word, drawn
        from packtrain.recipes.caption.model import captions, places

        pixels, size = whole_of(picture), self.job.train.in_epoch(_LAST_EPOCH).size
        with torch.inference_mode():
            seen = model.see(torch.from_numpy(pressed(pixels, size))[None].to(model.bias.device))
            tokens = captions(model, seen, beam)[0]
            looked = places(model, seen, tokens).float().cpu().numpy()
        text = self.pack.vocabulary.decode([tokens])[0]
        side = -(-size // model.encoder.shape.reduction)
        gazes = by_word(self.pack.vocabulary, tokens, looked.reshape(len(tokens), side, side))
        details = {"words": [{"word": gaze.word, "looked": gaze.map.round(4).tolist()} for gaze in gazes]}
        return Prediction(text, details, drawn(pixels, text, gazes))


def _padded(rows: Sequence[Array]) -> NDArray[np.int64]:
    return pad(Ragged.from_rows([row.tolist() for row in rows], np.dtype("<u4")), np.arange(len(rows)), PAD)


def _captioner(model: nn.Module) -> Captioner:
    from packtrain.recipes.caption.model import Captioner

    assert isinstance(model, Captioner)
    return model
