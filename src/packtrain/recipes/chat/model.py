"""The dialogue Transformer: learned positions, and a final residual connection from the input embedding.

Dimensions as in recipes/transformer.py.
"""

from __future__ import annotations

import math
from types import EllipsisType

from torch import Tensor, nn

from packtrain.recipes.chat import ChatShape
from packtrain.recipes.pairs import padded_to_8
from packtrain.recipes.transformer import Transformer


class DialogueTransformer(Transformer):
    """The softmax has weights of its own: with those of the embedding, the final residual would make every token
    its own most likely successor.
    """

    def __init__(self, shape: ChatShape, vocabulary: int) -> None:
        super().__init__(shape, vocabulary)
        self.prompt_positions = nn.Embedding(shape.prompt, shape.width)
        self.reply_positions = nn.Embedding(shape.reply, shape.width)
        self.output = nn.Linear(shape.width, padded_to_8(vocabulary))
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    @property
    def longest_source(self) -> int:
        return len(self.prompt_positions.weight)

    def target_positions(self, positions_T: Tensor) -> Tensor:
        positions: Tensor = self.reply_positions(positions_T)
        return positions

    def embed_source(self, tokens_BS: Tensor) -> Tensor:
        return self._embed_at(tokens_BS, self.prompt_positions.weight[: tokens_BS.shape[1]])

    def embed_target(self, tokens_BT: Tensor, first_position: int = 0) -> Tensor:
        last = first_position + tokens_BT.shape[1]
        return self._embed_at(tokens_BT, self.reply_positions.weight[first_position:last])

    def _embed_at(self, tokens_BL: Tensor, positions_LD: Tensor) -> Tensor:
        scaled = self.embedding(tokens_BL) * math.sqrt(self.shape.width)
        embedded: Tensor = self.dropout(scaled + positions_LD)
        return embedded

    def finish(self, norm: nn.Module, last: Tensor, embedded: Tensor, at: Tensor | EllipsisType = ...) -> Tensor:
        finished: Tensor = embedded[at] + norm(last[at])
        return finished

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(hidden)
        return logits
