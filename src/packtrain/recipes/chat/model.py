"""The dialogue Transformer: learned positions, and a last residual connection from the input embedding.

Shapes as in recipes/transformer.py.
"""

from __future__ import annotations

import math
from types import EllipsisType

from torch import Tensor, nn

from packtrain.recipes.chat.shape import ChatShape
from packtrain.recipes.transformer import Transformer, whole_tiles


class DialogueTransformer(Transformer):
    """Its softmax has weights of its own: with those of the embedding, the last residual would make every token
    its own likeliest successor.
    """

    def __init__(self, shape: ChatShape, vocabulary: int) -> None:
        super().__init__(shape, vocabulary)
        self.prompt_positions = nn.Embedding(shape.prompt, shape.width)
        self.reply_positions = nn.Embedding(shape.reply, shape.width)
        self.output = nn.Linear(shape.width, whole_tiles(vocabulary))
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def embed_source(self, tokens_BS: Tensor) -> Tensor:
        return self._placed(tokens_BS, self.prompt_positions.weight[: tokens_BS.shape[1]])

    def embed_target(self, tokens_BT: Tensor, first_position: int = 0) -> Tensor:
        last = first_position + tokens_BT.shape[1]
        return self._placed(tokens_BT, self.reply_positions.weight[first_position:last])

    def _placed(self, tokens_BL: Tensor, positions_LD: Tensor) -> Tensor:
        scaled = self.embedding(tokens_BL) * math.sqrt(self.shape.width)
        embedded: Tensor = self.dropout(scaled + positions_LD)
        return embedded

    def close(self, norm: nn.Module, last: Tensor, embedded: Tensor, at: Tensor | EllipsisType = ...) -> Tensor:
        closed: Tensor = embedded[at] + norm(last[at])
        return closed

    def logits(self, hidden: Tensor) -> Tensor:
        spoken: Tensor = self.output(hidden)
        return spoken
