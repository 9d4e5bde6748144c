"""Show, Attend and Tell: a recurrent network that looks at one part of the picture for every word it says.

Shapes: B pictures, P places of the encoder's map, C its channels, T positions of a caption, D width, A width of the
attention, V vocabulary, N all positions that are predicted. One embedding serves the input and the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.caption.shape import ENCODERS, Shape
from packtrain.recipes.decode import note_best, texts_of, told_apart
from packtrain.recipes.resnet import ResNet, normalised


class Told(NamedTuple):
    """What the model makes of captions that it is told: `logits` [N, V] for the tokens `wanted` [N].

    `places` [B, P] has how much each place was looked at over the whole caption.
    """

    logits: Tensor
    wanted: Tensor
    places: Tensor


@dataclass(frozen=True)
class Seen:
    """Pictures as the decoder sees them: `features` [B, P, C], and `keys` [B, P, A] that attention makes of them."""

    features: Tensor
    keys: Tensor

    def select(self, rows: Tensor) -> Seen:
        return Seen(self.features[rows], self.keys[rows])


class Captions(NamedTuple):
    """`tokens` [B, T] by length; `order` [B] has where each was before, `going` [T] how many are not over yet."""

    tokens: Tensor
    order: Tensor
    going: list[int]


def longest_first(tokens_BT: Tensor) -> Captions:
    lengths_B, order = (tokens_BT[:, 1:] != PAD).sum(1).sort(descending=True, stable=True)
    positions_T = torch.arange(tokens_BT.shape[1] - 1, device=lengths_B.device)
    return Captions(tokens_BT[order], order, (lengths_B[:, None] > positions_T).sum(0).tolist())


class Captioner(nn.Module):
    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        self.encoder_is_frozen = False
        self.encoder = ResNet(ENCODERS[shape.encoder])
        channels, width = self.encoder.shape.features, shape.width
        padded = -(-vocabulary // 8) * 8  # whole tiles for the matrix units of a GPU
        self.embedding = nn.Embedding(padded, width)
        self.bias = nn.Parameter(torch.zeros(padded))
        self.first_state = nn.Linear(channels, self._states * width)
        self.key = nn.Linear(channels, shape.attention)
        self.query = nn.Linear(width, shape.attention)
        self.attention = nn.Linear(shape.attention, 1, bias=False)  # a bias would add the same to every place
        self.gate = nn.Linear(width, channels)
        self.cell = (nn.GRUCell if shape.cell == "gru" else nn.LSTMCell)(width + channels, width)
        self.dropout = nn.Dropout(shape.dropout)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        if shape.is_published:
            self._fix_early_stages()

    @property
    def _states(self) -> int:
        return 1 if self.shape.cell == "gru" else 2

    def _fix_early_stages(self) -> None:
        """Those that are never tuned are no parameters of the run at all."""
        self.encoder.requires_grad_(False)
        stages = self.encoder.stages
        for stage in stages[len(stages) - self.shape.tuned_stages :]:
            stage.requires_grad_(True)

    def train(self, mode: bool = True) -> Self:
        """A published encoder keeps the statistics of its norms: a batch of captions' pictures would spoil them."""
        super().train(mode)
        if self.shape.is_published:
            self.encoder.eval()
        return self

    # Seeing.

    def see(self, pixels: Tensor) -> Seen:
        """Of bytes [B, height, width, RGB]."""
        x = normalised(pixels)
        if self.encoder_is_frozen:
            with torch.no_grad():
                maps = self.encoder.features(x)
            if self.training:
                maps = maps + _zero(self.encoder)
        else:
            maps = self.encoder.features(x)
        features_BPC = maps.flatten(2).transpose(1, 2)
        return Seen(features_BPC, self.key(features_BPC))

    def start(self, seen: Seen) -> Tensor:
        """The state before the first word: of the features' mean. That of an LSTM has its cell behind it."""
        return torch.tanh(self.first_state(seen.features.mean(1)))

    # Telling.

    def _look(self, state: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """What is seen when looking from a state, and how much of it comes from each place."""
        hidden_BD = state[:, : self.shape.width]
        scores_BP = self.attention(torch.relu(seen.keys + self.query(hidden_BD)[:, None])).squeeze(2)
        places_BP = scores_BP.softmax(1)
        context_BC = torch.bmm(places_BP[:, None], seen.features).squeeze(1)
        return torch.sigmoid(self.gate(hidden_BD)) * context_BC, places_BP

    def _advance(self, embedded_BD: Tensor, state: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """The state after one more token, and where was looked."""
        context_BC, places_BP = self._look(state, seen)
        inputs = torch.cat([embedded_BD, context_BC], dim=1)
        if isinstance(self.cell, nn.LSTMCell):
            hidden, memory = state.chunk(2, dim=1)
            return torch.cat(self.cell(inputs, (hidden, memory)), dim=1), places_BP
        return self.cell(inputs, state), places_BP

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.dropout(hidden), self.embedding.weight, self.bias)

    def forward(self, pixels: Tensor, tokens_BT: Tensor) -> Told:
        if len(pixels):
            captions = longest_first(tokens_BT)  # the host waits for their lengths: before a GPU has much to do
            return self.tell(self.see(pixels), captions)
        # A rank without a sample of the batch goes the same way, so that every parameter has a gradient: of zero.
        # What it sees comes after the encoder, whose norms would take a blank picture into their statistics.
        nothing = self.see(pixels)
        blank = nothing.features.new_zeros(1, *nothing.features.shape[1:])
        seen = Seen(torch.cat([nothing.features, blank]), torch.cat([nothing.keys, self.key(blank)]))
        told = self.tell(seen, longest_first(torch.tensor([[BOS, EOS]])))
        return Told(*(one[:0].clone() for one in told))  # no views: where weights are divided, torch warns of them

    def tell(self, seen: Seen, captions: Captions) -> Told:
        """Goes through captions that are known. Those that have ended leave, so that padding takes no time."""
        tokens_BT, order = captions.tokens.to(seen.keys.device), captions.order.to(seen.keys.device)
        seen = seen.select(order)
        embedded_BTD = self.dropout(self.embedding(tokens_BT[:, :-1]))
        state = self.start(seen)
        sums_BP = seen.keys.new_zeros(seen.keys.shape[:2])
        hidden, wanted = [], []
        for position, going in enumerate(captions.going):
            if going < len(state):
                state, seen = state[:going], Seen(seen.features[:going], seen.keys[:going])
            state, places_BP = self._advance(embedded_BTD[:going, position], state, seen)
            hidden.append(state[:, : self.shape.width])
            wanted.append(tokens_BT[:going, position + 1])
            sums_BP = sums_BP + F.pad(places_BP, (0, 0, 0, len(order) - going))
        return Told(self._logits(torch.cat(hidden)), torch.cat(wanted), sums_BP[order.argsort()])

    def step(self, tokens_B: Tensor, state: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the next token after `tokens_B`, the state then, and where was looked. PAD and BOS never follow."""
        state, places_BP = self._advance(self.dropout(self.embedding(tokens_B)), state, seen)
        logits_BV = self._logits(state[:, : self.shape.width])[:, : self.vocabulary]
        logits_BV[:, PAD] = logits_BV[:, BOS] = -torch.inf
        return logits_BV, state, places_BP


def _zero(module: nn.Module) -> Tensor:
    """Zero, with gradients of zero for all that learns: the exchange waits for those of every parameter."""
    total = torch.zeros(())
    for parameter in module.parameters():
        if parameter.requires_grad:
            total = total + 0.0 * parameter.sum()
    return total


# Search for a caption, and where the model looked for each of its tokens.


LONGEST_CAPTION = 50  # tokens, with the end mark


@torch.inference_mode()
def captions(model: Captioner, seen: Seen, beam: int, longest: int = LONGEST_CAPTION) -> list[list[int]]:
    """The tokens of the best caption found for each picture, without the end mark.

    A picture has `beam` hypotheses; one that ends is set aside and leaves one fewer to go on, until all have ended.
    The best is the one with the most log-probability per token, its end mark being one. K is the beam; rows of a
    picture stand together, so row b * K + k is hypothesis k of picture b.
    """
    device = seen.features.device
    pictures = torch.arange(len(seen.features), device=device)
    firsts, seen = pictures * beam, seen.select(pictures.repeat_interleave(beam))
    state = model.start(seen)
    scores_BK = torch.full((len(pictures), beam), -torch.inf, device=device)
    scores_BK[:, 0] = 0.0  # the first step starts from one hypothesis, not from K equal ones
    left_B = torch.full((len(pictures),), beam, device=device)
    history = torch.full((len(pictures) * beam, 1), BOS, device=device)
    best_scores = torch.full((len(pictures),), -torch.inf, device=device)
    best_BT = torch.full((len(pictures), longest), EOS, device=device)

    for position in range(longest if len(pictures) else 0):
        logits, state, _ = model.step(history[:, -1], state, seen)
        totals = scores_BK[:, :, None] + logits.float().log_softmax(-1).view(len(pictures), beam, -1)
        scores_BK, candidates = totals.flatten(1).topk(beam, dim=1)
        scores_BK = scores_BK.masked_fill(torch.arange(beam, device=device) >= left_B[:, None], -torch.inf)
        origins, tokens = candidates // logits.shape[-1], candidates % logits.shape[-1]
        ended = (tokens == EOS) & ~scores_BK.isneginf()

        ended_scores, ended_at = (scores_BK.masked_fill(~ended, -torch.inf) / (position + 1)).max(dim=1)
        winners = firsts + origins.gather(1, ended_at[:, None])[:, 0]
        note_best(best_BT, pictures, ended_scores > best_scores, history[winners, 1:])
        best_scores = torch.where(ended_scores > best_scores, ended_scores, best_scores)

        left_B = left_B - ended.sum(1)
        scores_BK, kept = scores_BK.masked_fill(ended, -torch.inf).sort(dim=1, descending=True, stable=True)
        origins, tokens = origins.gather(1, kept), tokens.gather(1, kept)
        parents = (firsts[:, None] + origins).flatten()
        history = torch.cat([history[parents], tokens.flatten()[:, None]], dim=1)
        state = state[parents]
        staying, leaving = told_apart(~scores_BK[:, 0].isneginf())
        if not staying:
            break
        if leaving:  # finished pictures leave, so that the last long one does not pay for all
            keep = torch.tensor(staying, device=device)
            rows = (keep[:, None] * beam + torch.arange(beam, device=device)).flatten()
            pictures, left_B, scores_BK, best_scores = (one[keep] for one in (pictures, left_B, scores_BK, best_scores))
            firsts, history, state, seen = firsts[: len(keep)], history[rows], state[rows], seen.select(rows)
    note_best(best_BT, pictures, best_scores.isneginf(), history[firsts, 1:])  # nothing ended within the limit
    return texts_of(best_BT)


@torch.inference_mode()
def places(model: Captioner, seen: Seen, tokens: list[int]) -> Tensor:
    """How much each place of one picture was looked at for each token: [tokens, P]."""
    state = model.start(seen)
    looked = []
    for token in [BOS, *tokens][: len(tokens)]:
        _, state, places_BP = model.step(torch.tensor([token], device=state.device), state, seen)
        looked.append(places_BP[0])
    return torch.stack(looked) if looked else seen.keys.new_zeros(0, seen.keys.shape[1])
