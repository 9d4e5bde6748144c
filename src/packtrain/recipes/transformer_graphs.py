"""The ONNX graphs of a Transformer: an encoder, and a decoder that a search calls for every token.

Dimensions: B sources, K hypotheses of each, S source positions, T new tokens, P places for earlier tokens, A = P + T,
N predicted positions, H heads, E width of a head, D width, V vocabulary padded to 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.export import Dim

from packtrain.recipes.graphs import OUTCOME, Graph, Input, ModelPart, outcome
from packtrain.recipes.transformer import DecoderLayer, Transformer


class TextEncoder(ModelPart[Transformer]):
    """From the tokens of sources to the mask that hides padding, and keys and values for each decoder layer."""

    def forward(self, source_BS: Tensor) -> tuple[Tensor, ...]:
        memory_BSD, mask_B11S = self.model.encode(source_BS)
        # Not Transformer.start: it takes the number of sources as a plain integer, which would be fixed in the graph.
        layers = [cast(DecoderLayer, layer) for layer in self.model.decoder]
        return mask_B11S, *(tensor for layer in layers for tensor in layer.memory_attention.project(memory_BSD))


class TextDecoder(ModelPart[Transformer]):
    """From new tokens of hypotheses to what may follow them.

    One graph for both uses, so that the weights are there once: a step of a search has one new token for each
    hypothesis, a loss has all tokens of a target and nothing earlier. `places_N` are the predicted positions, counted
    through all rows. Caches of a layer are the keys and values of the memory, then those of earlier tokens.
    """

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
        model = self.model
        embedded = model.embedding(tokens_BKT) * math.sqrt(model.shape.width) + model.target_positions(positions_T)
        is_earlier_TT = positions_T[:, None] >= positions_T
        mask_TA = torch.cat([is_written_P.expand(positions_T.shape[0], -1), is_earlier_TT], dim=1)
        x, new_caches = embedded, list[Tensor]()
        for number, layer in enumerate(model.decoder):
            x, keys, values = _decode(cast(DecoderLayer, layer), x, mask_TA, mask_B11S, caches[4 * number :][:4])
            new_caches += [keys, values]
        hidden_ND = model.finish(model.decoder_norm, x.flatten(0, 2), embedded.flatten(0, 2), places_N)
        return *outcome(model.logits(hidden_ND), offsets_V, labels_N), *new_caches


def _decode(
    layer: DecoderLayer, x_BKTD: Tensor, mask_TA: Tensor, mask_B11S: Tensor, caches: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a layer makes of new tokens, and their keys and values."""
    memory_keys, memory_values, keys, values = caches
    attention, heads = layer.attention, layer.attention.heads
    normed = layer.attention_norm(x_BKTD)
    queries = _split(attention.query(normed), heads)
    new_keys, new_values = (_split(projected, heads) for projected in attention.key_value(normed).chunk(2, dim=-1))
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


def graphs_of(model: Transformer) -> dict[str, Graph]:
    source_length = Dim("length", max=model.longest_source)
    source = Input(torch.full((2, 3), model.vocabulary - 1), {0: Dim("sources"), 1: source_length})
    encoder = Graph(TextEncoder(model), {"source": source}, ["mask", *_layers(model, "memory_keys memory_values")])
    sources, beam, length, new_tokens = Dim("sources"), Dim("beam"), Dim("length"), Dim("new")
    earlier, predicted = Dim("earlier"), Dim("predicted")
    heads, width = model.shape.heads, model.shape.width // model.shape.heads
    memory = Input(torch.zeros(2, heads, 4, width), {0: sources, 2: length})
    written = Input(torch.zeros(2, 3, heads, 6, width), {0: sources, 1: beam, 3: earlier})
    names = _layers(model, "memory_keys memory_values keys values")
    inputs = {
        "tokens": Input(torch.full((2, 3, 5), model.vocabulary - 1), {0: sources, 1: beam, 2: new_tokens}),
        "positions": Input(torch.arange(5), {0: new_tokens}),
        "places": Input(torch.arange(7), {0: predicted}),
        "labels": Input(torch.zeros(7, dtype=torch.int64), {0: predicted}),
        "offsets": Input(torch.zeros(len(model.embedding.weight)), {}),
        "is_written": Input(torch.ones(6, dtype=torch.bool), {0: earlier}),
        "mask": Input(torch.ones(2, 1, 1, 4, dtype=torch.bool), {0: sources, 3: length}),
    }
    caches = {name: memory if name.startswith("memory") else written for name in names}
    decoder = Graph(TextDecoder(model), inputs | caches, [*OUTCOME, *_layers(model, "new_keys new_values")])
    return {"encoder": encoder, "decoder": decoder}
