"""The sizes a translation model comes in."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.recipes.shapes import Shape

# Tiny learns in minutes on two CPU cores; there it sees its data once or twice, and dropout only slows it.
SIZES: Mapping[str, Shape] = {
    "tiny": Shape(128, 4, 512, 3, 2, 0.0, 0.0),
    "small": Shape(256, 4, 1024, 3, 3, 0.1, 0.0),
    "base": Shape(512, 8, 2048, 6, 6, 0.1, 0.1),
    "big": Shape(1024, 16, 4096, 6, 6, 0.3, 0.1),
}
