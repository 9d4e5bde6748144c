"""The sizes a dialogue model comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.recipes.shapes import Shape


@dataclass(frozen=True)
class ChatShape(Shape):
    """`prompt` and `reply` are the most tokens of either, the mark of its end among them: each has a learned position.

    A prompt is the last `turns` of what was said; what does not fit is cut off at its beginning.
    """

    prompt: int = 15
    reply: int = 16
    turns: int = 2


# Tiny learns in minutes on two CPU cores.
SIZES: Mapping[str, ChatShape] = {
    "tiny": ChatShape(128, 4, 512, 2, 2, 0.0, 0.0),
    "small": ChatShape(256, 4, 1024, 3, 3, 0.1, 0.0),
    "full": ChatShape(1024, 16, 4096, 6, 6, 0.1, 0.1),
}
