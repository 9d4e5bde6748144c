"""Show, Attend and Tell: a recurrent network that attends to a part of the image for every word.

Dimensions: B images, P positions of the encoder's map, C its channels, T tokens of a caption, D width, A width of the
attention, V vocabulary, N predicted tokens. Input and softmax share one embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from packtrain.data.order import Ids
from packtrain.pack.tiles import Pixels
from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.caption import ENCODERS, MAX_CAPTION_TOKENS, CaptionerShape, CaptionNetwork
from packtrain.recipes.decode import likely_on_device, sums_by_row
from packtrain.recipes.pairs import padded_to_8
from packtrain.recipes.recipe import Decoding, Hypothesis
from packtrain.recipes.resnet import ResNet, normalize
from packtrain.recipes.search import Candidates, Floats, Steps, narrowing_search


class TeacherForced(NamedTuple):
    """The model's output for given captions: `logits` [N, V] for the tokens `labels` [N].

    `attention` [B, P] is summed over the tokens of each caption.
    """

    logits: Tensor
    labels: Tensor
    attention: Tensor


@dataclass(frozen=True)
class EncodedImages:
    """Images after the encoder: `features` [B, P, C], and the attention's `keys` [B, P, A]."""

    features: Tensor
    keys: Tensor

    def select(self, rows: Tensor | slice) -> EncodedImages:
        return EncodedImages(self.features[rows], self.keys[rows])


class SortedCaptions(NamedTuple):
    """Captions by descending length: `tokens` [B, T], the `order` [B] that sorted them, and the number of captions
    that are `unfinished` at each of [T - 1] steps.
    """

    tokens: Tensor
    order: Tensor
    unfinished: list[int]


def sort_captions(tokens_BT: Tensor, unfinished: list[int] | None = None) -> SortedCaptions:
    """Sort captions; a host that does not know how many are `unfinished` at each step has to wait for the device."""
    lengths_B, order = (tokens_BT[:, 1:] != PAD).sum(1).sort(descending=True, stable=True)
    if unfinished is None:
        positions_T = torch.arange(tokens_BT.shape[1] - 1, device=lengths_B.device)
        unfinished = (lengths_B[:, None] > positions_T).sum(0).tolist()
    return SortedCaptions(tokens_BT[order], order, unfinished)


class Captioner(nn.Module):
    def __init__(self, shape: CaptionerShape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        self.encoder_is_frozen = False
        self.encoder = ResNet(ENCODERS[shape.encoder])
        channels, width = self.encoder.shape.features, shape.width
        self.embedding = nn.Embedding(padded_to_8(vocabulary), width)
        self.bias = nn.Parameter(torch.zeros(padded_to_8(vocabulary)))
        self.first_state = nn.Linear(channels, width if shape.cell == "gru" else 2 * width)
        self.key = nn.Linear(channels, shape.attention)
        self.query = nn.Linear(width, shape.attention)
        self.attention = nn.Linear(shape.attention, 1, bias=False)  # a bias would add the same to every position
        self.gate = nn.Linear(width, channels)
        self.cell = (nn.GRUCell if shape.cell == "gru" else nn.LSTMCell)(width + channels, width)
        self.dropout = nn.Dropout(shape.dropout)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        if shape.is_pretrained:  # stages that are never tuned get no gradient at all
            self.encoder.requires_grad_(False)
            stages = self.encoder.stages
            for stage in stages[len(stages) - shape.tuned_stages :]:
                stage.requires_grad_(True)

    def train(self, mode: bool = True) -> Self:
        """Keep a pretrained encoder's batch norms in evaluation mode: small batches would spoil their statistics."""
        super().train(mode)
        if self.shape.is_pretrained:
            self.encoder.eval()
        return self

    # Encoder.

    def encode(self, pixels: Tensor) -> EncodedImages:
        """Encode bytes [B, height, width, RGB]."""
        x = normalize(pixels)
        if self.encoder_is_frozen:
            with torch.no_grad():
                maps = self.encoder.features(x)
            if self.training:  # the gradient sync expects a gradient of every parameter that may learn later
                learning = (parameter for parameter in self.encoder.parameters() if parameter.requires_grad)
                maps = maps + sum(0.0 * parameter.sum() for parameter in learning)
        else:
            maps = self.encoder.features(x)
        features_BPC = maps.flatten(2).transpose(1, 2)
        return EncodedImages(features_BPC, self.key(features_BPC))

    # Decoder.

    def start(self, encoded: EncodedImages) -> Tensor:
        """Return the state before the first token, from the mean of the features. An LSTM's cell state comes second."""
        return torch.tanh(self.first_state(encoded.features.mean(1)))

    def attend(self, state: Tensor, encoded: EncodedImages) -> tuple[Tensor, Tensor]:
        """Return the context that a state attends to, and the attention over positions."""
        hidden_BD = state[:, : self.shape.width]
        scores_BP = self.attention(torch.relu(encoded.keys + self.query(hidden_BD)[:, None])).squeeze(2)
        attention_BP = scores_BP.softmax(1)
        context_BC = torch.bmm(attention_BP[:, None], encoded.features).squeeze(1)
        return torch.sigmoid(self.gate(hidden_BD)) * context_BC, attention_BP

    def advance(self, embedded_BD: Tensor, state: Tensor, encoded: EncodedImages) -> tuple[Tensor, Tensor]:
        """Return the state after one more token, and the attention for it."""
        context_BC, attention_BP = self.attend(state, encoded)
        inputs = torch.cat([embedded_BD, context_BC], dim=1)
        if isinstance(self.cell, nn.LSTMCell):
            hidden, memory = state.chunk(2, dim=1)
            return torch.cat(self.cell(inputs, (hidden, memory)), dim=1), attention_BP
        return self.cell(inputs, state), attention_BP

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.dropout(hidden), self.embedding.weight, self.bias)

    def forward(self, pixels: Tensor, tokens_BT: Tensor, unfinished: list[int] | None = None) -> TeacherForced:
        if len(pixels):
            captions = sort_captions(tokens_BT, unfinished)
            return self.teacher_force(self.encode(pixels), captions)
        # A rank without a sample takes the same path, so that every parameter has a gradient of zero. Its blank sample
        # enters after the encoder, whose batch norms would count a blank image in their statistics.
        nothing = self.encode(pixels)
        blank = nothing.features.new_zeros(1, *nothing.features.shape[1:])
        encoded = EncodedImages(torch.cat([nothing.features, blank]), torch.cat([nothing.keys, self.key(blank)]))
        forced = self.teacher_force(encoded, sort_captions(torch.tensor([[BOS, EOS]])))
        return TeacherForced(*(output[:0].clone() for output in forced))  # with FSDP, torch warns about views

    def teacher_force(self, encoded: EncodedImages, captions: SortedCaptions) -> TeacherForced:
        """Run through given captions. Finished captions leave the batch, so that padding costs no time."""
        tokens_BT, order = captions.tokens.to(encoded.keys.device), captions.order.to(encoded.keys.device)
        encoded = encoded.select(order)
        embedded_BTD = self.dropout(self.embedding(tokens_BT[:, :-1]))
        state = self.start(encoded)
        sums_BP = encoded.keys.new_zeros(encoded.keys.shape[:2])
        hidden, labels = [], []
        for position, unfinished in enumerate(captions.unfinished):
            if unfinished < len(state):
                state, encoded = state[:unfinished], encoded.select(slice(unfinished))
            state, attention_BP = self.advance(embedded_BTD[:unfinished, position], state, encoded)
            hidden.append(state[:, : self.shape.width])
            labels.append(tokens_BT[:unfinished, position + 1])
            sums_BP = sums_BP + F.pad(attention_BP, (0, 0, 0, len(order) - unfinished))
        return TeacherForced(self.logits(torch.cat(hidden)), torch.cat(labels), sums_BP[order.argsort()])

    def step(self, tokens_B: Tensor, state: Tensor, encoded: EncodedImages) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of the token after `tokens_B`, the next state, and the attention. PAD and BOS never follow."""
        state, attention_BP = self.advance(self.dropout(self.embedding(tokens_B)), state, encoded)
        logits_BV = self.logits(state[:, : self.shape.width])[:, : self.vocabulary]
        logits_BV[:, PAD] = logits_BV[:, BOS] = -torch.inf
        return logits_BV, state, attention_BP


class TorchCaptioner(CaptionNetwork[EncodedImages]):
    def __init__(self, model: Captioner) -> None:
        self._model, self._device = model, model.bias.device

    @torch.inference_mode()
    def encode(self, pixels: Pixels) -> EncodedImages:
        return self._model.encode(torch.from_numpy(pixels).to(self._device))

    @torch.inference_mode()
    def search(
        self, encoded: EncodedImages, beam: int, n_best: int = 1, longest: int = MAX_CAPTION_TOKENS
    ) -> list[list[Hypothesis]]:
        count = len(encoded.features)
        steps = TorchCaptionSteps(self._model, encoded.select(torch.arange(count).repeat_interleave(beam)))
        return narrowing_search(steps, count, beam, longest, n_best)

    @torch.inference_mode()
    def losses(self, encoded: EncodedImages, images: Ids, captions: NDArray[np.int64]) -> NDArray[np.float64]:
        ordered = sort_captions(torch.from_numpy(captions))
        forced = self._model.teacher_force(encoded.select(torch.from_numpy(images).to(self._device)), ordered)
        token_losses = F.cross_entropy(forced.logits.float(), forced.labels, reduction="none")
        rows = np.concatenate([ordered.order[:count].numpy() for count in ordered.unfinished])
        return sums_by_row(rows, token_losses, len(captions))

    @torch.inference_mode()
    def attention(self, encoded: EncodedImages, image: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        encoded = encoded.select(slice(image, image + 1))
        state, maps = self._model.start(encoded), []
        for token in [BOS, *tokens][: len(tokens)]:
            _, state, attention_BP = self._model.step(torch.tensor([token], device=self._device), state, encoded)
            maps.append(attention_BP[0])
        positions = encoded.keys.shape[1]
        side = math.isqrt(positions)
        attention_TP = torch.stack(maps) if maps else encoded.keys.new_zeros(0, positions)
        return attention_TP.float().cpu().numpy().reshape(len(tokens), side, side)


class TorchCaptionSteps(Steps):
    def __init__(self, model: Captioner, encoded: EncodedImages) -> None:
        super().__init__(Decoding())
        self._model, self._encoded, self._state = model, encoded, model.start(encoded)

    def logits(self, written_RT: Ids) -> Floats:
        return self._logits(written_RT).cpu().numpy()

    def candidates(self, written_RT: Ids, count: int) -> Candidates:
        return likely_on_device(self._logits(written_RT), count)

    def select(self, rows: Ids, same_sources: bool = False) -> None:
        places = torch.from_numpy(rows).to(self._state.device)
        self._state = self._state[places]
        if not same_sources:
            self._encoded = self._encoded.select(places)

    def _logits(self, written_RT: Ids) -> Tensor:
        last = torch.from_numpy(written_RT[:, -1].copy()).to(self._state.device)
        logits_RV, self._state, _ = self._model.step(last, self._state, self._encoded)
        return logits_RV.float()
