"""The parts of trained models that become ONNX graphs, as torch modules with example inputs.

A search calls a graph for every token, and a graph has no state. So what a step needs goes in and comes out: keys and
values of the tokens written so far, or the state of a recurrent network. Hypotheses of one source share its memory.

Dimensions: B sources, K hypotheses of each, S source positions, T new tokens, P places for earlier tokens, A = P + T,
N predicted positions, H heads, E width of a head, D width, V vocabulary padded to 8, C candidates; for images Q
positions, F features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from packtrain.errors import Mistake
from packtrain.recipes.caption.model import Captioner
from packtrain.recipes.chat.model import DialogueTransformer
from packtrain.recipes.resnet import ResNet, normalize
from packtrain.recipes.transformer import DecoderLayer, Transformer

CANDIDATES = 16
"""Tokens that a step returns for each hypothesis, the most likely first: a beam of 8 looks at as many."""

_OUTCOME = ("logits", "candidates", "candidate_scores", "label_scores")


@dataclass(frozen=True)
class Input:
    """An example of an input, and its dimensions whose size is free; a Dim of two inputs is the same size in both."""

    example: Tensor
    free: Mapping[int, Dim]


@dataclass(frozen=True)
class Graph:
    """A module with its inputs and outputs by name. The examples have no size of 1, which torch would take as fixed."""

    module: nn.Module
    inputs: Mapping[str, Input]
    outputs: Sequence[str]


class PlainArguments(nn.Module):
    """A module whose arguments are one list, so that torch describes the sizes of all modules alike."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)


def graphs_of(model: nn.Module) -> dict[str, Graph]:
    """Return the graphs of a model by the name of their file."""
    if isinstance(model, Transformer):
        return {"encoder": _text_encoder(model), "decoder": _text_decoder(model)}
    if isinstance(model, Captioner):
        return {"encoder": _image_encoder(model), "decoder": _caption_decoder(model)}
    if isinstance(model, ResNet):
        return {"classifier": Graph(Classifier(model), {"pixels": _pixels(model)}, ["logits"])}
    raise Mistake(f"{type(model).__name__}: ONNX export does not know this model")


def _outcome(logits_NV: Tensor, offsets_V: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
    """Return the logits, the best candidates with their log-probabilities, and those of the labels.

    `offsets_V` are added to the logits: a search forbids tokens with them, a loss does not.
    """
    logits_NV = logits_NV + offsets_V
    scores_NV = logits_NV.log_softmax(1)
    best = scores_NV.topk(min(CANDIDATES, scores_NV.shape[1]))
    return logits_NV, best.indices, best.values, scores_NV.gather(1, labels_N[:, None]).squeeze(1)


# Text to text.


class ByteEmbedding(nn.Module):
    """An embedding whose rows are bytes, each row with a scale: quantization by ONNX Runtime leaves them as floats.

    `weight` has the floats: a softmax with the same weights is quantized there.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        scales = embedding.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("codes", (embedding.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, tokens: Tensor) -> Tensor:
        codes, scales = cast(Tensor, self.codes), cast(Tensor, self.scales)
        return codes[tokens].float() * scales[tokens]


def with_byte_embedding(model: nn.Module) -> nn.Module:
    """Return a copy of a model that writes texts with a smaller embedding; any other model as it is."""
    if not isinstance(model, (Transformer, Captioner)):
        return model
    small = copy.deepcopy(model)
    small.add_module("embedding", ByteEmbedding(model.embedding))
    return small


class TextEncoder(nn.Module):
    """From the tokens of sources to the mask that hides padding, and keys and values for each decoder layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source_BS: Tensor) -> tuple[Tensor, ...]:
        memory_BSD, mask_B11S = self.model.encode(source_BS)
        # Not Transformer.start: it takes the number of sources as a plain integer, which would be fixed in the graph.
        layers = [cast(DecoderLayer, layer) for layer in self.model.decoder]
        return mask_B11S, *(one for layer in layers for one in layer.memory_attention.project(memory_BSD))


class TextDecoder(nn.Module):
    """From new tokens of hypotheses to what may follow them.

    One graph for both uses, so that the weights are there once: a step of a search has one new token for each
    hypothesis, a loss has all tokens of a target and nothing earlier. `places_N` are the predicted positions, counted
    through all rows. Caches of a layer are the keys and values of the memory, then those of earlier tokens.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_BKT: Tensor,
        positions_T: Tensor,
        places_N: Tensor,
        labels_N: Tensor,
        offsets_V: Tensor,
        is_written_P: Tensor,
        mask_B11S: Tensor,
        *caches: Tensor,
    ) -> tuple[Tensor, ...]:
        embedded = self._embed(tokens_BKT, positions_T)
        is_earlier_TT = positions_T[:, None] >= positions_T
        mask_TA = torch.cat([is_written_P.expand(positions_T.shape[0], -1), is_earlier_TT], dim=1)
        x, made = embedded, list[Tensor]()
        for number, layer in enumerate(self.model.decoder):
            x, keys, values = _decode(cast(DecoderLayer, layer), x, mask_TA, mask_B11S, caches[4 * number :][:4])
            made += [keys, values]
        hidden_ND = self.model.finish(self.model.decoder_norm, x.flatten(0, 2), embedded.flatten(0, 2), places_N)
        return *_outcome(self.model.logits(hidden_ND), offsets_V, labels_N), *made

    def _embed(self, tokens_BKT: Tensor, positions_T: Tensor) -> Tensor:
        model = self.model
        if isinstance(model, DialogueTransformer):
            places_TD = model.reply_positions(positions_T)
        else:
            width = model.shape.width
            rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
            angles = positions_T[:, None].float() * rates
            places_TD = torch.cat([angles.sin(), angles.cos()], dim=1)
        embedded: Tensor = model.embedding(tokens_BKT) * math.sqrt(model.shape.width) + places_TD
        return embedded


def _decode(
    layer: DecoderLayer, x_BKTD: Tensor, mask_TA: Tensor, mask_B11S: Tensor, caches: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a layer makes of new tokens, and their keys and values."""
    memory_keys, memory_values, keys, values = caches
    attention, heads = layer.attention, layer.attention.heads
    normed = layer.attention_norm(x_BKTD)
    queries = _split(attention.query(normed), heads)
    new_keys, new_values = (_split(one, heads) for one in attention.key_value(normed).chunk(2, dim=-1))
    # The two products apart, and only the small scores joined: so the keys and values of all tokens are never copied.
    scores = torch.cat([queries @ keys.transpose(-1, -2), queries @ new_keys.transpose(-1, -2)], dim=-1)
    weights = _softmax(scores, mask_TA, queries.shape[-1])
    earlier = keys.shape[3]
    attended = weights[..., :earlier] @ values + weights[..., earlier:] @ new_values
    x_BKTD = x_BKTD + attention.output(attended.transpose(2, 3).flatten(3))
    # All hypotheses of a source query its memory together.
    attention = layer.memory_attention
    queries = _split(attention.query(layer.memory_norm(x_BKTD)).flatten(1, 2), heads)
    weights = _softmax(queries @ memory_keys.transpose(-1, -2), mask_B11S, queries.shape[-1])
    x_BKTD = x_BKTD + attention.output((weights @ memory_values).transpose(1, 2).reshape(x_BKTD.shape))
    return x_BKTD + layer.feedforward(layer.feedforward_norm(x_BKTD)), new_keys, new_values


def _split(x: Tensor, heads: int) -> Tensor:
    """Divide the last dimension among heads, which come before the positions: [..., L, D] to [..., H, L, E]."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-2, -3)


def _softmax(scores: Tensor, mask: Tensor, width: int) -> Tensor:
    weights: Tensor = (scores * width**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return weights


def _layers(model: Transformer, names: str) -> list[str]:
    """Return some names for every decoder layer, in the order of the layers."""
    return [f"{name}_{number}" for number in range(len(model.decoder)) for name in names.split()]


def _text_encoder(model: Transformer) -> Graph:
    # A dialogue has so many positions; other sources may have any length.
    longest = len(model.prompt_positions.weight) if isinstance(model, DialogueTransformer) else None
    length = Dim("length", max=longest)
    source = Input(torch.full((2, 3), model.vocabulary - 1), {0: Dim("sources"), 1: length})
    return Graph(TextEncoder(model), {"source": source}, ["mask", *_layers(model, "memory_keys memory_values")])


def _text_decoder(model: Transformer) -> Graph:
    sources, beam, length, new = Dim("sources"), Dim("beam"), Dim("length"), Dim("new")
    earlier, predicted = Dim("earlier"), Dim("predicted")
    heads, width = model.shape.heads, model.shape.width // model.shape.heads
    memory = Input(torch.zeros(2, heads, 4, width), {0: sources, 2: length})
    written = Input(torch.zeros(2, 3, heads, 6, width), {0: sources, 1: beam, 3: earlier})
    names = _layers(model, "memory_keys memory_values keys values")
    inputs = {
        "tokens": Input(torch.full((2, 3, 5), model.vocabulary - 1), {0: sources, 1: beam, 2: new}),
        "positions": Input(torch.arange(5), {0: new}),
        "places": Input(torch.arange(7), {0: predicted}),
        "labels": Input(torch.zeros(7, dtype=torch.int64), {0: predicted}),
        "offsets": Input(torch.zeros(len(model.embedding.weight)), {}),
        "is_written": Input(torch.ones(6, dtype=torch.bool), {0: earlier}),
        "mask": Input(torch.ones(2, 1, 1, 4, dtype=torch.bool), {0: sources, 3: length}),
    }
    caches = {name: memory if name.startswith("memory") else written for name in names}
    return Graph(TextDecoder(model), inputs | caches, [*_OUTCOME, *_layers(model, "new_keys new_values")])


# Images.


class Classifier(nn.Module):
    """From bytes, as packs store them, to logits."""

    def __init__(self, model: ResNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(normalize(pixels))
        return logits


class ImageEncoder(nn.Module):
    """From bytes to features, the keys of the attention, and the state before the first token."""

    def __init__(self, model: Captioner) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        encoded = self.model.encode(pixels)
        return encoded.features, encoded.keys, self.model.start(encoded)


class CaptionDecoder(nn.Module):
    """From the last token of each hypothesis to what may follow it, the next state, and the attention."""

    def __init__(self, model: Captioner) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens_BK: Tensor,
        labels_N: Tensor,
        offsets_V: Tensor,
        state_BKD: Tensor,
        features_BQF: Tensor,
        keys_BQA: Tensor,
    ) -> tuple[Tensor, ...]:
        model, width = self.model, self.model.shape.width
        hidden_BKD = state_BKD[..., :width]
        # As Captioner.attend does, for all hypotheses of an image together.
        attended = torch.relu(keys_BQA[:, None] + model.query(hidden_BKD)[:, :, None])
        attention_BKQ = model.attention(attended).squeeze(3).softmax(2)
        context_BKF = torch.sigmoid(model.gate(hidden_BKD)) * (attention_BKQ @ features_BQF)
        inputs = torch.cat([model.embedding(tokens_BK), context_BKF], dim=2).flatten(0, 1)
        state = state_BKD.flatten(0, 1)
        if isinstance(model.cell, nn.LSTMCell):
            hidden, memory = state.chunk(2, dim=1)
            state = torch.cat(model.cell(inputs, (hidden, memory)), dim=1)
        else:
            state = model.cell(inputs, state)
        outcome = _outcome(model.logits(state[:, :width]), offsets_V, labels_N)
        return *outcome, state.view(state_BKD.shape), attention_BKQ


def _pixels(network: ResNet) -> Input:
    side = 2 * network.shape.total_stride
    blank = torch.zeros(2, side, side + 8, 3, dtype=torch.uint8)
    return Input(blank, {0: Dim("images"), 1: Dim("height"), 2: Dim("width")})


def _image_encoder(model: Captioner) -> Graph:
    return Graph(ImageEncoder(model), {"pixels": _pixels(model.encoder)}, ["features", "keys", "state"])


def _caption_decoder(model: Captioner) -> Graph:
    images, beam, predicted, positions = Dim("images"), Dim("beam"), Dim("predicted"), Dim("positions")
    features, width = model.encoder.shape.features, model.first_state.out_features
    inputs = {
        "tokens": Input(torch.full((2, 3), model.vocabulary - 1), {0: images, 1: beam}),
        "labels": Input(torch.zeros(6, dtype=torch.int64), {0: predicted}),
        "offsets": Input(torch.zeros(len(model.bias)), {}),
        "state": Input(torch.zeros(2, 3, width), {0: images, 1: beam}),
        "features": Input(torch.zeros(2, 5, features), {0: images, 1: positions}),
        "keys": Input(torch.zeros(2, 5, model.shape.attention), {0: images, 1: positions}),
    }
    return Graph(CaptionDecoder(model), inputs, [*_OUTCOME, "next_state", "attention"])
