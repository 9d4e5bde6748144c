"""The Transformer of "Attention Is All You Need", with layer norm before the layers.

Dimensions: B sentences, S source and T target positions, L positions of either, D width, V vocabulary, N predicted
positions; in a search K hypotheses of each sentence, R rows of all of them. Source, target and softmax share one
embedding. A subclass may embed, finish or compute logits differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import EllipsisType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packtrain.pack.vocabulary import BOS, PAD
from packtrain.recipes.pairs import TransformerShape, padded_to_8

LOGIT_BYTES = 256 << 20  # of logits that exist at the same time while training


@dataclass
class DecoderCache:
    """Keys and values that a decoder layer keeps between the steps of a search.

    Those of the source are there once for all of its hypotheses, whose rows are adjacent and equally many for each
    source. `written` has those of the tokens written so far, together, so that a step copies one tensor.
    """

    memory_keys: Tensor
    memory_values: Tensor
    written: Tensor

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows alone, of these sources; None if each row stays with its source."""
        # Much faster than indexing, which does not copy whole rows at once.
        self.written = self.written.index_select(0, rows)
        if sources is not None:
            self.memory_keys = self.memory_keys.index_select(0, sources)
            self.memory_values = self.memory_values.index_select(0, sources)


class Attention(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.attention_dropout
        self.query = nn.Linear(shape.width, shape.width)
        self.key_value = nn.Linear(shape.width, 2 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def _split(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        return x_BLD.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def project(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        return self.divide(self.key_value(memory_BSD))

    def divide(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of each head from both in one tensor."""
        keys, values = projected.chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def forward(self, x_BTD: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        attended = F.scaled_dot_product_attention(
            self._split(self.query(x_BTD)),
            keys,
            values,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        merged: Tensor = self.output(attended.transpose(1, 2).reshape(x_BTD.shape))
        return merged


class FeedForward(nn.Sequential):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(
            nn.Linear(shape.width, shape.feedforward),
            nn.ReLU(inplace=True),
            nn.Dropout(shape.dropout),
            nn.Linear(shape.feedforward, shape.width),
        )


class EncoderLayer(nn.Module):
    varying_sizes = ((0, 1), (0, 3))

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.feedforward_norm, self.feedforward = nn.LayerNorm(shape.width), FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BSD: Tensor, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x_BSD)
        x_BSD = x_BSD + self.dropout(self.attention(normed, *self.attention.project(normed), mask))
        output: Tensor = x_BSD + self.dropout(self.feedforward(self.feedforward_norm(x_BSD)))
        return output


class DecoderLayer(nn.Module):
    varying_sizes = ((0, 1), (0, 1), (0, 3))

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.memory_norm, self.memory_attention = nn.LayerNorm(shape.width), Attention(shape)
        self.feedforward_norm, self.feedforward = nn.LayerNorm(shape.width), FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTD: Tensor, memory_BSD: Tensor, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x_BTD)
        attended = self.attention(normed, *self.attention.project(normed), None, causal=True)
        return self._rest(x_BTD + self.dropout(attended), *self.memory_attention.project(memory_BSD), mask)

    def start(self, memory_BSD: Tensor) -> DecoderCache:
        batch, _, width = memory_BSD.shape  # not len(), which would fix the size of an exported graph
        written = memory_BSD.new_empty(batch, 0, 2 * width)  # nothing has been written yet
        return DecoderCache(*self.memory_attention.project(memory_BSD), written)

    def step(self, x_R1D: Tensor, cache: DecoderCache, mask: Tensor) -> Tensor:
        normed = self.attention_norm(x_R1D)
        cache.written = torch.cat([cache.written, self.attention.key_value(normed)], dim=1)
        # No causal mask: the cache has no later positions.
        x_R1D = x_R1D + self.attention(normed, *self.attention.divide(cache.written), None)
        # The hypotheses of a source attend to its memory together, as if they were positions of one text.
        x_BKD = x_R1D.reshape(cache.memory_keys.shape[0], -1, x_R1D.shape[2])
        return self._rest(x_BKD, cache.memory_keys, cache.memory_values, mask).reshape(x_R1D.shape)

    def _rest(self, x_BTD: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        attended = self.memory_attention(self.memory_norm(x_BTD), keys, values, mask)
        x_BTD = x_BTD + self.dropout(attended)
        output: Tensor = x_BTD + self.dropout(self.feedforward(self.feedforward_norm(x_BTD)))
        return output


class Transformer(nn.Module):
    def __init__(self, shape: TransformerShape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(padded_to_8(vocabulary), shape.width)
        self.encoder = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.encoder_layers))
        self.encoder_norm = nn.LayerNorm(shape.width)
        self.decoder = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.decoder_layers))
        self.decoder_norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # Multiplied by sqrt(width) where it embeds, so that embeddings start with a variance of 1.
        nn.init.normal_(self.embedding.weight, std=self.shape.width**-0.5)

    @property
    def longest_source(self) -> int | None:
        """The most tokens that a source may have; None if there is no limit."""
        return None

    def target_positions(self, positions_T: Tensor) -> Tensor:
        """Return what the embedding of target tokens at these positions adds to them."""
        return sinusoids(positions_T, self.shape.width)

    def embed_source(self, tokens_BS: Tensor) -> Tensor:
        return self._embed(tokens_BS, 0)

    def embed_target(self, tokens_BT: Tensor, first_position: int = 0) -> Tensor:
        return self._embed(tokens_BT, first_position)

    def _embed(self, tokens_BL: Tensor, first_position: int) -> Tensor:
        positions_L = torch.arange(first_position, first_position + tokens_BL.shape[1], device=tokens_BL.device)
        scaled = self.embedding(tokens_BL) * math.sqrt(self.shape.width)
        embedded: Tensor = self.dropout(scaled + sinusoids(positions_L, self.shape.width))
        return embedded

    def finish(self, norm: nn.Module, last: Tensor, embedded: Tensor, at: Tensor | EllipsisType = ...) -> Tensor:  # noqa: ARG002
        """Return the output of a stack of layers at some positions; `embedded` is what went into the stack."""
        finished: Tensor = norm(last[at])
        return finished

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight)

    def encode(self, source_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the source's states, and the mask that hides padding from attention."""
        mask_B11S = (source_BS != PAD)[:, None, None, :]
        x_BSD = embedded_BSD = self.embed_source(source_BS)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, mask_B11S)
        return self.finish(self.encoder_norm, x_BSD, embedded_BSD), mask_B11S

    def forward(
        self,
        source_BS: Tensor,
        target_BT: Tensor,
        predicted_N: Tensor,
        labels_N: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return logits for some positions, one row each; positions count through all rows of the target.

        With labels, return the sum of their losses instead, without all logits in memory at once.
        """
        # The softmax over the vocabulary is the largest part of the work, so padding is left out before it.
        memory_BSD, mask_B11S = self.encode(source_BS)
        x_BTD = embedded_BTD = self.embed_target(target_BT)
        for layer in self.decoder:
            x_BTD = layer(x_BTD, memory_BSD, mask_B11S)
        hidden_ND = self.finish(self.decoder_norm, x_BTD.flatten(0, 1), embedded_BTD.flatten(0, 1), predicted_N)
        return self.logits(hidden_ND) if labels_N is None else self._loss(hidden_ND, labels_N, label_smoothing)

    def _loss(self, hidden_ND: Tensor, labels_N: Tensor, label_smoothing: float) -> Tensor:
        def loss(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = self.logits(hidden).float()
            return F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="sum")

        rows = max(1, LOGIT_BYTES // (4 * padded_to_8(self.vocabulary)))
        if len(labels_N) <= rows:
            return loss(hidden_ND, labels_N)
        # Logits, their softmax and its gradient take 10 GB for 25,000 tokens of 32,000 pieces. A part's logits are
        # computed again for its gradient, and so exist for one part at a time.
        chunks = zip(torch.split(hidden_ND, rows), torch.split(labels_N, rows), strict=True)
        losses = [checkpoint(loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.stack(losses).sum()

    def start(self, memory_BSD: Tensor) -> list[DecoderCache]:
        return [cast(DecoderLayer, layer).start(memory_BSD) for layer in self.decoder]

    def step(self, tokens_R: Tensor, position: int, caches: list[DecoderCache], mask_B11S: Tensor) -> Tensor:
        """Return the logits of the token after `tokens_R`, which are at `position`. PAD and BOS never follow.

        The tokens are those of the same number of hypotheses for each source.
        """
        x_R1D = embedded_R1D = self.embed_target(tokens_R[:, None], position)
        for layer, cache in zip(self.decoder, caches, strict=True):
            x_R1D = cast(DecoderLayer, layer).step(x_R1D, cache, mask_B11S)
        hidden_R1D = self.finish(self.decoder_norm, x_R1D, embedded_R1D)
        logits_RV = self.logits(hidden_R1D[:, 0])
        logits_RV[:, PAD] = logits_RV[:, BOS] = -torch.inf
        logits_RV[:, self.vocabulary :] = -torch.inf  # what pads it to 8
        return logits_RV


def sinusoids(positions_L: Tensor, width: int) -> Tensor:
    """Return these rows of the paper's position table."""
    rates = torch.exp(torch.arange(0, width, 2, device=positions_L.device) * (-math.log(10000.0) / width))
    angles = positions_L[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
