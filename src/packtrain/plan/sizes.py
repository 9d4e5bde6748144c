"""The size of a built-in recipe's model by arithmetic, for a client that must not take the time to import torch.

`tests/plan/test_sizes.py` compares the numbers of parameters with those of the models themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from packtrain.job.job import Job
from packtrain.pack.kind import kind_of
from packtrain.pack.manifest import Manifest
from packtrain.plan.workload import DataSize, ModelSize, estimated_data

if TYPE_CHECKING:
    from packtrain.recipes.images import ResNetShape
    from packtrain.recipes.pairs import TransformerShape

# Each recipe is imported where it is used: a client needs only that of its job, and has it already.

_PASSES = 3  # operations of a step by those of its forward pass
_CAPTION_TOKENS = 12.0  # of an average caption


def known_model(job: Job, manifest: Manifest) -> ModelSize | None:
    """Return the size of the job's model; None for a recipe of the user's own."""
    return built_in_model(job, int(manifest.settings.get("vocabulary", 0)), len(manifest.classes))


def built_in_model(job: Job, vocabulary: int, classes: int) -> ModelSize | None:
    """Return the size of the job's model with so many pieces or classes; None for a recipe of the user's own."""
    find = _MODELS.get(job.recipe or "")
    return None if find is None else find(job, vocabulary, classes)


def known_data(job: Job, manifest: Manifest) -> DataSize:
    """Return the size of the data as far as the manifest tells; the tokens of pairs follow from the size of shards."""
    train = manifest.splits["train"]
    size, cost = sum(shard.bytes for shard in train.shards), kind_of(manifest.kind).mean_cost(train)
    valid, test = (manifest.splits[name].samples if name in manifest.splits else 0 for name in ("valid", "test"))
    return estimated_data(job, train.sources, [cost] * len(train.sources), size, valid, test)


def _padded(vocabulary: int) -> int:
    return -(-vocabulary // 8) * 8


def _transformer(shape: TransformerShape, vocabulary: int) -> ModelSize:
    from packtrain.recipes.pairs import LOGITS_HELD

    width, inner = shape.width, shape.feedforward
    attention, norm = 4 * width * width + 4 * width, 2 * width
    feedforward = 2 * width * inner + inner + width
    layers = shape.encoder_layers * (attention + feedforward + 2 * norm)
    layers += shape.decoder_layers * (2 * attention + feedforward + 3 * norm)
    embedding = _padded(vocabulary) * width
    count = embedding + layers + 2 * norm
    # For one target token there is about one source token; of both, each layer keeps its inputs and those inside.
    layer, logits = 12 * width + 2 * inner, LOGITS_HELD * _padded(vocabulary)
    kept = (shape.encoder_layers + 2 * shape.decoder_layers) * layer + logits
    inputs = (shape.encoder_layers + shape.decoder_layers) * width
    flops, least = 2.0 * _PASSES * (layers + embedding), inputs + 2 * layer + logits
    outputs = 4.0 * LOGITS_HELD * _padded(vocabulary)
    return ModelSize(count, count, 0, flops, 4.0 * kept, 2.0 * layers, 4.0 * least, "transformer", outputs)


def _translate(job: Job, vocabulary: int, _: int) -> ModelSize:
    from packtrain.recipes.translate import Translate

    return _transformer(Translate.shape_of(job), vocabulary)


def _chat(job: Job, vocabulary: int, _: int) -> ModelSize:
    from packtrain.recipes.chat import Chat

    shape = Chat.shape_of(job)
    plain, padded = _transformer(shape, vocabulary), _padded(vocabulary)
    more = (shape.prompt + shape.reply) * shape.width + padded * shape.width + padded
    return replace(plain, parameters=plain.parameters + more, trained=plain.trained + more)


def _convolutions(shape: ResNetShape) -> Iterator[tuple[int, int, int, int]]:
    """Yield inputs, outputs, kernel and total stride of each convolution; a norm follows each."""
    large = shape.stem == "large"
    yield 3, shape.width, 7 if large else 3, 2 if large else 1
    inputs, stride = shape.width, 4 if large else 1
    for number, depth in enumerate(shape.depths):
        width = shape.width << number
        outputs = width * (4 if shape.block == "bottleneck" else 1)
        for block in range(depth):
            before, halves = stride, number > 0 and block == 0
            stride *= 2 if halves else 1
            if shape.block == "bottleneck":
                yield inputs, width, 1, before
                yield width, width, 3, stride
                yield width, outputs, 1, stride
            else:
                yield inputs, width, 3, stride
                yield width, width, 3, stride
            if halves or inputs != outputs:
                yield inputs, outputs, 1, stride
            inputs = outputs


def _resnet(shape: ResNetShape, pixels: int) -> ModelSize:
    """Return the size without a last layer; operations and activations are for one image."""
    weights = buffers = 0
    flops = kept = most = 0.0
    for inputs, outputs, kernel, stride in _convolutions(shape):
        positions = max(1, pixels // stride) ** 2
        weights += inputs * outputs * kernel * kernel + 2 * outputs
        buffers += 2 * 4 * outputs + 8
        flops += 2.0 * _PASSES * inputs * outputs * kernel * kernel * positions
        own = 2 * 4.0 * outputs * positions
        kept, most = kept + own, max(most, own)
    # Of each convolution its input and that of its norm are kept; of a block, the input alone.
    depth = 3 if shape.block == "bottleneck" else 2
    least = min(kept, kept / (2 * depth) + depth * most)
    return ModelSize(weights, weights, buffers, flops, kept, flops / _PASSES, least, shape.block)


def _classify(job: Job, _: int, classes: int) -> ModelSize:
    from packtrain.recipes.classify import SIZES, classifier_options

    options = classifier_options(job.model)
    shape = replace(SIZES[job.model.size], width=options.width, stem=options.stem)
    plain, last = _resnet(shape, job.train.in_epoch(0).size), (shape.features + 1) * classes
    return replace(plain, parameters=plain.parameters + last, trained=plain.trained + last)


def _caption(job: Job, vocabulary: int, _: int) -> ModelSize:
    from packtrain.recipes.caption import ENCODERS, captioner_shape

    shape = captioner_shape(job.model)
    encoder = ENCODERS[shape.encoder]
    channels, width, padded = encoder.features, shape.width, _padded(vocabulary)
    plain, gates = _resnet(encoder, job.train.in_epoch(0).size), 3 if shape.cell == "gru" else 4
    decoder = padded * width + padded + (channels + 1) * (width if shape.cell == "gru" else 2 * width)
    decoder += (channels + 1) * shape.attention + (width + 1) * shape.attention + shape.attention
    decoder += (width + 1) * channels + gates * width * (2 * width + channels + 2)
    trained = decoder + (plain.trained if not shape.is_pretrained else 0)
    if shape.is_pretrained:  # only the last stages are ever tuned
        kept = encoder.depths[: len(encoder.depths) - shape.tuned_stages]
        trained += plain.trained - _resnet(replace(encoder, depths=kept), 1).parameters if kept else plain.trained
    flops = plain.flops / (_PASSES if shape.is_frozen(0) else 1) + 2.0 * _PASSES * _CAPTION_TOKENS * decoder
    return replace(
        plain,
        parameters=plain.parameters + decoder,
        trained=trained,
        flops=flops,
        block_flops=0.0 if shape.is_frozen(0) else plain.block_flops,
    )


_MODELS: Mapping[str, Callable[[Job, int, int], ModelSize]] = {
    "translate": _translate,
    "chat": _chat,
    "classify": _classify,
    "caption": _caption,
}
