"""The sizes that a ResNet comes in. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Block = Literal["basic", "bottleneck"]
Stem = Literal["large", "small"]


@dataclass(frozen=True)
class ResNetShape:
    """Blocks in each stage, the width of the first stage, and how pictures enter.

    The large stem makes them four times smaller, the small one keeps them as they are: for sets of 32 pixels or so.
    Every stage but the first makes them two times smaller again, and is two times wider. With a quiet start every block
    begins as its shortcut alone, which a deep network learns better from.
    """

    block: Block
    depths: tuple[int, ...]
    width: int = 64
    stem: Stem = "large"
    quiet_start: bool = True

    @property
    def features(self) -> int:
        """Channels of the last stage."""
        return (self.width << len(self.depths) - 1) * (4 if self.block == "bottleneck" else 1)

    @property
    def reduction(self) -> int:
        """How many times smaller than the picture the last map is, on each side."""
        return (4 if self.stem == "large" else 1) << len(self.depths) - 1


RESNETS: Mapping[str, ResNetShape] = {
    "resnet18": ResNetShape("basic", (2, 2, 2, 2)),
    "resnet34": ResNetShape("basic", (3, 4, 6, 3)),
    "resnet50": ResNetShape("bottleneck", (3, 4, 6, 3)),
    "resnet101": ResNetShape("bottleneck", (3, 4, 23, 3)),
}
