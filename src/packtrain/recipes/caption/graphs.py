"""The ONNX graphs of a captioner: an encoder of images, and a decoder that a search calls for every token.

Dimensions: B images, K hypotheses of each, Q positions, F features, A width of the attention, D width of a state,
N predicted positions, V vocabulary padded to 8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

from packtrain.recipes.caption.model import Captioner
from packtrain.recipes.graphs import OUTCOME, Graph, Input, ModelPart, outcome
from packtrain.recipes.resnet import example_pixels


class ImageEncoder(ModelPart[Captioner]):
    """From bytes to features, the keys of the attention, and the state before the first token."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        encoded = self.model.encode(pixels)
        return encoded.features, encoded.keys, self.model.start(encoded)


class CaptionDecoder(ModelPart[Captioner]):
    """From the last token of each hypothesis to what may follow it, the next state, and the attention."""

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
        following = outcome(model.logits(state[:, :width]), offsets_V, labels_N)
        return *following, state.view(state_BKD.shape), attention_BKQ


def graphs_of(model: Captioner) -> dict[str, Graph]:
    encoder = Graph(ImageEncoder(model), {"pixels": example_pixels(model.encoder)}, ["features", "keys", "state"])
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
    decoder = Graph(CaptionDecoder(model), inputs, [*OUTCOME, "next_state", "attention"])
    return {"encoder": encoder, "decoder": decoder}
