"""A job to start from that classifies images, with toy data: shapes in four colors."""

from __future__ import annotations

from importlib.resources import files as resources

import numpy as np

from packtrain.recipes.template import COLORS, SHAPES, Files, JobTemplate, blank, draw, png


def shapes() -> Files:
    """Return images of one shape each, in a folder per shape."""
    random = np.random.default_rng(2)
    drawn: Files = {}
    for shape in SHAPES:
        for split, count in (("train", 90), ("valid", 10)):
            for number in range(count):
                file = _shape(random, shape)
                while file in drawn.values():  # an image must not be in both splits
                    file = _shape(random, shape)
                drawn[f"{split}/{shape}/{number:02d}.png"] = file
    return drawn


def _shape(random: np.random.Generator, shape: str) -> bytes:
    image = blank(40)
    color = list(COLORS)[random.integers(len(COLORS))]
    radius = random.uniform(9, 15)
    across, down = random.uniform(radius + 2, 38 - radius, 2)
    draw(image, shape, color, (across, down), radius)
    return png(image)


TEMPLATE = JobTemplate(
    "classify an image",
    resources(__package__) / "job.yaml",
    "imagenet",
    ("$split",),
    shapes,
    example="$data/valid/star/00.png",
)
